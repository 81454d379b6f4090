"""Rules, their outcomes, and what several of them say: which finding explains others, how much of a training is left, names of settings."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from trainer.profiling.evidence import TrainingEvidence
from trainer.thresholds import RuleSettings

_NAMED = 3
_SECTIONS = {"mae": "pretrain.mae", "finetune": "pretrain.finetune"}
"""Trainings whose settings are in a section of another name."""


@dataclass(frozen=True, kw_only=True)
class Case:
    """The input of a rule: one training, whole or up to now."""

    training: TrainingEvidence
    rules: RuleSettings
    stage_s: float | None = None
    """From the start of the stage's processes to the end of its last training; None while it runs."""
    live: bool = False
    """Whether the training still runs, and only this process's record is at hand."""


@dataclass(frozen=True, kw_only=True)
class Saving:
    """Time that curing a finding would save."""

    seconds: float
    """Of the training's wall time."""
    reason: str
    """How that was estimated."""


@dataclass(frozen=True, kw_only=True)
class Finding:
    """The rule fires."""

    severity: Literal["note", "warning", "severe"]
    """`note`: good to know; `warning`: costs time, money or accuracy; `severe`: the rest of the training is of no use."""
    confidence: float
    """From 0 to 1: how sure the evidence makes it."""
    text: str
    """What was found, with its numbers, in a sentence or two."""
    advice: str
    """What to do, naming settings with their values."""
    saving: Saving | None = None
    """None where the cure changes what is learned and not how long it takes, or where it is not known."""
    numbers: Mapping[str, float] = field(default_factory=dict)
    """Name of each number that decided, with its unit as a suffix -> its value."""
    window_s: tuple[float, float] | None = None
    """Evidence from when to when, in seconds since the recording began; none where it is the whole."""
    steps: tuple[int, int] | None = None
    """From which step to which."""


@dataclass(frozen=True, kw_only=True)
class Healthy:
    """The rule was judged and does not fire."""

    text: str
    """What the evidence shows, with its numbers."""


@dataclass(frozen=True, kw_only=True)
class NotJudged:
    """The rule cannot be judged."""

    reason: str
    """What is missing."""
    too_short: bool = False
    """Whether a longer training would let the rule judge."""


Outcome = Finding | Healthy | NotJudged


def too_short(reason: str) -> NotJudged:
    """Return the answer of a rule that a longer training would let judge."""
    return NotJudged(reason=reason, too_short=True)


@dataclass(frozen=True, kw_only=True)
class Rule:
    """A test for one cause of slow or failed trainings."""

    name: str
    """Its key in `RuleSettings`."""
    title: str
    needs: str
    """The evidence that it reads, for docs/rules.md."""
    fires: str
    """When it fires; thresholds are named by their keys."""
    advises: str
    """Its advice."""
    judge: Callable[[Case], Outcome]
    live: bool = True
    """Whether it can be judged while the training runs."""


def rule(
    *, title: str, needs: str, fires: str, advises: str, live: bool = True
) -> Callable[[Callable[[Case], Outcome]], Rule]:
    """Make a rule of the function that judges it, which has its name; the arguments are those of `Rule`."""
    return lambda judge: Rule(
        name=judge.__name__, title=title, needs=needs, fires=fires, advises=advises, judge=judge, live=live
    )


def first_cause(case: Case, *rules: Rule) -> NotJudged | None:
    """Return the answer of a rule on effects of other causes: not judged where one of `rules` fires; None where none does."""
    for rule in rules:
        if getattr(case.rules, rule.name).enabled and isinstance(rule.judge(case), Finding):
            return NotJudged(reason=f"what there is to see may come from another finding: {rule.name}")
    return None


def start_unseen(case: Case) -> NotJudged | None:
    """Return the answer of a rule that needs the training's start, where this process resumed from a checkpoint; None where it did not."""
    steps = case.training.ranks[0].steps["step"]
    if not len(steps) or steps[0] == 0:
        return None
    return NotJudged(
        reason=f"this process resumed from a checkpoint, at step {steps[0] + 1:.0f}, so the training's start was not seen"
    )


def saving_after(case: Case, since_s: float, why: str) -> Saving:
    """Estimate what ending the training at a moment saves: the time to its end, extrapolated from the steps so far while it runs."""
    return Saving(
        seconds=max(0.0, case.training.ranks[0].record.ended_s - since_s) + remaining_s(case),
        reason=f"the training's time after that, in which {why}",
    )


def remaining_s(case: Case) -> float:
    """Estimate the seconds of the remaining steps, where the training still runs and their number is known."""
    rank = case.training.ranks[0]
    total, done = rank.record.context.total_steps, rank.record.steps.count
    if not case.live or not total or not done:
        return 0.0
    return max(0.0, total - 1 - float(rank.steps["step"][-1])) * rank.record.steps.seconds / done


def accuracy_noise(case: Case, accuracy: float) -> float:
    """Compute two standard errors of the difference of two accuracies on the validation split; 0 where its size is not known."""
    images = case.training.ranks[0].record.context.val_samples
    return 2 * math.sqrt(2 * accuracy * (1 - accuracy) / images) if images else 0.0


def setting(case: Case, name: str) -> str:
    """Return the full name of a setting of this training."""
    return setting_of(case.training.name, name)


def setting_of(training: str, name: str) -> str:
    """Return the full name of a setting of a training of this name."""
    return f"{_SECTIONS.get(training, training)}.{name}"


def listed(names: Sequence[str]) -> str:
    """Join the first names, and say how many more there are."""
    shown, more = ", ".join(names[:_NAMED]), len(names) - _NAMED
    return f"{shown} and {more} more" if more > 0 else shown
