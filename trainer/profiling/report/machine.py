"""Operators and kernels, the processes side by side, and how much of the machine was used."""

from __future__ import annotations

from collections.abc import Sequence

from trainer import formatting, html
from trainer.profiling import drawing, labels
from trainer.profiling.drawing import Bar, BarPart
from trainer.profiling.operators import Operator
from trainer.profiling.pace import is_core
from trainer.profiling.summary import OperatorSummary, TrainingSummary, operator_ms

_MOST_RANKS_DRAWN = 64


def operators(summary: TrainingSummary, top: int) -> str:
    """What the window of torch.profiler saw: kinds of work, then the `top` longest operators and kernels."""
    title, seen = "Top operators", summary.operators
    if seen is None:
        reason = summary.missing.get("operators", "no reason given")
        return html.subsection(title, html.paragraph(f"Not recorded: {reason}."))
    total = max(sum(seen.categories.values()), 1e-12)
    place = "on the device" if seen.clock == "device" else "on the CPU"
    rows = [
        Bar(
            name="forward",
            label=name,
            value=ms,
            note=f"{formatting.percent(ms / total)}  ·  {formatting.milliseconds(ms)}",
        )
        for name, ms in seen.categories.items()
    ]
    caption = f"Own time {place} for each kind of work, a step, over {seen.steps} steps of torch.profiler (rank 0)."
    parts = [html.drawing(drawing.bars(rows, "ms a step", "Operators by kind of work"), caption)]
    parts.append(_table("Operator", seen.operators[:top], seen, total))
    if seen.kernels:
        parts.append(_table("Kernel", seen.kernels[:top], seen, total))
    return html.subsection(title, *parts)


def _table(kind: str, rows: Sequence[Operator], summary: OperatorSummary, total: float) -> str:
    def cells(row: Operator) -> list[object]:
        spent = operator_ms(row, summary.clock) / summary.steps
        return [
            formatting.clipped(row.name),
            row.category,
            formatting.short(row.calls / summary.steps),
            formatting.milliseconds(spent),
            formatting.percent(spent / total),
        ]

    headers = [kind, "Kind of work", "Calls a step", "Own time a step", "Share"]
    return html.table(headers, [cells(row) for row in rows])


def ranks(summary: TrainingSummary) -> str:
    """The phases of each process, on one scale."""
    drawn = [rank for rank in summary.ranks if rank.step_ms is not None][:_MOST_RANKS_DRAWN]
    if len(drawn) < 2:
        return ""
    rows = []
    for rank in drawn:
        amounts = drawing.by_colour(rank.phase_ms)
        parts = [BarPart(name=name, label=labels.label(name), share=ms) for name, ms in amounts.items()]
        memory = f", {formatting.size(rank.memory_bytes)}" if rank.memory_bytes else ""
        rows.append(
            (
                f"rank {rank.rank}",
                parts,
                f"{formatting.milliseconds(rank.step_ms.p50 if rank.step_ms else 0.0)}{memory}",
            )
        )
    most = max(sum(part.share for part in parts) for _, parts, _ in rows)
    title = "The processes side by side"
    picture = drawing.stacked_rows(rows, most, "ms", title)
    more = f" The first {len(drawn)} of {summary.world_size} are drawn." if len(drawn) < len(summary.ranks) else ""
    caption = (
        "Medians of each phase, with the median step and the largest memory. The gradients are summed in the backward pass, "
        f"so a process that waits for a slower one waits there.{more}"
    )
    names = dict.fromkeys(part.name for _, parts, _ in rows for part in parts)
    legend = drawing.legend([(drawing.colour_class(name), labels.label(name)) for name in names])
    return html.subsection(title, legend, html.drawing(picture, caption), _communication(summary), _hosts(summary))


def _communication(summary: TrainingSummary) -> str:
    seen, told = summary.communication, []
    if seen is not None:
        shown = [formatting.milliseconds(1000 * value) for value in (seen.exchange_s, seen.hidden_s, seen.backward_s)]
        exchanging = "Exchanging gradients takes {} a step, of which {} pass while the backward pass of {} computes"
        told.append(
            f"{exchanging.format(*shown)} (means over {seen.steps} steps, waiting for slower processes included)."
        )
    if summary.communication_share is not None:
        share = formatting.percent(summary.communication_share)
        told.append(
            f"{share} of an undisturbed step waits for gradients that travel, as the rule on communication has it."
        )
    return html.paragraph(" ".join(told)) if told else ""


def _hosts(summary: TrainingSummary) -> str:
    rows = [
        (
            rank.rank,
            rank.host,
            rank.device,
            formatting.milliseconds(rank.step_ms.p50) if rank.step_ms else "none",
            formatting.milliseconds(rank.step_ms.p95) if rank.step_ms else "none",
            formatting.size(rank.memory_bytes) if rank.memory_bytes else "not recorded",
            *(
                "" if value is None else labels.named_number(name, value)[1]
                for name, value in (
                    ("cores_percent", rank.cores_percent),
                    ("gpu_percent", rank.gpu_percent),
                    ("gpu_memory_used_bytes", rank.gpu_memory_bytes),
                )
            ),
        )
        for rank in summary.ranks
    ]
    headers = ["Rank", "Machine", "Device", "Step (median)", "Step (95 %)", "Memory (peak)"]
    headers += ["Cores busy", "GPU busy", "GPU memory (peak)"]
    return html.details("Where they ran", html.table(headers, rows))


def use(summary: TrainingSummary) -> str:
    """Every signal of the machine: how much of it was used; the cores as one."""
    signals = [(name, signal) for name, signal in summary.system.items() if not is_core(name)]
    if not signals:
        return ""
    rows = []
    for name, signal in signals:
        values = (signal.min, signal.p50, signal.mean, signal.p95, signal.max, signal.first, signal.last)
        spoken, _ = labels.named_number(name, 0.0)
        rows.append([spoken, *(labels.named_number(name, value)[1] for value in values)])
    cores = [signal.mean for name, signal in summary.system.items() if is_core(name)]
    note = ""
    if cores:
        note = (
            f"{len(cores)} cores were busy for {formatting.percent(sum(cores) / len(cores) / 100)} of the time on average, the busiest for "
            f"{formatting.percent(max(cores) / 100)}, the idlest for {formatting.percent(min(cores) / 100)}."
        )
    headers = ["Signal", "Least", "Median", "Mean", "95 %", "Most", "First tenth", "Last tenth"]
    return html.subsection("Use of the machine and its memory", html.paragraph(note), html.table(headers, rows))
