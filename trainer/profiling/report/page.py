"""The profile report: one self-contained page on what slows or spoils a training, and where its time went."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime

from trainer import billing, formatting, pages
from trainer.billing import Bill
from trainer.charts import Bar, BarPart, StackedRow, bars, stacked_rows
from trainer.costs import dollars_text
from trainer.pages import Block, Details, Figure, FindingCard, Legend, PageSection, Paragraph, Subsection, Table, Tiles
from trainer.profiling import labels
from trainer.profiling.evidence import TrainingEvidence
from trainer.profiling.findings import Answer, RankedFinding, ranked_findings, saving_text, verdict
from trainer.profiling.report import over_time, step_times
from trainer.profiling.rules.outcomes import Healthy, NotJudged
from trainer.profiling.training_summary import TrainingSummary
from trainer.svg import colour_class

_STARTUP = {
    "launch": ("launch", "until the process had started"),
    "fetch": ("fetch", "opening data set, models and outputs"),
    "imports": ("imports", "torch and the trainer"),
    "join": ("process group", "until all processes had met"),
    "preparation": ("preparation", "until the recording began"),
    "compile": ("compilation", "before the end of the first step"),
    "first_step": ("first step", "loaders' start and warm-up included"),
}
_OVERHEAD = {
    "marks": "marking the phases",
    "tensors": "tensor statistics",
    "monitor": "sampling the machine",
    "operators": "windows of torch.profiler",
    "rules": "judging the training",
}
_COLOURS = {
    "startup": "data",
    "compilation": "profiler",
    "training": "forward",
    "work": "forward",
    "evaluation": "evaluate",
    "checkpoints": "checkpoint",
    "recorder": "recorder",
    "lost": "lost",
    "ending": "other",
}
"""Part of the bill -> colour."""


def build(
    trainings: Sequence[tuple[TrainingEvidence, TrainingSummary]],
    answers: Sequence[Answer],
    bill: Bill,
    *,
    top_operators: int,
) -> str:
    """Build the page: HTML below 2 MB without references to anything outside of it.

    Args:
        trainings: evidence and its numbers, in the order in which they ran; may be empty.
        answers: of the rules, on all of them.
        bill: of the stages that trained.
        top_operators: rows of the operator tables.
    """
    summaries = [summary for _, summary in trainings]
    blocks: list[Block | None] = [Paragraph(facts(summaries))]
    if summaries:
        blocks.append(findings(answers, summaries))
    if len(summaries) > 1:
        headers = ["Training", "Recorded", "Steps", "Processes", "Step (median)", "Images a second", "Largest share"]
        blocks.append(PageSection("The trainings", [Table(headers, [_overview(summary) for summary in summaries])]))
    numbered = list(enumerate(ranked_findings(answers), start=1))
    for evidence, summary in trainings:
        own = [(number, one) for number, one in numbered if one.answer.training == summary.name]
        blocks.append(_training(evidence, summary, own, top_operators))
    blocks.append(_bill(bill))
    return pages.render("What slows or spoils the training", verdict(answers, summaries).text, blocks)


def findings(answers: Sequence[Answer], summaries: Sequence[TrainingSummary]) -> PageSection:
    """Show every answer on every training."""
    ranked = ranked_findings(answers)
    notes = sum(one.finding.severity == "note" for one in ranked)
    known = {summary.name: summary for summary in summaries}
    cards: list[Block] = [card(index + 1, one, known) for index, one in enumerate(ranked)]
    healthy = [(one, one.outcome.text) for one in answers if isinstance(one.outcome, Healthy)]
    unjudged = [(one, one.outcome) for one in answers if isinstance(one.outcome, NotJudged)]
    too_short = [(one, outcome.reason) for one, outcome in unjudged if outcome.too_short]
    others = [(one, outcome.reason) for one, outcome in unjudged if not outcome.too_short]
    return PageSection(
        f"Findings: {len(ranked) - notes}" + (f", notes: {notes}" if notes else ""),
        [
            *(cards or [Paragraph("None.")]),
            _folded("the rule found nothing", "What it saw", healthy),
            _folded("the training was too short for the rule", "What is missing", too_short),
            _folded("the rule could not judge", "Why", others),
        ],
    )


def _folded(did: str, heading: str, rows: Iterable[tuple[Answer, str]]) -> Details | None:
    cells = [(one.title, labels.training(one.training), text) for one, text in rows]
    title = f"{len(cells)} {'answer' if len(cells) == 1 else 'answers'}: {did}"
    return Details(title, [Table(["Rule", "Training", heading], cells)]) if cells else None


def card(number: int, one: RankedFinding, summaries: Mapping[str, TrainingSummary]) -> FindingCard:
    """Describe a finding with its numbers, its cure and what that saves; `number` identifies it in the chart over time."""
    answer, finding = one.answer, one.finding
    place = [labels.training(answer.training), f"confidence {formatting.percent(finding.confidence)}"]
    if finding.window_s:
        place.append("from {} to {}".format(*map(formatting.duration, finding.window_s)))
    if finding.steps:
        place.append("steps {:,} to {:,}".format(*finding.steps))
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


def facts(summaries: Sequence[TrainingSummary]) -> str:
    """Say what dominates the longest training."""
    if not summaries:
        return ""
    longest = max(summaries, key=lambda summary: summary.recorded_s)
    total = sum(summary.recorded_s for summary in summaries)
    part = f"{labels.training(longest.name)} took {formatting.duration(longest.recorded_s)}"
    if len(summaries) > 1:
        part += f" of the {formatting.duration(total)} of training"
    if longest.step_ms is None or not longest.recorded_shares:
        return f"{part}; it had no steps to measure."
    largest, share = max(longest.recorded_shares.items(), key=lambda item: item[1])
    waiting = longest.phases["data"].share if "data" in longest.phases else 0.0
    rate = f", {longest.images_per_second:,.0f} images a second" if longest.images_per_second else ""
    return (
        f"{part}; its largest part was “{labels.label(largest)}” with {formatting.percent(share)}. A step took "
        f"{formatting.milliseconds(longest.step_ms.p50)} (median){rate}; {formatting.percent(waiting)} of it was waiting for data."
    )


def _overview(summary: TrainingSummary) -> list[str]:
    largest, share = max(summary.recorded_shares.items(), key=lambda item: item[1], default=("between", 0.0))
    return [
        labels.training(summary.name),
        formatting.duration(summary.recorded_s),
        f"{summary.steps:,}",
        str(summary.world_size),
        formatting.milliseconds(summary.step_ms.p50) if summary.step_ms else "none",
        f"{summary.images_per_second:,.0f}" if summary.images_per_second else "not recorded",
        f"{labels.label(largest)}, {formatting.percent(share)}",
    ]


def _training(
    evidence: TrainingEvidence,
    summary: TrainingSummary,
    numbered: Sequence[tuple[int, RankedFinding]],
    top_operators: int,
) -> PageSection:
    return PageSection(
        labels.training(summary.name),
        [
            Paragraph(f"It ended with an error: {summary.failed}") if summary.failed else None,
            _place(summary),
            _tiles(summary),
            step_times.recording(summary),
            step_times.phases(summary),
            step_times.lengths(evidence, summary),
            over_time.section(evidence, summary, numbered),
            step_times.operators(summary, top_operators),
            step_times.ranks(summary),
            step_times.use(summary),
            over_time.layers(evidence),
            _startup(summary),
            _overhead(summary),
            _attempts(summary),
            Subsection("Not recorded", [Table(["Signal", "Reason"], list(summary.missing.items()))])
            if summary.missing
            else None,
        ],
    )


def _place(summary: TrainingSummary) -> Paragraph:
    processes = "1 process" if summary.world_size == 1 else f"{summary.world_size} processes"
    workers = f", {summary.workers} loader processes beside each" if summary.workers is not None else ""
    thinned = f" (1 in {summary.steps_kept_of} kept)" if summary.steps_kept_of > 1 else ""
    pool, place = "", summary.place
    if place is not None:
        instance = f" ({place.instance})" if place.instance else ""
        pool = f", {place.pool}{instance}" + (f", {place.nodes} nodes" if place.nodes > 1 else "")
    return Paragraph(
        f"{processes} on {summary.device}{workers}, {summary.cores} cores, {summary.host}{pool}; {summary.steps:,} steps, "
        f"{summary.steps_measured:,} of them measured{thinned}: neither the first nor slowed by the operator window.",
        style="soft",
    )


def _tiles(summary: TrainingSummary) -> Tiles:
    entries = [(formatting.duration(summary.recorded_s), "recorded")]
    cost = summary.place.dollars(summary.recorded_s) if summary.place else None
    if cost is not None:
        entries.append((dollars_text(cost), "for that time"))
    if summary.step_ms:
        entries.append((formatting.milliseconds(summary.step_ms.p50), "a step (median)"))
    if summary.images_per_second:
        entries.append((f"{summary.images_per_second:,.0f}", "images a second"))
    if "data" in summary.phases:
        entries.append((formatting.percent(summary.phases["data"].share), "of a step waits for data"))
    if cores := summary.cores_percent:
        entries.append((formatting.percent(sum(cores) / len(cores) / 100), f"of {len(cores)} cores busy (mean)"))
    if "gpu_percent" in summary.system:
        entries.append((formatting.percent(summary.system["gpu_percent"].mean / 100), "GPU utilisation (mean)"))
    if "gpu_memory_used_bytes" in summary.system:
        entries.append((formatting.size(summary.system["gpu_memory_used_bytes"].max), "GPU memory (peak)"))
    elif "process_rss_bytes" in summary.system:
        entries.append((formatting.size(summary.system["process_rss_bytes"].max), "memory of a process (peak)"))
    return Tiles(entries)


def _bill(bill: Bill) -> PageSection | None:
    """Show wall time and dollars of each stage, and what they went for."""
    if not bill.stages:
        return None
    rows = []
    for stage in bill.stages:
        parts = [
            BarPart(name=_COLOURS[name], label=billing.PARTS[name], share=seconds)
            for name, seconds in stage.parts.items()
        ]
        note = " ".join(filter(None, (formatting.duration(stage.seconds), dollars_text(stage.dollars))))
        rows.append(StackedRow(label=stage.stage, parts=parts, note=note))
    picture = stacked_rows(rows, "s", "The bill")
    seen = dict.fromkeys(name for stage in bill.stages for name in stage.parts)
    legend = Legend([(colour_class(_COLOURS[name]), billing.PARTS[name]) for name in seen])
    heading, *cells = billing.rows(bill)
    notes = [note for note in (billing.forecast_text(bill), *bill.notes) if note]
    caption = "From the start of each stage's processes to their end."
    return PageSection("The bill", [legend, Figure(picture, caption), Table(heading, cells), *map(Paragraph, notes)])


def _startup(summary: TrainingSummary) -> Subsection | None:
    """Show the time before the end of the first step, split."""
    rows = []
    for key in [*_STARTUP, *(key for key in summary.startup if key not in _STARTUP)]:
        if seconds := summary.startup.get(key):
            name, note = _STARTUP.get(key, (key, ""))
            shown = formatting.duration(seconds) + (f"  ·  {note}" if note else "")
            rows.append(Bar(name="other", label=name, value=seconds, note=shown))
    if not rows:
        return None
    total = sum(row.value for row in rows)
    graphs = ""
    if summary.compiled_graphs:
        graphs = f" {summary.compiled_graphs} graphs were compiled in {formatting.duration(summary.compile_s)} over the whole training."
    caption = f"{formatting.duration(total)} until the first step had ended.{graphs}"
    return Subsection("Start-up", [Figure(bars(rows, "s", "Start-up", note_width=320), caption)])


def _overhead(summary: TrainingSummary) -> Subsection | None:
    """Show what recording all this cost."""
    if not summary.overhead or not summary.recorded_s:
        return None
    total = sum(summary.overhead.values())
    rows = [
        (_OVERHEAD.get(name, name), formatting.duration(seconds), formatting.percent(seconds / summary.recorded_s))
        for name, seconds in sorted(summary.overhead.items(), key=lambda item: -item[1])
    ]
    note = f"Recording cost {formatting.duration(total)}, {formatting.percent(total / summary.recorded_s)} of the time."
    return Subsection("What recording cost", [Paragraph(note), Table(["Part", "Time", "Share"], rows)])


def _attempts(summary: TrainingSummary) -> Subsection | None:
    """Show each attempt of a training that was interrupted."""
    if len(summary.attempts) < 2:
        return None
    rows = []
    for index, attempt in enumerate(summary.attempts):
        following = summary.attempts[index + 1].first_step if summary.attempts[index + 1 :] else None
        ended = attempt.first_step + attempt.steps_seen
        lost = 0 if following is None else max(0, ended - following)
        began = datetime.fromtimestamp(attempt.began_unix, UTC)
        rows.append(
            (
                f"{index + 1}",
                f"{began:%Y-%m-%d %H:%M:%S} UTC",
                formatting.duration(max(0.0, attempt.seen_unix - attempt.began_unix)),
                f"{attempt.first_step:,}",
                f"{attempt.steps_seen:,}",
                f"{lost:,}" if lost else "none",
            )
        )
    headers = ["Attempt", "Began", "Lasted", "From step", "Steps", "Done again later"]
    return Subsection("Attempts", [Table(headers, rows)])
