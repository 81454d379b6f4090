"""Images in the tar files of WebDataset, which are read where they lie: headers for the listing, then each image by its range of bytes.

Nothing is unpacked to a disk. Files of a sample stand together and share the name up to the first dot of its last part: NAME.jpg, and for
its label NAME.cls, a class as text or number, or NAME.json with `label`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial

import numpy as np

from trainer.data.dataset_schema import UNLABELED, SplitName
from trainer.data.sources.columns import Columns
from trainer.data.sources.folder_files import SUFFIXES, SourceFile, list_files, of_systems
from trainer.data.sources.image_folder import ImageFolder, split_word
from trainer.data.sources.source import ImageSource, Item, SourceListing, SourceState, split_of
from trainer.data.sources.table_file import class_name
from trainer.io import limits, local_files, storage
from trainer.io.errors import DataError, ObjectDamagedError, ObjectNotFoundError, ObjectTooLargeError
from trainer.io.formatting import listed

_BLOCK = 512  # bytes; of a tar file's headers, to which its files are padded
_WINDOW = 4 * 2**20  # bytes that are read at once for the listing
_EXTENSION_BYTES = 65_536  # a long name, or what else comes in a header of its own
_LARGEST = 2**42  # bytes of a file in it; file systems have no larger one
_JSON_BYTES = 2**20  # the JSON file of a sample
_COMPRESSED = {b"\x1f\x8b": "gzip", b"BZh": "bzip2", b"\xfd7zX": "xz", b"\x28\xb5\x2f\xfd": "zstandard", b"PK": "zip"}


@dataclass(frozen=True, slots=True)
class TarMember:
    """A file in a tar file."""

    name: str  # printable
    start: int  # of its bytes
    size: int


@dataclass(slots=True)
class _Sample:
    key: str
    image: TarMember | None = None
    label: str = ""
    has_cls: bool = False


@dataclass(slots=True)
class _Found:
    """What the listing has found so far."""

    classes: dict[str, int] = field(default_factory=dict)  # name -> its place among them
    without_image: int = 0


class TarFiles(ImageSource):
    """`tar:FOLDER_OR_URI`: the tar files in a folder and below it; their folders or names may tell the split, as `train-0001.tar`."""

    def listing(self) -> SourceListing:
        files = list_files(self.name, self.outside).files
        tars = [file for file in files if file.suffix == ".tar"]
        if not tars:
            others = f" (it has {len(files):,} other files, such as {files[0].name})" if files else ""
            raise DataError(
                f"folder {self.name}: holds no .tar{others}; give the folder of the tar files, unpacked if they are .tar.gz"
            )
        splits = self._splits([tar.name for tar in tars])
        found = _Found()
        items = Columns.of(
            Item,
            (
                item
                for number, (tar, split) in enumerate(zip(tars, splits, strict=True))
                for item in _items(number, tar, split, found)
            ),
        ).in_order()
        classes = tuple(sorted(found.classes))
        index = {name: number for number, name in enumerate(classes)}
        labels = np.array([*(index[name] for name in found.classes), UNLABELED], dtype=np.int32)  # [-1] is the last
        notes = []
        if len(tars) < len(files):
            notes.append(f"Files that are no .tar, which were not looked at: {len(files) - len(tars):,}.")
        if found.without_image:
            notes.append(f"Samples without an image, which were left out: {found.without_image:,}.")
        return SourceListing(
            items=items.with_columns(Item, label=labels[items.column("label")]) if len(items) else items,
            classes=classes,
            read=partial(_read_member, tars=tuple(tar.location for tar in tars)),
            notes=(*notes,),
            remarks=(*notes,),
        )

    def state(self) -> SourceState:
        # How many images there are, only the listing tells.
        return ImageFolder(self.name, self.outside).state()._replace(images=0)

    def _splits(self, names: Sequence[str]) -> list[SplitName]:
        """Return the split of each tar file; train where none names one."""
        found = [_split(name) for name in names]
        without = [name for name, split in zip(names, found, strict=True) if split is None]
        if without and len(without) < len(names):
            raise DataError(
                f"folder {self.name}: {listed(without, 4)} name no split, but others do; put each into a folder train, val, test or "
                "unlabeled"
            )
        return [split or "train" for split in found]


def _split(name: str) -> SplitName | None:
    *folders, last = name.split("/")
    named = [split for folder in folders if (split := split_of(folder))]
    stem = last.rpartition(".")[0]
    return named[0] if named else split_of(stem) or split_word(stem)


def _items(number: int, tar: SourceFile, split: SplitName, found: _Found) -> Iterator[Item]:
    """Yield the images of a tar file; the label is the place of its class in `found.classes`."""
    name, read = f"tar file {limits.cut(tar.location, 300)}", _Window(tar.location)
    without_label, without_image = set[str](), set[str]()
    for sample in _samples(name, read):
        if sample.image is None or not sample.label:
            own, other = (without_image, without_label) if sample.image is None else (without_label, without_image)
            if sample.key in other:
                raise DataError(
                    f"{name}: the files of sample {sample.key} do not stand beside one another, so its label would be lost; write the "
                    "tar file sorted, as by tar --sort=name"
                )
            if sample.image is not None or sample.label:
                own.add(sample.key)
        if sample.image is None:
            found.without_image += 1
            continue
        label = UNLABELED
        if sample.label and split != "unlabeled":
            called = class_name(f"{name}, {sample.image.name}", sample.label)
            label = found.classes.setdefault(called, len(found.classes))
        elif split in ("val", "test"):
            raise DataError(
                f"{name}: {sample.image.name} of split {split} has no label; add a .cls or .json, or move it to train as unlabeled"
            )
        yield Item(
            name=f"{tar.name}/{sample.image.name}",
            location=f"{number} {sample.image.start} {sample.image.size}",
            label=label,
            split=split if label != UNLABELED else "unlabeled",
            state=f"{tar.state} {sample.image.start}" if tar.state else "",
        )


def _samples(name: str, read: Callable[[int, int], bytes]) -> Iterator[_Sample]:
    sample = None
    for member in tar_members(name, read):
        folder, slash, last = member.name.rpartition("/")
        if of_systems(member.name):
            continue
        key, _, ending = last.partition(".")
        key, ending = f"{folder}{slash}{key}", ending.lower()
        if sample is None or sample.key != key:
            if sample is not None:
                yield sample
            sample = _Sample(key)
        if f".{ending}" in SUFFIXES:
            if sample.image is not None:
                raise DataError(
                    f"{name}: {sample.image.name} and {member.name} are two images of one sample; write each under a name of its own"
                )
            sample.image = member
        elif ending == "cls":
            sample.label, sample.has_cls = _text(name, member, read, limits.CELL_CHARACTERS).strip(), True
        elif ending == "json" and not sample.has_cls:
            sample.label = _label(name, member, _text(name, member, read, _JSON_BYTES))
    if sample is not None:
        yield sample


def _text(name: str, member: TarMember, read: Callable[[int, int], bytes], limit: int) -> str:
    if member.size > limit:
        raise DataError(
            f"{name}: {member.name} has {member.size:,} bytes, more than {limit:,}; it must hold a label alone"
        )
    try:
        return read(member.start, member.size).decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise DataError(f"{name}: {member.name} is not UTF-8 text; write its label as text") from error


def _label(name: str, member: TarMember, text: str) -> str:
    try:
        content = limits.parse_json(text)
    except ValueError as error:
        raise DataError(f"{name}: {member.name} is not JSON ({limits.cut(str(error), 200)}); write it again") from error
    label = content.get("label", "") if isinstance(content, dict) else ""
    if isinstance(label, bool) or not isinstance(label, str | int):
        shown = limits.cut(limits.printable_name(repr(label)), 100)
        raise DataError(f"{name}: the label in {member.name} must be a text or a whole number, got {shown}")
    return str(label).strip()


# ---- Tar files


def tar_members(name: str, read: Callable[[int, int], bytes]) -> Iterator[TarMember]:
    """Yield the files of a tar file in their order.

    Python's `tarfile` would follow sizes below zero around in circles, and takes a file that is cut off between two members for a whole
    one.

    Args:
        name: begins each message.
        read: gives up to so many bytes from a place in the file on.
    """
    at, long_name, last = 0, "", ""
    while (block := read(at, _BLOCK)) != bytes(_BLOCK):
        if len(block) < _BLOCK:
            where = f"is cut off in or after {last}" if last else "is empty or cut off"
            raise DataError(f"{name}: {where}, since it has no mark of its end; copy or write it again")
        kind, size, member = _header(name, block, at)
        start, at = at + _BLOCK, at + _BLOCK + -(-size // _BLOCK) * _BLOCK
        if kind in b"LKxXg":
            if size > _EXTENSION_BYTES:
                raise DataError(
                    f"{name}: a header at byte {start:,} has {size:,} bytes, more than {_EXTENSION_BYTES:,}; write it again"
                )
            content = read(start, size)
            if kind == b"L":
                long_name = _shown(content)
            elif kind in b"xX":
                long_name = _path(name, content, start) or long_name
            continue
        member, long_name = long_name or member, ""
        last = limits.cut(member, 200)
        if member.startswith("/") or ".." in member.split("/"):
            raise DataError(
                f"{name}: {last!r} names a place outside of it; write it again with names relative to its folder"
            )
        if kind in b"12":
            raise DataError(f"{name}: {last!r} is a link, which is not followed; write it again with the file itself")
        if kind == b"5" or member.endswith("/"):
            continue
        if kind not in b"07\0":
            raise DataError(
                f"{name}: {last!r} is no plain file (kind {kind.decode('latin-1')!a}); write it again without it"
            )
        yield TarMember(member.removeprefix("./"), start, size)


def _header(name: str, block: bytes, at: int) -> tuple[bytes, int, str]:
    """Return kind, size and name from a header."""
    try:
        # The checksum counts its own field as spaces.
        if _number(block[148:156]) != sum(block[:148]) + 8 * 32 + sum(block[156:]):
            raise ValueError
        size = _number(block[124:136])
        if size > _LARGEST:
            raise ValueError
    except ValueError as error:
        if at:
            raise DataError(
                f"{name}: is damaged at byte {at:,}, where a header should be; copy or write it again"
            ) from error
        packed = next((kind for first, kind in _COMPRESSED.items() if block.startswith(first)), "")
        what = f"is compressed ({packed}); unpack it to a .tar" if packed else "is no tar file; check the folder"
        raise DataError(f"{name}: {what}") from error
    prefix = _shown(block[345:500]) if block[257:263] == b"ustar\0" else ""
    return block[156:157], size, f"{prefix}/{_shown(block[:100])}" if prefix else _shown(block[:100])


def _number(text: bytes) -> int:
    """Read an octal number, or, where the first bit is set, one in binary; a `ValueError` if it is neither or below zero."""
    if text[0] & 0x80:
        if text[0] != 0x80:
            raise ValueError
        return int.from_bytes(text[1:], "big")
    return int(text.rstrip(b" \0").lstrip(b" ") or b"0", 8) if b"-" not in text and b"_" not in text else int("")


def _path(name: str, content: bytes, at: int) -> str:
    """Return the path in a pax header; empty if it has none. A size there, which only files above 8 GiB need, is refused."""
    path = ""
    while content.strip(b"\0"):
        length, space, _ = content.partition(b" ")
        if not (space and length.isdigit() and len(length) < 6 and len(length) + 3 <= int(length) <= len(content)):
            raise DataError(f"{name}: is damaged at byte {at:,}, in a pax header; copy or write it again")
        key, _, value = content[len(length) + 1 : int(length) - 1].partition(b"=")
        if key == b"size":
            raise DataError(
                f"{name}: has a file of more than 8 GiB by the pax header at byte {at:,}; write it without it"
            )
        if key == b"path":
            path = _shown(value)
        content = content[int(length) :]
    return path


def _shown(text: bytes) -> str:
    return limits.printable_name(text.partition(b"\0")[0].decode("utf-8", "replace"))


class _Window:
    """Reads from a file or an object, some megabytes ahead."""

    def __init__(self, location: str) -> None:
        self._location, self._start, self._bytes = location, 0, b""

    def __call__(self, start: int, size: int) -> bytes:
        if start < self._start or start + size > self._start + len(self._bytes):
            self._start = start
            try:
                self._bytes = storage.read_bytes(self._location, start, start + max(size, _WINDOW))
            except ObjectDamagedError:  # how a store answers a range behind the end
                self._bytes = b""
        return self._bytes[start - self._start : start - self._start + size]


def _read_member(location: str, tars: Sequence[str]) -> bytes:
    number, start, size = map(int, location.split())
    tar = tars[number]
    if size > limits.IMAGE_BYTES:
        raise ObjectTooLargeError(f"{tar}: an image of {size:,} bytes")
    if storage.is_remote(tar):
        try:
            content = storage.read_bytes(tar, start, start + size) if size else b""
        except ObjectNotFoundError as error:
            raise FileNotFoundError(str(error)) from error
    else:
        content = local_files.read_file(storage.local_path(tar), start, start + size)
    if len(content) < size:
        raise OSError(f"{tar} is shorter than when it was listed")
    return content
