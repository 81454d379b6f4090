"""The numbers of the profile report, computed from the evidence, and how people call them; its `summary.json` holds exactly these.

Times of steps are those of the measured steps (`trainer.profiling.evidence`). Shares of the whole recording are taken from sums over
everything.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np

from trainer.config.rules import RuleSettings
from trainer.io import formatting
from trainer.io.costs import Machines, dollars_text
from trainer.profiling.evidence import (
    BETWEEN,
    OTHER,
    PHASES,
    AttemptRecord,
    CommunicationRecord,
    Operator,
    RankEvidence,
    Spread,
    TrainingEvidence,
    images_per_second,
    is_core,
    measured_steps,
    phase_of,
    phase_seconds,
    phase_shares,
    quantiles,
    step_images_per_second,
    step_ms,
)
from trainer.profiling.rules.outcomes import Case
from trainer.profiling.rules.processes import communication_share
from trainer.profiling.series import Rows, Series, mean_in_bins

_SLOWEST_STEPS = 8
_SLOW = 1.25  # a slow step takes this many times the median
_DISTURBING = ("checkpoint", "evaluate")
"""Ranges between steps after which the next one may be slow: files are still written, caches hold other data."""
_AS_RECORDED = ["world_size", "device", "host", "cores", "memory_bytes", "workers", "place", "processor", "failed"]
_AS_RECORDED += ["startup", "overhead", "communication", "missing", "loader_images_per_second"]
"""Fields of a summary that the first process's record has too."""
_ROUNDING_S = 1e-3  # by how much a kept range may seem to end after the step that follows it


@dataclass(frozen=True, kw_only=True)
class PhaseSummary:
    """A phase of the step."""

    share: float  # of the time of the measured steps
    ms: Spread
    ranges: Mapping[str, float]  # ranges that users named within it -> their share of the measured steps' time


@dataclass(frozen=True, kw_only=True)
class SlowStep:
    """A step that took far longer than the median."""

    step: int
    start_s: float
    ms: float
    phase_ms: Mapping[str, float]
    delayed_ms: float | None
    """How long the training's thread was ready and had no core; none where the kernel does not tell."""
    machine: Mapping[str, float]
    """Signal of the system -> its mean while the step ran, as far as the samples tell; `cores_percent` is the mean of all cores."""
    no_batch_ready: bool = False  # whether no batch was ready, though usually one is
    follows: str = ""  # `checkpoint` or `evaluate`, if one lay between this step and the previous step
    graphs: int = 0  # graphs compiled in this step


@dataclass(frozen=True, kw_only=True)
class SignalSummary:
    """A signal of the system over the recording."""

    min: float
    p50: float
    mean: float
    p95: float
    max: float
    first: float  # mean of the first tenth
    last: float  # mean of the last tenth


@dataclass(frozen=True, kw_only=True)
class RankSummary:
    """A process beside the others."""

    rank: int
    host: str
    device: str
    step_ms: Spread | None
    phase_ms: Mapping[str, float]  # median of each phase
    memory_bytes: float | None  # largest resident memory
    gpu_memory_bytes: float | None  # largest memory in use on its GPU
    gpu_percent: float | None  # mean use of its GPU
    cores_percent: float | None  # mean use of its machine's cores; known to the first process of each machine


@dataclass(frozen=True, kw_only=True)
class OperatorSummary:
    """The operators of the windows."""

    steps: int
    clock: str  # whose time is compared: `device`, or `cpu` where the host computes
    categories: Mapping[str, float]  # category -> milliseconds a step, the largest first
    operators: Sequence[Operator]  # the longest first
    kernels: Sequence[Operator]

    def ms(self, operator: Operator) -> float:
        """Self time on the clock that is compared, in milliseconds a step."""
        return float(getattr(operator, f"self_{self.clock}_ms")) / self.steps


@dataclass(frozen=True, kw_only=True)
class TrainingSummary:
    """One part of a training."""

    name: str
    world_size: int
    device: str
    host: str
    cores: int
    memory_bytes: int  # memory of the machine
    workers: int | None  # loader processes beside each process
    place: Machines | None
    settings: Mapping[str, Any]  # of this training, as far as they were recorded
    parameters: int | None
    failed: str | None  # message of the error that ended the training; None if it completed
    recorded_s: float
    steps: int
    steps_measured: int
    steps_kept_of: int
    step_ms: Spread | None  # None without measured steps
    images_a_step: float | None  # over all processes; None if the number of images is unknown
    images_per_second: float | None  # over all processes, within the measured steps; None if unknown
    step_images_per_second: float | None  # the same without the waits for data
    loader_images_per_second: float | None  # that the loaders of all processes can give; None if unknown
    phases: Mapping[str, PhaseSummary]
    slowest: Sequence[SlowStep]
    recorded_shares: Mapping[str, float]  # each phase, and each range outside of steps -> share of the whole recording
    startup: Mapping[str, float]  # part of the time before the end of the first step -> seconds
    compiled_graphs: int
    compile_s: float
    communication: CommunicationRecord | None
    overhead: Mapping[str, float]  # part of the recorder's own work -> seconds
    attempts: Sequence[AttemptRecord]
    ranks: Sequence[RankSummary]
    operators: OperatorSummary | None
    system: Mapping[str, SignalSummary]
    last: Mapping[str, float]  # each curve -> its last finite value
    missing: Mapping[str, str]
    processor: str = ""  # model of the processor; empty if not recorded
    communication_share: float | None = None
    """Share of the undisturbed step that waits for gradients that travel, as the rule on communication has it; none where it cannot say."""

    @property
    def cores_percent(self) -> list[float]:
        """Mean use of each core."""
        return [signal.mean for name, signal in self.system.items() if is_core(name)]

    @property
    def figures(self) -> dict[str, float]:
        """The training's numbers among `SIGNALS`, as far as they are known."""
        step, data = self.step_ms, self.phases.get("data")
        values = {
            "recorded_s": self.recorded_s,
            "dollars": self.place.dollars(self.recorded_s) if self.place else None,
            "steps": float(self.steps),
            "step_p50_ms": step.p50 if step else None,
            "step_p95_ms": step.p95 if step else None,
            "images_per_second": self.images_per_second,
            "loader_images_per_second": self.loader_images_per_second,
            "step_images_per_second": self.step_images_per_second,
            "data_share": data.share if data else None,
            "communication_share": self.communication_share,
        }
        return {name: value for name, value in values.items() if value is not None}

    @property
    def use(self) -> dict[str, float]:
        """How much of the machine was used: the mean of each signal, of memory the most; the cores as one."""
        cores = self.cores_percent
        values = {"cores_percent": sum(cores) / len(cores), "busiest_core_percent": max(cores)} if cores else {}
        for name, signal in self.system.items():
            if not is_core(name):
                values[name] = signal.max if name.endswith("_bytes") else signal.mean
        return values


def summarize(training: TrainingEvidence, rules: RuleSettings | None = None) -> TrainingSummary:
    """Reduce the evidence of one training to its numbers; `rules` (by default those of no run) define stalls, which are not compared."""
    first = training.ranks[0]
    record = first.record
    measured = measured_steps(first.steps)
    images = first.steps["images"][measured]
    total, shares, phases = max(float(first.steps["seconds"][measured].sum()), 1e-12), phase_shares(first), {}
    for name, seconds in phase_seconds(first).items():
        if distribution := quantiles(seconds[measured] * 1000):
            inner = [path for path in first.ranges if path.startswith(f"{name}/")]
            ranges = {path: float(first.steps[path][measured].sum()) / total for path in inner}
            phases[name] = PhaseSummary(share=shares[name], ms=distribution, ranges=ranges)
    recorded: dict[str, float] = {}
    for path, value in record.steps.ranges.items():
        recorded[phase_of(path)] = recorded.get(phase_of(path), 0.0) + value
    for name, outside in record.outside.items():
        recorded[name] = recorded.get(name, 0.0) + outside.seconds
    whole = max(sum(recorded.values()), 1e-12)
    order = [*PHASES, *(name for name in recorded if name not in (*PHASES, OTHER, BETWEEN)), OTHER, BETWEEN]
    finite = {name: curve.values[np.isfinite(curve.values)] for name, curve in training.metrics.items()}
    return TrainingSummary(
        name=training.name,
        **{name: getattr(record, name) for name in _AS_RECORDED},
        settings=record.context.settings,
        parameters=record.context.parameters,
        recorded_s=record.ended_s,
        steps=record.steps.count,
        steps_measured=len(measured),
        steps_kept_of=record.steps.kept_of,
        step_ms=step_ms(first),
        images_a_step=float(images.mean()) if images.any() else None,
        images_per_second=images_per_second(first.steps),
        step_images_per_second=step_images_per_second(first.steps),
        phases=phases,
        slowest=_slowest(first, measured),
        recorded_shares={name: recorded[name] / whole for name in order if recorded.get(name)},
        compiled_graphs=sum(compilation.graphs for compilation in record.compilations),
        compile_s=sum(compilation.seconds for compilation in record.compilations),
        communication_share=communication_share(Case(training=training, rules=rules or RuleSettings())),
        attempts=list(record.attempts),
        ranks=[_rank(rank) for rank in training.ranks],
        operators=_operators(first),
        system=_system(first),
        last={name: float(values[-1]) for name, values in finite.items() if len(values)},
    )


def _slowest(rank: RankEvidence, measured: Rows) -> list[SlowStep]:
    """The slowest steps that took far longer than the median, the slowest first."""
    number, seconds = rank.steps["step"], rank.steps["seconds"]
    if not len(measured):
        return []
    slow = measured[seconds[measured] > _SLOW * np.median(seconds[measured])]
    chosen = slow[np.argsort(-seconds[slow], kind="stable")][:_SLOWEST_STEPS]
    phases, delayed, queued = phase_seconds(rank), rank.steps["host_delayed_seconds"], rank.steps["queued"]
    completed = number - number[0]  # steps before each, as compilations are counted
    has_queue = bool(np.isfinite(queued).any() and np.nanmedian(queued) > 0)
    median_s, ends = float(np.median(seconds[measured])), rank.spans.start_s + rank.spans.seconds

    def follows(start_s: float) -> str:
        """The checkpoint or evaluation that ended less than a usual step before."""
        near = np.flatnonzero((ends > start_s - median_s) & (ends < start_s + _ROUNDING_S))
        return next((name for name in (rank.spans.names[index] for index in near[::-1]) if name in _DISTURBING), "")

    return [
        SlowStep(
            step=int(number[row]),
            start_s=float(rank.steps["start_s"][row]),
            ms=1000 * float(seconds[row]),
            phase_ms={name: 1000 * float(values[row]) for name, values in phases.items()},
            delayed_ms=1000 * float(delayed[row]) if np.isfinite(delayed[row]) else None,
            machine=_machine_between(rank.system, rank.steps["start_s"][row], seconds[row]),
            no_batch_ready=has_queue and bool(queued[row] == 0),
            follows=follows(rank.steps["start_s"][row]),
            graphs=sum(one.graphs for one in rank.record.compilations if one.step == completed[row]),
        )
        for row in chosen.tolist()
    ]


def _machine_between(system: Mapping[str, Series], start_s: float, seconds: float) -> dict[str, float]:
    edges = np.array([start_s, start_s + seconds])
    means = {
        name: float(mean_in_bins(system["end_s"], values, edges)[0])
        for name, values in system.items()
        if name != "end_s" and len(values)
    }
    known = {name: value for name, value in means.items() if np.isfinite(value)}
    cores = [value for name, value in known.items() if is_core(name)]
    others = {name: value for name, value in known.items() if not is_core(name)}
    return ({"cores_percent": float(np.mean(cores)), "busiest_core_percent": max(cores)} if cores else {}) | others


def _rank(rank: RankEvidence) -> RankSummary:
    measured = measured_steps(rank.steps)
    phases = {name: quantiles(seconds[measured] * 1000) for name, seconds in phase_seconds(rank).items()}
    return RankSummary(
        rank=rank.record.rank,
        host=rank.record.host,
        device=rank.record.device,
        step_ms=step_ms(rank),
        phase_ms={name: distribution.p50 for name, distribution in phases.items() if distribution},
        memory_bytes=_largest(rank.system.get("process_rss_bytes")),
        gpu_memory_bytes=_largest(rank.system.get("gpu_memory_used_bytes")),
        gpu_percent=_mean([rank.system["gpu_percent"]] if "gpu_percent" in rank.system else []),
        cores_percent=_mean([values for name, values in rank.system.items() if is_core(name)]),
    )


def _largest(values: Series | None) -> float | None:
    return float(np.nanmax(values)) if values is not None and np.isfinite(values).any() else None


def _mean(signals: Sequence[Series]) -> float | None:
    known = [values[np.isfinite(values)] for values in signals]
    return float(np.mean(np.concatenate(known))) if any(len(values) for values in known) else None


def _operators(rank: RankEvidence) -> OperatorSummary | None:
    table = rank.record.operators
    if table is None:
        return None
    calls = [operator for operator in table.operators if operator.kind == "operator"]
    summary = OperatorSummary(
        steps=table.steps,
        clock="device" if any(operator.self_device_ms for operator in calls) else "cpu",
        categories={},
        operators=calls,
        kernels=[operator for operator in table.operators if operator.kind == "kernel"],
    )
    calls.sort(key=lambda operator: -summary.ms(operator))
    categories: dict[str, float] = {}
    for operator in calls:
        categories[operator.category] = categories.get(operator.category, 0.0) + summary.ms(operator)
    ordered = sorted(categories.items(), key=lambda item: -item[1])
    return replace(summary, categories={name: spent for name, spent in ordered if spent})


def _system(rank: RankEvidence) -> dict[str, SignalSummary]:
    summaries = {}
    for name, values in rank.system.items():
        finite = values[np.isfinite(values)]
        if name == "end_s" or not len(finite):
            continue
        tenth = max(1, len(finite) // 10)
        least, median, p95, most = np.percentile(finite, [0, 50, 95, 100]).tolist()
        summaries[name] = SignalSummary(
            min=least,
            p50=median,
            mean=float(finite.mean()),
            p95=p95,
            max=most,
            first=float(finite[:tenth].mean()),
            last=float(finite[-tenth:].mean()),
        )
    return summaries


# ---- How people call what the numbers are of


_TRAININGS = {"mae": "Masked autoencoder", "finetune": "Fine-tuning", "distill": "Distillation"}
PHASE_LABELS = {
    "data": "waiting for data",
    "to_device": "host to device",
    "teacher_forward": "teacher's forward pass",
    "forward": "forward pass",
    "backward": "backward pass",
    "dispatch": "waiting for XLA",
    "recorder": "tensor statistics",
    "other": "rest of the step",
    "evaluate": "evaluation",
    "checkpoint": "checkpoint",
    "profiler": "operator window",
    "rules": "judging the training",
    "interrupted": "interrupted step",
    "between": "between steps",
    "named": "named ranges",
}


class ShownSignal(NamedTuple):
    """The label of a measured number, and where it is shown; the suffix of its name is its unit."""

    label: str
    tile: str = ""  # caption of its tile in the report; empty for no tile
    compared: bool = False
    """Whether a comparison of two trainings begins with it; the use of the machine has a table of its own."""


SIGNALS: Mapping[str, ShownSignal] = {
    "recorded_s": ShownSignal("recorded", tile="recorded", compared=True),
    "dollars": ShownSignal("dollars", tile="for that time", compared=True),
    "steps": ShownSignal("steps", compared=True),
    "step_p50_ms": ShownSignal("step (median)", tile="a step (median)", compared=True),
    "step_p95_ms": ShownSignal("step (95 %)", compared=True),
    "images_per_second": ShownSignal("images a second", tile="images a second", compared=True),
    "loader_images_per_second": ShownSignal(
        "images a second of the loader", tile="images a second that the loader gives"
    ),
    "step_images_per_second": ShownSignal("images a second of the step", tile="images a second that the step takes"),
    "data_share": ShownSignal("waits for data", tile="of a step waits for data"),
    "communication_share": ShownSignal("waits for gradients", compared=True),
    "cores_percent": ShownSignal("cores", tile="of the cores busy (mean)"),
    "busiest_core_percent": ShownSignal("busiest core"),
    "iowait_percent": ShownSignal("waiting for storage"),
    "stolen_percent": ShownSignal("core taken by the host"),
    "memory_used_bytes": ShownSignal("memory of the machine"),
    "disk_read_bytes_per_s": ShownSignal("disk, read"),
    "disk_write_bytes_per_s": ShownSignal("disk, written"),
    "swap_in_bytes_per_s": ShownSignal("swapped in"),
    "swap_out_bytes_per_s": ShownSignal("swapped out"),
    "network_received_bytes_per_s": ShownSignal("network, received"),
    "network_sent_bytes_per_s": ShownSignal("network, sent"),
    "process_rss_bytes": ShownSignal("memory of the process", tile="memory of a process (peak)"),
    "process_private_bytes": ShownSignal("of that, its own"),
    "process_cpu_percent": ShownSignal("processor, this process"),
    "loaders_cpu_percent": ShownSignal("processor, its loaders"),
    "gpu_percent": ShownSignal("GPU", tile="GPU utilization (mean)"),
    "gpu_memory_used_bytes": ShownSignal("GPU memory", tile="GPU memory (peak)"),
    "gpu_memory_allocated_bytes": ShownSignal("GPU memory, tensors"),
    "gpu_memory_total_bytes": ShownSignal("GPU memory there is"),
    "device_memory_used_bytes": ShownSignal("memory of the device"),
    "device_memory_total_bytes": ShownSignal("memory that the device has"),
}  # what report and comparison loop over: the numbers of `TrainingSummary.figures` and `TrainingSummary.use`, by name
_UNITS: Mapping[str, Callable[[float], str]] = {
    "_bytes_per_s": lambda value: f"{formatting.size(value)}/s",
    "_bytes": formatting.size,
    "_percent": lambda value: formatting.percent(value / 100),
    "_share": formatting.percent,
    "_ms": formatting.milliseconds,
    "_s": formatting.duration,
    "dollars": dollars_text,
}


def training_label(name: str) -> str:
    """Name a training as people call it: `mae` -> Masked autoencoder."""
    return _TRAININGS.get(name, name)


def phase_label(name: str) -> str:
    """Name a phase or range as people call it: `to_device` -> host to device."""
    return PHASE_LABELS.get(name, name)


def named_number(name: str, value: float) -> tuple[str, str]:
    """Split the unit off a number's name: `waiting_share`, 0.4 -> waiting share, 40 %."""
    suffix, shown = next(((end, unit) for end, unit in _UNITS.items() if name.endswith(end)), ("", formatting.short))
    bare = name if suffix in ("_share", "dollars") else name.removesuffix(suffix)
    return SIGNALS[name].label if name in SIGNALS else bare.replace("_", " "), shown(value)
