"""profile: report what slows or spoils the trainings, and where their time went."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path

from pydantic import TypeAdapter

from trainer.config import ProfileSettings
from trainer.io import artifacts
from trainer.io.artifacts import Artifact, Draft
from trainer.io.errors import ArtifactError
from trainer.profiling import findings, profile_report
from trainer.profiling.evidence import Evidence
from trainer.profiling.evidence_files import read_evidence
from trainer.profiling.rules.outcomes import setting_of
from trainer.profiling.rules.own import load as load_rules
from trainer.profiling.training_summary import TrainingSummary, summarize
from trainer.report import tracking
from trainer.report.billing import Bill, make_bill, stage_bill
from trainer.report.tracking.stage_runs import stage_run

logger = logging.getLogger(__name__)

SUMMARY = "summary.json"  # the numbers of every training
BILL = "bill.json"  # what the trainings took
REPORT = "report.html"


def run(
    settings: ProfileSettings, *, pretrain_evidence: str | Path, distill_evidence: str | Path, report: str | Path
) -> Artifact:
    """Write `report.html`, and its content as `summary.json`, `findings.json` and `bill.json`, into the report."""
    sources, bills = [], []
    for stage, place in (("pretrain", pretrain_evidence), ("distill", distill_evidence)):
        sources.append(read_evidence(place))
        bills.append(stage_bill(stage, artifacts.manifest(place, "evidence"), sources[-1]))
        for training in sources[-1].trainings:
            if not setting_of(training.name, "epochs").startswith(f"{stage}."):
                raise ArtifactError(
                    f"evidence {place}: holds the training {training.name!r}; give as {stage}_evidence what {stage} has recorded"
                )
    parents = {"pretrain_evidence": sources[0].fingerprint, "distill_evidence": sources[1].fingerprint}
    values = settings.model_dump(mode="json")
    with (
        stage_run("profile", values) as tracker,
        artifacts.create(report, "report", settings=values, parents=parents) as draft,
    ):
        verdict = write(draft, settings, sources, make_bill(bills))
        for path in sorted(draft.path.glob("trace-*.json.gz")):
            tracker.file(path)
        tracker.metrics(0, tracking.numbers(draft.figures))
        if dataset := artifacts.manifest(distill_evidence, "evidence").parents.get("dataset"):
            draft.figures["dataset"] = dataset  # a comparison of reports asks for it
        draft.figures |= {"verdict": verdict.text, "outcome": verdict.outcome}
        tracker.tag("trainer.profile", verdict.text)
        logger.info("profile  %s", verdict.text)
    return artifacts.read(report, "report")


def write(draft: Draft, settings: ProfileSettings, sources: Sequence[Evidence], bill: Bill) -> findings.Verdict:
    """Write the files of a report, and the numbers of each training as its figures; `sources` are in the order in which they ran."""
    own = load_rules(settings.rules_from, settings.own_rules)
    trainings = [(training, summarize(training, settings.rules)) for source in sources for training in source.trainings]
    summaries = [summary for _, summary in trainings]
    answers = [answer for source in sources for answer in findings.judged(source, settings.rules, own)]
    numbers = TypeAdapter(dict[str, TrainingSummary]).dump_json({one.name: one for one in summaries}, indent=2)
    (draft.path / SUMMARY).write_bytes(numbers + b"\n")
    (draft.path / findings.FINDINGS).write_text(findings.to_json(answers), encoding="utf-8")
    (draft.path / BILL).write_text(bill.model_dump_json(indent=2) + "\n", encoding="utf-8")
    (draft.path / REPORT).write_text(
        profile_report.build(trainings, answers, bill, top_operators=settings.top_operators), encoding="utf-8"
    )
    for training, _ in trainings:
        if trace := training.ranks[0].trace:
            (draft.path / profile_report.trace_name(training.name)).write_bytes(trace)
    for summary in summaries:
        draft.figures[summary.name] = {
            "step_ms": summary.step_ms.p50 if summary.step_ms else None,
            "images_per_second": summary.images_per_second,
            "phases": {name: phase.share for name, phase in summary.phases.items()},
        }
    return findings.verdict(answers, summaries)
