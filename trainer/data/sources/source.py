"""What the sources of images have in common: items, a listing, a version; how a file is read, and whether files have changed."""

from __future__ import annotations

import hashlib
import json
import logging
import statistics
import time
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from trainer.config import Outside
from trainer.config.rules import FEW_LABELS
from trainer.data.dataset_schema import UNLABELED, SplitName
from trainer.data.sources import s3_inventory
from trainer.data.sources.columns import Columns
from trainer.io import limits, local_files, storage
from trainer.io.errors import DataError, ObjectNotFoundError
from trainer.io.formatting import listed

logger = logging.getLogger(__name__)

_LOG_EVERY = 500_000  # listed objects between two lines of the log

NO_CLASS = "no class"  # name of the label of an image that is of no class
SPLIT_NAMES: Mapping[str, SplitName] = {
    "train": "train",
    "training": "train",
    "val": "val",
    "valid": "val",
    "validation": "val",
    "dev": "val",
    "development": "val",
    "test": "test",
    "testing": "test",
    "unlabeled": "unlabeled",
    "unlabelled": "unlabeled",
    "unsupervised": "unlabeled",
}  # names that sources give their splits, in lower case


def split_of(name: str) -> SplitName | None:
    """Return the split that a name stands for, however it is written; None where it is none."""
    return SPLIT_NAMES.get(limits.reading(name).casefold())


@dataclass(frozen=True, kw_only=True, slots=True)
class Item:
    """An image of a source, not yet read."""

    name: str  # name in messages and on the data card, relative to the source
    location: str  # argument of the listing's `read`
    label: int  # index of the class, or of the set of classes; or -1
    split: SplitName  # split in the source; `train` in a source without splits
    state: str = ""  # size and ETag of the file as the store lists it; empty where it was not listed


@dataclass(frozen=True, kw_only=True)
class SourceListing:
    """The images of a source."""

    items: Columns[Item]  # in an order that depends on names only
    classes: tuple[str, ...]  # name of each class, in the order of the labels
    label_sets: tuple[tuple[int, ...], ...] | None = None  # as `DatasetDescription.label_sets`
    read: Callable[[str], bytes]  # location -> the file's bytes; can be pickled for another process; raises OSError
    notes: tuple[str, ...] = ()  # what was left out, for the data card
    remarks: tuple[str, ...] = ()  # what was left out, taken together or is doubtful, with examples, for the log
    groups: tuple[str, ...] = ()  # folders above each class's own, joined by /, by label; none without folders

    @cached_property
    def counts(self) -> Counter[tuple[SplitName, int]]:
        """The number of images of each split and label; of 0 there is none."""
        return Counter((item.split, item.label) for item in self.items)

    @cached_property
    def members(self) -> Sequence[tuple[int, ...]]:
        """The classes of each label."""
        return self.label_sets if self.label_sets is not None else [(number,) for number in range(len(self.classes))]

    @cached_property
    def label_names(self) -> Sequence[str]:
        """The name of each label: that of its class, or those of its classes."""
        return [" | ".join(self.classes[one] for one in of_label) or NO_CLASS for of_label in self.members]

    def fitting_recipe(self) -> str:
        """Suggest a recipe for so many labels and unlabeled photos outside of val and test; empty where no measurement does."""
        of_train = {
            label: count for (split, label), count in self.counts.items() if split == "train" and label != UNLABELED
        }
        counts = Counter(of_train)
        unlabeled = sum(count for (split, _), count in self.counts.items() if split == "unlabeled")
        if self.label_sets is not None or not counts:
            return ""
        labels_a_class = statistics.median(counts[label] for label in range(len(self.classes)))
        if labels_a_class > FEW_LABELS or unlabeled < counts.total():
            return ""
        return (
            f"{counts.total():,} labeled images, {labels_a_class:g} a class in the median, and {unlabeled:,} without labels: data for the "
            "recipe few-labels."
        )


class SourceState(NamedTuple):
    """What a source holds, known without reading an image."""

    version: str  # changes when the images change
    images: int = 0  # files that were counted; 0: not known
    bytes: int = 0  # of these files


class UnknownVersionError(Exception):
    """It cannot be known whether the images have changed; the text says why."""


def other_kinds(kinds: Iterable[str], classes: Collection[str]) -> Iterator[str]:
    """Write a sentence on kinds by which unlabeled images are ordered and which are no class, since the teacher knows only classes."""
    other = sorted({*kinds} - {*classes})
    if other:
        shown = listed([*map(repr, other)], 5)
        yield (
            f"Unlabeled images are ordered by kinds of which {len(other):,} are none of the {len(classes):,} classes ({shown}): what "
            "shows other things is called one of the classes by the teacher; label some of it, or move it away."
        )


class ImageSource(ABC):
    """A kind of `data.source`, with a subclass for each."""

    def __init__(self, name: str, outside: Outside, *, multi_label: bool = False) -> None:
        """`multi_label`: whether an image may have several labels, where the kind of source can say so."""
        self.name, self.outside, self.multi_label = name, outside, multi_label

    def number_labels(self, members: Iterable[tuple[int, ...]], classes: int, name: str) -> dict[tuple[int, ...], int]:
        """Number the labels in ascending order: sets of classes where images may have several, else classes."""
        if not self.multi_label:
            return {(label,): label for label in range(classes)}
        different = sorted(set(members))
        most = min(limits.LABEL_SETS, limits.LABEL_CELLS // max(classes, 1))
        if len(different) > most:
            raise DataError(
                f"{name}: has {len(different):,} different sets of {classes:,} labels, more than {most:,}; leave out labels that few "
                "images have"
            )
        return {one: number for number, one in enumerate(different)}

    @abstractmethod
    def listing(self) -> SourceListing:
        """List the images without reading them; a `DataError` if the source is missing, leads out of itself, or exceeds a limit."""

    @abstractmethod
    def state(self) -> SourceState:
        """Return what the source holds now, without reading the images; an `UnknownVersionError` if its version cannot be known."""


# ---- Files, on this machine or in a store


def read_file(location: str, limit: int = limits.IMAGE_BYTES) -> bytes:
    """Read a local file or a URI of at most `limit` bytes.

    An `OSError` says that it cannot be read; a `StorageError`, that the store is away or refuses, which says nothing about the image.
    """
    if not storage.is_remote(location):
        return local_files.read_file(storage.local_path(location), limit=limit)
    try:
        return storage.read_limited(location, limit)
    except ObjectNotFoundError as error:
        raise FileNotFoundError(str(error)) from error


def size_and_times(location: str) -> tuple[int, int, int]:
    """Return size, mtime and ctime (in ns) of a local file; (-1, 0, 0) for a missing one, so that its arrival counts as a change.

    `cp -p`, `rsync -t` and `tar` set the mtime at will; only the system sets the ctime. It also changes where the bytes stay, as in a
    copied data set, which costs no more than reading the images again.
    """
    try:
        status = storage.local_path(location).stat()
    except OSError:  # reading it says why
        return -1, 0, 0
    return status.st_size, status.st_mtime_ns, status.st_ctime_ns


def objects_digest(uri: str, most: int, wanted: Callable[[str], bool]) -> SourceState | None:
    """Digest name, size and ETag of the wanted objects below a URI, in any order and little memory; the version is made of their SHA-256.

    None if there are more than `most` objects. `wanted` decides by the name relative to the URI. An `UnknownVersionError` on a web server,
    and where the store lists nothing of a wanted object that changes with its content.
    """
    if uri.startswith(("http://", "https://")):
        raise UnknownVersionError("web servers list nothing")
    together, count, total, start, number = 0, 0, 0, time.monotonic(), 0
    place, listed_objects = s3_inventory.objects(uri)
    for number, one in enumerate(listed_objects, start=1):
        if number > most:
            break
        if wanted(one.name):
            if not one.tag:
                raise UnknownVersionError(
                    f"the store says nothing of {storage.join(place, one.name)} that changes with its content"
                )
            # An inventory has no order, so their digests are added up.
            together += int.from_bytes(hashlib.sha256(json.dumps(one).encode()).digest(), "big")
            count, total = count + 1, total + one.size
        if number % _LOG_EVERY == 0:
            logger.info("listing %s: %s objects in %.0f s", uri, f"{number:,}", time.monotonic() - start)
    logger.info("%s: %s objects listed in %.1f s", uri, f"{number:,}", time.monotonic() - start)
    return None if number > most else SourceState(f"{together % 2**256:064x}", count, total)
