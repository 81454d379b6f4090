"""Helpers of several rules: which finding explains others, how much of a training is left, names of settings."""

from __future__ import annotations

import math
from collections.abc import Sequence

from trainer.profiling.rules.outcomes import Case, Finding, NotJudged, Rule, Saving

_NAMED = 3
_SECTIONS = {"mae": "pretrain.mae", "finetune": "pretrain.finetune"}
"""Trainings whose settings are in a section of another name."""


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
