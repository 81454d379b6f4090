"""The pages as Chromium shows them: in light and dark, wide and narrow, in a sandboxed frame, and printed."""

from __future__ import annotations

import html
import io
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Literal

import pytest
from PIL import Image
from playwright.sync_api import Browser, Page

import docs.pictures
from docs.pictures import picture
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
    docs.pictures.browser() is None, reason="how the reports look is not tested: there is no Chromium on this machine"
)

MEASURE = """() => {
const problems = {};
for (const frame of document.querySelectorAll("iframe")) {
  const found = problems[frame.title] = [], page = frame.contentDocument, root = page.documentElement;
  if (root.scrollWidth > root.clientWidth + 1) found.push(`the page is ${root.scrollWidth} wide`);
  page.querySelectorAll("details").forEach(one => one.open = true);
  for (const drawing of page.querySelectorAll("svg")) {
    const edge = drawing.getBoundingClientRect(), boxes = [];
    for (const text of drawing.querySelectorAll("text")) {
      const box = text.getBoundingClientRect(), name = `“${text.textContent}” in ${drawing.getAttribute("aria-label")}`;
      if (box.left < edge.left - 1 || box.right > edge.right + 1 || box.bottom > edge.bottom + 3) found.push(`clipped: ${name}`);
      for (const [other, label] of boxes) {
        const wide = Math.min(box.right, other.right) - Math.max(box.left, other.left);
        const high = Math.min(box.bottom, other.bottom) - Math.max(box.top, other.top);
        if (wide > 1 && high > 5) found.push(`on one another: ${name}, ${label}`);
      }
      boxes.push([box, text.textContent]);
    }
  }
}
return problems;
}"""
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


@pytest.fixture(scope="module")
def chromium() -> Iterator[Browser]:
    with docs.pictures.chromium() as started:
        yield started


@contextmanager
def opened(
    chromium: Browser, page: Path, *, width: int = 1000, height: int = 5000, scheme: Literal["dark", "light"] = "light"
) -> Iterator[Page]:
    """Open a page that writes nothing to the console."""
    said: list[str] = []
    window = chromium.new_page(viewport={"width": width, "height": height}, color_scheme=scheme)
    window.on("console", lambda message: said.append(message.text))
    window.on("pageerror", lambda error: said.append(str(error)))
    window.goto(page.as_uri())
    yield window
    window.close()
    assert said == []


def framed(pages: Sequence[Path], folder: Path, attributes: str = "", height: int = 5000) -> Path:
    """A page that shows others in frames, as the Kubeflow UI does."""
    style = f"display:block;border:0;width:100%;height:{height}px"
    frames = "".join(
        f'<iframe title="{page.stem}" style="{style}" {attributes} srcdoc="{html.escape(page.read_text("utf-8"))}"></iframe>'
        for page in pages
    )
    outer = folder / "outer.html"
    outer.write_text(f'<!doctype html><meta charset="utf-8"><body style="margin:0">{frames}</body>')
    return outer


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_the_console_stays_empty_and_dark_is_dark(
    scheme: Literal["dark", "light"], pages: dict[str, Path], chromium: Browser, tmp_path: Path
) -> None:
    names, height = ("large", "comparison", "evaluation", "card"), 1500
    outer = framed([pages[name] for name in names], tmp_path, height=height)
    with opened(chromium, outer, height=height * len(names), scheme=scheme) as window:
        window.screenshot(path=tmp_path / "page.png")
    with Image.open(tmp_path / "page.png") as image:
        gray = image.convert("L")
    for number, name in enumerate(names):
        part = gray.crop((0, number * height, gray.width, (number + 1) * height))
        darkest, brightest = part.getextrema()
        assert brightest - darkest > 180, f"{name}: text would be hard to read"
        corner = part.getpixel((2, 2))
        assert corner < 40 if scheme == "dark" else corner > 250, name


def test_a_sandboxed_frame_shows_the_same(pages: dict[str, Path], chromium: Browser, tmp_path: Path) -> None:
    outer = framed([pages["large"]], tmp_path, 'sandbox="allow-scripts"')
    shots = []
    for page in (pages["large"], outer):
        with opened(chromium, page, height=2500) as window:
            shots.append(window.screenshot())
    alone, frame = (Image.open(io.BytesIO(shot)).convert("RGB").tobytes() for shot in shots)
    assert alone == frame


@pytest.mark.parametrize(
    ("width", "names"),
    [(480, ("short", "large", "comparison", "evaluation", "many", "card")), (1000, ("large", "evaluation"))],
)
def test_nothing_is_cut_off_or_lies_on_other_labels(
    width: int, names: tuple[str, ...], pages: dict[str, Path], chromium: Browser, tmp_path: Path
) -> None:
    with opened(chromium, framed([pages[name] for name in names], tmp_path), width=width) as window:
        assert window.evaluate(MEASURE) == {name: [] for name in names}


def test_nothing_is_cut_off_on_paper(pages: dict[str, Path], chromium: Browser, tmp_path: Path) -> None:
    """By the rules for print at the width of A4: a table that is too wide would widen the page, which on paper ends."""
    with opened(chromium, framed(list(pages.values()), tmp_path), width=718) as window:
        window.emulate_media(media="print")
        assert window.evaluate(MEASURE) == {name: [] for name in pages}
        assert window.pdf().startswith(b"%PDF")


def test_faults_of_a_page_are_noticed(chromium: Browser, tmp_path: Path) -> None:
    """What the tests above rely on: Chromium tells of errors, and the measurement of labels that are cut off."""
    page = tmp_path / "page.html"
    label = '<text x="95" y="15">much too long</text>'
    page.write_text(f'<svg viewBox="0 0 100 20" width="100" aria-label="it">{label}{label}</svg>')
    with opened(chromium, framed([page], tmp_path)) as window:
        [found] = window.evaluate(MEASURE).values()
    assert "clipped: “much too long” in it" in found
    assert any("on one another" in one for one in found)
    for script in ("console.error('no')", "throw Error('no')"):
        page.write_text(f"<script>{script}</script>")
        with pytest.raises(AssertionError), opened(chromium, page):
            pass


def test_picture_of_part_has_no_empty_space_around_it(chromium: Browser, tmp_path: Path) -> None:
    picture(chromium, [Paragraph("Only a line.")], tmp_path / "line.png")
    with Image.open(tmp_path / "line.png") as image:
        assert image.width == 1000
        assert 20 < image.height < 120
