"""How many loader processes a training needs, from how fast one of them is and how fast the step is.

What is loaded is a function of the order alone, so the choice changes how long a training takes and nothing else.
"""

from __future__ import annotations

import math
import statistics
import time

import torch

from trainer.data.loader import MicroBatches

NEGLIGIBLE = 0.03
"""Loading that takes at most this share of a step is not worth a process."""

MARGIN = 1.25
"""Loader processes together are at least this much faster than the step: rates vary, and a machine has other work too."""

_TIMED = 3
"""Batches that are timed; the median counts."""

_LIMIT_S = 3.0
"""No further batch is timed after this long."""


def choose_workers(seconds_per_batch: float, seconds_per_step: float, *, cores: int, processes: int) -> int:
    """Loader processes for each training process: the fewest that keep up with the step, of the cores that there are.

    Args:
        seconds_per_batch: one core's time to make a micro-batch (`measure_loading`).
        seconds_per_step: the device's time for a micro-batch that is at hand.
        cores: cores of this machine that the training leaves free, and one that its own processes share: `usable_cores` where GPUs
            train; 1 where CPUs do, because every core that loads is then one that does not train.
        processes: training processes on this machine.

    Returns:
        0: each training process loads its own batches.
    """
    if seconds_per_batch <= NEGLIGIBLE * seconds_per_step:
        return 0
    needed = math.ceil(MARGIN * seconds_per_batch / seconds_per_step) if seconds_per_step > 0 else cores
    return min(needed, (cores - 1) // processes)


def measure_loading(batches: MicroBatches, position: int) -> float:
    """Seconds that one core needs for a micro-batch, measured in this process from `position` on, within a few seconds.

    Raises:
        DataError: an image can not be decoded.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        batches[position]  # not timed: the first one meets cold caches
        return statistics.median(_timed(batches, position))
    finally:
        torch.set_num_threads(threads)


def _timed(batches: MicroBatches, position: int) -> list[float]:
    times: list[float] = []
    while len(times) < _TIMED and sum(times) < _LIMIT_S:
        start = time.perf_counter()
        batches[position + (len(times) + 1) * batches.count]
        times.append(time.perf_counter() - start)
    return times
