"""Rank the rules' answers, sum them up in a verdict, and write and read `findings.json`."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

from pydantic import TypeAdapter, ValidationError

from trainer.config.rules import RuleSettings
from trainer.io import formatting
from trainer.io.costs import dollars_text
from trainer.io.errors import ArtifactError
from trainer.profiling.evidence import Evidence
from trainer.profiling.rules import judge
from trainer.profiling.rules.outcomes import Case, Finding, Healthy, NotJudged, Outcome, Saving, SystemRule, setting_of
from trainer.profiling.rules.own import OwnRule
from trainer.profiling.training_summary import TrainingSummary, training_label

FINDINGS = "findings.json"  # the file of a report with every rule's answer on every training
_OUTCOMES: Mapping[str, type[Outcome]] = {kind.__name__: kind for kind in (Finding, Healthy, NotJudged)}
_SEVERITIES = ("note", "warning", "severe")


@dataclass(frozen=True, kw_only=True)
class Answer:
    """A rule's answer on a training."""

    rule: str
    title: str
    kind: Literal["system", "training", "own"]
    training: str
    outcome: Outcome
    dollars: float | None = None  # what the finding's saving comes to; none where no price is known, or nothing to save


RankedFinding = tuple[Answer, Finding]  # an answer and its finding


def judged(evidence: Evidence, rules: RuleSettings, own: Sequence[OwnRule] = ()) -> list[Answer]:
    """Let every rule and the `own` ones judge every training of an artifact; dollars are at the price of the place where it ran."""
    # The length of each recording with what came before it: the parts of the start-up end with the first step, within the recording.
    records = [training.ranks[0].record for training in evidence.trainings]
    stage_s = sum(one.ended_s + max(0.0, sum(one.startup.values()) - (one.first_step_s or 0.0)) for one in records)
    answers = []
    for training in evidence.trainings:
        place = training.ranks[0].record.place
        for rule, outcome in judge(Case(training=training, rules=rules, stage_s=stage_s), own).items():
            saving = outcome.saving if isinstance(outcome, Finding) else None
            answer = Answer(
                rule=rule.name,
                title=rule.title,
                kind="own" if isinstance(rule, OwnRule) else "system" if isinstance(rule, SystemRule) else "training",
                training=training.name,
                outcome=outcome,
                dollars=place.dollars(saving.seconds) if place and saving else None,
            )
            answers.append(answer)
    return answers


def ranked_findings(given: Sequence[Answer]) -> list[RankedFinding]:
    """Sort the findings by severity, then by saving, then by confidence."""
    findings = [(one, one.outcome) for one in given if isinstance(one.outcome, Finding)]

    def weight(one: RankedFinding) -> tuple[int, float, float]:
        _, finding = one
        seconds = finding.saving.seconds if finding.saving else 0.0
        return _SEVERITIES.index(finding.severity), seconds, finding.confidence

    return sorted(findings, key=weight, reverse=True)


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """The summary of all answers."""

    outcome: Literal["findings", "healthy", "too_short", "failed", "nothing_trained"]
    text: str
    """One sentence: the gravest or costliest finding with its saving, or that nothing was found, or that too little could be judged."""


def verdict(given: Sequence[Answer], summaries: Sequence[TrainingSummary]) -> Verdict:
    """Weigh all answers; a note is advice, and makes no training unhealthy."""
    if not summaries:
        text = "Nothing was trained: the evidence holds no recording, as with given weights or zero epochs."
        return Verdict(outcome="nothing_trained", text=text)
    every = ranked_findings(given)
    findings = [one for one in every if one[1].severity != "note"]
    if findings:
        answer, finding = findings[0]
        text = f"{training_label(answer.training)}: “{answer.title}”"
        if finding.severity == "severe":
            text += ", so continuing it is of no use"
        elif finding.saving is None:
            text += " was found; what it costs in time is not known"
        else:
            (summary,) = (one for one in summaries if one.name == answer.training)
            text += f" costs the most; curing it would save about {saving_text(finding.saving, answer, summary)}"
        return Verdict(outcome="findings", text=f"{text}{_and_also(len(findings) - 1, 'more finding')}.")
    if failed := next((one for one in summaries if one.failed), None):
        return Verdict(outcome="failed", text=f"{training_label(failed.name)} ended with an error: {failed.failed}")
    notes = _and_also(len(every), "note")
    short = {summary.name: text for summary in summaries if (text := _too_short(given, summary))}
    if short:
        settings = ", ".join(setting_of(name, "epochs") for name in short)
        advice = f"train longer ({settings}) before you trust that nothing was found"
        return Verdict(outcome="too_short", text=f"Too short to judge: {', '.join(short.values())}; {advice}{notes}.")
    judged = {one.rule for one in given if isinstance(one.outcome, Healthy)}
    unjudged = {one.rule for one in given} - judged - {answer.rule for answer, _ in every}
    looked = f"{_counted(len(judged), 'rule')} looked and found nothing" if judged else "no rule could judge it"
    rest = f", {_counted(len(unjudged), 'rule')} could not judge" if judged and unjudged else ""
    return Verdict(
        outcome="healthy", text=f"Nothing was found that slows or spoils the training: {looked}{rest}{notes}."
    )


def _counted(count: int, what: str) -> str:
    return f"{count} {what}{'' if count == 1 else 's'}"


def _and_also(count: int, what: str) -> str:
    return f"; {_counted(count, what)}" if count else ""


UNJUDGED_MOST = 0.25
"""Largest share of the rules that apply to a training for which it may be too short, and still count as healthy.

From the first step on a handful of rules can judge (start-up, initialization, classes): they alone say little. With a quarter missing, most
of each kind (speed, weights, losses) have looked.
"""


def _too_short(given: Sequence[Answer], summary: TrainingSummary) -> str:
    """Count the rules that lacked steps, if they are so many that a training without findings may still be unhealthy; else empty."""
    outcomes = [one.outcome for one in given if one.training == summary.name]
    missed = sum(isinstance(outcome, NotJudged) and outcome.too_short for outcome in outcomes)
    judged = sum(not isinstance(outcome, NotJudged) for outcome in outcomes)
    if missed <= UNJUDGED_MOST * (judged + missed):
        return ""
    steps = _counted(summary.steps, "step")
    return f"{missed} of {_counted(len(outcomes), 'rule')} on {training_label(summary.name)} ({steps})"


def saving_text(saving: Saving, answer: Answer, summary: TrainingSummary) -> str:
    """Format a finding's saving: `41 s (12 % of the training, $0.40)`."""
    seconds, whole = saving.seconds, summary.recorded_s
    share = f"{formatting.percent(seconds / whole)} of the training" if whole else ""
    notes = [note for note in (share, dollars_text(answer.dollars)) if note]
    return f"{formatting.duration(seconds)} ({', '.join(notes)})" if notes else formatting.duration(seconds)


def to_json(given: Sequence[Answer]) -> str:
    """Write `findings.json`: a row for each answer, with the kind of its `outcome`, and its fields in `told`."""
    rows = [
        {**asdict(one), "outcome": type(one.outcome).__name__, "told": _plain(asdict(one.outcome))} for one in given
    ]
    return json.dumps(rows, indent=2, ensure_ascii=False, allow_nan=False) + "\n"


def _plain(value: Any) -> Any:
    """Write infinite numbers as text, which JSON lacks and a finding on gradients has; it is read again as a number."""
    if isinstance(value, Mapping):
        return {name: _plain(one) for name, one in value.items()}
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


def from_json(content: str | bytes, source: str) -> list[Answer]:
    """Read what `to_json` wrote; for anything else, an `ArtifactError` that names `source`."""
    try:
        rows = TypeAdapter(list[dict[str, Any]]).validate_json(content)
        outcomes = [TypeAdapter(_OUTCOMES[row.pop("outcome")]).validate_python(row.pop("told")) for row in rows]
        return [Answer(outcome=outcome, **row) for outcome, row in zip(outcomes, rows, strict=True)]
    except (ValidationError, KeyError, TypeError) as error:
        raise ArtifactError(
            f"{source}: does not hold the answers of rules ({error}); run the stage profile again"
        ) from error
