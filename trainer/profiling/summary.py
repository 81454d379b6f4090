"""The numbers of the profile report, computed from the evidence; `summary.json` of the report holds exactly these.

Times of steps are taken from the steps that torch.profiler did not slow, without the first one, which also warms up. Shares of the
whole recording are taken from sums over everything.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from trainer.profiling.evidence import RankEvidence, TrainingEvidence
from trainer.profiling.operators import Operator
from trainer.profiling.series import Rows, Series
from trainer.profiling.timeline import BETWEEN, OTHER, PHASES


@dataclass(frozen=True, kw_only=True)
class Spread:
    """How a quantity is distributed over the steps."""

    p5: float
    p50: float
    p95: float
    mean: float
    max: float


@dataclass(frozen=True, kw_only=True)
class PhaseSummary:
    """A phase of the step."""

    share: float
    """Of the measured steps' time."""
    ms: Spread
    ranges: Mapping[str, float]
    """Ranges that users named within it -> their share of the measured steps' time."""


@dataclass(frozen=True, kw_only=True)
class StartupSummary:
    """Seconds from the start of the process, or from the end of the training before it, to the end of the first step."""

    imports_s: float
    """Until torch and the trainer were loaded; 0 for a later training of the same process."""
    preparation_s: float
    """Then, until the recording began: data set, models, process group, weights."""
    first_step_s: float | None
    """Then, until the first step had ended; none where there was no step."""


@dataclass(frozen=True, kw_only=True)
class SignalSummary:
    """A signal of the system over the recording."""

    mean: float
    p95: float
    max: float


@dataclass(frozen=True, kw_only=True)
class RankSummary:
    """A process beside the others."""

    rank: int
    host: str
    device: str
    step_ms: Spread | None
    phase_ms: Mapping[str, float]
    """Median of each phase."""
    memory_bytes: float | None
    """Largest resident memory."""


@dataclass(frozen=True, kw_only=True)
class OperatorSummary:
    """The operators of the window."""

    steps: int
    clock: str
    """`device` where a device computed, `cpu` where the host did: whose time is compared."""
    categories: Mapping[str, float]
    """Category -> milliseconds a step, the largest first."""
    top: Sequence[Operator]
    kernels: Sequence[Operator]


@dataclass(frozen=True, kw_only=True)
class TrainingSummary:
    """One part of a training."""

    name: str
    world_size: int
    device: str
    host: str
    cores: int
    recorded_s: float
    steps: int
    steps_measured: int
    steps_kept_of: int
    step_ms: Spread | None
    """None where there were no steps to measure."""
    images_per_second: float | None
    """Over all processes, within the measured steps; none where the training did not tell its images."""
    phases: Mapping[str, PhaseSummary]
    recorded_shares: Mapping[str, float]
    """Each phase, and each range outside of steps -> share of the whole recording."""
    startup: StartupSummary
    ranks: Sequence[RankSummary]
    operators: OperatorSummary | None
    system: Mapping[str, SignalSummary]
    missing: Mapping[str, str]


def phase_of(path: str) -> str:
    """The phase or outermost range that a range's path belongs to."""
    return path.split("/", 1)[0]


def summarize(training: TrainingEvidence, *, before: TrainingEvidence | None, top_operators: int) -> TrainingSummary:
    """Reduce the evidence of one training to its numbers.

    Args:
        training: the evidence.
        before: the training that ran before it in the same stage, if any.
        top_operators: operators to keep.
    """
    first = training.ranks[0]
    record = first.record
    measured = measured_steps(first)
    seconds = first.steps["seconds"][measured]
    return TrainingSummary(
        name=training.name,
        world_size=record.world_size,
        device=record.device,
        host=record.host,
        cores=record.cores,
        recorded_s=record.ended_s,
        steps=record.steps.count,
        steps_measured=len(seconds),
        steps_kept_of=record.steps.kept_of,
        step_ms=spread(seconds * 1000),
        images_per_second=_rate(first.steps["images"][measured], seconds),
        phases=_phases(first, measured),
        recorded_shares=_recorded_shares(first),
        startup=_startup(first, before.ranks[0] if before else None),
        ranks=[_rank(rank) for rank in training.ranks],
        operators=_operators(first, top_operators),
        system=_system(first),
        missing=record.missing,
    )


def measured_steps(rank: RankEvidence) -> Rows:
    """Positions of the rows that are neither the first step nor under the profiler (all rows, if none remain)."""
    rows = np.arange(len(rank.steps["step"]))
    usual = rows[(rows > 0) & (rank.steps["profiled"] == 0)]
    return usual if len(usual) else rows


def spread(values: Series) -> Spread | None:
    """Percentiles, mean and maximum; none of no values."""
    if not len(values):
        return None
    p5, p50, p95 = np.percentile(values, [5, 50, 95]).tolist()
    return Spread(p5=p5, p50=p50, p95=p95, mean=float(values.mean()), max=float(values.max()))


def phase_seconds(rank: RankEvidence) -> dict[str, Series]:
    """Seconds of each phase in each step, user-named ranges counted with the phase around them; phases that never ran are left out."""
    sums: dict[str, Series] = {}
    for path in rank.ranges:
        phase = phase_of(path)
        sums[phase] = sums[phase] + rank.steps[path] if phase in sums else rank.steps[path]
    order = [*PHASES, *(name for name in sums if name not in PHASES and name != OTHER), OTHER]
    return {name: sums[name] for name in order if name in sums and sums[name].any()}


def _phases(rank: RankEvidence, measured: Rows) -> dict[str, PhaseSummary]:
    total = max(float(rank.steps["seconds"][measured].sum()), 1e-12)
    summaries = {}
    for name, seconds in phase_seconds(rank).items():
        distribution = spread(seconds[measured] * 1000)
        if distribution is None:
            continue
        inner = [path for path in rank.ranges if path.startswith(f"{name}/")]
        summaries[name] = PhaseSummary(
            share=float(seconds[measured].sum()) / total,
            ms=distribution,
            ranges={path: float(rank.steps[path][measured].sum()) / total for path in inner},
        )
    return summaries


def _rate(images: Series, seconds: Series) -> float | None:
    total = float(images.sum())
    return total / float(seconds.sum()) if total and len(seconds) else None


def _recorded_shares(rank: RankEvidence) -> dict[str, float]:
    seconds: dict[str, float] = {}
    for path, value in rank.record.steps.ranges.items():
        seconds[phase_of(path)] = seconds.get(phase_of(path), 0.0) + value
    for name, outside in rank.record.outside.items():
        seconds[name] = seconds.get(name, 0.0) + outside.seconds
    total = max(sum(seconds.values()), 1e-12)
    order = [*PHASES, *(name for name in seconds if name not in (*PHASES, OTHER, BETWEEN)), OTHER, BETWEEN]
    return {name: seconds[name] / total for name in order if seconds.get(name)}


def _startup(rank: RankEvidence, before: RankEvidence | None) -> StartupSummary:
    record = rank.record
    imports, ready = 0.0, record.process.imported_unix
    if before is not None and before.record.process == record.process:
        ready = before.record.began_unix + before.record.ended_s
    else:
        imports = max(record.process.imported_unix - record.process.started_unix, 0.0)
    return StartupSummary(
        imports_s=imports, preparation_s=max(record.began_unix - ready, 0.0), first_step_s=record.first_step_s
    )


def _rank(rank: RankEvidence) -> RankSummary:
    measured = measured_steps(rank)
    phases = {name: spread(seconds[measured] * 1000) for name, seconds in phase_seconds(rank).items()}
    memory = rank.system.get("process_rss_bytes")
    return RankSummary(
        rank=rank.record.rank,
        host=rank.record.host,
        device=rank.record.device,
        step_ms=spread(rank.steps["seconds"][measured] * 1000),
        phase_ms={name: distribution.p50 for name, distribution in phases.items() if distribution},
        memory_bytes=float(np.nanmax(memory)) if memory is not None and np.isfinite(memory).any() else None,
    )


def operator_ms(operator: Operator, clock: str) -> float:
    """Self time on the clock that is compared, in milliseconds over the whole window."""
    return operator.self_device_ms if clock == "device" else operator.self_cpu_ms


def _operators(rank: RankEvidence, top: int) -> OperatorSummary | None:
    table = rank.record.operators
    if table is None:
        return None
    calls = [operator for operator in table.operators if operator.kind == "operator"]
    kernels = [operator for operator in table.operators if operator.kind == "kernel"]
    clock = "device" if any(operator.self_device_ms for operator in calls) else "cpu"
    calls.sort(key=lambda operator: -operator_ms(operator, clock))
    categories: dict[str, float] = {}
    for operator in calls:
        spent = operator_ms(operator, clock) / table.steps
        categories[operator.category] = categories.get(operator.category, 0.0) + spent
    ordered = sorted(categories.items(), key=lambda item: -item[1])
    return OperatorSummary(
        steps=table.steps,
        clock=clock,
        categories={name: spent for name, spent in ordered if spent},
        top=calls[:top],
        kernels=kernels[:top],
    )


def _system(rank: RankEvidence) -> dict[str, SignalSummary]:
    summaries = {}
    for name, values in rank.system.items():
        finite = values[np.isfinite(values)]
        if name == "end_s" or not len(finite):
            continue
        summaries[name] = SignalSummary(
            mean=float(finite.mean()), p95=float(np.percentile(finite, 95)), max=float(finite.max())
        )
    return summaries
