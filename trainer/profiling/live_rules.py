"""Judges a training while it runs: a finding shows at once in the log and in MLflow, and can end the training."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable
from contextlib import ExitStack
from types import TracebackType
from typing import Self

from trainer.config import WatchSettings
from trainer.errors import TrainingError
from trainer.profiling.hang_watchdog import HangWatchdog
from trainer.profiling.recorder import Recorder
from trainer.profiling.rules import judge
from trainer.profiling.rules.lifecycle import hanging, stalled_training
from trainer.profiling.rules.outcomes import Case, Finding, Rule
from trainer.profiling.spans import span
from trainer.tracking.stage_runs import Tracker

logger = logging.getLogger(__name__)


class LiveRules:
    """Judges what the first process has recorded so far, every now and then; reports each rule's finding once.

    What is judged, and when, changes nothing that is trained.

    with watch:
        for step in ...:
            watch.check(step)
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
        self._began = self._due = self._spent = 0.0
        self._step = 0
        self._reported: set[str] = set()
        self._watchdog: HangWatchdog | None = None
        self._open = ExitStack()

    def __enter__(self) -> Self:
        stalled = self._settings.rules.stalled_training
        self._began = time.perf_counter()
        self._due = self._began + self._settings.interval_s
        if self._active and stalled.enabled:
            ends = stalled_training.name in self._settings.stop_on
            watchdog = HangWatchdog(stalled.seconds, paused=self._is_paused, on_hang=self._hangs, ends=ends)
            self._watchdog = self._open.enter_context(watchdog)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._open.close()

    def check(self, step: int) -> None:
        """After a step: judge, if it is time.

        Raises:
            TrainingError: a rule of `stop_on` has a finding.
        """
        if not self._active:
            return
        self._step = step
        if self._watchdog is not None:
            self._watchdog.reset()
        if time.perf_counter() < self._due:
            return
        for rule, finding in self._judge():
            message = self._report(rule, finding)
            if rule.name in self._settings.stop_on:
                raise TrainingError(message)

    def _judge(self) -> list[tuple[Rule, Finding]]:
        """What was not reported yet, those that end the training last."""
        began = time.perf_counter()
        try:
            with span("rules"):
                found = self._found()
        except Exception:  # a rule that fails must not cost the training that it is to save
            logger.warning("%s  is no longer judged while it runs, for that failed", self._recorder.name, exc_info=True)
            self._due = math.inf
            return []
        now = time.perf_counter()
        self._spent += now - began
        self._recorder.cost("rules", now - began)
        self._due = max(now + self._settings.interval_s, self._began + self._spent / max(self._settings.budget, 1e-9))
        new = [(rule, finding) for rule, finding in found if rule.name not in self._reported]
        return sorted(new, key=lambda pair: pair[0].name in self._settings.stop_on)

    def _found(self) -> list[tuple[Rule, Finding]]:
        case = Case(training=self._recorder.snapshot(), rules=self._settings.rules, live=True)
        return [(answer.rule, answer.outcome) for answer in judge(case) if isinstance(answer.outcome, Finding)]

    def _report(self, rule: Rule, finding: Finding) -> str:
        """Pass a finding on; gives the message for a training that it ends."""
        name, step, text = self._recorder.name, self._step, f"{finding.text} {finding.advice}"
        self._reported.add(rule.name)
        self._say(f"{name}  step {step + 1}  {finding.severity}: {rule.title}. {text}")
        self._tracker.metrics(step, {f"{name}/finding/{rule.name}": 1.0})
        self._tracker.tag(f"trainer.finding.{name}.{rule.name}", text)
        return f"{name}: stopped after step {step + 1}, as profile.stop_on has {rule.name}: {text.removesuffix('.')}"

    def _is_paused(self) -> bool:
        timeline = self._recorder.timeline
        return timeline.first_step_ended_ns is None or timeline.is_beside_steps or self._recorder.is_compiling

    def _hangs(self, seconds: float, place: str) -> str:
        return self._report(stalled_training, hanging(seconds, self._step, place))
