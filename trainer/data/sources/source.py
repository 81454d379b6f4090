"""What the sources of images have in common: items, a listing, a version; and files, on this machine or in a store."""

from __future__ import annotations

import hashlib
import itertools
import json
import logging
import os
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from trainer import limits, local_files, storage
from trainer.config import Outside
from trainer.data.dataset_schema import SplitName
from trainer.errors import DataError, ObjectNotFoundError

logger = logging.getLogger(__name__)

_LOG_EVERY = 500_000
"""Listed objects between two lines of the log."""

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
        self.name, self.outside = name, outside

    @abstractmethod
    def listing(self) -> SourceListing:
        """List the images without reading them.

        Raises:
            DataError: the source is missing, leads out of itself, or exceeds a limit.
        """

    @abstractmethod
    def version(self) -> str:
        """Return a text that changes when the images change, without reading them.

        Raises:
            UnknownVersionError: that cannot be known.
            DataError: the source is missing, or exceeds a limit.
        """


# ---------------------------------------------------------------------------------------------------------------------
# Files: which there are, their bytes, and whether they have changed


@dataclass(frozen=True, slots=True)
class SourceFile:
    """A file below a source's folder."""

    name: str
    """Relative to the folder, with /."""
    location: str
    """Path or URI."""


def read_file(location: str, limit: int = limits.IMAGE_BYTES) -> bytes:
    """Read a local file or a URI of at most `limit` bytes.

    Raises:
        OSError: it cannot be read.
        ObjectTooLargeError: it has more bytes.
        StorageError: the store does not answer or refuses, which says nothing about the image.
    """
    if not storage.is_remote(location):
        return local_files.read_file(storage.local_path(location), limit=limit)
    try:
        return storage.read_limited(location, limit)
    except ObjectNotFoundError as error:
        raise FileNotFoundError(str(error)) from error


def size_and_mtime(location: str) -> tuple[int, int]:
    """Return size and time of change (in ns) of a local file; (-1, 0) where there is none, so that its arrival counts as a change."""
    try:
        status = storage.local_path(location).stat()
    except FileNotFoundError:
        return -1, 0
    return status.st_size, status.st_mtime_ns


def list_files(folder: str, outside: Outside) -> list[SourceFile]:
    """List all files below a folder except hidden ones, sorted by name.

    Raises:
        DataError: the folder is missing, cannot be listed, leads out of itself, or exceeds a limit.
    """
    try:
        if storage.is_remote(folder):
            names = storage.files(folder)
            if not names:
                raise DataError(f"folder {folder}: does not exist; check data.source")
            found: Iterator[SourceFile] = (
                SourceFile(limits.printable_name(name), storage.join(folder, name)) for name in names
            )
        else:
            root = storage.local_path(folder)
            if not root.is_dir():
                raise DataError(
                    f"folder {root}: {'is a file' if root.exists() else 'does not exist'}; check data.source"
                )
            found = _FolderWalk(root, outside).files(root, "", frozenset())
        files = sorted(itertools.islice(found, limits.SOURCE_IMAGES + 1), key=lambda file: file.name)
    except OSError as error:
        raise DataError(
            f"folder {folder}: cannot be listed ({error}); check the path and the right to read it"
        ) from error
    if len(files) > limits.SOURCE_IMAGES:
        raise DataError(_too_many_files(folder))
    return [file for file in files if not _is_hidden(file.name)]


def _too_many_files(folder: str) -> str:
    return f"folder {folder}: holds more than {limits.SOURCE_IMAGES:,} files; give a part of it"


def _is_hidden(name: str) -> bool:
    return any(part.startswith((".", "__MACOSX")) for part in name.split("/"))


class _FolderWalk:
    """A walk through a folder of this machine, within its limits."""

    def __init__(self, root: Path, outside: Outside) -> None:
        self._root, self._real_root, self._outside = root, root.resolve(), outside
        self._folders = 0

    def files(self, folder: Path, prefix: str, above: frozenset[Path]) -> Iterator[SourceFile]:
        """Yield the files below a folder, through links too (data sets are often linked together), but never around a loop."""
        real = folder.resolve()
        if real in above:
            return
        self._folders += 1
        if len(above) > limits.FOLDER_DEPTH:
            raise DataError(
                f"folder {self._root}: {limits.cut(prefix, 200)} lies deeper than {limits.FOLDER_DEPTH} folders; move its images up"
            )
        if self._folders > limits.FOLDERS:
            raise DataError(
                f"folder {self._root}: holds more than {limits.FOLDERS:,} folders, counted as often as links lead to them; "
                "remove such links, or give a part of it"
            )
        with os.scandir(folder) as entries:
            for entry in entries:
                path, name = Path(entry.path), prefix + entry.name
                followed = entry.is_symlink() and not _is_hidden(entry.name) and self._outside == "refuse"
                if followed and not path.resolve().is_relative_to(self._real_root):
                    raise DataError(
                        f"folder {self._root}: {name} is a link to {path.resolve()}, which lies outside of it; remove it, or set "
                        "data.outside=read if you trust who made it"
                    )
                if entry.is_dir():
                    yield from self.files(path, f"{name}/", above | {real})
                # A dangling link counts as a file, so that it is reported; a pipe does not, since reading it would block.
                elif entry.is_file() or not path.exists():
                    text = os.fsencode(name).decode(
                        "utf-8", "replace"
                    )  # names that are not UTF-8 can be stored and shown then
                    yield SourceFile(limits.printable_name(text), entry.path)


def remote_folder_version(folder: str) -> str:
    """Digest the names, sizes and ETags of all objects below a URI, hidden ones left out.

    Raises:
        UnknownVersionError: the store lists nothing that changes with the content.
        DataError: there is no such folder, or it exceeds a limit.
    """
    objects = ObjectsDigest(folder)
    for one in objects.listed(limits.SOURCE_IMAGES):
        if not _is_hidden(one.name):
            objects.add(one)
    if objects.is_cut_off:
        raise DataError(_too_many_files(folder))
    if not objects.count:
        raise DataError(f"folder {folder}: does not exist; check data.source")
    return objects.hexdigest()


class ObjectsDigest:
    """A digest of what a store lists below a URI, in little memory, since there may be millions of objects."""

    def __init__(self, uri: str) -> None:
        self._uri, self._digest = uri, hashlib.sha256()
        self.count = 0
        """Objects that were added."""
        self.is_cut_off = False
        """Whether there are more than were listed."""

    def listed(self, most: int) -> Iterator[storage.Listed]:
        """Yield the objects below the URI, at most `most`.

        Raises:
            UnknownVersionError: it is on a web server.
        """
        if self._uri.startswith(("http://", "https://")):
            raise UnknownVersionError("web servers list nothing")
        start, number = time.monotonic(), 0
        for number, one in enumerate(storage.listing(self._uri), start=1):
            if number > most:
                self.is_cut_off = True
                break
            yield one
            if number % _LOG_EVERY == 0:
                logger.info("listing %s: %s objects in %.0f s", self._uri, f"{number:,}", time.monotonic() - start)
        logger.info("%s: %s objects listed in %.1f s", self._uri, f"{number:,}", time.monotonic() - start)

    def add(self, one: storage.Listed) -> None:
        """Add an object to the digest.

        Raises:
            UnknownVersionError: the store lists nothing of it that changes with its content.
        """
        if not one.tag:
            raise UnknownVersionError(
                f"the store says nothing of {storage.join(self._uri, one.name)} that changes with its content"
            )
        self._digest.update(f"{json.dumps(one)}\n".encode())
        self.count += 1

    def hexdigest(self) -> str:
        """Return the SHA-256 of the objects that were added, as hexadecimal text."""
        return self._digest.hexdigest()
