"""Rules, their outcomes, and what several of them say: which finding explains others, how much of a training is left, names of settings."""

from __future__ import annotations

import inspect
import math
import re
import sys
from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import Any, ClassVar, Literal, Self, TypeVar

import numpy as np

from trainer.config.rules import RuleSettings, Thresholds
from trainer.io import formatting
from trainer.profiling.evidence import Curve, RankEvidence, RankRecord, TrainingEvidence

AnyRule = TypeVar("AnyRule", bound="Rule")

listed = partial(formatting.listed, most=3)  # joins the first names of a text, and says how many more there are
_SECTIONS = {"mae": "pretrain.mae", "finetune": "pretrain.finetune", "distill": "distill"}
"""Training of this project -> the section of its settings."""


@dataclass(frozen=True, kw_only=True)
class Case:
    """The input of a rule: one training, whole or up to now."""

    training: TrainingEvidence
    rules: RuleSettings
    stage_s: float | None = None
    """From the start of the stage's processes to the end of its last training; None while it runs."""
    live: bool = False  # whether the training still runs: only this process's record exists then

    @property
    def rank(self) -> RankEvidence:
        """The evidence of the first process."""
        return self.training.ranks[0]

    @property
    def record(self) -> RankRecord:
        return self.rank.record

    @property
    def settings(self) -> Mapping[str, Any]:
        """Of the training."""
        return self.record.context.settings

    @cached_property
    def curves(self) -> Mapping[str, Curve]:
        """The curves without points that are not finite, which only the rule on the loss judges, and without empty curves."""
        curves = {}
        for name, curve in self.training.metrics.items():
            known = np.isfinite(curve.values)
            if known.any():
                points = {column: getattr(curve, column)[known] for column in ("steps", "seconds", "values")}
                curves[name] = replace(curve, **points)
        return curves

    @property
    def is_traced(self) -> bool:
        """Whether it ran on a device of XLA, where a step is noted, compiled as one graph, and handed over."""
        return self.record.device.startswith("xla")

    @property
    def grows_at(self) -> int | None:
        """The step in which the input grows to its full size, and a compiled model compiles again; none where it does not."""
        return self.record.context.low_resolution_steps or None

    @property
    def remaining_s(self) -> float:
        """Estimate of the seconds of the remaining steps, where the training still runs and their number is known."""
        total, done = self.record.context.total_steps, self.record.steps.count
        if not self.live or not total or not done:
            return 0.0
        return max(0.0, total - 1 - float(self.rank.steps["step"][-1])) * self.record.steps.seconds / done

    @property
    def start_unseen(self) -> NotJudged | None:
        """The answer of a rule that needs the training's start, where this process resumed from a checkpoint; None where it did not."""
        steps = self.rank.steps["step"]
        if not len(steps) or steps[0] == 0:
            return None
        return NotJudged(
            f"this process resumed from a checkpoint, at step {steps[0] + 1:.0f}, so the training's start was not seen"
        )

    def rule(self, kind: type[AnyRule]) -> AnyRule:
        """Return another rule, with the thresholds that hold for this training."""
        return kind.of(self.rules)

    def first_cause(self, *kinds: type[Rule]) -> NotJudged | None:
        """Return `NotJudged` if one of these rules, whose causes have the effects that the caller judges, fires; else None."""
        for rule in map(self.rule, kinds):
            if rule.enabled and isinstance(rule.judge(self), Finding):
                return self.explained_by(rule)
        return None

    @staticmethod
    def explained_by(rule: Rule) -> NotJudged:
        """Return the answer of a rule whose symptoms another rule's finding explains."""
        return NotJudged(f"what there is to see may come from another finding: {rule.name}")

    def saving_after(self, since_s: float, why: str) -> Saving:
        """Estimate the saving of ending the training at a moment: the time to its end, extrapolated while it runs."""
        seconds = max(0.0, self.record.ended_s - since_s) + self.remaining_s
        return Saving(seconds, f"the training's time after that, in which {why}")

    def accuracy_noise(self, accuracy: float) -> float:
        """Compute two standard errors of the difference of two accuracies on the validation split; 0 where its size is not known."""
        images = self.record.context.val_samples
        return 2 * math.sqrt(2 * accuracy * (1 - accuracy) / images) if images else 0.0

    @property
    def workers_setting(self) -> str:
        """Name of the setting for loader processes; a loop of one's own has that of torch's `DataLoader`."""
        return "data.workers" if self.training.name in _SECTIONS else "num_workers"

    def setting(self, name: str) -> str:
        """Return the full name of a setting of this training."""
        return setting_of(self.training.name, name)


@dataclass(frozen=True)
class Saving:
    """Time that curing a finding would save."""

    seconds: float  # wall time of the training that the cure would save
    reason: str  # how the seconds were estimated


@dataclass(frozen=True, kw_only=True)
class Finding:
    """The rule fires."""

    severity: Literal["note", "warning", "severe"] = "warning"
    """`note`: good to know; `warning`: costs time, money or accuracy; `severe`: the rest of the training is of no use."""
    confidence: float  # from 0 to 1: how sure the evidence makes it
    text: str  # what was found, with its numbers, in a sentence or two
    advice: str  # what to do, naming settings with their values
    saving: Saving | None = None
    """None where the cure changes what is learned and not how long it takes, or where it is not known."""
    numbers: Mapping[str, float] = field(default_factory=dict)
    """Name of each number that decided, with its unit as a suffix -> its value."""
    window_s: tuple[float, float] | None = None
    """Evidence from when to when, in seconds since the recording began; none where it is the whole."""
    steps: tuple[int, int] | None = None
    """From which step to which, counted from 0; texts and pages, which people read, count from 1."""


@dataclass(frozen=True)
class Healthy:
    """The rule was judged and does not fire."""

    text: str  # what the evidence shows, with its numbers


@dataclass(frozen=True)
class NotJudged:
    """The rule cannot be judged."""

    reason: str  # what is missing
    too_short: bool = False  # whether a longer training would let the rule judge


Outcome = Finding | Healthy | NotJudged


def too_short(reason: str) -> NotJudged:
    """Return the answer of a rule that a longer training would let judge."""
    return NotJudged(reason, too_short=True)


class Rule(Thresholds):
    """A test for one cause of slow or failed trainings; its fields are its thresholds, which `trainer.config.rules` declares.

    The docstring of a rule says what it looks for, and below that, in paragraphs that begin so, when it `Fires when`, what it `Needs` and
    what it `Advises`. Names in braces there are constants of its module.
    """

    name: ClassVar[str]  # the class name in snake_case: its field of `RuleSettings`
    title: ClassVar[str]
    live: ClassVar[bool] = True  # whether it can be judged while the training runs

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        cls.name = re.sub(r"(?<=[a-z])(?=[A-Z])", "_", cls.__name__).lower()
        cls.title = vars(cls).get("title", cls.name.replace("_", " ").capitalize())

    @classmethod
    def of(cls, settings: RuleSettings) -> Self:
        """Return the rule with the thresholds of these settings."""
        return cls.model_validate(dict(getattr(settings, cls.name)))

    @classmethod
    def texts(cls) -> list[str]:
        """Split the docstring for docs/rules.md: the summary, when the rule fires, what it needs, and what it advises."""
        doc = inspect.cleandoc(cls.__doc__ or "").format_map(vars(sys.modules[cls.__module__]))
        return [" ".join(part.split()) for part in re.split(r"^(?:Fires when|Needs|Advises) ", doc, flags=re.MULTILINE)]

    @abstractmethod
    def judge(self, case: Case) -> Outcome:
        """Judge a training; a pure function."""


class SystemRule(Rule):
    """A rule on how fast the machine is used."""


class TrainingRule(Rule):
    """A rule on what is learned."""


def setting_of(training: str, name: str) -> str:
    """Return the full name of a setting of a training of this name; the plain one for a loop of one's own, which has no section."""
    return f"{_SECTIONS[training]}.{name}" if training in _SECTIONS else name
