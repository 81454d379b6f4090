"""Images in a folder per class."""

from __future__ import annotations

import itertools
import os
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from trainer import limits, storage
from trainer.artifacts import digest
from trainer.config import Outside
from trainer.data.dataset_schema import UNLABELED, SplitName
from trainer.data.sources.source import (
    SPLIT_NAMES,
    ImageSource,
    Item,
    SourceListing,
    objects_digest,
    read_file,
    size_and_mtime,
)
from trainer.errors import DataError
from trainer.local_files import located

SUFFIXES = frozenset(
    {".jpg", ".jpeg", ".jpe", ".jfif", ".mpo", ".png", ".apng", ".gif", ".bmp", ".webp", ".tif", ".tiff"}
    | {".ppm", ".pgm", ".pbm", ".pnm", ".jp2", ".j2k", ".ico", ".avif", ".heic", ".heif"}
)
"""Endings of the files that are taken for images; a .heic cannot be decoded, and is taken so that it is reported."""


class ImageFolder(ImageSource):
    """`imagefolder:PATH_OR_URI`: the folder of an image is its class, below folders for the splits where there are any."""

    def listing(self) -> SourceListing:
        files = list_files(self.name, self.outside)
        images = [file for file in files if PurePosixPath(file.name).suffix.lower() in SUFFIXES]
        # The topmost folders are splits where one is named train, or all but unlabeled/ are named like splits.
        tops = {SPLIT_NAMES.get(file.name.split("/")[0].lower()) for file in images if "/" in file.name} - {"unlabeled"}
        has_splits = "train" in tops or (bool(tops) and None not in tops)
        placed = [(file, *self._split_and_group(file.name, has_splits)) for file in images]
        groups = {group for _, split, group in placed if split != "unlabeled"}
        if "" in groups:
            raise DataError(
                f"folder {self.name}: images lie in no class's folder; make a folder for each class, and one named unlabeled for the others"
            )
        # A class has the name of its last folder where no other class has the same, else of all of them.
        last = {group: group.rsplit("/", 1)[-1] for group in groups}
        uses = Counter(last.values())
        names = {group: name if uses[name] == 1 else group for group, name in last.items()}
        classes = tuple(sorted(set(names.values())))
        above = {names[group]: group.rpartition("/")[0] for group in groups}
        index = {name: number for number, name in enumerate(classes)}
        items = [
            Item(
                name=file.name,
                location=file.location,
                label=UNLABELED if split == "unlabeled" else index[names[group]],
                split=split,
            )
            for file, split, group in placed
        ]
        others = len(files) - len(images)
        # The card has this text, and its bytes are part of the data set's fingerprint.
        notes = (f"Files without an image's extension, which were not looked at: {others}.",) if others else ()
        return SourceListing(
            items=items, classes=classes, read=read_file, notes=notes, groups=tuple(above[name] for name in classes)
        )

    def version(self) -> str:
        if storage.is_remote(self.name):
            found = objects_digest(self.name, limits.SOURCE_IMAGES, lambda name: not _is_hidden(name))
            if found is None:
                raise DataError(_too_many_files(self.name))
            sha256, count = found
            if not count:
                raise DataError(f"folder {self.name}: does not exist; check data.source")
            return sha256
        return digest([[file.name, *size_and_mtime(file.location)] for file in list_files(self.name, self.outside)])

    def _split_and_group(self, name: str, has_splits: bool) -> tuple[SplitName, str]:
        """Return an image's split and the folders below it, joined by /."""
        parts = name.split("/")[:-1]
        split = SPLIT_NAMES.get(parts[0].lower()) if parts else None
        if split == "unlabeled":
            return split, ""
        if not has_splits:
            return "train", "/".join(parts)
        if split is None:
            raise DataError(
                f"folder {self.name}: {name} lies beside train/, not in a split; move it into train/, val/, test/ or unlabeled/, or away"
            )
        return split, "/".join(parts[1:])


@dataclass(frozen=True, slots=True)
class SourceFile:
    """A file below a source's folder."""

    name: str  # relative to the folder, with /
    location: str  # path or URI


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
                SourceFile(limits.printable_name(name), storage.join(folder, name))
                for name in names
                if not _is_hidden(name)
            )
        else:
            root = storage.local_path(folder)
            if not root.is_dir():
                raise DataError(
                    f"folder {located(root)}: {'is a file' if root.exists() else 'does not exist'}; check data.source"
                )
            found = _walk(root, outside)
        files = sorted(itertools.islice(found, limits.SOURCE_IMAGES + 1), key=lambda file: file.name)
    except OSError as error:
        raise DataError(
            f"folder {folder}: cannot be listed ({error}); check the path and the right to read it"
        ) from error
    if len(files) > limits.SOURCE_IMAGES:
        raise DataError(_too_many_files(folder))
    return files


def _too_many_files(folder: str) -> str:
    return f"folder {folder}: holds more than {limits.SOURCE_IMAGES:,} files; give a part of it"


def _is_hidden(name: str) -> bool:
    return any(part.startswith((".", "__MACOSX")) for part in name.split("/"))


def _walk(root: Path, outside: Outside) -> Iterator[SourceFile]:
    """Yield what `list_files` lists of a folder of this machine, through links too (data sets are often linked), never around a loop."""
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
        with os.scandir(folder) as entries:
            for entry in entries:
                if _is_hidden(entry.name):
                    continue
                path, name = Path(entry.path), prefix + entry.name
                if entry.is_symlink() and outside == "refuse":
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
                    # Names that are not UTF-8 can be stored and shown then.
                    text = os.fsencode(name).decode("utf-8", "replace")
                    yield SourceFile(limits.printable_name(text), entry.path)

    return files(root, "", frozenset())
