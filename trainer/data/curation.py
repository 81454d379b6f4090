"""Curation: which images are kept, and in which split, decided from content keys and labels alone, without pixels.

First, pictures with contradicting labels are quarantined. Then one of each set of equal pictures is kept, and none for training that is
also in val or test. Last, val and test are taken from train where the source lacks them.
"""

from __future__ import annotations

import hashlib
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TypeAlias

from trainer.config import DataSettings
from trainer.data.dataset_schema import UNLABELED, SplitName
from trainer.io.errors import DataError
from trainer.io.formatting import listed

Members: TypeAlias = Sequence[Sequence[int]]  # the classes of each label (`SourceListing.members`)


@dataclass(frozen=True, kw_only=True, slots=True)
class ImageCandidate:
    """A decoded image that may be kept."""

    row: int = -1  # row of its stored picture, once all are decoded
    name: str  # its name in the source
    label: int  # index of its class, or of its set of classes (`SourceListing.members`); or -1
    split: SplitName
    key: str  # content key: equal for equal pictures
    width: int  # of the original, upright, in pixels
    height: int  # of the original, upright, in pixels
    gray_peak: int = 0  # the largest of its grays of 16 bits; 0 of other pictures
    appearance: str = ""  # how it looks, as `near_duplicates.appearance` describes it


@dataclass(frozen=True, kw_only=True, slots=True)
class Quarantined:
    """An image that cannot be used."""

    name: str
    reason: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Dropped:
    """A good image that was left out because an equal one is kept."""

    name: str
    split: SplitName
    kept_name: str
    kept_split: SplitName

    @property
    def is_leakage(self) -> bool:
        """Whether training, or the choice of the model, would have seen the picture on which the model is measured."""
        return self.split != self.kept_split and self.kept_split in ("val", "test")


def quarantine_contradictions(
    candidates: Sequence[ImageCandidate], label_names: Sequence[str]
) -> tuple[list[ImageCandidate], list[Quarantined]]:
    """Quarantine equal pictures with different labels, and unlabeled copies of them; returns the others and the quarantined ones."""
    good: list[ImageCandidate] = []
    bad: list[Quarantined] = []
    labeled_copies: defaultdict[str, list[ImageCandidate]] = defaultdict(list)
    for candidate in candidates:
        if candidate.label != UNLABELED:
            labeled_copies[candidate.key].append(candidate)
    for candidate in candidates:
        copies = labeled_copies.get(candidate.key, ())
        if len({copy.label for copy in copies}) < 2:
            good.append(candidate)
        else:
            labeled = ", ".join(f"{copy.name} ({label_names[copy.label]})" for copy in copies)
            bad.append(Quarantined(name=candidate.name, reason=f"contradicting labels of one picture: {labeled}"))
    return good, bad


def drop_copies(candidates: Sequence[ImageCandidate]) -> tuple[list[ImageCandidate], list[Dropped]]:
    """Keep one of equal pictures: the first in test, else val, else train, else unlabeled; returns the kept and the dropped ones."""
    order: tuple[SplitName, ...] = ("test", "val", "train", "unlabeled")
    kept: dict[str, ImageCandidate] = {}
    for candidate in sorted(candidates, key=lambda candidate: order.index(candidate.split)):
        kept.setdefault(candidate.key, candidate)
    dropped = [
        Dropped(name=candidate.name, split=candidate.split, kept_name=first.name, kept_split=first.split)
        for candidate in candidates
        if (first := kept[candidate.key]) is not candidate
    ]
    return [candidate for candidate in candidates if kept[candidate.key] is candidate], dropped


def take_missing_splits(
    candidates: Sequence[ImageCandidate],
    given: Collection[SplitName],
    settings: DataSettings,
    members: Members,
    groups: Mapping[str, int] | None = None,
) -> list[ImageCandidate]:
    """Take val and test from train, class by class, where the source does not give them; the candidates stay in their order.

    An image has a fixed place in [0, 1), drawn from its content and `split_seed`. Of a class's N images the `test_fraction` x N with
    the smallest places are test, the next `val_fraction` x N are val, both rounded and at least one, and the rest is train. So every
    class has its share, however small it is, and an image that is added or removed moves at most the one image at each limit.

    A group (`groups`: content key -> its number) stays together: at the smallest place of its images it goes to test, or else to val, if
    there is room for all of them in their classes' shares, and to train if there is not. Other images are alone.

    Where an image may have several classes, it counts as one of the rarest of them, so that rare classes have their share, and one image
    of each class stays in train.
    """
    fractions = missing_fractions(given, settings)
    taken = [candidate for candidate in candidates if candidate.split == "train"]
    counts = count_classes(taken, members)
    # Of each label the class of it that the fewest images have, -1 for the label of no class.
    stratum = [min(of_label, key=lambda one: (counts[one], one), default=-1) for of_label in members]
    room = rooms(Counter(stratum[one.label] for one in taken), fractions)
    together: defaultdict[int | str, list[ImageCandidate]] = defaultdict(list)
    for candidate in sorted(taken, key=lambda one: (place(one.key, settings.split_seed), one.key)):
        together[(groups or {}).get(candidate.key, candidate.key)].append(candidate)
    moved: dict[str, SplitName] = {}
    several = any(len(of_label) != 1 for of_label in members)
    left = count_classes(taken, members)  # images of each class in train
    for images in together.values():  # by the smallest place of each
        counts = Counter(stratum[image.label] for image in images)
        lost = count_classes(images, members)
        if several and any(left[one] <= count for one, count in lost.items()):
            continue
        for split, free in room.items():
            if all(free[label] >= count for label, count in counts.items()):
                left -= lost
                moved |= dict.fromkeys((image.key for image in images), split)
                free.update({label: free[label] - count for label, count in counts.items()})
                break
    return [
        replace(candidate, split=moved.get(candidate.key, "train")) if candidate.split == "train" else candidate
        for candidate in candidates
    ]


def missing_fractions(given: Collection[SplitName], settings: DataSettings) -> dict[SplitName, float]:
    """Return the share of train that test and val take; 0 where the source gives them."""
    return {
        "test": 0.0 if "test" in given else settings.test_fraction,
        "val": 0.0 if "val" in given else settings.val_fraction,
    }


def rooms(counts: Mapping[int, int], fractions: Mapping[SplitName, float]) -> dict[SplitName, dict[int, int]]:
    """Return how many images of each label test and val take: split -> label -> number."""
    room: dict[SplitName, dict[int, int]] = {"test": {}, "val": {}}
    for label, count in counts.items():
        test, val = (max(round(fractions[split] * count), 1) if fractions[split] else 0 for split in ("test", "val"))
        while test + val >= count and max(test, val) > 1:  # one is left for train
            test, val = (test - 1, val) if test >= val else (test, val - 1)
        room["test"][label], room["val"][label] = test, val
    return room


def count_classes(candidates: Iterable[ImageCandidate], members: Members) -> Counter[int]:
    """Count the images of each class."""
    return Counter(one for image in candidates if image.label != UNLABELED for one in members[image.label])


def place(key: str, seed: int) -> float:
    """Return the fixed place in [0, 1) of an image with this content key: the upper 53 bits of SHA-256("SEED:KEY")."""
    first = hashlib.sha256(f"{seed}:{key}".encode()).digest()[:8]
    return (int.from_bytes(first, "big") >> 11) / 2**53


def check_classes(
    candidates: Iterable[ImageCandidate],
    classes: Sequence[str],
    settings: DataSettings,
    members: Members,
) -> None:
    """Raise a `DataError` unless there are several classes with at least `min_images_per_class` good labeled images each."""
    if len(classes) == 1:
        raise DataError(f"data.source={settings.source}: has only one class, {classes[0]!r}; add images of another one")
    counts = count_classes(candidates, members)
    few = {label: counts[label] for label in range(len(classes)) if counts[label] < settings.min_images_per_class}
    if few:
        raise DataError(
            f"{_some_classes(classes, few)}: fewer good labeled images than data.min_images_per_class={settings.min_images_per_class}; "
            "add images or remove the class"
        )


def check_splits(
    candidates: Collection[ImageCandidate],
    classes: Sequence[str],
    taught: Collection[int],
    members: Members,
) -> None:
    """Raise a `DataError` if a class has no training image, or val or test is empty.

    `taught` are the classes of which the source has training images: good ones, copies, or images taken for val and test.
    """
    counts = {
        split: count_classes((one for one in candidates if one.split == split), members)
        for split in ("train", "val", "test")
    }
    for split, of_split in counts.items():
        if not of_split:
            there = any(candidate.split == split for candidate in candidates)
            what = (
                "has images, but none of any class"
                if there
                else "is empty: the source has no good labeled image for it"
            )
            raise DataError(f"split {split} {what}; add some")
    untaught = {label: 0 for label in range(len(classes)) if not counts["train"][label]}
    unlisted = {label: counts["val"][label] + counts["test"][label] for label in untaught if label not in taught}
    if unlisted:
        where = " and ".join(split for split in ("val", "test") if any(counts[split][label] for label in unlisted))
        raise DataError(
            f"{_some_classes(classes, unlisted)}: the source has no training image of it, only images in {where}, so it cannot be learned; "
            f"add training images, remove the class from {where}, or correct its name if it is another one in train"
        )
    if untaught:
        raise DataError(
            f"{_some_classes(classes, untaught)}: no training image is left beside those of val and test; add training images "
            "or remove the class"
        )


def _some_classes(classes: Sequence[str], counts: Mapping[int, int]) -> str:
    shown = listed([f"{classes[label]!r} ({count})" for label, count in counts.items()], 5)
    return f"{'class' if len(counts) == 1 else 'classes'} {shown}"
