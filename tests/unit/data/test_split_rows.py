"""Large splits in a store, whose files are fetched when an image is read or some windows before."""

from __future__ import annotations

import errno
import os
import pickle
import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from tests.stand_ins.object_store import ObjectStore
from trainer.config import DataSettings, ViewSettings
from trainer.data import dataset as reading
from trainer.data import dataset_schema, fetch_ahead, loader, preparation, sampler, split_rows
from trainer.data.dataset import PreparedDataset, Split, open_dataset
from trainer.data.fetch_ahead import FetchAhead
from trainer.data.loader import MicroBatches, Samples, Views
from trainer.data.sampler import AHEAD, HELD, StatelessSampler
from trainer.data.split_rows import FetchedRows
from trainer.io.errors import ArtifactError, OutputError, StorageError
from trainer.io.storage import cache
from trainer.stages.prepare import run

SHARD, WINDOW = 4, 2
TRAIN, UNLABELED = 30, 17  # neither is a multiple of a shard
VIEWS = ViewSettings(min_scale=0.5, color_jitter=0.3, mixup=0.5)


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (sampler, preparation, loader):
        monkeypatch.setattr(module, "SHARD", SHARD)
    for module in (sampler, preparation):
        monkeypatch.setattr(module, "WINDOW", WINDOW)
    monkeypatch.setattr(split_rows, "OPEN_FILES", 3 * WINDOW)
    monkeypatch.setattr(reading, "IN_MEMORY_BYTES", 0)
    monkeypatch.setattr(fetch_ahead, "_POLL_S", 0.01)


@pytest.fixture(scope="module")
def photos(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("photos")
    for split, count in {"train": TRAIN, "val": 4, "test": 4, "unlabeled": UNLABELED}.items():
        for number in range(count):
            of_class = "" if split == "unlabeled" else f"class {number % 2}"
            file = folder / split / of_class / f"{number:02d}.png"
            file.parent.mkdir(parents=True, exist_ok=True)
            pixels = np.random.default_rng([number, len(split)]).integers(0, 256, (16, 16, 3), dtype=np.uint8)
            Image.fromarray(pixels).save(file)
    return folder


def prepare(photos: Path, dataset: str | Path) -> PreparedDataset:
    values = {"source": f"imagefolder:{photos}", "image_size": 16, "encoding": "png"}
    run(DataSettings.model_validate(values), dataset=dataset)
    return open_dataset(dataset)


@pytest.fixture
def whole(photos: Path, tmp_path: Path) -> PreparedDataset:
    """The data set on this machine."""
    return prepare(photos, tmp_path / "whole")


@pytest.fixture
def stored(photos: Path, object_store: ObjectStore, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> PreparedDataset:
    """The same data set in a store, opened on a machine that has nothing of it."""
    prepare(photos, object_store.uri("dataset"))
    monkeypatch.setenv("TRAINER_CACHE", str(tmp_path / "another"))
    return open_dataset(object_store.uri("dataset"))


def here() -> set[str]:
    """The files of splits that are on this machine."""
    # Not by a pattern of `Path`, which fails where a folder is renamed meanwhile.
    found = (Path(folder, name) for folder, _, names in os.walk(cache.root()) for name in names)
    return {
        f"{file.parent.name}/{file.name[5:10]}"
        for file in found
        if file.suffix == ".arrow" and file.name.startswith("data-") and "partial" not in str(file)
    }


def in_use() -> set[str]:
    folders = [folder for folder in cache._used if folder.is_relative_to(cache.root())]  # not of another test
    return {f"{file.parent.name}/{file.name[5:10]}" for folder in folders for file in folder.glob("*/data-*.arrow")}


def numbers(split: str, *files: int) -> set[str]:
    return {f"{split}/{number:05d}" for number in files}


def content(split: Split) -> list[tuple[int, int, str, str, bytes]]:
    texts = zip(split.names, split.sources, strict=True)
    return [
        (int(split.labels[index]), int(split.keys[index]), *both, bytes(split.encoded(index)))
        for index, both in enumerate(texts)
    ]


def test_a_split_is_that_of_a_data_set_that_is_here_whole(whole: PreparedDataset, stored: PreparedDataset) -> None:
    assert stored.fingerprint == whole.fingerprint
    for name, count in (("train", TRAIN), ("unlabeled", UNLABELED), ("val", 4)):
        split = stored.split(name)
        assert isinstance(split.rows, FetchedRows) == (name != "val")
        assert len(split) == count
        assert content(split) == content(whole.split(name))
        assert split.names[-1] == whole.split(name).names[-1]
        assert [*split.sources[1:3]] == [*whole.split(name).sources[1:3]]
        assert content(split.first(6)) == content(whole.split(name))[:6]
        assert content(stored.first(6).split(name)) == content(whole.first(6).split(name))
        for part in (split, split.first(6)):
            assert content(pickle.loads(pickle.dumps(part))) == content(part)


def test_nothing_is_fetched_before_an_image_is_read(stored: PreparedDataset) -> None:
    samples = Samples(stored.training_splits(unlabeled=True))
    assert not here()
    assert len(samples) == TRAIN + UNLABELED
    samples.picture(TRAIN + 5)
    samples.picture(9)
    assert here() == numbers("train", 2) | numbers("unlabeled", 1)


def test_a_process_keeps_few_files_and_the_cache_what_fits(
    stored: PreparedDataset, whole: PreparedDataset, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRAINER_CACHE_GIB", "0")
    split = stored.split("train")
    assert content(split) == content(whole.split("train"))
    last = numbers("train", *range(8 - 3 * WINDOW, 8))
    assert in_use() == last
    cache.evict()
    assert here() == last
    assert bytes(split.encoded(0)) == bytes(whole.split("train").encoded(0))  # fetched again


def test_a_file_that_is_not_as_it_was_made_is_named(stored: PreparedDataset, object_store: ObjectStore) -> None:
    split = stored.split("train")
    (key,) = [key for key in object_store.keys("dataset/train") if "data-00003" in key]
    object_store.put(key, object_store.get(key)[::-1])
    split.encoded(0)
    with pytest.raises(ArtifactError, match=r"data-00003-of-00008\.arrow is damaged \(checksum\)"):
        split.encoded(3 * SHARD)
    object_store.delete(key)
    with pytest.raises(ArtifactError, match=r"data-00003-of-00008\.arrow is missing"):
        split.encoded(3 * SHARD)


def test_an_index_of_other_files_is_refused(stored: PreparedDataset, tmp_path: Path) -> None:
    index = tmp_path / "index.arrow"
    split = stored.split("unlabeled")
    preparation._write_index(index, preparation.pa.table({"label": split.labels, "key": split.keys}))
    with pytest.raises(ValueError, match="8 files, but an index of 17 rows, 4 in a file"):
        FetchedRows("s3://artifacts/dataset", stored._artifact, "train", index)


def test_a_machine_needs_room_for_windows(
    stored: PreparedDataset, whole: PreparedDataset, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = stored._artifact.files
    for split in ("train", "val"):  # the first one has no more than that
        assert dataset_schema.needed_bytes(files, split) == sum(
            one["size"] for name, one in files.items() if split in name
        )
    monkeypatch.setattr(dataset_schema, "WINDOW", 1)
    sizes = sorted(one["size"] for name, one in files.items() if name.startswith("train/"))
    assert dataset_schema.needed_bytes(files, "train") == sum(sizes[-HELD:]) + files["index/train.arrow"]["size"]


def order(samples: Samples, share: float = 0.0) -> StatelessSampler:
    return StatelessSampler(len(samples), 3, paired=True, labeled=samples.labeled, labeled_share=share)


@pytest.mark.parametrize("share", [0.0, 0.3])
def test_windows_are_here_before_they_are_read(stored: PreparedDataset, share: float) -> None:
    samples = Samples(stored.training_splits(unlabeled=True))
    sequence = order(samples, share)
    with FetchAhead(samples, order(samples, share)) as fetching:
        for position in fetching.noted(range(TRAIN + UNLABELED)):
            wanted = [
                {f"{rows._split}/{number:05d}" for rows, number in samples.files(shards)}
                for shards in sequence.windows(position, 1 + AHEAD)
            ]
            if not position:
                assert wanted[0] <= here()
            threading.Event().wait(0.02)
            while not set.union(*wanted) <= here():
                threading.Event().wait(0.02)
    assert not in_use(), "what is fetched ahead may be evicted, until it is read"
    assert not [thread for thread in threading.enumerate() if "fetch-ahead" in thread.name]


def test_processes_of_a_machine_begin_at_other_files(stored: PreparedDataset, monkeypatch: pytest.MonkeyPatch) -> None:
    samples, fetched = Samples(stored.training_splits(unlabeled=False)), list[int]()
    monkeypatch.setattr(fetch_ahead, "_AT_ONCE", 1)
    monkeypatch.setattr(FetchedRows, "fetch", lambda rows, number: fetched.append(number))
    monkeypatch.setattr(fetch_ahead, "_have_room", lambda _: False)
    first = order(samples).windows(0, 1)[0].tolist()
    for rank, wanted in ((0, first), (1, first[::-1])):
        fetched.clear()
        with FetchAhead(samples, order(samples), rank=rank, processes=2) as fetching:
            next(fetching.noted(range(4)))
        assert fetched == wanted


def test_a_small_cache_has_no_room_for_windows_ahead(stored: PreparedDataset, monkeypatch: pytest.MonkeyPatch) -> None:
    samples = Samples(stored.training_splits(unlabeled=False))
    windows = [samples.files(shards) for shards in order(samples).windows(0, 1 + AHEAD)]
    assert fetch_ahead._have_room(windows)
    largest = max(sum(rows.size(number) for rows, number in files) for files in windows)
    monkeypatch.setenv("TRAINER_CACHE_GIB", f"{(HELD - 0.1) * largest / 2**30:.12f}")
    assert not fetch_ahead._have_room(windows)
    with FetchAhead(samples, order(samples)) as fetching:
        for position in fetching.noted(range(len(samples))):  # the one that is read is fetched nevertheless
            (read,) = order(samples).windows(position, 1)
            wanted = {f"{rows._split}/{number:05d}" for rows, number in samples.files(read)}
            for _ in range(500):
                if wanted <= here():
                    break
                threading.Event().wait(0.02)
            assert wanted <= here()


def test_images_that_are_decoded_already_are_not_fetched_again(stored: PreparedDataset) -> None:
    samples = Samples(stored.training_splits(unlabeled=False))
    assert samples.fetches
    samples.keep_decoded(10**9)
    assert not samples.fetches


def test_what_a_fetch_meets_ends_the_training(
    stored: PreparedDataset, object_store: ObjectStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    samples = Samples(stored.training_splits(unlabeled=False))
    for key in object_store.keys("dataset/train"):
        object_store.delete(key)
    with FetchAhead(samples, order(samples)) as fetching, pytest.raises(ArtifactError, match="is missing"):
        next(fetching.noted(range(4)))

    def refuses(*_: object) -> None:
        raise StorageError("TRAINER_CACHE_GIB=many: must be a number")

    monkeypatch.setattr(cache, "limit_bytes", refuses)
    with FetchAhead(samples, order(samples)) as fetching, pytest.raises(StorageError, match="must be a number"):
        next(fetching.noted(range(4)))


def test_a_data_set_that_is_here_whole_starts_no_thread(whole: PreparedDataset) -> None:
    samples = Samples(whole.training_splits(unlabeled=True))
    with FetchAhead(samples, order(samples)) as fetching:
        assert [*fetching.noted(range(3))] == [0, 1, 2]
        assert not fetching._thread.is_alive()


def micro_batches(data: PreparedDataset, rank: int, first_step: int) -> Iterator[list[object]]:
    samples = Samples(data.training_splits(unlabeled=True))
    views = Views(samples, size=8, seed=5, settings=VIEWS)
    batches = MicroBatches(views, order(samples), count=6, parts=2)
    starts = loader.positions(
        loader.TrainingSettings.model_validate({"batch_size": 6}),
        first_step=first_step,
        last_step=12,
        rank=rank,
        world_size=2,
    )
    with FetchAhead(samples, order(samples), rank=rank, processes=2) as fetching:
        for start in fetching.noted(starts):
            batch = batches[start]
            yield [batch.images.tolist(), batch.labels.tolist(), batch.keys.tolist(), batch.numbers.tolist()]


@pytest.mark.parametrize(("rank", "first_step"), [(0, 0), (1, 0), (1, 7)])
def test_batches_are_those_of_a_data_set_that_is_here_whole(
    whole: PreparedDataset, stored: PreparedDataset, rank: int, first_step: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRAINER_CACHE_GIB", "0")
    fetched, local = (list(micro_batches(data, rank, first_step)) for data in (stored, whole))
    assert fetched == local
    assert len(fetched) == 12 - first_step


def test_a_store_that_asks_for_patience_is_waited_for(
    stored: PreparedDataset, whole: PreparedDataset, object_store: ObjectStore
) -> None:
    object_store.answer(503, times=6, method="GET", path="data-000")
    object_store.cut(after=100, times=3, path="data-000")
    assert list(micro_batches(stored, 0, 0)) == list(micro_batches(whole, 0, 0))
    assert len([one for one in object_store.requests if one.status == 503]) == 6


def test_a_full_disk_is_named(stored: PreparedDataset, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(file: Path, size: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device", str(file))

    samples = Samples(stored.training_splits(unlabeled=False))
    monkeypatch.setattr(os, "truncate", full)
    with (
        FetchAhead(samples, order(samples)) as fetching,
        pytest.raises(OutputError, match=r"the disk is full.*TRAINER_CACHE names"),
    ):
        next(fetching.noted(range(4)))


def test_another_process_fetches_what_it_reads(stored: PreparedDataset, whole: PreparedDataset) -> None:
    """As a loader process does, which begins with a copy."""
    split = stored.split("train")
    reader, writer = os.pipe()
    if not (child := os.fork()):
        os.write(writer, bytes(pickle.loads(pickle.dumps(split)).encoded(13))[:4096])
        os._exit(0)
    os.waitpid(child, 0)
    assert os.read(reader, 4096) == bytes(whole.split("train").encoded(13))
    os.close(reader)
    os.close(writer)
    assert here() == numbers("train", 3)
