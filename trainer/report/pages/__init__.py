"""Self-contained HTML pages: no network, no storage, readable in a sandboxed frame, in light and dark, on a phone, and in print.

The stages say what a page holds, as blocks of plain values; the templates beside this module turn each kind of block into HTML, and
escape every text. Only charts come as `Markup` (`trainer.report.charts`), and no template or stage marks anything else as safe.
"""

from __future__ import annotations

import base64
import re
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from trainer.report.charts import COLORS

_SHORT = 28  # characters of a cell that is not broken into lines


class Block:
    """A part of a page; the template has a macro for each kind."""


@dataclass(frozen=True)
class Paragraph(Block):
    """A text; `style` is soft, good or bad."""

    text: str
    style: str = ""


@dataclass(frozen=True)
class FileLink(Block):
    """A file that lies beside the page, and a text behind its name."""

    name: str
    text: str

    def __post_init__(self) -> None:
        """Refuse a name that would lead elsewhere."""
        if not re.fullmatch(r"[A-Za-z0-9][\w.-]*", self.name):
            raise ValueError(f"{self.name!r} is no name of a file beside the page")


@dataclass(frozen=True)
class BulletList(Block):
    """Short texts below one another."""

    texts: Sequence[str]


@dataclass(frozen=True)
class Mark:
    """A value of a table that is judged: `style` is good or bad."""

    text: str
    style: str

    def __str__(self) -> str:
        return self.text


@dataclass(frozen=True)
class Table(Block):
    """Plain values; numbers are right-aligned, marks colored. The title is for a page or a terminal that shows several tables."""

    headers: Sequence[str]
    rows: Sequence[Sequence[object]]
    title: str = ""


@dataclass(frozen=True)
class Figure(Block):
    """A chart; on a narrow screen it is scrolled rather than shrunk."""

    chart: Markup
    caption: str = ""


@dataclass(frozen=True)
class Photo(Block):
    """An image file, inlined."""

    content: bytes
    caption: str
    media_type: str = "image/png"
    answers: Sequence[tuple[str, str, str]] = ()
    """Lines below it: who answers, what, and the style of that: soft, good, bad or none."""

    @property
    def base64(self) -> str:
        return base64.b64encode(self.content).decode()


@dataclass(frozen=True)
class PhotoGrid(Block):
    """Photos side by side, as many as fit; `small` ones in narrow columns."""

    photos: Sequence[Photo]
    small: bool = False


@dataclass(frozen=True)
class Legend(Block):
    """Style class and label of each color of the charts that follow."""

    entries: Sequence[tuple[str, str]]


@dataclass(frozen=True)
class Tiles(Block):
    """Main numbers: (value, caption)."""

    entries: Sequence[tuple[str, str]]


@dataclass(frozen=True, kw_only=True)
class FindingCard(Block):
    """Something that slows or spoils a training; `severity` is note, warning or severe."""

    number: int
    title: str
    severity: str
    place: str
    text: str
    advice: str
    saving: str  # empty where none is known
    saving_reason: str
    numbers: Sequence[tuple[str, str]]  # (name, value)


@dataclass(frozen=True)
class Links(Block):
    """Links to other pages in the same folder: (file, title)."""

    entries: Sequence[tuple[str, str]]


@dataclass(frozen=True)
class Commands(Block):
    """Commands to copy, each with what it does; a click selects a whole one."""

    entries: Sequence[tuple[str, str]]  # (what it does, command)


@dataclass(frozen=True)
class Details(Block):
    """Blocks that are folded below their title; in print they are unfolded."""

    title: str
    blocks: Sequence[Block | None]


@dataclass(frozen=True)
class SideBySide(Block):
    """Blocks side by side where there is room for two."""

    blocks: Sequence[Block | None]


@dataclass(frozen=True)
class PageSection(Block):
    """A heading with blocks below it, without those that are None."""

    title: str
    blocks: Sequence[Block | None] = field(default_factory=tuple)


@dataclass(frozen=True)
class Subsection(PageSection):
    """A section with a smaller heading."""


@dataclass(frozen=True)
class PageLink:
    """A value of the facts that leads to a page elsewhere, by http or https."""

    text: str
    address: str

    def __post_init__(self) -> None:
        """Refuse an address that would run a script."""
        if not self.address.startswith(("http://", "https://")):
            raise ValueError(f"{self.address!r} is no address of a page")


def render(
    title: str, lead: str, blocks: Sequence[Block | None], *, facts: Mapping[str, str | PageLink] | None = None
) -> str:
    """Render a whole page: its heading, a sentence below it with what matters most, and the blocks that are not None.

    The sections are listed at the side, and `facts` say at the end where the page comes from (`provenance`). A page whose bytes must not
    depend on that has none until `with_facts` adds those of its run.
    """
    shown = [block for block in blocks if block is not None]
    page = _environment().get_template("page.html.jinja").render(title=title, lead=lead, blocks=shown)
    return with_facts(page, facts) if facts else page


def with_facts(page: str, facts: Mapping[str, str | PageLink]) -> str:
    """Put facts at the end of a rendered page, in place of those that it has; an older page without a place for them stays as it is."""
    before, start, rest = page.rpartition(_FACTS)
    _, end, after = rest.partition(_END)
    if not start or not end:
        return page
    return f"{before}{start}{_environment().get_template('facts.html.jinja').render(facts=facts)}{end}{after}"


_FACTS, _END = "<!-- facts -->", "<!-- end of facts -->"  # no text of a page can have these, since all are escaped


def gate_table(verdict: Mapping[str, Any]) -> list[Block]:
    """Show the conditions of a gate, of a verdict in `summary.json`; only the failed ones in that of an earlier version."""
    if "conditions" not in verdict:
        return [BulletList(verdict["reasons"])] if verdict["reasons"] else []
    rows = [
        (
            one["name"],
            one["measured"],
            one["limit"],
            Mark("failed", "bad") if one["reason"] else Mark("holds", "good"),
            one["setting"],
        )
        for one in verdict["conditions"]
    ]
    return [Table(["condition", "measured", "limit", "verdict", "setting"], rows)]


@cache
def _environment() -> Environment:
    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent / "templates"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.globals["colors"] = COLORS
    environment.filters |= {"kind": lambda block: type(block).__name__, "cell": cell, "cell_style": _cell_style}
    environment.filters["anchor"] = lambda title: f"s-{zlib.crc32(title.encode(errors='replace')):08x}"
    environment.tests["section"] = lambda block: type(block) is PageSection
    return environment


def cell(value: object) -> str:
    """Write a value of a table; a number with four digits, but for more before the point."""
    if isinstance(value, float):
        return f"{value:,.0f}" if 1e4 <= abs(value) < 1e12 else f"{value:,.4g}"
    return f"{value:,}" if isinstance(value, int) and not isinstance(value, bool) else str(value)


def _cell_style(value: object) -> str:
    if isinstance(value, Mark):
        return f"short {value.style}"
    if isinstance(value, int | float) and not isinstance(value, bool):
        return "number"
    return "short" if len(str(value)) <= _SHORT else ""
