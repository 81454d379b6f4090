"""When a trial has seen enough: as soon as it is clear whether the candidate is better than the best so far."""

from __future__ import annotations

import math
import statistics
from typing import Literal, NamedTuple

from trainer.forecast import LEAST_STEPS, mean_interval

LAP_S = 0.2
"""About how long a lap takes; the host waits for the device once a lap."""
SHARE_LEAST, SHARE_MOST = 0.01, 0.04
"""How long a trial is measured at least, unless it is far behind, and at most, as a share of the whole distillation ..."""
LEAST_S, LONGEST_S = (0.5, 2.0), (1.0, 10.0)
"""... and in seconds, from and to, unless its steps are so long that the few that an interval needs take longer."""
FAR_BEHIND = 0.8
"""A candidate whose fastest lap is below this share of the rate to beat is stopped."""
PRECISE = 0.02
"""The interval of a rate is narrow enough at this share of it, each side."""


class Plan(NamedTuple):
    """What the first process sends to the others after each lap."""

    ended: Literal["", "measured", "outrun"]
    steps: int
    """Steps of the next lap."""


class StepTimer:
    """The times of a trial's steps, lap by lap: first some steps to warm up, each a lap of its own, then laps that count."""

    def __init__(
        self, images: int, rate_to_beat: float = 0.0, *, warm_steps: int, total_steps: int, thoroughness: float = 1.0
    ) -> None:
        """Of a candidate with so many images a step.

        Args:
            rate_to_beat: images a second below which the candidate cannot be the best.
            warm_steps: steps that are not measured.
            total_steps: of the whole distillation, whose length says how long a trial may be.
            thoroughness: how many times longer than a trial.
        """
        self._images, self._rate_to_beat = images, rate_to_beat
        self._warm, self._total_steps, self._thoroughness = warm_steps, total_steps, thoroughness
        self._seconds: list[float] = []
        """Of a step, lap by lap."""
        self._began = 0.0
        self._done = 0
        self.plan = Plan("", 1)

    def open(self, now: float) -> None:
        """A lap begins."""
        self._began, self._done = now, 0

    def step(self) -> bool:
        """A step is done; gives whether that completes the lap."""
        self._done += 1
        return self._done >= self.plan.steps

    def close(self, now: float) -> Plan:
        """A lap ends; gives what this process would do next."""
        seconds = (now - self._began) / self._done
        if self._warm:
            self._warm -= 1
            return Plan("", 1 if self._warm else max(1, round(LAP_S / max(seconds, 1e-9))))
        self._seconds.append(seconds)
        return Plan(self._ended(), self.plan.steps)

    def _ended(self) -> Literal["", "measured", "outrun"]:
        if len(self._seconds) >= 2 and self._images / min(self._seconds) < FAR_BEHIND * self._rate_to_beat:
            return "outrun"
        measured = self.plan.steps * sum(self._seconds)
        whole = self._total_steps * sum(self._seconds) / len(self._seconds)
        if len(self._seconds) < LEAST_STEPS or measured < self._limit(SHARE_LEAST * whole, LEAST_S):
            return ""
        rate, low, high = self.rates
        if high < self._rate_to_beat:
            return "outrun"
        is_precise = high - low <= 2 * PRECISE * rate
        return "measured" if is_precise or measured >= self._limit(SHARE_MOST * whole, LONGEST_S) else ""

    def _limit(self, seconds: float, between: tuple[float, float]) -> float:
        return self._thoroughness * min(max(seconds, between[0]), between[1])

    @property
    def steps(self) -> int:
        """Steps that count."""
        return self.plan.steps * len(self._seconds)

    @property
    def step_s(self) -> tuple[float, float, float]:
        """Mean time of a step, and its 95 % interval: what many steps take, with all that disturbs them."""
        return mean_interval(self._seconds)

    @property
    def rates(self) -> tuple[float, float, float]:
        """Images a second: median over the laps and its 95 % interval, which a disturbance of some laps does not move.

        The interval is between two laps in the order of their times, as many places from the middle as a binomial count strays.
        """
        ordered = sorted(self._seconds)
        stray = math.ceil(0.98 * math.sqrt(len(ordered)))
        last = len(ordered) - 1
        slow, fast = ordered[min(last, len(ordered) // 2 + stray)], ordered[max(0, (last // 2) - stray)]
        return self._images / statistics.median(ordered), self._images / slow, self._images / fast
