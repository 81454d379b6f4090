from __future__ import annotations

import json
import logging
import time
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from threadpoolctl import threadpool_limits

from tests.clocks import Clock
from trainer.config import EvidenceSettings
from trainer.devices import Device, choose_device
from trainer.devices.process_group import Processes
from trainer.profiling.recorder import LoaderStats, Recorder, Sources
from trainer.training import loader_workers as module
from trainer.training.loader_workers import (
    TIMED_STEPS,
    WARM_STEPS,
    LoadingTime,
    MicroBatchLoader,
    choose_workers,
    measure_loading,
)

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


def test_loaders_that_are_slower_than_measured_become_more_once(recorder, stats, monkeypatch, caplog, takes):
    caplog.set_level(logging.INFO)
    monkeypatch.setattr(module, "CORRECTED_AFTER", 5)
    monkeypatch.setattr(module, "usable_cores", lambda: 4)
    takes(LoadingTime(seconds=0.03, waiting=0.0), step=0.04)
    stats.made.append((1, 0.08))  # beside the training a process takes nearly three times as long
    steps = WARM_STEPS + TIMED_STEPS + 12
    assert run(recorder, "auto", GPU, Batches(), steps=steps) == list(range(0, 10 * steps, 10))
    assert stats.workers == 3
    assert [message.partition(": ")[2] for message in caplog.messages if "loader processes" in message] == [
        "1 (measured)",
        "3 in place of 1, which fell behind the step",
    ]


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


@pytest.mark.parametrize(
    ("batch", "step", "cores", "processes", "chosen"),
    [
        (0.100, 0.100, 64, 1, 2),  # as fast as the step is not fast enough: a margin is kept
        (0.400, 0.100, 64, 1, 5),
        (0.400, 0.100, 64, 8, 5),
        (0.400, 0.100, 16, 8, 1),  # no more than there are cores
        (0.400, 0.100, 8, 8, 0),
        (0.400, 0.100, 2, 1, 1),
        (0.400, 0.100, 1, 1, 0),  # one core is for the training
        (0.002, 0.100, 64, 1, 0),  # not worth a process
        (0.004, 0.100, 64, 1, 1),
        (0.100, 0.000, 64, 8, 7),  # a step that takes no time takes all that can be had
    ],
)
def test_the_fewest_that_keep_up_with_the_step(
    batch: float, step: float, cores: int, processes: int, chosen: int
) -> None:
    assert choose_workers(batch, step, cores=cores, processes=processes) == chosen


class Slow:
    """Micro-batches that take as long as they are said to, and remember what they were asked for."""

    def __init__(self, clock: Clock, *seconds: float) -> None:
        self.clock, self.seconds, self.asked, self.threads = clock, list(seconds), [], set()

    def __getitem__(self, position: int) -> None:
        self.asked.append(position)
        self.threads.add(torch.get_num_threads())
        self.clock.pass_by(self.seconds[min(len(self.asked), len(self.seconds)) - 1])


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """By which loading is measured."""
    clock = Clock()
    monkeypatch.setattr(module, "time", clock)
    return clock


def test_loading_is_measured_with_one_thread_and_without_the_first_batch(
    clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch, "set_num_threads", None)  # it would slow down attention for good
    batches = Slow(clock, 0.2, 0.02, 0.03, 0.1)
    torch.get_num_threads()  # sets the number, the first time
    with threadpool_limits(limits=2, user_api="openmp"):
        time_taken = measure_loading(batches, range(160, 320, 16))
        assert torch.get_num_threads() == 2
    assert time_taken.seconds == pytest.approx(0.03)
    assert time_taken.waiting == 0  # it slept, and read nothing
    assert batches.asked == [160, 176, 192, 208]
    assert batches.threads == {1}


@pytest.mark.parametrize(("reads", "waiting"), [([0, 1, 1, 2, 2, 3], 0.02), ([0, 0, 0, 0, 0, 0], 0.0)])
def test_only_what_reads_waits_for_storage(
    clock: Clock, monkeypatch: pytest.MonkeyPatch, reads: list[int], waiting: float
) -> None:
    """A thread that has not read waited for a core, which loader processes would not mend."""
    faults = iter(reads)
    monkeypatch.setattr(module, "_reads", lambda: next(faults))
    assert measure_loading(Slow(clock, 0.02), range(10)) == pytest.approx((0.02, waiting))


def test_measuring_ends_where_batches_are_slow(clock: Clock) -> None:
    batches = Slow(clock, module._LIMIT_S + 1)
    assert measure_loading(batches, range(0, 160, 16)).seconds == pytest.approx(module._LIMIT_S + 1)
    assert batches.asked == [0, 16]
