"""Charts of bars: shares of a whole, amounts with their spread, amounts side by side, and how often a value occurs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
from markupsafe import Markup

from trainer.charts.svg import (
    COLOURS,
    LEFT,
    PLOT,
    WIDTH,
    Floats,
    colour_class,
    drawing,
    hinted,
    line,
    rectangle,
    row_label,
    text,
    ticks,
)
from trainer.formatting import short

_ROW = 26
_NARROW_ROW = 15
_MANY_ROWS = 16
_COLUMNS_WIDTH, _COLUMNS_HEIGHT, _COLUMNS_TOP = 720, 140, 16

Amount = TypeVar("Amount", float, Floats)


def by_colour(amounts: Mapping[str, Amount]) -> dict[str, Amount]:
    """Sum the amounts of phases and ranges that have no colour of their own, where there are several."""
    own = {name: amount for name, amount in amounts.items() if name in COLOURS}
    named = [amount for name, amount in amounts.items() if name not in COLOURS]
    return own | {"named": sum(named[1:], start=named[0])} if len(named) > 1 else dict(amounts)


@dataclass(frozen=True, kw_only=True)
class BarPart:
    """A part of a stacked bar; `name` gives its colour."""

    name: str
    label: str
    share: float


def stacked_bar(parts: Sequence[BarPart], title: str) -> Markup:
    """Draw shares of a whole side by side."""
    content, x = [], 0.0
    for part in parts:
        width = part.share * WIDTH
        hint = f"{part.label}: {100 * part.share:.1f} %"
        content.append(rectangle(x, 0, width - 1, 22, colour_class(part.name), hint))
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
        content.append(rectangle(LEFT, y + 4, row.value / most * length, _ROW - 8, colour_class(row.name), row.note))
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
        content.append(line(x, 0, x, height, "grid"))
        content.append(text(x, height + 15, short(tick), "soft mid"))
    content.append(text(LEFT + length + 26, height + 15, unit, "soft"))
    return content


@dataclass(frozen=True, kw_only=True)
class StackedRow:
    """A row of stacked bars; the `share` of each part is an amount."""

    label: str
    parts: Sequence[BarPart]
    note: str

    @property
    def total(self) -> float:
        return sum(part.share for part in self.parts)


def stacked_rows(rows: Sequence[StackedRow], unit: str, title: str) -> Markup:
    """Draw a stacked bar for each row, on one scale."""
    most = max(row.total for row in rows) or 1.0
    length = PLOT - 190
    row_height = _ROW if len(rows) <= _MANY_ROWS else _NARROW_ROW
    height, gap = row_height * len(rows), row_height / 6
    content = _value_axis(most, length, height, unit)
    for index, row in enumerate(rows):
        y, x = index * row_height, float(LEFT)
        baseline = y + row_height / 2 + 4
        content.append(row_label(LEFT - 10, baseline, row.label))
        for part in row.parts:
            width = part.share / most * length
            # The hints of many rows would fill the page.
            hint = f"{part.label}: {short(part.share)} {unit}" if row_height == _ROW else ""
            content.append(rectangle(x, y + gap, width - 0.5, row_height - 2 * gap, colour_class(part.name), hint))
            x += width
        content.append(text(LEFT + length + 18, baseline, row.note, "soft"))
    return drawing(height + 34, *content, title=title)


def histogram(values: Floats, marks: Sequence[tuple[float, str]], unit: str, title: str, *, count_label: str) -> Markup:
    """Draw how often each value occurs; the largest half percent stands in the last bar.

    Args:
        values: at least one.
        marks: (value, label) of vertical lines.
        count_label: what is counted.
    """
    low, high = float(values.min()), float(np.percentile(values, 99.5))
    high = high if high > low else low * 1.01 + 1e-9
    counts, edges = np.histogram(np.clip(values, low, high), bins=min(60, max(10, len(values) // 4)), range=(low, high))
    most, height, top = float(counts.max()), 150.0, 18.0
    scale = PLOT / (high - low)
    content = []
    for tick in (tick for tick in ticks(0, most, 4) if tick == round(tick)):
        y = top + height * (1 - tick / most)
        content.append(line(LEFT, y, LEFT + PLOT, y, "grid"))
        content.append(text(LEFT - 8, y + 4, short(tick), "soft end"))
    for index, count in enumerate(counts.tolist()):
        x = LEFT + (edges[index] - low) * scale
        bar, width = height * count / most, (edges[index + 1] - edges[index]) * scale - 1
        hint = f"{short(edges[index])} to {short(edges[index + 1])} {unit}: {count:,}"
        content.append(rectangle(x, top + height - bar, width, bar, "bar", hint))
    for tick in ticks(low, high, 8):
        content.append(text(LEFT + (tick - low) * scale, top + height + 16, short(tick), "soft mid"))
    for value, label in marks:
        x = LEFT + (min(value, high) - low) * scale
        content.append(line(x, top - 4, x, top + height, "whisker"))
        content.append(text(x, top - 7, label, "mid"))
    content.append(line(LEFT, top + height, LEFT + PLOT, top + height, "axis"))
    content.append(text(LEFT - 60, top + height / 2, count_label, "soft end"))
    content.append(text(LEFT - 10, top + height + 16, unit, "soft end"))
    return drawing(top + height + 24, *content, title=title)


def stacked_columns(names: Sequence[str], counts: Sequence[tuple[str, Sequence[int]]], title: str) -> Markup:
    """Draw a stacked column for each name, the largest first and as many as there is room for.

    Args:
        names: what each column counts.
        counts: (part, count of each name); at most three parts, from the bottom to the top.
    """
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
