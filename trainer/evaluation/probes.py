"""What frozen embeddings know of the classes: a linear probe, and the vote of the nearest neighbours.

Shapes: N images with labels, M other images, D numbers of an embedding, K classes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import scipy.optimize
import scipy.special

from trainer.evaluation.embeddings import Embeddings
from trainer.evaluation.metrics import Ints

PENALTIES = (1e-1, 1e-2, 1e-3, 1e-4, 1e-5)
"""Weights of the penalty among which the validation split chooses, the simplest classifier first."""
MOST_IMAGES = 20_000
"""Images to which a probe is fitted at most, and among which neighbours are looked for."""

NEIGHBORS = 20
"""k of DINO's table (Caron et al. 2021)."""
NEIGHBOR_TEMPERATURE = 0.07

_ITERATIONS = 300
_VOTES_TOGETHER = 1024

Doubles = npt.NDArray[np.float64]


@dataclass(frozen=True, kw_only=True)
class LinearProbe:
    """A linear classifier of embeddings: logits = embedding x weight^T + bias."""

    weight: Doubles
    """[K, D]."""
    bias: Doubles
    """[K]."""
    penalty: float
    """The one that was chosen."""
    val_top1: float
    """Accuracy on the validation split, by which it was chosen, as a fraction."""

    def logits(self, embeddings: Embeddings) -> Doubles:
        """Classify embeddings [M, D]: [M, K]."""
        result: Doubles = embeddings.astype(np.float64) @ self.weight.T + self.bias
        return result


def fit_probe(
    train: Embeddings,
    labels: Ints,
    val: Embeddings,
    val_labels: Ints,
    classes: int,
    *,
    penalties: Sequence[float] | None = None,
) -> LinearProbe:
    """Fit a linear probe by multinomial logistic regression, the usual measure of frozen embeddings (Radford et al. 2021, CLIP, by L-BFGS).

    Minimised is the mean cross-entropy + penalty / 2 x the weights' squared norm, over embeddings that are standardised by the training
    images; mean and deviation then become part of the weights. Of several penalties the one is taken that is best on the validation split,
    the largest where they are equal.

    Args:
        train: [N, D].
        labels: int64 [N].
        val: [M, D].
        val_labels: int64 [M].
        classes: K.
        penalties: those to choose from, from the largest to the smallest; `PENALTIES` where not given.
    """
    values = train.astype(np.float64)
    mean, std = values.mean(0), values.std(0)
    std = np.where(std > 0, std, 1.0)
    values = (values - mean) / std
    best: LinearProbe | None = None
    start = np.zeros((classes, values.shape[1] + 1))
    for penalty in penalties or PENALTIES:
        start = _minimize(start, values, labels, penalty)
        weight = start[:, :-1] / std
        candidate = LinearProbe(weight=weight, bias=start[:, -1] - weight @ mean, penalty=penalty, val_top1=0.0)
        right = candidate.logits(val).argmax(1) == val_labels
        val_top1 = float(right.mean()) if len(right) else 0.0
        if best is None or val_top1 > best.val_top1:
            best = LinearProbe(weight=weight, bias=candidate.bias, penalty=penalty, val_top1=val_top1)
    assert best is not None, "there are penalties"
    return best


def _minimize(start: Doubles, values: Doubles, labels: Ints, penalty: float) -> Doubles:
    """Minimise from a point [K, D + 1], whose last column is the bias."""
    rows = np.arange(len(labels))

    def objective(flat: Doubles) -> tuple[float, Doubles]:
        point = flat.reshape(start.shape)
        weight = point[:, :-1]
        log_probabilities = scipy.special.log_softmax(values @ weight.T + point[:, -1], axis=1)
        loss = -log_probabilities[rows, labels].mean() + penalty / 2 * np.square(weight).sum()
        error = np.exp(log_probabilities)
        error[rows, labels] -= 1
        error /= len(labels)
        gradient = np.concatenate([error.T @ values + penalty * weight, error.sum(0)[:, None]], axis=1)
        return float(loss), gradient.ravel()

    found = scipy.optimize.minimize(
        objective, start.ravel(), jac=True, method="L-BFGS-B", options={"maxiter": _ITERATIONS}
    )
    result: Doubles = found.x.reshape(start.shape)
    return result


def nearest_neighbors(bank: Embeddings, labels: Ints, embeddings: Embeddings, classes: int) -> Doubles:
    """Count the votes of each image's k nearest neighbours for each class, [M, K] (Wu et al. 2018, as DINO, Caron et al. 2021, has it).

    Near is what has a large cosine s with it; a neighbour's vote for its class weighs exp(s / 0.07). k is 20, or all there are.

    Args:
        bank: embeddings of images with labels, [N, D].
        labels: theirs, int64 [N].
        embeddings: of the images in question, [M, D].
        classes: K.
    """
    known, one_hot, k = _unit(bank), np.eye(classes)[labels], min(NEIGHBORS, len(bank))
    votes: list[Doubles] = []
    for start in range(0, len(embeddings), _VOTES_TOGETHER):
        cosines = _unit(embeddings[start : start + _VOTES_TOGETHER]) @ known.T
        nearest = np.argsort(-cosines, axis=1, kind="stable")[:, :k]
        weights = np.exp(np.take_along_axis(cosines, nearest, axis=1) / NEIGHBOR_TEMPERATURE)
        votes.append((weights[:, :, None] * one_hot[nearest]).sum(1))
    return np.concatenate(votes)


def _unit(embeddings: Embeddings) -> Doubles:
    """Scale each to length 1."""
    values = embeddings.astype(np.float64)
    lengths: Doubles = np.linalg.norm(values, axis=1, keepdims=True)
    return values / np.maximum(lengths, 1e-12)
