"""How fast a training is, by the page, the rules and the log, on the same evidence."""

from __future__ import annotations

import logging
from collections.abc import Callable
from html import unescape

import numpy as np
import pytest

from tests.unit.profiling.rules.synthetic import GPU, STEPS, case_of, judge_by, rank_of, steps_of, together
from trainer.io import formatting
from trainer.profiling.evidence import CommunicationRecord, TrainingEvidence, images_per_second, measured_steps
from trainer.profiling.profile_report import build
from trainer.profiling.recorder import LoaderStats, Recorder
from trainer.profiling.rules.lifecycle import StepOutliers
from trainer.profiling.rules.outcomes import Finding
from trainer.profiling.rules.processes import Communication
from trainer.profiling.training_summary import summarize
from trainer.report.billing import make_bill
from trainer.training.metric_logger import ProgressBar


def page_of(training: TrainingEvidence) -> str:
    return unescape(build([(training, summarize(training))], [], make_bill([]), top_operators=5))


def test_images_a_second_agree(record: Callable[..., Recorder], caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    recorder = record(steps=40)
    with ProgressBar("distill", first_step=0, total_steps=40, images_per_step=1, active=True) as progress:
        progress.show(39, {"loss": 0.5}, recorder.images_per_second)
    training = recorder.snapshot()
    shown = summarize(training).images_per_second
    assert recorder.images_per_second() == shown
    assert shown is not None
    assert f"  {shown:.0f} images/s  " in caplog.messages[0]
    assert f"<b>{formatting.short(shown)}</b><span>images a second" in page_of(training).replace("\n", "")


def test_first_step_and_those_of_profiler_are_not_measured() -> None:
    profiled = np.array([0.0, 0.0, 1.0, 0.0])
    assert measured_steps({"profiled": profiled}).tolist() == [1, 3]
    steps = {"profiled": profiled, "images": np.full(4, 8.0), "seconds": np.array([100.0, 1.0, 50.0, 3.0])}
    assert images_per_second(steps) == 16 / 4
    assert images_per_second(steps | {"images": np.zeros(4)}) is None
    assert images_per_second({name: column[:0] for name, column in steps.items()}) is None
    assert measured_steps({"profiled": profiled[:1]}).tolist() == [0], (
        "where nothing else remains, the first step counts"
    )


def test_loader_and_step_are_shown_apart() -> None:
    """The loader's two processes take a second for eight images each, and three quarters of every step are waiting."""
    loader = LoaderStats(workers=2)
    assert loader.images_per_second is None
    for _ in range(3):
        loader.batch_made(8, 1.0)
    assert loader.images_per_second == 16
    steps = steps_of(data=30.0, forward=10.0)
    case = case_of(rank_of(steps, loader_images_per_second=16.0))
    summary = summarize(case.training)
    assert summary.images_per_second is not None
    assert summary.step_images_per_second == pytest.approx(
        summary.images_per_second * steps["seconds"][5] / (steps["seconds"][5] - steps["data"][5])
    )
    page = page_of(case.training).replace("\n", "")
    assert "<b>16</b><span>images a second that the loader gives" in page
    assert f"<b>{formatting.short(summary.step_images_per_second)}</b><span>images a second that the step takes" in page


def test_median_steps_agree() -> None:
    """Other programs take a third of every step, and the rule compares what is left; the median is that of the steps as they were."""
    numbers = np.arange(STEPS)
    steps = steps_of(forward=np.where(numbers % 50 == 20, 400.0, 17.0), host_delayed_seconds=8.0)
    case = case_of(rank_of(steps))
    found, summary = judge_by(StepOutliers, case), summarize(case.training)
    assert isinstance(found, Finding)
    assert summary.step_ms is not None
    assert found.numbers["median_step_ms"] == summary.step_ms.p50 == pytest.approx(25.0)
    assert "median of all steps 25 ms" in found.text
    assert f"A step takes {formatting.milliseconds(25.0)} (median" in page_of(case.training)


@pytest.mark.parametrize("device", ["cpu", GPU])
def test_shares_of_communication_agree(device: str) -> None:
    traveling = CommunicationRecord(steps=50, backward_s=0.002, exchange_s=0.012, hidden_s=0.002)
    case = case_of(*together(*[steps_of(backward=12)] * 2, device=device, communication=traveling))
    found, summary = judge_by(Communication, case), summarize(case.training)
    assert isinstance(found, Finding)
    assert found.numbers["communication_share"] == summary.communication_share == pytest.approx(0.5)
    assert "50 % of an undisturbed step waits for gradients that travel" in page_of(case.training)


def test_one_process_has_no_share_of_communication() -> None:
    case = case_of()
    assert summarize(case.training).communication_share is None
    assert "waits for gradients" not in page_of(case.training)
