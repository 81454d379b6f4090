"""The rules: what slows a training or makes it fail, with the evidence, the cure and what that would save."""

from __future__ import annotations

from trainer.config.rules import RuleSettings
from trainer.profiling.rules import gpu, learning, lifecycle, loading, processes, stalled, weights
from trainer.profiling.rules.outcomes import Case, NotJudged, Outcome, Rule, SystemRule, TrainingRule

_MODULES = (gpu, learning, lifecycle, loading, processes, stalled, weights)
_BY_NAME = {
    rule.name: rule
    for module in _MODULES
    for rule in vars(module).values()
    if isinstance(rule, type) and issubclass(rule, Rule) and rule not in (Rule, SystemRule, TrainingRule)
}
RULES: tuple[type[Rule], ...] = tuple(_BY_NAME[name] for name in RuleSettings.model_fields)  # as in docs/rules.md


def judge(case: Case) -> dict[Rule, Outcome]:
    """Judge a training by every rule, or by those that allow it while it runs."""
    return {
        rule: rule.judge(case) if rule.enabled else NotJudged(f"turned off (profile.rules.{rule.name}.enabled)")
        for rule in map(case.rule, RULES)
        if rule.live or not case.live
    }
