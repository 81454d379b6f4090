"""The rules: what slows a training or makes it fail, with the evidence, the cure and what that would save."""

from __future__ import annotations

from collections.abc import Sequence

from trainer.config.rules import RuleSettings
from trainer.profiling.rules import (
    gpu,
    gradients,
    inputs,
    layers,
    learning,
    lifecycle,
    loading,
    processes,
    stalled,
    validation,
    weights,
)
from trainer.profiling.rules.outcomes import Case, NotJudged, Outcome, Rule, SystemRule, TrainingRule
from trainer.profiling.rules.own import OwnRule

_MODULES = (gpu, gradients, inputs, layers, learning, lifecycle, loading, processes, stalled, validation, weights)
_BY_NAME = {
    rule.name: rule
    for module in _MODULES
    for rule in vars(module).values()
    if isinstance(rule, type) and issubclass(rule, Rule) and rule not in (Rule, SystemRule, TrainingRule)
}
RULES: tuple[type[Rule], ...] = tuple(_BY_NAME[name] for name in RuleSettings.model_fields)  # as in docs/rules.md


def judge(case: Case, own: Sequence[OwnRule] = ()) -> dict[Rule | OwnRule, Outcome]:
    """Judge a training by every rule and those of one's own, or by those that allow it while it runs."""
    answers: dict[Rule | OwnRule, Outcome] = {}
    rules: list[Rule | OwnRule] = [*map(case.rule, RULES), *own]
    for rule in rules:
        if rule.live or not case.live:
            group = "own_rules" if isinstance(rule, OwnRule) else "rules"
            off = NotJudged(f"turned off (profile.{group}.{rule.name}.enabled)")
            answers[rule] = rule.judge(case) if rule.enabled else off
    return answers
