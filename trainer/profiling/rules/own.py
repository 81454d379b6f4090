"""Rules from outside of this package: functions of modules that `profile.rules_from` names, and entry points of installed packages.

    # kitchen_rules.py
    class SlowStart(Thresholds):
        largest_s: float = 60.0

    def slow_start(evidence: TrainingEvidence, thresholds: SlowStart) -> Finding | None:
        first_s = evidence.ranks[0].record.first_step_s or 0.0
        if first_s > thresholds.largest_s:
            return Finding(confidence=0.9, text=f"The first step ended after {first_s:.0f} s.", advice="Warm the cache.")
        return None

A module gives each function whose name has no underscore in front and whose two arguments are called `evidence` and `thresholds`. A
setting may come from elsewhere, so its modules are imported only where `TRAINER_MODULES` lists them.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import inspect
import logging
import os
import re
import typing
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from trainer.config import ProfileSettings, validate
from trainer.config.rules import RULES_GROUP, RuleSettings, Thresholds
from trainer.io.base_models import nearest
from trainer.io.errors import SettingsError
from trainer.io.host import MODULES_VARIABLE
from trainer.profiling.rules.outcomes import Case, Finding, Healthy, NotJudged, Outcome

logger = logging.getLogger(__name__)


@dataclass(frozen=True, eq=False, kw_only=True)
class OwnRule:
    """A function that judges a training, with its thresholds."""

    name: str  # of the function or the entry point
    function: Callable[..., Any]  # returns an `Outcome` or None
    thresholds: Thresholds

    @property
    def enabled(self) -> bool:
        return self.thresholds.enabled

    @property
    def live(self) -> bool:
        """Whether it may judge while the training runs, when only the first process's record exists."""
        return True

    @property
    def title(self) -> str:
        return self.name.replace("_", " ").capitalize()

    def judge(self, case: Case) -> Outcome:
        """Judge a training; None of the function is healthy, and an exception leaves the training not judged."""
        try:
            outcome = self.function(case.training, self.thresholds)
        except Exception as error:  # a rule that fails must not cost the report or the training
            logger.warning("the rule %s failed", self.name, exc_info=True)
            return NotJudged(f"the rule failed: {type(error).__name__}: {error}")
        if outcome is None:
            return Healthy("Nothing was found.")
        if isinstance(outcome, Finding | Healthy | NotJudged):
            return outcome
        return NotJudged(
            f"the rule returned {type(outcome).__name__}; it may return Finding, Healthy, NotJudged or None"
        )


def load(modules: Sequence[str], thresholds: Mapping[str, Mapping[str, Any]]) -> tuple[OwnRule, ...]:
    """Load the rules of these modules, and of entry points of the group `RULES_GROUP`.

    Args:
        modules: as in `profile.rules_from`.
        thresholds: name of a rule -> its thresholds that differ from their defaults, as in `profile.own_rules`.

    Raises:
        SettingsError: a module is not allowed or not there, a rule is not a function of two arguments or has the name of another, or
            thresholds are of no rule or wrong.
    """
    found: dict[str, OwnRule] = {}
    for origin, name, function in _functions(modules):
        if name in RuleSettings.model_fields or name in found:
            raise SettingsError(f"{origin}: the name {name!r} belongs to another rule; rename the function")
        if not callable(function) or len(inspect.signature(function).parameters) != 2:
            raise SettingsError(f"{origin}: the rule {name} must be a function of (evidence, thresholds)")
        last = [*inspect.signature(function).parameters][1]
        kind = typing.get_type_hints(function).get(last, Thresholds)
        if not (isinstance(kind, type) and issubclass(kind, Thresholds)):
            raise SettingsError(
                f"{origin}: the {last} of {name} must be of a subclass of trainer.config.rules.Thresholds"
            )
        checked = validate(kind, thresholds.get(name, {}), prefix=f"profile.own_rules.{name}")
        found[name] = OwnRule(name=name, function=function, thresholds=checked)
    if unknown := sorted(thresholds.keys() - found.keys()):
        raise SettingsError(
            f"profile.own_rules.{unknown[0]}: there is no such rule; profile.rules_from has {', '.join(found) or 'none'}"
        )
    return tuple(found.values())


def check(settings: ProfileSettings) -> None:
    """Load the rules of the settings; a `SettingsError` as `load`, or where `stop_on` names a rule that is not there."""
    known = {rule.name for rule in load(settings.rules_from, settings.own_rules)} | RuleSettings.model_fields.keys()
    for name in settings.stop_on:
        if name not in known:
            raise SettingsError(f"profile.stop_on: {name!r} is no rule{nearest(name, known)}; docs/rules.md has all")


def _functions(modules: Sequence[str]) -> Iterator[tuple[str, str, Any]]:
    """Give the origin, the name and the function of each rule."""
    for entry in sorted(importlib.metadata.entry_points(group=RULES_GROUP), key=lambda entry: entry.name):
        origin = f"entry point {entry.name} = {entry.value}"
        try:
            yield origin, entry.name, entry.load()
        except (ImportError, AttributeError) as error:
            raise SettingsError(f"{origin}: cannot be loaded ({error}); mend or uninstall its package") from error
    allowed = re.split(r"[,\s]+", os.environ.get(MODULES_VARIABLE, ""))
    for name in modules:
        if name not in allowed:
            raise SettingsError(
                f"profile.rules_from={name} runs code of that module, which is not allowed here; if you trust it, set "
                f"{MODULES_VARIABLE}={name} in the environment"
            )
        try:
            module = importlib.import_module(name)
        except ImportError as error:
            raise SettingsError(
                f"profile.rules_from={name}: cannot be imported ({error}); install it, or put its folder into PYTHONPATH"
            ) from error
        rules = {
            each: function
            for each, function in vars(module).items()
            if inspect.isfunction(function)
            and not each.startswith("_")
            and [*inspect.signature(function).parameters] == ["evidence", "thresholds"]
        }
        if not rules:
            raise SettingsError(f"profile.rules_from={name}: has no function of (evidence, thresholds)")
        yield from ((f"profile.rules_from={name}", each, function) for each, function in rules.items())
