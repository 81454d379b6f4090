"""The directory of a finished run: its front page, where its artifacts are, and what its gate said.

`python -m trainer run` or `make run` may have made it.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from trainer import artifacts, billing, limits, pages, scores, storage, summary
from trainer.artifacts import Manifest
from trainer.billing import Bill
from trainer.errors import ArtifactError, writing_to
from trainer.formatting import isolated
from trainer.graph import DATASET, EVALUATION, STAGES, STUDENT, ArtifactSpec
from trainer.pages import Block, BulletList, Links, PageSection, Paragraph, Photo, Table
from trainer.served_student.class_tags import TAGS, ClassTags
from trainer.summary import SUMMARY

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


def write_front_page(directory: Path, content: Mapping[str, Any]) -> Path:
    """Write the front page of a run from its `summary.json`, copy the pages that it leads to beside it, and return the file."""
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
    mlflow, student = content["mlflow"], content["student"]["test"]
    tracked = (
        f"{mlflow['tracking_uri']}, run {mlflow['run_id']}, {mlflow['model_name']} version {mlflow['model_version']}"
    )
    return pages.render(
        f"Run {isolated(name)}: the student {'passed' if passed else 'did not pass'}",
        f"{scores.score(student):.1%} test {scores.title(student)}, the teacher {scores.score(content['teacher']['test']):.1%}; "
        f"recipe {isolated(content['recipe'])}",
        [
            Links(links),
            PageSection("Verdict", verdict),
            PageSection("Teacher and student", [Table(compared, rows)]),
            PageSection("Profile", [Paragraph(content["profile"]["verdict"] or "Nothing was trained in this run.")]),
            PageSection("Bill", [Table(heading, bill_rows), BulletList(notes) if notes else None]),
            PageSection("Pictures", photos) if photos else None,
            PageSection("MLflow", [Paragraph(tracked)]) if mlflow["tracking_uri"] else None,
        ],
    )


# ---------------------------------------------------------------------------------------------------------------------
# Where its artifacts are


def find(run: str, artifact: ArtifactSpec) -> str:
    """Return where a run, whose directory is here or in a store, has an artifact; an `ArtifactError` if it has none."""
    places = _places(run, artifact)
    for place in places:
        if artifacts.exists(place):
            return place
    raise ArtifactError(
        f"{run}: no {artifact.name} at {' nor at '.join(places)}; give the directory of a completed run, or that of a model"
    )


def _places(run: str, artifact: ArtifactSpec) -> list[str]:
    """List where a run may have an artifact, the likeliest first."""
    stage, keyword = next(
        (one.name, keyword) for one in STAGES.values() for keyword, made in one.makes.items() if made == artifact
    )
    folder = artifact.task_folder or keyword
    return [storage.join(run, artifact.folder), *(storage.join(tasks, stage, folder) for tasks in _pipelines(run))]


def _pipelines(run: str) -> Iterator[str]:
    """Yield the folders in which a run of `make run` has one for each task."""
    file = storage.join(run, SUMMARY)
    if storage.exists(file):
        try:
            pages = limits.parse_json(storage.read_limited(file, limits.JSON_BYTES))["reports"]
            # A task whose result was taken from the cache stays with the run that made it, and so does what it had read.
            found = [str(pages[name]) for name in ("evaluation", "profile", "data") if name in pages]
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise ArtifactError(
                f"{file}: is not the summary of a run ({error}); give the directory of a model"
            ) from error
        yield from dict.fromkeys(storage.parent(storage.parent(storage.parent(page))) for page in found)
    if not storage.is_remote(run):
        # kfp.local names a folder for each run of the pipeline.
        yield from sorted(map(str, Path(run).glob("pipeline/*")), reverse=True)


def evaluation_of_student(run: str) -> Manifest | None:
    """Return the manifest of a run's evaluation; None where its student was not judged, an `ArtifactError` if it has none."""
    student = artifacts.manifest(find(run, STUDENT), "model").fingerprint
    place = next(filter(artifacts.exists, _places(run, EVALUATION)), None)
    evaluation = artifacts.manifest(place, "evaluation") if place else None
    # It may be that of an earlier student.
    return evaluation if evaluation is not None and evaluation.parents.get("student") == student else None


def tags(run: str) -> ClassTags | None:
    """Return what a run's student knows of its classes beside their pictures, as it would be registered with it.

    Of the data set nothing but its tags is read; None where it has none, where it is gone, or where the student was not judged.
    """
    evaluation = evaluation_of_student(run)
    place = next(filter(artifacts.exists, _places(run, DATASET)), None)
    if evaluation is None or place is None or TAGS not in artifacts.manifest(place, "dataset").files:
        return None
    from trainer.evaluation import hierarchy  # here, because it brings in torch

    file = storage.join(place, TAGS)
    try:
        known = ClassTags.of(limits.parse_json(storage.read_limited(file, limits.JSON_BYTES)))
    except ValueError as error:
        raise ArtifactError(
            f"{file}: does not describe classes ({limits.cut(str(error), 500)}); prepare the data set again"
        ) from error
    return hierarchy.served_tags(known, evaluation.figures)
