"""The rules together."""

from __future__ import annotations

from typing import Any

import pytest

from tests.unit.profiling.rules.learning import case_of, measured
from tests.unit.profiling.rules.synthetic import all_fired, on_xla, steps_of
from trainer.config import EvidenceSettings
from trainer.profiling import rules
from trainer.profiling.rules import judge
from trainer.profiling.rules.lifecycle import StartUp
from trainer.profiling.rules.outcomes import Finding, NotJudged, Rule, SystemRule, TrainingRule

RULES = [kind() for kind in rules.RULES]


def test_every_class_of_rules_is_one_of_the_rules() -> None:
    assert {*map(type, RULES)} == {*SystemRule.__subclasses__(), *TrainingRule.__subclasses__()}


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.name)
def test_a_rule_says_what_it_is(rule: Rule) -> None:
    what, fires, needs, advises = rule.texts()
    assert all([rule.title, what, fires, needs, advises])
    for name in type(rule).model_fields.keys() - {"enabled"}:
        assert f"`{name}`" in fires + needs, f"docs/rules.md does not say what {name} is for"


def test_rule_applies_where_it_can() -> None:
    case = case_of(rules={"start_up": {"enabled": False}})
    assert judge(case)[case.rule(StartUp)] == NotJudged(reason="turned off (profile.rules.start_up.enabled)")
    # A running training is judged by live rules only.
    assert list(judge(case_of(live=True))) == [rule for rule in RULES if rule.live]
    # A healthy training on xla fires nothing.
    assert all_fired(on_xla()) == []
    # Rules can say that they cannot say.
    empty = case_of(steps={name: values[:0] for name, values in case_of().training.ranks[0].steps.items()})
    for rule, outcome in judge(empty).items():
        assert not isinstance(outcome, Finding), rule.name
    # A longer training does not help where a signal is off.
    weights = {"exploding_gradients", "vanishing_gradients", "update_ratio", "unchanged_weights"}
    assert weights <= short(tensors=measured(1)), "the first step is always measured"
    assert not weights & short(tensors=measured(0)), "measurements are turned off"
    off = EvidenceSettings(operators_steps=0)
    few = {"steps": steps_of(21)}
    assert "host_syncs" in short(**few), "the window opens after the 20th step, for three"
    assert "host_syncs" not in short(**few, settings=off)
    assert "host_syncs" not in short(), "all 110 steps passed, and yet there is no window"
    assert not {"stragglers", "batch_size", "low_recorded_mass", "start_up"} & short(**few), "do not apply"


def short(**given: Any) -> set[str]:
    """Rules that a longer training would let judge."""
    return {
        rule.name
        for rule, outcome in judge(case_of(**given)).items()
        if isinstance(outcome, NotJudged) and outcome.too_short
    }
