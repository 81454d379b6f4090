"""Self-contained HTML pages: no network, no storage, readable in a sandboxed frame, in light and dark, and in print."""

from __future__ import annotations

import base64
import html
from collections.abc import Iterable, Sequence

_STYLE = """
:root { color-scheme: light dark; --ink: #1c2330; --soft: #5b6677; --line: #d9dee6; --paper: #ffffff; --panel: #f5f7fa; --accent: #2563eb;
  --good: #15803d; --bad: #b91c1c; }
@media (prefers-color-scheme: dark) { :root { --ink: #e6e9ef; --soft: #9aa5b5; --line: #323a47; --paper: #14181f; --panel: #1c222b;
  --accent: #7aa2ff; --good: #4ade80; --bad: #f87171; } }
* { box-sizing: border-box; }
body { margin: 0 auto; max-width: 72rem; padding: 1.5rem; background: var(--paper); color: var(--ink);
  font: 15px/1.5 system-ui, -apple-system, "Segoe UI", Roboto, "DejaVu Sans", sans-serif; }
h1 { font-size: 1.6rem; margin: 0 0 .25rem; } h2 { font-size: 1.15rem; margin: 2rem 0 .5rem; }
h3 { font-size: 1rem; margin: 1.25rem 0 .25rem; }
.lead { color: var(--soft); margin: 0 0 1rem; } .good { color: var(--good); } .bad { color: var(--bad); }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; margin: .5rem 0 1rem; font-variant-numeric: tabular-nums; }
th, td { padding: .3rem .8rem .3rem 0; text-align: left; border-bottom: 1px solid var(--line); vertical-align: top; }
th { color: var(--soft); font-weight: 600; } td.number { text-align: right; } .number, .short { white-space: nowrap; }
figure { margin: .5rem 0 1rem; } figcaption { color: var(--soft); font-size: .9rem; }
details { margin: .5rem 0 1rem; } summary { cursor: pointer; color: var(--accent); }
img, svg { max-width: 100%; height: auto; } img.pixels { image-rendering: pixelated; }
code { font-family: ui-monospace, "DejaVu Sans Mono", monospace; font-size: .9em; }
@media print { body { max-width: none; padding: 0; } h2, h3 { break-after: avoid; } figure, tr { break-inside: avoid; }
  details::details-content { content-visibility: visible; block-size: auto; } }
"""

_SHORT = 28
"""Characters of a cell that is not broken into lines."""


def escape(text: object) -> str:
    """Any value as text that is safe inside an element or a quoted attribute."""
    return html.escape(str(text), quote=True)


def page(title: str, lead: str, sections: Iterable[str]) -> str:
    """A whole page; `title` and `lead` are plain text, `sections` are HTML."""
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{escape(title)}</title><style>{_STYLE}</style></head><body>"
        f'<h1>{escape(title)}</h1><p class="lead">{escape(lead)}</p>{"".join(sections)}</body></html>'
    )


def section(title: str, *content: str) -> str:
    """A heading (plain text) with HTML below it."""
    return f"<section><h2>{escape(title)}</h2>{''.join(content)}</section>"


def subsection(title: str, *content: str) -> str:
    """A smaller heading (plain text) with HTML below it."""
    return f"<h3>{escape(title)}</h3>{''.join(content)}"


def details(title: str, *content: str) -> str:
    """HTML that is folded below its title (plain text); in print it is unfolded."""
    return f"<details><summary>{escape(title)}</summary>{''.join(content)}</details>"


def paragraph(text: str) -> str:
    """A paragraph of plain text."""
    return f"<p>{escape(text)}</p>"


def table(headers: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """A table of plain values; numbers stand right."""
    body = [[_cell(value) for value in row] for row in rows]
    head = "".join(f"<th>{escape(header)}</th>" for header in headers)
    return (
        f'<div class="scroll"><table><thead><tr>{head}</tr></thead><tbody>'
        + "".join(f"<tr>{''.join(row)}</tr>" for row in body)
        + "</tbody></table></div>"
    )


def _cell(value: object) -> str:
    numeric = isinstance(value, int | float) and not isinstance(value, bool)
    text = _number(value) if isinstance(value, float) else f"{value:,}" if isinstance(value, int) else str(value)
    style = ' class="number"' if numeric else ' class="short"' if len(text) <= _SHORT else ""
    return f"<td{style}>{escape(text)}</td>"


def _number(value: float) -> str:
    """With four digits, but for more before the point."""
    return f"{value:,.0f}" if 1e4 <= abs(value) < 1e12 else f"{value:,.4g}"


def picture(content: bytes, caption: str, *, media_type: str = "image/png", pixels: bool = False) -> str:
    """An inlined image; `pixels` keeps the pixels of an enlarged image sharp."""
    data = base64.b64encode(content).decode()
    kind = ' class="pixels"' if pixels else ""
    return (
        f'<figure><img{kind} src="data:{media_type};base64,{data}" alt="{escape(caption)}">'
        f"<figcaption>{escape(caption)}</figcaption></figure>"
    )


def drawing(svg: str, caption: str) -> str:
    """An inlined SVG drawing (HTML) with a caption (plain text); on a narrow screen it is scrolled rather than shrunk."""
    return f'<figure><div class="scroll">{svg}</div><figcaption>{escape(caption)}</figcaption></figure>'
