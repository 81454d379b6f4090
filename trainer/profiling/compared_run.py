"""Read one side of a comparison: a run's directory, a report, or evidence, as the same numbers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter, ValidationError

from trainer import artifacts, limits, storage
from trainer.errors import ArtifactError
from trainer.profiling import findings
from trainer.profiling.evidence import TrainingEvidence, read_evidence
from trainer.profiling.findings import Answer
from trainer.profiling.training_summary import TrainingSummary, summarize
from trainer.thresholds import RuleSettings

SUMMARY = "summary.json"
FINDINGS = "findings.json"
_EVIDENCE = ("pretrain-evidence", "distill-evidence")
"""Where `python -m trainer run` keeps it below the run's directory."""
_TASKS = ("pretrain/evidence", "distill/evidence")
"""Where it lies beside the folder of the task that made the report, in a run of the pipeline."""
_REPORT = "report"
_CHOICE = "give the directory of a run, or of its report, or of evidence"


@dataclass(frozen=True, kw_only=True)
class ComparedRun:
    """One of two runs or trainings that are compared."""

    name: str
    trainings: Mapping[str, TrainingSummary]
    answers: Sequence[Answer]
    evidence: Mapping[str, TrainingEvidence] = field(default_factory=dict)
    """What the trainings recorded, as far as it is at hand."""
    run: Mapping[str, Any] | None = None
    """The run's `summary.json`; none where a training is compared and not a run."""
    dataset: str | None = None
    """Fingerprint of the data set; none where it was not recorded."""


def read_compared_run(uri: str) -> ComparedRun:
    """Read a run's directory, a report or evidence.

    Raises:
        ArtifactError: it is none of these, or damaged.
        StorageError: the store does not answer or refuses.
    """
    if artifacts.exists(uri):
        kind = _json(storage.join(uri, artifacts.MANIFEST)).get("kind")
        if kind == "report":
            return _read_report(uri)
        if kind == "registration":
            return _read_run(uri)
        if kind != "evidence":
            raise ArtifactError(f"{uri}: is a {kind}; {_CHOICE}")
        evidence = read_evidence(uri)
        return ComparedRun(
            name=uri,
            trainings={training.name: summarize(training) for training in evidence.trainings},
            answers=findings.judged(evidence, RuleSettings()),
            evidence={training.name: training for training in evidence.trainings},
            dataset=_dataset_of([uri]),
        )
    if storage.exists(storage.join(uri, SUMMARY)):
        return _read_run(uri)
    if not storage.is_remote(uri) and not Path(uri).is_dir():
        raise ArtifactError(f"{uri}: no such directory; {_CHOICE}")
    raise ArtifactError(f"{uri}: holds neither {SUMMARY}, as a completed run does, nor {artifacts.MANIFEST}; {_CHOICE}")


def _read_report(uri: str) -> ComparedRun:
    report = artifacts.read(uri, "report")
    path = report.path
    try:
        trainings = TypeAdapter(dict[str, TrainingSummary]).validate_json((path / SUMMARY).read_bytes())
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"]))
        raise ArtifactError(
            f"report {uri}: its {SUMMARY} is of another version ({where}: {first['msg']}); run the stage profile again"
        ) from error
    answers = findings.from_json((path / FINDINGS).read_text(), f"report {uri}: {FINDINGS}")
    return ComparedRun(name=uri, trainings=trainings, answers=answers, dataset=report.figures.get("dataset"))


def _read_run(uri: str) -> ComparedRun:
    content = _json(storage.join(uri, SUMMARY))
    if not {"settings", "stages", "student", "teacher", "reports"} <= content.keys():
        raise ArtifactError(f"{storage.join(uri, SUMMARY)}: is not the summary of a run; {_CHOICE}")
    report = _report_of(uri, content)
    read = _read_report(report)
    tasks = storage.parent(storage.parent(report))
    places = [storage.join(above, name) for above, names in ((uri, _EVIDENCE), (tasks, _TASKS)) for name in names]
    wanted = set(artifacts.manifest(report, "report").parents.values())
    places = [place for place in places if artifacts.exists(place)]
    places = [place for place in places if artifacts.manifest(place, "evidence").fingerprint in wanted]
    recorded = [read_evidence(place).trainings for place in places]
    evidence = {training.name: training for trainings in recorded for training in trainings}
    dataset = read.dataset or _dataset_of(places)
    return ComparedRun(
        name=uri, trainings=read.trainings, answers=read.answers, evidence=evidence, run=content, dataset=dataset
    )


def _dataset_of(places: Sequence[str]) -> str | None:
    """Read the fingerprint of the data set that the evidence is of."""
    known = [artifacts.manifest(place, "evidence").parents.get("dataset") for place in places]
    return next(filter(None, known), None)


def _report_of(uri: str, content: Mapping[str, Any]) -> str:
    """Find the run's report: in its directory, or where the run says that it was."""
    page = str(content["reports"].get("profile", ""))
    places = [storage.join(uri, _REPORT), *([storage.parent(page)] if page else [])]
    for place in places:
        if artifacts.exists(place):
            return place
    raise ArtifactError(f"{uri}: its report is not at {' nor at '.join(places)}; give the directory of the report")


def _json(path: str) -> dict[str, Any]:
    try:
        content = limits.parse_json(storage.read_limited(path, limits.JSON_BYTES))
    except ValueError as error:
        raise ArtifactError(f"{path}: is not JSON ({error}); {_CHOICE}") from error
    if not isinstance(content, dict):
        raise ArtifactError(f"{path}: is not a JSON object; {_CHOICE}")
    return content
