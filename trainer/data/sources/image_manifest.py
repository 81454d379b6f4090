"""Images listed in a CSV or Parquet file, with one label each or with several."""

from __future__ import annotations

import difflib
import functools
import hashlib
import os
import re
import unicodedata
from array import array
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from urllib.parse import unquote

import numpy as np

from trainer.config import Outside
from trainer.data.dataset_schema import UNLABELED, SplitName
from trainer.data.sources.columns import Columns
from trainer.data.sources.parquet_table import ENDINGS, ParquetTable
from trainer.data.sources.source import (
    SPLIT_NAMES,
    ImageSource,
    Item,
    SourceListing,
    SourceState,
    UnknownVersionError,
    objects_digest,
    other_kinds,
    read_file,
    size_and_times,
)
from trainer.data.sources.table_file import TableFile, TableRow, class_name, folded
from trainer.io import limits, storage
from trainer.io.artifacts import canonical_json, list_json
from trainer.io.errors import DataError, StorageError
from trainer.io.formatting import listed

SEPARATOR = "|"  # between the labels of an image that may have several; alone it is an image of no class
LISTED_PER_IMAGE, LISTED_AT_LEAST = 20, 100_000
"""Objects of a store that are listed for the version of a manifest, per image of it, and in all: what is listed may hold other objects."""


_HEADINGS: Mapping[str, frozenset[str]] = {
    "path": frozenset(
        {"file", "filename", "file name", "file_name", "filepath", "file path", "file_path", "files", "paths", "name"}
        | {"image", "images", "img", "image_path", "image path", "img_path", "image_id", "photo", "uri", "url"}
    ),
    "label": frozenset(
        {"labels", "class", "classes", "class_name", "category", "categories", "target", "tag", "tags", "y"}
    ),
    "split": frozenset({"splits", "set", "subset", "partition", "fold", "usage", "phase"}),
}  # columns, and headings that others give them: named in a message, not taken for them
_MOSTLY_SPLITS = frozenset({"eval", "evaluation", "holdout", "hold-out", "held out", "held_out", "trainval", "testdev"})
"""Values that no column but that of the split has, although they are none of ours."""


@dataclass(frozen=True, slots=True)
class _Row:
    line: int
    location: str
    name: str
    label: str
    split: SplitName


@dataclass(slots=True)
class _Lines:
    """Lines of a kind."""

    count: int = 0
    first: int = 0

    def add(self, line: int) -> None:
        self.count, self.first = self.count + 1, self.first or line

    def __str__(self) -> str:
        return f"{self.count:,}, first line {self.first}"


@dataclass(frozen=True, kw_only=True)
class _ListColumns:
    """Where the columns of a list are."""

    path: int
    label: int
    split: int | None
    notes: tuple[str, ...]  # what was guessed, and what is not used

    def cells(self, row: TableRow) -> tuple[str, str, str]:
        """Return path, label and split of a row; empty where it ends before them."""
        places = (self.path, self.label, self.split)
        path, label, split = (row.cells[at] if at is not None and at < len(row.cells) else "" for at in places)
        return path, label, split


class ImageManifest(ImageSource):
    """`manifest:FILE.csv` or `FILE.parquet`: columns path, label and split, an image a line."""

    def __init__(self, name: str, outside: Outside, *, multi_label: bool = False) -> None:
        super().__init__(name, outside, multi_label=multi_label)
        self._folder = name.rsplit("/", 1)[0] if "/" in name else "."
        self._real_path = functools.lru_cache(maxsize=1024)(os.path.realpath)

    @functools.cached_property
    def _real_folder(self) -> str:
        """The folder of the list, which is on this machine, without links."""
        return os.path.realpath(storage.local_path(self._folder))

    def listing(self) -> SourceListing:
        table = self._table()
        columns = _columns(table)
        cells: dict[str, int] = {}  # what names labels -> its first line
        numbered: dict[str, int] = {}  # and its place among them
        without, unused = _Lines(), _Lines()  # unlabeled ones: those without a label, and those whose label is not used
        kinds: set[str] = set()

        def listed_items() -> Iterator[Item]:
            for row in self._rows(table, columns):
                number = UNLABELED
                if row.split != "unlabeled":
                    cells.setdefault(row.label, row.line)
                    number = numbered.setdefault(row.label, len(numbered))
                elif row.label:
                    unused.add(row.line)
                    if not self.multi_label:
                        kinds.add(limits.reading(row.label))
                else:
                    without.add(row.line)
                yield Item(name=row.name, location=row.location, label=number, split=row.split)

        items = Columns.of(Item, listed_items(), f"{self._folder}/")
        separator = _separator(table.where, cells, several=self.multi_label)
        named = {
            text: frozenset(
                class_name(table.where(line), part)
                for part in (text.split(separator) if self.multi_label else [text])
                if part.strip()
            )
            for text, line in cells.items()
        }
        classes = tuple(sorted({label for labels in named.values() for label in labels}))
        index = {name: number for number, name in enumerate(classes)}
        members = {text: tuple(sorted(index[label] for label in labels)) for text, labels in named.items()}
        numbers = self.number_labels(members.values(), len(classes), table.name)
        labels = np.array(
            [*(numbers[members[text]] for text in numbered), UNLABELED], dtype=np.int32
        )  # [-1] is the last
        items = items.with_columns(Item, label=labels[items.column("label")])
        notes = [*columns.notes]
        if without.count and index:
            notes.append(f"Lines without a label, whose images are unlabeled: {without}.")
        if unused.count:
            notes.append(f"Lines of the split unlabeled whose label is not used: {unused}.")
        if self.multi_label and separator != SEPARATOR:
            notes.append(
                f"Labels of an image are separated by {separator!r}, since parts of them are labels elsewhere."
            )
        return SourceListing(
            items=items,
            classes=classes,
            label_sets=(*numbers,) if self.multi_label else None,
            read=partial(_read, folder=self._folder),
            notes=(*notes,),
            remarks=(*notes, *other_kinds(kinds, classes)),
        )

    def state(self) -> SourceState:
        table = self._table()
        local = array("q")  # size and times of each image of this machine
        remote: dict[str, set[str]] = {}  # store -> locations of images in it
        for row in self._rows(table, _columns(table)):
            if storage.is_remote(row.location):
                store = "/".join(row.location.split("/", 3)[:3])
                remote.setdefault(store, set()).add(row.location)
            else:
                local.extend(size_and_times(row.location))
        stores = [_objects_state(remote[store]) for store in sorted(remote)]
        versions = [[one.version for one in stores]] if stores else []
        counted = sum(one.bytes for one in stores) + sum(max(size, 0) for size in local[::3])
        sha256 = hashlib.sha256(f"[{canonical_json(table.version)},".encode())
        for piece in list_json(local[at : at + 3].tolist() for at in range(0, len(local), 3)):
            sha256.update(piece.encode())
        sha256.update("".join([*(f",{canonical_json(one)}" for one in versions), "]"]).encode())
        return SourceState(sha256.hexdigest(), len(local) // 3 + sum(one.images for one in stores), counted)

    def _table(self) -> TableFile:
        kind = ParquetTable if self.name.lower().endswith(ENDINGS) else TableFile
        return kind.read(f"manifest {self.name}", self.name, limits.CSV_BYTES)

    def _rows(self, table: TableFile, columns: _ListColumns) -> Iterator[_Row]:
        for count, row in enumerate(table.rows()):
            if count == limits.SOURCE_IMAGES:
                raise DataError(f"{table.name}: lists more than {count:,} images; give a part of it")
            yield self._row(row.line, *columns.cells(row), table.where(row.line))

    def _row(self, line: int, path: str, label: str, split_text: str, where: str) -> _Row:
        if not path:
            raise DataError(f"{where}: needs a path, a label and a split; add the path, or remove the line")
        if any(end in value for value in (path, label, split_text) for end in "\n\r"):
            raise DataError(
                f"{where}: a quoted value goes on in the next line; see whether a quote is missing or too many"
            )
        split = SPLIT_NAMES.get(split_text.casefold() or "train")
        if split is None:
            raise DataError(
                f"{where}: the split {split_text!r} is not known; write train, val, test, unlabeled or nothing"
            )
        if not label and split in ("val", "test"):
            raise DataError(
                f"{where}: {path} of split {split} has no label; add it, or move the image to train as an unlabeled one"
            )
        is_absolute = storage.is_remote(path) or Path(path).is_absolute()
        location = path if is_absolute else f"{self._folder}/{path}"
        try:
            if not location.isascii() and not storage.is_remote(location):
                location = _spelled(storage.local_path(location))
            is_outside = self.outside == "refuse" and not self._holds(location)
        except StorageError as error:
            raise DataError(f"{where}: {error}") from error
        if is_outside:
            raise DataError(
                f"{where}: {limits.cut(path, 200)!r} lies outside of {self._folder}; move it there, or set data.outside=read if you trust "
                "who made the list"
            )
        return _Row(
            line=line,
            location=location,
            name=limits.printable_name(path),
            label=label,
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


# ---- Columns


def _columns(table: TableFile) -> _ListColumns:
    """Find the columns of a list by their headings, and the split also by its values; a `DataError` if one is missing or in doubt."""
    headings = table.headings
    at = {folded(heading): place for place, heading in enumerate(headings)}
    others = [place for heading, place in at.items() if heading not in _HEADINGS]
    missing = [name for name in ("label", "path") if name not in at]
    for name in ("path", "label", "split"):
        if name in at and (kind := table.unread.get(headings[at[name]])):
            raise DataError(
                f"{table.name}: the column {headings[at[name]]!r} has values of type {kind}; write text in it"
                + f", with {SEPARATOR} between the labels of an image" * (name == "label")
            )
    if missing:
        meant = {name: [headings[place] for place in others if _may_be(headings[place], name)] for name in missing}
        hints = [
            f"; rename the heading {' or '.join(map(repr, found))} to {name}" for name, found in meant.items() if found
        ]
        raise DataError(
            f"{table.name}: has no column {' and no '.join(missing)}; {table.head_is} path,label,split, but is "
            f"{limits.cut(','.join(headings), 200)!r}{''.join(hints)}"
        )
    notes = []
    split = at.get("split")
    if others and (split is None or not any(split < len(row.cells) and row.cells[split] for row in table.rows())):
        found = _column_of_splits(table, others)
        if found is not None:
            notes.append(
                f"The column {headings[found]!r} of the list is its split: its values are all names of splits."
            )
            split = found
    unused = [repr(headings[place] or f"column {place + 1}") for place in sorted(others) if place != split]
    if unused:
        notes.append(f"Columns of the list that are not used: {listed(unused, 10)}.")
    return _ListColumns(path=at["path"], label=at["label"], split=split, notes=(*notes,))


def _column_of_splits(table: TableFile, others: Sequence[int]) -> int | None:
    """Return the one of the other columns whose values are all names of splits, if there is one."""
    values: dict[int, set[str]] = {place: set() for place in others}
    for row in table.rows():
        for place in [*values]:
            value = row.cells[place].casefold() if place < len(row.cells) else ""
            if value and value not in SPLIT_NAMES and value not in _MOSTLY_SPLITS:
                del values[place]
            elif value:
                values[place].add(value)
        if not values:
            break
    found = [place for place, of_column in values.items() if of_column & SPLIT_NAMES.keys()]
    named = [repr(table.headings[place]) for place in found]
    if len(found) > 1:
        raise DataError(
            f"{table.name}: the columns {' and '.join(named)} both hold names of splits; name one of them split, and remove the other"
        )
    for place in (place for place in others if place not in found):
        heading = table.headings[place]
        if _may_be(heading, "split") or re.match("is[_ ]?(train|val|test)", folded(heading)):
            raise DataError(
                f"{table.name}: the column {heading!r} may be meant for the split, but its values are not all names of splits; name it "
                "split and write train, val, test or unlabeled in it, or remove it"
            )
    return found[0] if found else None


def _may_be(heading: str, name: str) -> bool:
    """Whether a heading is probably meant for the column of this name."""
    text = folded(heading)
    words = re.split(r"[\W_]+", text)
    return text in _HEADINGS[name] or name in words or difflib.SequenceMatcher(None, text, name).ratio() >= 0.75


# ---- Labels


def _separator(where: Callable[[int], str], cells: Mapping[str, int], *, several: bool) -> str:
    """Return the separator of an image's labels: `|`, or what the cells show.

    A cell counts as several labels if its parts are labels elsewhere; a `DataError` if in doubt. `cells` maps text to its first line.
    """
    if not several:
        for one in (SEPARATOR, ";", ","):
            for text, line in cells.items():
                parts = _parts(text, one)
                if one == SEPARATOR and one in text:
                    what = (
                        "has several labels" if len(parts) > 1 else f"has {SEPARATOR!r}, which separates several labels"
                    )
                elif len(parts) > 1 and all(part in cells for part in parts):
                    what = f"looks like several labels, since {' and '.join(map(repr, parts[:5]))} are labels too"
                else:
                    continue
                raise DataError(
                    f"{where(line)}: {limits.cut(text, 100)!r} {what}; set data.multi_label=true if an image may have several "
                    f"(separated by {SEPARATOR}), or rename the label"
                )
        return SEPARATOR
    if any(SEPARATOR in text for text in cells):
        known = {part for text in cells for part in _parts(text, SEPARATOR)}
        for text, line in cells.items():
            if any(len(_parts(part, ";")) > 1 and known & {*_parts(part, ";")} for part in _parts(text, SEPARATOR)):
                raise DataError(
                    f"{where(line)}: {limits.cut(text, 100)!r} looks like several labels, but the list separates them by "
                    f"{SEPARATOR}; write {SEPARATOR} between them"
                )
        return SEPARATOR
    for one in ";,":
        joined = [text for text in cells if one in text]
        uses = Counter(part for text in cells for part in {*_parts(text, one)})
        # A comma is often part of a name ("Peppers, red"), so each part has to be a label by itself; a semicolon hardly ever is.
        if joined and all(
            any(uses[part] > 1 for part in _parts(text, one))
            if one == ";"
            else all(part in cells for part in _parts(text, one))
            for text in joined
        ):
            return one
        if joined:
            text = joined[0]
            raise DataError(
                f"{where(cells[text])}: {limits.cut(text, 100)!r} may be one label or several; write {SEPARATOR} between the "
                f"labels of an image, or, if it is one label, {SEPARATOR} after it"
            )
    return SEPARATOR


def _parts(text: str, separator: str) -> list[str]:
    return [part.strip() for part in text.split(separator) if part.strip()]


# ---- Files


def _spelled(path: Path) -> str:
    """Return a path with each name in its form on the disk: as given, composed (NFC), or decomposed (NFD) as macOS and its archives do."""
    place = path.anchor
    for part in path.parts[1 if path.anchor else 0 :]:
        forms = [os.path.join(place, form) for form in dict.fromkeys((part, *_forms(part)))]  # noqa: PTH118  # keeps ..
        place = next(filter(os.path.lexists, forms), forms[0])
    return place


def _forms(name: str) -> tuple[str, str]:
    return unicodedata.normalize("NFC", name), unicodedata.normalize("NFD", name)


def _read(location: str, folder: str) -> bytes:
    """Read an image; one of a store also where its name there has the other of Unicode's forms."""
    try:
        return read_file(location)
    except FileNotFoundError:
        if location.isascii() or not storage.is_remote(location):
            raise
        start = f"{folder}/" if location.startswith(f"{folder}/") else ""
        for other in {f"{start}{name}" for name in _forms(location.removeprefix(start))} - {location}:
            try:
                return read_file(other)
            except FileNotFoundError:
                continue
        raise


def _objects_state(locations: Set[str]) -> SourceState:
    """Digest objects of one store from a listing of the folder that holds them all: a thousand per request, not a request for each.

    An `UnknownVersionError` if that folder holds far more objects.
    """
    shared = os.path.commonprefix([min(locations), max(locations)])  # noqa: RUF071  # commonpath would make s3:/ of s3://
    folder = re.split("[^\\x00-\\x7f]", shared)[0].rpartition("/")[
        0
    ]  # up to where names may have another of Unicode's forms
    composed = {unicodedata.normalize("NFC", location) for location in locations}
    most = max(LISTED_AT_LEAST, LISTED_PER_IMAGE * len(locations))
    found = objects_digest(
        folder, most, lambda name: unicodedata.normalize("NFC", storage.join(folder, name)) in composed
    )
    if found is None:
        raise UnknownVersionError(
            f"{folder} holds many more objects than the {len(locations):,} images; put the images into a folder"
        )
    return found
