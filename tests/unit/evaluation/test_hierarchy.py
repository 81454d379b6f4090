"""Accuracy at each level, and a threshold that keeps the risk."""

from __future__ import annotations

import numpy as np
import pytest

from trainer.evaluation import hierarchy
from trainer.models.served_student.class_tags import ClassTags
from trainer.models.served_student.student import to_probabilities

LABELS = ("gala", "granny", "kiwi", "milk")
FOOD = ClassTags(
    labels=LABELS, parents={"gala": "apple", "granny": "apple", "apple": "fruit", "kiwi": "fruit", "milk": "drinks"}
)


def logits(*rows: list[float]) -> np.ndarray:
    return np.log(np.array(rows))


def drawn(count: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Logits of a classifier that errs, and is too sure of itself."""
    draw = np.random.default_rng(seed)
    labels = draw.integers(0, 4, count)
    scores = draw.normal(size=(count, 4))
    scores[np.arange(count), labels] += 1.2
    return 2 * scores, labels


def test_answers_by_level():
    given = logits([0.7, 0.1, 0.1, 0.1], [0.7, 0.1, 0.1, 0.1], [0.7, 0.1, 0.1, 0.1], [0.7, 0.1, 0.1, 0.1])
    assert hierarchy.level_accuracies(FOOD, given, np.array([0, 1, 2, 3])) == {"1": 0.75, "2": 0.5, "3": 0.25}
    # Answers are counted at the level that they name.
    given = logits(
        [0.97, 0.01, 0.01, 0.01], [0.5, 0.45, 0.03, 0.02], [0.4, 0.2, 0.3, 0.1], [0.4, 0.1, 0.1, 0.4], [0.1, 0.1, 0.1, 0.7]
    )  # fmt: skip
    found = hierarchy.answers(FOOD.answering(risk=0.2, threshold=0.65), given, np.array([0, 2, 3, 3, 3]))
    assert found["named"] == {"1": pytest.approx(0.2), "2": pytest.approx(0.2), "3": pytest.approx(0.4)}
    assert found["none"] == pytest.approx(0.2)
    assert found["wrong"] == pytest.approx(0.4), "apple for a kiwi, and fruit for milk"


def test_the_threshold_keeps_the_risk():
    given, labels = drawn(400, seed=0)
    risk = 0.1

    def wrong(threshold: float) -> float:
        return hierarchy.answers(FOOD.answering(risk=risk, threshold=threshold), given, labels)["wrong"]

    chosen = hierarchy.choose_threshold(FOOD, given, labels, risk)
    assert wrong(0.0) > risk, "some answers have to become groups"
    assert 0.08 < wrong(chosen) <= risk
    confidences = np.unique(FOOD.confidences(to_probabilities(given)))
    smaller = confidences[confidences < chosen]
    # Number ceil((N + 1)(1 - risk)) = 361 of 400 leaves 39 of 400 wrong, and every smaller threshold at least one more.
    assert wrong(chosen) == 39 / 400
    assert min(wrong(float(threshold)) for threshold in smaller[-50:]) >= 40 / 400


@pytest.mark.parametrize("risk", [0.02, 0.1, 0.3])
def test_other_images_keep_the_risk(risk):
    measured = []
    for seed in range(40):
        threshold = hierarchy.choose_threshold(FOOD, *drawn(200, seed), risk)
        answering = FOOD.answering(risk=risk, threshold=threshold)
        measured.append(hierarchy.answers(answering, *drawn(2000, 1000 + seed))["wrong"])
    spread = np.std(measured) / np.sqrt(len(measured))
    assert risk - 1 / 201 - 3 * spread < np.mean(measured) < risk + 3 * spread


def test_too_few_images_for_risk_leave_nothing_sure_enough():
    given, labels = drawn(8, seed=0)
    assert hierarchy.choose_threshold(FOOD, given, labels, 0.1) == 1.0
    found = hierarchy.answers(FOOD.answering(risk=0.1, threshold=1.0), given, labels)
    assert found == {
        "risk": 0.1, "threshold": 1.0, "wrong": 0.0, "named": {"1": 0.0, "2": 0.0, "3": 0.0}, "none": 1.0,
    }  # fmt: skip
