"""SVG drawings of the profile report, as text.

They take their colours from the page's style (`STYLE`), so they follow light and dark. Lengths are in units of the drawing, which is
`WIDTH` wide and shown as wide as the page. Long series are reduced to `BINS` bins or points first.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from trainer.formatting import short
from trainer.html import escape
from trainer.profiling.series import Series

Chosen = NDArray[np.bool_]

WIDTH = 1040
BINS = 240
_LEFT = 164
_RIGHT = 16
PLOT = WIDTH - _LEFT - _RIGHT
"""Width of the part with data in drawings that have labels on the left."""
_HEAT_LEVELS = 10
_MOST_HEAT_ROWS = 48
_WITH_GAPS = 8
"""Rows of cells that are higher are drawn apart from one another."""
_ROW = 26
_NARROW_ROW = 15
_WHOLE = 0.9
"""Share of the time from which on a window is not marked."""
_MANY_ROWS = 16

COLOURS: Mapping[str, tuple[str, str]] = {
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
}
"""Colour of each phase and of each range outside of steps, on light and on dark; `named` is for what users named."""


_STYLE = """
svg { display: block; width: 100%; font: 12px system-ui, -apple-system, "Segoe UI", Roboto, "DejaVu Sans", sans-serif; }
.scroll > svg { min-width: 820px; }
svg text { fill: var(--ink); } svg .soft { fill: var(--soft); } svg .small { font-size: 9.5px; fill: var(--soft); }
svg .end { text-anchor: end; } svg .mid { text-anchor: middle; }
svg .grid { stroke: var(--line); stroke-width: 1; } svg .axis { stroke: var(--soft); stroke-width: 1; }
svg .whisker { stroke: var(--ink); stroke-width: 1.5; opacity: .75; } svg .bar { fill: var(--accent); } svg .panel { fill: var(--panel); }
svg .line { fill: none; stroke-width: 1.8; stroke-linejoin: round; stroke-linecap: round; }
.s0 { stroke: var(--accent); background: var(--accent); } .s1 { stroke: var(--data); background: var(--data); }
.heat { stroke: var(--accent); } .scale { fill: var(--accent); } .broken { stroke: var(--bad); }
.w-note { fill: var(--accent); } .w-warning { fill: var(--data); } .w-severe { fill: var(--bad); }
.edge { fill: none; stroke-width: 1.2; stroke-dasharray: 4 3; }
.e-note { stroke: var(--accent); } .e-warning { stroke: var(--data); } .e-severe { stroke: var(--bad); }
.legend { display: flex; flex-wrap: wrap; gap: .2rem 1.1rem; margin: .35rem 0 .8rem; font-size: .9rem; }
.legend i { display: inline-block; width: .8em; height: .8em; border-radius: 2px; margin-right: .4em; }
.tiles { display: flex; flex-wrap: wrap; gap: .75rem; margin: .75rem 0 1.25rem; }
.tile { background: var(--panel); border-radius: 8px; padding: .6rem .9rem; min-width: 9.5rem; flex: 1; }
.tile b { display: block; font-size: 1.35rem; line-height: 1.3; font-variant-numeric: tabular-nums; }
.tile span { color: var(--soft); font-size: .85rem; }
h1 + .lead { font-size: 1.15rem; color: var(--ink); font-weight: 600; } h3 { margin-top: 1.75rem; } .soft { color: var(--soft); }
.finding { border: 1px solid var(--line); border-left: 5px solid var(--accent); border-radius: 8px; padding: .1rem 1rem .4rem;
  margin: .9rem 0; break-inside: avoid; }
.finding h3 { margin: .6rem 0 0; } .finding p { margin: .3rem 0; }
.finding.warning { border-left-color: var(--data); } .finding.severe { border-left-color: var(--bad); }
.badge { font-style: normal; font-weight: 400; font-size: .8rem; color: var(--soft); border: 1px solid var(--line); border-radius: 4px;
  padding: 0 .4em; margin-left: .4em; }
.chips { display: flex; flex-wrap: wrap; gap: .3rem; }
.chips span { background: var(--panel); border-radius: 4px; padding: 0 .5em; font-size: .85rem; }
@media print { .scroll > svg { min-width: 0; }
  .tile, .chips span, .legend i, svg * { print-color-adjust: exact; -webkit-print-color-adjust: exact; } }
"""


def _style() -> str:
    light = "".join(f"--{name}:{colours[0]};" for name, colours in COLOURS.items())
    dark = "".join(f"--{name}:{colours[1]};" for name, colours in COLOURS.items())
    fills = "".join(f".f-{name}{{fill:var(--{name});background:var(--{name})}}" for name in COLOURS)
    return f"<style>:root{{{light}}}@media (prefers-color-scheme: dark){{:root{{{dark}}}}}{fills}{_STYLE}</style>"


STYLE = _style()
"""What these drawings, `legend` and `tiles` need in the page."""


def colour_class(name: str) -> str:
    """The style class of a phase or range."""
    return f"f-{name if name in COLOURS else 'named'}"


Amount = TypeVar("Amount", float, Series)


def by_colour(amounts: Mapping[str, Amount]) -> dict[str, Amount]:
    """Amounts of phases and ranges, those that have no colour of their own as one where there are several."""
    own = {name: amount for name, amount in amounts.items() if name in COLOURS}
    named = [amount for name, amount in amounts.items() if name not in COLOURS]
    return own | {"named": sum(named[1:], start=named[0])} if len(named) > 1 else dict(amounts)


def figure(height: float, content: str, title: str) -> str:
    """A whole drawing; `title` is plain text, for readers who cannot see it."""
    label = escape(title)
    return f'<svg viewBox="0 0 {WIDTH} {height:.0f}" role="img" aria-label="{label}">{content}</svg>'


def text(x: float, y: float, content: object, style: str = "") -> str:
    """Text at its baseline; `style`: soft, end, mid."""
    kind = f' class="{style}"' if style else ""
    return f'<text x="{x:.1f}" y="{y:.1f}"{kind}>{escape(content)}</text>'


def rectangle(x: float, y: float, width: float, height: float, style: str, hint: str = "") -> str:
    """A filled rectangle; `hint` is shown when the pointer rests on it."""
    inner = f"<title>{escape(hint)}</title>" if hint else ""
    return f'<rect x="{x:.1f}" y="{y:.1f}" width="{max(width, 0):.1f}" height="{height:.1f}" class="{style}">{inner}</rect>'


def line(x1: float, y1: float, x2: float, y2: float, style: str) -> str:
    """A straight line."""
    return f'<line x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}" class="{style}"/>'


def legend(entries: Sequence[tuple[str, str]]) -> str:
    """HTML: (style class, label) of each colour."""
    items = "".join(f'<span><i class="{style}"></i>{escape(label)}</span>' for style, label in entries)
    return f'<div class="legend">{items}</div>'


def tiles(entries: Sequence[tuple[str, str]]) -> str:
    """HTML: (value, what it is) of the main numbers."""
    items = "".join(
        f'<div class="tile"><b>{escape(value)}</b><span>{escape(label)}</span></div>' for value, label in entries
    )
    return f'<div class="tiles">{items}</div>'


def ticks(low: float, high: float, count: int) -> list[float]:
    """About `count` round numbers from `low` to `high`."""
    if not high > low:
        return [low]
    rough = (high - low) / max(count, 1)
    power = 10 ** math.floor(math.log10(rough))
    step = next(factor * power for factor in (1, 2, 5, 10) if factor * power >= rough * 0.999)
    first = math.ceil(low / step - 1e-9)
    last = math.floor(high / step + 1e-9)
    return [index * step for index in range(first, last + 1)]


@dataclass(frozen=True, kw_only=True)
class BarPart:
    """A part of a stacked bar."""

    name: str
    label: str
    share: float


def stacked_bar(parts: Sequence[BarPart], title: str) -> str:
    """Shares side by side; those that are wide enough carry their percentage."""
    content, x = [], 0.0
    for part in parts:
        width = part.share * WIDTH
        hint = f"{part.label}: {100 * part.share:.1f} %"
        content.append(rectangle(x, 0, width - 1, 22, colour_class(part.name), hint))
        x += width
    return figure(22, "".join(content), title)


@dataclass(frozen=True, kw_only=True)
class Bar:
    """A row of a bar chart; `low` and `high` bound the whisker."""

    name: str
    label: str
    value: float
    note: str
    low: float | None = None
    high: float | None = None


def bars(rows: Sequence[Bar], unit: str, title: str, *, note_width: int = 250) -> str:
    """Horizontal bars with whiskers, a note each, and an axis below."""
    length = PLOT - note_width
    most = max([*(row.value for row in rows), *(row.high for row in rows if row.high is not None), 1e-9])
    height = _ROW * len(rows)
    content = [_value_axis(most, length, height, unit)]
    for index, row in enumerate(rows):
        y = index * _ROW
        content.append(text(_LEFT - 10, y + 17, _fitting(row.label), "end"))
        content.append(rectangle(_LEFT, y + 4, row.value / most * length, _ROW - 8, colour_class(row.name), row.note))
        if row.low is not None and row.high is not None:
            content.append(_whisker(_LEFT + row.low / most * length, _LEFT + row.high / most * length, y + _ROW / 2))
        content.append(text(_LEFT + length + 18, y + 17, row.note, "soft"))
    return figure(height + 34, "".join(content), title)


def _whisker(low: float, high: float, y: float) -> str:
    ends = line(low, y - 4, low, y + 4, "whisker") + line(high, y - 4, high, y + 4, "whisker")
    return line(low, y, high, y, "whisker") + ends


def _value_axis(most: float, length: float, height: float, unit: str) -> str:
    content = [line(_LEFT, height, _LEFT + length, height, "axis")]
    for tick in ticks(0, most, 6):
        x = _LEFT + tick / most * length
        content.append(line(x, 0, x, height, "grid") + text(x, height + 15, short(tick), "soft mid"))
    content.append(text(_LEFT + length + 26, height + 15, unit, "soft"))
    return "".join(content)


def stacked_rows(rows: Sequence[tuple[str, Sequence[BarPart], str]], most: float, unit: str, title: str) -> str:
    """One stacked bar a row on a common scale: (label, parts whose `share` is an amount, note)."""
    length = PLOT - 190
    row = _ROW if len(rows) <= _MANY_ROWS else _NARROW_ROW
    height, gap = row * len(rows), row / 6
    content = [_value_axis(most, length, height, unit)]
    for index, (label, parts, note) in enumerate(rows):
        y, x = index * row, float(_LEFT)
        baseline = y + row / 2 + 4
        content.append(text(_LEFT - 10, baseline, _fitting(label), "end"))
        for part in parts:
            width = part.share / most * length
            hint = (
                f"{part.label}: {short(part.share)} {unit}" if row == _ROW else ""
            )  # of many rows they would fill the page
            content.append(rectangle(x, y + gap, width - 0.5, row - 2 * gap, colour_class(part.name), hint))
            x += width
        content.append(text(_LEFT + length + 18, baseline, note, "soft"))
    return figure(height + 34, "".join(content), title)


def histogram(values: Series, marks: Sequence[tuple[float, str]], unit: str, title: str, *, count_label: str) -> str:
    """How often each value occurs; the slowest half percent is drawn into the last bar. `marks`: (value, label) of vertical lines."""
    low, high = float(values.min()), float(np.percentile(values, 99.5))
    high = high if high > low else low * 1.01 + 1e-9
    counts, edges = np.histogram(np.clip(values, low, high), bins=min(60, max(10, len(values) // 4)), range=(low, high))
    most, height, top = float(counts.max()), 150.0, 18.0
    scale = PLOT / (high - low)
    content = []
    for tick in (tick for tick in ticks(0, most, 4) if tick == round(tick)):
        y = top + height * (1 - tick / most)
        content.append(line(_LEFT, y, _LEFT + PLOT, y, "grid") + text(_LEFT - 8, y + 4, short(tick), "soft end"))
    for index, count in enumerate(counts.tolist()):
        x = _LEFT + (edges[index] - low) * scale
        bar, width = height * count / most, (edges[index + 1] - edges[index]) * scale - 1
        hint = f"{short(edges[index])} to {short(edges[index + 1])} {unit}: {count:,}"
        content.append(rectangle(x, top + height - bar, width, bar, "bar", hint))
    for tick in ticks(low, high, 8):
        content.append(text(_LEFT + (tick - low) * scale, top + height + 16, short(tick), "soft mid"))
    for value, label in marks:
        x = _LEFT + (min(value, high) - low) * scale
        content.append(line(x, top - 4, x, top + height, "whisker") + text(x, top - 7, label, "mid"))
    content.append(line(_LEFT, top + height, _LEFT + PLOT, top + height, "axis"))
    content.append(text(_LEFT - 60, top + height / 2, count_label, "soft end"))
    content.append(text(_LEFT - 10, top + height + 16, unit, "soft end"))
    return figure(top + height + 24, "".join(content), title)


# ---------------------------------------------------------------------------------------------------------------------
# Lanes over a common time axis


@dataclass(frozen=True, kw_only=True)
class Lane:
    """A strip of a drawing over time; `content` is SVG with x from 0 to `PLOT` and y from 0 to `height`."""

    title: str
    unit: str
    height: float
    content: str
    labels: Sequence[tuple[str, str]] = ()
    """Style and label of each line."""


@dataclass(frozen=True, kw_only=True)
class ChartLine:
    """A line of a lane; `style` is s0 or s1, `label` tells it from the others."""

    style: str
    label: str
    seconds: Series
    values: Series


def over_time(lanes: Sequence[Lane], duration_s: float, title: str, *, windows: Sequence[MarkedTime] = ()) -> str:
    """Lanes below one another, on one time axis; windows are marked through all of them where they begin and end."""
    divisor, unit = _time_unit(duration_s)
    gap, y = 14.0, 8.0
    content = []
    for lane in lanes:
        content.append(text(0, y + 13, lane.title) + text(0, y + 29, lane.unit, "soft") + _line_labels(lane, y + 45))
        content.append(f'<g transform="translate({_LEFT} {y:.1f})">{lane.content}</g>')
        y += lane.height + gap
    axis = y - gap + 5
    content += [_edges(window, duration_s, axis) for window in windows]
    content.append(line(_LEFT, axis, _LEFT + PLOT, axis, "axis"))
    for tick in ticks(0, duration_s / divisor, 10):
        x = _LEFT + tick * divisor / duration_s * PLOT
        content.append(line(x, axis, x, axis + 4, "axis") + text(x, axis + 17, short(tick), "soft mid"))
    content.append(text(0, axis + 17, f"time in {unit}", "soft"))
    return figure(axis + 24, "".join(content), title)


def _edges(window: MarkedTime, duration_s: float, height: float) -> str:
    """Where a window begins and ends; nothing for one that is nearly the whole time."""
    if window.end_s - window.start_s > _WHOLE * duration_s:
        return ""
    lines = [f"M{_LEFT + second / duration_s * PLOT:.1f} 0v{height:.1f}" for second in (window.start_s, window.end_s)]
    return f'<path class="edge e-{window.style}" d="{"".join(lines)}"/>'


def _line_labels(lane: Lane, y: float) -> str:
    content, x = [], 0.0
    for style, label in lane.labels:
        content.append(f'<path class="line {style}" d="M{x:.0f} {y - 4:.1f}h10"/>' + text(x + 14, y, label, "soft"))
        x += 22 + 6.2 * len(label)
    return "".join(content)


def _time_unit(duration_s: float) -> tuple[float, str]:
    if duration_s < 300:
        return 1.0, "seconds"
    if duration_s < 3 * 3600:
        return 60.0, "minutes"
    return (3600.0, "hours") if duration_s < 4 * 86400 else (86400.0, "days")


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
    """Lines with a value axis of their own, with a gap where there is no value.

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
        content.append(line(0, y, PLOT, y, "grid") + text(-7, min(max(y + 4, 9), height), short(tick), "soft end"))
    for curve in curves:
        x = curve.seconds / duration_s * PLOT
        y_values = height * (1 - (curve.values - bottom) / (top - bottom))
        content.append(f'<path class="line {curve.style}" d="{_path(x, y_values)}"/>')
    labels = [(curve.style, curve.label) for curve in curves] if len(curves) > 1 else []
    return Lane(title=title, unit=unit, height=height, content="".join(content), labels=labels)


def _path(x: Series, y: Series) -> str:
    """Lines from point to point; a point that stands alone becomes a dot."""
    commands, pen = [], "M"
    for at, value in zip(x.tolist(), y.tolist(), strict=True):
        if math.isfinite(value):
            commands.append(f"{pen}{at:.1f} {value:.1f}" + ("h0" if pen == "M" else ""))
            pen = "L"
        else:
            pen = "M"
    return "".join(commands)


def heat_lane(title: str, unit: str, percent: Series) -> Lane:
    """Rows of a matrix [rows, bins] with values from 0 to 100, the stronger the higher; rows are averaged where there are many."""
    group = math.ceil(len(percent) / _MOST_HEAT_ROWS)
    starts = range(0, len(percent), group)
    rows = np.stack([percent[start : start + group].mean(axis=0) for start in starts])
    row_height = max(5, min(16, 160 // len(rows)))
    content = [rectangle(0, 0, PLOT, row_height * len(rows), "panel"), _cells(rows / 100, PLOT, row_height)]
    every = max(1, math.ceil(12 / row_height))
    content.extend(
        text(-7, row * row_height + row_height / 2 + 4, row * group, "soft end") for row in range(0, len(rows), every)
    )
    grouped = f", {group} a row" if group > 1 else ""
    return Lane(title=title, unit=unit + grouped, height=max(34, row_height * len(rows)), content="".join(content))


def _cells(shares: Series, width: float, row_height: float) -> str:
    """A matrix [rows, columns] of shares from 0 to 1 as cells, the stronger the higher; unknown ones are left out."""
    levels = np.where(np.isfinite(shares), np.round(np.nan_to_num(shares) * _HEAT_LEVELS), 0).astype(int)
    content = []
    for level in range(1, _HEAT_LEVELS + 1):
        content.append(_runs(levels == level, width, row_height, f'class="heat" opacity="{level / _HEAT_LEVELS:.1f}"'))
    return "".join(content)


def _runs(chosen: Chosen, width: float, row_height: float, style: str) -> str:
    """Neighbouring chosen cells of a row as one thick line each, which is the shortest way to say it."""
    lines: list[str] = []
    for row, cells in enumerate(chosen):
        steps = np.diff(np.concatenate(([0], cells.astype(int), [0])))
        starts, ends = np.flatnonzero(steps == 1).tolist(), np.flatnonzero(steps == -1).tolist()
        y = f"{(row + 0.5) * row_height:g}"
        lines.extend(f"M{start} {y}h{end - start}" for start, end in zip(starts, ends, strict=True))
    if not lines:
        return ""
    place = (
        f'transform="scale({width / chosen.shape[1]:.4f} 1)" stroke-width="{row_height - (row_height > _WITH_GAPS):g}"'
    )
    return f'<path {style} fill="none" shape-rendering="crispEdges" {place} d="{"".join(lines)}"/>'


@dataclass(frozen=True, kw_only=True)
class HeatMap:
    """A matrix as colours."""

    labels: Sequence[str]
    """Of the rows."""
    shares: Series
    """[rows, columns] from 0 to 1 on the scale; NaN where unknown."""
    marked: Chosen
    """[rows, columns]: cells in the colour of what is broken."""
    columns: Sequence[str]
    """Label of each column, of which as many are shown as there is room for."""
    low: str
    """What 0 on the scale is."""
    high: str
    unit: str
    """What the columns are."""


def heat_map(chart: HeatMap, title: str) -> str:
    """A whole drawing of a matrix, with its scale below."""
    row_height = 14 if len(chart.labels) <= 24 else 11
    height, column = row_height * len(chart.labels), PLOT / len(chart.columns)
    cells = _cells(chart.shares, PLOT, row_height)
    broken = _runs(chart.marked, PLOT, row_height, 'class="broken"')
    content = [
        f'<g transform="translate({_LEFT} 0)">{rectangle(0, 0, PLOT, height, "panel")}{cells}{broken}</g>',
        *(
            text(_LEFT - 8, (row + 0.5) * row_height + 4, _fitting(label), "small end")
            for row, label in enumerate(chart.labels)
        ),
    ]
    every = max(1, math.ceil(54 / column))
    for index in range(0, len(chart.columns), every):
        content.append(text(_LEFT + (index + 0.5) * column, height + 15, chart.columns[index], "soft mid"))
    content.append(text(_LEFT - 8, height + 15, chart.unit, "soft end"))
    content.append(_scale(chart, height + 24))
    return figure(height + 42, "".join(content), title)


def _fitting(label: str, characters: int = 26) -> str:
    """The end of a label that is too long: the numbers of blocks stand there."""
    return label if len(label) <= characters else f"…{label[1 - characters :]}"


def _scale(chart: HeatMap, y: float) -> str:
    cell, levels = 16, range(1, _HEAT_LEVELS + 1)
    middle = _LEFT + PLOT / 2 - cell * _HEAT_LEVELS / 2
    content = [text(middle - 8, y + 11, chart.low, "soft end")]
    for level in levels:
        x = middle + (level - 1) * cell
        content.append(
            f'<rect x="{x:.1f}" y="{y:.1f}" width="{cell}" height="12" class="scale" opacity="{level / _HEAT_LEVELS:.1f}"/>'
        )
    content.append(text(middle + cell * _HEAT_LEVELS + 8, y + 11, chart.high, "soft"))
    return "".join(content)


@dataclass(frozen=True, kw_only=True)
class MarkedTime:
    """A time in which something was seen; `style` is note, warning or severe."""

    label: str
    style: str
    start_s: float
    end_s: float


def window_lane(title: str, unit: str, windows: Sequence[MarkedTime], duration_s: float) -> Lane:
    """A row for each window: its label, and a line below it as long as it lasted."""
    row, scale = 22, PLOT / duration_s
    content = [rectangle(0, 0, PLOT, row * len(windows), "panel")]
    for index, window in enumerate(windows):
        y, start = index * row, window.start_s * scale
        length = max((window.end_s - window.start_s) * scale, 3)
        content.append(rectangle(start, y + 15, length, 5, f"w-{window.style}", window.label))
        at, style = (start, "") if start < PLOT / 2 else (start + length, "end")
        content.append(text(at, y + 12, window.label, style))
    return Lane(title=title, unit=unit, height=max(34, row * len(windows)), content="".join(content))


def stack_lane(title: str, unit: str, shares: Mapping[str, Series], *, height: float = 90) -> Lane:
    """Shares [bins] of each name, stacked to the full height."""
    bins = len(next(iter(shares.values())))
    lower = np.zeros(bins)
    content = [rectangle(0, 0, PLOT, height, "panel")]
    scale = f'transform="scale({PLOT / bins:.4f} {height})"'
    for name, values in shares.items():
        upper = lower + values
        content.append(
            f'<path class="{colour_class(name)}" shape-rendering="crispEdges" {scale} d="{_band(lower, upper)}"/>'
        )
        lower = upper
    for percent in (0, 50, 100):
        content.append(text(-7, height * (1 - percent / 100) + (9 if percent == 100 else 4), percent, "soft end"))
    return Lane(title=title, unit=unit, height=height, content="".join(content))


def _band(lower: Series, upper: Series) -> str:
    """The area between two step functions, downwards from 1, a piece for each bin that has an area."""
    pieces = []
    for index in np.flatnonzero(upper - lower > 1e-3).tolist():
        top, depth = 1 - upper[index], upper[index] - lower[index]
        pieces.append(f"M{index} {top:.3f}h1v{depth:.3f}h-1z")
    return "".join(pieces)
