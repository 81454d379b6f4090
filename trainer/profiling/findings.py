"""The rules' answers in the order in which they matter, the verdict in a sentence, and how `findings.json` keeps them."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

from pydantic import TypeAdapter, ValidationError

from trainer.costs import dollars_text
from trainer.errors import ArtifactError
from trainer.profiling import words
from trainer.profiling.evidence import Evidence, TrainingEvidence
from trainer.profiling.rules import judge
from trainer.profiling.rules.outcomes import Case, Finding, Healthy, Judgement, NotJudged, Outcome
from trainer.profiling.summary import TrainingSummary, summarize
from trainer.thresholds import RuleSettings

_OUTCOMES: Mapping[str, type[Outcome]] = {kind.__name__: kind for kind in (Finding, Healthy, NotJudged)}
_SEVERITIES = ("note", "warning", "severe")


@dataclass(frozen=True, kw_only=True)
class Answer:
    """What a rule says of a training."""

    rule: str
    title: str
    kind: Literal["system", "training"]
    training: str
    outcome: Outcome
    dollars: float | None = None
    """What the finding's saving comes to; none where no price is known, or nothing to save."""


@dataclass(frozen=True, kw_only=True)
class Found:
    """An answer that is a finding."""

    answer: Answer
    finding: Finding


def judged(evidence: Evidence, rules: RuleSettings) -> list[Answer]:
    """What every rule answers on every training of an evidence artifact."""
    before: Sequence[TrainingEvidence | None] = [None, *evidence.trainings[:-1]]
    judgements = [
        judgement
        for earlier, training in zip(before, evidence.trainings, strict=False)
        for judgement in judge(Case(training=training, rules=rules, before=earlier))
    ]
    return answers(judgements, [summarize(training) for training in evidence.trainings])


def answers(judgements: Sequence[Judgement], summaries: Sequence[TrainingSummary]) -> list[Answer]:
    """The judgements with their dollars, by the price of the place where each training ran."""
    places = {summary.name: summary.place for summary in summaries}
    result = []
    for judgement in judgements:
        place, outcome = places[judgement.training], judgement.outcome
        saving = outcome.saving if isinstance(outcome, Finding) else None
        result.append(
            Answer(
                rule=judgement.rule.name,
                title=judgement.rule.title,
                kind=judgement.rule.kind,
                training=judgement.training,
                outcome=outcome,
                dollars=place.dollars(saving.seconds) if place and saving else None,
            )
        )
    return result


def found(given: Sequence[Answer]) -> list[Found]:
    """The findings, severe ones first because what goes on is of no use, then those that save most."""
    findings = [Found(answer=one, finding=one.outcome) for one in given if isinstance(one.outcome, Finding)]
    return sorted(findings, key=_weight, reverse=True)


def _weight(one: Found) -> tuple[bool, float, int, float]:
    finding = one.finding
    seconds = finding.saving.seconds if finding.saving else 0.0
    return finding.severity == "severe", seconds, _SEVERITIES.index(finding.severity), finding.confidence


def verdict(given: Sequence[Answer], summaries: Sequence[TrainingSummary]) -> str:
    """One sentence: the gravest or costliest finding with its saving, or that nothing was found."""
    if not summaries:
        return "Nothing was trained: the evidence holds no recording, as with given weights or zero epochs."
    findings = found(given)
    if findings:
        return _of_finding(findings, {summary.name: summary for summary in summaries})
    failed = next((one for one in summaries if one.failed), None)
    if failed:
        return f"{words.training(failed.name)} ended with an error: {failed.failed}"
    judged = {one.rule for one in given if isinstance(one.outcome, Healthy)}
    unjudged = {one.rule for one in given} - judged
    looked = f"{_rules(len(judged))} looked and found nothing" if judged else "no rule could look"
    rest = f", {_rules(len(unjudged))} could not judge" if judged and unjudged else ""
    return f"Nothing slows or spoils the training, as far as can be told: {looked}{rest}."


def _rules(count: int) -> str:
    return "1 rule" if count == 1 else f"{count} rules"


def _of_finding(findings: Sequence[Found], summaries: Mapping[str, TrainingSummary]) -> str:
    answer, finding = findings[0].answer, findings[0].finding
    name = f"{words.training(answer.training)}: “{answer.title}”"
    further = f"; {len(findings) - 1} more finding{'s' if len(findings) > 2 else ''} below" if findings[1:] else ""
    if finding.severity == "severe":
        return f"{name}, so that what goes on is of no use{further}."
    if finding.saving is None:
        return f"{name} was found; what it costs can not be told{further}."
    return f"{name} costs the most; curing it would save about {saving_text(findings[0], summaries)}{further}."


def saving_text(one: Found, summaries: Mapping[str, TrainingSummary]) -> str:
    """`41 s (12 % of the training, $0.40)`."""
    assert one.finding.saving is not None
    seconds, whole = one.finding.saving.seconds, summaries[one.answer.training].recorded_s
    share = f"{words.percent(seconds / whole)} of the training" if whole else ""
    notes = [note for note in (share, dollars_text(one.answer.dollars)) if note]
    return f"{words.duration(seconds)} ({', '.join(notes)})" if notes else words.duration(seconds)


# ---------------------------------------------------------------------------------------------------------------------
# findings.json


def to_json(given: Sequence[Answer]) -> str:
    """The content of `findings.json`: a row an answer, `outcome` names its kind, whose fields follow."""
    rows = []
    for one in given:
        fields = {"rule": one.rule, "title": one.title, "kind": one.kind, "training": one.training}
        told = {name: _plain(value) for name, value in asdict(one.outcome).items()}
        rows.append({**fields, "outcome": type(one.outcome).__name__, "dollars": one.dollars, "told": told})
    return json.dumps(rows, indent=2, ensure_ascii=False, allow_nan=False) + "\n"


def _plain(value: Any) -> Any:
    """JSON has no infinite numbers, but a gradient that is one is just what a finding tells; as text it is read again."""
    if isinstance(value, Mapping):
        return {name: _plain(one) for name, one in value.items()}
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


def from_json(text: str, source: str) -> list[Answer]:
    """What `to_json` wrote.

    Raises:
        ArtifactError: it is something else; names `source`.
    """
    try:
        return [_answer(row) for row in TypeAdapter(list[dict[str, Any]]).validate_json(text)]
    except (ValidationError, KeyError, TypeError) as error:
        raise ArtifactError(
            f"{source}: does not hold the answers of rules ({error}); run the stage profile again"
        ) from error


def _answer(row: Mapping[str, Any]) -> Answer:
    outcome = TypeAdapter(_OUTCOMES[row["outcome"]]).validate_python(row["told"])
    return Answer(outcome=outcome, **{key: value for key, value in row.items() if key not in ("outcome", "told")})
