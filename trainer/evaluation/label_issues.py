"""Images whose label a model contradicts, by confident learning (Northcutt, Jiang and Chuang, 2021, JAIR 70).

The model must not have learned from the labels that it judges: its probabilities are those on other splits, or come from cross-validation.
They are computed for some images at a time; what is kept of them is a few numbers an image.

Shapes: N images, K classes, D numbers of an embedding.
"""

from __future__ import annotations

import csv
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from trainer.data.dataset import Split
from trainer.evaluation.embeddings import Embeddings, fit_probe
from trainer.evaluation.metrics import Floats, Ints
from trainer.models.served_student.student import to_probabilities

LISTED = 10_000  # most images that are listed, the worst ones
FOLDS = 5  # parts of a cross-validation
COLUMNS = ("path", "label", "split", "suggested", "confidence", "label_confidence")
_TOGETHER = 4096  # images whose probabilities are computed at once
_ROUNDING = 1e-6
"""As in cleanlab: rounding does not decide whether an image is at its class's threshold, where the only one of a class always is."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LabelIssue:
    """An image whose label is contradicted."""

    split: Split
    index: int  # in its split
    label: int
    suggested: int
    confidence: float  # probability of the suggested class
    label_confidence: float  # probability of the label


@dataclass(frozen=True, kw_only=True, slots=True)
class LabelCount:
    """Images of a split."""

    judged: int
    contradicted: int


@dataclass(frozen=True, kw_only=True, slots=True)
class JudgedLabels:
    """The doubtful labels."""

    issues: Sequence[LabelIssue]  # at most `LISTED` of those that one model judges, the worst first
    counts: Mapping[str, LabelCount]  # name of each split that was judged -> its numbers

    def __add__(self, other: JudgedLabels) -> JudgedLabels:
        both = sorted([*self.issues, *other.issues], key=lambda one: one.label_confidence - one.confidence)
        return JudgedLabels(issues=both, counts={**self.counts, **other.counts})


@dataclass(frozen=True, kw_only=True, slots=True)
class Contradicted:
    """The labels that were contradicted, the worst first."""

    rows: Ints
    suggested: Ints
    confidence: npt.NDArray[np.float64]  # probabilities of the suggested classes
    label_confidence: npt.NDArray[np.float64]  # probabilities of the labels


def contradicted(logits: Floats, labels: Ints) -> Contradicted:
    """Find the labels that confident learning takes for wrong: the off-diagonal entries of the confident joint (equations 1 and 2).

    The threshold t_j of class j is the mean of p_j over the images with label j, and infinite where there are none. An image counts as one
    of the class j that has the largest p_j of those with p_j >= t_j. Its label is contradicted if it is another class, and not itself the
    most probable of all. The worst have the smallest margin: the label's probability less the largest other one's.

    cleanlab does the same, but where several classes reach their thresholds it takes the most probable of all classes, be it one of them
    or not, and so contradicts a few labels more.

    The logits, [N, K], are out of sample; no label, int64 [N], is below 0.
    """
    classes = logits.shape[1]
    own = np.concatenate([part[np.arange(len(part)), labels[rows]] for rows, part in _parts(logits)])
    counts = np.bincount(labels, minlength=classes)
    sums = np.bincount(labels, weights=own, minlength=classes)
    thresholds = np.divide(sums, counts, out=np.full(classes, np.inf), where=counts > 0)
    found = []
    for start_rows, part in _parts(logits):
        given, places = labels[start_rows], np.arange(len(part))
        best = np.where(part >= thresholds - _ROUNDING, part, -1.0).argmax(axis=1)
        is_confident = part[places, best] >= thresholds[best] - _ROUNDING
        wrong = np.flatnonzero(is_confident & (best != given) & (part[places, given] < part.max(axis=1)))
        others = part[wrong]
        others[np.arange(len(wrong)), given[wrong]] = -1
        margins = part[wrong, given[wrong]] - others.max(axis=1, initial=-1)
        found.append((start_rows[wrong], best[wrong], part[wrong, best[wrong]], margins))
    *kept, margins = map(np.concatenate, zip(*found, strict=True))
    worst = np.argsort(margins, kind="stable")
    rows, suggested, confidence = (values[worst] for values in kept)
    return Contradicted(rows=rows, suggested=suggested, confidence=confidence, label_confidence=own[rows])


def _parts(logits: Floats) -> Iterator[tuple[Ints, npt.NDArray[np.float64]]]:
    """Yield the probabilities of some images at a time, with their numbers; at least once."""
    for start in range(0, max(len(logits), 1), _TOGETHER):
        part = logits[start : start + _TOGETHER]
        yield np.arange(start, start + len(part)), to_probabilities(part)


def judge(logits: Floats, judged: Mapping[Split, Ints]) -> JudgedLabels:
    """Judge the labels of several splits (`judged`: split -> indices) by one model's logits out of sample, split after split, [N, K]."""
    splits = list(judged)
    owners = np.repeat(np.arange(len(splits)), [len(part) for part in judged.values()])
    places = np.concatenate(list(judged.values()))
    labels = np.concatenate([split.labels[part] for split, part in judged.items()])
    found = contradicted(logits, labels)
    wrong = np.bincount(owners[found.rows], minlength=len(splits)).tolist()
    return JudgedLabels(
        issues=[
            LabelIssue(
                split=splits[owners[row]],
                index=int(places[row]),
                label=int(labels[row]),
                suggested=int(found.suggested[number]),
                confidence=float(found.confidence[number]),
                label_confidence=float(found.label_confidence[number]),
            )
            for number, row in enumerate(found.rows[:LISTED].tolist())
        ],
        counts={
            split.name: LabelCount(judged=len(part), contradicted=count)
            for (split, part), count in zip(judged.items(), wrong, strict=True)
        },
    )


def cross_validated(
    embeddings: Embeddings, labels: Ints, val: Embeddings, val_labels: Ints, classes: int
) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.bool_]]:
    """Compute logits of each image by a linear probe that was fitted to the images of the other folds, [N, K], and which can be judged.

    Images of a class that follow one another, as those of a burst do, share a fold. The penalty is the one that is best on the validation
    split for a probe of all images. The only image of a class cannot be judged, since the probe of the others does not know the class.
    """
    penalty = fit_probe(embeddings, labels, val, val_labels, classes).penalty
    order = np.argsort(labels, kind="stable")
    counts = np.bincount(labels, minlength=classes)
    ranks = np.arange(len(labels)) - np.repeat(np.cumsum(counts) - counts, counts)
    folds = np.empty(len(labels), dtype=np.int64)
    folds[order] = ranks * FOLDS // counts[labels[order]]
    logits = np.zeros((len(labels), classes))
    for fold in range(FOLDS):
        held, rest = folds == fold, folds != fold
        if held.any() and rest.any():
            probe = fit_probe(embeddings[rest], labels[rest], val, val_labels, classes, penalties=(penalty,))
            logits[held] = probe.logits(embeddings[held])
    return logits, counts[labels] > 1


def write(path: Path, found: Sequence[LabelIssue], classes: Sequence[str]) -> None:
    """Write the issues, the worst first, as lines of a manifest (`path`, `label`, `split`) with further columns."""
    with path.open("w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(COLUMNS)
        for one in found:
            shares = f"{one.confidence:.4f}", f"{one.label_confidence:.4f}"
            name = one.split.sources[one.index]
            writer.writerow([name, classes[one.label], one.split.name, classes[one.suggested], *shares])
