"""Charts of matrices: the stronger the colour, the higher the value."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from markupsafe import Markup
from numpy.typing import NDArray

from trainer.charts.svg import (
    LEFT,
    PLOT,
    Flags,
    Floats,
    drawing,
    element,
    fitted,
    group,
    hinted,
    rectangle,
    row_label,
    text,
)
from trainer.formatting import columns, isolated, percent

_LEVELS = 10
_WITH_GAPS = 8
"""Rows of cells that are higher are drawn apart from one another."""
_CLASSES_WITH_COUNTS = 25
_CLASSES_WITH_NAMES = 100
MOST_CELLS = 40_000
"""Of a confusion matrix: more would make the page larger than a browser or the UI of a pipeline likes."""


@dataclass(frozen=True, kw_only=True)
class HeatMap:
    """A matrix as colours."""

    labels: Sequence[str]
    """Of the rows."""
    shares: Floats
    """[rows, columns] from 0 to 1 on the scale; NaN where unknown."""
    marked: Flags
    """[rows, columns]: cells in the colour of what is broken."""
    columns: Sequence[str]
    """Label of each column, of which as many are shown as there is room for."""
    low: str
    """What 0 on the scale is."""
    high: str
    unit: str
    """What the columns are."""


def heat_map(chart: HeatMap, title: str) -> Markup:
    """Draw a matrix with its scale below."""
    row_height = 14 if len(chart.labels) <= 24 else 11
    height, column = row_height * len(chart.labels), PLOT / len(chart.columns)
    broken = _runs(chart.marked, PLOT, row_height, class_="broken")
    content = [group(LEFT, 0, rectangle(0, 0, PLOT, height, "panel"), *cells(chart.shares, PLOT, row_height), *broken)]
    for row, label in enumerate(chart.labels):
        content.append(row_label(LEFT - 8, (row + 0.5) * row_height + 4, label, "small end"))
    every = max(1, math.ceil(54 / column))
    for index in range(0, len(chart.columns), every):
        content.append(text(LEFT + (index + 0.5) * column, height + 15, chart.columns[index], "soft mid"))
    content.append(text(LEFT - 8, height + 15, chart.unit, "soft end"))
    content += _scale(LEFT + PLOT / 2, height + 24, chart.low, chart.high)
    return drawing(height + 42, *content, title=title)


def cells(shares: Floats, width: float, row_height: float) -> list[Markup]:
    """Draw a matrix [rows, columns] of shares from 0 to 1, the stronger the higher; unknown ones are left out."""
    levels = np.where(np.isfinite(shares), np.round(np.nan_to_num(shares) * _LEVELS), 0).astype(int)
    drawn = []
    for level in range(1, _LEVELS + 1):
        drawn += _runs(levels == level, width, row_height, class_="heat", opacity=level / _LEVELS)
    return drawn


def _runs(chosen: Flags, width: float, row_height: float, **style: object) -> list[Markup]:
    """Draw neighbouring chosen cells of a row as one thick line each, which is the shortest way to say it."""
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


def _scale(middle: float, y: float, low: str, high: str) -> list[Markup]:
    cell = 16
    left = middle - cell * _LEVELS / 2
    content = [text(left - 8, y + 11, low, "soft end")]
    for level in range(1, _LEVELS + 1):
        place = {"x": left + (level - 1) * cell, "y": float(y), "width": cell, "height": 12}
        content.append(element("rect", **place, class_="scale", opacity=level / _LEVELS))
    content.append(text(left + cell * _LEVELS + 8, y + 11, high, "soft"))
    return content


def confusion(counts: NDArray[np.int64], classes: Sequence[str], title: str) -> Markup:
    """Draw a confusion matrix as shares of each row, with counts and names where they are readable.

    Args:
        counts: [K, K], rows are the truth.
        classes: name of each class.
    """
    shares = counts / np.maximum(counts.sum(axis=1, keepdims=True), 1)
    counted, named = len(classes) <= _CLASSES_WITH_COUNTS, len(classes) <= _CLASSES_WITH_NAMES
    cell = 30.0 if counted else 13.0 if named else max(1.0, 800 / len(classes))
    edge = cell * len(classes)
    widest = (
        max(columns(fitted(name, small=not counted)) for name in classes) * (7.0 if counted else 6.0) if named else 0.0
    )
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
    content += [
        text(edge / 2, below, "taken for", "soft mid"),
        *_scale(middle, below + 14, "0 %", "100 % of the class"),
    ]
    width = math.ceil(margin + max(edge + 16, middle + 200))
    return drawing(below + 36, group(margin, 0, *content), title=title, width=width)


def _counted_cells(counts: NDArray[np.int64], shares: Floats, classes: Sequence[str], cell: float) -> list[Markup]:
    drawn = []
    for row, column in np.argwhere(counts > 0).tolist():
        x, y, share = column * cell, row * cell, float(shares[row, column])
        hint = f"{classes[row]} taken for {classes[column]}: {counts[row, column]:,} ({percent(share)} of the class)"
        place = {"x": x, "y": y, "width": cell - 1, "height": cell - 1, "opacity": f"{max(share, 0.08):.2f}"}
        number = text(
            x + cell / 2 - 0.5, y + cell / 2 + 4, f"{counts[row, column]}", "mid paper" if share > 0.5 else "mid"
        )
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
