"""The decode cache: decoded images, kept so that a preparation that is started again, or a later one, decodes only what is missing.

It is a folder of chunks, each of two files under the chunk's name:

    000012.arrow    the squares of the chunk's good images
    000012.jsonl    written after it, with its checksum: the outcome of each image, and SHA-256 of every image file and of the squares

An image of a chunk is used only if it was decoded in the same way from a file of the same name that still holds the same bytes (by size
and ETag where a store lists these, else by SHA-256), and the chunk's squares are whole. A preparation maps squares into memory from a
folder of its own, into which they are linked or copied, so that another preparation that finishes first takes nothing away from it.

Imports nothing heavy, because every process that decodes loads it.
"""

from __future__ import annotations

import logging
import os
import re
import shutil
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any, TypeAlias

from pydantic import ValidationError

from trainer.data.curation import ImageCandidate, Quarantined
from trainer.data.sources import Item
from trainer.io import storage
from trainer.io.base_models import StrictModel
from trainer.io.errors import ObjectDamagedError, ObjectNotFoundError, make_directory, writing_to

logger = logging.getLogger(__name__)

_SUFFIXES = ("jsonl", "arrow")

Outcome: TypeAlias = ImageCandidate | Quarantined


class _Image(StrictModel):
    """An image in the record of its chunk."""

    name: str
    label: int
    content: str  # SHA-256 of the file, or why it cannot be read
    state: str = ""  # `Item.state` of the file that was read; empty where it could not be
    reason: str = ""  # why it is quarantined; empty for a good image, which has the fields below
    key: str = ""
    width: int = 0
    height: int = 0
    gray_peak: int = 0
    appearance: str | None = None  # None in a record of an older version, which did not look


class _Chunk(StrictModel):
    """The record of a chunk."""

    way: str
    squares: str  # SHA-256 of the file with the squares
    images: tuple[_Image, ...]


@dataclass(frozen=True, kw_only=True)
class KeptImage:
    """An image that was decoded before."""

    outcome: Outcome
    content: str  # as in the record
    row: int  # of its square, among those of the chunk, if it is good


@dataclass(frozen=True, kw_only=True)
class DecodeCache:
    """The cached chunks of one preparation; can be pickled for another process."""

    uri: str  # place of the kept chunks
    folder: Path  # place of the squares that this preparation maps
    way: str  # SHA-256 of all settings and versions that decide the outcome of an image file, as hexadecimal text
    stays: bool = False  # whether chunks stay for later preparations, of a source that may have changed

    def squares(self, name: str) -> Path:
        """Return the file with the squares of a chunk."""
        return self.folder / f"{name}.arrow"

    def find(
        self, name: str, items: Sequence[Item], content: Callable[[Item], str]
    ) -> tuple[Sequence[KeptImage | None], bool]:
        """Return of each image of a chunk whether it was decoded before, with its squares in the folder, and whether they are those of all.

        `content` reads an image's file and returns its SHA-256, or why it cannot be read; a `DataError` if reading failed.
        """
        none = [None] * len(items)
        chunk = self._record(name)
        if chunk is None or chunk.way != self.way:
            return none, False
        if any(not image.reason and image.appearance is None for image in chunk.images):  # of an older version
            return none, False
        if not self._has_squares(name, chunk.squares):
            logger.warning("%s: its squares are not whole; decoding these images again", self._uri(name, "jsonl"))
            return none, False
        rows = accumulate((not image.reason for image in chunk.images), initial=0)
        there = {image.name: (image, row) for image, row in zip(chunk.images, rows, strict=False)}
        found = [_kept(item, *there[item.name], content) if item.name in there else None for item in items]
        same = [(image.name, image.label) for image in chunk.images] == [(item.name, item.label) for item in items]
        is_whole = same and None not in found
        if is_whole:
            # The same bytes under another ETag; else each later preparation would read these files again.
            states = [
                _state(item, image.content) if item.state else image.state
                for image, item in zip(chunk.images, items, strict=True)
            ]
            if states != [image.state for image in chunk.images]:
                images = (
                    image.model_copy(update={"state": state}) for image, state in zip(chunk.images, states, strict=True)
                )
                self._write(name, chunk.model_copy(update={"images": tuple(images)}))
        return found, is_whole

    def _record(self, name: str) -> _Chunk | None:
        try:
            return _Chunk.model_validate_json(storage.read_checksummed(self._uri(name, "jsonl")))
        except ObjectDamagedError as error:
            logger.warning("%s; decoding these images again", error)
        except (ObjectNotFoundError, ValidationError):  # none, or one written by another version of this project
            pass
        return None

    def _write(self, name: str, chunk: _Chunk) -> None:
        storage.write_checksummed(self._uri(name, "jsonl"), chunk.model_dump_json(exclude_defaults=True))

    def keep(self, name: str, items: Sequence[Item], outcomes: Sequence[Outcome], contents: Sequence[str]) -> None:
        """Keep a chunk whose squares are written; `contents` has the SHA-256 of each image's file, or why it cannot be read."""
        squares = self.squares(name)
        if storage.is_remote(self.uri):
            storage.write_bytes(self._uri(name, "arrow"), squares.read_bytes())
        else:
            _link(squares, storage.local_path(self._uri(name, "arrow")))
        images = []
        for item, outcome, content in zip(items, outcomes, contents, strict=True):
            if isinstance(outcome, Quarantined):
                found: dict[str, Any] = {"reason": outcome.reason}
            else:
                found = {
                    field: getattr(outcome, field) for field in ("key", "width", "height", "gray_peak", "appearance")
                }
            state = _state(item, content)
            images.append(_Image(name=item.name, label=item.label, content=content, state=state, **found))
        self._write(name, _Chunk(way=self.way, squares=storage.file_digest(squares), images=tuple(images)))

    def has(self, name: str, items: Sequence[Item]) -> bool:
        """Return whether a chunk is kept: of whichever images where all are of this preparation, else of these as a store lists them."""
        if not self.stays:
            return storage.exists(self._uri(name, "jsonl"))
        chunk = self._record(name)
        if chunk is None or chunk.way != self.way or len(chunk.images) != len(items):
            return False
        return all(
            (image.name, image.label) == (item.name, item.label)
            and (not item.state or image.state == _state(item, image.content))
            for image, item in zip(chunk.images, items, strict=True)
        )

    def trim(self, names: Collection[str]) -> None:
        """Remove all chunks but these."""
        for file in storage.files(self.uri):
            name, _, suffix = file.partition(".")
            if name and suffix in _SUFFIXES and name not in names:
                storage.remove_file(storage.join(self.uri, file))

    def remove(self, name: str) -> None:
        """Remove a chunk that was kept after the preparation had ended."""
        for suffix in _SUFFIXES:
            storage.remove_file(self._uri(name, suffix))

    def free(self, names: Iterable[str]) -> None:
        """Give back the disk of squares that are not read any more; those that are kept for another attempt stay, if in the same file."""
        for file in map(self.squares, names):
            if file.stat().st_nlink == 1:
                os.truncate(file, 0)  # a mapped file that is only removed keeps its disk

    def _uri(self, name: str, suffix: str) -> str:
        return storage.join(self.uri, f"{name}.{suffix}")

    def _has_squares(self, name: str, digest: str) -> bool:
        """Bring the squares into the folder; returns whether they are whole."""
        file, uri = self.squares(name), self._uri(name, "arrow")
        if file.exists() and storage.file_digest(file) == digest:  # decoded by this preparation
            return True
        try:
            if storage.is_remote(uri):
                with writing_to(file):
                    file.write_bytes(storage.read_bytes(uri))
            else:
                _link(storage.local_path(uri), file)
        except (FileNotFoundError, ObjectNotFoundError):
            return False
        return storage.file_digest(file) == digest


def _state(item: Item, content: str) -> str:
    """Return the size and ETag by which an image's file is known again; empty where it could not be read, and so is asked for again."""
    return item.state if re.fullmatch(r"[0-9a-f]{64}", content) else ""


def _kept(item: Item, image: _Image, row: int, content: Callable[[Item], str]) -> KeptImage | None:
    known = _state(item, image.content)
    if not (known and image.state == known) and image.content != content(item):
        return None
    if image.reason:
        return KeptImage(outcome=Quarantined(name=image.name, reason=image.reason), content=image.content, row=row)
    values = image.model_dump(exclude={"label", "content", "state", "reason"})
    return KeptImage(
        outcome=ImageCandidate(label=item.label, split=item.split, **values), content=image.content, row=row
    )


def _link(source: Path, target: Path) -> None:
    """Link a file to another path; it is copied only where that is on another disk."""
    make_directory(target.parent)
    temporary = storage.unfinished_file(target)
    with writing_to(target):
        temporary.unlink(missing_ok=True)  # left by a killed process of the same name
        try:
            os.link(source, temporary)
        except FileNotFoundError:
            raise
        except OSError:  # another disk, or a file system without links
            shutil.copyfile(source, temporary)
        os.replace(temporary, target)
