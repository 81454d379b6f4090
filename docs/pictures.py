"""Make pictures of reports, and of Kubeflow's UI, with Chromium.

python docs/pictures.py RUN                       README.md's report
python docs/pictures.py docs/experiments.md       README.md's curves: accuracy against labels, of the page's table
python docs/pictures.py BEFORE AFTER              parts of two runs' reports, and their comparison
python docs/pictures.py RUN_ID --kubeflow URL     those of docs/cluster.md: a run that has ended, in the UI at this address
"""

from __future__ import annotations

import argparse
import io
import re
import shutil
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from PIL import Image, ImageChops
from playwright.sync_api import Browser, sync_playwright
from playwright.sync_api import Error as BrowserError

from trainer.io.errors import ArtifactError, TrainerError, make_directory
from trainer.profiling import compare, over_time, profile_report
from trainer.profiling.compare import ComparedRun, read_compared_run
from trainer.profiling.findings import ranked_findings, verdict
from trainer.profiling.training_summary import training_label
from trainer.report import pages
from trainer.report.pages import Block, PageSection

PICTURES = Path(__file__).parent / "pictures"
BROWSERS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
TRAINING = "distill"
_TALLEST = 6000
_MARGIN = 12
SETTLED_MS = 4000  # Kubeflow's UI draws a graph some time after its last request


def browser() -> str | None:
    """Find the command of a Chromium on this machine, if there is one."""
    return next((path for name in BROWSERS if (path := shutil.which(name))), None)


@contextmanager
def chromium() -> Iterator[Browser]:
    """Start a Chromium without a window, driven by Playwright, and close it at the end.

    Raises:
        FileNotFoundError: there is no Chromium.
        playwright.sync_api.Error: it failed or took too long.
    """
    command = browser()
    if command is None:
        raise FileNotFoundError(f"none of {', '.join(BROWSERS)} is installed; install Chromium")
    with sync_playwright() as playwright:
        # No sandbox: it cannot be had in most containers, and the pages are our own.
        opened = playwright.chromium.launch(executable_path=command, args=["--no-sandbox"])
        try:
            yield opened
        finally:
            opened.close()


def picture(
    chromium: Browser, blocks: Sequence[Block | None], file: Path, *, title: str = "", lead: str = "", width: int = 1000
) -> None:
    """Draw parts of a report into a PNG file, without the empty space around them."""
    page = chromium.new_page(viewport={"width": width, "height": _TALLEST})
    page.set_content(pages.render(title, lead, blocks))
    image = Image.open(io.BytesIO(page.screenshot())).convert("RGB")
    page.close()
    background = Image.new("RGB", image.size, image.getpixel((0, 0)))
    box = ImageChops.difference(image, background).getbbox() or (0, 0, *image.size)
    image.crop((0, max(0, box[1] - _MARGIN), width, min(image.height, box[3] + _MARGIN))).save(file, optimize=True)


def parts(before: ComparedRun, after: ComparedRun) -> Mapping[str, list[Block | None]]:
    """Choose what each picture shows: its name -> the blocks of reports in it."""
    compared = compare.compare(before, after)
    pair = next((pair for pair in compared.pairs if pair.name == TRAINING), None)
    if pair is None or not {TRAINING} <= before.evidence.keys() & after.evidence.keys():
        raise ArtifactError(
            f"{before.name}, {after.name}: the evidence of two distillations is needed; give two runs' directories"
        )
    shown: dict[str, list[Block | None]] = {"comparison": [*compare.charts(pair)]}
    for when, side in (("before", before), ("after", after)):
        summary = side.trainings[TRAINING]
        answers = [answer for answer in side.answers if answer.training == TRAINING]
        numbered = list(enumerate(ranked_findings(answers), start=1))
        title = PageSection(f"{training_label(TRAINING)}, {when}")
        shown[f"{when}-findings"] = [profile_report.findings(answers, [summary])]
        shown[f"{when}-step"] = [title, profile_report.phases(summary)]
        shown[f"{when}-course"] = [title, over_time.section(side.evidence[TRAINING], summary, numbered)]
    return shown


def kubeflow_pictures(ui: str, run: str, folder: Path) -> None:
    """Draw a run in Kubeflow's UI: its graph into `run.png`, the page of the profile beside it into `artifact.png`."""
    with chromium() as opened:
        page = opened.new_page(viewport={"width": 2300, "height": 1060})  # smaller the UI does not draw the graph
        page.goto(f"{ui}/#/runs/details/{run}", wait_until="networkidle")
        page.wait_for_timeout(SETTLED_MS)
        for text in ("Distillation", "Open Sub-DAG"):
            page.get_by_text(text, exact=True).first.click()
            page.wait_for_timeout(SETTLED_MS)
        page.locator(".react-flow__controls-fitview").click()
        page.wait_for_timeout(SETTLED_MS)
        page.add_style_tag(content=".react-flow__minimap, .react-flow__controls {display: none}")
        seen = {"x": 218, "y": 0, "width": 2082, "height": 1000}
        page.screenshot(path=folder / "run.png", clip=seen)
        for text in ("profile", "Visualization"):
            page.get_by_text(text, exact=True).first.click()
            page.wait_for_timeout(SETTLED_MS)
        page.screenshot(path=folder / "artifact.png", clip=seen)


def labels_picture(page: Path, file: Path) -> None:
    """Draw accuracy against labels a class into a PNG file, from the page's table that begins with `labels a class`.

    Its columns `STUDENT, labels alone` and `STUDENT, distilled` make a panel of two curves, of the rows in which all were run; the last
    row's number of labels is the mean.
    """
    import matplotlib.pyplot as plt

    table = re.search(r"^\| labels a class .*\n\|[-|]+\n((?:\|.*\n)+)", page.read_text(encoding="utf-8"), re.MULTILINE)
    if table is None:
        raise ArtifactError(f"{page} has no table whose first column is `labels a class`")
    names, *rows = [[cell.strip() for cell in line.strip("| ").split("|")] for line in table.group().splitlines()]
    rows = rows[1:]
    students = [name.removesuffix(", distilled") for name in names if name.endswith(", distilled")]
    shown = [number for number, name in enumerate(names) if name.endswith((", distilled", ", labels alone"))]
    rows = [row for row in rows if "not run" not in [row[number] for number in shown]]
    labels = [int(re.findall(r"\d+", row[0])[-1]) for row in rows]
    figure, panels = plt.subplots(
        1, len(students), figsize=(1 + 4 * len(students), 3), sharey=True, squeeze=False, layout="constrained"
    )
    for student, panel in zip(students, panels[0], strict=True):
        for way, style in (("distilled", "o-"), ("labels alone", "s--")):
            column = names.index(f"{student}, {way}")
            panel.plot(labels, [float(row[column]) for row in rows], style, label=way)
        panel.set(title=student, xlabel="labels a class", xscale="log", xticks=labels, xticklabels=labels)
        panel.minorticks_off()
        panel.grid(alpha=0.3)
        panel.legend()
    panels[0][0].set_ylabel("test top-1, %")
    figure.savefig(file, dpi=130)


def report_parts(side: ComparedRun) -> list[Block | None]:
    """The parts of a run's report that its picture shows: what was found in the distillation, and where its steps' time goes."""
    if TRAINING not in side.trainings:
        raise ArtifactError(f"{side.name}: it has no distillation; give the directory of a run")
    summary = side.trainings[TRAINING]
    answers = [answer for answer in side.answers if answer.training == TRAINING]
    return [profile_report.findings(answers, [summary]), profile_report.phases(summary)]


def main() -> int:
    """Make the pictures and return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("before", metavar="RUN", help="directory of a run, or a page with a table of labels")
    parser.add_argument("after", nargs="?", metavar="AFTER", help="directory of another run, with other settings")
    parser.add_argument(
        "--kubeflow", metavar="URL", help="of Kubeflow Pipelines' UI: pictures of the run with the id RUN there"
    )
    parser.add_argument("--output", type=Path, default=PICTURES, metavar="DIR", help="default: %(default)s")
    options = parser.parse_args()
    try:
        make_directory(options.output)
        if options.kubeflow:
            kubeflow_pictures(options.kubeflow, options.before, options.output)
            return 0
        if options.before.endswith(".md"):
            labels_picture(Path(options.before), options.output / "labels.png")
            return 0
        before = read_compared_run(options.before)
        if options.after is None:
            lead = verdict(before.answers, list(before.trainings.values())).text
            file = options.output / "report.png"
            with chromium() as started:
                picture(started, report_parts(before), file, title="What slows or spoils the training", lead=lead)
            print(file)
            return 0
        shown = parts(before, read_compared_run(options.after))
        with chromium() as started:
            for name, blocks in shown.items():
                file = options.output / f"{name}.png"
                picture(started, blocks, file)
                print(file)
    except (TrainerError, FileNotFoundError, BrowserError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
