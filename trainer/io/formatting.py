"""Format numbers as people write them, with their units, and tables; shorten names."""

from __future__ import annotations

import unicodedata
from collections.abc import Iterable, Sequence


def short(value: float) -> str:
    """Format a number in about three digits: `0.0123`, `17.5`, `1,234`."""
    if value == 0:
        return "0"
    if 1e9 > abs(value) >= 100 or value == round(value, 0):
        return f"{value:,.0f}" if abs(value) < 1e9 else f"{value:.3g}"
    return f"{value:.3g}"


def exact(value: object) -> str:
    """Write a value of a table of classes as it stands there; a number in all its digits, `12345.67` and `2`."""
    return repr(value).removesuffix(".0") if isinstance(value, float) else str(value)


def percent(share: float) -> str:
    """Format a share from 0 to 1: `3.4 %`, `62 %`."""
    value = 100 * share
    if 0 < value < 0.05:
        return "< 0.1 %"
    return f"{value:.1f} %" if 0 < value < 9.95 else f"{value:,.0f} %"


def milliseconds(value: float) -> str:
    """Format milliseconds: `17.5 ms`, from ten seconds on `12.3 s`."""
    return f"{value / 1000:.3g} s" if value >= 10_000 else f"{short(value)} ms"


def size(count: float) -> str:
    """Format bytes in decimal units: `3.2 kB`, `17 MB`, `1.06 GB`."""
    if abs(count) >= 1e9:
        return f"{count / 1e9:.2f} GB"
    return f"{short(count / 1e6)} MB" if abs(count) >= 1e5 or not count else f"{short(count / 1e3)} kB"


_UNITS = ((("days", 86400, 1), 3 * 86400), (("h", 3600, 2), 2 * 3600), (("min", 60, 1), 2 * 60))
"""Units of a duration with their seconds and digits, and from how many seconds on each is used."""


def duration(seconds: float) -> str:
    """Format a duration: `12 ms`, `48.2 s`, `12.5 min`, `3.25 h`, `40 days`."""
    if 0 < seconds < 0.1:
        return milliseconds(1000 * seconds)
    unit, size, digits = next((known for known, least in _UNITS if seconds >= least), ("s", 1, 1))
    return f"{f'{seconds / size:.{digits}f}'.rstrip('0').rstrip('.')} {unit}"


def estimated(seconds: float) -> str:
    """Format a duration that is an estimate, by two digits: `about 54 s`, `about 3.9 min`."""
    return f"about {duration(float(f'{seconds:.2g}'))}"


def ratio(first: float, second: float, less: str, more: str) -> str:
    """Compare the second figure with the first: `10.0x smaller`, with a word for less and one for more."""
    return f"{first / second:.1f}x {less}" if first >= second else f"{second / first:.1f}x {more}"


def clipped(name: str, length: int = 90) -> str:
    """Cut the end off a name that would be too long for a table."""
    return name if len(name) <= length else f"{name[: length - 1]}…"


def listed(names: Sequence[str], most: int, *, between: str = ", ", last: str = " and ") -> str:
    """Join names, of which at most so many are written out: `a, b and 3 more`."""
    more = len(names) - most
    return between.join(names[:most]) + (f"{last}{more} more" if more > 0 else "")


def aligned(rows: Sequence[Sequence[str]], right: Iterable[int] = ()) -> list[str]:
    """Format lines with columns as wide as their widest cell, two spaces apart; those in `right` are right-aligned."""
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))] if rows else []
    forms = [f"{'>' if column in right else '<'}{width}" for column, width in enumerate(widths)]
    return ["  ".join(map(format, row, forms)).rstrip() for row in rows]


def columns(text: str) -> float:
    """Estimate the width of a text in small Latin letters: a Chinese, Japanese or Korean character is two, a combining mark none."""
    return sum(map(_columns, text))


def _columns(character: str) -> float:
    if unicodedata.combining(character):
        return 0.0
    if unicodedata.east_asian_width(character) in "WF":
        return 2.0
    if character in "fijlr'.,:; ":
        return 0.7
    return 1.7 if character in "MWmw@%…" else 1.2 if character.isupper() else 1.0


def isolated(name: str) -> str:
    """Keep a name in a right-to-left script from reordering the sentence around it.

    An Arabic class name in an English sentence would pull the digits and punctuation that follow it to its other side. Unicode's
    isolates (U+2068, U+2069) prevent that in HTML, in SVG and in plain text alike; other names stay as they are.
    """
    is_right_to_left = any(unicodedata.bidirectional(one) in ("R", "AL") for one in name)
    return f"\u2068{name}\u2069" if is_right_to_left else name
