import io
import logging

import pytest

from trainer.training import progress_bar
from trainer.training.progress_bar import ProgressBar


class Terminal(io.StringIO):
    def isatty(self):
        return True


def make(**changes):
    return ProgressBar(
        **{"name": "distill", "first_step": 0, "total_steps": 100, "images_per_step": 32, "active": True} | changes
    )


@pytest.fixture
def clock(monkeypatch):
    """Time that the test sets."""
    now = [0.0]
    monkeypatch.setattr(progress_bar.time, "monotonic", lambda: now[0])
    return now


def test_a_log_gets_a_line_every_few_seconds_and_one_at_the_end(caplog, clock):
    caplog.set_level(logging.INFO)
    with make() as shown:
        for step in range(100):
            clock[0] = 1.0 + step
            shown.show(step, {"loss": 0.5})
    lines = caplog.messages
    assert len(lines) == 21
    assert lines[0] == "distill  step 1/100  loss 0.5  32 images/s so far  99 s left"
    assert lines[-1] == "distill  step 100/100  loss 0.5  32 images/s so far  0 s left"


def test_the_speed_within_the_steps_is_shown_where_it_is_measured(caplog, clock):
    caplog.set_level(logging.INFO)
    with make() as shown:
        clock[0] = 10.0
        shown.show(49, {"loss": 0.5}, lambda: 640.0)
    assert caplog.messages == ["distill  step 50/100  loss 0.5  640 images/s  10 s left"]


def test_the_speed_after_a_resume_counts_the_steps_of_this_process(caplog, clock):
    caplog.set_level(logging.INFO)
    with make(first_step=90) as shown:
        clock[0] = 5.0
        shown.show(94, {"loss": 0.5})
    assert caplog.messages == ["distill  step 95/100  loss 0.5  32 images/s so far  5 s left"]


def test_a_terminal_gets_a_bar_with_lines_above_it(monkeypatch, caplog):
    caplog.set_level(logging.INFO)
    terminal = Terminal()
    monkeypatch.setattr("sys.stderr", terminal)
    with make() as shown:
        shown.show(49, {"loss": 0.25})
        shown.say("distill  step 50  validation top-1 90.00%")
    written = terminal.getvalue()
    assert "50/100" in written
    assert "loss 0.25" in written
    assert "distill  step 50  validation top-1 90.00%\n" in written
    assert caplog.messages == []


def test_other_processes_are_silent(caplog):
    caplog.set_level(logging.INFO)
    with make(active=False) as shown:
        shown.show(99, {"loss": 0.5})
        shown.say("nothing")
    assert caplog.messages == []
