from __future__ import annotations

import re
import zlib
from pathlib import Path

import pytest
from jinja2 import UndefinedError
from markupsafe import Markup

from trainer.report import pages
from trainer.report.pages import (
    Block,
    BulletList,
    Commands,
    Details,
    Figure,
    FileLink,
    FindingCard,
    Legend,
    Links,
    Mark,
    PageLink,
    PageSection,
    Paragraph,
    Photo,
    PhotoGrid,
    SideBySide,
    Subsection,
    Table,
    Tiles,
    cell,
)

ANCHOR = f"s-{zlib.crc32(b'a section'):08x}"
TEMPLATES = Path(pages.__file__).parent / "templates"
CARD = FindingCard(
    number=1,
    title="Loader workers",
    severity="warning",
    place="Distillation",
    text="Steps wait.",
    advice="Raise workers.",
    saving="12 s",
    saving_reason="the time that steps wait",
    numbers=[("waiting", "40 %")],
)
EVERY = [
    Paragraph("plain"),
    Paragraph("good", style="good"),
    BulletList(["first", "second"]),
    Table(["what", "how many"], [["images", 1234], ["share", 0.54219]]),
    Figure(Markup("<svg></svg>"), "a chart"),
    Photo(b"\x00", "a photo"),
    PhotoGrid([Photo(b"\x01", "another", answers=[("student", "7  93%", "bad")])], small=True),
    SideBySide([Paragraph("left"), Table(["verdict"], [[Mark("holds", "good")]])]),
    Legend([("f0", "train")]),
    Tiles([("12 s", "recorded")]),
    CARD,
    Links([("data.html", "Data <card>")]),
    Commands([("Ask <it>", "python -m trainer predict 'a b.jpg'")]),
    FileLink("trace.json.gz", "a <trace>"),
    Details("folded", [Paragraph("inside")]),
    PageSection("a section", [Subsection("a subsection", [Paragraph("deep"), None])]),
]


def body(*blocks: Block | None) -> str:
    """What a page has between its lead and its end, without line breaks."""
    page = pages.render("title", "lead", blocks)
    return "".join(page.partition("<main>")[2].partition("<!-- facts -->")[0].splitlines())


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        (0.54219, "0.5422"),
        (3260.21, "3,260"),
        (29190.4, "29,190"),
        (1234567.0, "1,234,567"),
        (float("inf"), "inf"),
        (7, "7"),
        (True, "True"),
    ],
)
def test_numbers_are_shown_as_people_write_them(value: object, shown: str) -> None:
    assert cell(value) == shown


def test_every_kind_of_block_is_shown() -> None:
    assert {type(block) for block in EVERY} | {Subsection} == {*Block.__subclasses__(), Subsection}
    assert body(*EVERY) == (
        "<p>plain</p>"
        '<p class="good">good</p>'
        "<ul><li>first</li><li>second</li></ul>"
        '<div class="scroll" tabindex="0"><table><thead><tr><th scope="col">what</th><th scope="col">how many</th></tr></thead>'
        "<tbody>"
        '<tr><td class="short">images</td><td class="number">1,234</td></tr>'
        '<tr><td class="short">share</td><td class="number">0.5422</td></tr></tbody></table></div>'
        '<figure><div class="scroll" tabindex="0"><svg></svg></div><figcaption>a chart</figcaption></figure>'
        '<figure><img src="data:image/png;base64,AA==" alt="a photo"><figcaption>a photo</figcaption></figure>'
        '<div class="photos small"><figure><img src="data:image/png;base64,AQ==" alt="another">'
        '<figcaption>another</figcaption><dl><dt>student</dt><dd class="bad">7  93%</dd></dl></figure></div>'
        '<div class="columns"><p>left</p><div class="scroll" tabindex="0"><table><thead><tr><th scope="col">verdict</th>'
        "</tr></thead><tbody>"
        '<tr><td class="short good">holds</td></tr></tbody></table></div></div>'
        '<div class="legend"><span><i class="f0"></i>train</span></div>'
        '<div class="tiles"><div class="tile"><b>12 s</b><span>recorded</span></div></div>'
        '<article class="finding warning"><h3>1. Loader workers <em class="badge">warning</em></h3>'
        '<p class="soft">Distillation</p><p>Steps wait.</p><p><b>Do:</b> Raise workers.</p>'
        "<p><b>Saves about 12 s:</b> the time that steps wait</p>"
        '<p class="chips"><span>waiting <b>40 %</b></span></p></article>'
        '<nav aria-label="Pages"><a href="data.html">Data &lt;card&gt;</a></nav>'
        '<dl class="commands"><dt>Ask &lt;it&gt;</dt><dd><code tabindex="0">python -m trainer predict &#39;a b.jpg&#39;</code></dd></dl>'
        '<p><a href="trace.json.gz" download>trace.json.gz</a> a &lt;trace&gt;</p>'
        "<details><summary>folded</summary><p>inside</p></details>"
        f'<section id="{ANCHOR}"><h2>a section</h2>'
        "<section><h3>a subsection</h3><p>deep</p></section></section>"
    )


def test_blocks_leave_out_nothing_given() -> None:
    assert "<thead>" not in body(Table(["", ""], [["seconds", 3]]))
    assert '<thead><tr><td></td><th scope="col">teacher</th></tr></thead>' in body(Table(["", "teacher"], []))
    # What is none is left out.
    assert body(None, Details("folded", [None]), None) == "<details><summary>folded</summary></details>"
    # A chart that is plain text is text.
    assert "&lt;svg onload=alert(1)&gt;" in body(Figure("<svg onload=alert(1)>"))  # type: ignore[arg-type]


def test_templates_escape() -> None:
    shown = body(Paragraph("a < b & \"c\" 'd'"), Figure(Markup("<svg>&amp;</svg>"), "<b>"))
    assert "<p>a &lt; b &amp; &#34;c&#34; &#39;d&#39;</p>" in shown
    assert "<svg>&amp;</svg>" in shown
    assert "<figcaption>&lt;b&gt;</figcaption>" in shown
    # No template turns escaping off.
    templates = sorted(TEMPLATES.iterdir())
    assert {path.name for path in templates} == {
        "page.html.jinja",
        "blocks.html.jinja",
        "facts.html.jinja",
        "style.css.jinja",
    }
    for path in templates:
        assert not re.search(r"\bsafe\b|autoescape|Markup", path.read_text()), path.name
    # A value that a template lacks is an error.
    template = pages._environment().get_template("page.html.jinja")
    with pytest.raises(UndefinedError, match="lead"):
        template.render(title="title", blocks=[])


def test_sections_are_listed_at_the_side_where_there_are_several() -> None:
    titles = ["Verdict", "Bill & <costs>", "類"]
    page = pages.render("title", "lead", [*(PageSection(title) for title in titles), None])
    contents = page.partition('<nav class="contents"')[2].partition("</nav>")[0]
    links = re.findall('<a href="#([^"]*)">(.*?)</a>', contents)
    assert [title for _, title in links] == ["Verdict", "Bill &amp; &lt;costs&gt;", "類"]
    assert re.findall('<section id="([^"]*)">', page) == [anchor for anchor, _ in links]
    assert len(set(links)) == 3
    assert '<nav class="contents"' not in pages.render("title", "lead", [PageSection("alone")])


def test_facts_are_put_at_the_end_once_and_replaced() -> None:
    page = pages.render("title", "lead", [Paragraph("<!-- facts -->")])
    assert "About this page" not in page
    first = pages.with_facts(page, {"run": "<one>"})
    assert "<dt>run</dt><dd>&lt;one&gt;</dd>" in first
    second = pages.with_facts(first, {"MLflow run": PageLink("abc", "https://mlflow/#/runs/abc")})
    assert '<dd><a href="https://mlflow/#/runs/abc">abc</a></dd>' in second
    assert "&lt;one&gt;" not in second
    assert second.count("About this page") == 1
    assert pages.render("title", "lead", [], facts={"run": "a"}).count("<dt>run</dt>") == 1
    # An older page has no place for them.
    assert pages.with_facts("<p>the page</p>", {"run": "a"}) == "<p>the page</p>"
    with pytest.raises(ValueError, match="is no address"):
        PageLink("abc", "javascript:alert(1)")


def test_page_is_whole_and_refers_to_nothing_outside() -> None:
    page = pages.render("a <title>", "lead", EVERY)
    assert page.startswith('<!doctype html>\n<html lang="en">')
    assert page.endswith("</html>")
    assert "<title>a &lt;title&gt;</title>" in page
    assert '<meta name="viewport" content="width=device-width, initial-scale=1">' in page
    assert "prefers-color-scheme: dark" in page
    assert "@media print" in page
    assert not re.search(r"https?:|//[a-z]|@import|url\(|<script|<link", page)
