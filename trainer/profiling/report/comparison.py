"""The page of a comparison: two runs or trainings, before and after."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from trainer import formatting, pages
from trainer.charts.bars import BarPart, StackedRow, stacked_rows
from trainer.charts.svg import COLOURS, colour_class
from trainer.pages import Block, Figure, Legend, PageSection, Paragraph, Subsection
from trainer.profiling import labels
from trainer.profiling.compare import Comparison, Pair
from trainer.profiling.report import over_time
from trainer.profiling.training_summary import TrainingSummary

_KIND_COLOURS = {
    "matrix product": "forward",
    "attention": "backward",
    "convolution": "teacher_forward",
    "normalisation": "to_device",
    "copy": "data",
    "communication": "checkpoint",
    "optimiser": "optimizer",
    "other": "other",
}


def build(comparison: Comparison) -> str:
    """Build the page: HTML without references to anything outside of it."""
    blocks: list[Block | None] = [Paragraph(f"Before: {comparison.before.name}. After: {comparison.after.name}.")]
    blocks += [PageSection(table.title, [table]) for table in comparison.general]
    blocks += [_training(comparison, pair) for pair in comparison.pairs]
    return pages.render("Before and after", " ".join([*comparison.differences, comparison.verdict]), blocks)


def _training(comparison: Comparison, pair: Pair) -> PageSection:
    name = labels.training(pair.name)
    if pair.name not in comparison.tables:
        return PageSection(name, [Paragraph("Both sides are the same recording.")])
    tables = comparison.tables[pair.name]
    shown = [Subsection(f"{table.title[0].upper()}{table.title[1:]}", [table]) for table in tables]
    return PageSection(name, [*charts(pair), *shown, *_courses(comparison, pair.name)])


def charts(pair: Pair) -> list[Block]:
    """Draw phases, and operators by kind of work, before and after."""
    phases = _bars(pair, "Where a step's time goes", {name: name for name in COLOURS}, labels.label, _phases)
    clocks = {one.operators.clock for one in (pair.before, pair.after) if one.operators}
    if len(clocks) > 1:  # one bar would be of the device's time and one of the host's
        return phases
    return [*phases, *_bars(pair, "Operators by kind of work", _KIND_COLOURS, str, _kinds)]


def _phases(one: TrainingSummary) -> Mapping[str, float]:
    return {name: phase.ms.mean for name, phase in one.phases.items()}


def _kinds(one: TrainingSummary) -> Mapping[str, float]:
    return one.operators.categories if one.operators else {}


def _bars(
    pair: Pair,
    title: str,
    colours: Mapping[str, str],
    spoken: Callable[[str], str],
    values: Callable[[TrainingSummary], Mapping[str, float]],
) -> list[Block]:
    """Draw a stacked bar before and one after, on one scale; nothing where neither side has a value."""
    names = dict.fromkeys(name for one in (pair.before, pair.after) for name in values(one))
    colour = {name: colours.get(name, "named") for name in names}
    rows = []
    for when, one in (("before", pair.before), ("after", pair.after)):
        amounts = {name: pair.scaled(one, values(one).get(name, 0.0)) for name in names}
        parts = [BarPart(name=colour[name], label=spoken(name), share=amount) for name, amount in amounts.items()]
        total = sum(amounts.values())
        note = f"{formatting.short(total)} {pair.unit}" if total else "not recorded"
        rows.append(StackedRow(label=when, parts=parts, note=note))
    if not any(row.total for row in rows):
        return []
    legend = Legend([(colour_class(colour[name]), spoken(name)) for name in names])
    return [Subsection(title, [legend, Figure(stacked_rows(rows, pair.unit, title))])]


def _courses(comparison: Comparison, name: str) -> list[Block]:
    """Show both trainings over time, where both sides have their evidence at hand."""
    sides = {"Before": comparison.before, "After": comparison.after}
    if not all(name in side.evidence for side in sides.values()):
        return []
    return [
        Subsection(when, [over_time.section(side.evidence[name], side.trainings[name], [])])
        for when, side in sides.items()
    ]
