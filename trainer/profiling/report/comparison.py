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
    title = labels.training(pair.name)
    if pair.name not in comparison.tables:
        return PageSection(title, [Paragraph("Both sides are the same recording.")])
    blocks = charts(pair)
    for table in comparison.tables[pair.name]:
        blocks.append(Subsection(f"{table.title[0].upper()}{table.title[1:]}", [table]))
    sides = {"Before": comparison.before, "After": comparison.after}
    if all(pair.name in side.evidence for side in sides.values()):  # both have their evidence at hand
        for when, side in sides.items():
            course = over_time.section(side.evidence[pair.name], side.trainings[pair.name], [])
            blocks.append(Subsection(when, [course]))
    return PageSection(title, blocks)


def charts(pair: Pair) -> list[Block]:
    """Draw phases, and operators by kind of work, before and after."""
    phases = _bars(
        pair,
        "Where a step's time goes",
        {name: name for name in COLOURS},
        labels.label,
        lambda one: {name: phase.ms.mean for name, phase in one.phases.items()},
    )
    clocks = {one.operators.clock for one in (pair.before, pair.after) if one.operators}
    if len(clocks) > 1:  # one bar would be of the device's time and one of the host's
        return phases

    def kinds(one: TrainingSummary) -> Mapping[str, float]:
        return one.operators.categories if one.operators else {}

    return [*phases, *_bars(pair, "Operators by kind of work", _KIND_COLOURS, str, kinds)]


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
