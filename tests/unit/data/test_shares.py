"""Several machines decode shares of a preparation, and the result is that of one."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from trainer.config import DataSettings
from trainer.data import preparation
from trainer.data.dataset import open_dataset
from trainer.data.preparation import decode_cache_uri, decode_share
from trainer.data.sources import list_source
from trainer.graph import Share
from trainer.io import artifacts, storage
from trainer.io.errors import DataError
from trainer.stages.prepare import run

IMAGES, CHUNK = 48, 4


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(preparation, "SMALLEST_CHUNK", CHUNK)
    monkeypatch.setenv("TRAINER_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("TRAINER_CHECKPOINTS", raising=False)


@pytest.fixture
def photos(tmp_path: Path) -> Path:
    for number in range(IMAGES):
        file = tmp_path / "photos" / f"class {number % 3}" / f"{number:02d}.png"
        file.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(np.random.default_rng(number).integers(0, 256, (16, 16, 3), dtype=np.uint8)).save(file)
    (tmp_path / "photos" / "class 1" / "bad.png").write_bytes(b"no image")
    return tmp_path / "photos"


@pytest.fixture
def decoded(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of the images that this process decodes."""
    names: list[str] = []
    decode = preparation._decode

    def noted(item: Any, read: Any, settings: DataSettings) -> Any:
        names.append(item.name)
        return decode(item, read, settings)

    monkeypatch.setattr(preparation, "_decode", noted)
    return names


def settings(photos: Path, **values: object) -> DataSettings:
    fixed = {"source": f"imagefolder:{photos}", "image_size": 16, "max_bad_fraction": 0.1, "encoding": "png"}
    return DataSettings.model_validate(fixed | values)


def cache_of(photos: Path, dataset: str | Path) -> str:
    return decode_cache_uri(settings(photos), artifacts.unfinished(dataset))


def kept(photos: Path, dataset: str | Path) -> list[str]:
    return sorted(storage.files(cache_of(photos, dataset)))


@pytest.mark.parametrize(("machines", "chunks"), [(1, 5), (2, 5), (3, 7), (4, 2), (16, 100)])
def test_every_machine_passes_all_chunks_its_own_first(machines: int, chunks: int) -> None:
    orders = [preparation._order_of(Share(number, machines), chunks) for number in range(machines)]
    own = [range(number, chunks, machines) for number in range(machines)]
    for order, share in zip(orders, own, strict=True):
        assert sorted(order) == [*range(chunks)]
        assert order[: len(share)] == [*share]
    # Where all end their own shares together, they go on in different places.
    if machines > 1 and chunks >= 2 * machines:
        assert len({order[len(share)] for order, share in zip(orders, own, strict=True)}) == machines


@pytest.mark.parametrize("store", [False, True])
def test_shares_together_are_the_data_set_of_one_machine(
    photos: Path, tmp_path: Path, decoded: list[str], object_store, store: bool
) -> None:
    alone = run(settings(photos), dataset=tmp_path / "alone" / "dataset")
    place = object_store.uri("run", "dataset") if store else str(tmp_path / "shared" / "dataset")
    decoded.clear()
    # The second machine ends before the first one has come to the end of its share.
    ends = iter([False] * 9 + [True] * 99)
    count = decode_share(
        settings(photos), cache_of(photos, place), Share(2, 3), ended=partial(next, ends), remote=store
    )
    assert (count, len(decoded)) == (4 * CHUNK, 4 * CHUNK)
    decoded.clear()
    run(settings(photos), dataset=place, share=Share(1, 3))
    assert len(decoded) == IMAGES + 1 - 4 * CHUNK
    decoded.clear()
    shared = run(settings(photos), dataset=place, share=Share(0, 3))
    assert decoded == []
    assert alone is not None
    assert shared is not None
    assert shared.fingerprint == alone.fingerprint
    assert kept(photos, place) == []


def test_a_machine_that_comes_late_leaves_nothing(photos: Path, tmp_path: Path, decoded: list[str]) -> None:
    place = tmp_path / "dataset"
    run(settings(photos), dataset=place, share=Share(0, 2))
    decoded.clear()
    assert run(settings(photos), dataset=place, share=Share(1, 2)) is None
    assert decoded == kept(photos, place) == []


def test_a_chunk_that_was_decoded_as_the_preparation_ended_is_removed(photos: Path, tmp_path: Path) -> None:
    ends = iter([False] * 4 + [True] * 99)  # asked at the start, and before and after each chunk
    uri = cache_of(photos, tmp_path / "dataset")
    assert decode_share(settings(photos), uri, Share(1, 2), ended=partial(next, ends)) == 2 * CHUNK
    assert len(kept(photos, tmp_path / "dataset")) == 2


def test_the_first_machine_decodes_what_others_leave(
    photos: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    alone = run(settings(photos), dataset=tmp_path / "alone" / "dataset")
    place, left, decode = tmp_path / "shared" / "dataset", iter(range(3 * CHUNK)), preparation._decode

    def failing(*arguments: Any) -> Any:
        if next(left, None) is None:
            raise DataError("the store is away")
        return decode(*arguments)

    monkeypatch.setattr(preparation, "_decode", failing)
    with pytest.raises(DataError, match="the store is away"):
        run(settings(photos), dataset=place, share=Share(1, 2))
    monkeypatch.setattr(preparation, "_decode", decode)
    assert len(kept(photos, place)) == 2 * 3
    shared = run(settings(photos), dataset=place, share=Share(0, 2))
    assert alone is not None
    assert shared is not None
    assert shared.fingerprint == alone.fingerprint


def test_machines_are_killed_and_come_late(photos: Path, tmp_path: Path) -> None:
    """As pods do: whoever is there decodes, in any order, and the first one makes the data set."""
    alone = run(settings(photos), dataset=tmp_path / "alone" / "dataset")
    place = tmp_path / "shared" / "dataset"
    command = [sys.executable, "-m", "trainer", "stage", "prepare", "--dataset", str(place), "--settings"]
    command.append(settings(photos).model_dump_json())
    environment = {**os.environ, "MLFLOW_TRACKING_URI": "", "TRAINER_CACHE": str(tmp_path / "cache")}

    def start(share: str) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [*command, "--share", share], env=environment, stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    killed, second, third = start("1/4"), start("2/4"), start("3/4")
    killed.send_signal(signal.SIGKILL)
    first = start("0/4")
    for process in (first, second, third):
        _, said = process.communicate(timeout=120)
        assert process.returncode == 0, said
    killed.communicate()
    assert alone is not None
    assert artifacts.manifest(place, "dataset").fingerprint == alone.fingerprint
    assert kept(photos, place) == []


@pytest.mark.parametrize("share", ["4/4", "-1/4", "1", "a/b", "0/0", ""])
def test_no_such_share(share: str, capfd: pytest.CaptureFixture[str]) -> None:
    from trainer.cli import main

    with pytest.raises(SystemExit):
        main(["stage", "prepare", "--dataset", "/none", f"--share={share}"])
    assert "--share" in capfd.readouterr().err


def test_neighbors_in_a_large_set_have_nothing_to_do_with_one_another(
    photos: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A training reads a large set window by window, and each has to hold all classes."""

    def labels(name: str) -> tuple[list[int], set[str]]:
        run(settings(photos), dataset=tmp_path / name)
        split = open_dataset(tmp_path / name).split("train")
        return split.labels.tolist(), set(split.names)

    ordered, names = labels("small")
    assert ordered == sorted(ordered)
    monkeypatch.setattr(preparation, "SHARD", 12)
    monkeypatch.setattr(preparation, "WINDOW", 2)
    mixed, same = labels("large")
    assert same == names
    assert all(len(set(mixed[start : start + 12])) == 3 for start in range(0, len(mixed) - 11, 12))


def test_a_machine_decodes_what_has_changed_since_an_earlier_preparation(
    object_store: Any, photos: Path, tmp_path: Path, decoded: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def put(file: Path) -> None:
        object_store.put(f"photos/{file.relative_to(photos)}", file.read_bytes())

    for file in photos.rglob("*.png"):
        put(file)
    kept = settings(
        photos, source=f"imagefolder:{object_store.uri('photos')}", keep_decoded=object_store.uri("decoded")
    )
    run(kept, dataset=object_store.uri("first"))
    (photos / "class 1" / "bad.png").write_bytes(b"no image either")
    put(photos / "class 1" / "bad.png")
    decoded.clear()
    place = decode_cache_uri(kept, kept.keep_decoded)
    chunks = preparation._chunks(list_source(kept.source), kept).values()
    (changed,) = [len(items) for items in chunks if "class 1/bad.png" in {item.name for item in items}]
    assert decode_share(kept, place, Share(1, 2), ended=lambda: False, processes=1) == changed < 49
    assert decoded == ["class 1/bad.png"]
    # It stays where the other machine has ended meanwhile.
    decoded.clear()
    (photos / "class 1" / "bad.png").write_bytes(b"and another one")
    put(photos / "class 1" / "bad.png")
    before = storage.files(place).keys()
    decode_share(kept, place, Share(1, 2), ended=lambda: bool(decoded), processes=1)
    assert decoded == ["class 1/bad.png"]
    assert storage.files(place).keys() == before
    decoded.clear()
    run(kept, dataset=object_store.uri("second"))
    assert not decoded


def test_an_older_data_set_at_the_output_ends_no_share(
    photos: Path, tmp_path: Path, decoded: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRAINER_CHECKPOINTS", str(tmp_path / "checkpoints"))
    run(settings(photos, image_size=8), dataset=tmp_path / "data")
    decoded.clear()
    run(settings(photos), dataset=tmp_path / "data", share=Share(1, 2))
    assert len(decoded) == len({*decoded}) == 49
    run(settings(photos), dataset=tmp_path / "data")
    decoded.clear()
    run(settings(photos), dataset=tmp_path / "data", share=Share(1, 2))
    assert not decoded, "it is made"
    (tmp_path / "data" / "manifest.json").write_text("{")
    run(settings(photos), dataset=tmp_path / "data", share=Share(1, 2))
    assert len(decoded) == 49
