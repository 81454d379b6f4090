"""What a person opens of a finished run: `index.html` and copies of its pages, at the top of the run's directory."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from trainer import billing, pages, summary
from trainer.billing import Bill
from trainer.errors import writing_to
from trainer.formatting import isolated
from trainer.pages import Block, BulletList, Links, PageSection, Paragraph, Photo, Table

INDEX = "index.html"
TITLES = {
    "evaluation": "Evaluation",
    "export": "Export",
    "profile": "Profile of the trainings",
    "data": "Data card",
    "reinforce": "Recorded outputs",
}
"""What the page of a run calls the others, the most asked for first."""
CAPTIONS = {"reconstructions": "Masked autoencoder: images, what it saw of them, what it made of that"}


def write(directory: Path, content: Mapping[str, Any]) -> Path:
    """Write the front page of a run, and copy the pages that it leads to beside it.

    Args:
        directory: of the run, on this machine.
        content: its `summary.json`.

    Returns:
        The file.

    Raises:
        OutputError: the directory cannot be written.
    """
    reports = {name: Path(place) for name, place in content["reports"].items()}
    links: list[tuple[str, str]] = []
    photos: list[Photo] = []
    with writing_to(directory):
        for name, place in sorted(reports.items(), key=lambda item: [*TITLES, item[0]].index(item[0])):
            if place.suffix == ".html":
                # A copy, since the run that made a page that came from the cache may be deleted.
                shutil.copyfile(place, directory / f"{name}.html")
                links.append((f"{name}.html", TITLES.get(name, name)))
            else:
                photos.append(Photo(place.read_bytes(), CAPTIONS.get(name, name)))
        file = directory / INDEX
        file.write_text(_page(directory.resolve().name, content, links, photos), encoding="utf-8")
    return file


def _page(name: str, content: Mapping[str, Any], links: list[tuple[str, str]], photos: list[Photo]) -> str:
    passed, reasons = content["verdict"]["passed"], content["verdict"]["reasons"]
    bill = Bill.model_validate(content["bill"])
    heading, *bill_rows = billing.rows(bill)
    compared, *rows = summary.comparison(content)
    verdict: list[Block] = [Paragraph("The student passed every condition of the gate.", "good")]
    if not passed:
        verdict = [Paragraph("The student did not pass the gate:", "bad"), BulletList(reasons)]
    notes = [text for text in (billing.forecast_text(bill), *bill.notes) if text]
    mlflow = content["mlflow"]
    return pages.render(
        f"Run {isolated(name)}: the student {'passed' if passed else 'did not pass'}",
        f"{content['student']['test']['top1']:.1%} test top-1, the teacher {content['teacher']['test']['top1']:.1%}; "
        f"recipe {isolated(content['recipe'])}",
        [
            Links(links),
            PageSection("Verdict", verdict),
            PageSection("Teacher and student", [Table(compared, rows)]),
            PageSection("Profile", [Paragraph(content["profile"]["verdict"] or "Nothing was trained in this run.")]),
            PageSection("Bill", [Table(heading, bill_rows), BulletList(notes) if notes else None]),
            PageSection("Pictures", photos) if photos else None,
            PageSection(
                "MLflow",
                [
                    Paragraph(
                        f"{mlflow['tracking_uri']}, run {mlflow['run_id']}, {mlflow['model_name']} version {mlflow['model_version']}"
                    )
                ],
            )
            if mlflow["tracking_uri"]
            else None,
        ],
    )
