"""The memory that a trial uses: of a process's own GPU, or its share of the machine's."""

from __future__ import annotations

import resource
import sys
from pathlib import Path

import psutil
import torch

from trainer.devices.process_group import Processes

SHARE = 0.9  # largest share of the free memory that a candidate may need: allocators fragment, and images differ


class MemoryGauge:
    """Reads the memory of a process in bytes: of its GPU, or else of the machine, which its processes share evenly."""

    def __init__(self, processes: Processes) -> None:
        """Read the limit, before the first trial."""
        self._gpu = processes.device.torch_device if processes.device.kind == "cuda" else None
        if self._gpu is None:
            available = min(int(psutil.virtual_memory().available), container_room())
            self._before = int(psutil.Process().memory_info().rss)
            unused = available // processes.local_world_size
        else:
            self._before = torch.cuda.memory_allocated(self._gpu)
            unused = torch.cuda.mem_get_info(self._gpu)[0]  # the context of this process is counted already
        self.limit = self._before + SHARE * unused  # bytes that this process may use

    def begin(self) -> int:
        """Begin a trial; return the bytes in use: on a GPU now, on a host before the first trial, since its allocator keeps memory."""
        if self._gpu is None:
            return self._before
        torch.cuda.reset_peak_memory_stats(self._gpu)
        return torch.cuda.memory_allocated(self._gpu)

    @property
    def peak(self) -> int:
        """Return the most bytes in use: on a GPU since the trial began, else since the process began."""
        if self._gpu is None:
            return 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return torch.cuda.max_memory_reserved(self._gpu)


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
