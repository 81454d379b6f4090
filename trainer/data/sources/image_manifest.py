"""Images listed in a CSV file, with one label each or with several."""

from __future__ import annotations

import csv
import functools
import io
import os
from collections.abc import Iterator, Mapping, Set
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import unquote

from trainer import limits, storage
from trainer.artifacts import digest
from trainer.config import Outside
from trainer.data.dataset_schema import UNLABELED, SplitName
from trainer.data.sources.source import (
    SPLIT_NAMES,
    ImageSource,
    Item,
    SourceListing,
    UnknownVersionError,
    objects_digest,
    read_file,
    size_and_mtime,
)
from trainer.errors import DataError, StorageError

SEPARATOR = "|"
"""Between the labels of an image that may have several; alone it is an image of no class."""
LISTED_PER_IMAGE, LISTED_AT_LEAST = 20, 100_000
"""Objects of a store that are listed for the version of a manifest, per image of it, and in all: what is listed may hold other objects."""


@dataclass(frozen=True, slots=True)
class _Row:
    location: str
    name: str
    label: str
    split: SplitName


class ImageManifest(ImageSource):
    """`manifest:FILE.csv`: columns path, label and split, an image a line."""

    def __init__(self, name: str, outside: Outside, *, multi_label: bool = False) -> None:
        super().__init__(name, outside, multi_label=multi_label)
        self._folder = name.rsplit("/", 1)[0] if "/" in name else "."
        self._real_path = functools.lru_cache(maxsize=1024)(os.path.realpath)

    @functools.cached_property
    def _real_folder(self) -> str:
        """The folder of the list, which is on this machine, without links."""
        return os.path.realpath(storage.local_path(self._folder))

    def listing(self) -> SourceListing:
        rows = list(self._rows(self._text()))
        named = {row.label: self._labels(row.label) for row in rows if row.split != "unlabeled"}
        classes = tuple(sorted({label for labels in named.values() for label in labels}))
        index = {name: number for number, name in enumerate(classes)}
        members = {text: tuple(sorted(index[label] for label in labels)) for text, labels in named.items()}
        numbers = self.number_labels(members.values(), len(classes), f"manifest {self.name}")
        items = [
            Item(
                name=row.name,
                location=row.location,
                label=UNLABELED if row.split == "unlabeled" else numbers[members[row.label]],
                split=row.split,
            )
            for row in rows
        ]
        return SourceListing(
            items=items, classes=classes, label_sets=(*numbers,) if self.multi_label else None, read=read_file
        )

    def _labels(self, text: str) -> frozenset[str]:
        """Return the labels that a cell of the column names."""
        if not self.multi_label:
            return frozenset({text})
        return frozenset(label for part in text.split(SEPARATOR) if (label := part.strip()))

    def version(self) -> str:
        text = self._text()
        local: list[tuple[int, int]] = []
        remote: dict[str, set[str]] = {}  # store -> locations of images in it
        for row in self._rows(text):
            if storage.is_remote(row.location):
                store = "/".join(row.location.split("/", 3)[:3])
                remote.setdefault(store, set()).add(row.location)
            else:
                local.append(size_and_mtime(row.location))
        if not remote:
            return digest([text, local])
        return digest([text, local, [_objects_version(remote[store]) for store in sorted(remote)]])

    def _text(self) -> str:
        """Read the file; a byte-order mark, as spreadsheets write it, is dropped."""
        try:
            return read_file(self.name, limits.CSV_BYTES).decode("utf-8-sig")
        except FileNotFoundError as error:
            raise DataError(f"manifest {self.name}: does not exist; check data.source") from error
        except UnicodeDecodeError as error:
            raise DataError(f"manifest {self.name}: is not UTF-8 ({error}); save it as UTF-8 text") from error
        except OSError as error:
            raise DataError(f"manifest {self.name}: cannot be read ({error}); check data.source") from error

    def _rows(self, text: str) -> Iterator[_Row]:
        reader = csv.DictReader(io.StringIO(text, newline=""))
        try:
            columns = reader.fieldnames or ()
            missing = {"path", "label"} - set(columns)
            if missing:
                raise DataError(
                    f"manifest {self.name}: has no column {' and no '.join(sorted(missing))}; "
                    f"its first line must be path,label,split, but is {limits.cut(','.join(columns), 200)!r}"
                )
            for count, row in enumerate(reader):
                if count == limits.SOURCE_IMAGES:
                    raise DataError(f"manifest {self.name}: lists more than {count:,} images; give a part of it")
                yield self._row(row, f"manifest {self.name}, line {reader.line_num}")
        except csv.Error as error:
            raise DataError(f"manifest {self.name}, line {reader.line_num}: {error}; mend the line") from error

    def _row(self, row: Mapping[str | None, str | None], where: str) -> _Row:
        path, label, split_text = ((row.get(column) or "").strip() for column in ("path", "label", "split"))
        if not path or None in row:
            raise DataError(
                f"{where}: needs a path, a label and a split; quote a value that has commas, and remove empty lines"
            )
        split = SPLIT_NAMES.get(split_text.lower() or "train")
        if split is None:
            raise DataError(
                f"{where}: the split {split_text!r} is not known; write train, val, test, unlabeled or nothing"
            )
        if not label and split in ("val", "test"):
            raise DataError(
                f"{where}: {path} of split {split} has no label; add it, or move the image to train as an unlabelled one"
            )
        is_absolute = storage.is_remote(path) or Path(path).is_absolute()
        location = path if is_absolute else f"{self._folder}/{path}"
        try:
            is_outside = self.outside == "refuse" and not self._holds(location)
        except StorageError as error:
            raise DataError(f"{where}: {error}") from error
        if is_outside:
            raise DataError(
                f"{where}: {limits.cut(path, 200)!r} lies outside of {self._folder}; move it there, or set data.outside=read if you trust "
                "who made the list"
            )
        return _Row(
            location=location,
            name=limits.printable_name(path),
            label=limits.printable_name(label),
            split=split if label else "unlabeled",
        )

    def _holds(self, location: str) -> bool:
        """Whether an image lies in the folder of the list, also by its links."""
        if storage.is_remote(location) or storage.is_remote(self._folder):
            # A web server may take %2e%2e for .. too.
            return location.startswith(f"{self._folder}/") and ".." not in unquote(location).split("/")
        file = storage.local_path(location)
        real = os.path.join(self._real_path(str(file.parent)), file.name)  # noqa: PTH118  # a Path takes ten times as long
        if file.name == ".." or os.path.islink(real):  # noqa: PTH114  # likewise
            real = os.path.realpath(real)
        return real.startswith(f"{self._real_folder.rstrip('/')}/")


def _objects_version(locations: Set[str]) -> str:
    """Digest objects of one store from one listing of the folder that holds them all: a thousand per request, not a request for each.

    Raises:
        UnknownVersionError: that folder holds far more objects than these.
    """
    shared = os.path.commonprefix([min(locations), max(locations)])  # noqa: RUF071  # commonpath would make s3:/ of s3://
    folder = shared.rpartition("/")[0]
    most = max(LISTED_AT_LEAST, LISTED_PER_IMAGE * len(locations))
    found = objects_digest(folder, most, lambda name: storage.join(folder, name) in locations)
    if found is None:
        raise UnknownVersionError(
            f"{folder} holds many more objects than the {len(locations):,} images; put the images into a folder"
        )
    return found[0]
