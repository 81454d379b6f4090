"""A training in which nothing happens; evidence is synthetic."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from tests.unit.profiling.rules.synthetic import STEPS, case_of, judge_by, rank_of, steps_of
from trainer.profiling.evidence import CompilationRecord, Spans
from trainer.profiling.rules.outcomes import Case, Finding, Healthy, NotJudged
from trainer.profiling.rules.stalled import StalledTraining


def with_pause(seconds: float, *, before: int = 50) -> dict[str, Any]:
    """Steps of ten milliseconds, with so much time between two of them."""
    steps = steps_of(STEPS)
    return steps | {"start_s": steps["start_s"] + np.where(np.arange(STEPS) >= before, seconds, 0)}


def with_span(case: Case, seconds: float) -> Case:
    """A validation at the end of the 50th step."""
    rank = case.training.ranks[0]
    start = rank.steps["start_s"][49] + rank.steps["seconds"][49]
    spans = Spans(names=["evaluate"], start_s=np.array([start]), seconds=np.array([seconds]))
    return replace(case, training=replace(case.training, ranks=[replace(rank, spans=spans)]))


@pytest.mark.parametrize(("seconds", "fires"), [(1799.9, False), (1800.1, True)])
def test_a_pause_between_two_steps(seconds: float, fires: bool) -> None:
    outcome = judge_by(StalledTraining, case_of(rank_of(with_pause(seconds))))
    assert isinstance(outcome, Finding if fires else Healthy)
    if isinstance(outcome, Finding):
        assert outcome.text.startswith("No step ended for 1,800 s between steps 50 and 51 (limit 1800 s)")
        assert outcome.saving is not None
        assert outcome.saving.seconds == pytest.approx(1800, abs=1)
        assert outcome.steps == (49, 50)


def test_pauses_that_are_accounted_for() -> None:
    case = case_of(rank_of(with_pause(4000.0)))
    assert isinstance(judge_by(StalledTraining, with_span(case, 3000.0)), Healthy)
    assert isinstance(judge_by(StalledTraining, with_span(case, 1000.0)), Finding)

    # Compilation accounts for its time.
    def judged(seconds: float) -> object:
        record = {"compilations": (CompilationRecord(step=50, graphs=1, seconds=seconds),)}
        return judge_by(StalledTraining, case_of(rank_of(with_pause(4000.0), **record)))

    assert isinstance(judged(3000.0), Healthy)
    assert isinstance(judged(1000.0), Finding)

    # Every tenth of steps of 200 seconds.
    steps = {name: values[::10] for name, values in steps_of(STEPS, forward=200_000.0).items()}
    assert isinstance(judge_by(StalledTraining, case_of(rank_of(steps))), Healthy)
    # One step tells nothing.
    assert isinstance(judge_by(StalledTraining, case_of(rank_of(steps_of(1)))), NotJudged)
    # A step that hangs.
    data = np.full(STEPS, 1.0)
    data[20] = 2e6  # milliseconds
    finding = judge_by(StalledTraining, case_of(rank_of(steps_of(STEPS, data=data))))
    assert isinstance(finding, Finding)
    assert "between steps 20 and 21" in finding.text
