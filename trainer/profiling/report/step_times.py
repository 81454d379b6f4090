"""Where a step's time goes: phases, the slowest steps, operators, processes; and how much of the machine was used."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from trainer import formatting
from trainer.charts import Bar, BarPart, StackedRow, bars, by_colour, histogram, stacked_bar, stacked_rows
from trainer.pages import Block, Details, Figure, Legend, Paragraph, Subsection, Table
from trainer.profiling import labels
from trainer.profiling.evidence import Operator, Spread, TrainingEvidence, is_core, measured_steps
from trainer.profiling.training_summary import OperatorSummary, SlowStep, TrainingSummary, operator_ms
from trainer.svg import colour_class

_FEWEST_DRAWN = 20
_MOST_RANKS_DRAWN = 64
_UNUSUAL = 1.5
"""Times what is usual."""
_DELAYED = 0.1
"""Share of a slow step from which on a lack of cores can have made it slow."""
_FULL_PERCENT = 90.0
"""Use of the cores from which on other programs take them from the training."""
_MORE_PERCENT = 5.0
"""Points above what is usual below which waiting for storage, or other programs, explain no slow step."""
_SWAP_BYTES_PER_S = 1e6
"""Less swapping than this explains no slow step."""
_AFTER = {"checkpoint": "just after a checkpoint", "evaluate": "just after an evaluation"}


def recording(summary: TrainingSummary) -> Subsection:
    """Show the shares of the whole recording."""
    parts = [
        BarPart(name=name, label=labels.label(name), share=share) for name, share in summary.recorded_shares.items()
    ]
    legend = Legend([(colour_class(part.name), f"{part.label} {formatting.percent(part.share)}") for part in parts])
    title = "Shares of the whole recording"
    return Subsection(
        f"{title}: {formatting.duration(summary.recorded_s)}", [Figure(stacked_bar(parts, title)), legend]
    )


def phases(summary: TrainingSummary) -> Subsection | None:
    """Show each phase of a step with its spread from step to step."""
    if summary.step_ms is None:
        return None
    rows = []
    for name, phase in summary.phases.items():
        ms = phase.ms
        whiskers = f"({formatting.short(ms.p5)} to {formatting.short(ms.p95)})"
        note = f"{formatting.percent(phase.share)}  ·  {formatting.milliseconds(ms.p50)}  {whiskers}"
        rows.append(Bar(name=name, label=labels.label(name), value=ms.p50, note=note, low=ms.p5, high=ms.p95))
    picture = bars(rows, "ms", "Time of each phase of a step")
    caption = (
        f"A step takes {formatting.milliseconds(summary.step_ms.p50)} (median; 5 % take less than "
        f"{formatting.milliseconds(summary.step_ms.p5)}, 5 % more than {formatting.milliseconds(summary.step_ms.p95)}). Bars: median of "
        "each phase; whiskers: 5th to 95th percentile; the percentage is the phase's share of all measured steps. These are times as they "
        "were; findings speak of undisturbed steps, without what other programs and the recorder's tensor statistics took."
    )
    named = [(path, share) for phase in summary.phases.values() for path, share in phase.ranges.items()]
    table = Table(
        ["Range within a phase", "Share of a step"], [(path, formatting.percent(share)) for path, share in named]
    )
    return Subsection("Where a step's time goes", [Figure(picture, caption), table if named else None])


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
    picture = histogram(values, marks, "ms", title, count_label="steps")
    caption = f"Slowest step: {formatting.milliseconds(summary.step_ms.max)}. The slowest half percent is drawn into the last bar."
    return Subsection(title, [Figure(picture, caption), _slowest(summary, summary.step_ms)])


def _slowest(summary: TrainingSummary, step_ms: Spread) -> Block:
    if not summary.slowest:
        return Paragraph("No step took much longer than the median.")
    rows = []
    for step in summary.slowest:
        usual = {name: phase.ms.p50 for name, phase in summary.phases.items()}
        extra = {name: ms - usual.get(name, 0.0) for name, ms in step.phase_ms.items()}
        most = sorted(extra.items(), key=lambda item: -item[1])[:2]
        longer = [f"{labels.label(name)} +{formatting.milliseconds(ms)}" for name, ms in most if ms > 0.1 * most[0][1]]
        times = formatting.duration(step.start_s), formatting.milliseconds(step.ms), f"{step.ms / step_ms.p50:.1f} x"
        rows.append((f"{step.step:,}", *times, ", ".join(longer), _machine(step, summary)))
    thinned = f" (of 1 in {summary.steps_kept_of} steps)" if summary.steps_kept_of > 1 else ""
    headers = [f"Slowest steps{thinned}", "At", "Took", "Median", "Phases that were longer", "The machine then"]
    return Table(headers, rows)


def _machine(step: SlowStep, summary: TrainingSummary) -> str:
    """Name what may have slowed the step: what the training lacked, and what it follows; not its effects, such as an idle GPU."""
    causes = [_AFTER[step.follows]] if step.follows else []
    if step.graphs:
        causes.append("1 graph was compiled" if step.graphs == 1 else f"{step.graphs} graphs were compiled")
    if step.no_batch_ready:
        causes.append("no batch was ready")
    if step.delayed_ms and step.delayed_ms > _DELAYED * step.ms:
        causes.append(f"no core for the training for {formatting.milliseconds(step.delayed_ms)}")
    cores = summary.cores_percent
    usual = {name: signal.mean for name, signal in summary.system.items()}
    usual |= {"cores_percent": sum(cores) / len(cores)} if cores else {}
    causes += _lacking(step.machine, usual, len(cores))
    return ", ".join(causes) or ("nothing that slows a step" if step.machine else "not sampled")


def _lacking(now: Mapping[str, float], usual: Mapping[str, float], cores: int) -> Iterator[str]:
    """Name what the machine did not give to the training, if it is more than usual."""
    waiting = [values.get("iowait_percent", 0.0) for values in (now, usual)]
    if _is_more(*waiting):
        yield _against("waiting for storage", *waiting)
    others = [_other_programs_percent(values, cores) for values in (now, usual)]
    if now.get("cores_percent", 0.0) >= _FULL_PERCENT and _is_more(*others):
        yield _against("cores busy with other programs", *others)
    swapped = sum(now.get(f"swap_{way}_bytes_per_s", 0.0) for way in ("in", "out"))
    if swapped > _SWAP_BYTES_PER_S:
        yield f"memory swapped, {formatting.size(swapped)}/s"


def _is_more(now: float, usual: float) -> bool:
    return now > usual + _MORE_PERCENT and now > _UNUSUAL * usual


def _against(what: str, now: float, usual: float) -> str:
    return f"{what} {formatting.percent(now / 100)} (usually {formatting.percent(usual / 100)})"


def _other_programs_percent(signals: Mapping[str, float], cores: int) -> float:
    """Compute the use of all cores by anything but this process and its loaders."""
    if "cores_percent" not in signals or "process_cpu_percent" not in signals:
        return 0.0
    own = signals["process_cpu_percent"] + signals.get("loaders_cpu_percent", 0.0)
    return max(0.0, signals["cores_percent"] - own / cores)


def operators(summary: TrainingSummary, top: int) -> Subsection:
    """Show what the window of torch.profiler saw: kinds of work, then the `top` longest operators and kernels."""
    title, seen = "Top operators", summary.operators
    if seen is None:
        reason = summary.missing.get("operators", "no reason given")
        return Subsection(title, [Paragraph(f"Not recorded: {reason}.")])
    total = max(sum(seen.categories.values()), 1e-12)
    place = "on the device" if seen.clock == "device" else "on the CPU"
    rows = []
    for name, ms in seen.categories.items():
        note = f"{formatting.percent(ms / total)}  ·  {formatting.milliseconds(ms)}"
        rows.append(Bar(name="forward", label=name, value=ms, note=note))
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
    note = ""
    if cores := summary.cores_percent:
        note = (
            f"{len(cores)} cores were busy for {formatting.percent(sum(cores) / len(cores) / 100)} of the time on average, the busiest for "
            f"{formatting.percent(max(cores) / 100)}, the idlest for {formatting.percent(min(cores) / 100)}."
        )
    headers = ["Signal", "Least", "Median", "Mean", "95 %", "Most", "First tenth", "Last tenth"]
    return Subsection("Use of the machine and its memory", [Paragraph(note) if note else None, Table(headers, rows)])
