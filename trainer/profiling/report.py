"""The profile report: one self-contained page on where the trainings' time went."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from trainer import html
from trainer.profiling import binning, drawing
from trainer.profiling.drawing import BINS, Bar, Curve, Lane, Part
from trainer.profiling.evidence import TrainingEvidence
from trainer.profiling.operators import Operator
from trainer.profiling.series import Series
from trainer.profiling.summary import (
    OperatorSummary,
    PhaseSummary,
    Spread,
    StartupSummary,
    TrainingSummary,
    measured_steps,
    operator_ms,
)

_TRAININGS = {"mae": "Masked autoencoder", "finetune": "Fine-tuning", "distill": "Distillation"}
_LABELS = {
    "data": "waiting for data",
    "to_device": "host to device",
    "teacher_forward": "teacher's forward pass",
    "forward": "forward pass",
    "backward": "backward pass",
    "optimizer": "optimiser",
    "other": "rest of the step",
    "evaluate": "evaluation",
    "checkpoint": "checkpoint",
    "profiler": "operator window",
    "interrupted": "interrupted step",
    "between": "between steps",
}
_MACHINE_LANES = (
    ("GPU", "% busy", 1.0, 100.0, (("s0", "gpu_percent", "busy"),)),
    ("GPU memory", "GB", 1e-9, 1.0, (("s0", "gpu_memory_used_bytes", "used"),)),
    ("Memory", "GB", 1e-9, 1.0, (("s0", "process_rss_bytes", "process"), ("s1", "memory_used_bytes", "machine"))),
    ("I/O wait", "% of all cores", 1.0, 10.0, (("s0", "iowait_percent", "wait"),)),
    ("Disk", "MB/s", 1e-6, 1.0, (("s0", "disk_read_bytes_per_s", "read"), ("s1", "disk_write_bytes_per_s", "written"))),
    (
        "Network",
        "MB/s",
        1e-6,
        1.0,
        (("s0", "network_received_bytes_per_s", "received"), ("s1", "network_sent_bytes_per_s", "sent")),
    ),
)
"""Title, unit, factor, least upper end of the axis, and the lines: style, column, label."""
_MOST_RANKS_DRAWN = 64
_FEWEST_STEPS_DRAWN = 20


def build(trainings: Sequence[tuple[TrainingEvidence, TrainingSummary]]) -> str:
    """The page: HTML below 2 MB without references to anything outside of it.

    Args:
        trainings: evidence and its numbers, in the order in which they ran; may be empty.
    """
    summaries = [summary for _, summary in trainings]
    sections = [drawing.STYLE]
    if len(summaries) > 1:
        sections.append(_overview(summaries))
    sections.extend(_training_section(evidence, summary) for evidence, summary in trainings)
    return html.page("Where the training's time went", lead(summaries), sections)


def lead(summaries: Sequence[TrainingSummary]) -> str:
    """The verdict in one sentence: what dominates the longest training."""
    if not summaries:
        return "Nothing was trained: the evidence holds no recording, as with given weights or zero epochs."
    longest = max(summaries, key=lambda summary: summary.recorded_s)
    total = sum(summary.recorded_s for summary in summaries)
    part = f"{_name(longest)} took {_duration(longest.recorded_s)}"
    if len(summaries) > 1:
        part += f" of the {_duration(total)} of training"
    if longest.step_ms is None or not longest.recorded_shares:
        return f"{part}; it had no steps to measure."
    largest, share = max(longest.recorded_shares.items(), key=lambda item: item[1])
    waiting = longest.phases["data"].share if "data" in longest.phases else 0.0
    return (
        f"{part}; its largest part was “{_label(largest)}” with {_percent(share)}. "
        f"A step took {_ms(longest.step_ms.p50)} (median){_rate_text(longest)}; {_percent(waiting)} of it was waiting for data."
    )


def _rate_text(summary: TrainingSummary) -> str:
    return f", {summary.images_per_second:,.0f} images a second" if summary.images_per_second else ""


def _overview(summaries: Sequence[TrainingSummary]) -> str:
    headers = ["Training", "Recorded", "Steps", "Processes", "Step (median)", "Images a second", "Largest share"]
    rows = []
    for summary in summaries:
        largest = max(summary.recorded_shares.items(), key=lambda item: item[1], default=("between", 0.0))
        rows.append(
            [
                _name(summary),
                _duration(summary.recorded_s),
                f"{summary.steps:,}",
                str(summary.world_size),
                _ms(summary.step_ms.p50) if summary.step_ms else "none",
                f"{summary.images_per_second:,.0f}" if summary.images_per_second else "not recorded",
                f"{_label(largest[0])}, {_percent(largest[1])}",
            ]
        )
    return html.section("The trainings", html.table(headers, rows))


def _training_section(evidence: TrainingEvidence, summary: TrainingSummary) -> str:
    parts = [_place(summary), _tiles(summary), _recording(summary)]
    if summary.step_ms is not None:
        parts += [_step(summary), _histogram(evidence, summary.step_ms)]
    parts += [_over_time(evidence, summary), _operators(summary), _ranks(summary)]
    parts += [_startup(summary.startup), _missing(summary)]
    return html.section(_name(summary), *parts)


def _heading(title: str) -> str:
    return f"<h3>{html.escape(title)}</h3>"


def _place(summary: TrainingSummary) -> str:
    processes = "1 process" if summary.world_size == 1 else f"{summary.world_size} processes"
    thinned = f" (1 in {summary.steps_kept_of} kept)" if summary.steps_kept_of > 1 else ""
    return (
        f'<p class="lead">{html.escape(processes)} on {html.escape(summary.device)}, {summary.cores} cores, '
        f"{html.escape(summary.host)}; {summary.steps:,} steps, {summary.steps_measured:,} of them measured{thinned}: "
        "neither the first nor slowed by the operator window.</p>"
    )


def _tiles(summary: TrainingSummary) -> str:
    entries = [(_duration(summary.recorded_s), "recorded")]
    if summary.step_ms:
        entries.append((_ms(summary.step_ms.p50), "a step (median)"))
    if summary.images_per_second:
        entries.append((f"{summary.images_per_second:,.0f}", "images a second"))
    if "data" in summary.phases:
        entries.append((_percent(summary.phases["data"].share), "of a step waits for data"))
    busy = [signal.mean for name, signal in summary.system.items() if _is_core(name)]
    if busy:
        entries.append((_percent(sum(busy) / len(busy) / 100), f"of {len(busy)} cores busy (mean)"))
    if "gpu_percent" in summary.system:
        entries.append((_percent(summary.system["gpu_percent"].mean / 100), "GPU utilisation (mean)"))
    if "gpu_memory_used_bytes" in summary.system:
        entries.append((_gigabytes(summary.system["gpu_memory_used_bytes"].max), "GPU memory (peak)"))
    elif "process_rss_bytes" in summary.system:
        entries.append((_gigabytes(summary.system["process_rss_bytes"].max), "memory of a process (peak)"))
    return drawing.tiles(entries)


def _recording(summary: TrainingSummary) -> str:
    parts = [Part(name=name, label=_label(name), share=share) for name, share in summary.recorded_shares.items()]
    legend = drawing.legend(
        [(drawing.colour_class(part.name), f"{part.label} {_percent(part.share)}") for part in parts]
    )
    title = "Shares of the whole recording"
    return _heading(f"{title}: {_duration(summary.recorded_s)}") + drawing.stacked_bar(parts, title) + legend


def _step(summary: TrainingSummary) -> str:
    assert summary.step_ms is not None
    rows = []
    for name, phase in summary.phases.items():
        rows.append(_phase_bar(name, _label(name), phase))
    picture = drawing.bars(rows, "ms", "Time of each phase of a step")
    caption = (
        f"A step takes {_ms(summary.step_ms.p50)} (median; 5 % take less than {_ms(summary.step_ms.p5)}, "
        f"5 % more than {_ms(summary.step_ms.p95)}). Bars: median of each phase; whiskers: 5th to 95th percentile; "
        "the percentage is the phase's share of all measured steps."
    )
    named = [(path, share) for phase in summary.phases.values() for path, share in phase.ranges.items()]
    table = html.table(["Range within a phase", "Share of a step"], [(path, _percent(share)) for path, share in named])
    return _heading("Where a step's time goes") + html.drawing(picture, caption) + (table if named else "")


def _phase_bar(name: str, label: str, phase: PhaseSummary) -> Bar:
    ms = phase.ms
    note = f"{_percent(phase.share)}  ·  {_ms(ms.p50)}  ({drawing.short(ms.p5)} to {drawing.short(ms.p95)})"
    return Bar(name=name, label=label, value=ms.p50, note=note, low=ms.p5, high=ms.p95)


def _histogram(evidence: TrainingEvidence, step_ms: Spread) -> str:
    first = evidence.ranks[0]
    values = first.steps["seconds"][measured_steps(first)] * 1000
    heading = _heading("How long steps take")
    if len(values) < _FEWEST_STEPS_DRAWN:
        return heading + html.paragraph(
            f"Not drawn: {len(values)} steps are too few, {_FEWEST_STEPS_DRAWN} are needed."
        )
    marks = [(step_ms.p50, "median"), (step_ms.p95, "95 %")]
    if step_ms.p95 < 1.1 * step_ms.p50:
        marks = marks[:1]
    picture = drawing.histogram(values, marks, "ms", "How long steps take", count_label="steps")
    caption = f"Slowest step: {_ms(step_ms.max)}. The slowest half percent is drawn into the last bar."
    return heading + html.drawing(picture, caption)


# ---------------------------------------------------------------------------------------------------------------------
# Over time


def _over_time(evidence: TrainingEvidence, summary: TrainingSummary) -> str:
    first = evidence.ranks[0]
    duration = max(summary.recorded_s, 1e-6)
    edges = np.linspace(0, duration, BINS + 1)
    shares = binning.phase_shares(first, edges)
    lanes = [
        *_metric_lanes(evidence, duration),
        drawing.stack_lane("Time", "% of the time", shares),
        *_core_lanes(first.system, edges),
        *_machine_lanes(first.system, edges, duration),
    ]
    legend = drawing.legend([(drawing.colour_class(name), _label(name)) for name in shares])
    caption = (
        "All strips share the time axis. Time: what each moment was spent on, in rank 0. "
        "Cores: the stronger the colour, the busier."
    )
    picture = drawing.over_time(lanes, duration, "The training and the machine over time")
    return _heading("The training and the machine over time") + legend + html.drawing(picture, caption)


def _metric_lanes(evidence: TrainingEvidence, duration: float) -> list[Lane]:
    lanes = []
    for name, title, unit, factor in (("loss", "Loss", "training", 1.0), ("val_top1", "Top-1", "%, validation", 100.0)):
        metric = evidence.metrics.get(name)
        if metric is None or not np.isfinite(metric.values).any():
            continue
        seconds, values = binning.thin_curve(metric.seconds, metric.values * factor, BINS)
        curve = Curve(style="s0", label=name, seconds=seconds, values=values)
        lanes.append(drawing.line_lane(title, unit, [curve], duration, low=None))
    return lanes


def _core_lanes(system: Mapping[str, Series], edges: Series) -> list[Lane]:
    cores = [name for name in system if _is_core(name)]
    if not cores or not len(system["end_s"]):
        return []
    percent = np.stack([binning.mean_in_bins(system["end_s"], system[name], edges) for name in cores])
    return [drawing.heat_lane("CPU cores", "0 to 100 % busy", percent)]


def _is_core(name: str) -> bool:
    return name.startswith("cpu") and name.endswith("_percent")


def _machine_lanes(system: Mapping[str, Series], edges: Series, duration: float) -> list[Lane]:
    centres = (edges[1:] + edges[:-1]) / 2
    lanes = []
    for title, unit, factor, high, signals in _MACHINE_LANES:
        curves = [
            Curve(
                style=style,
                label=label,
                seconds=centres,
                values=binning.mean_in_bins(system["end_s"], system[column] * factor, edges),
            )
            for style, column, label in signals
            if column in system
        ]
        if any(np.isfinite(curve.values).any() for curve in curves):
            lanes.append(drawing.line_lane(title, unit, curves, duration, height=54, high=high))
    return lanes


# ---------------------------------------------------------------------------------------------------------------------
# Operators, ranks, start-up


def _operators(summary: TrainingSummary) -> str:
    title = _heading("Top operators")
    operators = summary.operators
    if operators is None:
        return title + html.paragraph(f"Not recorded: {summary.missing.get('operators', 'no reason given')}.")
    total = max(sum(operators.categories.values()), 1e-12)
    place = "on the device" if operators.clock == "device" else "on the CPU"
    rows = [
        Bar(name="forward", label=name, value=ms, note=f"{_percent(ms / total)}  ·  {_ms(ms)}")
        for name, ms in operators.categories.items()
    ]
    caption = (
        f"Own time {place} for each kind of work, a step, over {operators.steps} steps of torch.profiler (rank 0)."
    )
    parts = [title, html.drawing(drawing.bars(rows, "ms a step", "Operators by kind of work"), caption)]
    parts.append(_operator_table("Operator", operators.top, operators, total))
    if operators.kernels:
        parts.append(_operator_table("Kernel", operators.kernels, operators, total))
    return "".join(parts)


def _operator_table(kind: str, rows: Sequence[Operator], summary: OperatorSummary, total: float) -> str:
    def cells(row: Operator) -> list[object]:
        spent = operator_ms(row, summary.clock) / summary.steps
        return [
            _clip(row.name),
            row.category,
            drawing.short(row.calls / summary.steps),
            _ms(spent),
            _percent(spent / total),
        ]

    headers = [kind, "Kind of work", "Calls a step", "Own time a step", "Share"]
    return html.table(headers, [cells(row) for row in rows])


def _clip(name: str, length: int = 90) -> str:
    return name if len(name) <= length else f"{name[: length - 1]}…"


def _ranks(summary: TrainingSummary) -> str:
    ranks = [rank for rank in summary.ranks if rank.step_ms is not None][:_MOST_RANKS_DRAWN]
    if len(ranks) < 2:
        return ""
    rows = []
    for rank in ranks:
        parts = [Part(name=name, label=_label(name), share=ms) for name, ms in rank.phase_ms.items()]
        memory = f", {_gigabytes(rank.memory_bytes)}" if rank.memory_bytes else ""
        rows.append((f"rank {rank.rank}", parts, f"{_ms(rank.step_ms.p50 if rank.step_ms else 0.0)}{memory}"))
    most = max(sum(part.share for part in parts) for _, parts, _ in rows)
    picture = drawing.stacked_rows(rows, most, "ms", "The processes side by side")
    more = f" The first {len(ranks)} of {summary.world_size} are drawn." if len(ranks) < len(summary.ranks) else ""
    caption = (
        "Medians of each phase, with the median step and the largest memory. The gradients are summed in the backward pass, "
        f"so a process that waits for a slower one waits there.{more}"
    )
    return _heading("The processes side by side") + html.drawing(picture, caption)


def _startup(startup: StartupSummary) -> str:
    rows = [
        Bar(name="other", label=label, value=seconds, note=note)
        for label, seconds, note in (
            ("imports", startup.imports_s, "from the start of the process"),
            ("preparation", startup.preparation_s, "data set, models, process group"),
            ("first step", startup.first_step_s or 0.0, "loaders' start and warm-up included"),
        )
    ]
    rows = [
        Bar(name=row.name, label=row.label, value=row.value, note=f"{_duration(row.value)}  ·  {row.note}")
        for row in rows
        if row.value
    ]
    if not rows:
        return ""
    return _heading("Start-up") + drawing.bars(rows, "s", "Start-up", note_width=320)


def _missing(summary: TrainingSummary) -> str:
    if not summary.missing:
        return ""
    return _heading("Not recorded") + html.table(["Signal", "Reason"], list(summary.missing.items()))


# ---------------------------------------------------------------------------------------------------------------------
# Words for numbers


def _name(summary: TrainingSummary) -> str:
    return _TRAININGS.get(summary.name, summary.name)


def _label(name: str) -> str:
    return _LABELS.get(name, name)


def _percent(share: float) -> str:
    value = 100 * share
    if 0 < value < 0.05:
        return "< 0.1 %"
    return f"{value:.1f} %" if 0 < value < 9.95 else f"{value:.0f} %"


def _ms(milliseconds: float) -> str:
    return f"{milliseconds / 1000:.3g} s" if milliseconds >= 10_000 else f"{drawing.short(milliseconds)} ms"


def _gigabytes(count: float) -> str:
    return f"{count / 1e9:.2f} GB"


def _duration(seconds: float) -> str:
    if seconds < 120:
        return f"{drawing.short(seconds)} s"
    if seconds < 2 * 3600:
        return f"{int(seconds // 60)} min {int(seconds % 60)} s"
    return f"{int(seconds // 3600):,} h {int(seconds % 3600 // 60)} min"
