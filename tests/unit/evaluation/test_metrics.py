from __future__ import annotations

import math

import numpy as np
import pytest
import timm
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.sparse import csr_array
from scipy.special import expit
from sklearn.calibration import calibration_curve
from sklearn.metrics import log_loss, precision_score, recall_score, top_k_accuracy_score
from torch import nn

from tests.clocks import Clock
from trainer.config import GateSettings
from trainer.evaluation import metrics
from trainer.models.served_student.student import to_probabilities


def random_case(seed: int, images: int = 200, classes: int = 7):
    generator = np.random.default_rng(seed)
    logits = generator.normal(scale=3, size=(images, classes)).astype(np.float32)
    return logits, generator.integers(0, classes, images)


@pytest.mark.parametrize("k", [1, 2, 5, 7])
def test_top_k_agrees_with_scikit_learn(k):
    logits, labels = random_case(k)
    expected = 1.0 if k == 7 else top_k_accuracy_score(labels, logits, k=k, labels=range(7))
    assert metrics.top_k(logits, labels, k) == pytest.approx(expected)


@pytest.mark.parametrize(("images", "k"), [(0, 1), (3, 0), (3, 8)])
def test_top_k_refuses_what_is_not_defined(images, k):
    with pytest.raises(ValueError, match=f"top-{k} of {images} images"):
        metrics.top_k(np.zeros((images, 7)), np.zeros(images, dtype=np.int64), k)


@given(st.integers(0, 2**32 - 1))
@settings(max_examples=20, deadline=None)
def test_confusion_counts_each_image_and_precision_and_recall_are_scikit_learns(seed):
    logits, labels = random_case(seed)
    predicted = logits.argmax(axis=1)
    matrix = metrics.confusion_matrix(predicted, labels, 7)
    counts = np.zeros((7, 7), dtype=np.int64)
    for label, guess in zip(labels, predicted, strict=True):
        counts[label, guess] += 1
    np.testing.assert_array_equal(matrix.toarray(), counts)
    assert matrix.dtype == np.int64
    np.testing.assert_allclose(metrics.precision(matrix), precision_score(labels, predicted, average=None))
    np.testing.assert_allclose(metrics.recall(matrix), recall_score(labels, predicted, average=None))


def test_probabilities():
    probabilities = to_probabilities(np.array([[1e4, 0, -1e4], [-1e4, -1e4, -1e4]]))
    np.testing.assert_allclose(probabilities, [[1, 0, 0], [1 / 3, 1 / 3, 1 / 3]])
    # Probabilities are the softmax bit by bit.
    logits, _ = random_case(5)
    exponentials = np.exp(logits.astype(np.float64) - logits.max(axis=1, keepdims=True))
    np.testing.assert_array_equal(to_probabilities(logits), exponentials / exponentials.sum(axis=1, keepdims=True))


def test_temperature_is_that_by_which_logits_were_multiplied():
    generator = np.random.default_rng(0)
    right = generator.normal(0, 2, (20_000, 5))
    labels = np.array([generator.choice(5, p=one) for one in to_probabilities(right)])
    for factor in (0.4, 1.0, 3.0):
        assert metrics.fit_temperature(right * factor, labels) == pytest.approx(factor, rel=0.03)
    unknown = np.concatenate([labels, np.full(100, -1)])
    more = np.concatenate([right, generator.normal(0, 50, (100, 5))])
    assert metrics.fit_temperature(more, unknown) == metrics.fit_temperature(right, labels)


@pytest.mark.parametrize("labels", [[0, 1], [-1, -1], []])
def test_without_mistake_or_without_label_there_is_no_temperature(labels):
    logits = np.array([[2.0, 1.0], [0.0, 0.5]], dtype=np.float32)[: len(labels)]
    assert metrics.fit_temperature(logits, np.array(labels, dtype=np.int64)) == 1


def slow_calibration_error(logits: np.ndarray, labels: np.ndarray, bins: int) -> float:
    """Equation 3 of Guo et al. 2017, bin by bin and image by image."""
    error = 0.0
    for bin_index in range(bins):
        low, high = bin_index / bins, (bin_index + 1) / bins
        members = []
        for row, label in zip(logits.astype(float), labels, strict=True):
            exponentials = [np.exp(value - max(row)) for value in row]
            shares = [value / sum(exponentials) for value in exponentials]
            if low < max(shares) <= high:
                members.append((max(shares), float(shares.index(max(shares)) == label)))
        if members:
            confidence = sum(member[0] for member in members) / len(members)
            accuracy = sum(member[1] for member in members) / len(members)
            error += len(members) / len(labels) * abs(accuracy - confidence)
    return error


@pytest.mark.parametrize("bins", [1, 7, 15])
def test_calibration_error_agrees_with_a_slow_loop(bins):
    logits, labels = random_case(bins)
    assert metrics.calibration(logits, labels, bins).error == pytest.approx(
        slow_calibration_error(logits, labels, bins)
    )


def test_calibration():
    logits, labels = random_case(11, images=500, classes=2)
    probabilities, predicted = to_probabilities(logits), logits.argmax(axis=1)
    accuracy, confidence = calibration_curve(predicted == labels, probabilities.max(axis=1), n_bins=15)
    ours = metrics.calibration(logits, labels, 15)
    assert [one for one in ours.confidence if one is not None] == pytest.approx(list(confidence), abs=1e-12)
    assert [one for one in ours.accuracy if one is not None] == pytest.approx(list(accuracy), abs=1e-12)
    # Full confidence falls into the last bin.
    assert metrics.calibration(np.array([[1e4, 0.0]]), np.array([0]), 15).counts[-1] == 1


def test_equal_mass_bins_and_likelihood():
    logits, labels = random_case(3, images=100)
    given = metrics.answers(logits, labels)
    found = metrics.equal_mass_calibration(given, 10)
    assert found.counts == (10,) * 10
    order = np.argsort(given.confidence, kind="stable").reshape(10, 10)
    assert found.confidence == pytest.approx([given.confidence[rows].mean() for rows in order])
    assert found.accuracy == pytest.approx([given.right[rows].mean() for rows in order])
    assert found.error == pytest.approx(
        np.mean([abs(given.right[rows].mean() - given.confidence[rows].mean()) for rows in order])
    )
    assert metrics.equal_mass_calibration(metrics.answers(logits[:3], labels[:3]), 15).counts == (1, 1, 1)
    assert metrics.negative_log_likelihood(logits, labels) == pytest.approx(
        log_loss(labels, to_probabilities(logits), labels=range(7))
    )
    # A probability that is too small for a float is no infinite loss.
    assert metrics.negative_log_likelihood(np.array([[0.0, -2000.0]]), np.array([1])) == pytest.approx(2000)


def test_paired_difference_is_mcnemars_test():
    first = np.array([True] * 90 + [False] * 10)
    second = np.array([True] * 70 + [False] * 20 + [True] * 8 + [False] * 2)
    found = metrics.paired_difference(first, second)
    assert (found.only_first, found.only_second) == (20, 8)
    assert found.gain == pytest.approx(-0.12)
    tail = sum(math.comb(28, count) for count in range(9)) / 2**28
    assert found.p_value == pytest.approx(2 * tail)
    assert -0.25 < found.low < -0.12 < found.high < 0
    assert metrics.paired_difference(first, first).p_value == 1


def test_agreement_and_worst_confusions():
    teacher = np.array([[3, 1], [0, 1], [2, 5], [9, 1]])
    student = np.array([[2, 1], [1, 0], [1, 2], [5, 4]])
    assert metrics.agreement(student, teacher) == 0.75
    # Worst confusions come first and leave out what never happened.
    matrix = csr_array(np.array([[50, 2, 0], [0, 60, 7], [1, 0, 9]]))
    pairs = [(pair.truth, pair.predicted, pair.count) for pair in metrics.worst_confusions(matrix, 10)]
    assert pairs == [(1, 2, 7), (0, 1, 2), (2, 0, 1)]
    assert len(metrics.worst_confusions(matrix, 2)) == 2
    assert matrix[0, 0] == 50


@pytest.mark.parametrize(
    ("right", "count"), [(0, 1), (1, 1), (1, 2), (81, 263), (359, 360), (360, 360), (4321, 10_000)]
)
def test_wilson_interval_is_its_formula(right, count):
    share, z = right / count, 1.959963984540054
    spread = z * math.sqrt(share * (1 - share) / count + z**2 / (4 * count**2))
    bounds = [(share + z**2 / (2 * count) + side * spread) / (1 + z**2 / count) for side in (-1, 1)]
    assert metrics.wilson_interval(share, count) == pytest.approx(bounds, rel=0, abs=1e-12)


# ---------------------------------------------------------------------------------------------------------------------
# The gate

GATE = GateSettings(max_accuracy_drop=0.05, min_compression=10, max_latency_ms=20)
GOOD = {
    "teacher_score": 0.98,
    "student_score": 0.95,
    "teacher_parameters": 1000,
    "student_parameters": 50,
    "student_p95_ms": 12.5,
}


def judge(settings: GateSettings, **measured) -> list[str]:
    return [one.reason for one in metrics.judge(settings, **measured) if one.reason]


def test_every_condition_with_a_limit_is_shown_with_what_was_measured():
    gate = GATE.model_copy(update={"min_accuracy": 0.9, "min_knn_accuracy": 0.5, "max_latency_ms": 10})
    conditions = metrics.judge(gate, **GOOD, student_knn_top1=0.6)
    assert [(one.measured, one.limit, bool(one.reason)) for one in conditions] == [
        ("3.00 points", "at most 5.00 points", False),
        ("95.00%", "at least 90.00%", False),
        ("60.00%", "at least 50.00%", False),
        ("20.00 times", "at least 10 times", False),
        ("12.50 ms", "at most 10 ms", True),
    ]
    without = GateSettings(min_compression=0)
    assert [one.setting for one in metrics.judge(without, **GOOD)] == ["evaluate.gate.max_accuracy_drop"]


def test_gate_passes_at_its_limits():
    assert judge(GATE, **GOOD) == []
    # Compression and latency at the limit pass.
    assert judge(GATE, **GOOD | {"student_parameters": 100, "student_p95_ms": 20}) == []
    # Latency limit zero is no limit.
    assert judge(GATE.model_copy(update={"max_latency_ms": 0.0}), **GOOD | {"student_p95_ms": 1e6}) == []
    # All failed conditions are named.
    reasons = judge(GATE, **GOOD | {"student_score": 0.5, "student_parameters": 900, "student_p95_ms": 99})
    assert [reason.split(":")[0] for reason in reasons] == ["accuracy", "compression", "latency"]


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (
            {"student_score": 0.92},
            "accuracy: the student's test top-1 of 92.00% is 6.00 points below the teacher's 98.00%",
        ),
        ({"student_parameters": 200}, "compression: the student's 200 parameters are 5.00 times fewer"),
        ({"student_p95_ms": 20.01}, "latency: the student's p95 of 20.01 ms is over evaluate.gate.max_latency_ms = 20"),
    ],
)
def test_a_failed_condition_is_named_with_its_numbers(change, reason):
    (named,) = judge(GATE, **GOOD | change)
    assert reason in named


@pytest.mark.parametrize(("teacher", "student"), [(0.90, 0.85), (0.35, 0.30), (0.80, 0.99)])
def test_drop_at_limit_or_gain_passes(teacher, student):
    assert judge(GATE, **GOOD | {"teacher_score": teacher, "student_score": student}) == []


def test_gate_floors():
    gate = GATE.model_copy(update={"min_knn_accuracy": 0.7})
    assert judge(gate, **GOOD) == judge(gate, **GOOD, student_knn_top1=0.7) == []
    assert judge(gate, **GOOD, student_knn_top1=0.65) == [
        "accuracy: the k-NN top-1 of the student's embeddings is 65.00%, below evaluate.gate.min_knn_accuracy = 70.00%"
    ]
    # The floor of accuracy holds whatever the teacher does.
    gate = GATE.model_copy(update={"min_accuracy": 0.8})
    assert judge(gate, **GOOD | {"teacher_score": 0.8, "student_score": 0.8}) == []
    assert judge(gate, **GOOD | {"teacher_score": 0.1, "student_score": 0.1}) == [
        "accuracy: the student's test top-1 of 10.00% is below evaluate.gate.min_accuracy = 80.00%"
    ]


class Sleeper(nn.Module):
    """Takes a known time for a batch and remembers who was called when."""

    def __init__(self, clock: Clock, seconds: float, calls: list[tuple[str, int, bool]], name: str) -> None:
        super().__init__()
        self.clock, self.seconds, self.calls, self.name = clock, seconds, calls, name

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        self.calls.append((self.name, len(images), torch.is_inference_mode_enabled()))
        self.clock.pass_by(self.seconds)
        return images


@pytest.fixture
def measure(monkeypatch):
    """Measures two models by a clock of its own."""
    clock = Clock()
    monkeypatch.setattr(metrics, "time", clock)

    def run(runs: int = 10, batch_sizes: tuple[int, ...] = (1, 4)):
        calls: list[tuple[str, int, bool]] = []
        models = {
            "teacher": Sleeper(clock, 0.004, calls, "teacher"),
            "student": Sleeper(clock, 0.001, calls, "student"),
        }
        images = torch.zeros(3, 3, 8, 8, dtype=torch.uint8)
        return metrics.measure_latency(models, images, batch_sizes=batch_sizes, runs=runs), calls

    return run


def test_known_times_are_found(measure):
    latencies, _ = measure()
    for name, takes_ms in (("teacher", 4), ("student", 1)):
        for measured in latencies[name]:
            assert (measured.p50_ms, measured.p95_ms) == pytest.approx((takes_ms, takes_ms))
            assert measured.images_per_second == pytest.approx(measured.batch_size / (takes_ms / 1e3))


def test_a_real_model_takes_a_time():
    (measured,) = metrics.measure_latency({"model": nn.Flatten()}, torch.zeros(1, 3, 8, 8), batch_sizes=[2], runs=10)[
        "model"
    ]
    assert 0 < measured.p50_ms <= measured.p95_ms


def test_models_take_turns_in_inference_mode_with_whole_batches(measure):
    latencies, calls = measure(runs=12, batch_sizes=(2, 5))
    names = [name for name, _, _ in calls]
    assert set(names[::2]) == {"teacher"}
    assert set(names[1::2]) == {"student"}
    assert {size for _, size, _ in calls} == {2, 5}
    assert all(inference for _, _, inference in calls)
    assert [measured.batch_size for measured in latencies["student"]] == [2, 5]
    assert len(calls) > 2 * 2 * 12, "no warm-up"


@pytest.mark.parametrize(("size", "patch", "dim", "depth"), [(32, 8, 48, 2), (64, 16, 96, 3)])
def test_multiply_accumulates_of_a_vit_by_its_formula(size, patch, dim, depth):
    model = timm.create_model(
        "vit_tiny_patch16_224", img_size=size, patch_size=patch, embed_dim=dim, depth=depth, num_heads=2, num_classes=10
    )
    patches = (size // patch) ** 2
    tokens = patches + 1
    block = tokens * dim * 3 * dim + 2 * tokens**2 * dim + tokens * dim * dim + 2 * tokens * dim * 4 * dim
    expected = patches * 3 * patch**2 * dim + depth * block + dim * 10
    assert metrics.multiply_accumulates(model, torch.zeros(1, 3, size, size)) == expected


# ---------------------------------------------------------------------------------------------------------------------
# Where an image may have several classes

GENERATOR = np.random.default_rng(0)
TARGETS = (GENERATOR.random((200, 4)) < [0.5, 0.1, 0.02, 0]).astype(np.uint8)
SCORES = TARGETS + GENERATOR.normal(0, 0.7, TARGETS.shape)


def test_average_precision():
    for one in range(3):
        order = np.argsort(-SCORES[:, one])
        right = TARGETS[order, one] > 0
        precisions = np.cumsum(right) / np.arange(1, 201)
        assert metrics.average_precisions(SCORES, TARGETS)[one] == pytest.approx(precisions[right].mean())
    found = metrics.average_precisions(SCORES, TARGETS)
    assert np.isnan(found[3])
    assert metrics.mean_average_precision(SCORES, TARGETS) == pytest.approx(found[:3].mean())
    assert metrics.mean_average_precision(SCORES, np.zeros_like(TARGETS)) == 0


def test_f1_threshold():
    named = np.array([[True, True], [False, False]])
    assert metrics.f1(named, np.array([[1, 0], [1, 0]], dtype=np.uint8)) == pytest.approx(2 * 1 / (2 + 2))
    assert metrics.f1(~named & named, np.zeros((2, 2), dtype=np.uint8)) == 1
    # The threshold has the best f1 of all.
    probabilities = expit(4 * SCORES - 2)
    found = metrics.choose_threshold(probabilities, TARGETS)
    best = max(metrics.f1(probabilities > limit, TARGETS) for limit in np.unique(probabilities) - 1e-9)
    assert metrics.f1(probabilities > found, TARGETS) == pytest.approx(best)
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
    assert metrics.choose_threshold(np.array(probabilities), np.array(targets, dtype=np.uint8)) == pytest.approx(
        expected
    )


def test_the_temperature_of_each_class_makes_probabilities_frequencies():
    logits = GENERATOR.normal(-1, 2, (4000, 3))
    targets = (GENERATOR.random(logits.shape) < expit(logits)).astype(np.uint8)
    assert metrics.fit_temperature_by_class(3 * logits, targets) == pytest.approx(3, rel=0.1)
    assert metrics.fit_temperature_by_class(np.where(targets > 0, 5.0, -5.0), targets) == 1
    assert metrics.fit_temperature_by_class(np.empty((0, 3)), np.empty((0, 3))) == 1
