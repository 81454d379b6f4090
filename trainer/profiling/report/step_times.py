"""Where a step's time goes, how it differs from step to step, and which steps were the slowest."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from trainer import formatting
from trainer.charts.bars import Bar, BarPart, bars, histogram, stacked_bar
from trainer.charts.svg import colour_class
from trainer.pages import Block, Figure, Legend, Paragraph, Subsection, Table
from trainer.profiling import labels
from trainer.profiling.evidence import TrainingEvidence
from trainer.profiling.throughput import Spread, is_core, measured_steps
from trainer.profiling.training_summary import SlowStep, TrainingSummary

_FEWEST_DRAWN = 20
_UNUSUAL = 1.5
"""Times what is usual."""
_DELAYED = 0.1
"""Share of a slow step from which on a lack of cores can have made it slow."""
_FULL_PERCENT = 90.0
"""Use of the cores from which on other programs take them from the training."""
_MORE_PERCENT = 5.0
"""Points above what is usual below which waiting for storage, or other programs, explain no slow step."""
_SWAP_BYTES_PER_S = 1e6
"""Less swapping than this explains no slow step."""
_AFTER = {"checkpoint": "just after a checkpoint", "evaluate": "just after an evaluation"}


def recording(summary: TrainingSummary) -> Subsection:
    """Show the shares of the whole recording."""
    parts = [
        BarPart(name=name, label=labels.label(name), share=share) for name, share in summary.recorded_shares.items()
    ]
    legend = Legend([(colour_class(part.name), f"{part.label} {formatting.percent(part.share)}") for part in parts])
    title = "Shares of the whole recording"
    return Subsection(
        f"{title}: {formatting.duration(summary.recorded_s)}", [Figure(stacked_bar(parts, title)), legend]
    )


def phases(summary: TrainingSummary) -> Subsection | None:
    """Show each phase of a step with its spread from step to step."""
    if summary.step_ms is None:
        return None
    rows = []
    for name, phase in summary.phases.items():
        ms = phase.ms
        whiskers = f"({formatting.short(ms.p5)} to {formatting.short(ms.p95)})"
        note = f"{formatting.percent(phase.share)}  ·  {formatting.milliseconds(ms.p50)}  {whiskers}"
        rows.append(Bar(name=name, label=labels.label(name), value=ms.p50, note=note, low=ms.p5, high=ms.p95))
    picture = bars(rows, "ms", "Time of each phase of a step")
    caption = (
        f"A step takes {formatting.milliseconds(summary.step_ms.p50)} (median; 5 % take less than "
        f"{formatting.milliseconds(summary.step_ms.p5)}, 5 % more than {formatting.milliseconds(summary.step_ms.p95)}). Bars: median of "
        "each phase; whiskers: 5th to 95th percentile; the percentage is the phase's share of all measured steps. These are times as they "
        "were; findings speak of undisturbed steps, without what other programs and the recorder's tensor statistics took."
    )
    named = [(path, share) for phase in summary.phases.values() for path, share in phase.ranges.items()]
    table = Table(
        ["Range within a phase", "Share of a step"], [(path, formatting.percent(share)) for path, share in named]
    )
    return Subsection("Where a step's time goes", [Figure(picture, caption), table if named else None])


def lengths(evidence: TrainingEvidence, summary: TrainingSummary) -> Subsection | None:
    """Show a histogram of the steps, and the slowest of them."""
    if summary.step_ms is None:
        return None
    first = evidence.ranks[0]
    values = first.steps["seconds"][measured_steps(first)] * 1000
    title = "How long steps take"
    if len(values) < _FEWEST_DRAWN:
        reason = f"Not drawn: {len(values)} steps are too few, {_FEWEST_DRAWN} are needed."
        return Subsection(title, [Paragraph(reason)])
    marks = [(summary.step_ms.p50, "median")]
    if summary.step_ms.p95 >= 1.1 * summary.step_ms.p50:
        marks.append((summary.step_ms.p95, "95 %"))
    picture = histogram(values, marks, "ms", title, count_label="steps")
    caption = f"Slowest step: {formatting.milliseconds(summary.step_ms.max)}. The slowest half percent is drawn into the last bar."
    return Subsection(title, [Figure(picture, caption), _slowest(summary, summary.step_ms)])


def _slowest(summary: TrainingSummary, step_ms: Spread) -> Block:
    if not summary.slowest:
        return Paragraph("No step took much longer than the median.")
    rows = []
    for step in summary.slowest:
        usual = {name: phase.ms.p50 for name, phase in summary.phases.items()}
        extra = {name: ms - usual.get(name, 0.0) for name, ms in step.phase_ms.items()}
        most = sorted(extra.items(), key=lambda item: -item[1])[:2]
        longer = [f"{labels.label(name)} +{formatting.milliseconds(ms)}" for name, ms in most if ms > 0.1 * most[0][1]]
        times = formatting.duration(step.start_s), formatting.milliseconds(step.ms), f"{step.ms / step_ms.p50:.1f} x"
        rows.append((f"{step.step:,}", *times, ", ".join(longer), _machine(step, summary)))
    thinned = f" (of 1 in {summary.steps_kept_of} steps)" if summary.steps_kept_of > 1 else ""
    headers = [f"Slowest steps{thinned}", "At", "Took", "Median", "Phases that were longer", "The machine then"]
    return Table(headers, rows)


def _machine(step: SlowStep, summary: TrainingSummary) -> str:
    """Name what may have slowed the step: what the training lacked, and what it follows; not its effects, such as an idle GPU."""
    causes = [_AFTER[step.follows]] if step.follows else []
    if step.graphs:
        causes.append("1 graph was compiled" if step.graphs == 1 else f"{step.graphs} graphs were compiled")
    if step.no_batch_ready:
        causes.append("no batch was ready")
    if step.delayed_ms and step.delayed_ms > _DELAYED * step.ms:
        causes.append(f"no core for the training for {formatting.milliseconds(step.delayed_ms)}")
    means = {name: signal.mean for name, signal in summary.system.items()}
    cores = [mean for name, mean in means.items() if is_core(name)]
    usual = means | ({"cores_percent": sum(cores) / len(cores)} if cores else {})
    causes += _lacking(step.machine, usual, len(cores))
    return ", ".join(causes) or ("nothing that slows a step" if step.machine else "not sampled")


def _lacking(now: Mapping[str, float], usual: Mapping[str, float], cores: int) -> Iterator[str]:
    """Name what the machine did not give to the training, if it is more than usual."""
    waiting = [values.get("iowait_percent", 0.0) for values in (now, usual)]
    if _is_more(*waiting):
        yield _against("waiting for storage", *waiting)
    others = [_other_programs_percent(values, cores) for values in (now, usual)]
    if now.get("cores_percent", 0.0) >= _FULL_PERCENT and _is_more(*others):
        yield _against("cores busy with other programs", *others)
    swapped = sum(now.get(f"swap_{way}_bytes_per_s", 0.0) for way in ("in", "out"))
    if swapped > _SWAP_BYTES_PER_S:
        yield f"memory swapped, {formatting.size(swapped)}/s"


def _is_more(now: float, usual: float) -> bool:
    return now > usual + _MORE_PERCENT and now > _UNUSUAL * usual


def _against(what: str, now: float, usual: float) -> str:
    return f"{what} {formatting.percent(now / 100)} (usually {formatting.percent(usual / 100)})"


def _other_programs_percent(signals: Mapping[str, float], cores: int) -> float:
    """Compute the use of all cores by anything but this process and its loaders."""
    if "cores_percent" not in signals or "process_cpu_percent" not in signals:
        return 0.0
    own = signals["process_cpu_percent"] + signals.get("loaders_cpu_percent", 0.0)
    return max(0.0, signals["cores_percent"] - own / cores)
