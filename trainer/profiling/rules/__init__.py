"""The rules: what slows a training or makes it fail, with the evidence, the cure and what that would save."""

from __future__ import annotations

from collections.abc import Sequence

from trainer.profiling.rules.outcomes import Case, Judgement, NotJudged, Outcome, Rule
from trainer.profiling.rules.system import SYSTEM_RULES
from trainer.profiling.rules.training import TRAINING_RULES

RULES: Sequence[Rule] = (*SYSTEM_RULES, *TRAINING_RULES)


def judge(case: Case) -> list[Judgement]:
    """Judge a training by every rule, or by those that allow it while it runs."""
    return [
        Judgement(rule=rule, training=case.training.name, outcome=_outcome(rule, case))
        for rule in RULES
        if rule.live or not case.live
    ]


def _outcome(rule: Rule, case: Case) -> Outcome:
    if not getattr(case.rules, rule.name).enabled:
        return NotJudged(reason=f"turned off (profile.rules.{rule.name}.enabled)")
    return rule.judge(case)
