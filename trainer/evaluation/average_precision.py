"""Quality of scores where an image may have several labels, or none: each class is found by itself.

Shapes: N images, K classes; targets are 1 for the classes of an image and 0 for the others, [N, K].
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import scipy.special

from trainer.data.dataset import Targets
from trainer.evaluation.metrics import Floats, best_temperature


def average_precisions(scores: Floats, targets: Targets) -> npt.NDArray[np.float64]:
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


def mean_of_known(precisions: npt.NDArray[np.float64]) -> float:
    """Return the mean of those that are not NaN; 0 where all are."""
    known = precisions[~np.isnan(precisions)]
    return float(known.mean()) if len(known) else 0.0


def f1(found: npt.NDArray[np.bool_], targets: Targets | npt.NDArray[np.bool_]) -> float:
    """Compute 2 x right / (named + there) over all images and classes (micro F1); 1 where nothing is named and nothing there."""
    right, either = int((found & (targets > 0)).sum()), int(found.sum()) + int(targets.sum())
    return 2 * right / either if either else 1.0


def choose_threshold(probabilities: Floats, targets: Targets) -> float:
    """Choose the probability above which a class is named, the same for all, with the largest micro F1 on images that taught nothing.

    It lies in the middle between two probabilities, so that rounding does not decide; 0.5 where no image is of a class.
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


def fit_temperature(logits: Floats, targets: Targets) -> float:
    """Choose the number by which logits are divided so that the labels are as probable as they can be, each class by itself.

    As `metrics.fit_temperature`; 1 where there are no images, or every class is right: then the smaller, the better, without end.
    """
    if not len(logits) or ((logits > 0) == (targets > 0)).all():
        return 1.0
    signed = np.where(targets > 0, logits, -logits).astype(np.float64)

    def loss(log_temperature: float) -> float:
        return float(-scipy.special.log_expit(signed * np.exp(-log_temperature)).mean())

    return best_temperature(loss)
