"""WebDataset's tar files are read where they lie, and one from a stranger ends with one message."""

from __future__ import annotations

import io
import pickle
import struct
import tarfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import fsspec
import numpy as np
import pytest
from PIL import Image

from trainer.config import DataSettings
from trainer.data.preparation import prepare
from trainer.data.sources import list_source, source_state, source_version, tar_files
from trainer.io import limits
from trainer.io.errors import DataError, ObjectTooLargeError

Change = Callable[[tarfile.TarInfo], object]


def packed(files: Mapping[str, bytes], change: Change = lambda _: None, kind: int = tarfile.PAX_FORMAT) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w", format=kind) as tar:
        for name, content in files.items():
            info = tarfile.TarInfo(name)
            info.size = len(content)
            change(info)
            tar.addfile(info, io.BytesIO(content) if info.size else None)
    return buffer.getvalue()


def folder(root: Path, tars: Mapping[str, bytes]) -> str:
    for name, content in tars.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_bytes(content)
    return f"tar:{root}"


SAMPLES = {
    "./b/2.jpg": b"two",
    "./b/2.cls": b" Tea\n",
    "1.PNG": b"one",
    "1.json": b'{"label": 7, "caption": "Milk"}',
    "1.txt": b"a caption",
    "0.json": b'{"caption": "nothing"}',
    "0.webp": b"zero",
    "alone.cls": b"Tea",
    ".hidden.jpg": b"x",
}


@pytest.mark.parametrize("kind", [tarfile.PAX_FORMAT, tarfile.GNU_FORMAT, tarfile.USTAR_FORMAT])
@pytest.mark.parametrize("window", [1, 2**22])
def test_samples_become_images(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: int, window: int) -> None:
    monkeypatch.setattr(tar_files, "_WINDOW", window)
    long = f"{'long ' * 15}ä/{'name' * 25}"
    extra = {f"{long}.jpg": b"", f"{long}.cls": b"7"} if kind != tarfile.USTAR_FORMAT else {}
    source = folder(tmp_path, {"a.tar": packed(SAMPLES | extra, kind=kind), "index.json": b"{}"})
    listing = list_source(source)
    assert listing.classes == ("7", "Tea")
    found = {item.name: (item.split, item.label, listing.read(item.location)) for item in listing.items}
    assert found == {
        "a.tar/0.webp": ("unlabeled", -1, b"zero"),
        "a.tar/1.PNG": ("train", 0, b"one"),
        "a.tar/b/2.jpg": ("train", 1, b"two"),
    } | ({f"a.tar/{long}.jpg": ("train", 0, b"")} if extra else {})
    assert [*found] == sorted(found)
    assert listing.notes == (
        "Files that are no .tar, which were not looked at: 1.",
        "Samples without an image, which were left out: 1.",
    )
    assert pickle.loads(pickle.dumps(listing.read))(listing.items[0].location) == b"zero"


def test_splits_by_folder_or_name(tmp_path: Path) -> None:
    one = packed({"1.jpg": b"x", "1.cls": b"a", "2.jpg": b"y", "2.cls": b"b"})
    names = ["data-train-0001.tar", "testing/0.tar", "val/train-0.tar", "unlabeled/0.tar", "dev.tar"]
    listing = list_source(folder(tmp_path, dict.fromkeys(names, one)))
    splits = {item.name.rpartition("/")[0]: item.split for item in listing.items}
    assert [splits[name] for name in names] == ["train", "test", "val", "unlabeled", "val"]
    folder(tmp_path, {"0.tar": one})
    with pytest.raises(DataError, match=r"0\.tar name no split, but others do; put each into a folder train"):
        list_source(f"tar:{tmp_path}")


def test_a_store_is_read_by_ranges(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tar_files, "_WINDOW", 1000)
    memory = fsspec.filesystem("memory")
    content = packed({"1.jpg": bytes(100_000), "1.cls": b"a", "2.jpg": b"y", "2.cls": b"b"})
    memory.pipe_file("/tars/0.tar", content)
    read = list[int]()
    whole = type(memory).cat_file

    def counted(self: Any, path: str, start: int | None = None, end: int | None = None, **options: Any) -> Any:
        found = whole(self, path, start=start, end=end, **options)
        read.append(len(found))
        return found

    monkeypatch.setattr(type(memory), "cat_file", counted)
    listing = list_source("tar:memory://tars")
    assert sum(read) < 8000
    assert [listing.read(item.location) for item in listing.items] == [bytes(100_000), b"y"]
    memory.pipe_file("/tars/0.tar", content[:2000])
    with pytest.raises(OSError, match="shorter than when it was listed"):
        listing.read(listing.items[0].location)
    memory.rm("/tars", recursive=True)
    with pytest.raises(FileNotFoundError):
        listing.read(listing.items[0].location)


def test_the_version_changes_with_a_file(tmp_path: Path) -> None:
    source = folder(tmp_path, {"a.tar": packed(SAMPLES)})
    version = source_version(source)
    assert source_state(source).images == 0  # not known
    (tmp_path / "a.tar").write_bytes(packed(SAMPLES | {"3.jpg": b"3"}))
    assert source_version(source) != version


def test_a_data_set_is_prepared_from_tars(tmp_path: Path) -> None:
    files: dict[str, bytes] = {}
    for number in range(24):
        pixels = np.random.default_rng(number).integers(0, 256, (16, 16, 3), dtype=np.uint8)
        buffer = io.BytesIO()
        Image.fromarray(pixels).save(buffer, "PNG")
        files |= {f"{number:02}.png": buffer.getvalue(), f"{number:02}.cls": b"ab"[number % 2 : number % 2 + 1]}
    source = folder(tmp_path / "tars", {"0.tar": packed(files)})
    (tmp_path / "out").mkdir()
    counts = prepare(DataSettings.model_validate({"source": source, "image_size": 16}), tmp_path / "out")
    assert counts["train"] + counts["val"] + counts["test"] == 24
    assert counts["classes"] == 2


# ---------------------------------------------------------------------------------------------------------------------
# Files from strangers


def kind_of(kind: bytes) -> Change:
    def change(info: tarfile.TarInfo) -> None:
        info.type, info.size, info.linkname = kind, 0, "/etc/passwd"

    return change


def patched(content: bytes, at: int, value: bytes) -> bytes:
    """Change a header and mend its checksum."""
    block = bytearray(content[:512])
    block[at : at + len(value)] = value
    block[148:156] = b" " * 8
    block[148:156] = f"{sum(block):06o}\0 ".encode()
    return bytes(block) + content[512:]


ONE = packed({"1.jpg": b"x" * 600, "1.cls": b"a"})
NEGATIVE = b"\xff" + (-512).to_bytes(11, "big", signed=True)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "is empty or cut off, since it has no mark of its end; copy or write it again"),
        (ONE[:100], "is empty or cut off"),
        (ONE[:900], r"is cut off in or after 1\.jpg"),
        (ONE[:1536], r"is cut off in or after 1\.jpg"),
        (ONE[:1600], r"is cut off in or after 1\.jpg"),
        (ONE[:2560], r"is cut off in or after 1\.cls"),
        (ONE[:1536] + bytes(7) + b"x" * 9999, "is damaged at byte 1,536, where a header should be"),
        (b"x" * 9999, "is no tar file; check the folder"),
        (b"\x1f\x8b" + b"x" * 9999, r"is compressed \(gzip\); unpack it to a \.tar"),
        (patched(ONE, 124, NEGATIVE), "is no tar file"),
        (patched(ONE, 124, b"\x80" + b"\xff" * 11), "is no tar file"),
        (patched(ONE, 124, struct.pack(">Bxxxq", 0x80, 2**41)), r"is cut off in or after 1\.jpg"),
        (patched(ONE, 124, b"-0000000512\0"), "is no tar file"),
        (patched(ONE, 156, b"L"), "holds no images"),
        (packed({"1.jpg": b""}, kind_of(tarfile.SYMTYPE)), r"'1\.jpg' is a link, which is not followed"),
        (packed({"1.jpg": b""}, kind_of(tarfile.LNKTYPE)), r"'1\.jpg' is a link, which is not followed"),
        (packed({"1.jpg": b""}, kind_of(tarfile.CHRTYPE)), r"'1\.jpg' is no plain file \(kind '3'\)"),
        (packed({"1.jpg": b""}, kind_of(tarfile.FIFOTYPE)), r"'1\.jpg' is no plain file \(kind '6'\)"),
        (packed({"1.jpg": b""}, kind_of(tarfile.GNUTYPE_SPARSE)), r"'1\.jpg' is no plain file \(kind 'S'\)"),
        (packed({"/etc/1.jpg": b"x"}), r"'/etc/1\.jpg' names a place outside of it"),
        (packed({"a/../../1.jpg": b"x"}), r"'a/\.\./\.\./1\.jpg' names a place outside of it"),
        (packed({"a" * 70_000: b"x"}), r"a header at byte 512 has 70,\d\d\d bytes, more than 65,536"),
        (packed({"1.jpg": b"x", "1.png": b"x"}), r"1\.jpg and 1\.png are two images of one sample"),
        (packed({"1.jpg": b"x", "1.cls": b"\xff"}), r"1\.cls is not UTF-8 text"),
        (packed({"1.jpg": b"x", "1.cls": b"x" * 2000}), r"1\.cls has 2,000 bytes, more than 1,000"),
        (packed({"1.jpg": b"x", "1.cls": "a\u200b".encode()}), r"1\.jpg: the name of a class has the character U\+200B"),
        (packed({"1.jpg": b"x", "1.json": b"{"}), r"1\.json is not JSON \(.*\); write it again"),
        (packed({"1.jpg": b"x", "1.json": b'{"label": [1]}'}), r"the label in 1\.json must be a text or a whole number, got \[1\]"),
        (packed({"1.jpg": b"x", "1.json": b'{"label": true}'}), "must be a text or a whole number, got True"),
        (packed({"1.jpg": b"x"}), "none of its 1 images has a label"),
        (packed({"1.jpg": b"x", "2.jpg": b"x", "1.cls": b"a"}), "the files of sample 1 do not stand beside one another"),
        (packed({"a/1.cls": b"a", "2.jpg": b"x", "a/1.jpg": b"x"}), r"sample a/1 do not stand .*; write the tar file sorted, as by"),
        (packed({"1.txt": b"x"}), "holds no images"),
    ],
)  # fmt: skip
def test_tars_that_cannot_be_used(tmp_path: Path, content: bytes, message: str) -> None:
    with pytest.raises(DataError, match=message):
        list_source(folder(tmp_path, {"0.tar": content}))


def test_damaged_pax_headers(tmp_path: Path) -> None:
    name = "ä" * 60 + ".jpg"
    content = packed({name: b"x", "1.cls": b"a"})
    at = content.index(b" path=")
    for value in (b"99", b"0 ", b"-1", b"xx"):
        damaged = content[: at - len(value)] + value + content[at:]
        with pytest.raises(DataError, match="is damaged at byte 512, in a pax header"):
            list_source(folder(tmp_path, {"0.tar": damaged}))
    sized = content[:at] + b" size=" + content[at + 6 :]
    with pytest.raises(DataError, match="has a file of more than 8 GiB by the pax header at byte 512"):
        list_source(folder(tmp_path, {"0.tar": sized}))


def test_a_label_is_missing_where_it_is_measured(tmp_path: Path) -> None:
    content = packed({"1.jpg": b"x", "1.cls": b"a", "2.jpg": b"x"})
    with pytest.raises(DataError, match=r"2\.jpg of split val has no label; add a \.cls or \.json, or move it"):
        list_source(folder(tmp_path, {"val.tar": content}))


def test_an_image_of_too_many_bytes_is_quarantined(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "IMAGE_BYTES", 100)
    listing = list_source(folder(tmp_path, {"0.tar": ONE}))
    with pytest.raises(ObjectTooLargeError, match="an image of 600 bytes"):
        listing.read(listing.items[0].location)


def test_folders_without_a_tar(tmp_path: Path) -> None:
    folder(tmp_path, {"0.tar.gz": b"x"})
    with pytest.raises(
        DataError, match=r"holds no \.tar \(it has 1 other files, such as 0\.tar\.gz\); give the folder"
    ):
        list_source(f"tar:{tmp_path}")
    with pytest.raises(DataError, match="does not exist"):
        list_source(f"tar:{tmp_path}/none")


def test_images_of_a_store_s_tars_are_not_read_again(
    object_store, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A preparation that goes on knows by size and ETag of their tar file, and by their place, that they are the same."""

    def photo(seed: int) -> bytes:
        buffer = io.BytesIO()
        Image.fromarray(np.random.default_rng(seed).integers(0, 256, (16, 16, 3), dtype=np.uint8)).save(buffer, "png")
        return buffer.getvalue()

    def tar(seeds: range) -> bytes:
        named = {f"{seed}.png": photo(seed) for seed in seeds} | {
            f"{seed}.cls": f"{seed % 2}".encode() for seed in seeds
        }
        return packed(dict(sorted(named.items())))

    object_store.put("tars/a.tar", tar(range(10, 40)))
    object_store.put("tars/b.tar", tar(range(40, 80)))
    given = {"source": f"tar:{object_store.uri('tars')}", "image_size": 16, "encoding": "png"}
    cache = {"cache_uri": object_store.uri("cache"), "processes": 1}
    (tmp_path / "data").mkdir()
    prepare(DataSettings.model_validate(given), tmp_path / "data", **cache)
    object_store.clear()
    prepare(DataSettings.model_validate(given), tmp_path / "data", **cache)
    headers = [one for one in object_store.requests if one.method == "GET" and "/tars/" in one.path]
    assert len(headers) == 2  # of the listing, a window each
    object_store.put("tars/b.tar", tar(range(41, 81)))
    caplog.set_level("INFO")
    prepare(DataSettings.model_validate(given), tmp_path / "data", **cache)
    assert (
        "prepare: 69 of 70 images had been decoded before" in caplog.messages
    )  # those of b.tar are read again, and are the same
