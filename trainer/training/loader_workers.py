"""How many loader processes serve a training, chosen from the times of loading and of a step where the settings leave it open.

Batches are a function of the sampler alone, so the number changes how long a training takes and nothing else.
"""

from __future__ import annotations

import logging
import math
import resource
import statistics
import time
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import closing
from itertools import chain, count, islice
from typing import Any, NamedTuple

import numpy as np
import torch
from threadpoolctl import threadpool_limits
from torch.utils.data import Dataset

from trainer.config import Workers
from trainer.data.batch import Batch
from trainer.data.loader import MicroBatches, make_loader
from trainer.devices.process_group import Processes, wait_limit_s
from trainer.io.child_processes import start_server
from trainer.io.host import usable_cores
from trainer.profiling.recorder import LoaderStats
from trainer.profiling.timeline import Timeline

logger = logging.getLogger(__name__)

WARM_STEPS, TIMED_STEPS = 3, 5
"""Steps that may compile or fill caches, and those after them whose time counts."""
CORRECTED_AFTER = 200
"""Steps after which loader processes are chosen once more, and more of them started if a batch takes them longer than was measured."""
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
    waiting: float
    """Part of them in which the core waited for storage; 0 if everything was in memory."""


def choose_workers(seconds_per_batch: float, seconds_per_step: float, *, cores: int, processes: int) -> int:
    """Choose the fewest loader processes per training process that keep up with the step, as far as there are cores.

    Args:
        seconds_per_batch: time that loader processes can save the training process per micro-batch.
        seconds_per_step: the device's time for a micro-batch that is loaded already.
        cores: cores of this machine that loader processes may keep busy, and one that the training processes share.

    Returns:
        0: each training process loads its own batches.
    """
    if seconds_per_batch <= NEGLIGIBLE * seconds_per_step:
        return 0
    needed = math.ceil(MARGIN * seconds_per_batch / seconds_per_step) if seconds_per_step > 0 else cores
    return min(needed, (cores - 1) // processes)


class MicroBatchLoader:
    """The micro-batches of one training process; which they are does not depend on who loads them.

    `auto` loads in the training process until the step's time is known, and then in as many processes as keep up with it. Where the
    device traces, or no `timeline` records the steps, as many load as there are cores for.
    """

    def __init__(
        self,
        name: str,
        batches: MicroBatches,
        starts: Iterator[int],
        *,
        accumulation: int,
        workers: Workers,
        processes: Processes,
        timeline: Timeline | None,
        stats: LoaderStats,
    ) -> None:
        head = [*islice(starts, 1)]
        self._first, self._starts = next(iter(head), 0), chain(head, starts)
        self._name, self._batches, self._accumulation = name, batches, accumulation
        self._workers, self._processes, self._timeline, self._stats = workers, processes, timeline, stats
        if workers not in (0, "auto") or (workers == "auto" and processes.device.kind != "cpu"):
            start_server()  # which imports while the first step compiles
        # Where the device traces, threads ask for batches, who must not meet other processes, and a step's time is known late.
        self._chosen = self._choose(lambda: 0.0) if workers == "auto" and processes.device.is_lazy else workers

    def __iter__(self) -> Iterator[Batch]:
        starts, workers, device = self._starts, self._chosen, self._processes.device
        if workers == "auto":
            self._stats.workers = 0
            for start in islice(starts, (WARM_STEPS + TIMED_STEPS) * self._accumulation):
                yield self._batches[start]
            following = next(starts, None)
            if following is None:  # all is loaded before it was known who should
                return
            starts = chain([following], starts)
            workers = self._choose(self._step_seconds)
        self._stats.workers = workers
        if self._processes.is_first:
            reason = "measured" if self._workers == "auto" else "as workers says"
            logger.info("%s  loader processes beside each training process: %d (%s)", self._name, workers, reason)
        corrects = self._workers == "auto" and workers > 0 and device.kind == "cuda"
        awaited: deque[int] = deque()  # what loader processes were asked for
        with closing(self._load(_noted(starts, awaited), workers)) as loader:
            for batch in islice(loader, CORRECTED_AFTER * self._accumulation if corrects else None):
                awaited.popleft()
                yield batch
            more = self._corrected(workers) if corrects and awaited else workers
            if more == workers:
                for batch in loader:
                    awaited.popleft()
                    yield batch
                return
        self._stats.workers = more
        yield from self._load(chain(awaited, starts), more)

    def _load(self, starts: Iterable[int], workers: int) -> Generator[Batch]:
        return make_loader(
            self._batches,
            starts,
            workers=workers,
            pin_memory=self._processes.device.pins_memory,
            timeout_s=wait_limit_s() / 2,  # before the other processes, which wait for this one, give up
            observer=self._stats,
        )

    def _corrected(self, workers: int) -> int:
        """Choose again, by what batches take while all load beside the training: a core was alone when it was measured."""
        made, chosen, step_s = self._stats.made, workers, self._step_seconds()
        if made and step_s:
            batch_s = statistics.fmean(seconds for _, seconds in made)
            cores, local = usable_cores(), self._processes.local_world_size
            chosen = max(workers, choose_workers(batch_s, step_s, cores=cores, processes=local))
        more = max(self._processes.gather(chosen, "the correction of loader processes"))
        if more > workers and self._processes.is_first:
            text = "%s  loader processes beside each training process: %d in place of %d, which fell behind the step"
            logger.info(text, self._name, more, workers)
        return more

    def _choose(self, step_seconds: Callable[[], float]) -> int:
        """Choose so many as keep up with the step, by the measurements of the process that needs most."""
        positions = count(
            self._first, self._batches.count
        )  # those of the window that is read first, if not all images are here
        chosen = measured_workers(self._name, self._batches, positions, step_seconds, self._processes)
        return max(self._processes.gather(chosen, "the choice of loader processes"))

    def _step_seconds(self) -> float:
        """Return the median time of a step, for each micro-batch, without the wait for its data."""
        if self._timeline is None:
            return 0.0
        self._timeline.catch_up()
        steps = self._timeline.steps
        return float(np.median((steps.column("seconds") - steps.column("data"))[WARM_STEPS:])) / self._accumulation


def _noted(starts: Iterable[int], awaited: deque[int]) -> Iterator[int]:
    for start in starts:
        awaited.append(start)
        yield start


def measured_workers(
    name: str, batches: Dataset[Any], indices: Iterable[Any], step: Callable[[], float], processes: Processes
) -> int:
    """Return how many loader processes keep up with this process, by its own measurements.

    Args:
        indices: of batches that may be loaded to be timed.
        step: gives the device's time for a micro-batch that is at hand, in seconds; only asked where it matters.
    """
    loading = measure_loading(batches, indices)
    # Where a CPU trains, loader processes can save only the waiting, for a core that loads does not train.
    is_cpu = processes.device.kind == "cpu"
    saved = loading.waiting if is_cpu else loading.seconds
    if not saved:
        return 0
    seconds = step()
    if processes.is_first:
        figures = (1e3 * loading.seconds, 1e3 * loading.waiting, 1e3 * seconds)
        text = "%s  a micro-batch: %.1f ms to load, %.1f ms of them waiting for storage, %.1f ms to compute with"
        logger.info(text, name, *figures)
    local, cores = processes.local_world_size, usable_cores()
    if is_cpu:
        cores += local  # who waits needs no core
    return choose_workers(saved, seconds, cores=cores, processes=local)


def measure_loading(batches: Dataset[Any], indices: Iterable[Any]) -> LoadingTime:
    """Measure, on a few of the batches at `indices`, one core's time for a micro-batch; raises `DataError` where an image is damaged."""
    wanted = iter(indices)
    times: list[LoadingTime] = []
    # Not `torch.set_num_threads`, which also stops MKL for good from choosing the number of threads for each product: attention on a
    # CPU, which multiplies many small matrices, then takes more than twice as long.
    torch.get_num_threads()  # the first call sets the number that is limited here
    with threadpool_limits(limits=1, user_api="openmp"):
        batches[next(wanted)]  # not timed: the first one meets cold caches
        while len(times) < _TIMED and sum(one.seconds for one in times) < _LIMIT_S:
            start, computing, reads = time.perf_counter(), time.thread_time(), _reads()
            batches[next(wanted)]
            seconds, computed = time.perf_counter() - start, time.thread_time() - computing
            # A thread also waits for a core that other programs use, which loader processes would not help.
            times.append(LoadingTime(seconds, max(0.0, seconds - computed) if _reads() > reads else 0.0))
    return LoadingTime(*(statistics.median(column) for column in zip(*times, strict=True)))


def _reads() -> int:
    """Count how often this thread has waited for a page of a mapped file."""
    return resource.getrusage(resource.RUSAGE_THREAD).ru_majflt
