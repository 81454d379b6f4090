"""What every source of images has in common: its items, its listing, its version."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from trainer.config import Outside
from trainer.data.dataset_schema import SplitName

SPLIT_NAMES: Mapping[str, SplitName] = {
    "train": "train",
    "training": "train",
    "val": "val",
    "valid": "val",
    "validation": "val",
    "test": "test",
    "testing": "test",
    "unlabeled": "unlabeled",
    "unlabelled": "unlabeled",
    "unsupervised": "unlabeled",
}
"""Names that sources give their splits, in lower case."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Item:
    """An image of a source, not yet read."""

    name: str
    """Its name in messages and on the data card, relative to the source."""
    location: str
    """Where the listing's `read` finds it."""
    label: int
    """Index of its class, or -1."""
    split: SplitName
    """The split that the source puts it in; `train` where the source has no splits."""


@dataclass(frozen=True, kw_only=True)
class SourceListing:
    """The images of a source."""

    items: Sequence[Item]
    """In an order that depends on names only."""
    classes: tuple[str, ...]
    """Name of each class, in the order of the labels."""
    read: Callable[[str], bytes]
    """Location -> the image file's bytes; can be pickled for another process. Raises OSError."""
    notes: tuple[str, ...] = ()
    """What was left out, for the data card."""


class UnknownVersionError(Exception):
    """It cannot be known whether the images have changed; the text says why."""


class ImageSource(ABC):
    """A kind of `data.source`, with a subclass for each."""

    def __init__(self, name: str, outside: Outside) -> None:
        """Check nothing yet.

        Args:
            name: the text after the colon of `data.source`.
            outside: whether images outside of the source may be read, as in `data.outside`.
        """
        self.name, self.outside = name, outside

    @abstractmethod
    def listing(self) -> SourceListing:
        """List the images without reading them.

        Raises:
            DataError: the source is missing, leads out of itself, or exceeds a limit.
            StorageError: the store does not answer or refuses.
        """

    @abstractmethod
    def version(self) -> str:
        """Return a text that changes when the images change, without reading them.

        Raises:
            UnknownVersionError: that cannot be known.
            DataError: the source is missing, or exceeds a limit.
            StorageError: the store does not answer or refuses.
        """
