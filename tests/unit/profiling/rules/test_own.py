"""Rules from outside of the package: modules and entry points."""

from __future__ import annotations

from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any

import pytest

from tests.unit.profiling.rules.synthetic import case_of
from trainer import config
from trainer.config import ProfileSettings
from trainer.io.errors import SettingsError
from trainer.profiling.rules import judge, own
from trainer.profiling.rules.outcomes import Finding, Healthy, NotJudged, Outcome

SOURCE = """
from trainer.config.rules import Thresholds
from trainer.profiling.evidence import TrainingEvidence
from trainer.profiling.rules.outcomes import Finding

class ManySteps(Thresholds):
    most: int = 100

def many_steps(evidence: TrainingEvidence, thresholds: ManySteps):
    count = evidence.ranks[0].record.steps.count
    return Finding(confidence=1.0, text=f"{count} steps", advice="Stop.") if count > thresholds.most else None

def broken(evidence, thresholds):
    return 1 / 0

def of_another_kind(evidence, thresholds):
    return True

def _helper(evidence, thresholds):
    raise AssertionError("is no rule")

def other(argument):
    raise AssertionError("is no rule")
"""


@pytest.fixture(autouse=True)
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "kitchen_rules.py").write_text(SOURCE)
    (tmp_path / "no_rules.py").write_text("")
    (tmp_path / "twice.py").write_text("def class_imbalance(evidence, thresholds): ...")
    (tmp_path / "numbers_alone.py").write_text("def rule(evidence, thresholds: float): ...")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("TRAINER_MODULES", "kitchen_rules, no_rules twice,gone,numbers_alone")
    for name in ("kitchen_rules", "no_rules", "twice", "numbers_alone"):
        monkeypatch.delitem(__import__("sys").modules, name, raising=False)


def answers(**thresholds: Any) -> dict[str, Outcome]:
    rules = own.load(["kitchen_rules"], thresholds)
    return {rule.name: outcome for rule, outcome in judge(case_of(), rules).items() if rule in rules}


def test_a_module_adds_rules(caplog: pytest.LogCaptureFixture) -> None:
    found = answers()
    assert list(found) == ["many_steps", "broken", "of_another_kind"]
    assert found["many_steps"] == Finding(confidence=1.0, text="110 steps", advice="Stop.")
    assert found["broken"] == NotJudged("the rule failed: ZeroDivisionError: division by zero")
    assert "1 / 0" in caplog.text
    assert found["of_another_kind"] == NotJudged(
        "the rule returned bool; it may return Finding, Healthy, NotJudged or None"
    )
    assert answers(many_steps={"most": 110})["many_steps"] == Healthy("Nothing was found.")
    off = answers(many_steps={"enabled": False})["many_steps"]
    assert off == NotJudged("turned off (profile.own_rules.many_steps.enabled)")


def test_installed_packages_add_rules(monkeypatch: pytest.MonkeyPatch) -> None:
    entries = [EntryPoint("too_many", "kitchen_rules:many_steps", "vit_distillation.rules")]
    monkeypatch.setattr("importlib.metadata.entry_points", lambda group: entries if group == entries[0].group else [])
    (rule,) = own.load([], {"too_many": {"most": 109}})
    assert (rule.title, rule.judge(case_of())) == (
        "Too many",
        Finding(confidence=1.0, text="110 steps", advice="Stop."),
    )
    with pytest.raises(SettingsError, match=r"profile\.stop_on: 'too_mny' is no rule.*too_many"):
        own.check(ProfileSettings(rules_from=(), stop_on=()).model_copy(update={"stop_on": ("too_mny",)}))


@pytest.mark.parametrize(
    ("modules", "thresholds", "message"),
    [
        (["os"], {}, r"profile\.rules_from=os runs code .* set TRAINER_MODULES=os in the environment"),
        (["gone"], {}, r"profile\.rules_from=gone: cannot be imported .* PYTHONPATH"),
        (["no_rules"], {}, r"profile\.rules_from=no_rules: has no function of \(evidence, thresholds\)"),
        (["twice"], {}, r"'class_imbalance' belongs to another rule; rename"),
        (["numbers_alone"], {}, r"the thresholds of rule must be of a subclass of trainer\.config\.rules\.Thresholds"),
        (
            ["kitchen_rules"],
            {"many_step": {}},
            r"profile\.own_rules\.many_step: there is no such rule; .* has many_steps",
        ),
        (["kitchen_rules"], {"many_steps": {"most": "x"}}, r"profile\.own_rules\.many_steps\.most"),
        (["kitchen_rules"], {"many_steps": {"least": 1}}, r"profile\.own_rules\.many_steps\.least"),
    ],
)
def test_what_is_no_rule_is_named(modules: list[str], thresholds: dict[str, Any], message: str) -> None:
    with pytest.raises(SettingsError, match=message):
        own.load(modules, thresholds)


def test_settings_name_rules_of_ones_own() -> None:
    overrides = "profile.rules_from=kitchen_rules profile.own_rules={many_steps={most=3}} profile.stop_on=many_steps"
    settings = config.resolve("digits", overrides)
    assert settings.distill.watch is not None
    for section in (settings.profile, settings.distill.watch):
        assert section.own_rules == {"many_steps": {"most": 3}}
        assert (section.rules_from, section.stop_on) == (("kitchen_rules",), ("many_steps",))
    own.check(settings.profile)
    with pytest.raises(SettingsError, match="'many_steps' is no rule"):
        config.resolve("digits", "profile.stop_on=many_steps")
    with pytest.raises(SettingsError, match=r"'many_step' is no rule.*many_steps"):
        own.check(settings.profile.model_copy(update={"stop_on": ("many_step",)}))
