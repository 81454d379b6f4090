"""Names that someone has given who wants a page to run a script: what the pages hold is the same elements as with plain names."""

from html.parser import HTMLParser

import pytest

from tests.unit.data.test_card import Dropped, Quarantined, candidate, content, data_card
from tests.unit.evaluation.test_report import page as evaluation_page
from trainer import html

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
        content(
            classes=tuple(names[:2]),
            notes=(names[2],),
            splits=splits,
            quarantined=[Quarantined(name=names[3], reason=names[4])],
            dropped=[Dropped(name=names[5], split="train", kept_name=names[6], kept_split="test")],
        )
    )


def parts(names):
    """Every part that pages are made of."""
    body = [
        html.section(names[0], html.paragraph(names[1]), html.table([names[2]], [[names[3]], [names[4]]])),
        html.subsection(names[5], html.details(names[6])),
        html.picture(b"", names[0]),
        html.drawing("<svg></svg>", names[1]),
    ]
    return html.page(names[2], names[3], body)


@pytest.mark.parametrize("make", [card, parts, lambda names: evaluation_page(names, [names[0]])])
def test_hostile_names_are_text(make):
    plain, hostile = Elements(make(PLAIN)), Elements(make(HOSTILE))
    assert hostile.elements == plain.elements
    assert HOSTILE[0] in hostile.text
