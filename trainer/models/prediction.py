"""What a model says of a photo, whatever has computed its probabilities.

Shapes: B images, K classes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from trainer.models.served_student.class_tags import ANSWER, CONFIDENCE, ClassTags, Floats, Value


@dataclass(frozen=True, kw_only=True)
class Prediction:
    """What a model says of a photo."""

    labels: Mapping[str, float]
    """Class -> probability, the most probable first."""
    answer: str | None = None
    """A class, or a group of the hierarchy; None where the model has no tags, or not even a topmost group is sure enough."""
    confidence: float | None = None
    """Probability of the answer; None where the model has no tags."""
    attributes: Mapping[str, Value | Sequence[Value]] | None = None
    """What is known of the answer, or of each class that is named, in their order; None where the model has no tags."""
    named: Sequence[str] | None = None
    """The classes whose probability is above the threshold, where a photo may have several labels; None where it has one."""


def predictions(
    probabilities: Floats, labels: Sequence[str], tags: ClassTags | None, *, top: int, threshold: float | None = None
) -> list[Prediction]:
    """Say of each image the `top` most probable classes, and where there are tags the answer and what is known of that.

    Args:
        probabilities: [B, K].
        labels: the name of each class, [K].
        threshold: probability above which a class is named, where photos may have several labels.
    """
    best = np.argsort(-probabilities, axis=1, kind="stable")[:, :top]
    named = [
        {labels[index]: float(row[index]) for index in order}
        for row, order in zip(probabilities, best.tolist(), strict=True)
    ]
    if threshold is not None:
        members = [np.flatnonzero(row > threshold).tolist() for row in probabilities]
        known = tags.of_classes(members) if tags is not None else None
        return [
            Prediction(
                labels=one,
                named=[labels[index] for index in of_image],
                attributes=None if known is None else {name: values[row] for name, values in known.items()},
            )
            for row, (one, of_image) in enumerate(zip(named, members, strict=True))
        ]
    if tags is None:
        return [Prediction(labels=one) for one in named]
    columns = {name: values.tolist() for name, values in tags.columns(probabilities).items()}
    answers, confidences = columns.pop(ANSWER), columns.pop(CONFIDENCE)
    return [
        Prediction(
            labels=one,
            answer=answers[row],
            confidence=confidences[row],
            attributes={name: values[row] for name, values in columns.items()},
        )
        for row, one in enumerate(named)
    ]
