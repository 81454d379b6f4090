"""The profile report: one self-contained page on what slows or spoils a training, and where its time went."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from trainer import formatting, pages
from trainer.billing import Bill
from trainer.costs import dollars_text
from trainer.pages import Block, Details, FindingCard, PageSection, Paragraph, Table, Tiles
from trainer.profiling import labels
from trainer.profiling.evidence import TrainingEvidence
from trainer.profiling.findings import Answer, RankedFinding, ranked_findings, saving_text, verdict
from trainer.profiling.report import expenses, layers, machine, over_time, step_times
from trainer.profiling.rules.outcomes import Healthy, NotJudged
from trainer.profiling.throughput import is_core
from trainer.profiling.training_summary import TrainingSummary


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
    blocks.append(expenses.bill(bill))
    return pages.render("What slows or spoils the training", verdict(answers, summaries).text, blocks)


def findings(answers: Sequence[Answer], summaries: Sequence[TrainingSummary]) -> PageSection:
    """Show every answer on every training."""
    ranked = ranked_findings(answers)
    notes = sum(one.finding.severity == "note" for one in ranked)
    known = {summary.name: summary for summary in summaries}
    cards: list[Block] = [card(index + 1, one, known) for index, one in enumerate(ranked)]
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
        f"Findings: {len(ranked) - notes}" + (f", notes: {notes}" if notes else ""),
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
            machine.operators(summary, top_operators),
            machine.ranks(summary),
            machine.use(summary),
            layers.section(evidence),
            expenses.startup(summary),
            expenses.overhead(summary),
            expenses.attempts(summary),
            expenses.missing(summary),
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
    busy = [signal.mean for name, signal in summary.system.items() if is_core(name)]
    if busy:
        entries.append((formatting.percent(sum(busy) / len(busy) / 100), f"of {len(busy)} cores busy (mean)"))
    if "gpu_percent" in summary.system:
        entries.append((formatting.percent(summary.system["gpu_percent"].mean / 100), "GPU utilisation (mean)"))
    if "gpu_memory_used_bytes" in summary.system:
        entries.append((formatting.size(summary.system["gpu_memory_used_bytes"].max), "GPU memory (peak)"))
    elif "process_rss_bytes" in summary.system:
        entries.append((formatting.size(summary.system["process_rss_bytes"].max), "memory of a process (peak)"))
    return Tiles(entries)
