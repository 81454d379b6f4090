"""Judges a training while it runs: a finding shows at once in the log and in MLflow, and can end the training."""

from __future__ import annotations

import time
from collections.abc import Callable

from trainer.config import WatchSettings
from trainer.errors import TrainingError
from trainer.profiling.recorder import Recorder
from trainer.profiling.rules import judge
from trainer.profiling.rules.outcomes import Case, Finding, Judgement
from trainer.tracking import Tracker


class Watch:
    """Judges what the first process has recorded so far, every now and then; tells each finding once.

    What is judged, and when, changes nothing that is trained.
    """

    def __init__(
        self, recorder: Recorder, settings: WatchSettings, *, tracker: Tracker, say: Callable[[str], None], active: bool
    ) -> None:
        """Of the training that `recorder` records.

        Args:
            recorder: has what was recorded so far, and takes what judging costs.
            settings: which rules, how often, and which of them end the training.
            tracker: takes findings to MLflow.
            say: shows a line.
            active: whether this process judges; one of them is enough.
        """
        self._recorder, self._settings = recorder, settings
        self._tracker, self._say, self._active = tracker, say, active
        self._due = time.perf_counter() + settings.interval_s
        self._told: set[str] = set()

    def look(self, step: int) -> None:
        """After a step: judge, if it is time.

        Raises:
            TrainingError: a rule of `stop_on` has a finding.
        """
        began = time.perf_counter()
        if not self._active or began < self._due:
            return
        findings = self._judge()
        seconds = time.perf_counter() - began
        self._recorder.cost("rules", seconds)
        self._due = began + max(self._settings.interval_s, seconds / max(self._settings.budget, 1e-9))
        for judgement, finding in findings:
            self._tell(step, judgement, finding)
        self._stop(step, findings)

    def _judge(self) -> list[tuple[Judgement, Finding]]:
        """What was not told yet."""
        case = Case(training=self._recorder.snapshot(), rules=self._settings.rules, live=True)
        return [
            (judgement, judgement.outcome)
            for judgement in judge(case)
            if isinstance(judgement.outcome, Finding) and judgement.rule.name not in self._told
        ]

    def _tell(self, step: int, judgement: Judgement, finding: Finding) -> None:
        rule, name = judgement.rule, self._recorder.name
        self._told.add(rule.name)
        self._say(f"{name}  step {step + 1}  {finding.severity}: {rule.title}: {finding.text} Advice: {finding.advice}")
        self._tracker.metrics(step, {f"{name}/finding/{rule.name}": 1.0})
        self._tracker.tag(f"trainer.finding.{name}.{rule.name}", f"{finding.text} Advice: {finding.advice}")

    def _stop(self, step: int, findings: list[tuple[Judgement, Finding]]) -> None:
        for judgement, finding in findings:
            if judgement.rule.name in self._settings.stop_on:
                raise TrainingError(
                    f"{self._recorder.name}: stopped after step {step + 1}, for profile.stop_on has {judgement.rule.name}: "
                    f"{finding.text} {finding.advice}"
                )
