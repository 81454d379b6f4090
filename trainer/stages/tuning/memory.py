"""How much memory a candidate will need, from what those before it did: a host out of memory kills the process that measures.

A process needs a fixed part (weights, the optimizer's state, the teacher) and so many bytes for each image of a micro-batch.
"""

from __future__ import annotations

import resource
import sys
from collections.abc import Hashable
from pathlib import Path
from typing import NamedTuple, TypeAlias

import psutil
import torch

from trainer.devices.process_group import Processes

SHARE = 0.9
"""Largest share of the memory that a candidate may need: allocators fragment, and images differ."""


class GpuGauge:
    """Reads the memory of a process's own GPU, in bytes."""

    exact = True
    """Whether a peak is that of the trial alone, and not the highest since the process began."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def begin(self) -> None:
        torch.cuda.reset_peak_memory_stats(self._device)

    def used(self) -> int:
        return torch.cuda.memory_allocated(self._device)

    def unused(self) -> int:
        return torch.cuda.mem_get_info(self._device)[0]  # the context of this process is counted already

    def peak(self) -> int:
        return torch.cuda.max_memory_reserved(self._device)


class HostGauge:
    """Reads the memory of the machine, which its processes share evenly, in bytes."""

    exact = False

    def __init__(self, sharing: int) -> None:
        self._sharing = sharing

    def begin(self) -> None:
        """The operating system's peak cannot be reset."""

    def used(self) -> int:
        return int(psutil.Process().memory_info().rss)

    def unused(self) -> int:
        return min(int(psutil.virtual_memory().available), container_room()) // self._sharing

    def peak(self) -> int:
        return 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


Gauge: TypeAlias = GpuGauge | HostGauge


def gauge_of(processes: Processes) -> Gauge:
    """The gauge of this process."""
    device = processes.device.torch_device
    return GpuGauge(device) if device.type == "cuda" else HostGauge(processes.local_world_size)


class _Ran(NamedTuple):
    """A micro-batch that ran."""

    images: int
    peak: int
    fixed: int
    """Bytes that surely belong to the fixed part."""
    is_exact: bool
    """Whether the peak is its own; else it needed no more than that."""


class Memory:
    """Judges by the micro-batches that ran whether others will fit."""

    def __init__(self, gauge: Gauge) -> None:
        self._gauge = gauge
        self._before = gauge.used()
        self._limit = self._before + SHARE * gauge.unused()
        self._highest = gauge.peak()
        self.fixed = self._before
        """Bytes that were in use when the trial began."""
        self._ran: dict[Hashable, list[_Ran]] = {}

    def begin(self) -> None:
        """A trial begins, whose teacher is on the device already; its student and the optimizer's state are not."""
        self._gauge.begin()
        # What the host's allocator has kept of the trial before would be counted, too.
        self.fixed = self._gauge.used() if self._gauge.exact else self._before

    @property
    def peak(self) -> int:
        """Most bytes that this process used: on a GPU since the trial began, else ever."""
        return self._gauge.peak()

    def learn(self, kind: Hashable, images: int, peak: int, *, fixed: int) -> None:
        """Take from a trial how many bytes it used, at its `peak` and when it began, for micro-batches of `images` and all else, `kind`."""
        ran = _Ran(images, peak, max(fixed, self._before), self._gauge.exact or peak > self._highest)
        self._ran.setdefault(kind, []).append(ran)
        self._highest = max(self._highest, peak)
        self._limit = max(self._limit, peak)  # so much there is

    def ran(self, kind: Hashable, images: int) -> bool:
        """Whether a micro-batch of as many images, or more, has run."""
        return any(images <= one.images for one in self._ran.get(kind, ()))

    def has_room(self, kind: Hashable, images: int) -> bool:
        """Whether a micro-batch of so many images will fit; where none of its kind has run, judged by the other kinds."""
        alike = [self._ran[kind]] if kind in self._ran else list(self._ran.values())
        return all(needed(ran, images) <= self._limit for ran in alike)


def needed(ran: list[_Ran], images: int) -> float:
    """Compute the most bytes that a micro-batch of so many images needs: the least of the bounds that those which ran set."""
    bounds: list[float] = []
    for large in ran:
        if images <= large.images:
            bounds.append(large.peak)
            continue
        # With one measurement all but what was there before is taken to grow with the images, ...
        bounds.append(large.fixed + (large.peak - large.fixed) * images / large.images)
        # ... with two the slope between them is known, unless the smaller one may have needed less than its peak.
        for small in ran:
            if small.is_exact and small.images < large.images:
                slope = max(0.0, (large.peak - small.peak) / (large.images - small.images))
                bounds.append(large.peak + slope * (images - large.images))
    return min(bounds)


def container_room(cgroups: Path = Path("/sys/fs/cgroup")) -> int:
    """Bytes below the memory limit of this container; more than any machine has where there is none."""
    for limit, used in (
        ("memory.max", "memory.current"),
        ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes"),
    ):
        if (cgroups / limit).exists():
            text = (cgroups / limit).read_text(encoding="utf-8").strip()
            return sys.maxsize if text == "max" else int(text) - int((cgroups / used).read_text(encoding="utf-8"))
    return sys.maxsize
