"""Every chart of every page, as inline SVG, and the elements that charts are made of.

A chart takes plain values and gives `Markup` for a page. Its colors are classes of the pages' style sheet, so it follows light and
dark; its text is the browser's, so class names may be in any script; what the pointer rests on says its value (`<title>`). Lengths are in
units of the drawing, which are pixels where the page is as wide as the drawing.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
from markupsafe import Markup, escape
from numpy.typing import NDArray

from trainer.io.formatting import columns, isolated, percent, short

Floats = NDArray[np.float64]
Flags = NDArray[np.bool_]

WIDTH = 1040
LEFT = 164
_RIGHT = 16
PLOT = WIDTH - LEFT - _RIGHT  # width of the part with data in charts that have labels on the left
_COLUMNS, _SMALL_COLUMNS = 22, 26  # letters that fit on the left, of either size

COLORS: Mapping[str, tuple[str, str]] = {
    "data": ("#e08214", "#f2a65a"),
    "to_device": ("#b59a00", "#d8c75a"),
    "teacher_forward": ("#86b6e6", "#a9cdf2"),
    "forward": ("#2f6fc4", "#5b9bea"),
    "backward": ("#23408e", "#8a86f0"),
    "optimizer": ("#2a9d8f", "#4fc3b2"),
    "dispatch": ("#4f7f92", "#86b8ca"),
    "other": ("#98a2b0", "#76808e"),
    "evaluate": ("#a877c2", "#c9a0dc"),
    "checkpoint": ("#cf5f83", "#ec8fab"),
    "profiler": ("#8d6e63", "#b59a8f"),
    "recorder": ("#6a7f2f", "#b3c46a"),
    "lost": ("#c0392b", "#e8776b"),
    "between": ("#d3d9e2", "#3b4553"),
    "named": ("#5f6b8a", "#a4aecb"),
}  # color of each phase and of each range outside of steps, on light and on dark; `named` is for what users named

_ROW = 26
_NARROW_ROW = 15
_MANY_ROWS = 16
_COLUMNS_WIDTH, _COLUMNS_HEIGHT, _COLUMNS_TOP = 720, 140, 16

Amount = TypeVar("Amount", float, Floats)
WORST_CLASSES = 20
"""Classes whose shares are drawn."""
_LEVELS = 10
_WITH_GAPS = 8  # rows of cells that are higher are drawn apart from one another
_CLASSES_WITH_COUNTS = 25
_BEHIND_TEXT = 0.5
"""Opacity of the strongest color behind text, which keeps a contrast of 4.5:1 in light and dark."""
_CLASSES_WITH_NAMES = 100
MOST_CELLS = 40_000
"""Of a confusion matrix: more would make the page larger than a browser or the UI of a pipeline likes."""
MOST_CONFUSED_CLASSES = 800  # of a confusion matrix that is drawn: each has at least a pixel
BINS = 240  # most points of a line, and bins of a band: longer series are reduced to as many first

_MOST_HEAT_ROWS = 48
_WHOLE = 0.9  # share of the time from which on a window is not marked


# ---- The elements that charts are made of; texts and attributes are escaped here and nowhere else


def color_class(name: str) -> str:
    """Name the style class of a phase or range."""
    return f"f-{name if name in COLORS else 'named'}"


def element(tag: str, *content: object, **attributes: object) -> Markup:
    """Write an element around content, of which `Markup` stays as it is and text is escaped.

    In names of attributes `_` becomes `-`, except for one at the end (`class_`); floats get one decimal, None is left out.
    """
    written = Markup("").join(
        Markup(' {}="{}"').format(
            name.rstrip("_").replace("_", "-"), f"{value:.1f}" if isinstance(value, float) else value
        )
        for name, value in attributes.items()
        if value is not None
    )
    inner = Markup("").join(map(escape, content))
    return Markup("<{0}{1}>{2}</{0}>").format(tag, written, inner)


def drawing(
    height: float, *content: Markup, title: str, width: int = WIDTH, top: float = 0, shrinks: bool = False
) -> Markup:
    """Write a whole chart, whose y axis begins at `top`; `title` is for screen readers.

    A chart without text `shrinks` to a narrow page; another is scrolled before its text gets too small.
    """
    lengths = f"--least: {0 if shrinks else 0.8 * width:.0f}px; --most: {1.1 * width:.0f}px"
    return element(
        "svg", *content, viewBox=f"0 {top:.0f} {width} {height:.0f}", role="img", aria_label=title, style=lengths
    )


def text(x: float, y: float, content: object, style: str | None = None, *, hint: str = "") -> Markup:
    """Write text at its baseline; `style` has classes: soft, small, and end or mid, where `x` is its right end or its middle."""
    return element("text", content, _title(hint), x=float(x), y=float(y), class_=style)


def rectangle(x: float, y: float, width: float, height: float, style: str, hint: str = "") -> Markup:
    """Draw a filled rectangle; `hint` is shown when the pointer rests on it."""
    return element(
        "rect", _title(hint), x=float(x), y=float(y), width=float(max(width, 0)), height=float(height), class_=style
    )


def line(x1: float, y1: float, x2: float, y2: float, style: str) -> Markup:
    """Draw a straight line."""
    return element("line", x1=float(x1), y1=float(y1), x2=float(x2), y2=float(y2), class_=style)


def path(data: str, style: str, hint: str = "", **attributes: object) -> Markup:
    """Draw lines or areas from path data; `hint` is shown when the pointer rests on them."""
    return element("path", _title(hint), class_=style, **attributes, d=data)


def group(x: float, y: float, *content: Markup) -> Markup:
    """Move elements to the right and down."""
    return element("g", *content, transform=f"translate({x:.1f} {y:.1f})")


def hinted(hint: str, *content: Markup) -> Markup:
    """Show one hint for several elements."""
    return element("g", _title(hint), *content)


def _title(hint: str) -> Markup:
    return element("title", hint) if hint else Markup("")


def row_label(x: float, y: float, label: str, style: str = "end", *, keep_end: bool = True) -> Markup:
    """Write a label that ends at `x`; one that is too long is cut, with the whole of it as a hint."""
    shown = fitted(label, small="small" in style, keep_end=keep_end)
    return text(x, y, isolated(shown), style, hint="" if shown == label else label)


def fitted(label: str, *, small: bool = False, keep_end: bool = False) -> str:
    """Cut a label to what fits, a wide character counting two columns; by default its start is kept."""
    room = _SMALL_COLUMNS if small else _COLUMNS
    if columns(label) <= room:
        return label
    kept = list(reversed(label)) if keep_end else list(label)
    while columns("…" + "".join(kept)) > room:
        kept.pop()
    return "…" + "".join(reversed(kept)) if keep_end else "".join(kept) + "…"


def ticks(low: float, high: float, count: int) -> list[float]:
    """Choose about `count` round numbers from `low` to `high`."""
    if not high > low:
        return [low]
    rough = (high - low) / max(count, 1)
    power = 10 ** math.floor(math.log10(rough))
    step = next(factor * power for factor in (1, 2, 5, 10) if factor * power >= rough * 0.999)
    first = math.ceil(low / step - 1e-9)
    last = math.floor(high / step + 1e-9)
    return [index * step for index in range(first, last + 1)]


# ---- Bars: shares of a whole, amounts with their spread, amounts side by side, and how often a value occurs


def by_color(amounts: Mapping[str, Amount]) -> dict[str, Amount]:
    """Sum the amounts of phases and ranges that have no color of their own, where there are several."""
    own = {name: amount for name, amount in amounts.items() if name in COLORS}
    named = [amount for name, amount in amounts.items() if name not in COLORS]
    return own | {"named": sum(named[1:], start=named[0])} if len(named) > 1 else dict(amounts)


def stacked_bar(shares: Mapping[str, float], title: str, *, spoken: Callable[[str], str]) -> Markup:
    """Draw shares of a whole by name, which gives their colors, side by side; `spoken` is how people call a name."""
    content, x = [], 0.0
    for name, share in shares.items():
        width = share * WIDTH
        content.append(rectangle(x, 0, width - 1, 22, color_class(name), f"{spoken(name)}: {100 * share:.1f} %"))
        x += width
    return drawing(22, *content, title=title, shrinks=True)


@dataclass(frozen=True, kw_only=True)
class Bar:
    """A row of a bar chart; `low` and `high` bound the whisker."""

    name: str
    label: str
    value: float
    note: str
    low: float | None = None
    high: float | None = None


def bars(rows: Sequence[Bar], unit: str, title: str, *, note_width: int = 250) -> Markup:
    """Draw horizontal bars with whiskers, a note each, and an axis below."""
    length = PLOT - note_width
    most = max([*(row.value for row in rows), *(row.high for row in rows if row.high is not None), 1e-9])
    height = _ROW * len(rows)
    content = _value_axis(most, length, height, unit)
    for index, row in enumerate(rows):
        y = index * _ROW
        content.append(row_label(LEFT - 10, y + 17, row.label))
        content.append(rectangle(LEFT, y + 4, row.value / most * length, _ROW - 8, color_class(row.name), row.note))
        if row.low is not None and row.high is not None:
            low, high, middle = LEFT + row.low / most * length, LEFT + row.high / most * length, y + _ROW / 2
            content.append(line(low, middle, high, middle, "whisker"))
            content += [line(end, middle - 4, end, middle + 4, "whisker") for end in (low, high)]
        content.append(text(LEFT + length + 18, y + 17, row.note, "soft"))
    return drawing(height + 34, *content, title=title)


def _value_axis(most: float, length: float, height: float, unit: str) -> list[Markup]:
    content = [line(LEFT, height, LEFT + length, height, "axis")]
    for tick in ticks(0, most, 6):
        x = LEFT + tick / most * length
        content += [line(x, 0, x, height, "grid"), text(x, height + 15, short(tick), "soft mid")]
    content.append(text(LEFT + length + 26, height + 15, unit, "soft"))
    return content


def stacked_rows(
    rows: Sequence[tuple[str, Mapping[str, float], str]],
    unit: str,
    title: str,
    *,
    spoken: Callable[[str], str],
    color: Callable[[str], str] = str,
) -> Markup:
    """Draw a stacked bar for each row (label, amounts by name, note) on one scale; `spoken` labels a name, `color` names its color."""
    most = max(sum(amounts.values()) for _, amounts, _ in rows) or 1.0
    length = PLOT - 190
    row_height = _ROW if len(rows) <= _MANY_ROWS else _NARROW_ROW
    height, gap = row_height * len(rows), row_height / 6
    content = _value_axis(most, length, height, unit)
    for index, (label, amounts, note) in enumerate(rows):
        y, x = index * row_height, float(LEFT)
        baseline = y + row_height / 2 + 4
        content.append(row_label(LEFT - 10, baseline, label))
        for name, amount in amounts.items():
            width = amount / most * length
            # The hints of many rows would fill the page.
            hint = f"{spoken(name)}: {short(amount)} {unit}" if row_height == _ROW else ""
            content.append(rectangle(x, y + gap, width - 0.5, row_height - 2 * gap, color_class(color(name)), hint))
            x += width
        content.append(text(LEFT + length + 18, baseline, note, "soft"))
    return drawing(height + 34, *content, title=title)


def histogram(values: Floats, marks: Sequence[tuple[float, str]], unit: str, title: str) -> Markup:
    """Draw how many steps have which value, the largest half percent in the last bar, with `marks` (value, label) as lines."""
    low, high = float(values.min()), float(np.percentile(values, 99.5))
    high = high if high > low else low * 1.01 + 1e-9
    counts, edges = np.histogram(np.clip(values, low, high), bins=min(60, max(10, len(values) // 4)), range=(low, high))
    most, height, top = float(counts.max()), 150.0, 18.0
    scale = PLOT / (high - low)
    content = []
    for tick in (tick for tick in ticks(0, most, 4) if tick == round(tick)):
        y = top + height * (1 - tick / most)
        content += [line(LEFT, y, LEFT + PLOT, y, "grid"), text(LEFT - 8, y + 4, short(tick), "soft end")]
    for index, count in enumerate(counts.tolist()):
        x = LEFT + (edges[index] - low) * scale
        bar, width = height * count / most, (edges[index + 1] - edges[index]) * scale - 1
        hint = f"{short(edges[index])} to {short(edges[index + 1])} {unit}: {count:,}"
        content.append(rectangle(x, top + height - bar, width, bar, "bar", hint))
    for tick in ticks(low, high, 8):
        content.append(text(LEFT + (tick - low) * scale, top + height + 16, short(tick), "soft mid"))
    for value, label in marks:
        x = LEFT + (min(value, high) - low) * scale
        content += [line(x, top - 4, x, top + height, "whisker"), text(x, top - 7, label, "mid")]
    content.append(line(LEFT, top + height, LEFT + PLOT, top + height, "axis"))
    content.append(text(LEFT - 60, top + height / 2, "steps", "soft end"))
    content.append(text(LEFT - 10, top + height + 16, unit, "soft end"))
    return drawing(top + height + 24, *content, title=title)


def stacked_columns(names: Sequence[str], counts: Sequence[tuple[str, Sequence[int]]], title: str) -> Markup:
    """Draw stacked columns, the largest first, as many as fit; `counts` has at most three parts, bottom to top, each with all counts."""
    totals = np.sum([values for _, values in counts], axis=0)
    order = np.argsort(-totals, kind="stable")[:_COLUMNS_WIDTH]
    step, scale = _COLUMNS_WIDTH / len(order), _COLUMNS_HEIGHT / max(totals.max(), 1)
    content = [text(0, 11 - _COLUMNS_TOP, f"{int(totals.max()):,}", "soft")]
    for position, index in enumerate(order.tolist()):
        y, parts = float(_COLUMNS_HEIGHT), []
        for series, (_, values) in enumerate(counts):
            height = values[index] * scale
            y -= height
            parts.append(rectangle(position * step, y, max(step * 0.85, 0.8), height, f"f{series}"))
        said = ", ".join(f"{values[index]:,} {part}" for part, values in counts)
        content.append(hinted(f"{names[index]}: {said}", *parts))
    height = _COLUMNS_HEIGHT + _COLUMNS_TOP
    return drawing(height, *content, title=title, width=_COLUMNS_WIDTH, top=-_COLUMNS_TOP)


# ---- Curves of an evaluation and of recorded outputs: calibration, recall by class, and how probability mass is spread


@dataclass(frozen=True, kw_only=True)
class ReliabilityCurve:
    """How often the predictions of a model are right, by their confidence, in bins that are not empty."""

    name: str
    confidence: Sequence[float]  # mean of each bin
    accuracy: Sequence[float]
    intervals: Sequence[tuple[float, float]]  # of each accuracy, 95 %
    counts: Sequence[int]  # images in each bin


def reliability(models: Sequence[ReliabilityCurve], title: str) -> Markup:
    """Draw accuracy against confidence for each model, with the intervals of the accuracy, from a tenth below the least value on."""
    edge = 420.0
    least = min(min(*model.confidence, *(low for low, _ in model.intervals)) for model in models)
    start = min(math.floor(10 * least) / 10, 0.9)
    scale = edge / (1 - start)
    content = [rectangle(0, 0, edge, edge, "panel")]
    for tick in ticks(start, 1, 5):
        x, y = (tick - start) * scale, (1 - tick) * scale
        content += [line(0, y, edge, y, "grid"), line(x, 0, x, edge, "grid")]
        content.append(text(-8, y + (10 if y < 1 else 4), percent(tick), "soft end"))
        content.append(text(x, edge + 16, percent(tick), "soft mid"))
    content.append(line(0, edge, edge, 0, "edge e-plain"))
    for series, model in enumerate(models):
        points = []
        bins = zip(model.confidence, model.accuracy, model.intervals, model.counts, strict=True)
        for confidence, accuracy, (low, high), count in bins:
            x = (confidence - start) * scale
            about = (
                f"of {count:,} images with a confidence of about {percent(confidence)}, {percent(accuracy)} are right"
            )
            content.append(line(x, (1 - high) * scale, x, (1 - low) * scale, f"line m{series}"))
            points.append((x, (1 - accuracy) * scale, f"{model.name}: {about} ({percent(low)} to {percent(high)})"))
        content.append(path("M" + "L".join(f"{x:.1f} {y:.1f}" for x, y, _ in points), f"line m{series}"))
        content += [_dot(x, y, f"g{series}", hint) for x, y, hint in points]
    content.append(text(edge / 2, edge + 36, "confidence", "soft mid"))
    return drawing(edge + 60, group(56, 18, text(0, -6, "accuracy", "soft"), *content), title=title, width=500)


def curves(lines: Mapping[str, Sequence[tuple[float, float]]], unit: Callable[[float], str], title: str) -> Markup:
    """Draw at most two lines of points (share of the training, value), with an axis of values in a `unit`; `title` stands above."""
    width, height = 400.0, 200.0
    values = [value for points in lines.values() for _, value in points]
    low, high = min(values), max(values)
    low, high = (low, high) if high > low else (low - 0.01, high + 0.01)
    content = [rectangle(0, 0, width, height, "panel")]
    for tick in ticks(low, high, 4):
        y = height * (high - tick) / (high - low)
        content += [line(0, y, width, y, "grid"), text(-8, y + 4, unit(tick), "soft end")]
    for tick in ticks(0, 1, 5):
        content.append(text(width * tick, height + 16, percent(tick), "soft mid"))
    for series, (name, points) in enumerate(lines.items()):
        at = [f"{width * share:.1f} {height * (high - value) / (high - low):.1f}" for share, value in points]
        hint = f"{name}: {unit(points[0][1])} at first, {unit(points[-1][1])} at last"
        content.append(path("M" + "L".join(at) + ("h0" if len(at) == 1 else ""), f"line m{series}", hint))
    content.append(text(width / 2, height + 36, "of the training", "soft mid"))
    return drawing(height + 60, group(56, 18, text(0, -6, title, "soft"), *content), title=title, width=480)


@dataclass(frozen=True, kw_only=True)
class ScatterPoint:
    """A model in a chart of accuracy against what it costs; `series` is 0 for a teacher, 1 for a student."""

    label: str
    x: float  # above 0
    share: float
    interval: tuple[float, float] | None  # None: not known
    series: int
    is_main: bool = False  # the model that the page is about


def scatter(points: Sequence[ScatterPoint], across: str, title: str) -> Markup:
    """Draw shares with their intervals across a quantity, whose axis is logarithmic."""
    width, height = 400.0, 260.0
    ends = [end for one in points for end in (one.share, *(one.interval or ()))]
    low, high = min(ends), max(ends)
    low, high = low - 0.05 * (high - low) - 1e-6, high + 0.05 * (high - low) + 1e-6
    left, right = (math.log10(pick(one.x for one in points)) for pick in (min, max))
    left, right = left - 0.08 * (right - left) - 0.02, right + 0.08 * (right - left) + 0.02
    content = [rectangle(0, 0, width, height, "panel")]
    for tick in ticks(low, high, 5):
        y = height * (high - tick) / (high - low)
        content += [line(0, y, width, y, "grid"), text(-8, y + 4, percent(tick), "soft end")]
    for tick in ticks(left, right, 4):
        x = width * (tick - left) / (right - left)
        content += [line(x, 0, x, height, "grid"), text(x, height + 16, short(10**tick), "soft mid")]
    for one in sorted(points, key=lambda one: one.is_main):
        x = width * (math.log10(one.x) - left) / (right - left)
        y, *ends = (height * (high - share) / (high - low) for share in (one.share, *(one.interval or ())))
        opacity = None if one.is_main else ".55"
        hint = f"{one.label}: {percent(one.share)} at {short(one.x)} {across}"
        if ends:
            content.append(element("g", line(x, ends[0], x, ends[1], f"line m{one.series}"), opacity=opacity))
        content.append(element("g", _dot(x, y, f"g{one.series}", hint), opacity=opacity))
    content.append(text(width / 2, height + 36, across, "soft mid"))
    return drawing(height + 60, group(56, 18, text(0, -6, "test accuracy", "soft"), *content), title=title, width=480)


def _dot(x: float, y: float, style: str, hint: str) -> Markup:
    return hinted(hint, element("circle", cx=x, cy=y, r=4, class_=style))


def outline(heights: Sequence[float], width: float) -> str:
    """Write the line along the tops of bars that stand side by side, as path data."""
    step = width / len(heights)
    corners = [f"{(bar + side) * step:.1f} {height:.1f}" for bar, height in enumerate(heights) for side in (0, 1)]
    return "M" + "L".join(corners)


def recalls(
    by_model: Mapping[str, NDArray[np.float64]],
    classes: Sequence[str],
    title: str,
    *,
    figure: str = "recall",
    intervals: Mapping[int, tuple[float, float]] | None = None,
) -> Markup:
    """Draw a share such as the recall, [K], of the last model's worst classes, for each model; NaN without images.

    `intervals` are those of the last model by class.
    """
    order = np.argsort(list(by_model.values())[-1], kind="stable")[:WORST_CLASSES].tolist()
    length, row = 540.0, 20
    height = row * len(order)
    content = []
    for tick in ticks(0, 1, 5):
        x = LEFT + tick * length
        content += [line(x, 0, x, height, "grid"), text(x, height + 16, percent(tick), "soft mid")]
    for position, index in enumerate(order):
        y = (position + 0.5) * row
        content.append(line(LEFT, y, LEFT + length, y, "grid"))
        content.append(row_label(LEFT - 10, y + 4, classes[index], keep_end=False))
        if intervals and index in intervals:
            low, high = (LEFT + share * length for share in intervals[index])
            content.append(line(low, y, high, y, "whisker"))
        for series, (model, values) in enumerate(by_model.items()):
            if np.isfinite(values[index]):
                hint = f"{classes[index]}: {model} {percent(float(values[index]))}"
                content.append(_dot(LEFT + float(values[index]) * length, y, f"g{series}", hint))
    content.append(text(LEFT + length / 2, height + 34, figure, "soft mid"))
    return drawing(height + 44, *content, title=title, width=LEFT + 570, top=-2)


def outlines(
    counts: Mapping[str, Sequence[int]], bins: Sequence[str], tick_labels: Sequence[str], note: str, title: str
) -> Markup:
    """Draw histograms over the same bins as outlines, in the colors of the series; `bins` are the hints' names, `note` stands above."""
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


# ---- Matrices: the stronger the color, the higher the value


def heat_map(
    shares: Floats,
    marked: Flags,
    row_labels: Sequence[str],
    column_labels: Sequence[str],
    title: str,
    *,
    ends: tuple[str, str],
) -> Markup:
    """Draw a matrix whose columns are steps, with its scale below, labeled by `ends`.

    `shares` [rows, columns] lie between 0 and 1 on the scale, NaN where unknown; `marked` cells have the color of broken ones. Column
    labels are shown as far as there is room.
    """
    row_height = 14 if len(row_labels) <= 24 else 11
    height, width = row_height * len(row_labels), PLOT / len(column_labels)
    broken = _runs(marked, PLOT, row_height, class_="broken")
    content = [group(LEFT, 0, rectangle(0, 0, PLOT, height, "panel"), *cells(shares, PLOT, row_height), *broken)]
    for row, label in enumerate(row_labels):
        content.append(row_label(LEFT - 8, (row + 0.5) * row_height + 4, label, "small end"))
    for index in range(0, len(column_labels), max(1, math.ceil(54 / width))):
        content.append(text(LEFT + (index + 0.5) * width, height + 15, column_labels[index], "soft mid"))
    content.append(text(LEFT - 8, height + 15, "step", "soft end"))
    content += _scale(LEFT + PLOT / 2, height + 24, *ends)
    return drawing(height + 42, *content, title=title)


def cells(shares: Floats, width: float, row_height: float) -> list[Markup]:
    """Draw a matrix [rows, columns] of shares from 0 to 1, the stronger the higher; unknown ones are left out."""
    levels = np.where(np.isfinite(shares), np.round(np.nan_to_num(shares) * _LEVELS), 0).astype(int)
    drawn = []
    for level in range(1, _LEVELS + 1):
        drawn += _runs(levels == level, width, row_height, class_="heat", opacity=level / _LEVELS)
    return drawn


def _runs(chosen: Flags, width: float, row_height: float, **style: object) -> list[Markup]:
    """Draw neighboring chosen cells of a row as one thick line each, which is the shortest way to say it."""
    lines: list[str] = []
    for row, flags in enumerate(chosen):
        steps = np.diff(np.concatenate(([0], flags.astype(int), [0])))
        starts, ends = np.flatnonzero(steps == 1).tolist(), np.flatnonzero(steps == -1).tolist()
        y = f"{(row + 0.5) * row_height:g}"
        lines.extend(f"M{start} {y}h{end - start}" for start, end in zip(starts, ends, strict=True))
    if not lines:
        return []
    thick = f"{row_height - (row_height > _WITH_GAPS):g}"
    scale = f"scale({width / chosen.shape[1]:.4f} 1)"
    place = {"fill": "none", "shape_rendering": "crispEdges", "transform": scale, "stroke_width": thick}
    return [element("path", **style, **place, d="".join(lines))]


def _scale(middle: float, y: float, low: str, high: str, strongest: float = 1.0) -> list[Markup]:
    cell = 16
    left = middle - cell * _LEVELS / 2
    content = [text(left - 8, y + 11, low, "soft end")]
    for level in range(1, _LEVELS + 1):
        place = {"x": left + (level - 1) * cell, "y": float(y), "width": cell, "height": 12}
        content.append(element("rect", **place, class_="scale", opacity=strongest * level / _LEVELS))
    content.append(text(left + cell * _LEVELS + 8, y + 11, high, "soft"))
    return content


def confusion(counts: NDArray[np.int64], classes: Sequence[str], title: str) -> Markup:
    """Draw a confusion matrix of at most `MOST_CONFUSED_CLASSES`, rows being the truth, as shares of rows, with counts and names."""
    shares = counts / np.maximum(counts.sum(axis=1, keepdims=True), 1)
    counted, named = len(classes) <= _CLASSES_WITH_COUNTS, len(classes) <= _CLASSES_WITH_NAMES
    cell = 30.0 if counted else 13.0 if named else MOST_CONFUSED_CLASSES / len(classes)
    edge = cell * len(classes)
    letter = 7.0 if counted else 6.0
    widest = letter * max(columns(fitted(name, small=not counted)) for name in classes) if named else 0.0
    margin = 40 + widest
    content = [rectangle(0, 0, edge, edge, "panel")]
    if counted:
        content += _counted_cells(counts, shares, classes, cell)
    else:  # the largest cells; the smallest share still has the first level, or a matrix of many classes would be white
        known = shares[shares > 0]
        least = np.partition(known, -MOST_CELLS)[-MOST_CELLS] if len(known) > MOST_CELLS else 0.0
        levels = np.where((shares > 0) & (shares >= least), np.ceil(shares * _LEVELS), 0)
        content += cells(levels / _LEVELS, edge, cell)
    if named:
        style = "end" if counted else "small end"
        for index, name in enumerate(classes):
            middle = (index + 0.5) * cell + 4
            content.append(row_label(-8, middle, name, style, keep_end=False))
            if widest < cell:
                content.append(text(middle - 4, edge + 16, name, style.replace("end", "mid")))
            else:
                content.append(_upright(middle, edge + 8, name, style))
    if named and not counted:
        content += [_row_hint(counts[row], classes, row, edge, cell) for row in range(len(classes))]
    content.append(_upright(14 - margin, edge / 2, "class", "soft mid"))
    below, middle = edge + 26 + (12 if widest < cell else widest), max(edge / 2, 120.0)
    content.append(text(edge / 2, below, "taken for", "soft mid"))
    content += _scale(middle, below + 14, "0 %", "100 % of the class", _BEHIND_TEXT if counted else 1.0)
    width = math.ceil(margin + max(edge + 16, middle + 200))
    return drawing(below + 36, group(margin, 0, *content), title=title, width=width)


def _counted_cells(counts: NDArray[np.int64], shares: Floats, classes: Sequence[str], cell: float) -> list[Markup]:
    drawn = []
    for row, column in np.argwhere(counts > 0).tolist():
        x, y, share = column * cell, row * cell, float(shares[row, column])
        hint = f"{classes[row]} taken for {classes[column]}: {counts[row, column]:,} ({percent(share)} of the class)"
        opacity = f"{max(share * _BEHIND_TEXT, 0.06):.2f}"
        place = {"x": x, "y": y, "width": cell - 1, "height": cell - 1, "opacity": opacity}
        number = text(x + cell / 2 - 0.5, y + cell / 2 + 4, f"{counts[row, column]}", "mid")
        drawn.append(hinted(hint, element("rect", class_="scale", **place), number))
    return drawn


def _row_hint(counts: NDArray[np.int64], classes: Sequence[str], row: int, edge: float, cell: float) -> Markup:
    images = int(counts.sum())
    wrong = np.where(np.arange(len(counts)) == row, 0, counts)
    most = int(wrong.argmax())
    hint = f"{classes[row]}: {counts[row]:,} of {images:,} right"
    if wrong[most]:
        hint += f", most often taken for {classes[most]} ({wrong[most]:,})"
    return rectangle(0, row * cell, edge, cell, "hit", hint)


def _upright(x: float, y: float, label: str, style: str) -> Markup:
    """Write text from the bottom to the top, its right end or its middle at a point."""
    shown = fitted(label, small="small" in style)
    return element("text", isolated(shown), class_=style, transform=f"translate({x:.1f} {y:.1f}) rotate(-90)")


# ---- Trials of a search: their scores as they train, and their settings


@dataclass(frozen=True, kw_only=True)
class TrialLine:
    """A trial of a search."""

    name: str
    points: Sequence[tuple[float, float]]
    """(epochs or another quantity, score) wherever it was measured; empty where it failed."""
    positions: Sequence[float]
    """Each setting's place between the ends of its axis, from 0 to 1."""
    hint: str
    is_best: bool = False


def trial_scores(trials: Sequence[TrialLine], title: str, *, across: str) -> Markup:
    """Draw each trial's score, a share, across its epochs or another quantity; several points of a trial are a line."""
    width, height, left = 640.0, 300.0, 56.0
    scored = [point for trial in trials for point in trial.points]
    if not scored:
        return drawing(20, text(0, 14, "no trial was measured", "soft"), title=title)
    most = max(x for x, _ in scored) or 1.0
    low, high = min(score for _, score in scored), max(score for _, score in scored)
    low, high = (low, high) if high > low else (low - 0.01, high + 0.01)
    content = [rectangle(0, 0, width, height, "panel")]
    for tick in ticks(low, high, 5):
        y = height * (high - tick) / (high - low)
        content += [line(0, y, width, y, "grid"), text(-8, y + 4, percent(tick), "soft end")]
    for tick in ticks(0, most, 6):
        content.append(text(width * tick / most, height + 16, short(tick), "soft mid"))
    for trial in sorted(trials, key=lambda one: one.is_best):
        style = int(trial.is_best)
        at = [(width * x / most, height * (high - score) / (high - low)) for x, score in trial.points]
        if len(at) > 1:
            content.append(path("M" + "L".join(f"{x:.1f} {y:.1f}" for x, y in at), f"line m{style}", trial.hint))
        content += [_dot(x, y, f"g{style}", trial.hint) for x, y in at]
    content += [text(width / 2, height + 34, across, "soft mid")]
    return drawing(
        height + 60, group(left, 18, text(0, -6, "validation score", "soft"), *content), title=title, width=720
    )


def parallel_coordinates(axes: Sequence[tuple[str, str, str]], trials: Sequence[TrialLine], title: str) -> Markup:
    """Draw the settings of each trial as a line across one axis a setting.

    Args:
        axes: name of each, and the texts of its lower and its upper end.
        trials: with a position on each axis.
    """
    height, left, top = 240.0, 90.0, 40.0
    step = (WIDTH - 2 * left) / max(1, len(axes) - 1)
    content = []
    for trial in sorted(trials, key=lambda one: one.is_best):
        at = [(left + step * place, height * (1 - share)) for place, share in enumerate(trial.positions)]
        data = "M" + "L".join(f"{x:.1f} {y:.1f}" for x, y in at)
        content.append(path(data, f"line m{int(trial.is_best)}", trial.hint, opacity="1" if trial.is_best else ".45"))
    for place, (name, lower, upper) in enumerate(axes):
        x = left + step * place
        content += [line(x, 0, x, height, "axis"), text(x, height + 16, lower, "soft mid small")]
        content += [text(x, -8, upper, "soft mid small")]
        content.append(text(x, -24, fitted(name, small=True), "mid small", hint=name))
    return drawing(height + top + 30, group(0, top, *content), title=title)


# ---- A training over time: lanes of several kinds below one another, on one time axis


@dataclass(frozen=True, kw_only=True)
class Lane:
    """A strip of a chart over time; `content` has x from 0 to `PLOT` and y from 0 to `height`."""

    title: str
    unit: str
    height: float
    content: Sequence[Markup]
    labels: Sequence[tuple[str, str]] = ()  # style and label of each line


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
    units = ((300, 1, "seconds"), (3 * 3600, 60, "minutes"), (4 * 86400, 3600, "hours"), (math.inf, 86400, "days"))
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
    """Draw lines with a value axis of their own, with a gap where a value is missing; at least one value is finite.

    `duration_s` is at the right end. The axis begins at `low`, or at the smallest value, and reaches at least `high`.
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


def heat_lane(title: str, unit: str, percent: Floats, *, most_rows: int = _MOST_HEAT_ROWS) -> Lane:
    """Draw rows of a matrix [rows, bins] of values from 0 to 100, the stronger the higher; many rows are averaged in groups."""
    size = math.ceil(len(percent) / most_rows)
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


def stack_lane(title: str, unit: str, shares: Mapping[str, Floats], labels: Mapping[str, str]) -> Lane:
    """Draw shares [bins] of each phase or range, stacked to the full height; `labels` says what each is called."""
    height, bins = 90, len(next(iter(shares.values())))
    lower = np.zeros(bins)
    content = [rectangle(0, 0, PLOT, height, "panel")]
    scale = f"scale({PLOT / bins:.4f} {height})"
    for name, values in shares.items():
        upper = lower + values
        pieces = []  # the area between two step functions, downwards from 1: one for each bin that has an area
        for index in np.flatnonzero(upper - lower > 1e-3).tolist():
            pieces.append(f"M{index} {1 - upper[index]:.3f}h1v{upper[index] - lower[index]:.3f}h-1z")
        style = {"shape_rendering": "crispEdges", "transform": scale}
        content.append(path("".join(pieces), color_class(name), labels[name], **style))
        lower = upper
    for tick in (0, 50, 100):
        content.append(text(-7, height * (1 - tick / 100) + (9 if tick == 100 else 4), tick, "soft end"))
    return Lane(title=title, unit=unit, height=height, content=content)
