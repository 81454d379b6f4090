import os
import pickle
import signal
import time
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace

import datasets
import numpy as np
import psutil
import pytest
import simplejpeg
import torch
from torch.utils.data import get_worker_info

from trainer.config import TrainingSettings, ViewSettings
from trainer.data import dataset as reading
from trainer.data import loader as module
from trainer.data.batch import Recorded, decode_jpegs
from trainer.data.dataset import open_dataset
from trainer.data.dataset_schema import DatasetDescription, features
from trainer.data.loader import (
    PREFETCHED,
    MicroBatches,
    Samples,
    Views,
    _shrink,
    _with_partners,
    make_loader,
    makes_views_on_device,
    micro_batch_size,
    positions,
    shard_positions,
)
from trainer.data.sampler import SampleSlice, StatelessSampler
from trainer.data.views.rendering import make_views, mixes
from trainer.devices import HOST
from trainer.io import artifacts
from trainer.io.child_processes import SERVED
from trainer.io.errors import DataError, LostProcessError, SettingsError, TrainingError
from trainer.training.prefetch import render


class Images:
    """A split that is made up: image i is filled with the number i, or patterned."""

    in_memory = True
    image_size = 8

    def __init__(self, count, first=0, patterned=False, labeled=True):
        self.numbers = np.arange(first, first + count)
        self.labels = self.numbers % 7 if labeled else np.full(count, -1)
        self.keys = self.numbers.astype(np.uint64) * np.uint64(1_000_003)
        self.sources = [f"image-{number}" for number in self.numbers]
        pixels = np.arange(3 * 8 * 8).reshape(1, 3, 8, 8) * 7 * patterned + self.numbers.reshape(-1, 1, 1, 1)
        self.pixels = torch.from_numpy(pixels % 256).to(torch.uint8)

    def __len__(self):
        return len(self.numbers)

    def load(self, limit=0):
        """Everything is in memory."""

    def read(self, indices):
        return self.pixels[list(indices)]

    def picture(self, index, shrink=1):
        assert shrink == 1
        return self.pixels[index]


PLAIN = ViewSettings(min_scale=1, flip=False)
MIXED = ViewSettings(min_scale=0.5, color_jitter=0.3, mixup=0.5, cutmix=0.5)


def batches(samples, settings, world_size=1, seed=0, on_device=False, **further):
    return MicroBatches(
        Views(samples, size=8, seed=seed, settings=settings.views, on_device=on_device),
        StatelessSampler(len(samples), seed, paired=mixes(settings.views), labeled=samples.labeled),
        count=settings.batch_size,
        parts=world_size * settings.accumulation,
        **further,
    )


def step_of(settings, samples, step, world_size):
    """What all processes see in one step, in the global order."""
    source = batches(samples, settings, world_size)
    parts = {
        start: source[start]
        for rank in range(world_size)
        for start in positions(settings, first_step=step, last_step=step + 1, rank=rank, world_size=world_size)
    }
    return [parts[start] for start in sorted(parts)]


@pytest.mark.parametrize(("world_size", "accumulation"), [(2, 1), (1, 4), (4, 2), (3, 1), (5, 1), (5, 3), (1, 7)])
def test_dealing_does_not_change_a_step(world_size, accumulation):
    samples = Samples([Images(51, patterned=True)])
    alone = TrainingSettings(batch_size=48, views=MIXED)
    shared = TrainingSettings(batch_size=48, accumulation=accumulation, views=MIXED)
    for step in (0, 1, 5):
        (whole,) = step_of(alone, samples, step, 1)
        parts = step_of(shared, samples, step, world_size)
        own = [part.images[: len(part.labels)] for part in parts]
        assert torch.equal(torch.cat(own), whole.images[:48])
        partners = [part.images[part.mixing.partner] for part in parts]
        assert torch.equal(torch.cat(partners), whole.images[whole.mixing.partner])
        for name in ("labels", "keys", "numbers"):
            assert torch.equal(torch.cat([getattr(part, name) for part in parts]), getattr(whole, name))
        for name in ("labels", "share", "blend", "box"):
            assert torch.equal(torch.cat([getattr(part.mixing, name) for part in parts]), getattr(whole.mixing, name))


@pytest.mark.parametrize(("world_size", "accumulation"), [(1, 1), (4, 1), (1, 4), (3, 2)])
@pytest.mark.parametrize("views", [PLAIN, MIXED], ids=["plain", "mixed"])
def test_label_weights_give_the_mean_over_labels(world_size, accumulation, views):
    samples = Samples([Images(30), Images(21, first=30, labeled=False)])
    settings = TrainingSettings(batch_size=17, accumulation=accumulation, views=views)
    for step in range(6):
        parts = step_of(settings, samples, step, world_size)
        labels, weights = (torch.cat([getattr(part, name) for part in parts]) for name in ("labels", "label_weights"))
        assert weights.dtype == torch.float32
        assert ((weights > 0) == (labels >= 0)).all()
        assert weights.mean().item() == pytest.approx(1)
        assert len(weights.unique()) == 2
        if views is MIXED:
            partners = torch.cat([part.mixing.labels for part in parts])
            assert ((partners >= 0) == (labels >= 0)).all()


def test_step_without_labeled_image_has_weights_of_0():
    samples = Samples([Images(1), Images(50, first=1, labeled=False)])
    steps = [step_of(TrainingSettings(batch_size=17, views=PLAIN), samples, step, 1)[0] for step in range(3)]
    assert sorted({tuple(batch.label_weights.unique().tolist()) for batch in steps}) == [(0.0,), (0.0, 17.0)]


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("on_device", [False, True])
def test_loader_processes_do_not_change_what_is_loaded(workers, on_device):
    settings = TrainingSettings(batch_size=16, views=MIXED)
    source = batches(Samples([Images(50, patterned=True)]), settings, on_device=on_device)
    starts = list(positions(settings, first_step=2, last_step=8, rank=0, world_size=1))
    loaded = list(make_loader(source, iter(starts), workers=workers, pin_memory=False))
    assert [batch.keys.tolist() for batch in loaded] == [source[start].keys.tolist() for start in starts]
    for batch, start in zip(loaded, starts, strict=True):
        assert torch.equal(batch.images, source[start].images)
        assert torch.equal(batch.mixing.share, source[start].mixing.share)


class Stopping(torch.utils.data.Dataset):
    """Its process stops when it has made its first batch and is asked for another one."""

    def __getitem__(self, position):
        if position:
            time.sleep(0.5)  # until a thread has reported the first one
            os.kill(os.getpid(), signal.SIGSTOP)
        return torch.zeros(1000)


class Pids:
    """Hears which processes load, and gives a batch out when all have stopped."""

    def loader_processes(self, pids):
        self.stopping = pids

    def batches_ready(self, count):
        while any(psutil.Process(pid).status() != psutil.STATUS_STOPPED for pid in self.stopping):
            time.sleep(0.01)


def load_from_a_stopping_process(observer):
    """The first batch is announced, but its memory is in a process that answers no more."""
    began = time.monotonic()
    with pytest.raises(LostProcessError, match=r"none of 1 loader processes had a batch within 1 s"):
        list(make_loader(Stopping(), iter(range(9)), workers=1, pin_memory=False, timeout_s=1, observer=observer))
    assert time.monotonic() - began < 60


def test_a_stopped_process_is_not_waited_for():
    load_from_a_stopping_process(Pids())


def test_images_that_lie_on_the_device_give_the_same_views(monkeypatch):
    settings = TrainingSettings(batch_size=16, views=MIXED)
    samples = Samples([Images(51, patterned=True), Images(7)])
    monkeypatch.setattr("trainer.data.loader._UPLOADED", 20)
    given, resident = (batches(samples, settings, on_device=True) for _ in range(2))
    views = resident._views
    assert not views.reside(HOST, "off")
    assert not views.reside(HOST, "auto"), "a processor has them anyway"
    room = samples.decoded_bytes / 0.4
    devices = [SimpleNamespace(torch_device=torch.device("cpu"), free_memory=free) for free in (room - 9, room + 9)]
    assert [views.reside(device, "auto") for device in devices] == [False, True]
    for start in (0, 40):
        batch = resident[start]
        assert batch.images.dtype == torch.int64
        assert torch.equal(render(batch, views).images, render(given[start], given._views).images)
    sent = pickle.loads(pickle.dumps(resident))
    assert sent._views.resident is None
    assert torch.equal(sent[40].images, resident[40].images), "a loader process gives indices too"
    with pytest.raises(SettingsError, match=r"data\.resident is on, but views are not made on the training device"):
        batches(samples, settings)._views.reside(HOST, "on")


def test_device_makes_same_views_of_what_it_is_given():
    settings = TrainingSettings(batch_size=16, views=MIXED)
    samples = Samples([Images(51, patterned=True)])
    made, given = batches(samples, settings), batches(samples, settings, on_device=True)
    for start in (0, 40):
        batch = given[start]
        assert batch.views is not None
        assert made[start].views is None
        assert torch.equal(make_views(batch.images, batch.views, 8, MIXED), made[start].images)


@pytest.mark.parametrize(
    ("views_on", "kind", "on_device"),
    [("auto", "cuda", True), ("auto", "cpu", False), ("cpu", "cuda", False), ("device", "cpu", True)],
)
def test_where_views_are_made(views_on, kind, on_device):
    assert makes_views_on_device(views_on, kind) == on_device


def test_several_splits_are_read_as_one():
    samples = Samples([Images(10), Images(0), Images(5, first=100)])
    assert len(samples) == 15
    indices = np.array([14, 0, 9, 10, 3])
    assert samples.read(indices)[:, 0, 0, 0].tolist() == [104, 0, 9, 100, 3]
    assert [int(samples.picture(index)[0, 0, 0]) for index in indices.tolist()] == [104, 0, 9, 100, 3]
    assert samples.labels[indices].tolist() == [104 % 7, 0, 2, 100 % 7, 3]
    assert [name.split()[1] for name in samples.names(indices)] == [
        "image-104",
        "image-0",
        "image-9",
        "image-100",
        "image-3",
    ]


def test_partners_stay_with_their_samples():
    settings = TrainingSettings(batch_size=32, views=PLAIN.model_copy(update={"mixup": 1.0}))
    source = batches(Samples([Images(51)]), settings)
    for start in (0, 32, 64):  # the second reaches over the end of an epoch
        batch, taken = source[start], StatelessSampler(51, 0, paired=True).take(start, start + 32)
        shown = batch.images[:, 0, 0, 0].long()
        assert shown[:32].tolist() == taken.indices.tolist()
        assert shown[batch.mixing.partner].tolist() == taken.partners.tolist()
        assert torch.equal(batch.mixing.labels, torch.from_numpy(taken.partners % 7))
    # Partners within a batch are not loaded twice.
    indices, numbers, rows = _with_partners(numbered(4, 7, 5), numbered(0, 0, 0), numbered(7, 4, 5))
    assert indices.tolist() == [4, 7, 5]
    assert numbers.tolist() == [0, 0, 0]
    assert rows.tolist() == [1, 0, 2]


def numbered(*values):
    return np.array(values, dtype=np.int64)


def test_recorded_outputs_are_read_for_what_is_shown():
    class Outputs:
        def read(self, indices, numbers):
            return Recorded(torch.from_numpy(indices), torch.from_numpy(numbers), torch.zeros(()), None)

    source = batches(Samples([Images(50)]), TrainingSettings(batch_size=64, views=PLAIN), teacher_outputs=Outputs())
    batch = source[128]
    assert torch.equal(batch.recorded.indices * 1_000_003, batch.keys)
    assert torch.equal(batch.recorded.logits, batch.numbers)


class Groups(torch.utils.data.Dataset):
    """The process that loads, its group, the server that it comes from, and the server's group."""

    def __getitem__(self, position):
        return os.getpid(), os.getpgrp(), os.getppid(), os.getpgid(os.getppid())


def test_loader_processes_have_their_own_group():
    (found,) = make_loader(Groups(), [0], workers=1, pin_memory=False)
    process, group, server, its_group = map(int, found)
    assert (group, its_group) == (process, server)


class Origin(torch.utils.data.Dataset):
    """The process from which the one that loads is forked."""

    def __getitem__(self, position):
        return os.getppid()


def test_loader_processes_are_no_copies_of_process_with_threads():
    """A lock that one of these held would be held in a copy for ever. Arrow's allocator knows how to fork."""
    loader = make_loader(Origin(), [0, 0], workers=1, pin_memory=False)
    origin = int(next(loader))
    threads = [file.read_text().strip() for file in Path(f"/proc/{origin}/task").glob("*/comm")]
    assert origin != os.getpid()
    assert [name for name in threads if name != "jemalloc_bg_thd"] == ["python"]
    loader.close()


class Pixels(torch.utils.data.Dataset):
    """Where in memory a process has the decoded images of a split, and one of them; it changes that."""

    def __init__(self, split):
        self.split = split

    def __getitem__(self, position):
        decoded = self.split._decoded
        decoded[position] += 1
        return decoded[position]


def test_loader_processes_share_the_decoded_images(stored):
    split = stored.split("train")
    split.load()
    before = split.read([1])[0].permute(1, 2, 0).clone()
    (seen,) = make_loader(Pixels(split), [1], workers=1, pin_memory=False)
    assert torch.equal(seen, before + 1)
    assert torch.equal(split.read([1])[0].permute(1, 2, 0), before + 1)


class Facts(torch.utils.data.Dataset):
    """Threads, memory and number of the process that loads."""

    def __getitem__(self, position):
        views = Views(Samples([Images(50)]), size=8, seed=0, settings=PLAIN)
        images = views.batch(SampleSlice(numbered(position), numbered(0), None)).images
        info = get_worker_info()
        return torch.get_num_threads(), images.data_ptr() in range(*info.dataset.memory.addresses), info.id


def test_each_loader_process_computes_with_one_thread_and_fills_shared_memory():
    facts = list(make_loader(Facts(), iter(range(4)), workers=2, pin_memory=False))
    assert list(map(tuple, facts)) == [(1, True, 0), (1, True, 1)] * 2


@pytest.mark.parametrize("workers", [0, 1])
def test_a_loader_leaves_the_generator_alone(workers):
    source = batches(Samples([Images(50)]), TrainingSettings(batch_size=2, views=PLAIN))
    before = torch.get_rng_state()
    next(make_loader(source, [0, 2], workers=workers, pin_memory=False))
    assert torch.equal(torch.get_rng_state(), before)


class Broken(Images):
    """A split whose image 0 is refused, and whose image 1 ends the process that reads it."""

    def picture(self, index, shrink=1):
        if index == 0:
            raise DataError("image 0: broken; prepare the data set again")
        if get_worker_info() is not None and index == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        return super().picture(index)


@pytest.mark.parametrize("workers", [0, 1])
def test_error_of_loader_process_is_its_message_alone(workers):
    source = batches(Samples([Broken(1)]), TrainingSettings(batch_size=2, views=PLAIN))
    with pytest.raises(DataError) as caught:
        next(make_loader(source, [0, 2], workers=workers, pin_memory=False))
    assert str(caught.value) == "image 0: broken; prepare the data set again"


def test_error_is_met_when_its_batch_is_due():
    settings = TrainingSettings(batch_size=2, views=PLAIN)
    bad = int(np.flatnonzero(StatelessSampler(50, 0).take(0, 50).indices == 0)[0]) // 2
    source = batches(Samples([Broken(50)]), settings)
    starts = [start for start in range(0, 50, 2) if 1 not in StatelessSampler(50, 0).take(start, start + 2).indices]
    loaded = make_loader(source, starts, workers=1, pin_memory=False)
    for _ in range(starts.index(2 * bad)):
        next(loaded)
    with pytest.raises(DataError, match="image 0"):
        next(loaded)


def test_the_death_of_a_loader_process_is_said():
    source = batches(Samples([Broken(2)]), TrainingSettings(batch_size=2, views=PLAIN))
    place = int(StatelessSampler(2, 0).take(0, 2).indices.tolist().index(1))
    source.count = 1
    with pytest.raises(
        TrainingError, match=r"one of 1 loader processes died \(killed by SIGKILL\).*lower data\.workers"
    ):
        next(make_loader(source, [place], workers=1, pin_memory=False))


def test_views_are_in_order_of_memory_that_convolutions_like():
    batch = batches(Samples([Images(50)]), TrainingSettings(batch_size=4, views=PLAIN))[0]
    assert batch.images.is_contiguous(memory_format=torch.channels_last)


def test_sets_that_cannot_be_dealt():
    with pytest.raises(DataError, match="no images to train on"):
        Samples([Images(0)])
    with pytest.raises(
        SettingsError, match=r"batch_size = 5 .* 3 processes x 2 .* choose 6 or more, or less accumulation"
    ):
        micro_batch_size(TrainingSettings(batch_size=5, accumulation=2), 3)


def test_batches_are_dealt():
    settings = TrainingSettings(batch_size=100, accumulation=2)
    runs = [run for rank in range(3) for run in shard_positions(settings, step=7, rank=rank, world_size=3)]
    assert sorted(position for run in runs for position in run) == list(range(700, 800))
    assert {len(run) for run in runs} == {16, 17}
    assert micro_batch_size(settings, 3) == 17
    # Processes share the positions of a step among them.
    settings = TrainingSettings(batch_size=12, accumulation=2)
    starts = sorted(
        start for rank in range(3) for start in positions(settings, first_step=4, last_step=6, rank=rank, world_size=3)
    )
    assert starts[0] == 48
    assert {after - before for before, after in pairwise(starts)} == {2}
    assert len(starts) == 12


# ---------------------------------------------------------------------------------------------------------------------
# Stored as files

SIZE = 96
COUNTS = {"train": 12, "val": 0, "test": 0, "unlabeled": 3}


def photo(number):
    """A JPEG file of a smooth picture."""
    corners = torch.from_numpy(np.random.default_rng(number).integers(0, 256, (1, 3, 5, 5)).astype(np.float32))
    pixels = torch.nn.functional.interpolate(corners, size=SIZE, mode="bilinear", align_corners=True)
    return simplejpeg.encode_jpeg(pixels[0].permute(1, 2, 0).byte().contiguous().numpy(), quality=95)


@pytest.fixture(scope="module")
def stored(tmp_path_factory):
    """A prepared data set of photos."""
    path = tmp_path_factory.mktemp("stored") / "dataset"
    with artifacts.create(path, "dataset", settings={}) as draft:
        for place, (split, count) in enumerate(COUNTS.items()):
            numbers = range(100 * place, 100 * place + count)
            rows = {
                "image": [{"bytes": photo(number), "path": None} for number in numbers],
                "label": [0] * count,
                "key": [f"{number:064x}"[::-1] for number in numbers],
                "source": [str(number) for number in numbers],
            }
            datasets.Dataset.from_dict(rows, features=features()).save_to_disk(str(draft.path / split), num_shards=1)
        DatasetDescription(classes=("a",), image_size=SIZE, images=COUNTS).write(draft.path)
    return open_dataset(path)


@pytest.fixture(params=[("train",), ("train", "unlabeled")], ids=["one split", "two splits"])
def pairs(request, stored, monkeypatch):
    """The same samples kept decoded, and read from their files."""
    kept = Samples([stored.split(name) for name in request.param])
    assert kept.decoded
    monkeypatch.setattr(reading, "IN_MEMORY_BYTES", 0)
    files = Samples([stored.split(name) for name in request.param])
    assert not files.decoded
    return kept, files


def views_of(samples, size, **further):
    numbers = np.arange(len(samples))
    views = Views(samples, size=size, seed=3, settings=ViewSettings(min_scale=0.3), **further)
    return views.batch(SampleSlice(numbers, numbers % 5, None))


def test_shrunk_files(pairs):
    kept, files = (views_of(samples, 20).images.int() for samples in pairs)
    difference = (kept - files).abs().float()
    assert 0 < difference.mean() < 4  # half a pixel off at most, where unrelated views differ by 80
    assert _shrink([0, 0, 96, 96], 24) == 4
    assert _shrink([0, 0, 96, 95], 24) == 2
    assert _shrink([0, 0, 96, 47], 24) == 1
    # Exact views of files are not shrunk while decoded.
    kept, files = (views_of(samples, 20, exact=True).images for samples in pairs)
    assert torch.equal(kept, files)


def test_files_that_gpu_decodes_travel_as_they_are(pairs, monkeypatch):
    kept, files = pairs
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    batch = views_of(files, 64, on_device=True, decode_on="cuda")
    assert batch.lengths.sum() == len(batch.images)
    images = decode_jpegs(batch.images, batch.lengths, torch.device("cpu"))
    torch.testing.assert_close(images, kept.read(np.arange(len(kept))), rtol=0, atol=1)
    monkeypatch.setattr(reading, "IN_MEMORY_BYTES", 10**9)
    assert views_of(kept, 64, on_device=True, decode_on="cuda").lengths is None


def test_a_missing_gpu_is_named_before_loading(pairs, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(SettingsError, match=r"data\.decode_on is cuda, but torch finds no GPU"):
        views_of(pairs[1], 64, on_device=True, decode_on="cuda")


class Allowed(torch.utils.data.Dataset):
    """Items that are made when that is allowed."""

    def __init__(self, items):
        self.allowed = SERVED.Semaphore(items)

    def __getitem__(self, position):
        self.allowed.acquire()
        return torch.tensor(position)


class Heard:
    """What a loader reports."""

    def __init__(self, then=lambda: None):
        self.pids, self.ready, self.then, self.made = [], [], then, []

    def loader_processes(self, pids):
        self.pids = list(pids)

    def batches_ready(self, count):
        self.ready.append(count)
        self.then()

    def batch_made(self, images, seconds):
        self.made.append((images, seconds))


@pytest.mark.parametrize("workers", [0, 1])
def test_what_a_batch_takes_is_heard(workers):
    heard = Heard()
    made = batches(Samples([Images(20)]), TrainingSettings(batch_size=8))
    began = time.perf_counter()
    list(make_loader(made, [0, 8], workers=workers, pin_memory=False, observer=heard))
    assert [images for images, _ in heard.made] == [8, 8]
    assert 0 < sum(seconds for _, seconds in heard.made) < time.perf_counter() - began


def test_batches_are_found_ready(monkeypatch):
    items = Allowed(0)
    heard = Heard(then=items.allowed.release)
    for _ in make_loader(items, range(6), workers=1, pin_memory=False, observer=heard):
        assert [psutil.Process(pid).name() for pid in heard.pids] == ["pt_data_worker"]
    assert heard.ready == [0] * 7

    # Late: when no further one is made ahead.
    ready, heard, end = module.batches_ready, Heard(), time.monotonic() + 60

    def late(outcomes):
        while ready(outcomes) < min(PREFETCHED, 6 - len(heard.ready)) and time.monotonic() < end:
            time.sleep(0.001)
        return ready(outcomes)

    monkeypatch.setattr(module, "batches_ready", late)
    for _ in make_loader(Allowed(6), range(6), workers=1, pin_memory=False, observer=heard):
        pass
    assert heard.ready == [PREFETCHED] * 5 + [1, 0]
    # Without loader processes there is nothing to hear.
    heard = Heard()
    assert len(list(make_loader(Allowed(3), range(3), workers=0, pin_memory=False, observer=heard))) == 3
    assert (heard.pids, heard.ready) == ([], [])
