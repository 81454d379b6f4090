import numpy as np
import pytest
from scipy.special import expit

from trainer.evaluation.average_precision import (
    average_precisions,
    choose_threshold,
    f1,
    fit_temperature,
    mean_average_precision,
)

GENERATOR = np.random.default_rng(0)
TARGETS = (GENERATOR.random((200, 4)) < [0.5, 0.1, 0.02, 0]).astype(np.uint8)
SCORES = TARGETS + GENERATOR.normal(0, 0.7, TARGETS.shape)


def test_it_is_the_mean_precision_at_the_place_of_each_image():
    for one in range(3):
        order = np.argsort(-SCORES[:, one])
        right = TARGETS[order, one] > 0
        precisions = np.cumsum(right) / np.arange(1, 201)
        assert average_precisions(SCORES, TARGETS)[one] == pytest.approx(precisions[right].mean())


def test_a_class_without_images_is_left_out():
    found = average_precisions(SCORES, TARGETS)
    assert np.isnan(found[3])
    assert mean_average_precision(SCORES, TARGETS) == pytest.approx(found[:3].mean())
    assert mean_average_precision(SCORES, np.zeros_like(TARGETS)) == 0


def test_f1_counts_all_decisions_together():
    named = np.array([[True, True], [False, False]])
    assert f1(named, np.array([[1, 0], [1, 0]], dtype=np.uint8)) == pytest.approx(2 * 1 / (2 + 2))
    assert f1(~named & named, np.zeros((2, 2), dtype=np.uint8)) == 1


def test_the_threshold_has_the_best_f1_of_all():
    probabilities = expit(4 * SCORES - 2)
    found = choose_threshold(probabilities, TARGETS)
    best = max(f1(probabilities > limit, TARGETS) for limit in np.unique(probabilities) - 1e-9)
    assert f1(probabilities > found, TARGETS) == pytest.approx(best)
    assert found not in probabilities


@pytest.mark.parametrize(
    ("probabilities", "targets", "expected"),
    [
        ([[0.9, 0.2]], [[1, 0]], 0.55),
        ([[0.9, 0.9, 0.1]], [[1, 0, 0]], 0.5),  # equal probabilities are named together
        ([[0.9, 0.8]], [[1, 1]], 0.4),
        ([[0.9, 0.8]], [[0, 0]], 0.5),
        (np.empty((0, 2)), np.empty((0, 2)), 0.5),
    ],
)
def test_the_threshold_lies_between_two_probabilities(probabilities, targets, expected):
    assert choose_threshold(np.array(probabilities), np.array(targets, dtype=np.uint8)) == pytest.approx(expected)


def test_the_temperature_makes_probabilities_frequencies():
    logits = GENERATOR.normal(-1, 2, (4000, 3))
    targets = (GENERATOR.random(logits.shape) < expit(logits)).astype(np.uint8)
    assert fit_temperature(3 * logits, targets) == pytest.approx(3, rel=0.1)
    assert fit_temperature(np.where(targets > 0, 5.0, -5.0), targets) == 1
    assert fit_temperature(np.empty((0, 3)), np.empty((0, 3))) == 1
