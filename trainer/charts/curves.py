"""Charts of an evaluation and of recorded outputs: calibration, recall by class, and how probability mass is spread."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from markupsafe import Markup
from numpy.typing import NDArray

from trainer.charts.svg import (
    LEFT,
    drawing,
    element,
    group,
    hinted,
    line,
    path,
    rectangle,
    row_label,
    text,
    ticks,
)
from trainer.formatting import percent, short

_MOST_CLASSES = 100


@dataclass(frozen=True, kw_only=True)
class ReliabilityCurve:
    """How often the predictions of a model are right, by their confidence."""

    name: str
    confidence: Sequence[float | None]
    """Mean of each bin; None where it is empty."""
    accuracy: Sequence[float | None]
    counts: Sequence[int]
    """Images in each bin; the bins divide 0 to 1 evenly."""


def reliability(models: Sequence[ReliabilityCurve], title: str) -> Markup:
    """Draw accuracy against confidence for each model, above the number of images in each bin."""
    left, edge, lower, gap = 56, 420.0, 110.0, 26.0
    most = max((count for model in models for count in model.counts), default=0) or 1
    content = [rectangle(0, 0, edge, edge, "panel"), rectangle(0, edge + gap, edge, lower, "panel")]
    for tick in ticks(0, 1, 5):
        x, y = tick * edge, (1 - tick) * edge
        content += [line(0, y, edge, y, "grid"), line(x, 0, x, edge, "grid")]
        content.append(text(-8, y + (10 if tick == 1 else 4), percent(tick), "soft end"))
        content.append(text(x, edge + gap + lower + 16, percent(tick), "soft mid"))
    for tick in (tick for tick in ticks(0, most, 2) if tick == round(tick) and tick):
        y = edge + gap + lower * (1 - tick / most)
        content += [line(0, y, edge, y, "grid"), text(-8, y + 4, short(tick), "soft end")]
    content.append(line(0, edge, edge, 0, "edge e-plain"))
    for series, model in enumerate(models):
        points = []
        for confidence, accuracy, count in zip(model.confidence, model.accuracy, model.counts, strict=True):
            if confidence is not None and accuracy is not None:
                about = f"of {count:,} images with a confidence of about {percent(confidence)}, {percent(accuracy)} are right"
                points.append((confidence * edge, (1 - accuracy) * edge, f"{model.name}: {about}"))
        if points:
            content.append(path("M" + "L".join(f"{x:.1f} {y:.1f}" for x, y, _ in points), f"line m{series}"))
        content += [_dot(x, y, f"g{series}", hint) for x, y, hint in points]
        heights = [edge + gap + lower * (1 - count / most) for count in model.counts]
        content.append(path(outline(heights, edge), f"line m{series}", f"{model.name}: images by confidence"))
    bottom = edge + gap + lower
    content += [text(edge / 2, bottom + 36, "confidence", "soft mid"), text(0, edge + gap - 8, "images", "soft")]
    return drawing(bottom + 60, group(left, 18, text(0, -6, "accuracy", "soft"), *content), title=title, width=500)


def _dot(x: float, y: float, style: str, hint: str) -> Markup:
    return hinted(hint, element("circle", cx=x, cy=y, r=4, class_=style))


def outline(heights: Sequence[float], width: float) -> str:
    """Write the line along the tops of bars that stand side by side, as path data."""
    step = width / len(heights)
    corners = [f"{(bar + side) * step:.1f} {height:.1f}" for bar, height in enumerate(heights) for side in (0, 1)]
    return "M" + "L".join(corners)


def recalls(by_model: Mapping[str, NDArray[np.float64]], classes: Sequence[str], title: str) -> Markup:
    """Draw the recall of each class for each model, the worst classes of the last model first; at most 100.

    Args:
        by_model: name -> recall [K], NaN for a class without images.
        classes: name of each class.
    """
    order = np.argsort(list(by_model.values())[-1], kind="stable")[:_MOST_CLASSES].tolist()
    length, row = 540.0, 20 if len(order) <= 40 else 15
    height = row * len(order)
    content = []
    for tick in ticks(0, 1, 5):
        x = LEFT + tick * length
        content += [line(x, 0, x, height, "grid"), text(x, height + 16, percent(tick), "soft mid")]
    for position, index in enumerate(order):
        y = (position + 0.5) * row
        content.append(line(LEFT, y, LEFT + length, y, "grid"))
        content.append(row_label(LEFT - 10, y + 4, classes[index], keep_end=False))
        for series, (model, values) in enumerate(by_model.items()):
            if np.isfinite(values[index]):
                hint = f"{classes[index]}: {model} {percent(float(values[index]))}"
                content.append(_dot(LEFT + float(values[index]) * length, y, f"g{series}", hint))
    content.append(text(LEFT + length / 2, height + 34, "recall", "soft mid"))
    return drawing(height + 44, *content, title=title, width=LEFT + 570, top=-2)


def outlines(
    counts: Mapping[str, Sequence[int]], bins: Sequence[str], tick_labels: Sequence[str], note: str, title: str
) -> Markup:
    """Draw several histograms over the same bins as outlines.

    Args:
        counts: name -> count in each bin, drawn in the colours of the series in order.
        bins: what each bin holds, for the hints.
        tick_labels: evenly spaced from the left end to the right.
        note: stands above.
    """
    width, height, top = 720, 160, 20
    most = max(max(values) for values in counts.values()) or 1
    content = [text(0, -6, note, "soft"), line(0, height, width, height, "axis")]
    for series, values in enumerate(counts.values()):
        heights = [height * (1 - value / most) for value in values]
        content.append(path(outline(heights, width), f"line s{series}"))
    step = width / len(bins)
    for index, label in enumerate(bins):
        said = ", ".join(f"{values[index]:,} at {name}" for name, values in counts.items())
        content.append(rectangle(index * step, 0, step, height, "hit", f"{label}: {said}"))
    for index, label in enumerate(tick_labels):
        style = "soft" if index == 0 else "soft end" if index == len(tick_labels) - 1 else "soft mid"
        content.append(text(index / (len(tick_labels) - 1) * width, height + 16, label, style))
    return drawing(height + top + 24, *content, title=title, width=width, top=-top)
