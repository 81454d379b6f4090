"""How good a classifier's logits are, as pure functions.

Shapes: N images, K classes. Labels are the index of each image's class, int64 [N].
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.floating]
Ints = npt.NDArray[np.int64]


def probabilities(logits: Floats) -> npt.NDArray[np.float64]:
    """Softmax over the classes, in double precision: [N, K]."""
    shifted = logits.astype(np.float64) - logits.max(axis=1, keepdims=True)
    exponentials = np.exp(shifted)
    normalized: npt.NDArray[np.float64] = exponentials / exponentials.sum(axis=1, keepdims=True)
    return normalized


def top_k(logits: Floats, labels: Ints, k: int) -> float:
    """Share of the images whose class is among the k largest logits; of equal logits the lower class comes first.

    Raises:
        ValueError: there are no images, or k is not in 1..K.
    """
    if len(labels) == 0 or not 1 <= k <= logits.shape[1]:
        raise ValueError(f"top-{k} of {len(labels)} images and {logits.shape[1]} classes is not defined")
    best = np.argsort(-logits, axis=1, kind="stable")[:, :k]
    return float((best == labels[:, None]).any(axis=1).mean())


def agreement(logits: Floats, other: Floats) -> float:
    """Share of the images for which both classifiers' largest logit is the same class."""
    return float((logits.argmax(axis=1) == other.argmax(axis=1)).mean())


def confusion_matrix(predicted: Ints, labels: Ints, classes: int) -> Ints:
    """How often an image of class i was taken for class j: int64 [K, K], rows are the truth."""
    counts: Ints = np.bincount(labels * classes + predicted, minlength=classes**2).reshape(classes, classes)
    return counts


def precision(matrix: Ints) -> npt.NDArray[np.float64]:
    """Share of the images taken for a class that are of it, [K]; NaN for a class that was never predicted."""
    return _share(np.diag(matrix), matrix.sum(axis=0))


def recall(matrix: Ints) -> npt.NDArray[np.float64]:
    """Share of the images of a class that were taken for it, [K]; NaN for a class without images."""
    return _share(np.diag(matrix), matrix.sum(axis=1))


def _share(part: Ints, whole: Ints) -> npt.NDArray[np.float64]:
    undefined = np.full(len(whole), np.nan)
    shares: npt.NDArray[np.float64] = np.divide(part, whole, out=undefined, where=whole > 0)
    return shares


@dataclass(frozen=True, kw_only=True)
class Confusion:
    """A pair of classes of which one is taken for the other."""

    truth: int
    predicted: int
    count: int
    """Images of class `truth` taken for class `predicted`."""


def worst_confusions(matrix: Ints, count: int) -> list[Confusion]:
    """The most frequent confusions, at most `count`, the worst first."""
    wrong = matrix.copy()
    np.fill_diagonal(wrong, 0)
    order = np.argsort(-wrong, axis=None, kind="stable")[:count]
    pairs = [(int(position) // len(wrong), int(position) % len(wrong)) for position in order]
    return [
        Confusion(truth=truth, predicted=predicted, count=int(wrong[truth, predicted]))
        for truth, predicted in pairs
        if wrong[truth, predicted] > 0
    ]


@dataclass(frozen=True, kw_only=True)
class Calibration:
    """Confidence against accuracy in equal-width bins of confidence, the right edge of each belonging to it."""

    counts: tuple[int, ...]
    """Images in each bin."""
    confidence: tuple[float | None, ...]
    """Mean probability of the predicted class in each bin; None for an empty bin."""
    accuracy: tuple[float | None, ...]
    """Share of right predictions in each bin; None for an empty bin."""
    error: float
    """Expected calibration error: the mean of |accuracy - confidence| over the bins, weighted by their images."""


def calibration(logits: Floats, labels: Ints, bins: int) -> Calibration:
    """Expected calibration error and what it is made of (Guo et al., On Calibration of Modern Neural Networks, 2017)."""
    predictions = probabilities(logits)
    confidences = predictions.max(axis=1)
    right = predictions.argmax(axis=1) == labels
    which = np.clip(np.ceil(confidences * bins).astype(np.int64) - 1, 0, bins - 1)
    counts: Ints = np.bincount(which, minlength=bins).astype(np.int64)
    confidence_sums = np.bincount(which, weights=confidences, minlength=bins)
    right_sums = np.bincount(which, weights=right, minlength=bins)
    return Calibration(
        counts=tuple(int(count) for count in counts),
        confidence=_means(confidence_sums, counts),
        accuracy=_means(right_sums, counts),
        error=float(np.abs(right_sums - confidence_sums).sum() / len(labels)),
    )


def _means(sums: npt.NDArray[Any], counts: Ints) -> tuple[float | None, ...]:
    return tuple(float(total / count) if count else None for total, count in zip(sums, counts, strict=True))


def wilson_interval(share: float, count: int) -> tuple[float, float]:
    """The 95 % interval of a share that was measured on `count` images (Wilson 1927)."""
    z = 1.959963984540054  # 97.5 % quantile of the normal distribution
    center = share + z**2 / (2 * count)
    spread = z * math.sqrt(share * (1 - share) / count + z**2 / (4 * count**2))
    scale = 1 + z**2 / count
    return max(0.0, (center - spread) / scale), min(1.0, (center + spread) / scale)
