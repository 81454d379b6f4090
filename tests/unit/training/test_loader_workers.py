import json
import logging
import time
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from trainer.config import EvidenceSettings
from trainer.data.workers import LoadingTime
from trainer.devices import Device, choose_device
from trainer.profiling.recorder import LoaderStats, Recorder, Sources
from trainer.training import loader_workers as module
from trainer.training.loader_workers import TIMED_STEPS, WARM_STEPS, MicroBatchLoader
from trainer.training.process_group import Processes

# Here stands a CPU for a GPU, and there may be fewer cores than processes.
pytestmark = [
    pytest.mark.filterwarnings("ignore:'pin_memory' argument is set as true:UserWarning"),
    pytest.mark.filterwarnings("ignore:This DataLoader will create:UserWarning"),
]

STEPS = WARM_STEPS + TIMED_STEPS + 4
GPU = Device(kind="cuda", torch_device=torch.device("cpu"), backend="gloo", has_bf16=False, compiles=False)
"""What only differs from a CPU in who could load meanwhile."""


class Batches:
    """Micro-batches that take a while to make."""

    count = 1

    def __init__(self, seconds=0.0):
        self.seconds, self.made = seconds, 0

    def __getitem__(self, position):
        self.made += 1
        time.sleep(self.seconds)
        return torch.tensor(position)


@pytest.fixture
def stats():
    return LoaderStats()


@pytest.fixture
def recorder(stats):
    settings = EvidenceSettings(operators_steps=0)
    sources = Sources(loader=stats)
    return Recorder(settings, name="distill", device=torch.device("cpu"), rank=0, world_size=1, sources=sources)


def train(loading, timeline, steps, seconds_a_step=0.0):
    """Steps as the loop makes them; gives what was loaded."""
    stream, loaded = iter(loading), []
    for step in range(steps):
        with timeline.step(step):
            with timeline.span("data"):
                loaded.append(int(next(stream)))
            with timeline.span("forward"):
                time.sleep(seconds_a_step)
    assert next(stream, None) is None
    return loaded


def run(recorder, workers, device, batches, *, steps=STEPS, **timing):
    processes = Processes(rank=0, world_size=1, local_rank=0, device=device)
    starts = iter(range(0, 10 * steps, 10))
    with recorder:
        loading = MicroBatchLoader(
            "distill",
            batches,
            starts,
            accumulation=1,
            workers=workers,
            processes=processes,
            timeline=recorder.timeline,
            stats=recorder._sources.loader,
        )
        return train(loading, recorder.timeline, steps, **timing)


@pytest.mark.parametrize("workers", [0, 1, "auto"])
def test_the_order_does_not_depend_on_who_loads(recorder, workers, monkeypatch, caplog, tmp_path):
    caplog.set_level(logging.INFO)
    monkeypatch.setenv("TRAINER_DEVICE", "cpu")
    assert run(recorder, workers, choose_device(), Batches()) == list(range(0, 10 * STEPS, 10))
    chosen, reason = {0: (0, "as workers says"), 1: (1, "as workers says"), "auto": (0, "measured")}[workers]
    recorder.write(tmp_path)
    assert json.loads((tmp_path / "distill" / "rank0.json").read_text())["workers"] == chosen
    assert caplog.messages[-1] == f"distill  loader processes beside each training process: {chosen} ({reason})"


@pytest.fixture
def takes(monkeypatch):
    """Gives what loading and a step are measured to take, in seconds, so that the choice is the same on any machine."""

    def give(loading, step):
        monkeypatch.setattr(module, "measure_loading", lambda *_: loading)
        monkeypatch.setattr(MicroBatchLoader, "_step_seconds", lambda _: step)

    return give


@pytest.mark.parametrize("reads", [True, False])
def test_where_the_cpu_trains_only_waiting_for_storage_is_worth_a_process(recorder, stats, monkeypatch, takes, reads):
    monkeypatch.setenv("TRAINER_DEVICE", "cpu")
    takes(LoadingTime(seconds=0.03, waiting=0.03 if reads else 0.0), step=0.02)
    assert run(recorder, "auto", choose_device(), Batches()) == list(range(0, 10 * STEPS, 10))
    assert (stats.workers > 0) == reads


@pytest.mark.parametrize(("loading", "chosen"), [(0.03, 2), (0.0, 0)])
def test_beside_a_gpu_the_number_follows_what_was_measured(
    recorder, stats, monkeypatch, caplog, takes, loading, chosen
):
    caplog.set_level(logging.INFO)
    monkeypatch.setattr(module, "usable_cores", lambda: 3)
    takes(LoadingTime(seconds=loading, waiting=0.0), step=0.02)
    assert run(recorder, "auto", GPU, Batches()) == list(range(0, 10 * STEPS, 10))
    assert stats.workers == chosen
    assert caplog.messages[-1].endswith(f"{stats.workers} (measured)")


def test_whatever_is_measured_the_batches_are_the_same(recorder, stats, monkeypatch):
    monkeypatch.setattr(module, "usable_cores", lambda: 3)
    assert run(recorder, "auto", GPU, Batches(0.01), seconds_a_step=0.01) == list(range(0, 10 * STEPS, 10))
    assert stats.workers in (0, 1, 2)


def test_a_step_is_measured_without_its_wait_for_data_and_by_the_micro_batch(monkeypatch):
    seconds = [9.0] * WARM_STEPS + [0.5, 0.5, 0.7, 0.5, 4.0]
    columns = {"seconds": np.array(seconds), "data": np.full(len(seconds), 0.1)}
    timeline = SimpleNamespace(catch_up=lambda: None, steps=SimpleNamespace(column=columns.__getitem__))
    processes = Processes(rank=0, world_size=1, local_rank=0, device=GPU)
    loading = MicroBatchLoader(
        "distill",
        Batches(),
        iter([]),
        accumulation=2,
        workers="auto",
        processes=processes,
        timeline=timeline,
        stats=LoaderStats(),
    )
    assert loading._step_seconds() == pytest.approx(0.2)


@pytest.mark.parametrize("steps", [1, WARM_STEPS, WARM_STEPS + TIMED_STEPS])
def test_a_training_that_ends_before_the_number_is_known_starts_none(recorder, stats, steps):
    batches = Batches()
    assert run(recorder, "auto", GPU, batches, steps=steps) == list(range(0, 10 * steps, 10))
    assert (stats.workers, batches.made) == (0, steps)
