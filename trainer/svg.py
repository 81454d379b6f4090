"""The elements that charts are made of; texts and attributes are escaped here and nowhere else."""

from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np
from markupsafe import Markup, escape
from numpy.typing import NDArray

from trainer import formatting

Floats = NDArray[np.float64]
Flags = NDArray[np.bool_]

WIDTH = 1040
LEFT = 164
_RIGHT = 16
PLOT = WIDTH - LEFT - _RIGHT
"""Width of the part with data in charts that have labels on the left."""
_COLUMNS, _SMALL_COLUMNS = 22, 26
"""Letters that fit on the left, of either size."""

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


def colour_class(name: str) -> str:
    """Name the style class of a phase or range."""
    return f"f-{name if name in COLOURS else 'named'}"


def element(tag: str, *content: object, **attributes: object) -> Markup:
    """Write an element.

    Args:
        content: elements, which are `Markup` and stay as they are, and texts, which are escaped.
        attributes: their `_` become `-`, but for one at the end (`class_`); floats get one decimal, None is left out.
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
    """Write a whole chart.

    Args:
        title: for readers who cannot see it.
        top: where its y begins.
        shrinks: it has no text, so it may become as narrow as the page; another is scrolled before its text gets too small.
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
    return text(x, y, formatting.isolated(shown), style, hint="" if shown == label else label)


def fitted(label: str, *, small: bool = False, keep_end: bool = False) -> str:
    """Cut a label to what fits, a wide character counting two columns; by default its start is kept."""
    columns = _SMALL_COLUMNS if small else _COLUMNS
    if formatting.columns(label) <= columns:
        return label
    kept = list(reversed(label)) if keep_end else list(label)
    while formatting.columns("…" + "".join(kept)) > columns:
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
