"""The pages as Chromium shows them: in light and dark, wide and narrow, in a sandboxed frame, and printed."""

from __future__ import annotations

import html
import json
from collections.abc import Sequence
from pathlib import Path

import pytest
from PIL import Image

from docs.pictures import browser, chromium, picture
from tests.unit.data.test_card import candidate, data_card
from tests.unit.data.test_card import content as card_content
from tests.unit.evaluation.test_report import page as evaluation_page
from trainer.data.curation import ImageCandidate
from trainer.data.dataset_schema import SplitName
from trainer.profiling import compare
from trainer.profiling.compare import ComparedRun
from trainer.profiling.evidence import TrainingEvidence
from trainer.profiling.findings import Answer
from trainer.profiling.profile_report import build
from trainer.profiling.training_summary import summarize
from trainer.report.billing import StageBill, make_bill
from trainer.report.pages import Paragraph

pytestmark = pytest.mark.skipif(
    browser() is None, reason="how the reports look is not tested: there is no Chromium on this machine"
)

MEASURE = """
const problems = [], page = frame.contentDocument, root = page.documentElement;
if (root.scrollWidth > root.clientWidth + 1) problems.push(`the page is ${root.scrollWidth} wide`);
page.querySelectorAll("details").forEach(one => one.open = true);
for (const drawing of page.querySelectorAll("svg")) {
  const edge = drawing.getBoundingClientRect(), boxes = [];
  for (const text of drawing.querySelectorAll("text")) {
    const box = text.getBoundingClientRect(), name = `“${text.textContent}” in ${drawing.getAttribute("aria-label")}`;
    if (box.left < edge.left - 1 || box.right > edge.right + 1 || box.bottom > edge.bottom + 3) problems.push(`clipped: ${name}`);
    for (const [other, label] of boxes) {
      const wide = Math.min(box.right, other.right) - Math.max(box.left, other.left);
      const high = Math.min(box.bottom, other.bottom) - Math.max(box.top, other.top);
      if (wide > 1 && high > 5) problems.push(`on one another: ${name}, ${label}`);
    }
    boxes.push([box, text.textContent]);
  }
}
document.body.textContent = JSON.stringify(problems);
"""
"""What a reader would see at once: a page that is wider than the window, labels that are cut off or lie on one another."""
NAMES = [
    "apple",
    "AMERICAN BLACK BEAR, URSUS AMERICANUS",
    "@" * 30,
    "W" * 30,
    "猫と犬の写真コレクションの名前はとても長い",
    "قطة صغيرة",
    "ทุเรียน",
    "Щука",
    "한국어 클래스",
    "<b>markup</b>",
]
"""Of classes: too long, wide, in several scripts, and with markup."""


@pytest.fixture(scope="module")
def pages(
    plain: list[TrainingEvidence],
    large: TrainingEvidence,
    answers: list[Answer],
    tmp_path_factory: pytest.TempPathFactory,
) -> dict[str, Path]:
    """A report on short trainings, one on a large one, and the comparison of the two."""
    folder = tmp_path_factory.mktemp("pages")
    stages = [
        StageBill(stage="pretrain", seconds=20, parts={"startup": 5, "training": 15}),
        StageBill(stage="distill", seconds=9000, parts={"startup": 100, "training": 8000, "lost": 900}, dollars=439.2),
    ]
    sides = [
        ComparedRun(
            name="before", trainings={"distill": summarize(plain[1])}, answers=answers, evidence={"distill": plain[1]}
        ),
        ComparedRun(name="after", trainings={"distill": summarize(large)}, answers=[], evidence={"distill": large}),
    ]

    def report(trainings: Sequence[TrainingEvidence], judged: Sequence[Answer]) -> str:
        return build([(one, summarize(one)) for one in trainings], judged, make_bill(stages), top_operators=20)

    splits: dict[SplitName, list[ImageCandidate]] = {
        "train": [candidate(row, row % len(NAMES), "train") for row in range(3 * len(NAMES))],
        "val": [],
        "test": [candidate(99, 1, "test")],
        "unlabeled": [],
    }
    content = {
        "evaluation": evaluation_page(NAMES, ["latency: 3 ms is over 2"]),
        "many": evaluation_page([f"{name} {index}" for index in range(4) for name in NAMES], []),
        "card": data_card(**card_content(classes=NAMES, splits=splits)),
        "short": report(plain, []),
        "large": report([large], answers),
        "comparison": compare.page(compare.compare(*sides)),
    }
    for name, text in content.items():
        (folder / f"{name}.html").write_text(text)
    return {name: folder / f"{name}.html" for name in content}


def framed(page: Path, folder: Path, attributes: str, script: str = "") -> Path:
    """A page that shows another one in a frame, as the Kubeflow UI does."""
    shown = html.escape(page.read_text(encoding="utf-8"))
    frame = f'<iframe id="frame" style="border:0;width:100%;height:5000px" {attributes} srcdoc="{shown}"></iframe>'
    outer = folder / "outer.html"
    run = f"<script>onload = () => {{{script}}}</script>" if script else ""
    outer.write_text(f'<!doctype html><meta charset="utf-8"><body style="margin:0">{frame}{run}</body>')
    return outer


@pytest.mark.parametrize("name", ["large", "comparison", "evaluation", "card"])
def test_the_console_stays_empty_and_dark_is_dark(name: str, pages: dict[str, Path], tmp_path: Path) -> None:
    brightness = {}
    for dark in (False, True):
        shot = tmp_path / f"{dark}.png"
        _, messages = chromium(pages[name], f"--screenshot={shot}", height=1500, dark=dark)
        assert messages == []
        with Image.open(shot) as image:
            gray = image.convert("L")
            brightness[dark] = gray.getpixel((2, 2))
            darkest, brightest = gray.getextrema()
        assert brightest - darkest > 180, "text would be hard to read"
    assert brightness[False] > 250
    assert brightness[True] < 40


def test_a_sandboxed_frame_shows_the_same(pages: dict[str, Path], tmp_path: Path) -> None:
    shots = [tmp_path / "alone.png", tmp_path / "framed.png"]
    outer = framed(pages["large"], tmp_path, 'sandbox="allow-scripts"')
    for page, shot in zip((pages["large"], outer), shots, strict=True):
        _, messages = chromium(page, f"--screenshot={shot}", height=2500)
        assert messages == []
    alone, frame = (Image.open(shot).convert("RGB").tobytes() for shot in shots)
    assert alone == frame


@pytest.mark.parametrize(
    ("name", "width"),
    [
        ("short", 480),
        ("large", 480),
        ("large", 1000),
        ("comparison", 480),
        ("evaluation", 480),
        ("evaluation", 1000),
        ("many", 480),
        ("card", 480),
    ],
)
def test_nothing_is_cut_off_or_lies_on_other_labels(
    name: str, width: int, pages: dict[str, Path], tmp_path: Path
) -> None:
    outer = framed(pages[name], tmp_path, "", MEASURE)
    content, messages = chromium(outer, "--dump-dom", width=width)
    assert messages == []
    problems = json.loads(html.unescape(content.partition('margin:0">')[2].partition("</body>")[0]))
    assert problems == []


def test_a_page_is_printed(pages: dict[str, Path], tmp_path: Path) -> None:
    _, messages = chromium(pages["short"], f"--print-to-pdf={tmp_path / 'page.pdf'}", "--no-pdf-header-footer")
    assert messages == []
    assert (tmp_path / "page.pdf").read_bytes().startswith(b"%PDF")


def test_faults_of_a_page_are_noticed(tmp_path: Path) -> None:
    """What the tests above rely on: Chromium tells of errors, and the measurement of labels that are cut off."""
    page = tmp_path / "page.html"
    label = '<text x="95" y="15">much too long</text>'
    page.write_text(
        f'<svg viewBox="0 0 100 20" width="100" aria-label="it">{label}{label}</svg><script>console.error("no")</script>'
    )
    assert chromium(page, "--dump-dom")[1] != []
    content, _ = chromium(framed(page, tmp_path, "", MEASURE), "--dump-dom")
    assert "clipped: “much too long” in it" in content
    assert "on one another" in content


def test_picture_of_part_has_no_empty_space_around_it(tmp_path: Path) -> None:
    picture([Paragraph("Only a line.")], tmp_path / "line.png")
    with Image.open(tmp_path / "line.png") as image:
        assert image.width == 1000
        assert 20 < image.height < 120
