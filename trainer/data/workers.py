"""The number of loader processes that a training needs, from the times of loading and of a step.

Batches are a function of the sampler alone, so the number changes how long a training takes and nothing else.
"""

from __future__ import annotations

import math
import resource
import statistics
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from threadpoolctl import threadpool_limits
from torch.utils.data import Dataset

NEGLIGIBLE = 0.03
"""Loading that takes at most this share of a step does not repay a process."""

MARGIN = 1.25
"""Loader processes together are at least this many times as fast as the step: rates vary, and a machine has other work too."""

_TIMED = 3
"""Batches that are timed; the median counts."""

_LIMIT_S = 3.0
"""No further batch is timed after this long."""


class LoadingTime(NamedTuple):
    """Time to make a micro-batch on one core."""

    seconds: float
    """From beginning to end."""
    waiting: float
    """Part of them in which the core waited for storage; 0 if everything was in memory."""


def choose_workers(seconds_per_batch: float, seconds_per_step: float, *, cores: int, processes: int) -> int:
    """Choose the fewest loader processes per training process that keep up with the step, as far as there are cores.

    Args:
        seconds_per_batch: time that loader processes can save the training process per micro-batch (`measure_loading`): all of it where
            GPUs train; where CPUs train, only the waiting, since a core that computes for the loader does not train.
        seconds_per_step: the device's time for a micro-batch that is loaded already.
        cores: cores of this machine that loader processes may keep busy, and one that the training processes share.
        processes: training processes on this machine.

    Returns:
        0: each training process loads its own batches.
    """
    if seconds_per_batch <= NEGLIGIBLE * seconds_per_step:
        return 0
    needed = math.ceil(MARGIN * seconds_per_batch / seconds_per_step) if seconds_per_step > 0 else cores
    return min(needed, (cores - 1) // processes)


def measure_loading(batches: Dataset[Any], indices: Iterable[Any]) -> LoadingTime:
    """Measure the time of one core for a micro-batch, in this process, on a few of the batches at `indices`.

    Raises:
        DataError: an image cannot be decoded.
    """
    wanted = iter(indices)
    with one_thread():
        batches[next(wanted)]  # not timed: the first one meets cold caches
        times = _timed(batches, wanted)
    return LoadingTime(*(statistics.median(column) for column in zip(*times, strict=True)))


@contextmanager
def one_thread() -> Iterator[None]:
    """Let torch compute on one thread in the block, in this process, and restore the number of threads after it."""
    # Not `torch.set_num_threads`, which also stops MKL for good from choosing the number of threads for each product: attention on a
    # CPU, which multiplies many small matrices, then takes more than twice as long.
    torch.get_num_threads()  # the first call sets the number that is limited here
    with threadpool_limits(limits=1, user_api="openmp"):
        yield


def _timed(batches: Dataset[Any], indices: Iterator[Any]) -> list[LoadingTime]:
    times: list[LoadingTime] = []
    while len(times) < _TIMED and sum(one.seconds for one in times) < _LIMIT_S:
        start, computing, reads = time.perf_counter(), time.thread_time(), _reads()
        batches[next(indices)]
        seconds, computed = time.perf_counter() - start, time.thread_time() - computing
        # A thread also waits for a core that other programs use, which loader processes would not help.
        times.append(LoadingTime(seconds, max(0.0, seconds - computed) if _reads() > reads else 0.0))
    return times


def _reads() -> int:
    """Count how often this thread has waited for a page of a mapped file."""
    return resource.getrusage(resource.RUSAGE_THREAD).ru_majflt
