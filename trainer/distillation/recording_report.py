"""The page on recorded teacher outputs: what they hold of the teacher, and what they cost."""

from __future__ import annotations

import itertools
import json
from collections.abc import Mapping
from typing import Any

import numpy as np

from trainer import pages
from trainer.charts import outlines
from trainer.distillation.coverage import EDGES, TEMPERATURES, Coverage, entries
from trainer.distillation.recording import RecordingDescription
from trainer.distillation.reinforcement import RecordedWork
from trainer.pages import Figure, Legend, PageSection, Paragraph, Subsection, Table

_BARS = 60
_PRECISION = {
    "fp16": "fp16: each to within 2^-11 (0.05 %) of itself",
    "int8": "int8 with a scale: each to within 1/254 (0.4 %) of the largest one of the view's features, or of the token",
}
"""What is kept of each number, in words."""


def figures(description: RecordingDescription, held: Coverage | None, work: RecordedWork) -> dict[str, Any]:
    """Collect the main numbers, as `summary.json` shows them; the speed only if this job recorded anything.

    There is no coverage of a teacher without logits, whose embedding is held as a whole.
    """
    size = description.record.itemsize
    speed = {"views_per_second": work.views / work.seconds} if work.views else {}
    return {
        "teacher": description.teacher,
        "samples": description.samples,
        "views": description.views,
        "top_k": description.top_k,
        **(held.figures() if held is not None else {"features": description.features}),
        "bytes_per_view": size,
        "bytes_per_image": size * description.views,
        "mib": size * description.views * description.samples / 2**20,
        **speed,
    }


def render(
    description: RecordingDescription, held: Coverage | None, work: RecordedWork, parents: Mapping[str, str]
) -> str:
    """Build the whole page, self-contained; `parents`: `dataset` and `teacher` -> fingerprint."""
    without = f" ({description.unlabeled:,} of them without a label)" if description.unlabeled else ""
    what = f"{description.top_k} of {description.classes:,} logits" if held else _headless(description)
    content = [_mass(description, held), _answers(held)] if held else [_embedding(description)]
    return pages.render(
        "Recorded teacher outputs",
        f"{description.views} views of {description.samples:,} training images{without}, {what} each",
        [*content, _cost(description, work), _origin(description, parents)],
    )


def _embedding(description: RecordingDescription) -> PageSection:
    note = (
        f"The teacher has no head, so there are no logits: what is kept is {_headless(description)}, standardised; as "
        f"{_PRECISION[description.feature_format if description.features else description.token_format]}."
    )
    return PageSection("Embedding held", [Paragraph(note)])


def _headless(description: RecordingDescription) -> str:
    """Name what is kept of a teacher without a head."""
    return f"an embedding of {description.features:,} numbers" if description.features else _tokens(description)


def _tokens(description: RecordingDescription) -> str:
    """Name the patch tokens that are kept."""
    height, width, numbers = description.tokens or (0, 0, 0)
    return f"{height} x {width} patch tokens of {numbers:,} numbers"


def _mass(description: RecordingDescription, held: Coverage) -> PageSection:
    means = held.mean_mass()
    rows = [
        (f"T = {one}", f"{means[row]:.4%}", f"{held.quantile(0.05, one):.4%}", f"{held.quantile(0.01, one):.4%}")
        for row, one in enumerate(TEMPERATURES)
    ]
    table = Table(["temperature", "mean", "5 % of the views hold less than", "1 % of them less than"], rows)
    if description.top_k == description.classes:
        return PageSection("Probability mass held", [Paragraph("All logits were recorded; nothing is missing.")])
    note = (
        f"Share of the teacher's probability that falls on the {description.top_k} recorded classes. The others are known as one sum, so a "
        "distillation at T = 1 or 2 loses only how the teacher divides the rest among them."
    )
    return PageSection(
        "Probability mass held",
        [
            Paragraph(note),
            table,
            Legend([(f"s{series}", f"T = {one}") for series, one in enumerate(TEMPERATURES)]),
            _distribution(held),
            Subsection("With fewer or more entries", [_ladder(description, held)]),
        ],
    )


def _ladder(description: RecordingDescription, held: Coverage) -> Table:
    counts = entries(description.top_k)
    rows = [
        (f"{count:,}", *(f"{mass:.4%}" for mass in masses), f"{_record_bytes(description, count)}")
        for count, masses in zip(counts, held.mean_held().T, strict=True)
    ]
    twice = min(2 * description.top_k, description.classes)
    rows.append(
        (
            f"{twice:,}",
            *(f"at most {mass:.4%}" for mass in held.mean_mass_of_twice()),
            f"{_record_bytes(description, twice)}",
        )
    )
    headers = ["entries (reinforce.top_k)", *(f"mean mass at T = {one}" for one in TEMPERATURES), "bytes a view"]
    return Table(headers, rows)


def _record_bytes(description: RecordingDescription, entries: int) -> int:
    """Compute the size of a record with this number of entries, in bytes."""
    entry = description.record["indices"].base.itemsize + description.record["logits"].base.itemsize
    return description.record.itemsize + (entries - description.top_k) * entry


def _distribution(held: Coverage) -> Figure:
    """Draw how many views lack how much, from 1e-6 to 1 on a logarithmic scale."""
    below, *_ = held.distribution.T.tolist()
    bars = held.distribution[:, 1:].reshape(len(TEMPERATURES), _BARS, -1).sum(2)
    counts = {f"T = {one}": row for one, row in zip(TEMPERATURES, bars.tolist(), strict=True)}
    first = int(np.log10(EDGES[0]))
    ends = 100 * 10.0 ** np.linspace(first, 0, _BARS + 1)
    bins = [f"{low:.2g} % to {high:.2g} % missing" for low, high in itertools.pairwise(ends)]
    chart = outlines(
        counts,
        bins,
        tick_labels=[f"{100 * 10.0**decade:g} %" for decade in range(first, 1)],
        note=f"below the scale: {below[0]:,} views at T = 1, {below[1]:,} at T = 2",
        title="Views by missing mass",
    )
    return Figure(chart, "Views by the mass that is missing, on a logarithmic scale.")


def _answers(held: Coverage) -> PageSection:
    shares = held.figures()
    rows = [
        ("the image's label is the teacher's top class", f"{shares['teacher_top1']:.2%}"),
        ("the image's label is among the recorded classes", f"{shares['label_recorded']:.2%}"),
    ]
    note = "Of all views of images with a label. A view that is mixed with another image counts with its own image's label."
    return PageSection("Teacher and labels", [Table(["", "share of the views"], rows), Paragraph(note)])


def _cost(description: RecordingDescription, work: RecordedWork) -> PageSection:
    size = description.record.itemsize
    rows: list[tuple[str, str]] = [
        ("bytes a view", f"{size:,}"),
        ("bytes an image, all views", f"{size * description.views:,}"),
        ("all records, MiB", f"{size * description.views * description.samples / 2**20:,.1f}"),
    ]
    if work.views:
        rows += [
            ("views recorded by this job", f"{work.views:,}"),
            ("seconds", f"{work.seconds:,.1f}"),
            ("views a second, all processes", f"{work.views / work.seconds:,.1f}"),
        ]
    return PageSection("Storage and time", [Table(["", ""], rows)])


def _origin(description: RecordingDescription, parents: Mapping[str, str]) -> PageSection:
    precision = "" if description.feature_format == "fp16" else f", {_PRECISION[description.feature_format]}"
    places = sum(
        description.record[name].itemsize
        for name in ("tokens", "token_steps")
        if name in (description.record.names or ())
    )
    tokens = f"{_tokens(description)}, {_PRECISION[description.token_format]}; {places:,} of the bytes of a view"
    rows = [
        ("teacher", f"{description.teacher}, fingerprint {parents['teacher'][:12]}"),
        ("data set", f"fingerprint {parents['dataset'][:12]}"),
        ("precision of the teacher", description.precision),
        ("seed of the views", f"{description.seed}"),
        ("edge of the views, pixels", f"{description.view_size}"),
        ("decoder", description.decoder),
        ("features", f"{description.features}{precision}" if description.features else "none"),
        *([("patch tokens", tokens)] if description.tokens else []),
        *((f"distill.views.{name}", json.dumps(value)) for name, value in description.augmentation.items()),
    ]
    note = (
        "A distillation of another teacher, on another data set, with other views or another decoder is refused; it takes the seed and the "
        "size of the views from here."
    )
    return PageSection("What was recorded", [Paragraph(note), Table(["", ""], rows)])
