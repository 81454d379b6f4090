"""The steps that the rules on speed compare, of all processes.

Shapes: R processes, S steps.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import reduce

import numpy as np

from trainer.profiling.evidence import RankEvidence
from trainer.profiling.rules.outcomes import Case, NotJudged
from trainer.profiling.series import Rows, Series
from trainer.profiling.summary import phase_of

FEWEST_STEPS = 30
"""Fewer steps than this tell nothing that lasts."""
IGNORED = 10
"""First steps of a process, in which caches fill and the number of loader processes is measured."""
_USUAL_PERCENTILE = 95
_UNHURRIED = 1e-12


class Steps:
    """The steps that all processes recorded, without the first ones, those that torch.profiler slowed, and stalls."""

    def __init__(self, case: Case, *, ignored: int = IGNORED) -> None:
        self.ranks: Sequence[RankEvidence] = case.training.ranks
        self.record = self.ranks[0].record
        self._rows = [_rows_of(rank, ignored, case.rules.stalled_training.seconds) for rank in self.ranks]
        numbers = [rank.steps["step"][rows] for rank, rows in zip(self.ranks, self._rows, strict=True)]
        self.numbers: Series = reduce(np.intersect1d, numbers)
        """Which steps they are, [S]."""
        self._rows = [rows[np.isin(own, self.numbers)] for rows, own in zip(self._rows, numbers, strict=True)]
        self.seconds = self.column("seconds")
        """Duration, [R, S]."""

    def __len__(self) -> int:
        return len(self.numbers)

    @property
    def too_few(self) -> NotJudged | None:
        """The answer of a rule where there is not enough to compare; none where there is."""
        if len(self) >= FEWEST_STEPS:
            return None
        return NotJudged(
            reason=f"only {len(self)} steps were measured after the first {IGNORED}; {FEWEST_STEPS} are needed"
        )

    @property
    def on_gpu(self) -> bool:
        """Whether the training computes on a GPU."""
        return self.record.device.startswith("cuda")

    @property
    def step_s(self) -> float:
        """How long a step usually takes, in seconds."""
        return float(usual(self.seconds).mean())

    @property
    def total_s(self) -> float:
        """All steps of the training, also those that are not compared, in seconds."""
        return self.record.steps.seconds

    @property
    def span(self) -> tuple[int, int]:
        """The first and the last step that were compared."""
        return int(self.numbers[0]), int(self.numbers[-1])

    def column(self, name: str) -> Series:
        """A column of the step table, [R, S]; NaN where a process did not record it."""
        missing = np.full(len(self), np.nan)
        return np.stack(
            [
                rank.steps[name][rows] if name in rank.steps else missing
                for rank, rows in zip(self.ranks, self._rows, strict=True)
            ]
        )

    def phase(self, *names: str) -> Series:
        """Seconds in phases or outermost ranges, with what users named within them, [R, S]."""
        total = np.zeros_like(self.seconds)
        for number, (rank, rows) in enumerate(zip(self.ranks, self._rows, strict=True)):
            for path in rank.ranges:
                if phase_of(path) in names:
                    total[number] += rank.steps[path][rows]
        return total

    def processes_here(self) -> int:
        """Training processes on the first one's machine."""
        if len(self.ranks) == self.record.world_size:
            return sum(rank.record.host == self.record.host for rank in self.ranks)
        place = self.record.place
        return place.processes_per_node if place is not None else self.record.world_size


def usual(values: Series) -> Series:
    """Mean of each row, [R, S] to [R], in which no single step weighs much: steps above the 95th percentile count as that."""
    return np.asarray(
        np.minimum(values, np.percentile(values, _USUAL_PERCENTILE, axis=-1, keepdims=True)).mean(axis=-1)
    )


def share_of_cpu(steps: Steps) -> Series:
    """Of the time in which a process's training wanted a core, the share in which it had one, [R]; 1 where the kernel does not tell.

    Other programs on the machine make it small. It does not count the time in which the training waited for something else.
    """
    computed, delayed = (
        np.nan_to_num(steps.column(name)).sum(-1) for name in ("host_cpu_seconds", "host_delayed_seconds")
    )
    return np.asarray(np.where(computed > 0, computed / np.maximum(computed + delayed, _UNHURRIED), 1.0))


def _rows_of(rank: RankEvidence, ignored: int, stall_s: float) -> Rows:
    steps = rank.steps
    if not len(steps["step"]):
        return np.arange(0)
    compared = (steps["step"] >= steps["step"][0] + ignored) & (steps["profiled"] == 0) & (steps["seconds"] < stall_s)
    return np.flatnonzero(compared)
