"""How far a training on a cluster was at what time, and what a fault cost it; from the lines that its log had."""

from __future__ import annotations

import itertools
import re
from dataclasses import dataclass
from datetime import datetime

STEP = re.compile(r"^(\S+) .* step (\d+)/(\d+)  ", re.MULTILINE)
"""A line of a training that says how far it is, as `kubectl logs --timestamps` shows it."""


@dataclass(frozen=True)
class Seen:
    """A line that said how far a training was."""

    at: float
    """Unix time."""
    step: int
    total: int

    @property
    def share(self) -> float:
        return self.step / self.total


def steps(log: str) -> list[Seen]:
    """The lines of a log that say how far a training is."""
    return [
        Seen(datetime.fromisoformat(time).timestamp(), int(step), int(total)) for time, step, total in STEP.findall(log)
    ]


@dataclass(frozen=True)
class Recovery:
    """What a fault cost a training."""

    next_step_s: float
    """Longest time without a line that says a step, from the last one before the fault on."""
    repeated: int
    """Steps done twice, as far as lines tell."""


def recovery(lines: list[Seen], struck: float, until: float) -> Recovery:
    """What the lines between a fault and the next one show.

    Args:
        lines: of one training.
        struck: when, in Unix time.
        until: when the next fault struck, or the training ended.
    """
    before = [line for line in lines if line.at <= struck][-1:]
    after = before + [line for line in lines if struck < line.at <= until]
    pairs = list(itertools.pairwise(after))
    return Recovery(
        next_step_s=max((second.at - first.at for first, second in pairs), default=until - struck),
        repeated=sum(max(0, first.step - second.step) for first, second in pairs),
    )


def goodput(lines: list[Seen]) -> float:
    """The share of a training's time, from its first line to its last, that its steps would have taken undisturbed.

    An undisturbed step takes the median of what the steps between two lines took that followed each other.
    """
    pairs = [(first, second) for first, second in itertools.pairwise(lines) if second.step > first.step]
    paces = sorted((second.at - first.at) / (second.step - first.step) for first, second in pairs)
    done = lines[-1].step - lines[0].step
    return done * paces[len(paces) // 2] / (lines[-1].at - lines[0].at)
