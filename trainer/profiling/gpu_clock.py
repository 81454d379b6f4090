"""The clock of a GPU, for the timeline."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import torch


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
