"""The files below a folder, of this machine or of a store: photos, other files, and what systems keep beside them."""

from __future__ import annotations

import itertools
import os
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

import numpy as np
import numpy.typing as npt

from trainer.config import Outside
from trainer.data.sources import s3_inventory
from trainer.data.sources.columns import Columns
from trainer.io import limits, storage
from trainer.io.errors import DataError
from trainer.io.formatting import listed
from trainer.io.local_files import located

SUFFIXES = frozenset(
    {".jpg", ".jpeg", ".jpe", ".jfif", ".mpo", ".png", ".apng", ".gif", ".bmp", ".webp", ".tif", ".tiff"}
    | {".ppm", ".pgm", ".pbm", ".pnm", ".jp2", ".j2k", ".ico", ".avif", ".heic", ".heif"}
)
"""Endings of the files that are taken for images, also of those that this installation cannot decode, so that they are reported."""
_SYSTEM_NAMES = frozenset(
    {"@eadir", "@recycle", "@recently-snapshot", "@sharebin", "@tmp", "@__thumb", "#recycle", "#snapshot"}  # NAS
    | {"$recycle.bin", "recycler", "system volume information", "found.000", "thumbs.db", "ehthumbs.db", "desktop.ini"}
    | {"lost+found", "network trash folder", "temporary items", "icon\r", "__pycache__"}
    | {"thumbnails", "thumbnail", "_thumbnails", "_thumbs"}
)
"""Names, in lower case, of what systems and programs keep beside a user's files, thumbnails above all; so are all with a leading dot."""


@dataclass(frozen=True, slots=True)
class SourceFile:
    """A file below a source's folder."""

    name: str  # relative to the folder, with /
    location: str  # path or URI
    state: str = ""  # as `Item.state`

    @property
    def suffix(self) -> str:
        """Its ending, in lower case; empty where it has none."""
        last = self.name.rpartition("/")[2]
        dot = last.rfind(".")
        return last[dot:].lower() if 0 < dot < len(last) - 1 else ""

    @property
    def folder(self) -> str:
        """The folder that it lies in, relative to the source's; empty for that one."""
        return self.name.rpartition("/")[0]


@dataclass(frozen=True, slots=True)
class Tally:
    """Things by kind: how many there are, and the name that sorts first as an example."""

    counts: Counter[str] = field(default_factory=Counter)
    examples: dict[str, str] = field(default_factory=dict)

    def add(self, kind: str, example: str) -> None:
        """Count one more."""
        self.counts[kind] += 1
        self.examples[kind] = min(example, self.examples.get(kind, example))

    def __str__(self) -> str:
        """List the most frequent kinds."""
        kinds = sorted(self.counts, key=lambda kind: (-self.counts[kind], kind))
        return listed([f"{self.counts[kind]:,} {kind} (such as {self.examples[kind]})" for kind in kinds], 8)


@dataclass(frozen=True, kw_only=True)
class FolderFiles:
    """The files below a folder."""

    files: Columns[SourceFile]  # sorted by name, without those of systems
    empty: Sequence[str]  # folders below it without a file or folder; a store has none
    systems: Tally  # files and folders of systems, which were not looked into

    @cached_property
    def _is_photo(self) -> npt.NDArray[np.bool_]:
        return np.fromiter((file.suffix in SUFFIXES for file in self.files), dtype=np.bool_)

    @cached_property
    def photos(self) -> Columns[SourceFile]:
        """The files with an image's ending."""
        return self.files if self._is_photo.all() else self.files.where(self._is_photo)

    @cached_property
    def others(self) -> Columns[SourceFile]:
        """The files with another ending, or with none."""
        return self.files.where(~self._is_photo)

    def remarks(self) -> tuple[str, ...]:
        """Return the log's remarks on files that are passed over."""
        lines = []
        if self.others:
            endings = Tally()
            for file in self.others:
                endings.add(file.suffix or "without an ending", file.name)
            lines.append(
                f"Files that are not read, since they have no image's ending: {endings}. Give photos among them an ending that fits, "
                "such as .jpg, or convert them."
            )
        if self.systems.counts:
            lines.append(f"Left out, since a system or a program keeps it beside the files: {self.systems}.")
        return tuple(lines)


def list_files(folder: str, outside: Outside) -> FolderFiles:
    """List all files below a folder except hidden ones and those of systems.

    A `DataError` if the folder is missing, cannot be listed, leads out of itself, or exceeds a limit.
    """
    walk = _Walk(outside)
    try:
        if storage.is_remote(folder):
            place, listed_objects = s3_inventory.objects(folder)
            first = next(listed_objects, None)
            if first is None:
                raise DataError(f"folder {folder}: does not exist; check data.source")
            found, base = walk.objects(place, itertools.chain([first], listed_objects)), storage.join(place, "")
        else:
            root = storage.local_path(folder)
            if not root.is_dir():
                raise DataError(
                    f"folder {located(root)}: {'is a file' if root.exists() else 'does not exist'}; check data.source"
                )
            found, base = walk.files(root), os.path.join(root, "")  # noqa: PTH118  # a Path ends without a slash
        files = Columns.of(SourceFile, itertools.islice(found, limits.SOURCE_IMAGES + 1), base).in_order()
    except OSError as error:
        raise DataError(
            f"folder {folder}: cannot be listed ({error}); check the path and the right to read it"
        ) from error
    if len(files) > limits.SOURCE_IMAGES:
        raise DataError(too_many_files(folder))
    return FolderFiles(files=files, empty=sorted(walk.empty), systems=walk.systems)


def too_many_files(folder: str) -> str:
    """Say that a folder exceeds the limit."""
    return f"folder {folder}: holds more than {limits.SOURCE_IMAGES:,} files; give a part of it"


def of_systems(name: str) -> str:
    """Return the part of a file's name up to the first folder, or the file, that is a system's; empty where none is."""
    parts = name.split("/")
    for number, part in enumerate(parts, start=1):
        if part.startswith((".", "__MACOSX")) or part.lower() in _SYSTEM_NAMES:
            return "/".join(parts[:number])
    return ""


class _Walk:
    """Yields the files for `list_files`, and remembers those that it passes over."""

    def __init__(self, outside: Outside) -> None:
        self.outside = outside
        self.empty: list[str] = []
        self.systems = Tally()

    def objects(self, folder: str, objects: Iterable[storage.Listed]) -> Iterator[SourceFile]:
        """Yield the objects of a store."""
        seen = set()
        for name, size, tag in objects:
            if not (system := of_systems(name)):
                state = f"{size} {tag}" if tag else ""
                yield SourceFile(limits.printable_name(name), storage.join(folder, name), state)
            elif system not in seen:
                seen.add(system)
                self._pass_by(system)

    def _pass_by(self, name: str) -> None:
        shown = limits.printable_name(name)
        kind = shown.rpartition("/")[2]
        self.systems.add("hidden" if kind.startswith(".") else kind, shown)

    def files(self, root: Path) -> Iterator[SourceFile]:
        """Yield the files of a folder of this machine, through links too (data sets are often linked), never around a loop."""
        real_root, counted = root.resolve(), itertools.count(1)

        def files(folder: Path, prefix: str, above: frozenset[Path]) -> Iterator[SourceFile]:
            real = folder.resolve()
            if real in above:
                return
            if len(above) > limits.FOLDER_DEPTH:
                raise DataError(
                    f"folder {root}: {limits.cut(prefix, 200)} lies deeper than {limits.FOLDER_DEPTH} folders; move its images up"
                )
            if next(counted) > limits.FOLDERS:
                raise DataError(
                    f"folder {root}: holds more than {limits.FOLDERS:,} folders, counted as often as links lead to them; "
                    "remove such links, or give a part of it"
                )
            is_empty = True
            with os.scandir(folder) as entries:
                for entry in entries:
                    path, name = Path(entry.path), prefix + entry.name
                    if of_systems(entry.name):
                        self._pass_by(_text(name))
                        continue
                    is_empty = False
                    if entry.is_symlink() and self.outside == "refuse":
                        target = Path(os.path.realpath(path))  # Path.resolve raises a RuntimeError for a link to itself
                        if not target.is_relative_to(real_root):
                            raise DataError(
                                f"folder {root}: {name} is a link to {target}, which lies outside of it; remove it, or set "
                                "data.outside=read if you trust who made it"
                            )
                    if entry.is_dir():
                        yield from files(path, f"{name}/", above | {real})
                    # A dangling link counts as a file, so that it is reported; a pipe does not, since reading it would block.
                    elif entry.is_file() or not path.exists():
                        yield SourceFile(limits.printable_name(_text(name)), entry.path)
            if is_empty and prefix:
                self.empty.append(limits.printable_name(_text(prefix.removesuffix("/"))))

        return files(root, "", frozenset())


def _text(name: str) -> str:
    """Make a name that is not UTF-8 one that can be stored and shown."""
    return os.fsencode(name).decode("utf-8", "replace")
