"""Charts of a training over time: lanes of several kinds below one another, on one time axis."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from markupsafe import Markup

from trainer.charts.matrices import cells
from trainer.charts.svg import LEFT, PLOT, Floats, colour_class, drawing, group, line, path, rectangle, text, ticks
from trainer.formatting import short

BINS = 240
"""Most points of a line, and bins of a band: longer series are reduced to as many first."""

_MOST_HEAT_ROWS = 48
_WHOLE = 0.9
"""Share of the time from which on a window is not marked."""


@dataclass(frozen=True, kw_only=True)
class Lane:
    """A strip of a chart over time; `content` has x from 0 to `PLOT` and y from 0 to `height`."""

    title: str
    unit: str
    height: float
    content: Sequence[Markup]
    labels: Sequence[tuple[str, str]] = ()
    """Style and label of each line."""


@dataclass(frozen=True, kw_only=True)
class ChartLine:
    """A line of a lane; `style` is s0 or s1, `label` tells it from the others."""

    style: str
    label: str
    seconds: Floats
    values: Floats


@dataclass(frozen=True, kw_only=True)
class MarkedTime:
    """A time in which something was seen; `style` is note, warning or severe."""

    label: str
    style: str
    start_s: float
    end_s: float


def over_time(lanes: Sequence[Lane], duration_s: float, title: str, *, windows: Sequence[MarkedTime] = ()) -> Markup:
    """Draw lanes below one another, on one time axis; windows are marked through all of them where they begin and end."""
    units = (
        (300, 1.0, "seconds"),
        (3 * 3600, 60.0, "minutes"),
        (4 * 86400, 3600.0, "hours"),
        (math.inf, 86400.0, "days"),
    )
    divisor, unit = next((divisor, unit) for below, divisor, unit in units if duration_s < below)
    gap, y = 14.0, 8.0
    content = []
    for lane in lanes:
        content += [text(0, y + 13, lane.title), text(0, y + 29, lane.unit, "soft")]
        x = 0.0
        for style, label in lane.labels:
            content += [path(f"M{x:.0f} {y + 41:.1f}h10", f"line {style}"), text(x + 14, y + 45, label, "soft")]
            x += 22 + 6.2 * len(label)
        content.append(group(LEFT, y, *lane.content))
        y += lane.height + gap
    axis = y - gap + 5
    for window in windows:
        if window.end_s - window.start_s <= _WHOLE * duration_s:
            edges = [LEFT + second / duration_s * PLOT for second in (window.start_s, window.end_s)]
            content.append(path("".join(f"M{x:.1f} 0v{axis:.1f}" for x in edges), f"edge e-{window.style}"))
    content.append(line(LEFT, axis, LEFT + PLOT, axis, "axis"))
    for tick in ticks(0, duration_s / divisor, 10):
        x = LEFT + tick * divisor / duration_s * PLOT
        content += [line(x, axis, x, axis + 4, "axis"), text(x, axis + 17, short(tick), "soft mid")]
    content.append(text(0, axis + 17, f"time in {unit}", "soft"))
    return drawing(axis + 24, *content, title=title)


def line_lane(
    title: str,
    unit: str,
    curves: Sequence[ChartLine],
    duration_s: float,
    *,
    height: float = 72,
    low: float | None = 0.0,
    high: float = -math.inf,
) -> Lane:
    """Draw lines with a value axis of their own, with a gap where there is no value.

    Args:
        title: what it is.
        unit: of the values.
        curves: the lines; at least one value is finite.
        duration_s: seconds at the right end.
        height: of the strip.
        low: lower end of the axis; the smallest value where not given.
        high: the axis reaches at least up to it.
    """
    finite = np.concatenate([curve.values[np.isfinite(curve.values)] for curve in curves])
    bottom = float(finite.min()) if low is None else low
    top = max(float(finite.max()), high)
    top = top if top > bottom else bottom + max(abs(bottom), 1.0)
    content = [rectangle(0, 0, PLOT, height, "panel")]
    for tick in ticks(bottom, top, 3):
        y = height * (1 - (tick - bottom) / (top - bottom))
        content += [line(0, y, PLOT, y, "grid"), text(-7, min(max(y + 4, 9), height), short(tick), "soft end")]
    for curve in curves:
        x = curve.seconds / duration_s * PLOT
        y_values = height * (1 - (curve.values - bottom) / (top - bottom))
        known, hint = curve.values[np.isfinite(curve.values)], ""
        if len(known):
            hint = f"{curve.label}: {short(float(known.min()))} to {short(float(known.max()))} ({unit})"
        content.append(path(_points(x, y_values), f"line {curve.style}", hint))
    labels = [(curve.style, curve.label) for curve in curves] if len(curves) > 1 else []
    return Lane(title=title, unit=unit, height=height, content=content, labels=labels)


def _points(x: Floats, y: Floats) -> str:
    """Write lines from point to point as path data; a point that stands alone becomes a dot."""
    commands, pen = [], "M"
    for at, value in zip(x.tolist(), y.tolist(), strict=True):
        if math.isfinite(value):
            commands.append(f"{pen}{at:.1f} {value:.1f}" + ("h0" if pen == "M" else ""))
            pen = "L"
        else:
            pen = "M"
    return "".join(commands)


def heat_lane(title: str, unit: str, percent: Floats) -> Lane:
    """Draw rows of a matrix [rows, bins] of values from 0 to 100, the stronger the higher; many rows are averaged in groups."""
    size = math.ceil(len(percent) / _MOST_HEAT_ROWS)
    starts = range(0, len(percent), size)
    rows = np.stack([percent[start : start + size].mean(axis=0) for start in starts])
    row_height = max(5, min(16, 160 // len(rows)))
    content = [rectangle(0, 0, PLOT, row_height * len(rows), "panel"), *cells(rows / 100, PLOT, row_height)]
    every = max(1, math.ceil(12 / row_height))
    for row in range(0, len(rows), every):
        content.append(text(-7, row * row_height + row_height / 2 + 4, row * size, "soft end"))
    grouped = f", {size} a row" if size > 1 else ""
    return Lane(title=title, unit=unit + grouped, height=max(34, row_height * len(rows)), content=content)


def window_lane(title: str, unit: str, windows: Sequence[MarkedTime], duration_s: float) -> Lane:
    """Draw a row for each window: its label, and a line below it as long as it lasted."""
    row, scale = 22, PLOT / duration_s
    content = [rectangle(0, 0, PLOT, row * len(windows), "panel")]
    for index, window in enumerate(windows):
        y, start = index * row, window.start_s * scale
        length = max((window.end_s - window.start_s) * scale, 3)
        content.append(rectangle(start, y + 15, length, 5, f"w-{window.style}", window.label))
        at, style = (start, None) if start < PLOT / 2 else (start + length, "end")
        content.append(text(at, y + 12, window.label, style))
    return Lane(title=title, unit=unit, height=max(34, row * len(windows)), content=content)


def stack_lane(
    title: str, unit: str, shares: Mapping[str, Floats], labels: Mapping[str, str], *, height: float = 90
) -> Lane:
    """Draw shares [bins] of each phase or range, stacked to the full height; `labels` says what each is called."""
    bins = len(next(iter(shares.values())))
    lower = np.zeros(bins)
    content = [rectangle(0, 0, PLOT, height, "panel")]
    scale = f"scale({PLOT / bins:.4f} {height})"
    for name, values in shares.items():
        upper = lower + values
        pieces = []  # the area between two step functions, downwards from 1: one for each bin that has an area
        for index in np.flatnonzero(upper - lower > 1e-3).tolist():
            pieces.append(f"M{index} {1 - upper[index]:.3f}h1v{upper[index] - lower[index]:.3f}h-1z")
        content.append(
            path("".join(pieces), colour_class(name), labels[name], shape_rendering="crispEdges", transform=scale)
        )
        lower = upper
    for percent in (0, 50, 100):
        content.append(text(-7, height * (1 - percent / 100) + (9 if percent == 100 else 4), percent, "soft end"))
    return Lane(title=title, unit=unit, height=height, content=content)
