"""How a training starts, what interrupts it, what grows, and what watching it costs; evidence is synthetic."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.unit.profiling.rules.synthetic import GPU, STEPS, case_of, rank_of, steps_of, together
from trainer.profiling.evidence import Evidence, RankEvidence, TrainingEvidence
from trainer.profiling.evidence_schema import CompilationRecord, ContextRecord
from trainer.profiling.findings import judged
from trainer.profiling.rules.lifecycle import (
    gpu_memory_growth,
    own_overhead,
    recompilation,
    start_up,
    step_outliers,
)
from trainer.profiling.rules.outcomes import Finding, Healthy, NotJudged, Rule
from trainer.thresholds import OwnOverhead, RuleSettings

NUMBERS = np.arange(STEPS)


def outcome_of(rule: Rule, *ranks: RankEvidence, **thresholds: Any) -> Any:
    return rule.judge(case_of(*ranks, rules=RuleSettings(**thresholds)))


def fires(rule: Rule, *ranks: RankEvidence, **thresholds: Any) -> bool:
    return isinstance(outcome_of(rule, *ranks, **thresholds), Finding)


# -- start-up


def test_a_start_of_more_than_twenty_minutes() -> None:
    parts = {"imports": 30.0, "fetch": 300.0, "compile": 600.0, "first_step": 260.0}
    assert not fires(start_up, rank_of(startup=parts))
    found = outcome_of(start_up, rank_of(startup=parts | {"first_step": 271.0}))
    assert isinstance(found, Finding)
    assert found.text.startswith("The first step ended only after 20.0 min: compile 10.0 min, fetch 5.0 min")
    assert found.advice.index("compiled graphs") < found.advice.index("TRAINER_CACHE")
    assert found.saving is not None
    assert found.saving.seconds == 900


def test_a_start_up_that_no_cache_shortens_saves_nothing_known() -> None:
    found = outcome_of(start_up, rank_of(startup={"join": 2000.0}))
    assert isinstance(found, Finding)
    assert found.saving is None


@pytest.mark.parametrize(
    ("seconds", "stage_s", "kind"),
    [
        pytest.param(60.0, 70.0, Finding, id="a minute of seventy seconds"),
        pytest.param(60.0, 239.0, Finding, id="just above a quarter"),
        pytest.param(60.0, 241.0, Healthy, id="just below a quarter"),
        pytest.param(60.0, 86_400.0, Healthy, id="a minute of a day"),
        pytest.param(29.0, 35.0, Healthy, id="what loading torch takes"),
        pytest.param(60.0, None, Healthy, id="the stage still runs"),
    ],
)
def test_a_start_up_is_set_against_its_stage(seconds: float, stage_s: float | None, kind: type) -> None:
    outcome = start_up.judge(case_of(rank_of(startup={"launch": seconds}), stage_s=stage_s))
    assert isinstance(outcome, kind)
    if isinstance(outcome, Finding):
        assert outcome.severity == "note"
        assert f"{seconds / (stage_s or 1):.0%} of the stage's" in outcome.text
        assert outcome.advice.endswith("a longer training bears a start-up better.")


def test_a_start_of_more_than_twenty_minutes_is_a_warning_in_a_long_stage_too() -> None:
    outcome = start_up.judge(case_of(rank_of(startup={"fetch": 1201.0}), stage_s=86_400.0))
    assert isinstance(outcome, Finding)
    assert outcome.severity == "warning"


def test_the_stage_of_a_training_is_all_its_trainings_with_their_start_ups() -> None:
    """A minute before the first training is half of it, and a tenth of the stage."""
    first = rank_of(name="mae", startup={"launch": 60.0, "first_step": 1.0}, first_step_s=1.0, ended_s=60.0)
    second = rank_of(name="finetune", startup={"preparation": 10.0}, ended_s=470.0, began_unix=100.0)
    trainings = [TrainingEvidence(name=one.record.name, ranks=[one], metrics={}) for one in (first, second)]

    def noted(*given: TrainingEvidence) -> bool:
        answers = judged(Evidence(path=Path(), fingerprint="", trainings=given), RuleSettings())
        return any(one.rule == "start_up" and isinstance(one.outcome, Finding) for one in answers)

    assert noted(trainings[0])
    assert not noted(*trainings)


def test_a_start_up_that_was_not_recorded_is_not_judged() -> None:
    assert isinstance(outcome_of(start_up, rank_of()), NotJudged)
    assert isinstance(outcome_of(start_up, rank_of(first_step_s=None)), NotJudged)


# -- outliers


def test_single_steps_that_take_far_longer() -> None:
    hangs = np.where(NUMBERS % 50 == 20, 200.0, 2.0)
    found = outcome_of(step_outliers, rank_of(steps_of(forward=hangs)))
    assert isinstance(found, Finding)
    assert found.text.startswith("2 of 100 steps")
    assert "`forward`" in found.text
    assert found.steps == (20, 70)
    assert found.saving is not None
    assert found.saving.seconds == pytest.approx(2 * 0.198)


def test_outliers_must_cost_something() -> None:
    assert not fires(step_outliers, rank_of(steps_of(forward=np.where(NUMBERS == 50, 20.0, 2.0))))
    assert fires(step_outliers, rank_of(steps_of(forward=np.where(NUMBERS == 50, 60.0, 2.0))))


def test_the_first_steps_and_stalls_are_no_outliers() -> None:
    assert not fires(step_outliers, rank_of(steps_of(forward=np.where(NUMBERS < 10, 500.0, 2.0))))
    stall = rank_of(steps_of(forward=np.where(NUMBERS == 50, 2e6, 2.0)))
    assert not fires(step_outliers, stall)


def test_the_last_step_which_ends_the_loader_processes_is_no_outlier() -> None:
    ends = steps_of(data=np.where(NUMBERS == STEPS - 1, 500.0, 1.0))
    assert not fires(step_outliers, rank_of(ends, context=ContextRecord(total_steps=STEPS)))
    assert fires(step_outliers, rank_of(ends, context=ContextRecord(total_steps=STEPS + 1)))


def test_measurements_of_the_recorder_and_a_core_that_was_taken_are_no_outliers() -> None:
    hangs = np.where(NUMBERS % 50 == 20, 200.0, 0.0)
    assert not fires(step_outliers, rank_of(steps_of(recorder=hangs)))
    assert not fires(step_outliers, rank_of(steps_of(forward=2 + hangs, host_delayed_seconds=hangs)))


def test_a_core_that_was_taken_from_another_process_is_no_outlier_either() -> None:
    hangs = np.where(NUMBERS % 50 == 20, 200.0, 0.0)
    held_up = together(steps_of(backward=2 + hangs), steps_of(forward=2 + hangs, host_delayed_seconds=hangs))
    assert not fires(step_outliers, *held_up)
    assert fires(step_outliers, *together(steps_of(backward=2 + hangs), steps_of(forward=2 + hangs)))


def test_waiting_for_slow_loading_is_no_outlier() -> None:
    waits = np.where(NUMBERS % 10 == 0, 300.0, 1.0)
    late = rank_of(steps_of(data=waits, queued=0), workers=1, device=GPU, cores=2, system={"loaders_cpu_percent": 99.0})
    assert isinstance(outcome_of(step_outliers, late), NotJudged | Healthy)


# -- memory


@pytest.mark.parametrize("signal", ["process_private_bytes", "process_rss_bytes", "gpu_memory_allocated_bytes"])
def test_memory_that_grows_all_the_time(signal: str) -> None:
    def rank(growth: float) -> RankEvidence:
        return rank_of(system={signal: 1e9 * np.linspace(1, 1 + growth, 100)})

    assert not fires(gpu_memory_growth, rank(0.05))
    assert fires(gpu_memory_growth, rank(0.12))
    assert not fires(gpu_memory_growth, rank(-0.12))


def test_memory_that_jumps_or_settles_does_not_leak() -> None:
    settles = 1e9 * (2 - np.exp(-np.arange(100) / 10))
    jumps = 1e9 * np.where(np.arange(100) < 60, 1.0, 1.5)
    assert not fires(gpu_memory_growth, rank_of(system={"process_private_bytes": settles}))
    assert not fires(gpu_memory_growth, rank_of(system={"process_private_bytes": jumps}))


def test_mapped_files_are_no_leak() -> None:
    system = {"process_rss_bytes": 1e9 * np.linspace(1, 2, 100), "process_private_bytes": 1e9}
    assert not fires(gpu_memory_growth, rank_of(system=system))


def test_the_finding_says_when_memory_will_be_full() -> None:
    half = 4 * 2**30
    found = outcome_of(gpu_memory_growth, rank_of(system={"process_private_bytes": half * np.linspace(0.5, 1, 100)}))
    assert isinstance(found, Finding)
    assert "from 2669 MiB to 3972 MiB" in found.text
    assert found.numbers["bytes_an_hour"] == pytest.approx(half * 0.5 / (STEPS * 0.010) * 3600, rel=0.05)


def test_few_samples_of_memory_are_not_judged() -> None:
    assert isinstance(outcome_of(gpu_memory_growth, rank_of(samples=20, system={"process_rss_bytes": 1e9})), NotJudged)
    assert isinstance(outcome_of(gpu_memory_growth, rank_of()), NotJudged)


# -- compilation


def compiled(*at: int) -> RankEvidence:
    return rank_of(compilations=tuple(CompilationRecord(step=step, graphs=2, seconds=30.0) for step in at))


def test_graphs_compiled_late() -> None:
    assert isinstance(outcome_of(recompilation, rank_of()), NotJudged)
    assert not fires(recompilation, compiled(0, 9))
    found = outcome_of(recompilation, compiled(0, 10, 50))
    assert isinstance(found, Finding)
    assert found.text.startswith("4 graphs were compiled again after 10 steps (first after step 10)")
    assert found.saving is not None
    assert found.saving.seconds == 60


# -- what watching costs


def test_watching_that_costs_more_than_a_hundredth() -> None:
    def rank(seconds: float) -> RankEvidence:
        return rank_of(overhead={"marks": seconds / 2, "tensors": seconds / 2}, ended_s=100.0)

    assert not fires(own_overhead, rank(0.9))
    assert not fires(own_overhead, rank_of(overhead={"operators": 50.0, "marks": 0.5}, ended_s=100.0))
    found = outcome_of(own_overhead, rank(2.0))
    assert isinstance(found, Finding)
    assert found.saving is not None
    assert found.saving.seconds == pytest.approx(1.0)


def test_a_short_recording_says_nothing_of_its_cost() -> None:
    short = rank_of(overhead={"tensors": 5.0}, ended_s=59.0)
    assert "lasts 59.0 s" in str(outcome_of(own_overhead, short))
    assert fires(own_overhead, short, own_overhead=OwnOverhead(fewest_seconds=0))
    assert isinstance(outcome_of(own_overhead, rank_of(ended_s=100.0)), NotJudged)
