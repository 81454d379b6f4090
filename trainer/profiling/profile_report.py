"""The profile report: one self-contained page on what slows or spoils a training, where its time went, and what it used."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import astuple
from datetime import UTC, datetime

from trainer.io.costs import dollars_text
from trainer.io.formatting import clipped, duration, milliseconds, percent, short, size
from trainer.profiling import over_time
from trainer.profiling.evidence import Operator, TrainingEvidence, is_core, measured_steps
from trainer.profiling.findings import Answer, RankedFinding, ranked_findings, saving_text, verdict
from trainer.profiling.operator_trace import bound
from trainer.profiling.rules.outcomes import Finding, Healthy, NotJudged
from trainer.profiling.training_summary import (
    SIGNALS,
    OperatorSummary,
    SlowStep,
    TrainingSummary,
    named_number,
    phase_label,
    training_label,
)
from trainer.report import billing, pages, provenance
from trainer.report.billing import Bill
from trainer.report.charts import Bar, bars, by_color, color_class, histogram, stacked_bar, stacked_rows
from trainer.report.pages import (
    Block,
    Details,
    Figure,
    FileLink,
    FindingCard,
    Legend,
    PageSection,
    Paragraph,
    Subsection,
    Table,
    Tiles,
)

_FEWEST_DRAWN = 20
_MOST_RANKS_DRAWN = 64
_UNUSUAL = 1.5  # an unusual value is this many times the usual one
_DELAYED = 0.1  # share of a slow step from which on a lack of cores can have made it slow
_FULL_PERCENT = 90.0  # use of the cores from which on other programs take them from the training
_MORE_PERCENT = 5.0
"""Points above what is usual below which waiting for storage, or other programs, explain no slow step."""
_SWAP_BYTES_PER_S = 1e6  # less swapping than this explains no slow step
_NAMESPACES = re.compile(r"^void |at::native::|\(anonymous namespace\)::|c10::")
"""What names of kernels begin with that says nothing of them, and leaves no room for the rest."""
_AFTER = {"checkpoint": "just after a checkpoint", "evaluate": "just after an evaluation"}
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
_COLORS = {
    "startup": "data",
    "compilation": "profiler",
    "training": "forward",
    "work": "forward",
    "evaluation": "evaluate",
    "checkpoints": "checkpoint",
    "recorder": "recorder",
    "lost": "lost",
    "ending": "other",
}  # part of the bill -> color


def build(
    trainings: Sequence[tuple[TrainingEvidence, TrainingSummary]],
    answers: Sequence[Answer],
    bill: Bill,
    *,
    top_operators: int,
) -> str:
    """Build the page: self-contained HTML below 2 MB, with `top_operators` rows in the tables of operators."""
    summaries = [summary for _, summary in trainings]
    blocks: list[Block | None] = [Paragraph(facts(summaries))]
    if summaries:
        blocks.append(findings(answers, summaries))
    if len(summaries) > 1:
        headers = ["Training", "Recorded", "Steps", "Processes", "Step (median)", "Images a second", "Largest share"]
        blocks.append(PageSection("The trainings", [Table(headers, [_overview(summary) for summary in summaries])]))
    numbered = list(enumerate(ranked_findings(answers), start=1))
    for evidence, summary in trainings:
        own = [(number, one) for number, one in numbered if one[0].training == summary.name]
        blocks.append(_training(evidence, summary, own, top_operators))
    blocks.append(_bill(bill))
    return pages.render(
        "What slows or spoils the training", verdict(answers, summaries).text, blocks, facts=provenance.here()
    )


def findings(answers: Sequence[Answer], summaries: Sequence[TrainingSummary]) -> PageSection:
    """Show every answer on every training."""
    ranked = ranked_findings(answers)
    notes = sum(finding.severity == "note" for _, finding in ranked)
    known = {summary.name: summary for summary in summaries}
    cards: list[Block] = [_card(number, *one, known) for number, one in enumerate(ranked, start=1)]
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
    cells = [(one.title, training_label(one.training), text) for one, text in rows]
    title = f"{len(cells)} {'answer' if len(cells) == 1 else 'answers'}: {did}"
    return Details(title, [Table(["Rule", "Training", heading], cells)]) if cells else None


def _card(number: int, answer: Answer, finding: Finding, summaries: Mapping[str, TrainingSummary]) -> FindingCard:
    """Describe a finding with its numbers, cure and saving; `number` identifies it in the chart over time."""
    place = [training_label(answer.training), f"confidence {percent(finding.confidence)}"]
    if finding.window_s:
        place.append("from {} to {}".format(*map(duration, finding.window_s)))
    if finding.steps:
        place.append("steps {:,} to {:,}".format(*(step + 1 for step in finding.steps)))
    return FindingCard(
        number=number,
        title=answer.title,
        severity=finding.severity,
        place="; ".join(place),
        text=finding.text,
        advice=finding.advice,
        saving=saving_text(finding.saving, answer, summaries[answer.training]) if finding.saving else "",
        saving_reason=finding.saving.reason if finding.saving else "",
        numbers=[named_number(name, value) for name, value in finding.numbers.items()],
    )


def facts(summaries: Sequence[TrainingSummary]) -> str:
    """Summarize the longest training and its largest part."""
    if not summaries:
        return ""
    longest = max(summaries, key=lambda summary: summary.recorded_s)
    total = sum(summary.recorded_s for summary in summaries)
    part = f"{training_label(longest.name)} took {duration(longest.recorded_s)}"
    if len(summaries) > 1:
        part += f" of the {duration(total)} of training"
    if longest.step_ms is None or not longest.recorded_shares:
        return f"{part}; it had no steps to measure."
    largest, share = max(longest.recorded_shares.items(), key=lambda item: item[1])
    waiting = longest.phases["data"].share if "data" in longest.phases else 0.0
    rate = f", {longest.images_per_second:,.0f} images a second" if longest.images_per_second else ""
    return (
        f"{part}; its largest part was “{phase_label(largest)}” with {percent(share)}. A step took "
        f"{milliseconds(longest.step_ms.p50)} (median){rate}; {percent(waiting)} of it was waiting for data."
    )


def _overview(summary: TrainingSummary) -> list[str]:
    largest, share = max(summary.recorded_shares.items(), key=lambda item: item[1], default=("between", 0.0))
    return [
        training_label(summary.name),
        duration(summary.recorded_s),
        f"{summary.steps:,}",
        str(summary.world_size),
        milliseconds(summary.step_ms.p50) if summary.step_ms else "none",
        f"{summary.images_per_second:,.0f}" if summary.images_per_second else "not recorded",
        f"{phase_label(largest)}, {percent(share)}",
    ]


def _training(
    evidence: TrainingEvidence,
    summary: TrainingSummary,
    numbered: Sequence[tuple[int, RankedFinding]],
    top_operators: int,
) -> PageSection:
    missing = Table(["Signal", "Reason"], list(summary.missing.items()))
    values = summary.figures | summary.use
    if "gpu_memory_used_bytes" in values:
        values.pop("process_rss_bytes", None)
    tiles = [(name, signal.tile) for name, signal in SIGNALS.items() if signal.tile and name in values]
    shares, title = summary.recorded_shares, "Shares of the whole recording"
    legend = [(color_class(name), f"{phase_label(name)} {percent(share)}") for name, share in shares.items()]
    figure = Figure(stacked_bar(shares, title, spoken=phase_label))
    return PageSection(
        training_label(summary.name),
        [
            Paragraph(f"It ended with an error: {summary.failed}") if summary.failed else None,
            _place(summary),
            Tiles([(named_number(name, values[name])[1], tile) for name, tile in tiles]),
            Subsection(f"{title}: {duration(summary.recorded_s)}", [figure, Legend(legend)]),
            phases(summary),
            lengths(evidence, summary),
            over_time.section(evidence, summary, numbered),
            over_time.machines(evidence),
            _operators(summary, top_operators, trace=bool(evidence.ranks[0].trace)),
            _ranks(summary),
            _use(summary),
            over_time.layers(evidence),
            _startup(summary),
            _overhead(summary),
            _attempts(summary),
            Subsection("Not recorded", [missing]) if missing.rows else None,
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


def phases(summary: TrainingSummary) -> Subsection | None:
    """Show each phase of a step with its spread from step to step."""
    if summary.step_ms is None:
        return None
    rows = []
    for name, phase in summary.phases.items():
        ms = phase.ms
        whiskers = f"({short(ms.p5)} to {short(ms.p95)})"
        note = f"{percent(phase.share)}  ·  {milliseconds(ms.p50)}  {whiskers}"
        rows.append(Bar(name=name, label=phase_label(name), value=ms.p50, note=note, low=ms.p5, high=ms.p95))
    picture = bars(rows, "ms", "Time of each phase of a step")
    caption = (
        f"A step takes {milliseconds(summary.step_ms.p50)} (median; 5 % take less than "
        f"{milliseconds(summary.step_ms.p5)}, 5 % more than {milliseconds(summary.step_ms.p95)}). Bars: median of "
        "each phase; whiskers: 5th to 95th percentile; the percentage is the phase's share of all measured steps. These are times as they "
        "were; findings speak of undisturbed steps, without what other programs and the recorder's tensor statistics took."
    )
    named = [(path, percent(share)) for phase in summary.phases.values() for path, share in phase.ranges.items()]
    table = Table(["Range within a phase", "Share of a step"], named) if named else None
    return Subsection("Where a step's time goes", [Figure(picture, caption), table])


def lengths(evidence: TrainingEvidence, summary: TrainingSummary) -> Subsection | None:
    """Show a histogram of the steps, and the slowest of them."""
    if summary.step_ms is None:
        return None
    first = evidence.ranks[0]
    values = first.steps["seconds"][measured_steps(first.steps)] * 1000
    title = "How long steps take"
    if len(values) < _FEWEST_DRAWN:
        reason = f"Not drawn: {len(values)} steps are too few, {_FEWEST_DRAWN} are needed."
        return Subsection(title, [Paragraph(reason)])
    marks = [(summary.step_ms.p50, "median")]
    if summary.step_ms.p95 >= 1.1 * summary.step_ms.p50:
        marks.append((summary.step_ms.p95, "95 %"))
    picture = histogram(values, marks, "ms", title)
    caption = f"Slowest step: {milliseconds(summary.step_ms.max)}. The slowest half percent is drawn into the last bar."
    return Subsection(title, [Figure(picture, caption), _slowest(summary, summary.step_ms.p50)])


def _slowest(summary: TrainingSummary, median_ms: float) -> Block:
    if not summary.slowest:
        return Paragraph("No step took much longer than the median.")
    rows = []
    for step in summary.slowest:
        usual = {name: phase.ms.p50 for name, phase in summary.phases.items()}
        extra = {name: ms - usual.get(name, 0.0) for name, ms in step.phase_ms.items()}
        most = sorted(extra.items(), key=lambda item: -item[1])[:2]
        longer = [f"{phase_label(name)} +{milliseconds(ms)}" for name, ms in most if ms > 0.1 * most[0][1]]
        times = duration(step.start_s), milliseconds(step.ms), f"{step.ms / median_ms:.1f} x"
        rows.append((f"{step.step + 1:,}", *times, ", ".join(longer), _machine(step, summary)))
    thinned = f" (of 1 in {summary.steps_kept_of} steps)" if summary.steps_kept_of > 1 else ""
    headers = [f"Slowest steps{thinned}", "At", "Took", "Median", "Phases that were longer", "The machine then"]
    return Table(headers, rows)


def _machine(step: SlowStep, summary: TrainingSummary) -> str:
    """Name possible causes of a slow step: lacking resources and preceding events, not effects such as an idle GPU."""
    causes = [_AFTER[step.follows]] if step.follows else []
    if step.graphs:
        causes.append("1 graph was compiled" if step.graphs == 1 else f"{step.graphs} graphs were compiled")
    if step.no_batch_ready:
        causes.append("no batch was ready")
    if step.delayed_ms and step.delayed_ms > _DELAYED * step.ms:
        causes.append(f"no core for the training for {milliseconds(step.delayed_ms)}")
    cores = summary.cores_percent
    usual = {name: signal.mean for name, signal in summary.system.items()}
    usual |= {"cores_percent": sum(cores) / len(cores)} if cores else {}
    now = step.machine
    shares = {"waiting for storage": [values.get("iowait_percent", 0.0) for values in (now, usual)]}
    if now.get("cores_percent", 0.0) >= _FULL_PERCENT:
        others = [_other_programs_percent(values, len(cores)) for values in (now, usual)]
        shares["cores busy with other programs"] = others
    for what, (share, normal) in shares.items():
        if share > normal + _MORE_PERCENT and share > _UNUSUAL * normal:
            causes.append(f"{what} {percent(share / 100)} (usually {percent(normal / 100)})")
    swapped = sum(now.get(f"swap_{way}_bytes_per_s", 0.0) for way in ("in", "out"))
    if swapped > _SWAP_BYTES_PER_S:
        causes.append(f"memory swapped, {size(swapped)}/s")
    return ", ".join(causes) or ("nothing that slows a step" if now else "not sampled")


def _other_programs_percent(signals: Mapping[str, float], cores: int) -> float:
    """Compute the use of all cores by anything but this process and its loaders."""
    if "cores_percent" not in signals or "process_cpu_percent" not in signals:
        return 0.0
    own = signals["process_cpu_percent"] + signals.get("loaders_cpu_percent", 0.0)
    return max(0.0, signals["cores_percent"] - own / cores)


def trace_name(training: str) -> str:
    """Return the name of the file of a training's trace, beside the page."""
    return f"trace-{re.sub(r'[^A-Za-z0-9_.-]', '-', training)}.json.gz"


def _operators(summary: TrainingSummary, top: int, *, trace: bool) -> Subsection:
    """Show the operator window: kinds of work, then the `top` longest operators and kernels."""
    title, seen = "Top operators", summary.operators
    if seen is None:
        reason = summary.missing.get("operators", "no reason given")
        return Subsection(title, [Paragraph(f"Not recorded: {reason}.")])
    total = max(sum(seen.categories.values()), 1e-12)
    place = "on the device" if seen.clock == "device" else "on the CPU"
    rows = []
    for name, ms in seen.categories.items():
        rows.append(Bar(name="forward", label=name, value=ms, note=f"{percent(ms / total)}  ·  {milliseconds(ms)}"))
    caption = f"Own time {place} for each kind of work, a step, over {seen.steps} steps of torch.profiler (rank 0)."
    blocks: list[Block] = [Figure(bars(rows, "ms a step", "Operators by kind of work"), caption)]
    blocks.append(_table("Operator", seen.operators[:top], seen, total, summary.device))
    if seen.kernels:
        blocks.append(_table("Kernel", seen.kernels[:top], seen, total))
    if trace:
        steps = "is the trace of these steps, with each operator and kernel on an axis of time: open it at ui.perfetto.dev, "
        blocks.append(FileLink(trace_name(summary.name), f"{steps}which reads it in the browser and sends nothing."))
    return Subsection(title, blocks)


def _table(kind: str, rows: Sequence[Operator], summary: OperatorSummary, total: float, device: str = "") -> Table:
    """Show operators, or kernels; with `device`, what limits each of them where it is known."""
    cells = []
    limits = [bound(row.flops, row.moved_bytes, row.bits, device) for row in rows] if device else []
    for row in rows:
        spent = summary.ms(row)
        calls = short(row.calls / summary.steps)
        times = milliseconds(spent), percent(spent / total)
        cells.append([clipped(_NAMESPACES.sub("", row.name)), row.category, calls, *times])
    headers = [kind, "Kind of work", "Calls a step", "Own time a step", "Share"]
    if any(limits):
        headers.append("Limited by")
        cells = [[*cell, limit] for cell, limit in zip(cells, limits, strict=True)]
    return Table(headers, cells)


def _ranks(summary: TrainingSummary) -> Subsection | None:
    drawn = [rank for rank in summary.ranks if rank.step_ms is not None][:_MOST_RANKS_DRAWN]
    if len(drawn) < 2:
        return None
    rows = []
    for rank in drawn:
        memory = f", {size(rank.memory_bytes)}" if rank.memory_bytes else ""
        step_ms = milliseconds(rank.step_ms.p50 if rank.step_ms else 0.0)
        rows.append((f"rank {rank.rank}", by_color(rank.phase_ms), f"{step_ms}{memory}"))
    title = "The processes side by side"
    more = f" The first {len(drawn)} of {summary.world_size} are drawn." if len(drawn) < len(summary.ranks) else ""
    caption = (
        "Medians of each phase, with the median step and the largest memory. The gradients are summed in the backward pass, "
        f"so a process that waits for a slower one waits there.{more}"
    )
    return Subsection(title, [*stacked(title, "ms", rows, caption), _communication(summary), _hosts(summary)])


def stacked(
    title: str,
    unit: str,
    rows: Sequence[tuple[str, Mapping[str, float], str]],
    caption: str = "",
    *,
    spoken: Callable[[str], str] = phase_label,
    color: Callable[[str], str] = str,
) -> list[Block]:
    """Draw rows as `stacked_rows` does, with a legend."""
    names = dict.fromkeys(name for _, amounts, _ in rows for name in amounts)
    legend = Legend([(color_class(color(name)), spoken(name)) for name in names])
    return [legend, Figure(stacked_rows(rows, unit, title, spoken=spoken, color=color), caption)]


def _communication(summary: TrainingSummary) -> Paragraph | None:
    seen, sentences = summary.communication, []
    if seen is not None:
        exchange, hidden, backward = (
            milliseconds(1000 * value) for value in (seen.exchange_s, seen.hidden_s, seen.backward_s)
        )
        sentences.append(
            f"Exchanging gradients takes {exchange} a step, of which {hidden} pass while the backward pass of {backward} computes "
            f"(means over {seen.steps} steps, waiting for slower processes included)."
        )
    if summary.communication_share is not None:
        share = percent(summary.communication_share)
        sentences.append(
            f"{share} of an undisturbed step waits for gradients that travel, as the rule on communication has it."
        )
    return Paragraph(" ".join(sentences)) if sentences else None


def _hosts(summary: TrainingSummary) -> Details:
    rows = []
    for rank in summary.ranks:
        steps = [milliseconds(rank.step_ms.p50), milliseconds(rank.step_ms.p95)] if rank.step_ms else ["none", "none"]
        memory = size(rank.memory_bytes) if rank.memory_bytes else "not recorded"
        used = {name: getattr(rank, name) for name in ("cores_percent", "gpu_percent", "gpu_memory_bytes")}
        shown = ["" if value is None else named_number(name, value)[1] for name, value in used.items()]
        rows.append([rank.rank, rank.host, rank.device, *steps, memory, *shown])
    headers = ["Rank", "Machine", "Device", "Step (median)", "Step (95 %)", "Memory (peak)"]
    headers += ["Cores busy", "GPU busy", "GPU memory (peak)"]
    return Details("Where they ran", [Table(headers, rows)])


def _use(summary: TrainingSummary) -> Subsection | None:
    rows = []
    for name, signal in summary.system.items():
        if not is_core(name):
            shown = [named_number(name, value) for value in astuple(signal)]
            rows.append([shown[0][0], *(number for _, number in shown)])
    if not rows:
        return None
    note = None
    if cores := summary.cores_percent:
        mean, most, least = (percent(value / 100) for value in (sum(cores) / len(cores), max(cores), min(cores)))
        note = Paragraph(
            f"{len(cores)} cores were busy for {mean} of the time on average, the busiest for {most}, the idlest for {least}."
        )
    headers = ["Signal", "Least", "Median", "Mean", "95 %", "Most", "First tenth", "Last tenth"]
    return Subsection("Use of the machine and its memory", [note, Table(headers, rows)])


def _bill(bill: Bill) -> PageSection | None:
    if not bill.stages:
        return None
    rows = []
    for stage in bill.stages:
        note = " ".join(filter(None, (duration(stage.seconds), dollars_text(stage.dollars))))
        rows.append((stage.stage, stage.parts, note))
    caption = "From the start of each stage's processes to their end."
    picture = stacked("The bill", "s", rows, caption, spoken=billing.PARTS.__getitem__, color=_COLORS.__getitem__)
    heading, *cells = billing.rows(bill)
    notes = [note for note in (billing.forecast_text(bill), *bill.notes) if note]
    return PageSection("The bill", [*picture, Table(heading, cells), *map(Paragraph, notes)])


def _startup(summary: TrainingSummary) -> Subsection | None:
    rows = []
    for key, (name, note) in _STARTUP.items():
        if seconds := summary.startup.get(key):
            shown = f"{duration(seconds)}  ·  {note}"
            rows.append(Bar(name="other", label=name, value=seconds, note=shown))
    if not rows:
        return None
    total = sum(row.value for row in rows)
    caption = f"{duration(total)} until the first step had ended."
    if summary.compiled_graphs:
        compiled = f"{summary.compiled_graphs} graphs were compiled in {duration(summary.compile_s)}"
        caption += f" {compiled} over the whole training."
    return Subsection("Start-up", [Figure(bars(rows, "s", "Start-up", note_width=320), caption)])


def _overhead(summary: TrainingSummary) -> Subsection | None:
    if not summary.overhead or not summary.recorded_s:
        return None
    total = sum(summary.overhead.values())
    rows = [
        (_OVERHEAD.get(name, name), duration(seconds), percent(seconds / summary.recorded_s))
        for name, seconds in sorted(summary.overhead.items(), key=lambda item: -item[1])
    ]
    note = f"Recording cost {duration(total)}, {percent(total / summary.recorded_s)} of the time."
    return Subsection("What recording cost", [Paragraph(note), Table(["Part", "Time", "Share"], rows)])


def _attempts(summary: TrainingSummary) -> Subsection | None:
    if len(summary.attempts) < 2:
        return None
    rows = []
    following = [attempt.first_step for attempt in summary.attempts[1:]]
    for index, attempt in enumerate(summary.attempts):
        began = f"{datetime.fromtimestamp(attempt.began_unix, UTC):%Y-%m-%d %H:%M:%S} UTC"
        lasted = duration(max(0.0, attempt.seen_unix - attempt.began_unix))
        ended = attempt.first_step + attempt.steps_seen
        lost = max(0, ended - min(following[index : index + 1], default=ended))
        steps = f"{attempt.first_step + 1:,}", f"{attempt.steps_seen:,}", f"{lost:,}" if lost else "none"
        rows.append((f"{index + 1}", began, lasted, *steps))
    headers = ["Attempt", "Began", "Lasted", "From step", "Steps", "Done again later"]
    return Subsection("Attempts", [Table(headers, rows)])
