"""The choice of loader processes, and what it is measured by."""

from __future__ import annotations

import time

import pytest
import torch
from threadpoolctl import threadpool_limits

from trainer.data.workers import choose_workers, measure_loading


@pytest.mark.parametrize(
    ("batch", "step", "cores", "processes", "workers"),
    [
        (0.100, 0.100, 64, 1, 2),  # as fast as the step is not fast enough: a margin is kept
        (0.400, 0.100, 64, 1, 5),
        (0.400, 0.100, 64, 8, 5),
        (0.400, 0.100, 16, 8, 1),  # as many as there are cores for
        (0.400, 0.100, 8, 8, 0),
        (0.400, 0.100, 2, 1, 1),
        (0.400, 0.100, 1, 1, 0),  # one core is for the training
        (0.002, 0.100, 64, 1, 0),  # not worth a process
        (0.004, 0.100, 64, 1, 1),
        (0.100, 0.000, 64, 8, 7),  # a step that takes no time takes all that can be had
    ],
)
def test_the_fewest_that_keep_up_with_the_step(
    batch: float, step: float, cores: int, processes: int, workers: int
) -> None:
    assert choose_workers(batch, step, cores=cores, processes=processes) == workers


class Slow:
    """Micro-batches that take as long as they are told to, and remember what they were asked for."""

    def __init__(self, *seconds: float) -> None:
        self.seconds, self.asked, self.threads = list(seconds), [], set()

    def __getitem__(self, position: int) -> None:
        self.asked.append(position)
        self.threads.add(torch.get_num_threads())
        time.sleep(self.seconds[min(len(self.asked), len(self.seconds)) - 1])


def test_loading_is_measured_with_one_thread_and_without_the_first_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "set_num_threads", None)  # it would slow down attention for good
    batches = Slow(0.2, 0.02, 0.02, 0.1)
    torch.get_num_threads()  # sets the number, the first time
    with threadpool_limits(limits=2, user_api="openmp"):
        time_taken = measure_loading(batches, range(160, 320, 16))
        assert torch.get_num_threads() == 2
    assert 0.015 < time_taken.seconds < 0.09
    assert time_taken.waiting == 0  # it slept, and read nothing
    assert batches.asked == [160, 176, 192, 208]
    assert batches.threads == {1}


def test_measuring_ends_where_batches_are_slow(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("trainer.data.workers._LIMIT_S", 0.05)
    batches = Slow(0.06)
    assert measure_loading(batches, range(0, 160, 16)).seconds >= 0.06
    assert batches.asked == [0, 16]
