"""Where a finished run has its artifacts, whether `python -m trainer run` or `make run` made it, and what its gate said."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from trainer import artifacts, limits, storage
from trainer.artifacts import Manifest
from trainer.errors import ArtifactError
from trainer.graph import DATASET, EVALUATION, STAGES, STUDENT, ArtifactSpec
from trainer.served_student.class_tags import TAGS, ClassTags
from trainer.summary import SUMMARY


def find(run: str, artifact: ArtifactSpec) -> str:
    """Return where a run has an artifact.

    Args:
        run: the directory of the run, here or in a store.

    Raises:
        ArtifactError: it has none, or its summary is not that of a run.
    """
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
    """Return the manifest of a run's evaluation; None where its student was not judged.

    Raises:
        ArtifactError: the run has no student, or its evaluation is damaged.
    """
    student = artifacts.manifest(find(run, STUDENT), "model").fingerprint
    place = next(filter(artifacts.exists, _places(run, EVALUATION)), None)
    evaluation = artifacts.manifest(place, "evaluation") if place else None
    # It may be that of an earlier student.
    return evaluation if evaluation is not None and evaluation.parents.get("student") == student else None


def tags(run: str) -> ClassTags | None:
    """Return what a run's student knows of its classes beside their pictures, as it would be registered with it.

    Of the data set nothing but its tags is read; None where it has none, where it is gone, or where the student was not judged.

    Raises:
        ArtifactError: the tags are damaged.
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
