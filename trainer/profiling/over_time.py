"""What changes over a training: curves, steps and the machine on one axis of time; weights, gradients and attention of each layer."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from trainer.io import formatting
from trainer.profiling.evidence import (
    ATTENTION_ENTROPY,
    BETWEEN,
    OTHER,
    PHASES,
    Curve,
    RankEvidence,
    TensorSamples,
    TrainingEvidence,
    is_core,
    phase_seconds,
)
from trainer.profiling.findings import RankedFinding
from trainer.profiling.series import Series, mean_in_bins, means_from, spread_over, thin_curve
from trainer.profiling.training_summary import TrainingSummary, phase_label
from trainer.report import charts
from trainer.report.charts import BINS, ChartLine, Flags, Lane, MarkedTime, by_color, color_class
from trainer.report.pages import Block, Details, Figure, Legend, Paragraph, Subsection, Table

_METRICS = (
    ("loss", "Loss", "training", 1.0),
    ("val_top1", "Top-1", "%, validation", 100.0),
    ("val_map", "mAP", "%, validation", 100.0),
    ("agreement", "Agreement", "% with the teacher", 100.0),
)  # name, title, unit, factor
_NETWORK: tuple[str, str, float, float, Mapping[str, str]] = (
    "Network",
    "MB/s",
    1e-6,
    1.0,
    {"received": "network_received_bytes_per_s", "sent": "network_sent_bytes_per_s"},
)
_MACHINE: Sequence[tuple[str, str, float, float, Mapping[str, str]]] = (
    ("GPU", "% busy", 1.0, 100.0, {"busy": "gpu_percent"}),
    ("GPU memory", "GB", 1e-9, 1.0, {"used": "gpu_memory_used_bytes", "by tensors": "gpu_memory_allocated_bytes"}),
    ("Device memory", "GB", 1e-9, 1.0, {"used": "device_memory_used_bytes"}),
    ("Memory", "GB", 1e-9, 1.0, {"process": "process_rss_bytes", "machine": "memory_used_bytes"}),
    ("Storage", "% of cores wait", 1.0, 10.0, {"wait": "iowait_percent"}),
    ("Disk", "MB/s", 1e-6, 1.0, {"read": "disk_read_bytes_per_s", "written": "disk_write_bytes_per_s"}),
    _NETWORK,
)  # title, unit, factor, least upper end of the axis, and label -> column of each line
_UNFOLDED_MACHINES = 8
_MOST_MACHINES = 40  # of more than these the page would be too large
_MACHINE_BINS = 120
_MOST_CORE_ROWS = 24
_MOST_LAYERS = 40
_MOST_COLUMNS = 64
_MEASURES = (
    ("gradient_norm", "Norm of the gradient"),
    ("update_ratio", "Update against weights"),
    ("weight_norm", "Norm of the weights"),
)


def section(
    evidence: TrainingEvidence, summary: TrainingSummary, findings: Sequence[tuple[int, RankedFinding]]
) -> Subsection:
    """Show the windows of the training's findings (with their numbers on the page), curves, phases, steps, and the machine."""
    first = evidence.ranks[0]
    duration = max(summary.recorded_s, 1e-6)
    edges = np.linspace(0, duration, BINS + 1)
    shares = by_color(phase_shares(first, edges))
    windows = []
    for number, (answer, finding) in findings:
        span, steps = finding.window_s, first.steps["step"]
        if not span and finding.steps and len(steps):
            rows = np.clip(np.searchsorted(steps, finding.steps), 0, len(steps) - 1).tolist()
            start, end = (float(first.steps["start_s"][row]) for row in rows)
            span = start, end + float(first.steps["seconds"][rows[1]])
        if span:  # a finding without one was seen all the time
            name = f"{number}. {answer.title}"
            windows.append(MarkedTime(label=name, style=finding.severity, start_s=span[0], end_s=span[1]))
    lanes = [
        *([charts.window_lane("Findings", "when seen", windows, duration)] if windows else []),
        *_metric_lanes(evidence, duration),
        charts.stack_lane("Time", "% of the time", shares, {name: phase_label(name) for name in shares}),
        *_step_lanes(first, edges, duration),
        *_machine_lanes(first.system, edges, duration),
    ]
    legend = Legend([(color_class(name), phase_label(name)) for name in shares])
    caption = "All strips share the time axis. Time: what each moment was spent on, in rank 0. Cores: the stronger the color, the busier."
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
    starts, queued = rank.steps["start_s"], rank.steps["queued"]
    if not len(starts):
        return []
    centers, ms = _by_bin(starts, rank.steps["seconds"] * 1000, edges)
    curves = [
        ChartLine(style="s1", label="longest", seconds=centers, values=np.array([values.max() for values in ms])),
        ChartLine(style="s0", label="mean", seconds=centers, values=np.array([values.mean() for values in ms])),
    ]
    lanes = [charts.line_lane("Steps", "ms", curves, duration, height=54)]
    known = np.isfinite(queued)
    if known.any():
        centers, ready = _by_bin(starts[known], queued[known], edges)
        means = np.array([values.mean() for values in ready])
        curve = ChartLine(style="s0", label="ready", seconds=centers, values=means)
        lanes.append(charts.line_lane("Loaders", "batches ready", [curve], duration, height=54, high=2.0))
    return lanes


def _by_bin(began: Series, values: Series, edges: Series) -> tuple[Series, list[Series]]:
    """Group values by the bin in which their step began; returns the centers of the bins, and the values in each."""
    place = np.clip(np.searchsorted(edges, began, side="right") - 1, 0, len(edges) - 2)
    bins, first = np.unique(place, return_index=True)  # steps stand in the order of time
    return (edges[bins] + edges[bins + 1]) / 2, np.split(values, first[1:])


def _machine_lanes(system: Mapping[str, Series], edges: Series, duration: float) -> list[Lane]:
    ends, centers, lanes = system["end_s"], (edges[1:] + edges[:-1]) / 2, []
    cores = [mean_in_bins(ends, values, edges) for name, values in system.items() if is_core(name) and len(ends)]
    if cores:
        lanes.append(charts.heat_lane("CPU cores", "% busy", np.stack(cores)))
    for title, unit, factor, high, columns in _MACHINE:
        curves = []
        for number, (label, column) in enumerate(columns.items()):
            values = mean_in_bins(ends, system[column] * factor, edges) if column in system else np.array([])
            if np.isfinite(values).any():
                curves.append(ChartLine(style=f"s{number}", label=label, seconds=centers, values=values))
        if curves:
            lanes.append(charts.line_lane(title, unit, curves, duration, height=54, high=high))
    return lanes


def machines(evidence: TrainingEvidence) -> Subsection | None:
    """Show cores, GPUs and network of every machine over time; None where the training had one machine with one GPU or none."""
    hosts: dict[str, list[RankEvidence]] = {}
    for rank in evidence.ranks:
        hosts.setdefault(rank.record.host, []).append(rank)
    gpus = sum("gpu_percent" in rank.system for rank in evidence.ranks)
    if len(hosts) < 2 and gpus < 2:
        return None
    began = evidence.ranks[0].record.began_unix
    duration = max(*(rank.record.ended_s + rank.record.began_unix - began for rank in evidence.ranks), 1e-6)
    edges = np.linspace(0, duration, _MACHINE_BINS + 1)
    drawn: list[Block] = []
    for host, ranks in [*hosts.items()][:_MOST_MACHINES]:
        lanes = _lanes_of_machine(ranks, edges, duration, began)
        title = f"{formatting.clipped(host, 40)}: process{'es' if len(ranks) > 1 else ''} {_spoken([one.record.rank for one in ranks])}"
        if lanes:
            drawn.append(Figure(charts.over_time(lanes, duration, title), title))
    if not drawn:
        return None
    folded = drawn[_UNFOLDED_MACHINES:]
    undrawn = len(hosts) - _MOST_MACHINES
    more = f" The first {_MOST_MACHINES} of {len(hosts)} machines are drawn." if undrawn > 0 else ""
    return Subsection(
        "Every machine over time",
        [
            Paragraph(f"Cores and GPUs: the stronger the color, the busier, or the fuller the memory.{more}"),
            *drawn[:_UNFOLDED_MACHINES],
            Details(f"{len(folded)} more machine{'s' if len(folded) > 1 else ''}", folded) if folded else None,
        ],
    )


def _lanes_of_machine(ranks: Sequence[RankEvidence], edges: Series, duration: float, began: float) -> list[Lane]:
    """Draw the cores and the network as the machine's first process saw them, and the GPU of each process."""

    def binned(rank: RankEvidence, values: Series) -> Series:
        late = max(0.0, rank.record.began_unix - began)  # nothing is known before
        return mean_in_bins(np.append(late, rank.system["end_s"] + late), np.append(np.nan, values), edges)

    lanes = []
    for rank in ranks:
        cores = [binned(rank, values) for name, values in rank.system.items() if is_core(name) and len(values)]
        if cores:
            lanes.append(charts.heat_lane("CPU cores", "% busy", np.stack(cores), most_rows=_MOST_CORE_ROWS))
            break
    used = [binned(rank, rank.system["gpu_percent"]) for rank in ranks if "gpu_percent" in rank.system]
    if used:
        lanes.append(charts.heat_lane("GPUs", "% busy", np.stack(used)))
    full = [
        binned(rank, 100 * rank.system["gpu_memory_used_bytes"] / rank.system["gpu_memory_total_bytes"])
        for rank in ranks
        if "gpu_memory_total_bytes" in rank.system
    ]
    if full:
        lanes.append(charts.heat_lane("GPU memory", "% used", np.stack(full)))
    for rank in ranks:
        title, unit, factor, high, columns = _NETWORK
        curves = [
            ChartLine(style=f"s{number}", label=label, seconds=(edges[1:] + edges[:-1]) / 2, values=values)
            for number, (label, column) in enumerate(columns.items())
            if column in rank.system and np.isfinite(values := binned(rank, rank.system[column] * factor)).any()
        ]
        if curves:
            lanes.append(charts.line_lane(title, unit, curves, duration, height=54, high=high))
            break
    return lanes


def _spoken(ranks: Sequence[int]) -> str:
    """Write ranks: `0 to 7` where they follow one another."""
    follow = len(ranks) > 2 and list(ranks) == [*range(ranks[0], ranks[0] + len(ranks))]
    return f"{ranks[0]} to {ranks[-1]}" if follow else formatting.listed([*map(str, ranks)], 8)


def phase_shares(rank: RankEvidence, edges: Series) -> Mapping[str, Series]:
    """Compute each phase's and outside range's share of every bin's time: name -> [bins], together at most 1.

    Where a table was thinned, the time between kept rows is unknown, and the shares are those of the known time.
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
    outside = sum(total.count for name, total in rank.record.outside.items() if name != BETWEEN)
    all_kept = rank.record.steps.kept_of == 1 and len(rank.spans.names) >= outside
    whole = widths if all_kept else known
    shares = {name: np.divide(amount, np.maximum(np.maximum(whole, known), 1e-12)) for name, amount in amounts.items()}
    if all_kept:
        shares[BETWEEN] = np.clip(1 - np.sum(list(shares.values()), axis=0), 0, 1) if shares else np.ones(len(widths))
    order = [*PHASES, OTHER, *(name for name in shares if name not in (*PHASES, OTHER, BETWEEN)), BETWEEN]
    return {name: shares[name] for name in order if name in shares}


@dataclass(frozen=True, kw_only=True)
class Layers:
    """Tensor statistics, brought together by layer."""

    names: Sequence[str]
    steps: Series  # [looks]
    values: Mapping[str, Series]  # measure -> [layers, looks]: norms over the whole layer, NaN where there is none
    broken: Flags  # [layers, looks]: a weight or a gradient is not finite


def layers(evidence: TrainingEvidence) -> Subsection | None:
    """Show heat maps of the sampled layers over time."""
    looks = evidence.ranks[0].tensors
    blocks: list[Block | None] = [_attention(evidence.metrics)]
    if len(looks.steps):
        grouped = by_layer(looks)
        blocks = [*(_measure(grouped, name, title) for name, title in _MEASURES), _table(grouped), *blocks]
    return Subsection("Weights, gradients and attention", blocks) if any(blocks) else None


def by_layer(looks: TensorSamples) -> Layers:
    """Bring the samples of tensors together as matrices, a row a layer."""
    layer_of = _layers_of(looks.tensors)
    names = list(dict.fromkeys(layer_of.values()))
    rows = [names.index(layer_of[tensor]) for tensor in looks.tensors]

    def together(values: Series) -> Series:
        total = np.zeros((len(names), len(looks.steps)))
        np.add.at(total, rows, np.where(np.isfinite(values), values, 0.0).T)
        known = np.zeros_like(total)
        np.add.at(known, rows, np.isfinite(values).T)
        return np.where(known > 0, total, np.nan)

    weight, gradient, ratio = (looks.values[name] for name in ("weight_norm", "gradient_norm", "update_ratio"))
    weight_squares = together(weight**2)
    broken = np.nan_to_num(looks.values["weight_nonfinite"]) + np.nan_to_num(looks.values["gradient_nonfinite"])
    with np.errstate(divide="ignore", invalid="ignore"):
        update = np.sqrt(together((ratio * weight) ** 2) / weight_squares)
    return Layers(
        names=names,
        steps=looks.steps,
        values={
            "weight_norm": np.sqrt(weight_squares),
            "gradient_norm": np.sqrt(together(gradient**2)),
            "update_ratio": update,
        },
        broken=together(broken) > 0,
    )


def _layers_of(tensors: Sequence[str]) -> dict[str, str]:
    """Map each tensor to its layer, in the finest detail that fits; if none fits, neighbors are grouped."""
    # after a path's last number (`blocks.3.attn.qkv.weight` -> blocks.3; `head.weight` -> head), or after its first one
    for pattern in (r"(.*\.\d+)\.", r"(.*?\.\d+)\."):
        found = {tensor: re.match(pattern, tensor) for tensor in tensors}
        layers = {
            tensor: match.group(1) if match else tensor.rpartition(".")[0] or tensor for tensor, match in found.items()
        }
        if len(set(layers.values())) <= _MOST_LAYERS:
            return layers
    names = list(dict.fromkeys(layers.values()))
    group = -(-len(names) // _MOST_LAYERS)
    together = {}
    for start in range(0, len(names), group):
        some = names[start : start + group]
        together.update(dict.fromkeys(some, f"{some[0]} … {some[-1]}" if len(some) > 1 else some[0]))
    return {tensor: together[layer] for tensor, layer in layers.items()}


def _measure(layers: Layers, name: str, title: str) -> Figure | None:
    values = layers.values[name]
    known = values[np.isfinite(values) & (values > 0)]
    if not len(known):
        return None
    low, high = np.log10(np.percentile(known, [2, 98])).tolist()
    high = high if high > low else low + 1
    with np.errstate(divide="ignore", invalid="ignore"):
        shares = np.clip((np.log10(values) - low) / (high - low), 0.0, 1.0)
    caption = f"{title} of each layer, each time it was sampled, logarithmic."
    if layers.broken.any():
        caption += " Red: weights or gradients that are not finite."
    ends = f"{10**low:.1e}", f"{10**high:.1e}"
    return _map(layers.names, layers.steps, 0.1 + 0.9 * shares, layers.broken, title, caption, ends)


def _map(
    names: Sequence[str], steps: Series, shares: Series, broken: Flags, title: str, caption: str, ends: tuple[str, str]
) -> Figure:
    columns = min(_MOST_COLUMNS, len(steps))
    starts = np.array([group[0] for group in np.array_split(np.arange(len(steps)), columns)])
    marked = np.logical_or.reduceat(broken, starts, axis=1)
    first_steps = [f"{step + 1:,.0f}" for step in steps[starts]]
    chart = charts.heat_map(means_from(starts, shares), marked, names, first_steps, title, ends=ends)
    return Figure(chart, caption)


def _table(layers: Layers) -> Details:
    headers = [
        "Layer",
        *(f"{title}, {when}" for _, title in _MEASURES for when in ("first", "last")),
        "Samples not finite",
    ]
    rows = []
    for row, name in enumerate(layers.names):
        cells = [formatting.clipped(name, 60)]
        for measure, _ in _MEASURES:
            known = layers.values[measure][row]
            known = known[np.isfinite(known)]
            cells += [f"{value:.2e}" for value in known[[0, -1]]] if len(known) else ["none", "none"]
        broken = int(layers.broken[row].sum())
        rows.append([*cells, f"{broken} of {len(layers.steps)}" if broken else "none"])
    return Details("The layers in numbers", [Table(headers, rows)])


def _attention(metrics: Mapping[str, Curve]) -> Figure | None:
    curves = {
        name.removeprefix(ATTENTION_ENTROPY): curve
        for name, curve in metrics.items()
        if name.startswith(ATTENTION_ENTROPY)
    }
    if not curves:
        return None
    steps = np.unique(np.concatenate([curve.steps for curve in curves.values()]))
    values = np.full((len(curves), len(steps)), np.nan)
    for row, curve in enumerate(curves.values()):
        values[row, np.searchsorted(steps, curve.steps)] = curve.values
    known = values[np.isfinite(values)]
    if not len(known):
        return None
    low, high = float(known.min()), float(known.max())
    shares = (values - low) / (high - low) if high > low else np.where(np.isfinite(values), 0.5, np.nan)
    caption = "Entropy of each block's attention, as a share of the largest possible: 0 attends to one place, 1 to all places alike."
    title, ends, broken = "Entropy of the attention", (f"{low:.2f}", f"{high:.2f}"), np.zeros(values.shape, dtype=bool)
    return _map(list(curves), steps, 0.1 + 0.9 * shares, broken, title, caption, ends)
