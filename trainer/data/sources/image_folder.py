"""Images in a folder per class."""

from __future__ import annotations

from collections import Counter
from pathlib import PurePosixPath

from trainer import storage
from trainer.artifacts import digest
from trainer.data.dataset_schema import UNLABELED, SplitName
from trainer.data.sources.source import (
    SPLIT_NAMES,
    ImageSource,
    Item,
    SourceListing,
    list_files,
    read_file,
    remote_folder_version,
    size_and_mtime,
)
from trainer.errors import DataError

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
        return SourceListing(items=items, classes=classes, read=read_file, notes=notes)

    def version(self) -> str:
        if storage.is_remote(self.name):
            return remote_folder_version(self.name)
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
