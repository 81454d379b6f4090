"""How many processor cores there are to use."""

from __future__ import annotations

import os
from pathlib import Path

_CGROUPS = Path("/sys/fs/cgroup")


def usable_cores(cgroups: Path = _CGROUPS) -> int:
    """Cores that this process may use: those it may run on, or fewer where a container's CPU limit is lower."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    quota, period = _cpu_limit(cgroups)
    return max(1, min(cores, quota // period)) if quota > 0 else cores


def _cpu_limit(cgroups: Path) -> tuple[int, int]:
    """Microseconds of CPU time that the container has in each period, and the period; a quota of -1 where there is no limit."""
    second, first = cgroups / "cpu.max", cgroups / "cpu"  # versions 2 and 1 of Linux's control groups
    if second.exists():
        quota, period = second.read_text().split()
        return (-1 if quota == "max" else int(quota)), int(period)
    if (first / "cpu.cfs_quota_us").exists():
        return int((first / "cpu.cfs_quota_us").read_text()), int((first / "cpu.cfs_period_us").read_text())
    return -1, 1
