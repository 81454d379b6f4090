"""Names that someone has given who wants a page to run a script: what the pages hold is the same elements as with plain names."""

from html.parser import HTMLParser

import numpy as np
import pytest

from tests.unit.data.test_card import Dropped, Quarantined, candidate, content, data_card
from tests.unit.evaluation.test_report import page as evaluation_page
from trainer.report import charts, pages
from trainer.report.charts import MarkedTime, ReliabilityCurve
from trainer.report.pages import (
    BulletList,
    Details,
    Figure,
    FindingCard,
    Legend,
    Mark,
    PageSection,
    Paragraph,
    Photo,
    PhotoGrid,
    SideBySide,
    Subsection,
    Table,
    Tiles,
    gate_table,
)

PLAIN = ["apple", "pear", "plum", "fig", "kiwi", "lime", "nut"]
HOSTILE = [
    "<script>alert(1)</script>",
    '"><img src=x onerror=alert(1)>',
    "' onmouseover='alert(1)",
    "</style></title><svg onload=alert(1)>",
    "$\\frac{1}{",
    "]]><!-- <a href=javascript:alert(1)>",
    "&lt;script&gt; &#x3c;",
]


class Elements(HTMLParser):
    """The elements of a page with the names of their attributes, in their order, and its text."""

    def __init__(self, page: str) -> None:
        super().__init__(convert_charrefs=True)
        self.elements: list[tuple[str, tuple[str, ...]]] = []
        self.text = ""
        self.feed(page)
        self.close()

    def handle_starttag(self, tag, attributes):
        shown = tuple(name for name, _ in attributes if name != "class")  # a short cell has one more
        self.elements.append((tag, shown))

    def handle_data(self, data):
        self.text += data


def card(names):
    """A data card whose classes, files, notes and source have these names."""
    splits = {"train": [candidate(0, 0, "train"), candidate(1, 1, "train")], "val": [], "test": [], "unlabeled": []}
    return data_card(
        **content(
            classes=tuple(names[:2]),
            notes=(names[2],),
            splits=splits,
            quarantined=[Quarantined(name=names[3], reason=names[4])],
            dropped=[Dropped(name=names[5], split="train", kept_name=names[6], kept_split="test")],
        )
    )


def parts(names):
    """Every part that pages are made of."""
    blocks = [
        PageSection(names[0], [Paragraph(names[1]), Table([names[2]], [[names[3]], [names[4]]])]),
        Subsection(names[5], [Details(names[6], [BulletList(names)]), None]),
        PhotoGrid([Photo(b"", names[0], answers=[(names[1], names[2], "good")])], small=True),
        SideBySide([Paragraph(names[3]), Table([""], [[Mark(names[4], "bad")]])]),
        *gate_table({"conditions": [dict.fromkeys(("name", "measured", "limit", "setting", "reason"), names[5])]}),
        Figure(charts.drawing(9, charts.text(0, 0, names[2], hint=names[3]), title=names[4]), names[1]),
        Legend([("f0", names[5])]),
        Tiles([(names[6], names[0])]),
        FindingCard(
            number=1,
            title=names[0],
            severity="note",
            place=names[1],
            text=names[2],
            advice=names[3],
            saving=names[4],
            saving_reason=names[5],
            numbers=[(names[6], names[0])],
        ),
    ]
    return pages.render(names[2], names[3], blocks)


def evaluation(names):
    return evaluation_page(padded(names), [names[0]], [names[1]], names[2])


def padded(names):
    """Names that are all too long for a chart, so that each is cut, and shown whole as a hint."""
    return [name.ljust(60, ".") for name in names]


def all_charts(names):
    names = padded(names)
    counts = np.arange(len(names) ** 2).reshape(len(names), -1)
    curve = ReliabilityCurve(name=names[0], confidence=[0.5], accuracy=[0.5], intervals=[(0.1, 0.9)], counts=[1])
    window = MarkedTime(label=names[1], style="note", start_s=0, end_s=1)
    lane = charts.window_lane(names[2], names[3], [window], 10)
    drawn = [
        charts.confusion(counts, names, names[5]),
        charts.recalls({names[0]: np.linspace(0, 1, len(names))}, names, names[1]),
        charts.reliability([curve], names[2]),
        charts.stacked_columns(names, [(names[0], [1] * len(names))], names[1]),
        charts.stacked_rows([(names[2], {names[4]: 1.0}, names[3])], names[4], names[5], spoken=str),
        charts.over_time([lane], 10, names[6]),
    ]
    return pages.render("", "", [Figure(chart) for chart in drawn])


@pytest.mark.parametrize("make", [card, parts, all_charts, evaluation])
def test_hostile_names_are_text(make):
    plain, hostile = Elements(make(PLAIN)), Elements(make(HOSTILE))
    assert hostile.elements == plain.elements
    assert HOSTILE[0] in hostile.text
