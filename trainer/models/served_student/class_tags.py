"""What is known of classes beside their pictures: attributes, such as nutrition, and a hierarchy of groups above the classes.

A prepared data set that was given any holds it in `tags.json`, `evaluate` measures by it, and it travels with the registered model, which
answers with it. Where the class is not sure enough, the answer is a group: the deepest one, on the way up from the most probable class,
whose probability is above a threshold (the climbing rule of Goren et al., Hierarchical Selective Classification, 2024).

Shapes: B images, K classes, L levels of the hierarchy, from the topmost groups to the classes.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

TAGS = "tags.json"
ANSWER, CONFIDENCE = "answer", "confidence"  # columns that a prediction has beside those of classes and attributes
NAMED = "named"
"""Column of a prediction where a photo may have several labels: those whose probability is above the threshold."""
TOP_LABELS, TOP_PROBABILITIES = "top_labels", "top_probabilities"
"""Columns of a prediction that was asked for so many labels, instead of one for each class: lists, the most probable first."""
LEVELS = 32  # most levels of a hierarchy

Value: TypeAlias = float | str | None  # of an attribute: a number, a text, or None where it is not known
Floats: TypeAlias = npt.NDArray[np.floating]
Ints: TypeAlias = npt.NDArray[np.int64]


def columns_of_predictions(*, several: bool) -> set[str]:
    """Return the columns that an attribute of the same name would overwrite; `several`: whether a photo may have several labels."""
    return {ANSWER, CONFIDENCE, TOP_LABELS, TOP_PROBABILITIES} | ({NAMED} if several else set())


@dataclass(frozen=True, kw_only=True)
class HierarchyLevel:
    """A level of the hierarchy: a class that ends above it stands for itself there."""

    names: tuple[str, ...]  # groups, and classes that end here or above
    of_class: Ints  # index in `names` of what each class belongs to, [K]

    def sums(self, probabilities: Floats) -> npt.NDArray[np.float64]:
        """Sum the probabilities [B, K] of the classes below each name: [B, names]."""
        order = np.argsort(self.of_class, kind="stable")
        starts = np.searchsorted(self.of_class[order], np.arange(len(self.names)))
        sums: npt.NDArray[np.float64] = np.add.reduceat(probabilities[:, order].astype(np.float64), starts, axis=1)
        return sums


@dataclass(frozen=True, kw_only=True)
class ClassTags:
    """Attributes and hierarchy of the classes of a data set or a model; each may be missing."""

    labels: tuple[str, ...]  # name of each class, in the order of the model's outputs
    attributes: Mapping[str, Sequence[Value]] = field(default_factory=dict)
    """Name of each attribute -> its value for each class, in the order of the labels: numbers, or texts."""
    parents: Mapping[str, str] = field(default_factory=dict)
    """Class or group -> the group above it; empty where there is no hierarchy."""
    risk: float | None = None  # largest share of all images with a wrong answer for which the threshold was chosen
    threshold: float | None = None
    """Probability above which a class or group is the answer; None: the answer is the most probable class."""

    def __post_init__(self) -> None:
        """Check the members, since they may come from a file."""
        if not all(isinstance(label, str) for label in self.labels):
            raise ValueError("a label is no text")
        for name, values in self.attributes.items():
            if len(values) != len(self.labels):
                raise ValueError(f"attribute {name!r} has {len(values)} values for {len(self.labels)} classes")
            if {type(value) for value in values} - {type(None)} not in (set(), {float}, {str}):
                raise ValueError(f"the values of attribute {name!r} are neither all numbers nor all texts")
        if not all(isinstance(name, str) for edge in self.parents.items() for name in edge):
            raise ValueError("a name in the hierarchy is no text")
        for limit in (self.risk, self.threshold):
            if limit is not None and (type(limit) is not float or not 0 <= limit <= 1):
                raise ValueError(f"risk and threshold must be from 0 to 1, got {limit!r}")
        _ = self.levels

    @classmethod
    def of(cls, content: Any) -> ClassTags:
        """Make them of the content of `tags.json`; raises a `ValueError` where it is something else."""
        try:
            attributes = {
                name: tuple(float(value) if type(value) is int else value for value in values)
                for name, values in dict(content["attributes"]).items()
            }
            return cls(
                labels=tuple(content["labels"]),
                attributes=attributes,
                parents=dict(content["parents"]),
                risk=content["risk"],
                threshold=content["threshold"],
            )
        except (KeyError, TypeError) as error:
            raise ValueError(f"it does not hold attributes and a hierarchy of classes ({error!r})") from error

    def write(self, directory: Path) -> None:
        """Write `tags.json`."""
        text = json.dumps(asdict(self), indent=2, ensure_ascii=False, allow_nan=False)
        (directory / TAGS).write_text(f"{text}\n", encoding="utf-8")

    def answering(self, *, risk: float, threshold: float) -> ClassTags:
        """Return these with a threshold for the answers."""
        return replace(self, risk=risk, threshold=threshold)

    def judged(self, figures: Mapping[str, Any]) -> ClassTags:
        """Return these with the threshold that `evaluate` has chosen for the student's answers, if its figures have one."""
        answers = figures["student"]["test"].get("answers")
        return self.answering(risk=answers["risk"], threshold=answers["threshold"]) if answers else self

    @cached_property
    def paths(self) -> tuple[tuple[str, ...], ...]:
        """The groups above each class, the topmost first, and the class itself."""
        return tuple(self._path(label) for label in self.labels)

    def _path(self, label: str) -> tuple[str, ...]:
        path = [label]
        while path[-1] in self.parents:
            path.append(self.parents[path[-1]])
            if len(path) > LEVELS:
                raise ValueError(f"class {label!r} lies below more than {LEVELS - 1} groups, or in a circle of them")
        return tuple(reversed(path))

    @cached_property
    def levels(self) -> tuple[HierarchyLevel, ...]:
        """The levels, from the topmost groups to the classes, [L]; the classes alone where there is no hierarchy."""
        depth = max(map(len, self.paths), default=1)
        made = []
        for level in range(depth):
            names = [path[min(level, len(path) - 1)] for path in self.paths]
            distinct = {name: index for index, name in enumerate(dict.fromkeys(names))}
            of_class = np.array([distinct[name] for name in names], dtype=np.int64)
            made.append(HierarchyLevel(names=tuple(distinct), of_class=of_class))
        return tuple(made)

    def confidences(self, probabilities: Floats) -> npt.NDArray[np.float64]:
        """Sum the probability at each level of what the most probable class belongs to: [B, K] -> [B, L], smaller from level to level."""
        if not len(probabilities):
            return np.empty((0, len(self.levels)))
        predicted, rows = probabilities.argmax(axis=1), np.arange(len(probabilities))
        columns = [level.sums(probabilities)[rows, level.of_class[predicted]] for level in self.levels]
        sums = np.minimum(np.stack(columns, axis=1), 1)
        # Sums in another order may be smaller by their last bit, although more is added.
        rising: npt.NDArray[np.float64] = np.maximum.accumulate(sums[:, ::-1], axis=1)[:, ::-1]
        return rising

    def chosen_levels(self, confidences: Floats) -> Ints:
        """Choose the level of each answer from the confidences [B, L]: int64 [B], -1 where not even the topmost group is sure enough."""
        last = len(self.levels) - 1
        if self.threshold is None:
            return np.full(len(confidences), last, dtype=np.int64)
        above = confidences > self.threshold
        deepest = last - np.argmax(above[:, ::-1], axis=1)
        return np.where(above.any(axis=1), deepest, -1).astype(np.int64)

    def columns(self, probabilities: Floats) -> dict[str, npt.NDArray[Any]]:
        """Answer with a class or a group, its confidence and its attributes, from the probability of each class, [B, K].

        Returns column -> its values, [B]: `answer`, None where not even a topmost group is sure enough; `confidence`, the probability of
        the answer, or of the topmost group; and each attribute, None where it is not known. A group's number is the mean over its classes,
        weighted by their probabilities; its text has the different texts of its classes. Numbers that are all known are float64.
        """
        confidences = self.confidences(probabilities)
        chosen, predicted = self.chosen_levels(confidences), probabilities.argmax(axis=1)
        answers: list[str | None] = []
        members: list[Ints] = []
        for level, best in zip(chosen.tolist(), predicted.tolist(), strict=True):
            place = self.levels[level]
            answers.append(place.names[place.of_class[best]] if level >= 0 else None)
            members.append(np.flatnonzero(place.of_class == place.of_class[best]) if level >= 0 else np.empty(0, int))
        sure = confidences[np.arange(len(chosen)), np.maximum(chosen, 0)]
        made: dict[str, npt.NDArray[Any]] = {ANSWER: np.array(answers, dtype=object), CONFIDENCE: sure}
        for name, values in self.attributes.items():
            known = [_of_group(values, of, row) for of, row in zip(members, probabilities, strict=True)]
            made[name] = np.array(known, dtype=np.float64 if self.is_number(name) and None not in known else object)
        return made

    def is_number(self, attribute: str) -> bool:
        """Return whether the values of an attribute are numbers."""
        return any(isinstance(value, float) for value in self.attributes[attribute])


def _of_group(values: Sequence[Value], members: Ints, probabilities: Floats) -> Value:
    """Return a group's value: the mean of numbers, weighted by the probabilities [K], or all different texts."""
    known = {int(member): value for member in members if (value := values[member]) is not None}
    distinct = list(dict.fromkeys(known.values()))
    if len(distinct) < 2:  # also of a class, whose number stays what it is to the last bit
        return distinct[0] if distinct else None
    if any(isinstance(value, str) for value in distinct):
        return "; ".join(str(value) for value in distinct)
    weights = probabilities[list(known)].astype(np.float64)
    numbers = np.array([float(value) for value in known.values()])
    return float(np.average(numbers, weights=weights)) if weights.sum() > 0 else float(numbers.mean())
