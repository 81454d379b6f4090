"""The steps that the rules on speed compare, of all processes.

Shapes: R processes, S steps.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import reduce
from typing import Literal

import numpy as np

from trainer.profiling.evidence import RankEvidence, phase_of
from trainer.profiling.rules.outcomes import Case, NotJudged, too_short
from trainer.profiling.rules.stalled import StalledTraining
from trainer.profiling.series import Flags, Rows, Series

FEWEST_STEPS = 30  # fewer steps may be an exception
IGNORED = 10  # first steps of a process, in which caches fill and the number of loader processes is measured
_SHORTEST_S = 1e-9
XLA_DEBUG = "PT_XLA_DEBUG_LEVEL=2 in the environment prints the line of the program that {}"


class Steps:
    """The steps that all processes recorded, without warm-up, last step, profiled steps, stalls, and the recompiling step of full size."""

    def __init__(self, case: Case, *, ignored: int = IGNORED) -> None:
        self.ranks: Sequence[RankEvidence] = case.training.ranks
        self.record = self.ranks[0].record
        rows, stalled_s = [], case.rule(StalledTraining).seconds
        for rank in self.ranks:
            number, total = rank.steps["step"], rank.record.context.total_steps
            compared = (rank.steps["profiled"] == 0) & (rank.steps["seconds"] < stalled_s)
            compared &= number >= number[:1] + ignored
            if case.grows_at is not None:
                compared &= number != case.grows_at
            if total is not None:  # the last step ends the loader processes
                compared &= number < total - 1
            rows.append(np.flatnonzero(compared))
        numbers = [rank.steps["step"][own] for rank, own in zip(self.ranks, rows, strict=True)]
        self.numbers: Series = reduce(np.intersect1d, numbers)  # numbers of the steps, [S]
        common = [own[np.isin(number, self.numbers)] for own, number in zip(rows, numbers, strict=True)]
        self._compared = list(zip(self.ranks, common, strict=True))
        self.seconds = self.column("seconds") - self.phase("recorder")
        """Duration without the recorder's measurements of tensors, [R, S]."""
        self._stolen = np.stack([_stolen(rank, rows) for rank, rows in self._compared])
        self.delayed = np.minimum(self._delayed("host"), self.seconds)
        """Of that, while a process was ready and other programs had its core, [R, S]; 0 on a GPU, which works on meanwhile."""

    def __len__(self) -> int:
        return len(self.numbers)

    @property
    def too_few(self) -> NotJudged | None:
        """The answer of a rule without enough steps to compare; None with enough."""
        if len(self) >= FEWEST_STEPS:
            return None
        return too_short(f"only {len(self)} steps were measured after the first {IGNORED}; {FEWEST_STEPS} are needed")

    @property
    def on_gpu(self) -> bool:
        return self.record.device.startswith("cuda")

    @property
    def undisturbed(self) -> Series:
        """Duration without other programs, [S]: the shortest of the processes' steps less their longest delay, since all wait for it."""
        return np.asarray(np.maximum(self.seconds.min(axis=0) - self.delayed.max(axis=0), 0.0))

    @property
    def step_s(self) -> float:
        """How long an undisturbed step usually takes, in seconds."""
        return max(float(winsorized_mean(self.undisturbed)), _SHORTEST_S)

    @property
    def total_s(self) -> float:
        """Duration of all steps of the training, in seconds."""
        return self.record.steps.seconds

    @property
    def span(self) -> tuple[int, int]:
        return int(self.numbers[0]), int(self.numbers[-1])

    def column(self, name: str) -> Series:
        """Return a column of the step table, [R, S]; NaN where a process did not record it."""
        missing = np.full(len(self), np.nan)
        columns = (rank.steps[name][rows] if name in rank.steps else missing for rank, rows in self._compared)
        return np.stack(list(columns))

    def phase(self, *names: str) -> Series:
        """Sum the seconds in phases or outermost ranges, with the ranges that users named within them, [R, S]."""
        total = np.zeros((len(self.ranks), len(self)))
        for number, (rank, rows) in enumerate(self._compared):
            for path in rank.ranges:
                if phase_of(path) in names:
                    total[number] += rank.steps[path][rows]
        return total

    def delayed_in(self, phase: Literal["data", "backward"]) -> Series:
        """Compute `delayed` within a phase, [R, S]."""
        return np.minimum(self._delayed(f"host_{phase}"), self.phase(phase))

    def without_core(self, part: str) -> Series:
        """Compute the seconds in which a process was ready without a core, [R, S]; 0 if unknown. `part`: host, host_data, host_backward."""
        # Its own kernel counts for no thread what a virtual machine's host takes; that is lost where the thread computes.
        computed = self.column(f"{part}_cpu_seconds") / np.maximum(self.column("host_cpu_seconds"), _SHORTEST_S)
        return np.nan_to_num(self.column(f"{part}_delayed_seconds")) + np.nan_to_num(self._stolen * computed)

    def _delayed(self, part: str) -> Series:
        return np.zeros_like(self.seconds) if self.on_gpu else self.without_core(part)

    def processes_here(self) -> int:
        """Training processes on the first one's machine."""
        if len(self.ranks) == self.record.world_size:
            return sum(rank.record.host == self.record.host for rank in self.ranks)
        place = self.record.place
        return place.processes_per_node if place is not None else self.record.world_size


def _stolen(rank: RankEvidence, rows: Rows) -> Series:
    """Compute the seconds of steps that the host of a virtual machine took of a process's core, [S]; 0 where it was not sampled."""
    percent = rank.system.get("stolen_percent")
    if percent is None:
        return np.zeros(len(rows))
    times = np.append(0.0, rank.system["end_s"])
    until = np.append(0.0, np.cumsum(np.nan_to_num(percent) / 100 * np.diff(times)))
    starts = rank.steps["start_s"][rows]
    ends = starts + rank.steps["seconds"][rows]
    return np.asarray(np.interp(ends, times, until) - np.interp(starts, times, until))


def winsorized_mean(values: Series) -> Series:
    """Mean of each row, [R, S] to [R], in which no single step weighs much: steps above the 95th percentile count as that."""
    return np.asarray(np.minimum(values, np.percentile(values, 95, axis=-1, keepdims=True)).mean(axis=-1))


def had_core(steps: Steps) -> Series:
    """Compute the share of the wanted time in which a process had a core, [R, S]; 1 if unknown. Only other programs make it small."""
    computed = np.nan_to_num(steps.column("host_cpu_seconds"))
    return np.asarray(np.where(computed > 0, computed / np.maximum(computed + steps.delayed, _SHORTEST_S), 1.0))


def within_steps(rank: RankEvidence) -> Flags:
    """Mark the samples of the system that were taken after the first step and beside no validation, checkpoint or window of operators."""
    ends, interval = rank.system["end_s"], rank.record.system_interval_s
    within = ends > (rank.record.first_step_s or 0.0) + interval
    for start, seconds in zip(rank.spans.start_s, rank.spans.seconds, strict=True):
        if seconds > interval / 2:
            within &= (ends < start) | (ends > start + seconds + interval)
    return np.asarray(within)
