"""Rules and their outcomes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Literal

from trainer.profiling.evidence import TrainingEvidence
from trainer.thresholds import RuleSettings

Severity = Literal["note", "warning", "severe"]
"""`note`: good to know; `warning`: costs time, money or accuracy; `severe`: the rest of the training is of no use."""


@dataclass(frozen=True, kw_only=True)
class Case:
    """The input of a rule: one training, whole or up to now."""

    training: TrainingEvidence
    rules: RuleSettings
    before: TrainingEvidence | None = None
    """The training before it in the same stage."""
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

    severity: Severity
    confidence: float
    """From 0 to 1: how sure the evidence makes it."""
    text: str
    """What was found, with its numbers, in a sentence or two."""
    advice: str
    """What to do, naming settings with their values."""
    saving: Saving | None
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


@dataclass(frozen=True, kw_only=True)
class Rule:
    """A test for one cause of slow or failed trainings."""

    name: str
    """Its key in `RuleSettings`."""
    kind: Literal["system", "training"]
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


@dataclass(frozen=True, kw_only=True)
class Judgement:
    """A rule's answer on a training."""

    rule: Rule
    training: str
    """`mae`, `finetune` or `distill`."""
    outcome: Outcome
