"""What the page says of slow steps; evidence is synthetic."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from tests.unit.profiling.rules.synthetic import STEPS, rank_of, steps_of
from trainer.profiling import profile_report
from trainer.profiling.evidence import CompilationRecord, RankEvidence, Spans, TrainingEvidence
from trainer.profiling.training_summary import summarize
from trainer.report.pages import Table

SLOW = 60
"""The step that takes 100 ms in place of 10, counted from 0."""
NUMBERS = np.arange(STEPS)
FORWARD = np.where(NUMBERS == SLOW, 92.0, 2.0)
SAMPLES = 120
"""Ten milliseconds each, as long as a step; the slow one covers ten of them."""


def recorded(system: Mapping[str, Any] | None = None, **given: Any) -> RankEvidence:
    return rank_of(steps_of(forward=FORWARD, **given.pop("columns", {})), system=system, samples=SAMPLES, **given)


def then(usual: float, now: float) -> Sequence[float]:
    """A signal that is `now` while the slow step runs."""
    ends = np.linspace(0, 1.19, SAMPLES + 1)[1:]
    return list(np.where((ends > 0.6) & (ends <= 0.71), now, usual))


def cause(rank: RankEvidence) -> str:
    """Read what the table says may have slowed the slowest step."""
    training = TrainingEvidence(name="distill", ranks=[rank], metrics={})
    shown = profile_report.lengths(training, summarize(training))
    assert shown is not None
    [table] = [block for block in shown.blocks if isinstance(block, Table)]
    [row] = [row for row in table.rows if row[0] == f"{SLOW + 1}"]  # counted from 1
    return str(row[-1])


@pytest.mark.parametrize(
    ("system", "expected"),
    [
        ({"iowait_percent": then(1, 40)}, "waiting for storage 40 % (usually "),
        ({"swap_in_bytes_per_s": then(0, 3e7)}, "memory swapped, "),
        (
            {"cpu0_percent": then(50, 100), "cpu1_percent": then(50, 100), "process_cpu_percent": 90.0},
            "cores busy with other programs 55 % (usually ",
        ),
    ],
)
def test_causes_of_a_slow_step_are_named(system: Mapping[str, Any], expected: str) -> None:
    assert cause(recorded(system)).startswith(expected)


@pytest.mark.parametrize(
    "system",
    [
        pytest.param({"gpu_percent": then(95, 5)}, id="an idle GPU is what a slow step leads to"),
        pytest.param({"network_received_bytes_per_s": then(0, 1e9)}, id="network"),
        pytest.param({"disk_write_bytes_per_s": then(0, 1e9)}, id="a disk that nothing waits for"),
        pytest.param({"disk_read_bytes_per_s": then(1e9, 0)}, id="less than usual"),
        pytest.param({"iowait_percent": then(40, 1)}, id="less waiting than usual"),
        pytest.param({"iowait_percent": then(1, 5)}, id="hardly any waiting"),
        pytest.param(
            {"cpu0_percent": then(0, 100), "cpu1_percent": 0.0, "process_cpu_percent": 0.0}, id="a core is free"
        ),
        pytest.param(
            {"cpu0_percent": then(50, 100), "cpu1_percent": then(50, 100), "process_cpu_percent": then(90, 198)},
            id="the training's own work",
        ),
        pytest.param({"process_cpu_percent": 90.0}, id="nothing unusual"),
    ],
)
def test_what_cannot_slow_a_step_is_not_named(system: Mapping[str, Any]) -> None:
    assert cause(recorded(system)) == "nothing that slows a step"


def test_without_samples_of_the_machine_that_is_said() -> None:
    assert cause(recorded()) == "not sampled"


def test_several_causes_of_a_slow_step() -> None:
    queued = np.where(NUMBERS == SLOW, 0.0, 2.0)
    assert cause(recorded(columns={"queued": queued})) == "no batch was ready"
    assert cause(recorded(columns={"queued": np.zeros(STEPS)})) == "not sampled", "it is always empty"
    compilations = (CompilationRecord(step=SLOW, graphs=2, seconds=0.05),)
    assert cause(recorded(compilations=compilations)) == "2 graphs were compiled"
    delayed = np.where(NUMBERS == SLOW, 50.0, 0.0)
    assert cause(recorded(columns={"host_delayed_seconds": delayed})) == "no core for the training for 50 ms"


@pytest.mark.parametrize(
    ("name", "ends_s", "expected"),
    [
        ("checkpoint", 0.5995, "just after a checkpoint"),
        ("evaluate", 0.6, "just after an evaluation"),
        ("checkpoint", 0.5, "not sampled"),
        ("checkpoint", 0.8, "not sampled"),
        ("rules", 0.6, "not sampled"),
    ],
)
def test_step_just_after_checkpoint_or_evaluation(name: str, ends_s: float, expected: str) -> None:
    """The slow step starts after 0.6 s."""
    spans = Spans(names=[name], start_s=np.array([ends_s - 0.05]), seconds=np.array([0.05]))
    assert cause(replace(recorded(), spans=spans)) == expected
