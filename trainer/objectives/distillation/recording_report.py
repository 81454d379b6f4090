"""What recorded teacher outputs hold of the teacher, and what they cost: counted, and as a page.

Probability mass and labels are counted shard by shard and added up, over all processes.

Shapes: B records, K logits a record, L numbers of entries (1, 2, 4, ... K).
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from trainer.config import FeatureFormat
from trainer.data.dataset import Targets
from trainer.data.dataset_schema import UNLABELED
from trainer.objectives.distillation.recording import RecordingDescription
from trainer.report import pages
from trainer.report.charts import outlines
from trainer.report.pages import Figure, Legend, PageSection, Paragraph, Subsection, Table

Floats = npt.NDArray[np.float64]
Counts = npt.NDArray[np.int64]

TEMPERATURES = (1, 2)  # at which the sum of the other classes was recorded

LEAST_MISSING = 1e-6  # missing mass below this counts as none in the distribution; the means are exact
_BINS = 600
EDGES: Floats = np.logspace(np.log10(LEAST_MISSING), 0, _BINS + 1)
"""Edges of the distribution's bins, in missing mass; below the first edge is one bin more."""
_BARS = 60
_PRECISION = {
    "fp16": "fp16: each to within 2^-11 (0.05 %) of itself",
    "int8": "int8 with a scale: each to within 1/254 (0.4 %) of the largest one of the view's features, or of the token",
}
"""What is kept of each number, in words."""


class RecordedWork(NamedTuple):
    """What one job has recorded, on all its processes."""

    views: int
    seconds: float


# ---------------------------------------------------------------------------------------------------------------------
# What they hold


def entries(top_k: int) -> list[int]:
    """The numbers of entries that are looked at: powers of two, and `top_k` itself."""
    return [2**power for power in range(top_k.bit_length()) if 2**power < top_k] + [top_k]


@dataclass(frozen=True, kw_only=True)
class Coverage:
    """Sums over views."""

    views: int
    labeled: int  # views whose image has a label
    labels_recorded: int  # views whose image's label is among the K entries
    labels_first: int  # views whose image's label is the teacher's top class
    held: Floats  # probability mass of the largest entries, for each temperature and number of entries, [2, L]
    missing: Floats  # probability mass of the classes that were not recorded, for each temperature, [2]
    next_at_most: Floats  # what K entries more could hold of it at most, because none is larger than the K-th, [2]
    distribution: Counts  # views by missing mass, for each temperature: none, then the bins of `EDGES`, [2, bins + 1]

    def mean_held(self) -> Floats:
        """Mean mass of the largest entries, for each temperature and number of entries, [2, L]."""
        return self.held / self.views

    def mean_mass(self) -> Floats:
        """Mean mass of all K entries, for each temperature, [2]."""
        return 1 - self.missing / self.views

    def mean_mass_of_twice(self) -> Floats:
        """What 2K entries would hold at most in the mean, for each temperature, [2]."""
        return 1 - (self.missing - self.next_at_most) / self.views

    def quantile(self, share: float, temperature: int) -> float:
        """The mass of the K entries that this share of the views stays below, to within 1.2 % of the missing mass."""
        counts = self.distribution[TEMPERATURES.index(temperature)]
        position = np.searchsorted(counts[::-1].cumsum(), max(1, np.ceil(share * self.views)))
        bin_number = len(counts) - 1 - int(position)
        return 1.0 if bin_number == 0 else float(1 - np.sqrt(EDGES[bin_number - 1] * EDGES[bin_number]))

    def figures(self) -> dict[str, Any]:
        """The main numbers, as `summary.json` shows them."""
        mass = {
            f"t{temperature}": {
                "mean": float(mean),
                "p5": self.quantile(0.05, temperature),
                "p1": self.quantile(0.01, temperature),
            }
            for temperature, mean in zip(TEMPERATURES, self.mean_mass(), strict=True)
        }
        return {
            "mass": mass,
            "label_recorded": self.labels_recorded / max(1, self.labeled),
            "teacher_top1": self.labels_first / max(1, self.labeled),
        }


def count(
    records: npt.NDArray[np.void], labels: npt.NDArray[np.int64], classes: int, targets: Targets | None = None
) -> Coverage:
    """The coverage of records [B] of a teacher with so many classes; `labels` [B] of their images are -1 where there is none.

    Where an image may have several labels (`PreparedDataset.targets`) each of them counts as its label.
    """
    logits, top_k = records["logits"].astype(np.float64), records["logits"].shape[1]
    held, missing, at_most, distribution = [], [], [], []
    for column, temperature in enumerate(TEMPERATURES):
        scaled, rest = logits / temperature, records["rest"][:, column].astype(np.float64)
        total = np.logaddexp(np.logaddexp.reduce(scaled, axis=1), rest)
        mass, lacking = np.exp(scaled - total[:, None]), np.exp(rest - total)
        held.append(mass.cumsum(1)[:, np.array(entries(top_k)) - 1].sum(0))
        missing.append(lacking.sum())
        at_most.append(np.minimum(lacking, mass[:, -1] * min(top_k, classes - top_k)).sum())
        bins = np.minimum(np.searchsorted(EDGES, lacking, side="right"), _BINS)
        distribution.append(np.bincount(bins, minlength=_BINS + 1))
    if targets is None:
        is_label = records["indices"] == labels[:, None]
    else:
        is_label = (targets[labels[:, None], records["indices"]] > 0) & (labels[:, None] != UNLABELED)
    return Coverage(
        views=len(records),
        labeled=int((labels != UNLABELED).sum()),
        labels_recorded=int(is_label.any(1).sum()),
        labels_first=int(is_label[:, 0].sum()),
        held=np.stack(held),
        missing=np.array(missing),
        next_at_most=np.array(at_most),
        distribution=np.stack(distribution),
    )


def total(parts: Iterable[Coverage]) -> Coverage:
    """The coverage of all parts together; there is one at least."""
    values = [vars(part) for part in parts]
    return Coverage(**{name: sum(value[name] for value in values[1:]) + values[0][name] for name in values[0]})


# ---------------------------------------------------------------------------------------------------------------------
# The page


def figures(description: RecordingDescription, held: Coverage | None, work: RecordedWork) -> dict[str, Any]:
    """Collect the main numbers, as `summary.json` shows them; the speed only if this job recorded anything.

    There is no coverage of a teacher without logits, whose embedding and patch tokens are held as a whole.
    """
    size = description.record.itemsize
    tokens = {"tokens": list(description.tokens)} if description.tokens else {}
    speed = {"views_per_second": work.views / work.seconds} if work.views else {}
    return {
        "teacher": description.teacher,
        "samples": description.samples,
        "views": description.views,
        "top_k": description.top_k,
        **(held.figures() if held is not None else {"features": description.features} | tokens),
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
    if held:
        what = f"{description.top_k} of {description.classes:,} logits"
        content = [_mass(description, held), _answers(held)]
    else:
        kept: dict[str, FeatureFormat] = {}
        if description.features:
            kept[f"an embedding of {description.features:,} numbers"] = description.feature_format
        if description.tokens:
            kept[_tokens(description)] = description.token_format
        what = " and ".join(kept)
        each = "; and ".join(f"{name}, standardized; as {_PRECISION[form]}" for name, form in kept.items())
        note = f"The teacher has no head, so there are no logits: what is kept is {each}."
        content = [PageSection("Embedding held", [Paragraph(note)])]
    return pages.render(
        "Recorded teacher outputs",
        f"{description.views} views of {description.samples:,} training images{without}, {what} each",
        [*content, _cost(description, work), _origin(description, parents)],
    )


def _tokens(description: RecordingDescription) -> str:
    """Name the patch tokens that are kept."""
    height, width, numbers = description.tokens or (0, 0, 0)
    return f"{height} x {width} patch tokens of {numbers:,} numbers"


def _mass(description: RecordingDescription, held: Coverage) -> PageSection:
    if description.top_k == description.classes:
        return PageSection("Probability mass held", [Paragraph("All logits were recorded; nothing is missing.")])
    rows = [
        (f"T = {one}", f"{mean:.4%}", f"{held.quantile(0.05, one):.4%}", f"{held.quantile(0.01, one):.4%}")
        for one, mean in zip(TEMPERATURES, held.mean_mass(), strict=True)
    ]
    table = Table(["temperature", "mean", "5 % of the views hold less than", "1 % of them less than"], rows)
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
    record, twice = description.record, min(2 * description.top_k, description.classes)
    entry_bytes = record["indices"].base.itemsize + record["logits"].base.itemsize
    counts = [*entries(description.top_k), twice]
    masses = [[f"{mass:.4%}" for mass in means] for means in held.mean_held().T]
    masses.append([f"at most {mass:.4%}" for mass in held.mean_mass_of_twice()])
    rows = [
        (f"{count:,}", *shown, f"{record.itemsize + (count - description.top_k) * entry_bytes}")
        for count, shown in zip(counts, masses, strict=True)
    ]
    headers = ["entries (reinforce.top_k)", *(f"mean mass at T = {one}" for one in TEMPERATURES), "bytes a view"]
    return Table(headers, rows)


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
        ("the teacher's top class is the image's label", f"{shares['teacher_top1']:.2%}"),
        ("a recorded class is the image's label", f"{shares['label_recorded']:.2%}"),
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
    record = description.record
    places = sum(record[name].itemsize for name in ("tokens", "token_steps") if name in (record.names or ()))
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
