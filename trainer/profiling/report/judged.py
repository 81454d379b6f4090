"""What the rules found, and, folded, what they did not find and could not judge."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from trainer import formatting, html
from trainer.html import escape
from trainer.profiling import labels
from trainer.profiling.findings import Answer, Found, found, saving_text
from trainer.profiling.rules.outcomes import Healthy, NotJudged
from trainer.profiling.summary import TrainingSummary


def section(answers: Sequence[Answer], summaries: Sequence[TrainingSummary]) -> str:
    """Every answer on every training."""
    findings = found(answers)
    notes = sum(one.finding.severity == "note" for one in findings)
    known = {summary.name: summary for summary in summaries}
    cards = [card(index + 1, one, known) for index, one in enumerate(findings)]
    healthy = [(one, one.outcome.text) for one in answers if isinstance(one.outcome, Healthy)]
    short, unjudged = (
        [
            (one, one.outcome.reason)
            for one in answers
            if isinstance(one.outcome, NotJudged) and one.outcome.too_short == too_short
        ]
        for too_short in (True, False)
    )
    return html.section(
        f"Findings: {len(findings) - notes}" + (f", notes: {notes}" if notes else ""),
        *(cards or [html.paragraph("None.")]),
        _folded("the rule found nothing", "What it saw", healthy),
        _folded("the training was too short for the rule", "What is missing", short),
        _folded("the rule could not judge", "Why", unjudged),
    )


def _folded(did: str, heading: str, rows: Iterable[tuple[Answer, str]]) -> str:
    cells = [(one.title, labels.training(one.training), text) for one, text in rows]
    title = f"{len(cells)} {'answer' if len(cells) == 1 else 'answers'}: {did}"
    return html.details(title, html.table(["Rule", "Training", heading], cells)) if cells else ""


def card(number: int, one: Found, summaries: Mapping[str, TrainingSummary]) -> str:
    """A finding with its numbers, its cure and what that saves; `number` finds it again in the drawing over time."""
    answer, finding = one.answer, one.finding
    place = [labels.training(answer.training), f"confidence {formatting.percent(finding.confidence)}", *_where(one)]
    numbers = [labels.named_number(name, value) for name, value in finding.numbers.items()]
    chips = "".join(f"<span>{escape(name)} <b>{escape(value)}</b></span>" for name, value in numbers)
    saves = ""
    if finding.saving:
        saves = f"<p><b>Saves about {escape(saving_text(one, summaries))}:</b> {escape(finding.saving.reason)}</p>"
    return (
        f'<article class="finding {finding.severity}"><h3>{number}. {escape(answer.title)} '
        f'<em class="badge">{finding.severity}</em></h3><p class="soft">{escape("; ".join(place))}</p>'
        f"<p>{escape(finding.text)}</p><p><b>Do:</b> {escape(finding.advice)}</p>{saves}"
        f'<p class="chips">{chips}</p></article>'
    )


def _where(one: Found) -> list[str]:
    places = []
    if one.finding.window_s:
        places.append("from {} to {}".format(*map(formatting.duration, one.finding.window_s)))
    if one.finding.steps:
        places.append("steps {:,} to {:,}".format(*one.finding.steps))
    return places
