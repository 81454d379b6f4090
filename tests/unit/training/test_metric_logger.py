import io
import json
import logging
from contextlib import ExitStack, nullcontext
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from trainer.config import TrainingSettings
from trainer.devices import choose_device
from trainer.devices.process_group import Processes
from trainer.io.errors import TrainingError
from trainer.io.host import AHEAD_VARIABLE
from trainer.training import metric_logger
from trainer.training.metric_logger import MetricLogger, ProgressBar


class Sink:
    """Stands for the evidence, MLflow and the terminal: keeps what it gets."""

    def __init__(self):
        self.metrics_seen, self.shown, self.said, self.scores = [], [], [], []

    def keep(self):
        pass

    def follow(self, *training):
        assert training[:4] == ("distill", 0, 100, TrainingSettings().batch_size)

    def metrics(self, step, values):
        self.metrics_seen.append((step, dict(values)))

    def images_per_second(self):
        raise AssertionError("only a line of the log asks for it")

    rates_apart = images_per_second

    def show(self, step, values, measured, apart):
        self.shown.append(step)

    def say(self, text):
        self.said.append(text)

    def show_scores(self, scores):
        self.scores.append(scores)


@pytest.fixture
def sink():
    return Sink()


@pytest.fixture
def make(monkeypatch, sink):
    monkeypatch.setenv("TRAINER_DEVICE", "cpu")
    monkeypatch.setattr(ProgressBar, "of", lambda *_, **__: nullcontext(sink))
    alone = Processes(rank=0, world_size=1, local_rank=0, device=choose_device())

    def report(log_every=4):
        training = SimpleNamespace(
            name="distill",
            processes=alone,
            settings=TrainingSettings(log_every=log_every),
            total_steps=100,
            learning_rate=lambda step: step / 100,
            names=lambda step, rank: [f"{step}:{rank}:{n}" for n in range(10)],
        )
        metrics = MetricLogger(SimpleNamespace(recorder=sink), Sink())
        stack.enter_context(metrics.running(SimpleNamespace(spec=training, processes=alone, first_step=0)))
        return metrics

    with ExitStack() as stack:
        yield report


def losses(value):
    return {"loss": torch.tensor(float(value)), "label": torch.tensor(2.0 * value, dtype=torch.bfloat16)}


def test_each_interval_gives_one_point_of_means_at_its_last_step(make, sink):
    report = make()
    for step in range(10):
        report.after_step(step, losses(step))
    assert sink.shown == [3, 7]
    report.before_checkpoint()
    report.before_checkpoint()
    assert sink.metrics_seen == [
        (3, {"loss": 1.5, "label": 3.0, "learning_rate": 0.03}),
        (7, {"loss": 5.5, "label": 11.0, "learning_rate": 0.07}),
        (9, {"loss": 8.5, "label": 17.0, "learning_rate": 0.09}),
    ]


def test_after_a_flush_the_next_interval_holds_the_steps_since(make, sink):
    report = make()
    for step in range(2):
        report.after_step(step, losses(step))
    report.before_checkpoint()
    for step in range(2, 4):
        report.after_step(step, losses(step))
    assert [(step, values["loss"]) for step, values in sink.metrics_seen] == [(1, 0.5), (3, 2.5)]


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_the_first_step_that_is_not_finite_is_named_with_its_samples(make, sink, bad):
    report = make(log_every=8)
    message = r"distill: the loss is not finite at step 3 \(process 0; samples 2:0:0, .*2:0:7 and 2 more\); lower distill base"
    for step in range(7):
        report.after_step(step, losses(bad if step in {2, 5} else 1.0))
    with pytest.raises(TrainingError, match=message):
        report.after_step(7, losses(1.0))
    assert sink.shown == []
    (last, known), (first, unknown) = sink.metrics_seen  # for the rule that says when it was last well
    assert (last, known, first) == (1, {"loss": 1.0, "label": 2.0}, 2)
    assert not np.isfinite([*unknown.values()]).any()


def test_a_flush_before_a_checkpoint_checks_too(make):
    report = make(log_every=100)
    report.after_step(0, losses(float("nan")))
    with pytest.raises(TrainingError, match="step 1 "):
        report.before_checkpoint()


def test_validation_is_shown(make, sink):
    make().after_validation(4, {"val_top1": 0.5})
    assert sink.scores == ["validation top-1 50.00%"]
    assert sink.metrics_seen == [(4, {"val_top1": 0.5})]


class Terminal(io.StringIO):
    def isatty(self):
        return True


def bar(**changes):
    return ProgressBar(
        **{"name": "distill", "first_step": 0, "total_steps": 100, "images_per_step": 32, "active": True} | changes
    )


@pytest.fixture
def clock(monkeypatch):
    """Time that the test sets."""
    now = [0.0]
    monkeypatch.setattr(metric_logger.time, "monotonic", lambda: now[0])
    return now


def test_a_log_gets_a_line_every_few_seconds_and_one_at_the_end(caplog, clock):
    caplog.set_level(logging.INFO)
    with bar() as shown:
        for step in range(100):
            clock[0] = 1.0 + step
            if step == 40:
                shown.show_scores("validation top-1 50.00%")
            shown.show(step, {"loss": 0.5})
        shown.show_scores("validation top-1 60.00%")
    *lines, last = caplog.messages
    assert len(lines) == 5
    assert "validation" not in lines[1]
    assert "  loss 0.5  validation top-1 50.00%  32 images/s" in lines[2]
    assert last == "distill  validation top-1 60.00%", "the last one comes after the last step"
    assert lines[0] == "distill  step 1/100  loss 0.5  32 images/s so far  99 s left"
    assert lines[-1] == "distill  step 100/100  loss 0.5  validation top-1 50.00%  32 images/s so far  0 s left"


def test_the_later_trainings_count_where_the_run_has_told_their_work(caplog, clock, monkeypatch):
    caplog.set_level(logging.INFO)
    monkeypatch.setenv(AHEAD_VARIABLE, json.dumps({"mae": 2.5}))
    for name in ("mae", "finetune"):
        with bar(name=name) as shown:
            clock[0] += 20.0
            shown.show(19, {"loss": 0.5})
    own, last = caplog.messages
    assert own.endswith("80 s left, about 5.5 min with the later trainings"), (
        "100 s in all, 2.5 times as long for the later"
    )
    assert last.endswith("80 s left")


def test_the_speed_within_the_steps_is_shown_where_it_is_measured(caplog, clock):
    caplog.set_level(logging.INFO)
    with bar() as shown:
        clock[0] = 10.0
        shown.show(49, {"loss": 0.5}, lambda: 320.0)
        clock[0] = 100.0
        shown.show(50, {"loss": 0.5}, lambda: 320.0, lambda: {"loader": 330.2, "step": 900.0})
    first, then = caplog.messages
    assert first == "distill  step 50/100  loss 0.5  320 images/s  5 s left"
    assert then.startswith("distill  step 51/100  loss 0.5  320 images/s (loader 330, step 900)  ")


def test_steps_that_compiled_do_not_count_for_the_time_left(caplog, clock):
    caplog.set_level(logging.INFO)
    with bar() as shown:
        for step, now in ((9, 300.0), (19, 330.0), (59, 450.0)):
            clock[0] = now
            shown.show(step, {"loss": 0.5}, lambda: 64.0)
    assert [message.rpartition("  ")[2] for message in caplog.messages] == ["45 s left", "240 s left", "120 s left"]


def test_the_speed_after_a_resume_counts_the_steps_of_this_process(caplog, clock):
    caplog.set_level(logging.INFO)
    with bar(first_step=90) as shown:
        clock[0] = 5.0
        shown.show(94, {"loss": 0.5})
    assert caplog.messages == ["distill  step 95/100  loss 0.5  32 images/s so far  5 s left"]


def test_the_time_left_knows_that_later_steps_are_slower(caplog, clock):
    caplog.set_level(logging.INFO)
    with bar(work=lambda steps: steps - 0.75 * min(steps, 60)) as shown:
        clock[0] = 10.0
        shown.show(39, {"loss": 0.5})
    assert caplog.messages == ["distill  step 40/100  loss 0.5  128 images/s so far  45 s left"]


def test_a_bar_shows_the_later_trainings_first(monkeypatch, clock):
    terminal = Terminal()
    monkeypatch.setattr("sys.stderr", terminal)
    monkeypatch.setenv(AHEAD_VARIABLE, json.dumps({"distill": 2.5}))
    with bar() as shown:
        clock[0] = 20.0
        shown.show(19, {"loss": 0.5})
        shown.show(19, {"loss": 0.5})
    assert "about 5.5 min with later trainings  loss 0.5" in terminal.getvalue()


def test_a_terminal_gets_a_bar_with_lines_above_it(monkeypatch, caplog):
    caplog.set_level(logging.INFO)
    terminal = Terminal()
    monkeypatch.setattr("sys.stderr", terminal)
    with bar() as shown:
        shown.show(49, {"loss": 0.25})
        shown.show_scores("validation top-1 90.00%")
        shown.say(f"distill  step 50  note: {'a long text of many words, ' * 9}.")
    written = terminal.getvalue()
    note = [line for line in written.splitlines() if "many words" in line]
    assert len(note) > 1
    assert all(len(line.rpartition("\r")[2]) <= 80 for line in note)
    assert "50/100" in written
    assert "loss 0.25" in written
    assert "validation top-1 90.00%" in written
    assert caplog.messages == []


def test_other_processes_are_silent(caplog):
    caplog.set_level(logging.INFO)
    with bar(active=False) as shown:
        shown.show(99, {"loss": 0.5})
        shown.say("nothing")
    assert caplog.messages == []
