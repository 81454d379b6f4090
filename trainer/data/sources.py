"""Where images come from: `data.source` becomes a list of items in a fixed order, whose bytes are read one by one.

    digits                    the 1,797 handwritten digits that scikit-learn ships, 8 x 8 pixels
    imagefolder:PATH_OR_URI   a folder a class, also nested, with or without train/, val/, test/ above; unlabeled/ has no classes
    manifest:FILE.csv         columns path, label, split; relative paths start at the file's folder; no label: unlabelled
    hub:NAME[:CONFIG]         a data set of the Hugging Face Hub, or a local folder of one

Local paths and every scheme that `storage` knows (`s3://...`) are read alike. What others have put into a source is not trusted: links
and lines that lead out of it are refused unless `data.outside` says otherwise, names are made printable, and there are limits.
"""

from __future__ import annotations

import csv
import errno
import functools
import hashlib
import importlib.metadata
import io
import itertools
import json
import logging
import os
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from trainer import hub, limits, storage
from trainer.artifacts import digest
from trainer.config import Outside
from trainer.data.dataset_schema import UNLABELED, SplitName
from trainer.errors import DataError, ObjectNotFoundError, SettingsError, StorageError

logger = logging.getLogger(__name__)

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
"""How sources call their splits."""

SUFFIXES = frozenset(
    {".jpg", ".jpeg", ".jpe", ".jfif", ".mpo", ".png", ".apng", ".gif", ".bmp", ".webp", ".tif", ".tiff"}
    | {".ppm", ".pgm", ".pbm", ".pnm", ".jp2", ".j2k", ".ico", ".avif", ".heic", ".heif"}
)
"""Files of a folder that are taken for images; a .heic is taken so that it is reported, not passed over."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Item:
    """An image of a source, not yet read."""

    name: str
    """Its name for people, relative to the source."""
    location: str
    """What the listing's `read` needs to find it."""
    label: int
    """Index of its class, or -1."""
    split: SplitName
    """The split that the source puts it in; `train` where the source has no splits."""


@dataclass(frozen=True, kw_only=True)
class SourceListing:
    """What a source holds."""

    items: Sequence[Item]
    """In an order that depends on names only."""
    classes: tuple[str, ...]
    """Name of each class, in the order of the labels."""
    read: Callable[[str], bytes]
    """Location -> the image file's bytes; can be sent to another process. Raises OSError."""
    notes: tuple[str, ...] = ()
    """What was left out, for the data card."""


def list_source(source: str, *, outside: Outside = "refuse") -> SourceListing:
    """List the images of `data.source` without reading them; `outside` is as in the settings.

    Raises:
        SettingsError: it is no source.
        DataError: it is missing, holds no images, says nothing about their labels, leads out of itself, or exceeds a limit.
        StorageError: it is in a store that does not answer or refuses.
    """
    kind, name = _parse(source)
    listing = _LISTERS[kind](name, outside)
    _check_classes(source, listing.classes)
    if not listing.items:
        raise DataError(f"data.source={source}: holds no images; check the path")
    if all(item.label == UNLABELED for item in listing.items):
        raise DataError(
            f"data.source={source}: none of its {len(listing.items)} images has a label; put them into a folder a class, or add labels"
        )
    return listing


def _check_classes(source: str, classes: Sequence[str]) -> None:
    longest = max(classes, key=len, default="")
    if len(longest) > limits.NAME_CHARACTERS:
        raise DataError(
            f"data.source={source}: the name of a class has {len(longest):,} characters, more than {limits.NAME_CHARACTERS}: "
            f"{longest[:40]!r}...; shorten it"
        )


def source_version(source: str, *, outside: Outside = "refuse") -> str:
    """A text that changes when the images behind `data.source` change, found without reading them.

    Files on this machine are told apart by name, size and time of change, objects of a store by key, size and ETag, a data set of the Hub
    by its commit. It is empty where nothing can be known; a line of the log says why.

    Raises:
        SettingsError: it is no source.
        DataError: it is missing, or exceeds a limit; a manifest has a line that cannot be used.
        StorageError: it is in a store that does not answer or refuses.
    """
    kind, name = _parse(source)
    try:
        return _VERSIONS[kind](name, outside)
    except _UnknownVersionError as error:
        logger.warning(
            "data.source=%s: no run can know whether its images have changed (%s), so each run prepares them anew",
            source,
            error,
        )
        return ""


def _parse(source: str) -> tuple[str, str]:
    kind, colon, name = source.partition(":")
    if kind not in _LISTERS or bool(name) == (kind == "digits") or (colon and not name):
        raise SettingsError(
            f"data.source must be digits, imagefolder:PATH_OR_URI, manifest:FILE.csv or hub:NAME[:CONFIG], got {source!r}"
        )
    return kind, os.path.expanduser(name)  # noqa: PTH111  # a Path would turn s3:// into s3:/


# ---------------------------------------------------------------------------------------------------------------------
# Files


@dataclass(frozen=True, slots=True)
class _File:
    name: str
    """Relative to the folder, with /."""
    location: str
    """Path or URI."""


def read_file(location: str, limit: int = limits.IMAGE_BYTES) -> bytes:
    """The bytes of a local file or of a URI, of which there may be `limit`.

    Raises:
        OSError: it cannot be read.
        ObjectTooLargeError: it has more bytes.
        StorageError: the store does not answer or refuses, which says nothing about the image.
    """
    if not storage.is_remote(location):
        return storage.read_file(storage.local_path(location), limit=limit)
    try:
        return storage.read_limited(location, limit)
    except ObjectNotFoundError as error:
        raise FileNotFoundError(str(error)) from error


def _stamp(location: str) -> tuple[int, int]:
    """Size and time of change of a local file; (-1, 0) where there is none, so that its arrival counts as a change."""
    try:
        status = storage.local_path(location).stat()
    except FileNotFoundError:
        return -1, 0
    return status.st_size, status.st_mtime_ns


def _files(folder: str, outside: Outside) -> list[_File]:
    """All files below a folder but hidden ones, sorted by name.

    Raises:
        DataError: the folder is missing, cannot be listed, leads out of itself, or exceeds a limit.
        StorageError: the store does not answer or refuses.
    """
    try:
        found = (
            _remote_files(folder) if storage.is_remote(folder) else _local_files(storage.local_path(folder), outside)
        )
        files = sorted(itertools.islice(found, limits.SOURCE_IMAGES + 1), key=lambda file: file.name)
    except OSError as error:
        raise DataError(
            f"folder {folder}: cannot be listed ({error}); check the path and the right to read it"
        ) from error
    if len(files) > limits.SOURCE_IMAGES:
        raise _too_many_files(folder)
    return [file for file in files if not any(map(_is_hidden, file.name.split("/")))]


def _too_many_files(folder: str) -> DataError:
    return DataError(f"folder {folder}: holds more than {limits.SOURCE_IMAGES:,} files; give a part of it")


def _missing_folder(folder: str) -> DataError:
    return DataError(f"folder {folder}: does not exist; check data.source")


def _is_hidden(name: str) -> bool:
    return name.startswith((".", "__MACOSX"))


def _remote_files(folder: str) -> Iterator[_File]:
    found = storage.files(folder)
    if not found:
        raise _missing_folder(folder)
    return (_File(limits.printable_name(name), storage.join(folder, name)) for name in found)


def _local_files(root: Path, outside: Outside) -> Iterator[_File]:
    if not root.is_dir():
        raise DataError(f"folder {root}: {'is a file' if root.exists() else 'does not exist'}; check data.source")
    return _Walk(root, outside).files(root, "", frozenset())


class _Walk:
    """A look through a folder of this machine."""

    def __init__(self, root: Path, outside: Outside) -> None:
        self._root, self._real_root, self._outside = root, root.resolve(), outside
        self._folders = 0

    def files(self, folder: Path, prefix: str, above: frozenset[Path]) -> Iterator[_File]:
        """Files below a folder, through links too (data sets are often linked together), but never around a loop."""
        real = folder.resolve()
        if real in above:
            return
        self._count(prefix, len(above))
        with os.scandir(folder) as entries:
            for entry in entries:
                if entry.is_symlink() and not _is_hidden(entry.name):
                    self._check_link(Path(entry.path), prefix + entry.name)
                if entry.is_dir():
                    yield from self.files(Path(entry.path), f"{prefix}{entry.name}/", above | {real})
                elif (
                    entry.is_file() or not Path(entry.path).exists()
                ):  # a dangling link is reported; a pipe would block
                    yield _File(_readable(prefix + entry.name), entry.path)

    def _count(self, prefix: str, depth: int) -> None:
        self._folders += 1
        if depth > limits.FOLDER_DEPTH:
            raise DataError(
                f"folder {self._root}: {limits.cut(prefix, 200)} lies deeper than {limits.FOLDER_DEPTH} folders; move its images up"
            )
        if self._folders > limits.FOLDERS:
            raise DataError(
                f"folder {self._root}: holds more than {limits.FOLDERS:,} folders, counted as often as links lead to them; "
                "remove such links, or give a part of it"
            )

    def _check_link(self, link: Path, name: str) -> None:
        if self._outside == "refuse" and not link.resolve().is_relative_to(self._real_root):
            raise DataError(
                f"folder {self._root}: {name} is a link to {link.resolve()}, which lies outside of it; remove it, or set data.outside=read "
                "if you trust who made it"
            )


def _readable(name: str) -> str:
    """A file's name as text that can be stored and shown: bytes that are no UTF-8 become a replacement character."""
    return limits.printable_name(os.fsencode(name).decode("utf-8", "replace"))


# ---------------------------------------------------------------------------------------------------------------------
# digits


def _list_digits(_: str, _outside: Outside) -> SourceListing:
    targets = _bundled_digits().target
    items = [
        Item(name=f"digit {index:04d}", location=str(index), label=int(target), split="train")
        for index, target in enumerate(targets)
    ]
    return SourceListing(items=items, classes=tuple(str(digit) for digit in range(10)), read=_read_digit)


@functools.cache
def _bundled_digits() -> Any:
    from sklearn.datasets import load_digits  # here, because it takes a second to import

    return load_digits()


def _read_digit(location: str) -> bytes:
    """A digit as a PNG file; its greys 0..16 are spread over 0..255."""
    from PIL import Image

    greys = (_bundled_digits().images[int(location)] * (255 / 16)).round().astype("uint8")
    buffer = io.BytesIO()
    Image.fromarray(greys).save(buffer, "PNG")
    return buffer.getvalue()


# ---------------------------------------------------------------------------------------------------------------------
# imagefolder


def _list_folder(folder: str, outside: Outside) -> SourceListing:
    files = _files(folder, outside)
    images = [file for file in files if PurePosixPath(file.name).suffix.lower() in SUFFIXES]
    has_splits = _has_splits(images)
    placed = [(file, *_place(file.name, has_splits, folder)) for file in images]
    names = _class_names({group for _, split, group in placed if split != "unlabeled"}, folder)
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
    notes = (f"Files without an image's extension, which were not looked at: {others}.",) if others else ()
    return SourceListing(items=items, classes=classes, read=read_file, notes=notes)


def _has_splits(images: Iterable[_File]) -> bool:
    """Whether the topmost folders are splits: one is called train, or all but unlabeled/ are called like splits."""
    tops = {SPLIT_NAMES.get(file.name.split("/")[0].lower()) for file in images if "/" in file.name} - {"unlabeled"}
    return "train" in tops or (bool(tops) and None not in tops)


def _place(name: str, has_splits: bool, folder: str) -> tuple[SplitName, str]:
    """Split and folder below it of an image."""
    parts = name.split("/")[:-1]
    split = SPLIT_NAMES.get(parts[0].lower()) if parts else None
    if split == "unlabeled":
        return split, ""
    if not has_splits:
        return "train", "/".join(parts)
    if split is None:
        raise DataError(
            f"folder {folder}: {name} lies beside train/, not in a split; move it into train/, val/, test/ or unlabeled/, or away"
        )
    return split, "/".join(parts[1:])


def _class_names(groups: set[str], folder: str) -> dict[str, str]:
    """Folder of a class -> its name: the last folder's where no other class has the same, else all of them."""
    if "" in groups:
        raise DataError(
            f"folder {folder}: images lie in no class's folder; make a folder for each class, and one named unlabeled for the others"
        )
    last = {group: group.rsplit("/", 1)[-1] for group in groups}
    uses = Counter(last.values())
    return {group: name if uses[name] == 1 else group for group, name in last.items()}


# ---------------------------------------------------------------------------------------------------------------------
# manifest


def _list_manifest(manifest: str, outside: Outside) -> SourceListing:
    rows = list(_manifest_rows(manifest, _read_text(manifest), outside))
    classes = tuple(sorted({row.label for row in rows if row.split != "unlabeled"}))
    index = {name: number for number, name in enumerate(classes)}
    items = [
        Item(
            name=row.name,
            location=row.location,
            label=UNLABELED if row.split == "unlabeled" else index[row.label],
            split=row.split,
        )
        for row in rows
    ]
    return SourceListing(items=items, classes=classes, read=read_file)


@dataclass(frozen=True, slots=True)
class _Row:
    location: str
    name: str
    label: str
    split: SplitName


def _manifest_rows(manifest: str, text: str, outside: Outside) -> Iterator[_Row]:
    reader = csv.DictReader(io.StringIO(text, newline=""))
    folder = _Folder(manifest.rsplit("/", 1)[0] if "/" in manifest else ".", outside)
    try:
        _check_columns(manifest, reader.fieldnames or ())
        for count, row in enumerate(reader):
            if count == limits.SOURCE_IMAGES:
                raise DataError(f"manifest {manifest}: lists more than {count:,} images; give a part of it")
            yield _manifest_row(row, f"manifest {manifest}, line {reader.line_num}", folder)
    except csv.Error as error:
        raise DataError(f"manifest {manifest}, line {reader.line_num}: {error}; mend the line") from error


def _check_columns(manifest: str, columns: Sequence[str]) -> None:
    missing = {"path", "label"} - set(columns)
    if missing:
        raise DataError(
            f"manifest {manifest}: has no column {' and no '.join(sorted(missing))}; "
            f"its first line must be path,label,split, but is {limits.cut(','.join(columns), 200)!r}"
        )


class _Folder:
    """Where a manifest lies."""

    def __init__(self, uri: str, outside: Outside) -> None:
        self.uri, self._outside = uri, outside
        self._real = "" if storage.is_remote(uri) else os.path.realpath(storage.local_path(uri))
        self._real_path = functools.lru_cache(maxsize=1024)(os.path.realpath)

    def locate(self, path: str) -> str:
        """Where an image lies whose path stands in the manifest.

        Raises:
            DataError: outside of the folder, and that is to be refused.
            StorageError: it cannot be a path.
        """
        given = storage.is_remote(path) or Path(path).is_absolute()
        location = path if given else f"{self.uri}/{path}"
        if self._outside == "refuse" and not self._holds(location):
            raise DataError(
                f"{limits.cut(path, 200)!r} lies outside of {self.uri}; move it there, or set data.outside=read if you trust who made "
                "the list"
            )
        return location

    def _holds(self, location: str) -> bool:
        if storage.is_remote(location):
            return location.startswith(f"{self.uri}/") and ".." not in location.split("/")
        file = storage.local_path(location)
        real = os.path.join(self._real_path(str(file.parent)), file.name)  # noqa: PTH118  # a Path takes ten times as long
        if file.name == ".." or os.path.islink(real):  # noqa: PTH114  # likewise
            real = os.path.realpath(real)
        return real.startswith(f"{self._real.rstrip('/')}/")


def _manifest_row(row: Mapping[str | None, str | None], where: str, folder: _Folder) -> _Row:
    path, label, split_text = ((row.get(column) or "").strip() for column in ("path", "label", "split"))
    if not path or None in row:
        raise DataError(
            f"{where}: needs a path, a label and a split; quote a value that has commas, and remove empty lines"
        )
    split = SPLIT_NAMES.get(split_text.lower() or "train")
    if split is None:
        raise DataError(f"{where}: the split {split_text!r} is not known; write train, val, test, unlabeled or nothing")
    if not label and split in ("val", "test"):
        raise DataError(
            f"{where}: {path} of split {split} has no label; add it, or move the image to train as an unlabelled one"
        )
    try:
        location = folder.locate(path)
    except (DataError, StorageError) as error:
        raise DataError(f"{where}: {error}") from error
    return _Row(
        location=location,
        name=limits.printable_name(path),
        label=limits.printable_name(label),
        split=split if label else "unlabeled",
    )


def _read_text(manifest: str) -> str:
    """A manifest's text; a byte-order mark, as spreadsheets write it, is dropped."""
    try:
        return read_file(manifest, limits.CSV_BYTES).decode("utf-8-sig")
    except FileNotFoundError as error:
        raise DataError(f"manifest {manifest}: does not exist; check data.source") from error
    except UnicodeDecodeError as error:
        raise DataError(f"manifest {manifest}: is not UTF-8 ({error}); save it as UTF-8 text") from error
    except OSError as error:
        raise DataError(f"manifest {manifest}: cannot be read ({error}); check data.source") from error


# ---------------------------------------------------------------------------------------------------------------------
# hub


@dataclass(frozen=True)
class _HubReader:
    """Reads the image file of a row; the tables are memory-mapped, so a copy in another process is cheap."""

    splits: Mapping[str, Any]
    column: str
    folders: tuple[str, ...]
    """Where images that the tables only name may lie; anywhere if there are none."""

    def __call__(self, location: str) -> bytes:
        split, _, index = location.rpartition("/")
        image = self.splits[split][int(index)][self.column]
        if image is None:
            return b""
        return image["bytes"] if image["bytes"] is not None else self._read_named(image["path"])

    def _read_named(self, path: str) -> bytes:
        real = "" if storage.is_remote(path) else os.path.realpath(path)
        if self.folders and not any(real.startswith(f"{folder}/") for folder in self.folders):
            raise PermissionError(errno.EPERM, f"lies outside of {' and '.join(self.folders)} (data.outside)", path)
        return read_file(path)


def _hub_folders(reference: str, outside: Outside) -> tuple[str, ...]:
    """The data set's own folder, or the caches for what comes from the Hub."""
    import datasets  # type: ignore[import-untyped]  # here, because it takes a second to import

    if outside == "read":
        return ()
    name = reference.partition(":")[0]
    folders = [name] if Path(name).is_dir() else [datasets.config.HF_DATASETS_CACHE, datasets.config.HF_CACHE_HOME]
    return tuple(os.path.realpath(folder) for folder in folders)


def _list_hub(reference: str, outside: Outside) -> SourceListing:
    splits = _load_hub(reference)
    image_column, label_column, classes = _hub_columns(reference, next(iter(splits.values())).features)
    import datasets

    items: list[Item] = []
    notes: list[str] = []
    for name, table in splits.items():
        split = SPLIT_NAMES.get(name.lower())
        if split is None:
            notes.append(
                f"Split {name} ({len(table)} images) is none of train, val, test and unlabeled, and was not used."
            )
        else:
            items += _hub_items(reference, name, split, table[label_column][:])
    raw = {name: table.cast_column(image_column, datasets.Image(decode=False)) for name, table in splits.items()}
    read = _HubReader(
        {name: table.select_columns([image_column]) for name, table in raw.items()},
        image_column,
        _hub_folders(reference, outside),
    )
    return SourceListing(items=items, classes=classes, read=read, notes=tuple(notes))


def _hub_items(reference: str, name: str, split: SplitName, labels: Iterable[int | None]) -> list[Item]:
    """Items of one split; one without any label (as some tests are published) serves as unlabelled images."""
    known = [UNLABELED if label is None or label < 0 else label for label in labels]
    without = known.count(UNLABELED)
    if 0 < without < len(known) and split in ("val", "test"):
        raise DataError(
            f"hub data set {reference}: {without} images of split {name} have no label; remove them from it"
        )
    return [
        Item(
            name=f"{name}/{index:07d}",
            location=f"{name}/{index}",
            label=UNLABELED if split == "unlabeled" else label,
            split="unlabeled" if label == UNLABELED else split,
        )
        for index, label in enumerate(known)
    ]


def _load_hub(reference: str) -> dict[str, Any]:
    """Split -> table, of the Hub or of a local folder (saved by `save_to_disk`, or files that `load_dataset` takes)."""
    import datasets

    name, _, config = reference.partition(":")
    saved = any((Path(name) / file).is_file() for file in ("dataset_dict.json", "state.json"))
    try:
        loaded = datasets.load_from_disk(name) if saved else datasets.load_dataset(name, config or None)
    except Exception as error:  # the Hub's client and its file readers raise many kinds
        raise DataError(
            f"hub data set {reference}: cannot be loaded ({error}); check its name and configuration, the network, and HF_TOKEN"
        ) from error
    return dict(loaded) if isinstance(loaded, datasets.DatasetDict) else {"train": loaded}


def _hub_columns(reference: str, columns: Mapping[str, Any]) -> tuple[str, str, tuple[str, ...]]:
    """The image's column, the label's, and the names of the classes."""
    import datasets

    image = _one_column(
        reference, [name for name, kind in columns.items() if isinstance(kind, datasets.Image)], "Image", "image"
    )
    labels = [name for name, kind in columns.items() if isinstance(kind, datasets.ClassLabel)]
    label = _one_column(reference, labels, "ClassLabel", "label")
    return image, label, tuple(map(limits.printable_name, columns[label].names))


def _one_column(reference: str, found: Sequence[str], kind: str, usual: str) -> str:
    if len(found) == 1 or usual in found:
        return usual if usual in found else found[0]
    raise DataError(
        f"hub data set {reference}: needs one column of kind {kind}, or one of them named {usual}, but has "
        f"{', '.join(found) or 'none'}; rename or cast the columns, save the data set, and give that folder"
    )


_LISTERS: Mapping[str, Callable[[str, Outside], SourceListing]] = {
    "digits": _list_digits,
    "imagefolder": _list_folder,
    "manifest": _list_manifest,
    "hub": _list_hub,
}


# ---------------------------------------------------------------------------------------------------------------------
# Versions

_LISTED_FOR_EACH = 20
_LISTED_AT_LEAST = 100_000
"""Objects that are listed for the images of a manifest: so many for each, and no fewer than so many in all."""
_LOG_EVERY = 500_000


class _UnknownVersionError(Exception):
    """Whether the images have changed cannot be known; the text says why."""


def _digits_version(_name: str, _outside: Outside) -> str:
    return f"scikit-learn {importlib.metadata.version('scikit-learn')}"


def _folder_version(folder: str, outside: Outside) -> str:
    if not storage.is_remote(folder):
        return digest([[file.name, *_stamp(file.location)] for file in _files(folder, outside)])
    version = _Objects(folder)
    for one in version.listed(limits.SOURCE_IMAGES):
        if not any(map(_is_hidden, one.name.split("/"))):
            version.add(one)
    if version.is_cut_off:
        raise _too_many_files(folder)
    if not version.count:
        raise _missing_folder(folder)
    return version.digest()


def _manifest_version(manifest: str, outside: Outside) -> str:
    text = _read_text(manifest)
    here: list[tuple[int, int]] = []
    elsewhere: dict[str, set[str]] = {}
    for row in _manifest_rows(manifest, text, outside):
        if storage.is_remote(row.location):
            store = "/".join(row.location.split("/", 3)[:3])
            elsewhere.setdefault(store, set()).add(row.location)
        else:
            here.append(_stamp(row.location))
    if not elsewhere:
        return digest([text, here])
    return digest([text, here, [_named_version(elsewhere[store]) for store in sorted(elsewhere)]])


def _named_version(locations: Set[str]) -> str:
    """Of objects of one store, from one listing of the folder that holds them all: a thousand a request instead of a request each.

    Where that folder holds far more than these, nothing is known.
    """
    shared = os.path.commonprefix([min(locations), max(locations)])  # noqa: RUF071  # commonpath would make s3:/ of s3://
    folder = shared.rpartition("/")[0]
    version = _Objects(folder)
    for one in version.listed(max(_LISTED_AT_LEAST, _LISTED_FOR_EACH * len(locations))):
        if storage.join(folder, one.name) in locations:
            version.add(one)
    if version.is_cut_off:
        raise _UnknownVersionError(
            f"{folder} holds many more objects than the {len(locations):,} images; put the images into a folder"
        )
    return version.digest()


class _Objects:
    """What a store lists below a URI, as one digest: in little memory, for there may be millions."""

    def __init__(self, uri: str) -> None:
        self._uri, self._digest = uri, hashlib.sha256()
        self.count = 0
        """Objects that were added."""
        self.is_cut_off = False
        """Whether there are more than were listed."""

    def listed(self, most: int) -> Iterator[storage.Listed]:
        """The objects below the URI, at most so many."""
        if self._uri.startswith(("http://", "https://")):
            raise _UnknownVersionError("web servers list nothing")
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
        """Take an object into the digest."""
        if not one.tag:
            raise _UnknownVersionError(
                f"the store says nothing of {storage.join(self._uri, one.name)} that changes with its content"
            )
        self._digest.update(f"{json.dumps(one)}\n".encode())
        self.count += 1

    def digest(self) -> str:
        """As hexadecimal text."""
        return self._digest.hexdigest()


def _hub_version(reference: str, outside: Outside) -> str:
    name = reference.partition(":")[0]
    if Path(name).is_dir():
        return _folder_version(name, outside)
    revision = hub.dataset_revision(name)
    if revision is None:
        raise _UnknownVersionError("neither the Hub nor this machine's cache gives its revision")
    return revision


_VERSIONS: Mapping[str, Callable[[str, Outside], str]] = {
    "digits": _digits_version,
    "imagefolder": _folder_version,
    "manifest": _manifest_version,
    "hub": _hub_version,
}
