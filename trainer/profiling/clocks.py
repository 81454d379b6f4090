"""The clocks of a timeline: the host's, a GPU's, and how long a thread has waited for a core."""

from __future__ import annotations

import math
import os
import time
import weakref
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Protocol, TypeVar

import torch

Mark = TypeVar("Mark")


class Clock(Protocol[Mark]):
    """Marks points in the training's course and says, later, how far they lie apart."""

    def mark(self) -> Mark:
        """Mark this point."""
        ...

    def passed(self, mark: Mark) -> bool:
        """Whether the device has come to the mark; never waits."""
        ...

    def wait(self, mark: Mark) -> None:
        """Wait until the device has come to the mark."""
        ...

    def intervals(self, marks: Sequence[Mark]) -> list[float]:
        """Seconds between neighbours of marks that were passed."""
        ...

    def release(self, marks: Sequence[Mark]) -> None:
        """These marks are no longer needed."""
        ...


class HostClock:
    """Marks are nanoseconds of the host's clock."""

    def __init__(self, nanoseconds: Callable[[], int] = time.perf_counter_ns) -> None:
        self.mark = nanoseconds

    def passed(self, mark: int) -> bool:  # noqa: ARG002  # other clocks look at it
        """Always: the host computes in the order of the program."""
        return True

    def wait(self, mark: int) -> None:
        """Nothing to wait for."""

    def intervals(self, marks: Sequence[int]) -> list[float]:
        """Seconds between neighbours."""
        return [(end - start) * 1e-9 for start, end in pairwise(marks)]

    def release(self, marks: Sequence[int]) -> None:
        """Nothing to give back."""


class CudaClock:
    """Marks are events on the current stream of a GPU, used again and again."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._free: list[torch.cuda.Event] = []

    def mark(self) -> torch.cuda.Event:
        """Record an event on the current stream."""
        event = self._free.pop() if self._free else torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self._device))
        return event

    def passed(self, mark: torch.cuda.Event) -> bool:
        """Whether the stream has come to the event."""
        return bool(mark.query())

    def wait(self, mark: torch.cuda.Event) -> None:
        """Wait for the event."""
        mark.synchronize()

    def intervals(self, marks: Sequence[torch.cuda.Event]) -> list[float]:
        """Seconds on the device between neighbours of events that were passed."""
        return [float(start.elapsed_time(end)) * 1e-3 for start, end in pairwise(marks)]

    def release(self, marks: Sequence[torch.cuda.Event]) -> None:
        """Keep the events for later marks."""
        self._free.extend(marks)


class ThreadTime:
    """How long the thread that opens it has waited for a core, as Linux counts it."""

    def __init__(self) -> None:
        self._file: int | None = None

    def open(self) -> None:
        """Begin; where the kernel does not say, times are NaN."""
        try:
            self._file = os.open("/proc/thread-self/schedstat", os.O_RDONLY | os.O_CLOEXEC)
            weakref.finalize(self, os.close, self._file)
        except OSError:
            self._file = None

    def delayed_ns(self) -> float:
        """Nanoseconds since the thread began."""
        return math.nan if self._file is None else int(os.pread(self._file, 64, 0).split()[1])
