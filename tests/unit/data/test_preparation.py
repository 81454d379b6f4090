"""From files to a prepared data set, read back as a training reads it."""

from __future__ import annotations

import hashlib
import io
import json
import logging
import math
import os
import subprocess
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NoReturn

import numpy as np
import pyarrow as pa
import pytest
import simplejpeg
import torch
from PIL import Image
from sklearn.datasets import load_digits

from trainer.config import DataSettings
from trainer.data import dataset, preparation
from trainer.data.curation import ImageCandidate, Quarantined
from trainer.data.dataset import open_dataset
from trainer.data.dataset_schema import SPLITS, DatasetDescription, features
from trainer.data.decode_cache import DecodeCache
from trainer.data.facts import ImageFacts, writing_facts
from trainer.data.preparation import content_key, prepare
from trainer.data.sources import Columns, Item, SourceListing, read_file
from trainer.io.errors import DataError
from trainer.models.served_student.preprocessing import decode
from trainer.stages.prepare import run


def picture(seed: int, size: int = 16) -> Image.Image:
    return Image.fromarray(np.random.default_rng(seed).integers(0, 256, (size, size, 3), dtype=np.uint8))


def save(image: Image.Image, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    image.save(path)


def folder(root: Path, *, classes: int = 2, images: int = 10, split: str = "") -> Path:
    for label in range(classes):
        for number in range(images):
            seed = 1000 * label + number + 100_000 * len(split)
            save(picture(seed), root / split / f"class {label}" / f"{number:03d}.png")
    return root


def settings(root: Path, **values: object) -> DataSettings:
    return DataSettings.model_validate(
        {"source": f"imagefolder:{root}", "image_size": 16, "encoding": "png", "max_bad_fraction": 1, **values}
    )


def made(path: Path) -> Path:
    path.mkdir(parents=True)
    return path


def cache(path: Path) -> DecodeCache:
    folder = made(path / "spool")
    return DecodeCache(uri=str(folder), folder=folder, way="")


def listed(path: Path, file: str) -> dict[str, str]:
    records = json.loads((path / file).read_text())
    return {record["name"]: record.get("reason") or record["kept_name"] for record in records}


# ---------------------------------------------------------------------------------------------------------------------
# What is stored


def test_what_is_read_back_is_what_files_held(tmp_path: Path) -> None:
    source = folder(tmp_path / "photos", classes=3, images=12)
    save(picture(5_000), source / "unlabeled" / "u.png")
    artifact = run(settings(source), dataset=tmp_path / "out")
    data = open_dataset(tmp_path / "out")
    assert data.classes == ("class 0", "class 1", "class 2")
    assert data.fingerprint == artifact.fingerprint
    seen: list[str] = []
    for name in SPLITS:
        split = data.split(name)
        assert artifact.figures[name] == len(split)
        for index, file in enumerate(split.sources):
            original = Image.open(source / file)
            np.testing.assert_array_equal(split.read([index])[0].permute(1, 2, 0).numpy(), np.asarray(original))
            assert split.names[index] == content_key(original)
            expected = -1 if name == "unlabeled" else data.classes.index(file.split("/")[0])
            assert split.labels[index] == expected
        seen += split.sources
    assert sorted(seen) == sorted(path.relative_to(source).as_posix() for path in source.rglob("*.png"))
    others = {"classes": 3, "quarantined": 0, "duplicates": 0, "leakage": 0, "unlabeled": 1}
    assert others.items() <= artifact.figures.items()


def test_the_log_explains_how_images_were_read(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    source = folder(tmp_path / "photos", classes=12, images=10)
    (source / "class 3" / "000.png").unlink()
    (source / "class 3" / "notes.txt").write_text("three")
    save(picture(500_000), source / "unlabeled" / "u.png")
    prepare(settings(source), made(tmp_path / "out"))
    said = [record.message for record in caplog.records if record.name == preparation.__name__]
    names = ", ".join(repr(f"class {label}") for label in (0, 1, 10, 11, 2, 3, 4, 5, 6, 7))
    assert said[0].startswith(
        "prepare: Files that are not read, since they have no image's ending: 1 .txt (such as class 3/notes.txt)"
    )
    assert said[-2:] == [
        f"prepare: 12 classes: {names} and 2 more; the smallest is 'class 3' with 9 images",
        "prepare: images: 95 train, 12 val (taken from train), 12 test (taken from train), 1 unlabeled",
    ]


def test_digits_end_to_end(tmp_path: Path) -> None:
    artifact = run(DataSettings(image_size=8, encoding="png"), dataset=tmp_path)
    counts = [artifact.figures[split] for split in SPLITS]
    assert sum(counts) == 1797
    assert artifact.figures["test"] == pytest.approx(180, abs=40)
    split, bundled = open_dataset(tmp_path).split("test"), load_digits()
    for index, source in enumerate(split.sources[:20]):
        number = int(source.removeprefix("digit "))
        assert split.labels[index] == bundled.target[number]
        np.testing.assert_allclose(split.read([index])[0, 1].numpy() * (16 / 255), bundled.images[number], atol=0.04)


def test_images_of_all_kinds_are_stored_as_squares_in_rgb(tmp_path: Path) -> None:
    source = folder(tmp_path / "photos")
    save(picture(1, 60).resize((90, 40)).convert("L"), source / "class 0" / "gray.jpg")
    save(picture(2, 60).convert("P"), source / "class 1" / "palette.gif")
    save(picture(3, 60).convert("CMYK"), source / "class 1" / "cmyk.jpg")
    run(settings(source, encoding="jpeg", image_size=24), dataset=tmp_path / "out")
    for name in ("train", "val", "test"):
        split = open_dataset(tmp_path / "out").split(name)
        assert split.read(range(len(split))).shape == (len(split), 3, 24, 24)


def test_where_the_disk_allows_squares_are_stored_as_their_pixels(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    source, by_name = folder(tmp_path / "photos"), {}
    monkeypatch.setattr(preparation, "CHUNK_BYTES", 3 * 3 * 16**2)  # so that a chunk has three images
    for name, free in (("raw", 3 * 20 * 3 * 16**2), ("fast-jpeg", 3 * 20 * 3 * 16**2 - 1), ("png", 0)):
        monkeypatch.setattr(preparation.shutil, "disk_usage", lambda _, free=free: SimpleNamespace(free=free))
        encoding = name if name == "png" else "auto"
        run(settings(source, encoding=encoding), dataset=tmp_path / name)
        by_name[name] = open_dataset(tmp_path / name)
    exact, raw, small = (by_name[name].split("train") for name in ("png", "raw", "fast-jpeg"))
    assert raw.raw
    assert torch.equal(raw.read(range(len(raw))), exact.read(range(len(exact))))
    assert raw.names[:] == exact.names[:] == small.names[:]
    assert simplejpeg.decode_jpeg_header(small.encoded(0))[3] == "420"
    assert torch.equal(by_name["raw"].example(), by_name["png"].example())
    assert "fast-jpeg" in (tmp_path / "fast-jpeg" / "card.html").read_text()
    assert any("stored as their pixels" in message for message in caplog.messages)
    # Stores have less room for them.
    monkeypatch.undo()
    auto = settings(source, encoding="auto")
    chosen = [
        preparation.choose_encoding(auto, images, tmp_path, remote=remote)
        for images, remote in ((20, True), (6_000_000, True), (30_000_000, False))
    ]
    assert chosen == ["raw", "fast-jpeg", "fast-jpeg"]


def test_every_way_to_be_bad_is_quarantined_with_its_reason(tmp_path: Path) -> None:
    source = folder(tmp_path / "photos")
    bad = source / "class 0"
    (bad / "empty.png").touch()
    (bad / "text.jpg").write_text("no image")
    save(picture(1, 50), bad / "whole.jpg")
    (bad / "half.jpg").write_bytes((bad / "whole.jpg").read_bytes()[:900])
    save(picture(2, 5), bad / "tiny.png")
    save(picture(3, 70), bad / "huge.png")
    (bad / "gone.png").symlink_to(source / "nowhere")
    save(picture(4, 20), bad / "said cat.png")
    save(picture(4, 20), source / "class 1" / "said dog.png")
    figures = prepare(settings(source, max_pixels=60 * 60), made(tmp_path / "out"))
    reasons = listed(tmp_path / "out", "quarantine.json")
    assert figures["quarantined"] == len(reasons) == 8
    truncated = reasons.pop("class 0/half.jpg")
    assert truncated.startswith("truncated: ")
    contradiction = (
        "contradicting labels of one picture: class 0/said cat.png (class 0), class 1/said dog.png (class 1)"
    )
    assert reasons == {
        "class 0/empty.png": "empty file",
        "class 0/text.jpg": "no image that can be read: a text file",
        "class 0/tiny.png": "too small: 5 x 5 pixels, below data.min_edge=8",
        "class 0/huge.png": "too many pixels: 4900, more than data.max_pixels=3600",
        "class 0/gone.png": "no such file",
        "class 0/said cat.png": contradiction,
        "class 1/said dog.png": contradiction,
    }


def test_copies_are_dropped_and_leakage_is_removed_from_train(tmp_path: Path) -> None:
    source = tmp_path / "photos"
    for split in ("train", "val", "test"):
        folder(source, split=split, images=5)
    save(picture(1), source / "train" / "class 0" / "copy 1.png")
    save(picture(1), source / "train" / "class 0" / "copy 2.bmp")
    save(picture(2), source / "train" / "class 0" / "seen in val.png")
    save(picture(2), source / "val" / "class 0" / "x.png")
    save(picture(3), source / "val" / "class 1" / "seen in test.bmp")
    save(picture(3), source / "test" / "class 1" / "x.png")
    save(picture(3), source / "unlabeled" / "seen in test too.png")
    figures = run(settings(source), dataset=tmp_path / "out").figures
    assert listed(tmp_path / "out", "dropped.json") == {
        "train/class 0/copy 2.bmp": "train/class 0/copy 1.png",
        "train/class 0/seen in val.png": "val/class 0/x.png",
        "val/class 1/seen in test.bmp": "test/class 1/x.png",
        "unlabeled/seen in test too.png": "test/class 1/x.png",
    }
    assert figures == {
        **dict.fromkeys(("train", "val", "test"), 11),
        **dict.fromkeys(("unlabeled", "quarantined", "near_duplicates"), 0),
        "classes": 2,
        "duplicates": 1,
        "leakage": 3,
    }
    data = open_dataset(tmp_path / "out")
    keys = [key for split in SPLITS for key in data.split(split).names]
    assert len(keys) == len(set(keys)) == 33


# ---------------------------------------------------------------------------------------------------------------------
# The same input gives the same result


def files(path: Path) -> dict[str, bytes]:
    return {file.relative_to(path).as_posix(): file.read_bytes() for file in path.rglob("*") if file.is_file()}


def test_neither_processes_nor_times_nor_earlier_result_change_byte(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(preparation, "SMALLEST_CHUNK", 4)
    source = folder(tmp_path / "photos", classes=3)
    (source / "class 0" / "bad.jpg").write_bytes(b"\xff\xd8\xff broken")
    prepare(settings(source), made(tmp_path / "one"), processes=1)
    for file in source.rglob("*.png"):
        os.utime(file, (1, 1))
    prepare(settings(source), made(tmp_path / "two"), processes=2)
    assert files(tmp_path / "one") == files(tmp_path / "two")
    (tmp_path / "two" / "train" / "data-00001-of-00002.arrow").touch()
    made(tmp_path / "two" / "spool")
    prepare(settings(source), tmp_path / "two", processes=1)
    assert files(tmp_path / "one") == files(tmp_path / "two")


def test_several_shards_hold_what_one_holds_for_any_number_of_writers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = folder(tmp_path / "photos")
    run(settings(source), dataset=tmp_path / "one")
    monkeypatch.setattr(preparation, "SHARD_BYTES", 8000)
    run(settings(source), dataset=tmp_path / "many")
    assert len(list((tmp_path / "many" / "train").glob("*.arrow"))) == 2
    one, many = (open_dataset(tmp_path / name).split("train") for name in ("one", "many"))
    assert list(one.names) == list(many.names)
    np.testing.assert_array_equal(one.read(range(len(one))).numpy(), many.read(range(len(many))).numpy())
    monkeypatch.setattr(dataset, "SAMPLED_FILES", 1)
    sampled = open_dataset(tmp_path / "many").sample("train")
    assert list(sampled.names) == list(many.names)[: len(sampled)]
    assert 0 < len(sampled) < len(many)
    assert sampled.read([0]).equal(many.read([0]))
    monkeypatch.setattr(dataset, "SAMPLED_FILES", 2)
    assert list(open_dataset(tmp_path / "many").sample("train").names) == list(many.names)
    prepare(settings(source), made(tmp_path / "by two"), processes=2)
    written = files(tmp_path / "many")
    del written["manifest.json"]
    assert files(tmp_path / "by two") == written


def test_picture_stays_in_its_split_when_it_is_renamed(tmp_path: Path) -> None:
    source = folder(tmp_path / "photos", images=40)
    run(settings(source), dataset=tmp_path / "before")
    for file in sorted(source.rglob("*.*")):
        file.rename(file.with_stem(f"new-{file.stem}"))
    run(settings(source), dataset=tmp_path / "after")
    before, after = (
        {key: split for split in SPLITS for key in open_dataset(tmp_path / name).split(split).names}
        for name in ("before", "after")
    )
    assert len(after) == 80
    assert after == before


def test_val_of_source_without_test_may_be_test(tmp_path: Path) -> None:
    source = folder(folder(tmp_path / "photos", images=40, split="train"), images=5, split="val")
    run(settings(source), dataset=tmp_path / "from train")
    run(settings(source, test_from="val"), dataset=tmp_path / "from val")
    before, after = open_dataset(tmp_path / "from train"), open_dataset(tmp_path / "from val")
    assert list(after.split("test").names) == list(before.split("val").names)
    assert len(after.split("test")) == 10
    assert 0 < len(after.split("val")) < 40
    assert "The source&#39;s val is the test here" in (tmp_path / "from val" / "card.html").read_text()


def test_val_that_is_to_be_test_but_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(
        DataError, match=r"data.test_from is val, but the source has neither val nor test; set data.test_from=train"
    ):
        prepare(settings(folder(tmp_path / "photos"), test_from="val"), made(tmp_path / "out"))


# ---------------------------------------------------------------------------------------------------------------------
# What ends the preparation


def test_too_many_bad_images(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    source = folder(tmp_path / "photos", images=10)
    for name in ("a.jpg", "b.jpg"):
        (source / "class 0" / name).write_text("no image")
    (source / "class 1" / "c.png").touch()
    with pytest.raises(DataError) as caught:
        prepare(settings(source, max_bad_fraction=0.1), made(tmp_path / "out"))
    assert str(caught.value) == (
        "3 of 23 images are bad (13.0%), more than data.max_bad_fraction=0.1 allows: 2 no image that can be read, such as "
        "class 0/a.jpg (a text file); 1 empty file, such as class 1/c.png. All are listed in "
        f"{tmp_path}/out/quarantine.json; mend or remove them, or raise the limit"
    )
    assert len(listed(tmp_path / "out", "quarantine.json")) == 3
    assert not (tmp_path / "out" / "spool").exists()
    card = (tmp_path / "out" / "card.html").read_text(encoding="utf-8")
    assert "Not prepared" in card
    assert "3 of 23 images are bad (13.0%), more than" in card
    assert "class 1/c.png" in card
    prepare(settings(source, max_bad_fraction=0.14), tmp_path / "out")
    assert (
        "3 of 23 images are bad (13.0%) and left out: 2 no image that can be read, such as class 0/a.jpg (a text file);"
        in caplog.text
    )


def test_a_folder_without_any_good_image_has_a_card_too(tmp_path: Path) -> None:
    source = folder(tmp_path / "photos", images=2)
    for file in source.glob("*/*"):
        file.write_text("no image")
    with pytest.raises(DataError, match="fewer good labeled images"):
        prepare(settings(source), made(tmp_path / "out"))
    assert "Not prepared" in (tmp_path / "out" / "card.html").read_text(encoding="utf-8")


def test_unused_upper_bits_of_grays(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    digits = load_digits()
    chosen = [*np.flatnonzero(digits.target == 0)[:9], *np.flatnonzero(digits.target == 1)[:9]]
    for index in chosen:
        grays = (digits.images[index] * 4095 / 16).astype(np.uint16)
        save(Image.fromarray(grays), tmp_path / "photos" / str(digits.target[index]) / f"{index}.png")
    (tmp_path / "photos" / "0" / "1.png").write_text("version https://git-lfs.github.com/spec/v1")
    with pytest.raises(DataError, match=r"18 of 18 images have grays of 16 bits, up to 4095 in.*data.gray_bits=12"):
        prepare(settings(tmp_path / "photos", min_edge=1), made(tmp_path / "out"))
    prepared = tmp_path / "prepared"
    run(settings(tmp_path / "photos", min_edge=1, image_size=8, gray_bits=12), dataset=prepared)
    dataset = open_dataset(prepared)
    assert len(np.unique(dataset.split("train").read(range(9)).numpy())) > 15
    assert dataset.square.gray_bits == 12, "travels to the student"
    assert "up to 4095 in 0/10.png, read as 12 bits (data.gray_bits)" in caplog.text
    assert "1 of 19 images are bad (5.3%) and left out: 1 Git LFS pointer, such as 0/1.png (" in caplog.text
    with pytest.raises(DataError, match=r"18 deeper grays, such as 0/.*; 1 Git LFS pointer"):
        prepare(settings(tmp_path / "photos", min_edge=1, gray_bits=11, max_bad_fraction=0.1), made(tmp_path / "more"))


def test_a_list_says_where_images_were_sought(tmp_path: Path) -> None:
    folder(tmp_path / "photos")
    (tmp_path / "lists").mkdir()
    listed = (f"photos/{path.parent.name}/{path.name},x\n" for path in sorted((tmp_path / "photos").glob("*/*.png")))
    (tmp_path / "lists" / "list.csv").write_text(f"path,label\n{''.join(listed)}", encoding="utf-8")
    given = DataSettings(source=f"manifest:{tmp_path}/lists/list.csv")
    with pytest.raises(DataError) as caught:
        prepare(given, made(tmp_path / "out"))
    place = f"such as photos/class 0/000.png (looked for at {tmp_path}/lists/photos/class 0/000.png; relative paths start at the folder"
    assert place in str(caught.value)


def test_a_class_with_too_few_good_images(tmp_path: Path) -> None:
    source = folder(tmp_path / "photos", images=5)
    save(picture(7_000), source / "rare" / "1.png")
    save(picture(7_000), source / "rare" / "the same.png")
    with pytest.raises(DataError, match=r"class 'rare' \(1\): fewer good labeled images"):
        prepare(settings(source), made(tmp_path / "out"))


def test_one_class_only(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="has only one class, 'class 0'"):
        prepare(settings(folder(tmp_path / "photos", classes=1)), made(tmp_path / "out"))


def test_a_given_split_without_good_images(tmp_path: Path) -> None:
    source = folder(tmp_path / "photos", split="train")
    made(source / "val" / "class 0")
    (source / "val" / "class 0" / "bad.png").touch()
    with pytest.raises(DataError, match="split val is empty"):
        prepare(settings(source), made(tmp_path / "out"))


def test_storage_that_fails_is_not_image_s_fault(tmp_path: Path) -> None:
    """Reading a process's memory from address 0 gives EIO, as a failing disk does."""
    item = Item(name="x.png", location="/proc/self/mem", label=0, split="train")
    listing = SourceListing(
        items=Columns.of(Item, [item]), classes=("a",), read=lambda location: Path(location).read_bytes()
    )
    with pytest.raises(DataError, match=r"image x\.png: reading it failed .* see to the storage"):
        preparation._decode_all(listing, settings(tmp_path), cache(tmp_path), 1, list.copy)


def test_a_path_through_a_file_names_no_image(tmp_path: Path) -> None:
    (tmp_path / "1.png").touch()
    item = Item(name="x.png", location=f"{tmp_path}/1.png/x.png", label=0, split="train")
    listing = SourceListing(items=Columns.of(Item, [item]), classes=("a",), read=read_file)
    (outcome,) = preparation._decode_all(listing, settings(tmp_path), cache(tmp_path), 1, list.copy)
    assert outcome == Quarantined(name="x.png", reason="no such file")


def end_process(code: str) -> NoReturn:
    os._exit(int(code))


def test_a_process_that_dies_is_reported(tmp_path: Path) -> None:
    item = Item(name="x.png", location="9", label=0, split="train")  # the exit code
    listing = SourceListing(items=Columns.of(Item, [item]), classes=("a",), read=end_process)
    with pytest.raises(DataError, match="a process that decodes images died"):
        preparation._decode_all(listing, settings(tmp_path), cache(tmp_path), 2, list.copy)


# ---------------------------------------------------------------------------------------------------------------------
# Writing


def contents(path: Path) -> dict[str, bytes]:
    return {one.relative_to(path).as_posix(): one.read_bytes() for one in path.rglob("*") if one.is_file()}


@pytest.mark.parametrize(
    ("processes", "shard_bytes", "largest"), [(1, 3_000, "train"), (2, 2_500, "unlabeled"), (1, 10**9, "val")]
)
def test_splits_are_those_that_datasets_writes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, processes: int, shard_bytes: int, largest: str
) -> None:
    monkeypatch.setattr(preparation, "SHARD_BYTES", shard_bytes)
    if processes == 1:  # in others, nothing is patched
        monkeypatch.setattr("datasets.config.DEFAULT_MAX_BATCH_SIZE", 7)
        monkeypatch.setattr("datasets.config.ARROW_RECORD_BATCH_SIZE_FOR_IMAGE_DATASETS", 3)
    draw, chunks, sizes = np.random.default_rng(processes), cache(tmp_path), [30, 0, 25, 41, 1]
    chunks = replace(chunks, uri="s3://not/asked")
    candidates = []
    for number, size in enumerate(sizes):
        rows = []
        for row in range(size):
            key = draw.bytes(32).hex()
            candidates.append(
                ImageCandidate(name=f"{number}/{row}", label=row % 3, split="train", key=key, width=1, height=1)
            )
            image = {"bytes": draw.bytes(int(draw.integers(50, 150))), "path": None}
            rows.append({"image": image, "label": row % 3, "key": key, "source": f"{number}/{row}"})
        schema = features().arrow_schema
        with pa.ipc.new_stream(str(chunks.squares(str(number))), schema) as writer:
            writer.write_table(pa.Table.from_pylist(rows, schema=schema))
    with writing_facts(tmp_path / "facts.arrow") as append:
        append(candidates)
    decoded = ImageFacts.read(tmp_path / "facts.arrow")
    of = np.array([SPLITS.index(largest)] * 50 + [0, 1, 2] * 13 + [3] * 8, dtype=np.int8)
    draw.shuffle(of)
    of[of == 2] = 0  # none is test
    splits = {split: ImageFacts(decoded.table, decoded.rows, of).of(split) for split in SPLITS}
    squares, ends = preparation._open_squares(chunks, map(str, range(len(sizes))))
    assert ends == [30, 30, 55, 96, 97]
    for split, members in splits.items():
        keys = hashlib.sha256(
            json.dumps([[one.key, one.label] for one in members], separators=(",", ":")).encode()
        ).hexdigest()
        chosen = squares.select(members.rows, new_fingerprint=keys[:16])
        shards = max(1, math.ceil(len(members) * squares.data.nbytes / len(squares) / shard_bytes))
        chosen.save_to_disk(str(tmp_path / "expected" / split), num_shards=shards)
    freed: list[int] = []
    preparation._write_splits(splits, squares, made(tmp_path / "out"), processes, freed.append)
    written, expected = contents(tmp_path / "out"), contents(tmp_path / "expected")
    assert {name for name in {*written, *expected} if written.get(name) != expected.get(name)} == set()
    assert freed == sorted(freed)
    assert freed[-1] == int(splits[largest].rows[-1]) + 1
    assert len(freed) > 1 or shard_bytes > 10**6


@pytest.mark.parametrize("is_kept_here", [False, True])
def test_squares_are_freed_once_they_are_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_kept_here: bool
) -> None:
    """So that a preparation for a store takes the disk of its images once, and the resume of one on this machine stays."""
    monkeypatch.setattr(preparation, "SMALLEST_CHUNK", 10)
    monkeypatch.setattr(preparation, "SHARD_BYTES", 8_000)
    source, peak = folder(tmp_path / "photos", images=60), [0]
    write = preparation._write_shard

    def measured(shard: Any, file: Path, rows: int) -> None:
        write(shard, file, rows)
        kept = {
            one.stat().st_ino: one.stat().st_size
            for one in (tmp_path / "out").rglob("*.arrow")
            if "listing" not in str(one)
        }
        peak[0] = max(peak[0], sum(kept.values()))

    monkeypatch.setattr(preparation, "_write_shard", measured)
    with tempfile.TemporaryDirectory(dir="/dev/shm") as other:  # another disk, as a store is
        place = str(tmp_path / "out" / "kept") if is_kept_here else other
        prepare(settings(source), made(tmp_path / "out"), cache_uri=place, processes=1)
        written = sum(one.stat().st_size for one in (tmp_path / "out").glob("*/data-*.arrow"))
        assert (1.8 if is_kept_here else 1.0) * written < peak[0] < (2.6 if is_kept_here else 1.6) * written
        assert all(len(one.read_bytes()) for one in Path(place).glob("*.arrow"))


# ---------------------------------------------------------------------------------------------------------------------
# Progress and the rest


def test_the_description_counts_the_images(tmp_path: Path) -> None:
    figures = prepare(settings(folder(tmp_path / "photos")), made(tmp_path / "out"))
    description = DatasetDescription.read(tmp_path / "out")
    assert description.image_size == 16
    assert description.images == {split: figures[split] for split in SPLITS}
    assert (tmp_path / "out" / "card.html").read_text().startswith("<!doctype html>")


def test_process_that_decodes_loads_neither_torch_nor_datasets() -> None:
    """Each would cost it seconds and hundreds of megabytes."""
    code = (
        "import sys, trainer.data.preparation, trainer.data.sources; print({'torch', 'datasets'} & sys.modules.keys())"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"


def noise(height: int, width: int) -> np.ndarray:
    return np.random.default_rng(0).integers(0, 256, (height, width, 3), dtype=np.uint8)


def file(image: Image.Image, kind: str) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, kind)
    return buffer.getvalue()


def test_content_key_depends_on_pixels_and_shape_only() -> None:
    pixels = noise(6, 8)
    keys = {
        content_key(decode(file(Image.fromarray(pixels), kind), max_pixels=99, min_edge=1)) for kind in ("PNG", "BMP")
    }
    assert keys == {hashlib.sha256(b"8x6:" + pixels.tobytes()).hexdigest()}
    assert content_key(Image.fromarray(pixels.reshape(8, 6, 3))) not in keys
    pixels[0, 0, 0] ^= 1
    assert content_key(Image.fromarray(pixels)) not in keys
