"""Judges a training while it runs: a finding shows at once in the log and in MLflow, and can end the training."""

from __future__ import annotations

import logging
import math
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from types import FrameType
from typing import Any, NoReturn, Self

from trainer.config import WatchSettings
from trainer.io import storage
from trainer.io.errors import PreemptedError, TrainingError
from trainer.io.notifications import Event, Notifier
from trainer.profiling import live_status
from trainer.profiling.evidence import TrainingEvidence
from trainer.profiling.live_status import LiveFinding, State
from trainer.profiling.rules import judge
from trainer.profiling.rules.outcomes import Case, Finding, Rule
from trainer.profiling.rules.own import OwnRule
from trainer.profiling.rules.own import load as load_rules
from trainer.profiling.rules.stalled import StalledTraining, hanging
from trainer.profiling.timeline import span, step_line
from trainer.report import tracking
from trainer.report.tracking.stage_runs import Tracker
from trainer.training.background import LAST_WAIT_S, BackgroundWriter
from trainer.training.loop import Hook, Trainer
from trainer.training.spec import Losses
from trainer.training.trace import Trace

logger = logging.getLogger(__name__)

_SIGNAL = signal.SIGUSR1
_OWN = "trainer."
_SYSTEM_INTERVAL_S = 5.0  # between two points of the machine's use in MLflow


class HangWatchdog:
    """A thread that calls `on_hang` once if `reset` was not called for too long.

    It can end a training that hangs in Python, waiting for a loader process, a file or a lock: a signal interrupts the main thread. Where
    torch waits, for a device or another process, torch's own limits end it.
    """

    def __init__(
        self, seconds: float, *, paused: Callable[[], bool], on_hang: Callable[[float, str], str], ends: bool
    ) -> None:
        """Watch the current thread; time does not count while `paused()`.

        The watchdog's thread calls `on_hang` with the seconds since the last reset and the place in the code, and raises the message that
        it returns in the main thread if it `ends`.
        """
        self._seconds, self._paused, self._on_hang = seconds, paused, on_hang
        self._watched = threading.current_thread()
        self._ends = ends and self._watched is threading.main_thread()
        self._seen = time.monotonic()
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._wait, name="hang-watchdog", daemon=True)
        self._message = f"ended by {_SIGNAL.name}"
        self._before: Any = None

    def __enter__(self) -> Self:
        if self._ends:
            self._before = signal.signal(_SIGNAL, self._end)
        self._seen = time.monotonic()
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._closing.set()
        self._thread.join()
        if self._ends:
            signal.signal(_SIGNAL, self._before or signal.SIG_DFL)

    def reset(self) -> None:
        """Begin to count anew: the training is alive."""
        self._seen = time.monotonic()

    def _wait(self) -> None:
        while not self._closing.wait(self._seconds / 10):
            if self._paused():
                self.reset()
            elif (silent := time.monotonic() - self._seen) > self._seconds:
                self._message = self._on_hang(silent, _place(self._watched))
                if self._ends and not self._closing.is_set():  # what hung may have come to its end meanwhile
                    signal.pthread_kill(self._watched.ident or 0, _SIGNAL)
                return

    def _end(self, _number: int, _frame: FrameType | None) -> NoReturn:
        raise TrainingError(self._message)


def _place(thread: threading.Thread) -> str:
    """Where a thread is, in this project's code."""
    frame = sys._current_frames().get(thread.ident or 0)
    while frame is not None and not frame.f_globals.get("__name__", "").startswith(_OWN):
        frame = frame.f_back
    if frame is None:
        return "somewhere"
    return f"{frame.f_globals['__name__']}.{frame.f_code.co_qualname} (line {frame.f_lineno})"


class LiveRules(Hook):
    """Judges the recording of the first process at intervals, reports each rule's finding once, and logs the machine's use.

    What is judged, and when, changes nothing that is trained.
    """

    def __init__(
        self,
        trace: Trace,
        settings: WatchSettings,
        *,
        tracker: Tracker,
        say: Callable[[str], None],
        active: bool,
        shown_at: str = "",
    ) -> None:
        """Judge the recording of `trace`, which records the cost of that too.

        Args:
            say: shows a line.
            active: whether to judge; one process is enough.
            shown_at: URI of the file that `python -m trainer watch` reads; empty: none is written.
        """
        self._trace, self._settings = trace, settings
        self._tracker, self._say, self._active = tracker, say, active
        self._own = load_rules(settings.rules_from, settings.own_rules) if active else ()
        self._began = self._due = self._spent = self._logged_s = 0.0
        self._step = 0
        self._reported: set[str] = set()
        self._notifier = Notifier() if active else None
        self._shown_at, self._findings = shown_at, list[LiveFinding]()
        self._shown, self._writer = False, BackgroundWriter("watch")
        self._watchdog: HangWatchdog | None = None

    @contextmanager
    def running(self, trainer: Trainer) -> Iterator[None]:  # noqa: ARG002  # the trace has all
        stalled = StalledTraining.of(self._settings.rules)
        self._began = time.perf_counter()
        self._due = self._began + self._settings.interval_s
        with ExitStack() as stack:
            if self._notifier is not None:
                stack.callback(self._notifier.close)
            if self._active and stalled.enabled:
                recorder = self._trace.recorder
                timeline = recorder.timeline
                watchdog = HangWatchdog(
                    stalled.seconds,
                    paused=lambda: timeline.first_step_s is None or timeline.is_beside_steps or recorder.is_compiling,
                    on_hang=lambda seconds, place: self._report(stalled, hanging(seconds, self._step, place)),
                    ends=stalled.name in self._settings.stop_on,
                )
                self._watchdog = stack.enter_context(watchdog)
            if self._active and self._settings.log_steps:
                self._trace.recorder.timeline.on_step = self._say_step
            try:
                yield
            except PreemptedError:  # it resumes
                raise
            except BaseException:
                self._show("failed")
                raise
            self._show("ended")

    def _say_step(self, step: int, seconds: float, ranges: Mapping[str, float]) -> None:
        self._say(f"{self._trace.recorder.name}  step {step + 1}  {step_line(seconds, ranges)}")

    def _show(self, state: State, evidence: TrainingEvidence | None = None) -> None:
        """Write the state of the training for `watch`; of its end only where it was written before."""
        if not self._shown_at or (evidence is None and not self._shown):
            return
        if not self._writer.wait(LAST_WAIT_S if evidence is None else 0):
            return  # the store is slow, and the next state is as good
        self._shown = True
        status = live_status.status_of(
            evidence or self._trace.recorder.snapshot(),
            step=self._step + 1,
            interval_s=self._settings.interval_s,
            findings=self._findings,
            state=state,
        )
        content = status.model_dump_json(indent=2).encode()
        self._writer.start(
            lambda: storage.write_bytes(self._shown_at, content), f"its state is not at {self._shown_at}"
        )
        if evidence is None:
            self._writer.wait(LAST_WAIT_S)

    def after_step(self, step: int, losses: Losses) -> None:  # noqa: ARG002  # the trace has them
        """Judge, if it is time; a `TrainingError` if a rule of `stop_on` has a finding."""
        if not self._active:
            return
        self._step = step
        if self._watchdog is not None:
            self._watchdog.reset()
        now_s, monitor = self._trace.recorder.timeline.now_s(), self._trace.recorder.monitor
        if monitor is not None and now_s >= self._logged_s + _SYSTEM_INTERVAL_S:
            self._tracker.metrics(step, monitor.for_mlflow(self._logged_s))
            self._logged_s = now_s
        if time.perf_counter() < self._due:
            return
        evidence, found = self._judge()
        messages = [(rule, self._report(rule, finding)) for rule, finding in found]
        if evidence is not None:
            self._show("running", evidence)
        for rule, message in messages:
            if rule.name in self._settings.stop_on:
                raise TrainingError(message)

    def _judge(self) -> tuple[TrainingEvidence | None, list[tuple[Rule | OwnRule, Finding]]]:
        """Return what was judged, None where that failed, and the findings that were not reported yet."""
        began = time.perf_counter()
        try:
            with span("rules"):
                evidence = self._trace.recorder.snapshot()
                case = Case(training=evidence, rules=self._settings.rules, live=True)
                answers = judge(case, self._own)
        except Exception:  # a rule that fails must not cost the training that it is to save
            logger.warning(
                "%s  is no longer judged while it runs, for that failed", self._trace.recorder.name, exc_info=True
            )
            self._due = math.inf
            return None, []
        now = time.perf_counter()
        self._spent += now - began
        self._trace.recorder.cost("rules", now - began)
        self._due = max(now + self._settings.interval_s, self._began + self._spent / max(self._settings.budget, 1e-9))
        found = [(rule, outcome) for rule, outcome in answers.items() if isinstance(outcome, Finding)]
        new = [(rule, finding) for rule, finding in found if rule.name not in self._reported]
        return evidence, new

    def _report(self, rule: Rule | OwnRule, finding: Finding) -> str:
        """Pass a finding on; gives the message for a training that it ends."""
        name, step, text = self._trace.recorder.name, self._step, f"{finding.text} {finding.advice}"
        self._reported.add(rule.name)
        self._findings.append(LiveFinding(severity=finding.severity, title=rule.title, text=text, step=step))
        first, _, _ = finding.text.partition(". ")  # the page has the rest
        self._say(
            f"{name}  step {step + 1}  {finding.severity}: {rule.title}. {first.removesuffix('.')}. {finding.advice}"
        )
        self._tracker.metrics(step, {f"{name}/finding/{rule.name}": 1.0})
        self._tracker.tag(f"trainer.finding.{name}.{rule.name}", text)
        if self._notifier is not None:
            run = os.environ.get(tracking.RUN, "")
            event = Event(event="finding", run=run, severity=finding.severity, title=rule.title, text=text)
            self._notifier.send(replace(event, training=name, rule=rule.name, step=step))
        return f"{name}: stopped after step {step + 1}, as profile.stop_on has {rule.name}: {text.removesuffix('.')}"
