"""Groups of test images, by folder, size and brightness, in which the student errs more or less often than chance explains.

Shapes: N images, G groups, K classes.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import Any

import numpy as np
import numpy.typing as npt

from trainer.data.dataset import Split
from trainer.evaluation.embeddings import evenly_spaced
from trainer.evaluation.metrics import Answers, Floats, Ints

_QUANTILES = 4  # groups that numbers are cut into, each with as many images
_MOST_GROUPS, _LEAST_IMAGES = 20, 20  # of folders, and images that a group has to have
_MOST_IMAGES = 10_000  # that are decoded for their brightness
_DRAWS = 2000
_LEVEL = 0.05


@dataclass(frozen=True, kw_only=True)
class SliceGroup:
    """The images of a group, and how many of them each model has right."""

    name: str
    images: int
    teacher: int
    student: int


@dataclass(frozen=True, kw_only=True)
class Slicing:
    """A way to group the test images by which the student's mistakes differ."""

    title: str
    groups: Sequence[SliceGroup]
    p_value: float  # that groups differ as much by chance, with their classes as they are


def compared(split: Split, edges: Ints | None, teacher: Answers, student: Answers) -> list[Slicing]:
    """Group the images, and keep the groupings whose mistakes differ beyond chance (Bonferroni's correction for their number).

    `edges` are the shorter edges of the originals in pixels, [N]; None where the data set does not have them.
    """
    tried = {**_folders(split.sources), **_numbers(split, edges)}
    found = []
    for title, group_of in tried.items():
        names = sorted({name for name in group_of.tolist() if name}, key=_natural)
        rows = np.flatnonzero(group_of != "")
        groups = np.array([names.index(name) for name in group_of[rows].tolist()], dtype=np.int64)
        p_value = chance(~student.right[rows], groups, student.labels[rows]) * len(tried)
        if p_value < _LEVEL:
            counts, *right = (
                np.bincount(groups, weights=values, minlength=len(names)).astype(int).tolist()
                for values in (np.ones(len(rows)), teacher.right[rows], student.right[rows])
            )
            parts = [
                SliceGroup(name=name, images=images, teacher=theirs, student=ours)
                for name, images, theirs, ours in zip(names, counts, *right, strict=True)
            ]
            found.append(Slicing(title=title, groups=parts, p_value=p_value))
    return found


def chance(wrong: npt.NDArray[np.bool_], groups: Ints, labels: Ints) -> float:
    """Return the probability that mistakes are spread over the groups as unevenly by chance, from random draws.

    The mistakes of each class are drawn among the images of the class, so that a group of difficult classes is not unusual for that.

    Args:
        wrong: of each image, [N].
        groups: from 0 to G - 1, [N].
        labels: [N].
    """
    count, generator = int(groups.max()) + 1, np.random.default_rng(0)
    expected, drawn = np.zeros(count), np.zeros((_DRAWS, count))
    for label in np.unique(labels[wrong]).tolist():
        of_class = labels == label
        images, mistakes = np.bincount(groups[of_class], minlength=count), int(wrong[of_class].sum())
        expected += mistakes * images / images.sum()
        drawn += generator.multivariate_hypergeometric(images, mistakes, size=_DRAWS)
    known = expected > 0
    seen = np.bincount(groups[wrong], minlength=count)[known]

    def uneven(counts: npt.NDArray[Any]) -> Floats:
        spread: Floats = ((counts - expected[known]) ** 2 / expected[known]).sum(axis=-1)
        return spread

    # the observed one is a draw, too
    return (1 + int((uneven(drawn[:, known]) >= uneven(seen) - 1e-9).sum())) / (1 + _DRAWS)


def _folders(sources: Sequence[str]) -> Mapping[str, npt.NDArray[np.str_]]:
    """Group by each level of the images' folders that has few enough of them; small folders are left out."""
    parents = [PurePosixPath(source).parts[:-1] for source in sources]
    found = {}
    for level in range(min(map(len, parents), default=0)):
        names = np.array([parts[level] for parts in parents])
        known, counts = np.unique(names, return_counts=True)
        large = known[counts >= _LEAST_IMAGES]
        if 2 <= len(large) <= _MOST_GROUPS:
            found[f"folder, level {level + 1}"] = np.where(np.isin(names, large), names, "")
    return found


def _numbers(split: Split, edges: Ints | None) -> Mapping[str, npt.NDArray[np.str_]]:
    """Group by the mean of the pixels, and by the originals' size."""
    chosen = evenly_spaced(len(split), _MOST_IMAGES)
    brightness = np.full(len(split), np.nan)
    for start in range(0, len(chosen), 128):
        part = chosen[start : start + 128]
        brightness[np.array(part)] = split.read(part).float().mean(dim=(1, 2, 3)).numpy()
    values = {"brightness (0 black, 255 white)": brightness}
    if edges is not None:
        values["size (shorter edge of the original in pixels)"] = edges.astype(np.float64)
    return {
        title: groups
        for title, numbers in values.items()
        if len({*(groups := _quantiles(numbers)).tolist()} - {""}) > 1
    }


def _quantiles(numbers: Floats) -> npt.NDArray[np.str_]:
    """Name the quartile of each number by its limits; empty where the number is not known, or a quartile has too few images."""
    known = np.isfinite(numbers)
    edges = np.unique(np.quantile(numbers[known], np.linspace(0, 1, _QUANTILES + 1)))
    if len(edges) < 2:
        return np.full(len(numbers), "", dtype=str)
    names = np.array([f"{low:.0f} to {high:.0f}" for low, high in itertools.pairwise(edges)])
    place = np.clip(np.searchsorted(edges, numbers, side="right") - 1, 0, len(names) - 1)
    large = np.bincount(place[known], minlength=len(names)) >= _LEAST_IMAGES
    return np.where(known & large[place], names[place], "")


def _natural(name: str) -> tuple[float, str]:
    """Order limits by their numbers and folders by their names."""
    first = name.partition(" ")[0]
    return (float(first) if first.isdigit() else 0.0, name)
