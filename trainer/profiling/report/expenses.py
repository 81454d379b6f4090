"""The bill, and what stands on it beside training: start-up, the recorder's own work, earlier attempts; what is missing."""

from __future__ import annotations

from datetime import UTC, datetime

from trainer import billing, formatting
from trainer.billing import Bill
from trainer.charts.bars import Bar, BarPart, StackedRow, bars, stacked_rows
from trainer.charts.svg import colour_class
from trainer.costs import dollars_text
from trainer.pages import Figure, Legend, PageSection, Paragraph, Subsection, Table
from trainer.profiling.training_summary import TrainingSummary

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


def bill(given: Bill) -> PageSection | None:
    """Show wall time and dollars of each stage, and what they went for."""
    if not given.stages:
        return None
    rows = []
    for stage in given.stages:
        parts = [
            BarPart(name=_COLOURS[name], label=billing.PARTS[name], share=seconds)
            for name, seconds in stage.parts.items()
        ]
        note = " ".join(filter(None, (formatting.duration(stage.seconds), dollars_text(stage.dollars))))
        rows.append(StackedRow(label=stage.stage, parts=parts, note=note))
    picture = stacked_rows(rows, "s", "The bill")
    seen = dict.fromkeys(name for stage in given.stages for name in stage.parts)
    legend = Legend([(colour_class(_COLOURS[name]), billing.PARTS[name]) for name in seen])
    heading, *cells = billing.rows(given)
    notes = [note for note in (billing.forecast_text(given), *given.notes) if note]
    caption = "From the start of each stage's processes to their end."
    return PageSection("The bill", [legend, Figure(picture, caption), Table(heading, cells), *map(Paragraph, notes)])


def startup(summary: TrainingSummary) -> Subsection | None:
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


def overhead(summary: TrainingSummary) -> Subsection | None:
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


def attempts(summary: TrainingSummary) -> Subsection | None:
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


def missing(summary: TrainingSummary) -> Subsection | None:
    """Show what could not be recorded."""
    if not summary.missing:
        return None
    return Subsection("Not recorded", [Table(["Signal", "Reason"], list(summary.missing.items()))])
