"""profile: report where the trainings' time went."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

from trainer import artifacts, tracking
from trainer.artifacts import Artifact
from trainer.config import ProfileSettings
from trainer.profiling import report as page
from trainer.profiling.evidence import Evidence, TrainingEvidence, read_evidence
from trainer.profiling.rules import judge
from trainer.profiling.rules.outcomes import Case, Judgement
from trainer.profiling.summary import TrainingSummary, summarize

FINDINGS = "findings.json"
"""What every rule answered on every training."""


def run(
    settings: ProfileSettings, *, pretrain_evidence: str | Path, distill_evidence: str | Path, report: str | Path
) -> Artifact:
    """Write `report.html` and `summary.json`, the same numbers, into the report.

    Args:
        settings: section `profile`.
        pretrain_evidence: input, what pretraining recorded; it may hold nothing.
        distill_evidence: input, what the distillation recorded.
        report: output.

    Raises:
        ArtifactError: evidence is missing, damaged, or of another version.
        OutputError: the report can not be written.
        TrackingError: MLflow does not answer or refuses.
    """
    sources = {
        "pretrain_evidence": read_evidence(pretrain_evidence),
        "distill_evidence": read_evidence(distill_evidence),
    }
    trainings = [pair for evidence in sources.values() for pair in _summaries(evidence, settings)]
    parents = {name: evidence.fingerprint for name, evidence in sources.items()}
    judgements = [judgement for evidence in sources.values() for judgement in _judge(evidence, settings)]
    values = settings.model_dump(mode="json")
    with (
        tracking.stage_run("profile", values) as tracker,
        artifacts.create(report, "report", settings=values, parents=parents) as draft,
    ):
        numbers = {summary.name: asdict(summary) for _, summary in trainings}
        text = json.dumps(numbers, indent=2, ensure_ascii=False, allow_nan=False)
        (draft.path / "summary.json").write_text(text + "\n")
        (draft.path / FINDINGS).write_text(_findings(judgements))
        (draft.path / "report.html").write_text(page.build(trainings))
        draft.figures.update({summary.name: _figures(summary) for _, summary in trainings})
        tracker.metrics(0, tracking.numbers(draft.figures))
    return artifacts.read(report, "report")


def _summaries(evidence: Evidence, settings: ProfileSettings) -> list[tuple[TrainingEvidence, TrainingSummary]]:
    before = [None, *evidence.trainings[:-1]]
    return [
        (training, summarize(training, before=earlier, top_operators=settings.top_operators))
        for earlier, training in zip(before, evidence.trainings, strict=False)
    ]


def _judge(evidence: Evidence, settings: ProfileSettings) -> list[Judgement]:
    before = [None, *evidence.trainings[:-1]]
    return [
        judgement
        for earlier, training in zip(before, evidence.trainings, strict=False)
        for judgement in judge(Case(training=training, rules=settings.rules, before=earlier))
    ]


def _findings(judgements: list[Judgement]) -> str:
    rows = [
        {
            "rule": judgement.rule.name,
            "training": judgement.training,
            "outcome": type(judgement.outcome).__name__,
            **asdict(judgement.outcome),
        }
        for judgement in judgements
    ]
    return json.dumps(rows, indent=2, ensure_ascii=False, allow_nan=False) + "\n"


def _figures(summary: TrainingSummary) -> dict[str, Any]:
    return {
        "step_ms": summary.step_ms.p50 if summary.step_ms else None,
        "images_per_second": summary.images_per_second,
        "phases": {name: phase.share for name, phase in summary.phases.items()},
    }
