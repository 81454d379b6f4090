"""Operators and kernels, the processes side by side, and how much of the machine was used."""

from __future__ import annotations

from collections.abc import Sequence

from trainer import formatting
from trainer.charts.bars import Bar, BarPart, StackedRow, bars, by_colour, stacked_rows
from trainer.charts.svg import colour_class
from trainer.pages import Block, Details, Figure, Legend, Paragraph, Subsection, Table
from trainer.profiling import labels
from trainer.profiling.evidence import Operator
from trainer.profiling.throughput import is_core
from trainer.profiling.training_summary import OperatorSummary, TrainingSummary, operator_ms

_MOST_RANKS_DRAWN = 64


def operators(summary: TrainingSummary, top: int) -> Subsection:
    """Show what the window of torch.profiler saw: kinds of work, then the `top` longest operators and kernels."""
    title, seen = "Top operators", summary.operators
    if seen is None:
        reason = summary.missing.get("operators", "no reason given")
        return Subsection(title, [Paragraph(f"Not recorded: {reason}.")])
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
    blocks: list[Block] = [Figure(bars(rows, "ms a step", "Operators by kind of work"), caption)]
    blocks.append(_table("Operator", seen.operators[:top], seen, total))
    if seen.kernels:
        blocks.append(_table("Kernel", seen.kernels[:top], seen, total))
    return Subsection(title, blocks)


def _table(kind: str, rows: Sequence[Operator], summary: OperatorSummary, total: float) -> Table:
    cells = []
    for row in rows:
        spent = operator_ms(row, summary.clock) / summary.steps
        calls = formatting.short(row.calls / summary.steps)
        times = formatting.milliseconds(spent), formatting.percent(spent / total)
        cells.append((formatting.clipped(row.name), row.category, calls, *times))
    return Table([kind, "Kind of work", "Calls a step", "Own time a step", "Share"], cells)


def ranks(summary: TrainingSummary) -> Subsection | None:
    """Show the phases of each process, on one scale."""
    drawn = [rank for rank in summary.ranks if rank.step_ms is not None][:_MOST_RANKS_DRAWN]
    if len(drawn) < 2:
        return None
    rows = []
    for rank in drawn:
        amounts = by_colour(rank.phase_ms)
        parts = [BarPart(name=name, label=labels.label(name), share=ms) for name, ms in amounts.items()]
        memory = f", {formatting.size(rank.memory_bytes)}" if rank.memory_bytes else ""
        step_ms = formatting.milliseconds(rank.step_ms.p50 if rank.step_ms else 0.0)
        rows.append(StackedRow(label=f"rank {rank.rank}", parts=parts, note=f"{step_ms}{memory}"))
    title = "The processes side by side"
    picture = stacked_rows(rows, "ms", title)
    more = f" The first {len(drawn)} of {summary.world_size} are drawn." if len(drawn) < len(summary.ranks) else ""
    caption = (
        "Medians of each phase, with the median step and the largest memory. The gradients are summed in the backward pass, "
        f"so a process that waits for a slower one waits there.{more}"
    )
    names = dict.fromkeys(part.name for row in rows for part in row.parts)
    legend = Legend([(colour_class(name), labels.label(name)) for name in names])
    return Subsection(title, [legend, Figure(picture, caption), _communication(summary), _hosts(summary)])


def _communication(summary: TrainingSummary) -> Paragraph | None:
    seen, sentences = summary.communication, []
    if seen is not None:
        shown = [formatting.milliseconds(1000 * value) for value in (seen.exchange_s, seen.hidden_s, seen.backward_s)]
        exchanging = "Exchanging gradients takes {} a step, of which {} pass while the backward pass of {} computes"
        sentences.append(
            f"{exchanging.format(*shown)} (means over {seen.steps} steps, waiting for slower processes included)."
        )
    if summary.communication_share is not None:
        share = formatting.percent(summary.communication_share)
        sentences.append(
            f"{share} of an undisturbed step waits for gradients that travel, as the rule on communication has it."
        )
    return Paragraph(" ".join(sentences)) if sentences else None


def _hosts(summary: TrainingSummary) -> Details:
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
    return Details("Where they ran", [Table(headers, rows)])


def use(summary: TrainingSummary) -> Subsection | None:
    """Show every signal of the machine: how much of it was used; the cores as one."""
    signals = [(name, signal) for name, signal in summary.system.items() if not is_core(name)]
    if not signals:
        return None
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
    return Subsection("Use of the machine and its memory", [Paragraph(note) if note else None, Table(headers, rows)])
