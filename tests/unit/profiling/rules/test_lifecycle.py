"""How a training starts, what interrupts it, what grows, and what watching it costs; evidence is synthetic."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.unit.profiling.rules.synthetic import (
    GPU,
    STEPS,
    all_fired,
    case_of,
    finding,
    judge_by,
    on_xla,
    rank_of,
    steps_of,
)
from trainer.config.rules import RuleSettings
from trainer.profiling.evidence import CompilationRecord, ContextRecord, Evidence, RankEvidence, TrainingEvidence
from trainer.profiling.findings import judged
from trainer.profiling.rules.lifecycle import (
    GpuMemoryGrowth,
    OwnOverhead,
    Recompilation,
    StartUp,
    StepOutliers,
    UnevenSteps,
)
from trainer.profiling.rules.outcomes import Finding, Healthy, NotJudged, Rule

NUMBERS = np.arange(STEPS)


def outcome_of(kind: type[Rule], *ranks: RankEvidence, **thresholds: Any) -> Any:
    return judge_by(kind, case_of(*ranks, rules=RuleSettings(**thresholds)))


def fires(kind: type[Rule], *ranks: RankEvidence, **thresholds: Any) -> bool:
    return isinstance(outcome_of(kind, *ranks, **thresholds), Finding)


# -- start-up


def test_slow_start() -> None:
    parts = {"imports": 30.0, "fetch": 300.0, "compile": 600.0, "first_step": 260.0}
    assert not fires(StartUp, rank_of(startup=parts))
    found = outcome_of(StartUp, rank_of(startup=parts | {"first_step": 271.0}))
    assert isinstance(found, Finding)
    assert found.text.startswith("The first step ended only after 20 min: compile 10 min, fetch 5 min")
    assert found.advice.index("compiled graphs") < found.advice.index("TRAINER_CACHE")
    assert found.saving is not None
    assert found.saving.seconds == 900

    # A minute before the first training is half of it, and a tenth of the stage.
    first = rank_of(name="mae", startup={"launch": 60.0, "first_step": 1.0}, first_step_s=1.0, ended_s=60.0)
    second = rank_of(name="finetune", startup={"preparation": 10.0}, ended_s=470.0, began_unix=100.0)
    trainings = [TrainingEvidence(name=one.record.name, ranks=[one], metrics={}) for one in (first, second)]

    def noted(*given: TrainingEvidence) -> bool:
        answers = judged(Evidence(path=Path(), fingerprint="", trainings=given), RuleSettings())
        return any(one.rule == "start_up" and isinstance(one.outcome, Finding) for one in answers)

    assert noted(trainings[0])
    assert not noted(*trainings)
    # A start up that was not recorded is not judged.
    assert isinstance(outcome_of(StartUp, rank_of()), NotJudged)
    assert isinstance(outcome_of(StartUp, rank_of(first_step_s=None)), NotJudged)


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
    outcome = judge_by(StartUp, case_of(rank_of(startup={"launch": seconds}), stage_s=stage_s))
    assert isinstance(outcome, kind)
    if isinstance(outcome, Finding):
        assert outcome.severity == "note"
        assert f"{seconds / (stage_s or 1):.0%} of the stage's" in outcome.text
        assert outcome.advice.endswith("a longer training bears a start-up better.")


# -- uneven steps, and outliers


def test_uneven_steps() -> None:
    def turns(slow_ms: float, every: int = 2, **given: Any) -> RankEvidence:
        return rank_of(steps_of(backward=2 + slow_ms * (NUMBERS % every == 0)), **given)

    # Of a median step of 10 + slow / 2 milliseconds a change by slow is more than half from 6.7 on.
    assert not fires(UnevenSteps, turns(6.5))
    assert all_fired(turns(7)) == ["uneven_steps"]
    found = outcome_of(UnevenSteps, turns(20))
    assert "changes by 100% of the median step (20 ms), most of it in `backward`" in found.text
    assert found.advice.startswith("Look at what `backward` does in every few steps")
    assert found.saving is not None
    assert found.saving.seconds == pytest.approx(0.5 * 110 * 0.020, rel=0.02)
    # Cores are full from 90 percent on, which counts where the time without one was not recorded.
    unknown = steps_of(backward=2 + 20 * (NUMBERS % 2 == 0), host_delayed_seconds=np.nan)
    cores = {"cpu0_percent": 100.0, "cpu1_percent": 82.0, "process_cpu_percent": 80.0, "loaders_cpu_percent": 20.0}
    assert "OMP_NUM_THREADS=2" in outcome_of(UnevenSteps, rank_of(unknown, system=cores)).advice
    assert "OMP_NUM_THREADS" not in outcome_of(UnevenSteps, turns(20, system=cores)).advice
    cores["cpu1_percent"] = 78.0
    assert "OMP_NUM_THREADS" not in outcome_of(UnevenSteps, rank_of(unknown, system=cores)).advice
    # Rare slow steps are outliers, a slow drift is none of both, and little time is not worth a finding.
    assert not fires(UnevenSteps, turns(200, every=25))
    assert not fires(UnevenSteps, rank_of(steps_of(backward=2 + NUMBERS.astype(float))))
    assert not fires(UnevenSteps, turns(20), uneven_steps={"share": 0.51})
    assert fires(UnevenSteps, turns(20), uneven_steps={"share": 0.49})
    # Time without a core is not the steps' own, and a running training sees one process alone.
    taken = 20 * (NUMBERS % 2 == 0)
    steps = steps_of(
        backward=2 + taken, host_cpu_seconds=10, host_delayed_seconds=taken, host_backward_delayed_seconds=taken
    )
    assert not fires(UnevenSteps, rank_of(steps))
    assert isinstance(judge_by(UnevenSteps, case_of(turns(20, world_size=2), live=True)), NotJudged)
    assert isinstance(judge_by(UnevenSteps, case_of(turns(20), live=True)), Finding)
    # Heavy tails are one finding.
    tails = np.exp(np.random.default_rng(0).normal(size=STEPS) * 1.5) * 20
    assert all_fired(rank_of(steps_of(backward=tails))) == ["uneven_steps"]
    assert all_fired(rank_of(steps_of(backward=tails)), rules={"uneven_steps": {"enabled": False}}) == ["step_outliers"]


def test_step_outliers() -> None:
    hangs = np.where(NUMBERS % 50 == 20, 200.0, 2.0)
    found = outcome_of(StepOutliers, rank_of(steps_of(forward=hangs)))
    assert isinstance(found, Finding)
    assert found.text.startswith("2 of 100 steps")
    assert "`forward`" in found.text
    assert found.text.endswith("The longest was step 21."), "the first one is step 1"
    assert found.steps == (20, 70)
    assert found.saving is not None
    assert found.saving.seconds == pytest.approx(2 * 0.198)
    # Outliers must cost something, and one alone is an accident.
    assert not fires(StepOutliers, rank_of(steps_of(forward=np.where(NUMBERS % 50 == 20, 10.0, 2.0))))
    assert fires(StepOutliers, rank_of(steps_of(forward=np.where(NUMBERS % 50 == 20, 30.0, 2.0))))
    assert not fires(StepOutliers, rank_of(steps_of(forward=np.where(NUMBERS == 50, 59e3, 2.0))))
    assert fires(StepOutliers, rank_of(steps_of(forward=np.where(NUMBERS == 50, 61e3, 2.0))))
    # In a thinned record one row stands for several steps.
    one = rank_of(steps_of(forward=np.where(NUMBERS == 50, 5.9e3, 2.0)))
    steps = one.record.steps.model_copy(update={"kept_of": 10, "count": 10 * STEPS})
    thinned = replace(one, record=one.record.model_copy(update={"steps": steps}))
    assert (fires(StepOutliers, one), fires(StepOutliers, thinned)) == (False, True)
    # The first steps and stalls are no outliers.
    assert not fires(StepOutliers, rank_of(steps_of(forward=np.where(NUMBERS < 10, 500.0, 2.0))))
    stall = rank_of(steps_of(forward=np.where(NUMBERS == 50, 2e6, 2.0)))
    assert not fires(StepOutliers, stall)
    # The last step which ends the loader processes is no outlier.
    ends = steps_of(data=np.where(np.isin(NUMBERS, [50, STEPS - 1]), 500.0, 1.0))
    assert not fires(StepOutliers, rank_of(ends, context=ContextRecord(total_steps=STEPS)))
    assert fires(StepOutliers, rank_of(ends, context=ContextRecord(total_steps=STEPS + 1)))
    # Measurements of the recorder and a core that was taken are no outliers.
    hangs = np.where(NUMBERS % 50 == 20, 200.0, 0.0)
    assert not fires(StepOutliers, rank_of(steps_of(recorder=hangs)))
    assert not fires(StepOutliers, rank_of(steps_of(forward=2 + hangs, host_delayed_seconds=hangs)))
    # Waiting for slow loading is no outlier.
    waits = np.where(NUMBERS % 10 == 0, 300.0, 1.0)
    late = rank_of(steps_of(data=waits, queued=0), workers=1, device=GPU, cores=2, system={"loaders_cpu_percent": 99.0})
    assert isinstance(outcome_of(StepOutliers, late), NotJudged | Healthy)


# -- memory


@pytest.mark.parametrize("signal", ["process_private_bytes", "process_rss_bytes", "gpu_memory_allocated_bytes"])
def test_memory_that_grows_all_the_time(signal: str) -> None:
    def rank(growth: float) -> RankEvidence:
        return rank_of(system={signal: 1e9 * np.linspace(1, 1 + growth, 100)})

    assert not fires(GpuMemoryGrowth, rank(0.05))
    assert fires(GpuMemoryGrowth, rank(0.12))
    assert not fires(GpuMemoryGrowth, rank(-0.12))


def test_memory_leak() -> None:
    settles = 1e9 * (2 - np.exp(-np.arange(100) / 10))
    jumps = 1e9 * np.where(np.arange(100) < 60, 1.0, 1.5)
    assert not fires(GpuMemoryGrowth, rank_of(system={"process_private_bytes": settles}))
    assert not fires(GpuMemoryGrowth, rank_of(system={"process_private_bytes": jumps}))
    # A leak shows beneath what a step computes with.
    samples = 2.0**20 * np.tile(WITHIN_STEPS, 5)
    assert not fires(GpuMemoryGrowth, rank_of(system={"gpu_memory_allocated_bytes": samples}))
    leaks = samples + 2.0**20 * 16 * np.arange(100)
    assert fires(GpuMemoryGrowth, rank_of(system={"gpu_memory_allocated_bytes": leaks}))
    # Mapped files are no leak.
    system = {"process_rss_bytes": 1e9 * np.linspace(1, 2, 100), "process_private_bytes": 1e9}
    assert not fires(GpuMemoryGrowth, rank_of(system=system))
    # The finding says when memory will be full.
    half = 4 * 2**30
    found = outcome_of(GpuMemoryGrowth, rank_of(system={"process_private_bytes": half * np.linspace(0.5, 1, 100)}))
    assert isinstance(found, Finding)
    assert "from 2669 MiB to 3972 MiB" in found.text
    assert found.numbers["hourly_bytes"] == pytest.approx(half * 0.5 / (STEPS * 0.010) * 3600, rel=0.05)
    # Few samples of memory are not judged.
    assert isinstance(outcome_of(GpuMemoryGrowth, rank_of(samples=20, system={"process_rss_bytes": 1e9})), NotJudged)
    assert isinstance(outcome_of(GpuMemoryGrowth, rank_of()), NotJudged)


# MiB that torch had allocated on an H100, at moments anywhere within its steps: what a step computes with comes and goes.
WITHIN_STEPS = np.array(
    [555, 852, 955, 1120, 880, 554, 3335, 553, 2793, 1410, 562, 2575, 717, 563, 716, 1082, 716, 717, 3331, 3123.0]
)


# -- compilation


def compiled(*at: int) -> RankEvidence:
    return rank_of(compilations=tuple(CompilationRecord(step=step, graphs=2, seconds=30.0) for step in at))


def test_recompiled_graphs() -> None:
    assert isinstance(outcome_of(Recompilation, rank_of()), NotJudged)
    assert not fires(Recompilation, compiled(0, 9))
    found = outcome_of(Recompilation, compiled(0, 10, 50))
    assert isinstance(found, Finding)
    assert found.text.startswith("4 graphs were compiled again after 10 steps (first after step 10)")
    assert found.saving is not None
    assert found.saving.seconds == 60
    # Graphs of the first ten steps are no finding.
    assert all_fired(on_xla(compiled={9: 1.0})) == []
    assert all_fired(on_xla(compiled={10: 1.0})) == ["recompilation"]
    # A batch of another size is named.
    steps = steps_of()
    steps["images"] = np.where(NUMBERS == 40, 77.0, 128.0)
    found = finding(Recompilation, on_xla(steps, compiled={40: 30.0}))
    assert found.text.endswith("which took 30 s. The number of images had changed: 77 instead of 128.")
    assert "pad or drop" in found.advice
    assert found.steps == (40, 40)
    # Steps are found in a training that went on.
    steps = steps_of()
    steps["step"] = steps["step"] + 1000
    steps["images"] = np.where(NUMBERS == 40, 77.0, 128.0)
    assert "77 instead of 128" in finding(Recompilation, on_xla(steps, compiled={40: 30.0})).text

    # A look at the weights is named.
    def finding_at(*steps: int) -> Finding:
        rank = on_xla(compiled=dict.fromkeys(steps, 30.0), tensors=2)
        looks = replace(rank.tensors, steps=np.array([50.0, 100.0]))
        return finding(Recompilation, replace(rank, tensors=looks))

    assert "a measurement of the weights" in finding_at(50, 100).text
    assert "evidence.tensors_every" in finding_at(50).advice
    assert "measurement" not in finding_at(50, 51).text


def test_graphs_compiled_where_the_input_grows_by_plan() -> None:
    def grows(at: int | None, *compiled_at: int, began: int = 0) -> RankEvidence:
        steps = steps_of(forward=np.where(NUMBERS == 50, 3e4, 2.0))
        late = compiled(*compiled_at).record.compilations
        context = ContextRecord(low_resolution_steps=at)
        return rank_of(steps | {"step": steps["step"] + began}, compilations=late, context=context)

    assert fires(Recompilation, grows(None, 0, 50))
    assert fires(Recompilation, grows(0, 0, 50))
    planned = outcome_of(Recompilation, grows(50, 0, 50))
    assert planned == Healthy("4 graphs were compiled, all in the first 10 steps or at step 51, as the input grew.")
    assert not fires(Recompilation, grows(4050, 0, 50, began=4000)), "of a process that resumed"
    again = finding(Recompilation, grows(50, 0, 50, 60))
    assert again.steps == (60, 60)
    assert again.numbers["graphs"] == 2
    assert not fires(StepOutliers, grows(50, 0, 50)), "nor is that step an outlier"


# -- what watching costs


def test_own_overhead() -> None:
    def rank(seconds: float) -> RankEvidence:
        return rank_of(overhead={"marks": seconds / 2, "tensors": seconds / 2}, ended_s=100.0)

    assert not fires(OwnOverhead, rank(0.9))
    assert not fires(OwnOverhead, rank_of(overhead={"operators": 50.0, "marks": 0.5}, ended_s=100.0))
    found = outcome_of(OwnOverhead, rank(2.0))
    assert isinstance(found, Finding)
    assert found.saving is not None
    assert found.saving.seconds == pytest.approx(1.0)
    # A short recording says nothing of its cost.
    short = rank_of(overhead={"tensors": 5.0}, ended_s=59.0)
    assert "lasts 59 s" in str(outcome_of(OwnOverhead, short))
    assert fires(OwnOverhead, short, own_overhead=OwnOverhead(fewest_seconds=0))
    assert isinstance(outcome_of(OwnOverhead, rank_of(ended_s=100.0)), NotJudged)


# -- on XLA


def test_recompiling_by_other_causes() -> None:
    always = finding(Recompilation, on_xla(compiled=dict.fromkeys(range(12, STEPS), 0.1)))
    assert "a number that changes in each step" in always.text
    once = finding(Recompilation, on_xla(compiled={12: 0.1, 60: 0.1}))
    assert "A shape changed, or a Python value" in once.text
    assert all("PT_XLA_DEBUG_LEVEL=2" in found.advice for found in (always, once))
    # A step that the table no longer holds had as many images as any.
    steps = steps_of()
    steps["images"] = np.where(NUMBERS == 42, 77.0, 128.0)
    kept = {name: values[::2] for name, values in steps.items()}
    assert "number of images" not in finding(Recompilation, on_xla(kept, compiled={41: 30.0})).text
    assert "number of images" in finding(Recompilation, on_xla(kept, compiled={42: 30.0})).text
    # A training that ended in its first step has no sizes to compare.
    nothing = on_xla({name: values[:0] for name, values in steps_of().items()}, samples=1)
    found = judge_by(Recompilation, case_of(nothing, rules=RuleSettings(recompilation=Recompilation(after_steps=0))))
    assert isinstance(found, Finding)
    assert "A shape changed" in found.text
    # A long compilation has a cache of its own.
    found = finding(StartUp, on_xla(startup={"compile": 2000.0}))
    assert "NEURON_COMPILE_CACHE_URL" in found.advice
    assert "TORCHINDUCTOR" not in found.advice


def test_memory_of_the_device_that_grows() -> None:
    def grown(share: float) -> RankEvidence:
        system = {
            "device_memory_used_bytes": 2**30 * np.linspace(1, 1 + share, 100),
            "device_memory_total_bytes": 2.0**34,
        }
        return on_xla(system=system)

    assert all_fired(grown(0.05)) == []
    found = finding(GpuMemoryGrowth, grown(0.2))
    assert found.text.startswith("Memory of the device grows")
    left_h = (2**34 - found.numbers["last_bytes"]) / found.numbers["hourly_bytes"]
    assert f"full in {left_h:.1f} h" in found.text
