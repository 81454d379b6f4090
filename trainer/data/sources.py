"""Where images come from: `data.source` becomes a list of items in a fixed order, whose bytes are read one by one.

    digits                    the 1,797 handwritten digits that scikit-learn ships, 8 x 8 pixels
    imagefolder:PATH_OR_URI   a folder a class, also nested, with or without train/, val/, test/ above; unlabeled/ has no classes
    manifest:FILE.csv         columns path, label, split; relative paths start at the file's folder; no label: unlabelled
    hub:NAME[:CONFIG]         a data set of the Hugging Face Hub, or a local folder of one

Local paths and every scheme that fsspec knows (`s3://...`) are read alike.
"""

from __future__ import annotations

import csv
import functools
import importlib.metadata
import io
import os
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from trainer import storage
from trainer.artifacts import digest
from trainer.data.schema import UNLABELED, SplitName
from trainer.errors import DataError, ObjectNotFoundError, SettingsError

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
class Listing:
    """What a source holds."""

    items: Sequence[Item]
    """In an order that depends on names only."""
    classes: tuple[str, ...]
    """Name of each class, in the order of the labels."""
    read: Callable[[str], bytes]
    """Location -> the image file's bytes; can be sent to another process. Raises OSError."""
    notes: tuple[str, ...] = ()
    """What was left out, for the data card."""


def list_source(source: str) -> Listing:
    """List the images of `data.source` without reading them.

    Raises:
        SettingsError: it is no source.
        DataError: it is missing, holds no images, or says nothing about their labels.
        StorageError: it is in a store that does not answer or refuses.
    """
    kind, name = _parse(source)
    listing = _LISTERS[kind](name)
    if not listing.items:
        raise DataError(f"data.source={source}: holds no images; check the path")
    if all(item.label == UNLABELED for item in listing.items):
        raise DataError(
            f"data.source={source}: none of its {len(listing.items)} images has a label; put them into a folder a class, or add labels"
        )
    return listing


def source_version(source: str) -> str:
    """A text that changes when the images behind `data.source` change, found without reading them.

    Files on this machine are told apart by name, size and time of change. It is empty where nothing can be known cheaply: the Hub, and
    remote URIs.

    Raises:
        SettingsError: it is no source.
        DataError: it is missing.
    """
    kind, name = _parse(source)
    if kind == "digits":
        return f"scikit-learn {importlib.metadata.version('scikit-learn')}"
    folder = name.partition(":")[0] if kind == "hub" else name
    if storage.is_remote(name) or (kind == "hub" and not Path(folder).is_dir()):
        return ""
    if kind == "manifest":
        return digest([_read_text(name), [_stamp(row.location) for row in _manifest_rows(name)]])
    return digest([[file.name, *_stamp(file.location)] for file in _files(folder)])


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


def read_file(location: str) -> bytes:
    """The bytes of a local file or of a URI.

    Raises:
        OSError: it can not be read.
        StorageError: the store does not answer or refuses, which says nothing about the image.
    """
    if not storage.is_remote(location):
        return storage.local_path(location).read_bytes()
    try:
        return storage.read_bytes(location)
    except ObjectNotFoundError as error:
        raise FileNotFoundError(str(error)) from error


def _stamp(location: str) -> tuple[int, int]:
    """Size and time of change of a local file; (-1, 0) where there is none, so that its arrival counts as a change."""
    try:
        status = Path(location).stat()
    except FileNotFoundError:
        return -1, 0
    return status.st_size, status.st_mtime_ns


def _files(folder: str) -> list[_File]:
    """All files below a folder but hidden ones, sorted by name.

    Raises:
        DataError: the folder is missing or can not be listed.
        StorageError: the store does not answer or refuses.
    """
    try:
        found = _remote_files(folder) if storage.is_remote(folder) else _local_files(Path(folder))
        files = sorted(found, key=lambda file: file.name)
    except OSError as error:
        raise DataError(
            f"folder {folder}: can not be listed ({error}); check the path and the right to read it"
        ) from error
    return [file for file in files if not any(part.startswith((".", "__MACOSX")) for part in file.name.split("/"))]


def _remote_files(folder: str) -> list[_File]:
    found = [_File(name, storage.join(folder, name)) for name in storage.files(folder)]
    if not found:
        raise DataError(f"folder {folder}: does not exist; check data.source")
    return found


def _local_files(root: Path) -> Iterator[_File]:
    if not root.is_dir():
        raise DataError(f"folder {root}: {'is a file' if root.exists() else 'does not exist'}; check data.source")
    yield from _walk(root, "", frozenset())


def _walk(folder: Path, prefix: str, above: frozenset[Path]) -> Iterator[_File]:
    """Files below a folder, through links too (data sets are often linked together), but never around a loop."""
    real = folder.resolve()
    if real in above:
        return
    with os.scandir(folder) as entries:
        for entry in entries:
            if entry.is_dir():
                yield from _walk(Path(entry.path), f"{prefix}{entry.name}/", above | {real})
            elif entry.is_file() or not Path(entry.path).exists():  # a dangling link is reported; a pipe would block
                yield _File(_readable(prefix + entry.name), entry.path)


def _readable(name: str) -> str:
    """A file's name as text that can be stored: bytes that are no UTF-8 become a replacement character."""
    return os.fsencode(name).decode("utf-8", "replace")


# ---------------------------------------------------------------------------------------------------------------------
# digits


def _list_digits(_: str) -> Listing:
    targets = _bundled_digits().target
    items = [
        Item(name=f"digit {index:04d}", location=str(index), label=int(target), split="train")
        for index, target in enumerate(targets)
    ]
    return Listing(items=items, classes=tuple(str(digit) for digit in range(10)), read=_read_digit)


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


def _list_folder(folder: str) -> Listing:
    files = _files(folder)
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
    return Listing(items=items, classes=classes, read=read_file, notes=notes)


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


def _list_manifest(manifest: str) -> Listing:
    rows = _manifest_rows(manifest)
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
    return Listing(items=items, classes=classes, read=read_file)


@dataclass(frozen=True, slots=True)
class _Row:
    location: str
    name: str
    label: str
    split: SplitName


def _manifest_rows(manifest: str) -> list[_Row]:
    reader = csv.DictReader(io.StringIO(_read_text(manifest), newline=""))
    missing = {"path", "label"} - set(reader.fieldnames or ())
    if missing:
        raise DataError(
            f"manifest {manifest}: has no column {' and no '.join(sorted(missing))}; "
            f"its first line must be path,label,split, but is {','.join(reader.fieldnames or ())!r}"
        )
    folder = manifest.rsplit("/", 1)[0] if "/" in manifest else "."
    try:
        return [_manifest_row(row, f"manifest {manifest}, line {reader.line_num}", folder) for row in reader]
    except csv.Error as error:
        raise DataError(f"manifest {manifest}, line {reader.line_num}: {error}; mend the line") from error


def _manifest_row(row: Mapping[str | None, str | None], where: str, folder: str) -> _Row:
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
    located = path if storage.is_remote(path) or Path(path).is_absolute() else f"{folder}/{path}"
    return _Row(location=located, name=path, label=label, split=split if label else "unlabeled")


def _read_text(manifest: str) -> str:
    """A manifest's text; a byte-order mark, as spreadsheets write it, is dropped."""
    try:
        return read_file(manifest).decode("utf-8-sig")
    except FileNotFoundError as error:
        raise DataError(f"manifest {manifest}: does not exist; check data.source") from error
    except UnicodeDecodeError as error:
        raise DataError(f"manifest {manifest}: is not UTF-8 ({error}); save it as UTF-8 text") from error
    except OSError as error:
        raise DataError(f"manifest {manifest}: can not be read ({error}); check data.source") from error


# ---------------------------------------------------------------------------------------------------------------------
# hub


@dataclass(frozen=True)
class _HubReader:
    """Reads the image file of a row; the tables are memory-mapped, so a copy in another process is cheap."""

    splits: Mapping[str, Any]
    column: str

    def __call__(self, location: str) -> bytes:
        split, _, index = location.rpartition("/")
        image = self.splits[split][int(index)][self.column]
        if image is None:
            return b""
        return image["bytes"] if image["bytes"] is not None else read_file(image["path"])


def _list_hub(reference: str) -> Listing:
    splits = _load_hub(reference)
    image_column, label_column, classes = _hub_columns(reference, next(iter(splits.values())).features)
    import datasets  # type: ignore[import-untyped]  # here, because it takes a second to import

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
    read = _HubReader({name: table.select_columns([image_column]) for name, table in raw.items()}, image_column)
    return Listing(items=items, classes=classes, read=read, notes=tuple(notes))


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
            f"hub data set {reference}: can not be loaded ({error}); check its name and configuration, the network, and HF_TOKEN"
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
    return image, label, tuple(columns[label].names)


def _one_column(reference: str, found: Sequence[str], kind: str, usual: str) -> str:
    if len(found) == 1 or usual in found:
        return usual if usual in found else found[0]
    raise DataError(
        f"hub data set {reference}: needs one column of kind {kind}, or one of them named {usual}, but has "
        f"{', '.join(found) or 'none'}; rename or cast the columns, save the data set, and give that folder"
    )


_LISTERS: Mapping[str, Callable[[str], Listing]] = {
    "digits": _list_digits,
    "imagefolder": _list_folder,
    "manifest": _list_manifest,
    "hub": _list_hub,
}
