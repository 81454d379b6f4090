"""How much memory a candidate will need, from what those before it did: a host out of memory kills the process that measures."""

from __future__ import annotations

import resource
import sys
from pathlib import Path

import psutil
import torch

from trainer.training.processes import Processes

SHARE = 0.9
"""Largest share of the memory that a candidate may need: allocators fragment, and images differ."""


_CGROUPS = Path("/sys/fs/cgroup")


class Memory:
    """The memory that the micro-batches of this process use: its GPU's, or else the machine's."""

    def __init__(self, processes: Processes) -> None:
        """Of one of these processes, before its first trial."""
        self._device, self._sharing = processes.device.torch_device, processes.local_world_size
        self._before = self._used()
        self._free = self._unused()
        self._each = 0.0
        """Bytes an image of a micro-batch."""

    def begin(self) -> None:
        """A trial begins."""
        if self._device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self._device)

    def learn(self, images: int, peak: int) -> None:
        """A trial with so many images in a micro-batch has run, and used `peak` bytes."""
        self._each = max(self._each, (peak - self._before) / images)

    @property
    def peak(self) -> int:
        """Most bytes that this process used: on a GPU since the trial began, else ever."""
        if self._device.type == "cuda":
            return torch.cuda.max_memory_reserved(self._device)
        return 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss

    def has_room(self, images: int) -> bool:
        """Whether a micro-batch of so many images will fit, if each takes what those before took."""
        return self._each * images <= SHARE * self._free / self._sharing

    def _used(self) -> int:
        if self._device.type == "cuda":
            return torch.cuda.memory_reserved(self._device)
        return int(psutil.Process().memory_info().rss)

    def _unused(self) -> int:
        if self._device.type == "cuda":
            return torch.cuda.mem_get_info(self._device)[0]
        return min(int(psutil.virtual_memory().available), container_room())


def container_room(cgroups: Path = _CGROUPS) -> int:
    """Bytes below the memory limit of this container; more than any machine has where there is none."""
    for limit, used in (
        ("memory.max", "memory.current"),
        ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes"),
    ):
        if (cgroups / limit).exists():
            text = (cgroups / limit).read_text().strip()
            return sys.maxsize if text == "max" else int(text) - int((cgroups / used).read_text())
    return sys.maxsize
