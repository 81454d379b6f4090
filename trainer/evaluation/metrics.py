"""Quality of a classifier's logits, its latency and operations, and whether a student is good enough to be promoted.

scipy and scikit-learn compute what they define in the same way; what is computed here differs from them, and says in what.

Shapes: N images, K classes. Labels are the index of each image's class, int64 [N]; where an image may have several classes, or none,
targets are 1 for its classes and 0 for the others, [N, K], and each class is found by itself.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
import numpy.typing as npt
import scipy.special
import torch
from scipy import optimize, sparse
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from trainer.config import GateSettings
from trainer.io.host import processor_name
from trainer.models.served_student.student import to_probabilities

if TYPE_CHECKING:
    from trainer.data.dataset import Targets

Floats = npt.NDArray[np.floating]
Ints = npt.NDArray[np.int64]
ConfusionMatrix: TypeAlias = sparse.csr_array
"""How many images of class i were taken for class j, int64 [K, K]; pairs that never happened take no memory."""
Shares = npt.NDArray[np.float64]  # of each class, [K]; NaN where there is nothing of which it would be a share


def top_k(logits: Floats, labels: Ints, k: int) -> float:
    """Compute the share of the images whose class is among the k largest logits; of equal logits the lower class comes first."""
    if len(labels) == 0 or not 1 <= k <= logits.shape[1]:
        raise ValueError(f"top-{k} of {len(labels)} images and {logits.shape[1]} classes is not defined")
    # scikit-learn's top_k_accuracy_score ranks the higher of two classes with equal logits first, but argmax, by which a student is
    # served, the lower; and for two classes it takes one column of scores only.
    best = np.argsort(-logits, axis=1, kind="stable")[:, :k]
    return float((best == labels[:, None]).any(axis=1).mean())


def agreement(logits: Floats, other: Floats) -> float:
    """Compute the share of the images for which both classifiers predict the same class."""
    return float((logits.argmax(axis=1) == other.argmax(axis=1)).mean())


@dataclass(frozen=True, kw_only=True)
class Answers:
    """What a model answers to each image, [N]."""

    labels: Ints
    predicted: Ints
    confidence: Shares  # probability of the predicted class
    label_confidence: Shares  # probability of the label

    @property
    def right(self) -> npt.NDArray[np.bool_]:
        """Whether each image was predicted as its class."""
        right: npt.NDArray[np.bool_] = self.predicted == self.labels
        return right


def answers(logits: Floats, labels: Ints) -> Answers:
    """Read a model's answers from its logits, [N, K]."""
    probabilities, rows = to_probabilities(logits), np.arange(len(labels))
    predicted: Ints = probabilities.argmax(axis=1)
    return Answers(
        labels=labels,
        predicted=predicted,
        confidence=probabilities[rows, predicted],
        label_confidence=probabilities[rows, labels],
    )


def negative_log_likelihood(logits: Floats, labels: Ints) -> float:
    """Compute the mean of -log p(label) in nats; from logits, since a probability may be too small for a float."""
    log_probabilities = scipy.special.log_softmax(logits.astype(np.float64), axis=1)
    return float(-log_probabilities[np.arange(len(labels)), labels].mean())


@dataclass(frozen=True, kw_only=True)
class PairedDifference:
    """Whether one model is right more often than another on the same images."""

    only_first: int  # images that only the first has right
    only_second: int
    gain: float  # accuracy of the second less that of the first
    low: float  # the 95 % interval of the gain
    high: float
    p_value: float


def paired_difference(first: npt.NDArray[np.bool_], second: npt.NDArray[np.bool_]) -> PairedDifference:
    """Compare which images two models have right, [N]: McNemar's exact test, and the interval of Agresti and Min (2005)."""
    from scipy import stats  # here, because it takes seconds to import

    lost, won, images = int((first & ~second).sum()), int((second & ~first).sum()), len(first)
    # A half an image is added to each of the four cells, so that few images do not give an interval of length 0.
    count, one, other = images + 2, lost + 0.5, won + 0.5
    middle = (other - one) / count
    spread = 1.959964 * np.sqrt((one + other) / count - middle**2) / np.sqrt(count)
    p_value = float(stats.binomtest(won, won + lost).pvalue) if won + lost else 1.0
    gain = (won - lost) / images
    return PairedDifference(
        only_first=lost,
        only_second=won,
        gain=gain,
        low=float(middle - spread),
        high=float(middle + spread),
        p_value=p_value,
    )


def confusion_matrix(predicted: Ints, labels: Ints, classes: int) -> ConfusionMatrix:
    """Count how often an image of class i was predicted as class j; rows are the truth."""
    pairs = sparse.coo_array((np.ones(len(labels), dtype=np.int64), (labels, predicted)), shape=(classes, classes))
    return pairs.tocsr()  # which adds up equal pairs


# scikit-learn computes precision and recall from labels and predictions; after an evaluation only the matrix is kept.


def precision(matrix: ConfusionMatrix) -> Shares:
    """Compute the share of the images predicted as a class that are of it; NaN for a class that was never predicted."""
    return ratios(matrix.diagonal(), matrix.sum(axis=0))


def recall(matrix: ConfusionMatrix) -> Shares:
    """Compute the share of the images of a class that were predicted as it; NaN for a class without images."""
    return ratios(matrix.diagonal(), matrix.sum(axis=1))


def ratios(some: npt.NDArray[Any], of: npt.NDArray[Any]) -> Shares:
    """Divide counts of each class, the smaller by the larger; 0 / 0 is NaN."""
    with np.errstate(invalid="ignore"):
        shares: Shares = some / of
    return shares


@dataclass(frozen=True, kw_only=True)
class Confusion:
    """A pair of classes of which one is predicted in place of the other."""

    truth: int
    predicted: int
    count: int  # images of class `truth` predicted as class `predicted`


def worst_confusions(matrix: ConfusionMatrix, count: int) -> list[Confusion]:
    """List the most frequent confusions, at most `count`, the worst first."""
    pairs = matrix.tocoo()  # row by row, so that equal counts keep the order of the classes
    wrong = np.flatnonzero((pairs.row != pairs.col) & (pairs.data > 0))
    worst = wrong[np.argsort(-pairs.data[wrong], kind="stable")[:count]]
    columns = (pairs.row[worst].tolist(), pairs.col[worst].tolist(), pairs.data[worst].tolist())
    return [
        Confusion(truth=truth, predicted=predicted, count=times)
        for truth, predicted, times in zip(*columns, strict=True)
    ]


@dataclass(frozen=True, kw_only=True)
class Calibration:
    """Confidence against accuracy in bins of confidence: of equal width, the right edge of each belonging to it, or of equal mass."""

    counts: tuple[int, ...]  # images in each bin
    confidence: tuple[float | None, ...]  # mean probability of the predicted class in each bin; None for an empty bin
    accuracy: tuple[float | None, ...]  # share of right predictions in each bin; None for an empty bin
    error: float  # expected calibration error: the bins' mean of |accuracy - confidence|, weighted by their images


def confidence_bins(confidences: Floats, bins: int) -> Ints:
    """Return the bin of each confidence, as `Calibration` has them: int64, of the same shape."""
    return np.clip(np.ceil(confidences * bins).astype(np.int64) - 1, 0, bins - 1)


def calibration(logits: Floats, labels: Ints, bins: int) -> Calibration:
    """Compute the expected calibration error and its bins (Guo et al., On Calibration of Modern Neural Networks, 2017)."""
    # scikit-learn's calibration_curve bins in the same way, but leaves out empty bins and does not return how many images each bin has,
    # by which the error is weighted.
    given = answers(logits, labels)
    return _binned(given, confidence_bins(given.confidence, bins), bins)


def equal_mass_calibration(given: Answers, bins: int) -> Calibration:
    """Compute the calibration error with bins of equally many images, so that none is empty and each is as certain as the others.

    Where nearly all confidences are close to 1, bins of equal width put all images into the last one (Nixon et al., Measuring Calibration
    in Deep Learning, 2019).
    """
    bins = min(bins, len(given.labels))
    ranks = np.empty(len(given.labels), dtype=np.int64)
    ranks[np.argsort(given.confidence, kind="stable")] = np.arange(len(given.labels))
    return _binned(given, ranks * bins // len(given.labels), bins)


def _binned(given: Answers, which: Ints, bins: int) -> Calibration:
    confidences, right = given.confidence, given.right
    counts: Ints = np.bincount(which, minlength=bins).astype(np.int64)
    confidence_sums = np.bincount(which, weights=confidences, minlength=bins)
    right_sums = np.bincount(which, weights=right, minlength=bins)
    return Calibration(
        counts=tuple(int(count) for count in counts),
        confidence=_means(confidence_sums, counts),
        accuracy=_means(right_sums, counts),
        error=float(np.abs(right_sums - confidence_sums).sum() / len(given.labels)),
    )


_TEMPERATURES = (0.05, 20.0)


def fit_temperature(logits: Floats, labels: Ints) -> float:
    """Choose the divisor of held-out logits [N, K] that makes the labels (-1: unknown) most probable (Guo et al. 2017).

    1 where no label is known, or where every prediction is right: then the smaller, the better, without end.
    """
    known = labels >= 0
    logits, labels = logits[known].astype(np.float64), labels[known]
    if (logits.argmax(axis=1) == labels).all():
        return 1.0

    def loss(log_temperature: float) -> float:
        scaled = logits * np.exp(-log_temperature)
        right = scaled[np.arange(len(labels)), labels]
        return float((scipy.special.logsumexp(scaled, axis=1) - right).mean())

    return best_temperature(loss)


def fit_temperature_by_class(logits: Floats, targets: Targets) -> float:
    """Fit a temperature as `fit_temperature` does, each class by itself; 1 where there are no images, or every class is right."""
    if ((logits > 0) == (targets > 0)).all():
        return 1.0
    signed = np.where(targets > 0, logits, -logits).astype(np.float64)

    def loss(log_temperature: float) -> float:
        return float(-scipy.special.log_expit(signed * np.exp(-log_temperature)).mean())

    return best_temperature(loss)


def best_temperature(loss: Callable[[float], float]) -> float:
    """Return the temperature with the least loss, which is given as a function of its logarithm."""
    found = optimize.minimize_scalar(loss, bounds=np.log(_TEMPERATURES), method="bounded")
    return float(np.exp(found.x))


def _means(sums: npt.NDArray[Any], counts: Ints) -> tuple[float | None, ...]:
    return tuple(float(total / count) if count else None for total, count in zip(sums, counts, strict=True))


def wilson_interval(share: float, count: int) -> tuple[float, float]:
    """Compute the 95 % interval of a share that was measured on `count` images (Wilson 1927)."""
    from scipy import stats  # here, because it takes seconds to import

    interval = stats.binomtest(round(share * count), count).proportion_ci(confidence_level=0.95, method="wilson")
    return float(interval.low), float(interval.high)


# ---- Where an image may have several classes


def average_precisions(scores: Floats, targets: Targets) -> Shares:
    """Compute the average precision of each class, [K]: the precision at the place of each of its images, in the mean.

    NaN for a class without images. scikit-learn's definition: without interpolation.
    """
    import sklearn.metrics  # here, because it takes seconds to import

    found = np.full(targets.shape[1], np.nan)
    for one in np.flatnonzero(targets.any(axis=0)):
        found[one] = sklearn.metrics.average_precision_score(targets[:, one], scores[:, one])
    return found


def mean_average_precision(scores: Floats, targets: Targets) -> float:
    """Compute the mean of the average precision over the classes that have images (mAP); 0 where none has."""
    return mean_of_known(average_precisions(scores, targets))


def mean_of_known(precisions: Shares) -> float:
    """Return the mean of the values that are not NaN; 0 without any."""
    known = precisions[~np.isnan(precisions)]
    return float(known.mean()) if len(known) else 0.0


def f1(found: npt.NDArray[np.bool_], targets: Targets | npt.NDArray[np.bool_]) -> float:
    """Compute 2 x right / (named + there) over all images and classes (micro F1); 1 where nothing is named and nothing there."""
    right, either = int((found & (targets > 0)).sum()), int(found.sum()) + int(targets.sum())
    return 2 * right / either if either else 1.0


def choose_threshold(probabilities: Floats, targets: Targets) -> float:
    """Choose the probability above which classes are named, with the largest micro F1 on images outside of the training.

    It lies midway between two probabilities, so that rounding does not decide; 0.5 where no image is of a class.
    """
    order = np.argsort(-probabilities, axis=None, kind="stable")
    values, right = probabilities.ravel()[order].astype(np.float64), np.cumsum(targets.ravel()[order])
    if not len(right) or not right[-1]:
        return 0.5
    scores = 2 * right / (np.arange(1, len(right) + 1) + right[-1])
    ends = np.flatnonzero(np.append(values[1:] < values[:-1], True))  # equal probabilities are named together
    best = int(ends[scores[ends].argmax()])
    below = values[best + 1] if best + 1 < len(values) else 0.0
    return float((values[best] + below) / 2)


# ---- The gate

_ROUNDING = 1e-9  # 0.90 - 0.85 is 0.05000000000000004 and still a drop of 0.05


@dataclass(frozen=True, kw_only=True)
class GateCondition:
    """A condition of the gate, with what was measured of it."""

    name: str
    measured: str
    limit: str
    setting: str
    reason: str = ""  # why it does not hold; empty where it does


def judge(
    settings: GateSettings,
    *,
    teacher_score: float,
    student_score: float,
    teacher_parameters: int,
    student_parameters: int,
    student_p95_ms: float,
    student_knn_top1: float | None = None,
    title: str = "top-1",
) -> list[GateCondition]:
    """Check every condition of the gate that has a limit.

    `student_knn_top1` is None where it was not measured; `title` names the scores of the test images (`scores.TITLES`);
    `student_p95_ms` is the latency at the first of `evaluate.latency_batch_sizes`.
    """
    return [
        *judge_scores(
            settings,
            teacher_score=teacher_score,
            student_score=student_score,
            student_knn_top1=student_knn_top1,
            title=title,
        ),
        *judge_cost(
            settings,
            teacher_parameters=teacher_parameters,
            student_parameters=student_parameters,
            student_p95_ms=student_p95_ms,
        ),
    ]


def judge_scores(
    settings: GateSettings,
    *,
    teacher_score: float,
    student_score: float,
    student_knn_top1: float | None = None,
    title: str = "top-1",
) -> list[GateCondition]:
    """Check the gate's conditions on the test images; arguments and answer as `judge`."""
    student, setting = f"the student's test {title} of {student_score:.2%}", "evaluate.gate.max_accuracy_drop"
    drop, most = teacher_score - student_score, f"{100 * settings.max_accuracy_drop:.2f}"
    below = f"{student} is {100 * drop:.2f} points below the teacher's {teacher_score:.2%}; {setting} allows {most}"
    conditions = [
        GateCondition(
            name=f"test {title} below the teacher's",
            measured=f"{100 * drop:.2f} points",
            limit=f"at most {most} points",
            setting=setting,
            reason=f"accuracy: {below}" if drop > settings.max_accuracy_drop + _ROUNDING else "",
        )
    ]
    floors = [("min_accuracy", f"test {title} of the student", student_score, f"{student} is below")]
    if student_knn_top1 is not None:
        text = f"the k-NN top-1 of the student's embeddings is {student_knn_top1:.2%}, below"
        floors.append(("min_knn_accuracy", "k-NN top-1 of the student's embeddings", student_knn_top1, text))
    for name, title_of_floor, score, text in floors:
        if least := float(getattr(settings, name)):
            setting = f"evaluate.gate.{name}"
            reason = f"accuracy: {text} {setting} = {least:.2%}" if score < least - _ROUNDING else ""
            condition = GateCondition(
                name=title_of_floor,
                measured=f"{score:.2%}",
                limit=f"at least {least:.2%}",
                setting=setting,
                reason=reason,
            )
            conditions.append(condition)
    return conditions


def judge_cost(
    settings: GateSettings, *, teacher_parameters: int, student_parameters: int, student_p95_ms: float
) -> list[GateCondition]:
    """Check the gate's conditions on size and latency; arguments and answer as `judge`."""
    ratio, conditions = teacher_parameters / student_parameters, []
    if least := settings.min_compression:
        setting = "evaluate.gate.min_compression"
        fewer = (
            f"the student's {student_parameters:,} parameters are {ratio:.2f} times fewer than the teacher's {teacher_parameters:,}; "
            f"{setting} asks for {least:g}"
        )
        conditions.append(
            GateCondition(
                name="parameters fewer than the teacher's",
                measured=f"{ratio:.2f} times",
                limit=f"at least {least:g} times",
                setting=setting,
                reason=f"compression: {fewer}" if ratio < least - _ROUNDING else "",
            )
        )
    if most := settings.max_latency_ms:
        setting = "evaluate.gate.max_latency_ms"
        over = f"latency: the student's p95 of {student_p95_ms:.2f} ms is over {setting} = {most:g}"
        conditions.append(
            GateCondition(
                name="p95 latency on the CPU",
                measured=f"{student_p95_ms:.2f} ms",
                limit=f"at most {most:g} ms",
                setting=setting,
                reason=over if student_p95_ms > most else "",
            )
        )
    return conditions


# ---- Latency on this machine's CPU, and operations

_WARM_UP_RUNS = 5


@dataclass(frozen=True, kw_only=True)
class Latency:
    """The time that a model takes for a batch: median and 95th percentile."""

    batch_size: int
    p50_ms: float
    p95_ms: float
    images_per_second: float  # images of all timed batches, divided by their time


@dataclass(frozen=True, kw_only=True)
class Machine:
    """The machine on which accuracy and latencies were measured; latencies mean nothing without it."""

    processor: str
    threads: int  # threads that torch used
    torch: str
    device: str = "cpu"  # on which accuracy was measured; latencies are the processor's
    precision: str = "fp32"  # of these forward passes; never TF32 (`full_float32`)


def machine(device: str = "cpu") -> Machine:
    """Describe this machine: its processor, torch's threads and version; `device` is the kind that accuracy was measured on."""
    return Machine(processor=processor_name(), threads=torch.get_num_threads(), torch=torch.__version__, device=device)


def measure_latency(
    models: Mapping[str, Callable[[Tensor], object]], images: Tensor, *, batch_sizes: Sequence[int], runs: int
) -> dict[str, list[Latency]]:
    """Time models on the CPU, in evaluation mode, from raw images, uint8 [N, 3, H, W], to logits: for each, a latency by batch size.

    The models take turns in one loop, so that other work on the machine slows all of them alike. They may be other functions of images.
    """
    latencies: dict[str, list[Latency]] = {name: [] for name in models}
    with torch.inference_mode():
        for batch_size in batch_sizes:
            batch = images[torch.arange(batch_size) % len(images)]
            seconds: dict[str, list[float]] = {name: [] for name in models}
            for _, (name, model) in itertools.product(range(_WARM_UP_RUNS + runs), models.items()):
                start = time.perf_counter()
                model(batch)
                seconds[name].append(time.perf_counter() - start)
            for name, all_runs in seconds.items():
                timed = all_runs[_WARM_UP_RUNS:]
                p50, p95 = np.percentile(timed, [50, 95])
                latency = Latency(
                    batch_size=batch_size,
                    p50_ms=float(p50) * 1e3,
                    p95_ms=float(p95) * 1e3,
                    images_per_second=batch_size * len(timed) / sum(timed),
                )
                latencies[name].append(latency)
    return latencies


def multiply_accumulates(model: nn.Module, image: Tensor) -> int:
    """Count the multiply-accumulate operations of matrix products, convolutions and attention for one image, uint8 [1, 3, H, W]."""
    # Attention as matrix products, since the counter of torch 2.9 ignores a CPU's fused attention.
    with torch.no_grad(), sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        model(image)
    return int(counter.get_total_flops()) // 2
