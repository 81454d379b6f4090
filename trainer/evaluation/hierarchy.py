"""How good a classifier is at each level of the hierarchy of classes, and from which probability on an answer is sure enough.

Shapes: N images, K classes, L levels of the hierarchy, from the topmost groups to the classes.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from trainer.evaluation.metrics import Floats, Ints
from trainer.models.served_student.class_tags import ClassTags
from trainer.models.served_student.student import to_probabilities


def level_accuracies(tags: ClassTags, logits: Floats, labels: Ints) -> dict[str, float]:
    """Compute the share of images whose predicted class is below the right name of each level, from `1` at the top to the last, top-1."""
    right = _right_levels(tags, logits.argmax(axis=1), labels)
    return {str(level): float(share) for level, share in enumerate(right.mean(axis=0), start=1)}


def choose_threshold(tags: ClassTags, logits: Floats, labels: Ints, risk: float) -> float:
    """Choose the smallest threshold with which at most a share `risk` of images should get a wrong answer, from some that taught nothing.

    For each image there is a smallest threshold with which its answer is right: 0 where its predicted class is right, or else the
    probability of the topmost wrong name on the way up from it. Of these N in ascending order, number ceil((N + 1)(1 - risk)) is chosen,
    the quantile of split conformal prediction: for one more image like these, the probability of a wrong answer is at most `risk` (Goren
    et al. 2024). Where N is too small for that the threshold is 1, and nothing is ever sure enough. Logits are [N, K], labels int64 [N].
    """
    confidences = tags.confidences(to_probabilities(logits))
    right = _right_levels(tags, logits.argmax(axis=1), labels)
    # Levels are right from the topmost one down to some level; the first wrong one must not be sure enough.
    depth, rows = right.sum(axis=1), np.arange(len(labels))
    last = len(tags.levels) - 1
    needed = np.where(depth > last, 0.0, confidences[rows, np.minimum(depth, last)])
    rank = math.ceil((len(labels) + 1) * (1 - risk))
    return float(np.sort(needed)[rank - 1]) if rank <= len(labels) else 1.0


def answers(tags: ClassTags, logits: Floats, labels: Ints) -> dict[str, Any]:
    """Measure the answers with the threshold of `tags`, as shares of all images, and return that `threshold` too.

    `risk` may get and `wrong` gets a wrong answer; `named` has the share of each level, `1` being the topmost, where a class above the last
    level counts at the last; `none` gets no answer.
    """
    chosen = tags.chosen_levels(tags.confidences(to_probabilities(logits)))
    right = _right_levels(tags, logits.argmax(axis=1), labels)
    answered = chosen >= 0
    wrong = answered & ~right[np.arange(len(labels)), chosen]
    named: Mapping[str, float] = {str(level + 1): float((chosen == level).mean()) for level in range(len(tags.levels))}
    return {
        "risk": tags.risk,
        "threshold": tags.threshold,
        "wrong": float(wrong.mean()),
        "named": named,
        "none": float((~answered).mean()),
    }


def _right_levels(tags: ClassTags, predicted: Ints, labels: Ints) -> np.typing.NDArray[np.bool_]:
    """Return whether the predicted and the true class belong to the same group at each level: bool [N, L]."""
    return np.stack([level.of_class[predicted] == level.of_class[labels] for level in tags.levels], axis=1)
