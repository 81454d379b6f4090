"""How many loader processes serve a training; it is measured in the first steps where the settings leave it open."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator
from itertools import chain, count, islice
from typing import Any

import numpy as np
from torch.utils.data import Dataset

from trainer.config import Workers
from trainer.data.batch import Batch
from trainer.data.loader import MicroBatches, make_loader
from trainer.data.workers import LoadingTime, choose_workers, measure_loading
from trainer.host import usable_cores
from trainer.profiling.recorder import LoaderStats
from trainer.profiling.timeline import Timeline
from trainer.training.collective_watchdog import wait_limit_s
from trainer.training.process_group import Processes

logger = logging.getLogger(__name__)

WARM_STEPS, TIMED_STEPS = 3, 5
"""Steps that may compile or fill caches, and those after them whose time counts."""


class MicroBatchLoader:
    """The micro-batches of one training process; which they are does not depend on who loads them.

    `auto` loads in the training process until the step's time is known, and then in as many processes as keep up with it. Where the CPU
    trains, a core that loads is one that does not train: processes there pay only for the time that loading waits for storage. Where the
    device traces, as many load as there are cores for.
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
        timeline: Timeline,
        stats: LoaderStats,
    ) -> None:
        """Of the training `name`.

        Args:
            name: for the log.
            batches: what is loaded.
            starts: where the micro-batches begin in the order.
            accumulation: of them a step.
            workers: loader processes.
            processes: this process among the others.
            timeline: has timed the first steps.
            stats: takes how the loader processes are doing.
        """
        self._name, self._batches, self._starts, self._accumulation = name, batches, starts, accumulation
        self._workers, self._processes, self._timeline, self._stats = workers, processes, timeline, stats
        # Where the device traces, threads ask for batches, who must not meet other processes, and a step's time is known late.
        self._chosen = self._choose(lambda: 0.0) if workers == "auto" and processes.device.traces else workers

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
        yield from make_loader(
            self._batches,
            starts,
            workers=workers,
            pin_memory=device.pins_memory,
            timeout_s=wait_limit_s() / 2,  # before the other processes, which wait for this one, give up
            observer=self._stats,
        )

    def _choose(self, step_seconds: Callable[[], float]) -> int:
        """Choose so many as keep up with the step, by the measurements of the process that needs most."""
        positions = count(0, self._batches.count)
        chosen = measured_workers(self._name, self._batches, positions, step_seconds, self._processes)
        return max(self._processes.gather(chosen, "the choice of loader processes"))

    def _step_seconds(self) -> float:
        """Return the median time of a step, for each micro-batch, without the wait for its data."""
        self._timeline.catch_up()
        steps = self._timeline.steps
        return float(np.median((steps.column("seconds") - steps.column("data"))[WARM_STEPS:])) / self._accumulation


def measured_workers(
    name: str, batches: Dataset[Any], indices: Iterable[Any], step: Callable[[], float], processes: Processes
) -> int:
    """Return how many loader processes keep up with this process, by its own measurements.

    Args:
        name: of the work, for the log.
        batches: what is loaded.
        indices: of batches that may be loaded to be timed.
        step: gives the device's time for a micro-batch that is at hand, in seconds; only asked where it matters.
        processes: this process among the others.
    """
    loading = measure_loading(batches, indices)
    if not _relievable(loading, processes):
        return 0
    seconds = step()
    if processes.is_first:
        logger.info(
            "%s  a micro-batch: %.1f ms to load, %.1f ms of them waiting for storage, %.1f ms to compute with",
            name,
            1e3 * loading.seconds,
            1e3 * loading.waiting,
            1e3 * seconds,
        )
    return advised_workers(loading, seconds, processes)


def advised_workers(loading: LoadingTime, step_s: float, processes: Processes) -> int:
    """Return how many loader processes beside this process keep up with the device.

    Args:
        loading: what it takes to make a micro-batch.
        step_s: the device's time for a micro-batch that is at hand.
        processes: this process among the others.
    """
    local, cores = processes.local_world_size, usable_cores()
    if processes.device.kind == "cpu":
        cores += local  # who waits needs no core
    return choose_workers(_relievable(loading, processes), step_s, cores=cores, processes=local)


def _relievable(loading: LoadingTime, processes: Processes) -> float:
    """Return the seconds that loader processes can take off this one: where a CPU trains, a core that loads does not train."""
    return loading.waiting if processes.device.kind == "cpu" else loading.seconds
