"""The training and the machine over time, on one axis."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from trainer import charts
from trainer.charts import BINS, ChartLine, Lane, MarkedTime, by_colour
from trainer.pages import Figure, Legend, Subsection
from trainer.profiling import labels
from trainer.profiling.evidence import BETWEEN, OTHER, PHASES, RankEvidence, TrainingEvidence, is_core, phase_seconds
from trainer.profiling.findings import RankedFinding
from trainer.profiling.series import Series, mean_in_bins, spread_over, thin_curve
from trainer.profiling.training_summary import TrainingSummary
from trainer.svg import colour_class

_METRICS = (
    ("loss", "Loss", "training", 1.0),
    ("val_top1", "Top-1", "%, validation", 100.0),
    ("agreement", "Agreement", "% with the teacher", 100.0),
)
"""Name, title, unit, factor."""
_MACHINE = (
    ("GPU", "% busy", 1.0, 100.0, (("s0", "gpu_percent", "busy"),)),
    (
        "GPU memory",
        "GB",
        1e-9,
        1.0,
        (("s0", "gpu_memory_used_bytes", "used"), ("s1", "gpu_memory_allocated_bytes", "by tensors")),
    ),
    ("Device memory", "GB", 1e-9, 1.0, (("s0", "device_memory_used_bytes", "used"),)),
    ("Memory", "GB", 1e-9, 1.0, (("s0", "process_rss_bytes", "process"), ("s1", "memory_used_bytes", "machine"))),
    ("Storage", "% of cores wait", 1.0, 10.0, (("s0", "iowait_percent", "wait"),)),
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


def section(
    evidence: TrainingEvidence, summary: TrainingSummary, findings: Sequence[tuple[int, RankedFinding]]
) -> Subsection:
    """Show the windows of the training's findings (with their numbers on the page), curves, phases, steps, and the machine."""
    first = evidence.ranks[0]
    duration = max(summary.recorded_s, 1e-6)
    edges = np.linspace(0, duration, BINS + 1)
    shares = by_colour(phase_shares(first, edges))
    windows = []
    for number, one in findings:
        span, steps = one.finding.window_s, first.steps["step"]
        if not span and one.finding.steps and len(steps):
            rows = np.clip(np.searchsorted(steps, one.finding.steps), 0, len(steps) - 1).tolist()
            start, end = (float(first.steps["start_s"][row]) for row in rows)
            span = start, end + float(first.steps["seconds"][rows[1]])
        if span:  # a finding without one was seen all the time
            name, style = f"{number}. {one.answer.title}", one.finding.severity
            windows.append(MarkedTime(label=name, style=style, start_s=span[0], end_s=span[1]))
    lanes = [
        *([charts.window_lane("Findings", "when seen", windows, duration)] if windows else []),
        *_metric_lanes(evidence, duration),
        charts.stack_lane("Time", "% of the time", shares, {name: labels.label(name) for name in shares}),
        *_step_lanes(first, edges, duration),
        *_machine_lanes(first.system, edges, duration),
    ]
    legend = Legend([(colour_class(name), labels.label(name)) for name in shares])
    caption = "All strips share the time axis. Time: what each moment was spent on, in rank 0. Cores: the stronger the colour, the busier."
    title = "The training and the machine over time"
    return Subsection(title, [legend, Figure(charts.over_time(lanes, duration, title, windows=windows), caption)])


def _metric_lanes(evidence: TrainingEvidence, duration: float) -> list[Lane]:
    lanes = []
    for name, title, unit, factor in _METRICS:
        metric = evidence.metrics.get(name)
        if metric is None or not np.isfinite(metric.values).any():
            continue
        seconds, values = thin_curve(metric.seconds, metric.values * factor, BINS)
        curve = ChartLine(style="s0", label=name, seconds=seconds, values=values)
        lanes.append(charts.line_lane(title, unit, [curve], duration, low=None))
    return lanes


def _step_lanes(rank: RankEvidence, edges: Series, duration: float) -> list[Lane]:
    """Draw the mean and the longest step of each bin, and how many batches the loaders had ready."""
    if not len(rank.steps["start_s"]):
        return []
    centres, ms = _by_bin(rank, rank.steps["seconds"] * 1000, edges)
    curves = [
        ChartLine(style="s1", label="longest", seconds=centres, values=np.array([values.max() for values in ms])),
        ChartLine(style="s0", label="mean", seconds=centres, values=np.array([values.mean() for values in ms])),
    ]
    lanes = [charts.line_lane("Steps", "ms", curves, duration, height=54)]
    if np.isfinite(rank.steps["queued"]).any():
        centres, queued = _by_bin(rank, rank.steps["queued"], edges)
        ready = np.array([values.mean() for values in queued])
        curve = ChartLine(style="s0", label="ready", seconds=centres, values=ready)
        lanes.append(charts.line_lane("Loaders", "batches ready", [curve], duration, height=54, high=2.0))
    return lanes


def _by_bin(rank: RankEvidence, values: Series, edges: Series) -> tuple[Series, list[Series]]:
    """Group values by the bin in which their step began; returns the centres of the bins, and the values in each."""
    place = np.clip(np.searchsorted(edges, rank.steps["start_s"], side="right") - 1, 0, len(edges) - 2)
    bins, starts = np.unique(place, return_index=True)  # steps stand in the order of time
    return (edges[bins] + edges[bins + 1]) / 2, np.split(values, starts[1:])


def _machine_lanes(system: Mapping[str, Series], edges: Series, duration: float) -> list[Lane]:
    ends, centres, lanes = system["end_s"], (edges[1:] + edges[:-1]) / 2, []
    cores = [mean_in_bins(ends, values, edges) for name, values in system.items() if is_core(name) and len(ends)]
    if cores:
        lanes.append(charts.heat_lane("CPU cores", "% busy", np.stack(cores)))
    for title, unit, factor, high, signals in _MACHINE:
        curves = []
        for style, column, label in signals:
            values = mean_in_bins(ends, system[column] * factor, edges) if column in system else np.array([])
            if np.isfinite(values).any():
                curves.append(ChartLine(style=style, label=label, seconds=centres, values=values))
        if curves:
            lanes.append(charts.line_lane(title, unit, curves, duration, height=54, high=high))
    return lanes


def phase_shares(rank: RankEvidence, edges: Series) -> Mapping[str, Series]:
    """Compute the share of each bin's time that every phase, and every range outside of steps, took.

    Where the table of steps was thinned, what lies between kept steps is unknown, and the shares are those of the known time.

    Returns:
        Name -> [bins]; together at most 1.
    """
    amounts, starts = {}, rank.steps["start_s"]
    if len(starts):
        # On a GPU the device may end a step after the host began the next one.
        ends = np.minimum(starts + rank.steps["seconds"], np.append(starts[1:], np.inf))
        for name, seconds in phase_seconds(rank).items():
            amounts[name] = spread_over(starts, ends, seconds, edges)
    names = np.asarray(rank.spans.names, dtype=object)
    for name in dict.fromkeys(rank.spans.names):
        starts, seconds = rank.spans.start_s[names == name], rank.spans.seconds[names == name]
        amounts[name] = spread_over(starts, starts + seconds, seconds, edges)
    widths = np.diff(edges)
    known = np.sum(list(amounts.values()), axis=0) if amounts else np.zeros(len(widths))
    whole = widths if rank.record.steps.kept_of == 1 else known
    shares = {name: np.divide(amount, np.maximum(np.maximum(whole, known), 1e-12)) for name, amount in amounts.items()}
    if rank.record.steps.kept_of == 1:
        shares[BETWEEN] = np.clip(1 - np.sum(list(shares.values()), axis=0), 0, 1) if shares else np.ones(len(widths))
    order = [*PHASES, OTHER, *(name for name in shares if name not in (*PHASES, OTHER, BETWEEN)), BETWEEN]
    return {name: shares[name] for name in order if name in shares}
