"""Which finding explains others, how much of a training is left, and how names are listed."""

from __future__ import annotations

from collections.abc import Sequence

from trainer.profiling.rules.outcomes import Case, Finding, NotJudged, Rule, Saving

_NAMED = 3


def first_cause(case: Case, *rules: Rule) -> NotJudged | None:
    """The answer of a rule that looks at what others cause: not judged where one of `rules` fires; None where none does."""
    for rule in rules:
        if getattr(case.rules, rule.name).enabled and isinstance(rule.judge(case), Finding):
            return NotJudged(reason=f"what there is to see may come from another finding: {rule.title.lower()}")
    return None


def saving_after(case: Case, since_s: float, why: str) -> Saving:
    """What ending the training at a moment saves: the time to its end, which the steps so far foretell while it runs."""
    record = case.training.ranks[0].record
    total, done = record.context.total_steps, record.steps.count
    left = (total - done) * record.steps.seconds / done if case.live and total and done else 0.0
    return Saving(
        seconds=max(0.0, record.ended_s - since_s) + max(0.0, left),
        reason=f"the training's time after that, in which {why}",
    )


def listed(names: Sequence[str]) -> str:
    """The first names and how many more there are."""
    shown, more = ", ".join(names[:_NAMED]), len(names) - _NAMED
    return f"{shown} and {more} more" if more > 0 else shown
