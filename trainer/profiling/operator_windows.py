"""Which operators take the time: torch.profiler over a few steps."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from trainer.profiling.operators import Operator, OperatorTable, category_of

_OUTLINE = re.compile(r"^ProfilerStep|^\[pytorch\|profiler\]|^\[memory\]")


class OperatorWindows:
    """torch.profiler around some steps, `length` of them from each of `starts` on; it never raises into the training.

    `table` holds the operators of all windows that were closed, or `missing` says why there are none.
    """

    def __init__(self, starts: Sequence[int], length: int, device: torch.device) -> None:
        self.steps = frozenset(step for start in starts for step in range(start, start + length))
        """Counted from the start of the recording."""
        self.active = False
        self.missing = "" if self.steps else "turned off (operators_steps is 0, or operators_at empty)"
        self._device = device
        self._profile: profile | None = None
        self._opened = self._seen = 0
        self._operators: dict[tuple[str, str], Operator] = {}

    @property
    def table(self) -> OperatorTable | None:
        """By time, the longest first; none before a window was closed."""
        if not self._seen:
            return None
        rows = sorted(self._operators.values(), key=lambda row: (-row.self_device_ms, -row.self_cpu_ms, row.name))
        return OperatorTable(steps=self._seen, operators=tuple(rows))

    def open(self, step: int) -> None:
        """Start the profiler before a step."""
        activities = [ProfilerActivity.CPU]
        if self._device.type == "cuda":
            activities.append(ProfilerActivity.CUDA)
        os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # else its tracer reports to the terminal that there is no GPU
        try:
            self._profile = profile(activities=activities)
            self._profile.start()
        except RuntimeError as error:  # the device's tracing is not permitted, say
            self._profile = None
            self.missing = f"torch.profiler did not start: {error}"
            return
        self.active, self._opened = True, step

    def close(self, step: int) -> None:
        """Stop the profiler after a step and add what it saw."""
        profiled = self._stop()
        if profiled is not None:
            self._add(_operators(profiled))
            self._seen += step + 1 - self._opened

    def finish(self, steps_seen: int) -> None:
        """Called after the last step; says why there is no table if there is none. What an unfinished window saw is dropped."""
        cut = self._stop() is not None
        if self._seen or self.missing:
            return
        first = f"the first window would have begun at {min(self.steps)}"
        self.missing = f"the training ended after {steps_seen} steps, " + (
            f"within the window from step {self._opened}" if cut else f"and {first}"
        )

    def _stop(self) -> profile | None:
        """The profiler that was running, stopped."""
        profiled, self._profile, self.active = self._profile, None, False
        try:
            if profiled is not None:
                profiled.stop()
        except RuntimeError as error:  # as in `open`
            self.missing = f"torch.profiler gave no result: {error}"
            return None
        return profiled

    def _add(self, operators: Iterable[Operator]) -> None:
        for row in operators:
            known = self._operators.get((row.kind, row.name))
            self._operators[row.kind, row.name] = row if known is None else _sum(known, row)


def _sum(one: Operator, other: Operator) -> Operator:
    return replace(
        one,
        calls=one.calls + other.calls,
        self_cpu_ms=one.self_cpu_ms + other.self_cpu_ms,
        self_device_ms=one.self_device_ms + other.self_device_ms,
    )


def _operators(profiled: profile) -> Iterator[Operator]:
    for row in profiled.key_averages():
        operator = _operator(row)
        if (operator.self_cpu_ms or operator.self_device_ms) and not _OUTLINE.search(operator.name):
            yield operator


def _operator(row: Any) -> Operator:
    """One row of torch.profiler's averages, whose class has no public name."""
    return Operator(
        name=str(row.key),
        kind="operator" if row.device_type.name == "CPU" else "kernel",
        category=category_of(str(row.key)),
        calls=int(row.count),
        self_cpu_ms=float(row.self_cpu_time_total) / 1000,
        self_device_ms=float(row.self_device_time_total) / 1000,
    )
