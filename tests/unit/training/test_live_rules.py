"""Judging while a training runs: what is reported, how often, and what ends."""

from __future__ import annotations

import re
import signal
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from trainer import cli
from trainer.config import EvidenceSettings, WatchSettings
from trainer.io import notifications
from trainer.io.errors import ArtifactError, TrainingError
from trainer.io.notifications import Event
from trainer.profiling import live_status
from trainer.profiling.evidence import ContextRecord
from trainer.profiling.recorder import Recorder
from trainer.profiling.rules.outcomes import Case
from trainer.training import live_rules
from trainer.training.live_rules import HangWatchdog, LiveRules
from trainer.training.trace import Trace

UNEVEN = ContextRecord(classes={"apple": 100, "quince": 1})
"""What the rule class_imbalance fires on."""
ALWAYS = {"interval_s": 0.0, "budget": 1.0}


class Sink:
    """Stands for MLflow and the terminal: keeps what it gets."""

    run_id = None

    def __init__(self) -> None:
        self.points: list[tuple[int, dict[str, float]]] = []
        self.tags: dict[str, str] = {}
        self.said: list[str] = []

    def metrics(self, step: int, values: Mapping[str, float]) -> None:
        self.points.append((step, dict(values)))

    def tag(self, name: str, text: str) -> None:
        self.tags[name] = text

    def files(self, path: Path) -> None:
        raise AssertionError("a finding is no file")


def train(
    *, steps: int = 5, context: ContextRecord = UNEVEN, active: bool = True, shown_at: str = "", **settings: Any
) -> tuple[Sink, Recorder]:
    """Steps that do nothing, watched."""
    sink = Sink()
    recorder = Recorder(
        EvidenceSettings(operators_steps=0),
        name="distill",
        device=torch.device("cpu"),
        rank=0,
        world_size=1,
        context=context,
    )
    trace = Trace()
    trace.recorder = recorder
    judged = LiveRules(
        trace, WatchSettings(**settings), tracker=sink, say=sink.said.append, active=active, shown_at=shown_at
    )
    with recorder, judged.running(None):
        for step in range(steps):
            with recorder.timeline.step(step), recorder.timeline.span("forward"):
                pass
            judged.after_step(step, {})
    return sink, recorder


def test_the_use_of_the_machine_goes_to_mlflow_under_its_names(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(live_rules, "_SYSTEM_INTERVAL_S", 0.0)
    sink, _ = train(interval_s=1e9)
    assert [step for step, _ in sink.points] == [0, 1, 2, 3, 4]
    assert all(name.startswith("system/") for _, values in sink.points for name in values)


def test_finding_is_reported_once_in_log_and_in_mlflow() -> None:
    sink, _ = train(**ALWAYS)
    (line,) = sink.said
    assert line.startswith(
        "distill  step 1  warning: Class imbalance. Class 'apple' has 100 training images and 'quince' has 1: "
    )
    assert "Add images of the small classes" in line
    assert sink.points == [(0, {"distill/finding/class_imbalance": 1.0})]
    assert sink.tags["trainer.finding.distill.class_imbalance"].startswith("Class 'apple' has 100")


def test_a_rule_of_stop_on_ends_the_training() -> None:
    message = r"^distill: stopped after step 1, as profile.stop_on has class_imbalance: Class 'apple' .* Add images of the small"
    with pytest.raises(TrainingError, match=message):
        train(stop_on=("class_imbalance",), **ALWAYS)


def test_a_rule_of_ones_own_is_reported_sent_and_ends_the_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "live_kitchen.py").write_text(
        "from trainer.profiling.rules.outcomes import Finding\n"
        "def third_step(evidence, thresholds):\n"
        "    found = evidence.ranks[0].record.steps.count >= 3\n"
        "    return Finding(confidence=1.0, text='Three steps.', advice='Stop.') if found else None\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("TRAINER_MODULES", "live_kitchen")
    monkeypatch.setenv("TRAINER_RUN", "kitchen")
    sent: list[Event] = []
    monkeypatch.setattr(notifications.Notifier, "send", lambda self, event: sent.append(event))
    with pytest.raises(
        TrainingError, match=r"^distill: stopped after step 3, as profile.stop_on has third_step: Three"
    ):
        train(rules_from=("live_kitchen",), stop_on=("third_step",), **ALWAYS)
    assert [(event.run, event.training, event.rule, event.step) for event in sent] == [
        ("kitchen", "distill", "class_imbalance", 0),
        ("kitchen", "distill", "third_step", 2),
    ]


def test_each_step_is_a_line_of_the_log_where_asked() -> None:
    sink, _ = train(log_steps=True, interval_s=1e9)
    assert [line.split("  ")[:2] for line in sink.said] == [["distill", f"step {step}"] for step in range(1, 6)]
    number = r"[\d.e-]+ s"
    fields = rf"loader 0 s  forward {number}  backward 0 s  optimizer 0 s  of {number}$"
    assert all(re.search(fields, line) for line in sink.said), sink.said
    assert train(log_steps=True, interval_s=1e9, active=False)[0].said == []


def test_a_running_training_is_watched(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    place = live_status.place(str(tmp_path / "student"), "distill")
    with pytest.raises(ArtifactError, match=r"no training has been judged there yet .*\.live\)"):
        live_status.watch(str(tmp_path), interval_s=0, once=True, show=print)
    with pytest.raises(ArtifactError, match="nowhere: no such folder; give the folder of a run that trains"):
        live_status.watch(str(tmp_path / "nowhere"), interval_s=0, once=False, show=print)
    train(shown_at=place, **ALWAYS)
    (status,) = live_status.read(str(tmp_path))
    assert (status.name, status.state, status.step) == ("distill", "ended", 5)
    assert status.phases["forward"] + status.phases["other"] == pytest.approx(1)
    assert [one.title for one in status.findings] == ["Class imbalance"]
    cli.main(["watch", str(tmp_path), "--once"])
    text = capsys.readouterr().out
    assert text.startswith("Distillation: ended, step 5")
    assert "warning: Class imbalance (step 1). Class 'apple' has 100" in text
    live_status.watch(str(tmp_path), interval_s=0, once=False, show=print)  # it ends with the distillation

    with pytest.raises(TrainingError):
        train(shown_at=place, stop_on=("class_imbalance",), **ALWAYS)
    assert live_status.read(str(tmp_path))[0].state == "failed"
    # What is not seen for long has no sign of life.
    running = status.model_copy(update={"state": "running", "total_steps": 9, "step_p50_ms": 2000.0})
    shown = live_status.screen([running], now_unix=status.written_unix + 59)
    assert "running, step 5/9  2,000 ms a step" in shown
    assert "about 8 s of steps left" in shown
    assert "no sign of life for 5 min" in live_status.screen([running], now_unix=status.written_unix + 300)
    # Short trainings write nothing, and what is damaged is named.
    train(shown_at=str(tmp_path / "short.json"), interval_s=1e9)
    assert not (tmp_path / "short.json").exists()
    Path(place).write_text("{}", encoding="utf-8")
    with pytest.raises(ArtifactError, match="is not the state of a training"):
        live_status.read(str(tmp_path))


def test_without_a_finding_nothing_is_reported_or_ended() -> None:
    sink, _ = train(context=ContextRecord(classes={"apple": 10, "quince": 10}), stop_on=("class_imbalance",), **ALWAYS)
    assert (sink.said, sink.points, sink.tags) == ([], [], {})


def test_other_processes_do_not_judge() -> None:
    sink, recorder = train(active=False, stop_on=("class_imbalance",), **ALWAYS)
    assert sink.said == []
    assert "rules" not in recorder.snapshot().ranks[0].record.overhead


def test_what_judging_costs_is_counted_and_no_part_of_step() -> None:
    record = train(**ALWAYS)[1].snapshot().ranks[0].record
    assert 0 < record.outside["rules"].seconds <= record.overhead["rules"]
    assert record.outside["rules"].count == 5


@pytest.mark.parametrize(
    ("settings", "judged"),
    [
        pytest.param({"interval_s": 3600.0, "budget": 1.0}, 0, id="the interval has not passed"),
        pytest.param({"interval_s": 0.0, "budget": 0.0}, 1, id="the budget is spent"),
    ],
)
def test_judging_is_rare(settings: dict[str, float], judged: int) -> None:
    outside = train(**settings)[1].snapshot().ranks[0].record.outside
    assert (outside["rules"].count if judged else len(outside) - 1) == judged


def test_a_rule_that_fails_costs_no_training(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    def failing(case: Case, own: object) -> None:
        raise ZeroDivisionError("a mistake")

    monkeypatch.setattr(live_rules, "judge", failing)
    sink, _ = train(**ALWAYS)
    assert sink.said == []
    (record,) = caplog.records
    assert record.getMessage() == "distill  is no longer judged while it runs, for that failed"
    assert "a mistake" in caplog.text


LIMIT_S = 120


class Bell:
    """Keeps what an alarm tells, and answers with a message."""

    def __init__(self, message: str = "") -> None:
        self.rung, self.message = threading.Event(), message
        self.reported: list[tuple[float, str]] = []

    def __call__(self, seconds: float, place: str) -> str:
        self.reported.append((seconds, place))
        self.rung.set()
        return self.message


def test_it_rings_once_and_says_how_long_and_where() -> None:
    bell = Bell()
    with HangWatchdog(0.05, paused=lambda: False, on_hang=bell, ends=False):
        assert bell.rung.wait(LIMIT_S)
        time.sleep(0.2)
    ((seconds, place),) = bell.reported
    assert seconds > 0.05
    assert place == "somewhere", "this test is none of the trainer's code"


def test_waiting_main_thread_is_ended_with_message() -> None:
    before = signal.getsignal(signal.SIGUSR1)
    began = time.monotonic()
    watchdog = HangWatchdog(0.05, paused=lambda: False, on_hang=Bell("it hangs"), ends=True)
    with pytest.raises(TrainingError, match=r"^it hangs$"), watchdog:
        threading.Event().wait(LIMIT_S)
    assert time.monotonic() - began < LIMIT_S
    assert signal.getsignal(signal.SIGUSR1) == before


def test_what_is_excused_rings_nothing() -> None:
    bell, excuses = Bell(), []
    with HangWatchdog(0.01, paused=lambda: excuses.append(1) is None, on_hang=bell, ends=True):
        while len(excuses) < 20:
            time.sleep(0.01)
    assert not bell.reported


def test_signs_of_life_put_it_off() -> None:
    bell = Bell()
    began = time.monotonic()
    with HangWatchdog(5, paused=lambda: False, on_hang=bell, ends=True) as watchdog:
        for _ in range(3):
            time.sleep(0.1)
            watchdog.reset()
    assert not bell.reported
    assert time.monotonic() - began < LIMIT_S, "leaving does not wait for the alarm"


def test_in_another_thread_it_tells_but_ends_nothing() -> None:
    bell = Bell("it hangs")

    def hang() -> None:
        with HangWatchdog(0.05, paused=lambda: False, on_hang=bell, ends=True):
            assert bell.rung.wait(LIMIT_S)

    thread = threading.Thread(target=hang)
    thread.start()
    thread.join()
    assert len(bell.reported) == 1


def test_what_ended_during_the_alarm_goes_on() -> None:
    rung, heard = threading.Event(), threading.Event()

    def ring(_seconds: float, _place: str) -> str:
        rung.set()
        assert heard.wait(LIMIT_S)
        return "it hangs"

    before = signal.getsignal(signal.SIGUSR1)
    with HangWatchdog(0.05, paused=lambda: False, on_hang=ring, ends=True):
        assert rung.wait(LIMIT_S)
        threading.Timer(0.2, heard.set).start()
    assert signal.getsignal(signal.SIGUSR1) == before
