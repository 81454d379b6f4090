"""What is not training: start-up, the recorder's own work, earlier attempts, what is missing."""

from __future__ import annotations

from datetime import UTC, datetime

from trainer import html
from trainer.profiling import drawing, words
from trainer.profiling.drawing import Bar
from trainer.profiling.summary import TrainingSummary

_STARTUP = {
    "fetch": ("fetch", "opening data set, models and outputs"),
    "imports": ("imports", "from the start of the process"),
    "join": ("process group", "until all processes had met"),
    "preparation": ("preparation", "until the recording began"),
    "compile": ("compilation", "before the end of the first step"),
    "first_step": ("first step", "loaders' start and warm-up included"),
}
_OVERHEAD = {
    "marks": "marking the phases",
    "tensors": "looking at tensors",
    "monitor": "sampling the machine",
    "operators": "windows of torch.profiler",
    "rules": "judging the training",
}


def startup(summary: TrainingSummary) -> str:
    """The time before the end of the first step, split."""
    rows = [
        Bar(name="other", label=name, value=seconds, note=f"{words.duration(seconds)}  ·  {note}")
        for key, (name, note) in _STARTUP.items()
        if (seconds := summary.startup.get(key, 0.0))
    ]
    if not rows:
        return ""
    total = sum(row.value for row in rows)
    graphs = ""
    if summary.compiled_graphs:
        graphs = f" {summary.compiled_graphs} graphs were compiled in {words.duration(summary.compile_s)} over the whole training."
    caption = f"{words.duration(total)} until the first step had ended.{graphs}"
    return html.subsection("Start-up", html.drawing(drawing.bars(rows, "s", "Start-up", note_width=320), caption))


def overhead(summary: TrainingSummary) -> str:
    """What recording all this cost."""
    if not summary.overhead or not summary.recorded_s:
        return ""
    total = sum(summary.overhead.values())
    rows = [
        (_OVERHEAD.get(name, name), words.duration(seconds), words.percent(seconds / summary.recorded_s))
        for name, seconds in sorted(summary.overhead.items(), key=lambda item: -item[1])
    ]
    note = f"Recording cost {words.duration(total)}, {words.percent(total / summary.recorded_s)} of the time."
    return html.subsection("What watching cost", html.paragraph(note), html.table(["Part", "Time", "Share"], rows))


def attempts(summary: TrainingSummary) -> str:
    """Each try of a training that was interrupted."""
    if len(summary.attempts) < 2:
        return ""
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
                words.duration(max(0.0, attempt.seen_unix - attempt.began_unix)),
                f"{attempt.first_step:,}",
                f"{attempt.steps_seen:,}",
                f"{lost:,}" if lost else "none",
            )
        )
    headers = ["Attempt", "Began", "Lasted", "From step", "Steps", "Done again later"]
    return html.subsection("Attempts", html.table(headers, rows))


def missing(summary: TrainingSummary) -> str:
    """What could not be recorded."""
    if not summary.missing:
        return ""
    return html.subsection("Not recorded", html.table(["Signal", "Reason"], list(summary.missing.items())))
