"""How many loader processes a training needs, from how fast one of them is and how fast the step is.

What is loaded is a function of the order alone, so the choice changes how long a training takes and nothing else.
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
"""Loading that takes at most this share of a step is not worth a process."""

MARGIN = 1.25
"""Loader processes together are at least this much faster than the step: rates vary, and a machine has other work too."""

_TIMED = 3
"""Batches that are timed; the median counts."""

_LIMIT_S = 3.0
"""No further batch is timed after this long."""


class LoadingTime(NamedTuple):
    """What it takes to make a micro-batch on one core."""

    seconds: float
    """From its beginning to its end."""
    waiting: float
    """Seconds of them in which the core did not compute, where storage had to be waited for: 0 if all was in memory."""


def choose_workers(seconds_per_batch: float, seconds_per_step: float, *, cores: int, processes: int) -> int:
    """Loader processes for each training process: the fewest that keep up with the step, of the cores that there are.

    Args:
        seconds_per_batch: what loader processes can take off the training process for a micro-batch (`measure_loading`): all of it where
            GPUs train; where CPUs do, only the waiting, because a core that computes for the loading is then one that does not train.
        seconds_per_step: the device's time for a micro-batch that is at hand.
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
    """What one core needs for a micro-batch, measured in this process on the batches at `indices`, of which a few are taken.

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
    """Torch computes on one thread meanwhile, in this process, and afterwards on as many as before.

    `torch.set_num_threads` would leave more behind than a number of threads: it also turns off for good that MKL chooses how many of them
    a product is worth, and then attention on a CPU, which multiplies many small matrices, takes more than twice as long.
    """
    torch.get_num_threads()  # the first time it is asked, torch sets the number that is limited here
    with threadpool_limits(limits=1, user_api="openmp"):
        yield


def _timed(batches: Dataset[Any], indices: Iterator[Any]) -> list[LoadingTime]:
    times: list[LoadingTime] = []
    while len(times) < _TIMED and sum(one.seconds for one in times) < _LIMIT_S:
        start, computing, reads = time.perf_counter(), time.thread_time(), _reads()
        batches[next(indices)]
        seconds, computed = time.perf_counter() - start, time.thread_time() - computing
        # A core that other programs keep busy makes a thread wait too, which loader processes would not mend.
        times.append(LoadingTime(seconds, max(0.0, seconds - computed) if _reads() > reads else 0.0))
    return times


def _reads() -> int:
    """How often this thread has waited for a page of a mapped file."""
    return resource.getrusage(resource.RUSAGE_THREAD).ru_majflt
