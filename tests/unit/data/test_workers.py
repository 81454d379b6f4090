"""The choice of loader processes, and what it is measured by."""

from __future__ import annotations

import pytest
import torch
from threadpoolctl import threadpool_limits

from tests.clocks import Clock
from trainer.data import workers
from trainer.data.workers import choose_workers, measure_loading


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
    monkeypatch.setattr(workers, "time", clock)
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
    monkeypatch.setattr(workers, "_reads", lambda: next(faults))
    assert measure_loading(Slow(clock, 0.02), range(10)) == pytest.approx((0.02, waiting))


def test_measuring_ends_where_batches_are_slow(clock: Clock) -> None:
    batches = Slow(clock, workers._LIMIT_S + 1)
    assert measure_loading(batches, range(0, 160, 16)).seconds == pytest.approx(workers._LIMIT_S + 1)
    assert batches.asked == [0, 16]
