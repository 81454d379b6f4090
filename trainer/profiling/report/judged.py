"""What the rules found, and, folded, what they did not find and could not judge."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from trainer import formatting
from trainer.pages import Block, Details, FindingCard, PageSection, Paragraph, Table
from trainer.profiling import labels
from trainer.profiling.findings import Answer, RankedFinding, ranked_findings, saving_text
from trainer.profiling.rules.outcomes import Healthy, NotJudged
from trainer.profiling.training_summary import TrainingSummary


def section(answers: Sequence[Answer], summaries: Sequence[TrainingSummary]) -> PageSection:
    """Show every answer on every training."""
    findings = ranked_findings(answers)
    notes = sum(one.finding.severity == "note" for one in findings)
    known = {summary.name: summary for summary in summaries}
    cards: list[Block] = [card(index + 1, one, known) for index, one in enumerate(findings)]
    healthy = [(one, one.outcome.text) for one in answers if isinstance(one.outcome, Healthy)]
    short, unjudged = (
        [
            (one, one.outcome.reason)
            for one in answers
            if isinstance(one.outcome, NotJudged) and one.outcome.too_short == too_short
        ]
        for too_short in (True, False)
    )
    return PageSection(
        f"Findings: {len(findings) - notes}" + (f", notes: {notes}" if notes else ""),
        [
            *(cards or [Paragraph("None.")]),
            _folded("the rule found nothing", "What it saw", healthy),
            _folded("the training was too short for the rule", "What is missing", short),
            _folded("the rule could not judge", "Why", unjudged),
        ],
    )


def _folded(did: str, heading: str, rows: Iterable[tuple[Answer, str]]) -> Details | None:
    cells = [(one.title, labels.training(one.training), text) for one, text in rows]
    title = f"{len(cells)} {'answer' if len(cells) == 1 else 'answers'}: {did}"
    return Details(title, [Table(["Rule", "Training", heading], cells)]) if cells else None


def card(number: int, one: RankedFinding, summaries: Mapping[str, TrainingSummary]) -> FindingCard:
    """Describe a finding with its numbers, its cure and what that saves; `number` identifies it in the chart over time."""
    answer, finding = one.answer, one.finding
    place = [labels.training(answer.training), f"confidence {formatting.percent(finding.confidence)}", *_where(one)]
    return FindingCard(
        number=number,
        title=answer.title,
        severity=finding.severity,
        place="; ".join(place),
        text=finding.text,
        advice=finding.advice,
        saving=saving_text(one, summaries) if finding.saving else "",
        saving_reason=finding.saving.reason if finding.saving else "",
        numbers=[labels.named_number(name, value) for name, value in finding.numbers.items()],
    )


def _where(one: RankedFinding) -> list[str]:
    places = []
    if one.finding.window_s:
        places.append("from {} to {}".format(*map(formatting.duration, one.finding.window_s)))
    if one.finding.steps:
        places.append("steps {:,} to {:,}".format(*one.finding.steps))
    return places
