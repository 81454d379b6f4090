"""A preparation that was ended anywhere continues with what it has decoded, and gives the same data set."""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from trainer.config import DataSettings
from trainer.data import preparation
from trainer.data.curation import ImageCandidate
from trainer.data.sources import Item, SourceListing, list_source
from trainer.data.sources.columns import Columns, name_hash
from trainer.io import artifacts, storage
from trainer.io.errors import DataError
from trainer.stages.prepare import run

IMAGES, CHUNK = 24, 4


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(preparation, "SMALLEST_CHUNK", CHUNK)
    monkeypatch.delenv("TRAINER_CHECKPOINTS", raising=False)


@pytest.fixture
def photos(tmp_path: Path) -> Path:
    for number in range(IMAGES):
        path = tmp_path / "photos" / f"class {number % 2}" / f"{number:02d}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        paint(path, number)
    (tmp_path / "photos" / "class 0" / "00 bad.png").write_bytes(b"no image")
    return tmp_path / "photos"


def paint(path: Path, seed: int) -> None:
    pixels = np.random.default_rng(seed).integers(0, 256, (16, 16, 3), dtype=np.uint8)
    Image.fromarray(pixels).save(path)


def settings(photos: Path, **values: object) -> DataSettings:
    fixed = {"source": f"imagefolder:{photos}", "image_size": 16, "max_bad_fraction": 0.2}
    return DataSettings.model_validate(fixed | values)


def too_strict(photos: Path) -> DataSettings:
    """Settings that end the preparation when everything is decoded."""
    return settings(photos, max_bad_fraction=0.0)


def spooled(place: str | Path) -> dict[str, bytes]:
    """The files of the decode cache beside an output."""
    root = storage.join(storage.parent(place), "checkpoints")
    return {name: storage.read_bytes(storage.join(root, name)) for name in storage.files(root)}


def prepared(photos: Path, place: str | Path, caplog: pytest.LogCaptureFixture) -> tuple[str, int]:
    """The fingerprint of the data set, and how many images an earlier try had decoded."""
    caplog.clear()
    caplog.set_level(logging.INFO)
    fingerprint = run(settings(photos), dataset=place).fingerprint
    decoded = [record.args[0] for record in caplog.records if "decoded before" in record.message and record.args]
    assert spooled(place) == {}
    return fingerprint, int(decoded[0]) if decoded else 0


def failed(photos: Path, place: str | Path) -> None:
    with pytest.raises(DataError, match="images are bad"):
        run(too_strict(photos), dataset=place)


def test_in_a_store_too(object_store, photos: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    undisturbed = prepared(photos, tmp_path / "data", caplog)
    place = object_store.uri("run", "data")
    failed(photos, place)
    (first, *_, last) = [name for name in spooled(place) if name.endswith(".arrow")]
    storage.remove_file(object_store.uri("run", "checkpoints", first))
    object_store.put(f"run/checkpoints/{last}", b"damaged")
    assert prepared(photos, place, caplog) == (undisturbed[0], 25 - CHUNK - 1)


def test_photos_of_a_store_are_not_read_again(
    object_store, photos: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Their size and ETag are in the listing."""
    for file in photos.rglob("*.png"):
        object_store.put(f"photos/{file.relative_to(photos)}", file.read_bytes())
    source = {"source": f"imagefolder:{object_store.uri('photos')}"}
    with pytest.raises(DataError, match="images are bad"):
        run(settings(photos, **source | {"max_bad_fraction": 0.0}), dataset=tmp_path / "data")
    object_store.put("photos/class 1/03.png", (photos / "class 0" / "02.png").read_bytes())
    object_store.clear()
    caplog.set_level(logging.INFO)
    run(settings(photos, **source), dataset=tmp_path / "data")
    assert "prepare: 24 of 25 images had been decoded before" in caplog.messages
    (read,) = {one.path for one in object_store.requests if one.method == "GET" and one.path.endswith(".png")}
    assert read.endswith("/03.png")


@pytest.mark.parametrize("suffix", ["arrow", "jsonl"])
@pytest.mark.parametrize("damage", ["truncated", "altered", "gone", "empty"])
def test_a_damaged_chunk_is_decoded_again(
    photos: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture, suffix: str, damage: str
) -> None:
    undisturbed = prepared(photos, tmp_path / "a" / "data", caplog)
    failed(photos, tmp_path / "b" / "data")
    (file,) = (tmp_path / "b" / "checkpoints").rglob(f"000002.{suffix}")
    content = file.read_bytes()
    middle = len(content) // 2
    file.write_bytes(
        {
            "truncated": content[:middle],
            "altered": content[:middle] + bytes([content[middle] ^ 1]) + content[middle + 1 :],
            "gone": b"",
            "empty": b"",
        }[damage]
    )
    if damage == "gone":
        file.unlink()
    assert prepared(photos, tmp_path / "b" / "data", caplog) == (undisturbed[0], 25 - CHUNK)


def test_chunks_of_older_versions_are_decoded_again(
    photos: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    failed(photos, tmp_path / "b" / "data")
    (file,) = (tmp_path / "b" / "checkpoints").rglob("000002.jsonl")
    content = storage.read_checksummed(str(file))
    assert content.count(',"appearance":""') == CHUNK
    storage.write_checksummed(str(file), content.replace(',"appearance":""', ""))
    assert prepared(photos, tmp_path / "b" / "data", caplog)[1] == 25 - CHUNK


def test_images_that_have_changed_are_decoded_again(
    photos: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    failed(photos, tmp_path / "b" / "data")
    changed = photos / "class 1" / "23.png"
    times = changed.stat()
    paint(changed, 1000)
    os.utime(changed, ns=(times.st_atime_ns, times.st_mtime_ns))
    (photos / "class 0" / "00.png").unlink()  # moves all that follow, so one of each chunk is in another
    resumed, there = prepared(photos, tmp_path / "b" / "data", caplog)
    assert there == 24 - 24 // CHUNK
    assert resumed == prepared(photos, tmp_path / "a" / "data", caplog)[0]


def test_a_changed_image_alone_is_decoded_again(photos: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    failed(photos, tmp_path / "b" / "data")
    paint(photos / "class 0" / "00 bad.png", 2000)
    resumed, there = prepared(photos, tmp_path / "b" / "data", caplog)
    assert there == 24
    assert resumed == prepared(photos, tmp_path / "a" / "data", caplog)[0]


@pytest.mark.parametrize("in_store", [False, True])
def test_a_later_preparation_decodes_what_is_new(
    object_store, photos: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture, in_store: bool
) -> None:
    place = object_store.uri("decoded") if in_store else str(tmp_path / "decoded")
    source = f"imagefolder:{object_store.uri('photos')}" if in_store else f"imagefolder:{photos}"

    def synchronized() -> None:
        for key in object_store.keys("photos"):
            object_store.delete(key)
        for file in photos.rglob("*.png"):
            object_store.put(f"photos/{file.relative_to(photos)}", file.read_bytes())

    def fingerprint(name: str, **values: object) -> str:
        caplog.clear()
        return run(settings(photos, source=source, **values), dataset=tmp_path / name / "data").fingerprint

    caplog.set_level(logging.INFO)
    synchronized()
    assert fingerprint("first", keep_decoded=place) == fingerprint("first alone")
    assert kept_chunks(place) == {*chunk_names(source, place)}
    (photos / "class 1" / "23.png").unlink()
    paint(photos / "class 1" / "24.png", 24)  # in its place
    paint(photos / "class 0" / "02.png", 1000)
    (photos / "class 0" / "00 bad.png").write_bytes(b"another")
    (photos / "class 0" / "04.png").rename(photos / "class 1" / "00.png")
    paint(photos / "class 0" / "04.png", 3000)
    synchronized()
    later = fingerprint("second", keep_decoded=place)
    (there,) = [int(record.args[0]) for record in caplog.records if "decoded before" in record.message and record.args]
    assert there == 26 - 5
    assert later == fingerprint("second alone")
    # Again: nothing is decoded, and with fewer images no chunk is left over.
    assert fingerprint("third", keep_decoded=place) == later
    assert "prepare: 26 of 26 images had been decoded before" in caplog.messages
    for number in range(6, 18):
        (photos / f"class {number % 2}" / f"{number:02d}.png").unlink()
    synchronized()
    fingerprint("fourth", keep_decoded=place)
    assert kept_chunks(place) == {*chunk_names(source, place)}


def chunk_names(source: str, place: str) -> list[str]:
    given = DataSettings(source=source, image_size=16, keep_decoded=place)
    return [*preparation._chunks(list_source(source), given)]


def kept_chunks(place: str) -> set[str]:
    return {Path(name).stem for name in storage.files(place)}


def test_images_that_sort_first_leave_the_others_decoded(
    photos: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    given = settings(photos, keep_decoded=str(tmp_path / "decoded"))
    for number in range(200):
        paint(photos / "class 0" / f"more {number:03d}.png", 100 + number)
    before = {
        name: [item.name for item in items]
        for name, items in preparation._chunks(list_source(given.source), given).items()
    }
    assert sum(len(items) == 1 for items in before.values()) < len(before) / 2
    assert max(map(len, before.values())) <= 4 * CHUNK
    run(given, dataset=tmp_path / "first" / "data")
    (photos / "a class").mkdir()
    for number in range(30):
        paint(photos / "a class" / f"{number:03d}.png", 1000 + number)
    caplog.set_level(logging.INFO)
    later = run(given, dataset=tmp_path / "second" / "data")
    (there,) = [int(record.args[0]) for record in caplog.records if "decoded before" in record.message and record.args]
    assert 225 - 4 * CHUNK <= there < 225, "all but those of the chunk that came first"
    assert later.fingerprint == run(settings(photos), dataset=tmp_path / "alone" / "data").fingerprint


@pytest.mark.parametrize("hashed", [False, True])
def test_many_more_images_leave_the_others_in_their_chunks(monkeypatch: pytest.MonkeyPatch, *, hashed: bool) -> None:
    monkeypatch.setattr(preparation, "CHUNKS", 4)
    monkeypatch.setattr(preparation, "LASTING_BITS", 5)
    monkeypatch.setattr(preparation, "SHARD", 2 if hashed else 2**20)
    monkeypatch.setattr(preparation, "CHUNK_BYTES", 30 * 3 * 16**2)
    given = DataSettings(image_size=16, keep_decoded="/decoded", encoding="raw")

    def chunks(count: int) -> dict[str, set[str]]:
        items = [Item(name=f"a/{number:04d}.png", location="", label=0, split="train") for number in range(count)]
        if hashed:
            items.sort(key=lambda item: name_hash(item.name))
        listing = SourceListing(items=Columns.of(Item, items), classes=("a",), read=lambda _: b"")
        return {name: {item.name for item in of} for name, of in preparation._chunks(listing, given).items()}

    few, many = chunks(200), chunks(900)
    kept = set.union(*(few.get(name, set()) & images for name, images in many.items()))
    assert len(kept) > 0.95 * 200
    assert max(map(len, few.values())) <= 30
    assert hashed or max(map(len, many.values())) <= 30


def test_the_same_bytes_under_another_etag_are_read_once(
    object_store, photos: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As after a copy within the store in parts of another size."""
    for file in photos.rglob("*.png"):
        object_store.put(f"photos/{file.relative_to(photos)}", file.read_bytes())
    given = settings(photos, source=f"imagefolder:{object_store.uri('photos')}", keep_decoded=str(tmp_path / "decoded"))
    listed = storage.listing
    run(given, dataset=tmp_path / "first")
    monkeypatch.setattr(storage, "listing", lambda uri: (one._replace(tag=f"{one.tag}-2") for one in listed(uri)))

    def read(name: str) -> int:
        object_store.clear()
        run(given, dataset=tmp_path / name)
        return sum(one.method == "GET" and one.path.endswith(".png") for one in object_store.requests)

    assert (read("second"), read("third")) == (25, 0)


def test_a_photo_that_is_gone_and_comes_back_is_read(
    object_store, photos: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is listed, as by an inventory of hours ago, under the size and ETag that it has again later."""
    for file in photos.rglob("*.png"):
        object_store.put(f"photos/{file.relative_to(photos)}", file.read_bytes())
    gone, content = f"{object_store.uri('photos')}/class 0/04.png", (photos / "class 0" / "04.png").read_bytes()
    given = settings(photos, source=f"imagefolder:{object_store.uri('photos')}", keep_decoded=str(tmp_path / "decoded"))
    listed = [*storage.listing(object_store.uri("photos"))]
    monkeypatch.setattr(storage, "listing", lambda uri: iter(listed))
    storage.remove_file(gone)
    bad = [run(given, dataset=tmp_path / name).figures["quarantined"] for name in ("first", "second")]
    storage.write_bytes(gone, content)
    assert [*bad, run(given, dataset=tmp_path / "third").figures["quarantined"]] == [2, 2, 1]


def test_a_later_inventory_of_the_same_photos_finds_what_was_decoded(tmp_path: Path) -> None:
    first, later, other = (
        preparation.decode_cache_uri(
            DataSettings(source=f"imagefolder:s3://reports/photos/{config}/manifest.json/food"), "kept"
        )
        for config in ("all/2026-11-28T01-00Z", "all/2026-11-29T01-00Z", "some/2026-11-28T01-00Z")
    )
    assert first == later != other


def test_an_image_with_another_label_is_not_decoded_again(
    photos: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    names = [f"class {number % 2}/{number:02d}.png" for number in range(IMAGES)]

    def fingerprint(name: str, labels: list[str], **values: object) -> str:
        manifest = photos / "list.csv"
        manifest.write_text(
            "path,label\n" + "".join(f"{path},{label}\n" for path, label in zip(names, labels, strict=True))
        )
        caplog.clear()
        given = settings(photos, source=f"manifest:{manifest}", **values)
        return run(given, dataset=tmp_path / name / "data").fingerprint

    caplog.set_level(logging.INFO)
    kept = {"keep_decoded": str(tmp_path / "decoded")}
    labels = [f"kind {number % 2}" for number in range(IMAGES)]
    fingerprint("first", labels, **kept)
    labels[7] = "kind 0"
    with_more = [
        label.replace("kind", "any") if label == "kind 0" else label for label in labels
    ]  # the classes' order is another
    for name, given in (("one", labels), ("more", with_more)):
        assert fingerprint(name, given, **kept) == fingerprint(f"{name} alone", given)
        fingerprint(name, given, **kept)
        assert f"prepare: {IMAGES} of {IMAGES} images had been decoded before" in caplog.messages


def test_chunks_of_a_large_source_keep_their_images(
    photos: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(preparation, "SHARD", 2)
    monkeypatch.setattr(preparation, "WINDOW", 2)

    def chunks() -> list[set[str]]:
        given = settings(photos)
        listing = preparation._mapped(list_source(given.source), tmp_path)
        found = [[item.name for item in items] for items in preparation._chunks(listing, given).values()]
        names = [name for of_chunk in found for name in of_chunk]
        assert names == sorted(names, key=name_hash)
        assert len(names) == len(listing.items)
        return [set(of_chunk) for of_chunk in found]

    before = chunks()
    assert len(before) == 8
    paint(photos / "class 1" / "0 new.png", 24)
    (photos / "class 0" / "08.png").unlink()
    after = chunks()
    assert set.union(*(one - other for one, other in zip(after, before, strict=True))) == {"class 1/0 new.png"}
    assert set.union(*(one - other for one, other in zip(before, after, strict=True))) == {"class 0/08.png"}


@pytest.mark.parametrize(
    ("changed", "there"),
    [({"split_seed": 5}, 25), ({"workers": 3}, 25), ({"image_size": 24}, 0), ({"fit": "stretch"}, 0)],
)
def test_only_what_is_decoded_in_same_way_is_taken(
    photos: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture, changed: dict[str, object], there: int
) -> None:
    failed(photos, tmp_path / "b" / "data")
    caplog.set_level(logging.INFO)
    resumed = run(settings(photos, **changed), dataset=tmp_path / "b" / "data")
    assert f"prepare: {there} of 25 images had been decoded before" in caplog.messages or not there
    assert resumed.fingerprint == run(settings(photos, **changed), dataset=tmp_path / "a" / "data").fingerprint


def test_one_that_finishes_first_takes_nothing_away(photos: Path, tmp_path: Path) -> None:
    undisturbed = run(settings(photos), dataset=tmp_path / "a" / "data")
    listing = list_source(settings(photos).source)
    place, out = (
        preparation.decode_cache_uri(settings(photos), str(tmp_path / "b" / "checkpoints")),
        tmp_path / "b" / "slow",
    )
    out.mkdir(parents=True)
    with preparation._open_cache(settings(photos), out, place) as cache:
        good = list[ImageCandidate]()
        preparation._decode_all(listing, settings(photos), cache, 1, good.extend)
        assert run(settings(photos), dataset=tmp_path / "b" / "data").fingerprint == undisturbed.fingerprint
        assert storage.files(place) == {}
        squares, ends = preparation._open_squares(cache, preparation._chunks(listing, settings(photos)))
        assert len(squares) == ends[-1] == len(good) == 24


def test_a_spool_on_another_disk_is_copied(
    photos: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Memory is a disk of its own."""
    with tempfile.TemporaryDirectory(dir="/dev/shm") as other:
        monkeypatch.setenv("TRAINER_CHECKPOINTS", f"{other}/checkpoints")
        failed(photos, tmp_path / "data")
        assert len(storage.files(f"{other}/checkpoints")) == 14
        caplog.set_level(logging.INFO)
        run(settings(photos), dataset=tmp_path / "data")
        assert storage.files(f"{other}/checkpoints") == {}
    assert "prepare: 25 of 25 images had been decoded before" in caplog.messages


PREPARE = """
import sys
from pathlib import Path
from trainer.config import DataSettings
from trainer.data import preparation
from trainer.stages.prepare import run
preparation.SMALLEST_CHUNK = 1
run(DataSettings.model_validate_json(sys.argv[1]), dataset=sys.argv[2])
"""


@pytest.mark.parametrize("chunks", [1, 9])
def test_a_preparation_that_is_killed_goes_on(
    photos: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, chunks: int
) -> None:
    undisturbed = prepared(photos, tmp_path / "a" / "data", caplog)
    place = tmp_path / "b" / "data"
    command = [sys.executable, "-c", PREPARE, settings(photos).model_dump_json(), str(place)]
    with subprocess.Popen(command) as process:
        while process.poll() is None and len(list((tmp_path / "b").rglob("*.jsonl"))) < chunks:
            time.sleep(0.001)
        process.send_signal(signal.SIGKILL)
    monkeypatch.setattr(preparation, "SMALLEST_CHUNK", 1)
    if artifacts.exists(place):
        pytest.fail("the preparation was faster than the test")
    resumed, there = prepared(photos, place, caplog)
    assert resumed == undisturbed[0]
    assert there >= chunks - 1


def test_an_object_that_changes_between_listing_and_reading_is_known_by_its_bytes(
    object_store, photos: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """What is kept of it stands for the bytes that were read, and a later run knows that the source has changed."""
    kept, source = object_store.uri("decoded"), f"imagefolder:{object_store.uri('photos')}"
    for file in photos.rglob("*.png"):
        object_store.put(f"photos/{file.relative_to(photos)}", file.read_bytes())
    paint(tmp_path / "new.png", 1000)

    def listed(source: str, **settings: bool) -> SourceListing:
        listing = list_source(source, multi_label=settings["multi_label"])
        object_store.put("photos/class 1/23.png", (tmp_path / "new.png").read_bytes())
        return listing

    def data_set(name: str, **values: object) -> artifacts.Manifest:
        made = run(settings(photos, source=source, **values), dataset=tmp_path / name / "data")
        assert made is not None
        return made

    with monkeypatch.context() as patched:
        patched.setattr(preparation, "list_source", listed)
        first = data_set("first", keep_decoded=kept)
    caplog.set_level(logging.INFO)
    second = data_set("second", keep_decoded=kept)
    assert "prepare: 25 of 25 images had been decoded before" in caplog.messages
    assert first.source_version != second.source_version, "so that a later run prepares again"
    assert second.fingerprint == data_set("alone").fingerprint
