"""Weights, gradients and updates of each layer over the training, and how sharply each block attends."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from trainer import formatting
from trainer.charts import HeatMap, heat_map
from trainer.pages import Block, Details, Figure, Subsection, Table
from trainer.profiling.evidence import Curve, TensorSamples, TrainingEvidence
from trainer.profiling.series import Series
from trainer.svg import Flags

_MOST_LAYERS = 40
_MOST_COLUMNS = 64
_ATTENTION = "attention_entropy/"
_MEASURES = (
    ("gradient_norm", "Norm of the gradient"),
    ("update_ratio", "Update against weights"),
    ("weight_norm", "Norm of the weights"),
)


@dataclass(frozen=True, kw_only=True)
class Layers:
    """Tensor statistics, brought together by layer."""

    names: Sequence[str]
    steps: Series
    """[looks]."""
    values: Mapping[str, Series]
    """Measure -> [layers, looks]: norms over the whole layer, NaN where there is none."""
    broken: Flags
    """[layers, looks]: a weight or a gradient is not finite."""


def section(evidence: TrainingEvidence) -> Subsection | None:
    """Show heat maps of layers over time, of those whose tensors were sampled."""
    looks = evidence.ranks[0].tensors
    blocks: list[Block | None] = [_attention(evidence.metrics)]
    if len(looks.steps):
        layers = by_layer(looks)
        blocks = [*(_measure(layers, name, title) for name, title in _MEASURES), _table(layers), *blocks]
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
    """Map each tensor to its layer, in the finest detail that fits; if none fits, neighbours are grouped."""
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
    names: Sequence[str], steps: Series, shares: Series, broken: Flags, title: str, caption: str, ends: Sequence[str]
) -> Figure:
    columns = min(_MOST_COLUMNS, len(steps))
    groups = np.array_split(np.arange(len(steps)), columns)
    # the mean of each row's known values in a group of columns, NaN if none is known
    known = np.isfinite(shares)
    counts, sums = (
        np.stack([values[:, group].sum(axis=1) for group in groups], axis=1)
        for values in (known, np.where(known, shares, 0.0))
    )
    chart = HeatMap(
        labels=names,
        shares=np.where(counts, sums / np.maximum(counts, 1), np.nan),
        marked=np.stack([broken[:, group].any(axis=1) for group in groups], axis=1),
        columns=[f"{steps[group[0]]:,.0f}" for group in groups],
        low=ends[0],
        high=ends[1],
        unit="step",
    )
    return Figure(heat_map(chart, title), caption)


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
    curves = {name.removeprefix(_ATTENTION): curve for name, curve in metrics.items() if name.startswith(_ATTENTION)}
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
