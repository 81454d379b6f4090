"""The page of a comparison: two runs or trainings, before and after."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from trainer import formatting, html
from trainer.profiling import drawing, labels
from trainer.profiling.compare import Comparison, Pair, Table
from trainer.profiling.drawing import BarPart
from trainer.profiling.report import course
from trainer.profiling.summary import TrainingSummary

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
    """The page: HTML without references to anything outside of it."""
    names = f"Before: {comparison.before.name}. After: {comparison.after.name}."
    sections = [drawing.STYLE, html.paragraph(names)]
    sections += [html.section(table.title, _table(table)) for table in comparison.general]
    sections += [_training(comparison, pair) for pair in comparison.pairs]
    return html.page("Before and after", " ".join([*comparison.differences, comparison.verdict]), sections)


def _training(comparison: Comparison, pair: Pair) -> str:
    if pair.name not in comparison.tables:
        return html.section(labels.training(pair.name), html.paragraph("Both sides are the same recording."))
    tables = [
        html.subsection(f"{table.title[0].upper()}{table.title[1:]}", _table(table))
        for table in comparison.tables[pair.name]
    ]
    return html.section(labels.training(pair.name), charts(pair), *tables, *_courses(comparison, pair.name))


def charts(pair: Pair) -> str:
    """Phases, and operators by kind of work, before and after."""
    phases = _bars(pair, "Where a step's time goes", {name: name for name in drawing.COLOURS}, labels.label, _phases)
    clocks = {one.operators.clock for one in (pair.before, pair.after) if one.operators}
    if len(clocks) > 1:  # one bar would be of the device's time and one of the host's
        return phases
    return phases + _bars(pair, "Operators by kind of work", _KIND_COLOURS, str, _kinds)


def _table(table: Table) -> str:
    heading, *rows = table.rows
    return html.table(heading, rows)


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
) -> str:
    """A stacked bar before and one after, on one scale."""
    seen = dict.fromkeys(name for one in (pair.before, pair.after) for name in values(one))
    rows = []
    for when, one in (("before", pair.before), ("after", pair.after)):
        parts = [
            BarPart(
                name=colours.get(name, "named"), label=spoken(name), share=pair.scaled(one, values(one).get(name, 0.0))
            )
            for name in seen
        ]
        total = sum(part.share for part in parts)
        rows.append((when, parts, f"{formatting.short(total)} {pair.unit}" if total else "not recorded"))
    most = max(sum(part.share for part in parts) for _, parts, _ in rows)
    if not most:
        return ""
    legend = drawing.legend([(drawing.colour_class(colours.get(name, "named")), spoken(name)) for name in seen])
    return html.subsection(title, legend, drawing.stacked_rows(rows, most, pair.unit, title))


def _courses(comparison: Comparison, name: str) -> list[str]:
    """Both trainings over time, where both sides have their evidence at hand."""
    sides = {"Before": comparison.before, "After": comparison.after}
    if not all(name in side.evidence for side in sides.values()):
        return []
    return [
        html.subsection(when) + course.section(side.evidence[name], side.trainings[name], [])
        for when, side in sides.items()
    ]
