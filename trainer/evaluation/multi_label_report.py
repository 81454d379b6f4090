"""What is measured of a model where an image may have several labels, and the page on it.

Shapes: N test images, K classes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from trainer import charts, pages
from trainer.data.dataset import Split, Targets
from trainer.evaluation import average_precision
from trainer.evaluation.metrics import Floats, Latency, Machine, confidence_bins
from trainer.evaluation.report import latency_section, points, size_rows, strip, verdict_section
from trainer.formatting import isolated
from trainer.pages import Block, Figure, Legend, PageSection, Paragraph, Photo, Table

_IMAGES = 5  # test images of a class that the page shows


@dataclass(frozen=True, kw_only=True)
class MeasuredSets:
    """What was measured of one model."""

    figures: dict[str, Any]
    """Its main numbers, as `summary.json` shows them."""
    probabilities: Floats
    """Of each class, [N, K]."""
    wanted: Targets
    """Whether each image is of each class, [N, K]."""
    average_precisions: npt.NDArray[np.float64]
    """Of each class, [K]; NaN for one without images."""
    latencies: Sequence[Latency]

    @classmethod
    def of(
        cls, figures: Mapping[str, Any], probabilities: Floats, wanted: Targets, latencies: Sequence[Latency]
    ) -> MeasuredSets:
        """Measure probabilities; of the figures those are known that do not depend on them, and the `threshold`."""
        named = probabilities > figures["threshold"]
        right = int((named & (wanted > 0)).sum())
        precisions = average_precision.average_precisions(probabilities, wanted)
        test = {
            "map": average_precision.mean_of_known(precisions),
            "f1": average_precision.f1(named, wanted),
            "precision": right / max(int(named.sum()), 1),
            "recall": right / max(int(wanted.sum()), 1),
        }
        return cls(
            figures={**figures, "test": test},
            probabilities=probabilities,
            wanted=wanted,
            average_precisions=precisions,
            latencies=latencies,
        )

    @property
    def named(self) -> npt.NDArray[np.bool_]:
        """Whether each class is named for each image: its probability is above the threshold, [N, K]."""
        named: npt.NDArray[np.bool_] = self.probabilities > self.figures["threshold"]
        return named

    def precision(self) -> npt.NDArray[np.float64]:
        """Compute the share of the images for which a class is named that are of it, [K]; NaN for one that is never named."""
        return _shares(self.named & (self.wanted > 0), self.named)

    def recall(self) -> npt.NDArray[np.float64]:
        """Compute the share of the images of a class for which it is named, [K]; NaN for a class without images."""
        return _shares(self.named & (self.wanted > 0), self.wanted > 0)

    def details(self, classes: Sequence[str], bins: int) -> dict[str, Any]:
        """Return what `metrics.json` says of the model; `calibration` is of the most probable class of each image."""
        columns = zip(self.average_precisions, self.precision(), self.recall(), strict=True)
        place = confidence_bins(self.probabilities.max(axis=1), bins)
        return {
            **self.figures,
            "latency": [vars(timed) for timed in self.latencies],
            "classes": {
                label: {
                    "images": int(images),
                    # JSON has no NaN.
                    **{
                        name: None if np.isnan(share) else float(share)
                        for name, share in zip(("average_precision", "precision", "recall"), shares, strict=True)
                    },
                }
                for label, images, shares in zip(classes, self.wanted.sum(axis=0), columns, strict=True)
            },
            "named": dict(zip(classes, self.named.sum(axis=0).tolist(), strict=True)),
            "none_named": int((~self.named.any(axis=1)).sum()),
            "calibration": {"counts": np.bincount(place, minlength=bins).tolist()},
        }


def _shares(some: npt.NDArray[np.bool_], of: npt.NDArray[np.bool_]) -> npt.NDArray[np.float64]:
    with np.errstate(invalid="ignore"):
        shares: npt.NDArray[np.float64] = some.sum(axis=0) / of.sum(axis=0)
    return shares


def render(
    classes: Sequence[str],
    *,
    teacher: MeasuredSets,
    student: MeasuredSets,
    machine: Machine,
    verdict: Mapping[str, Any],
    split: Split,
    shown: int,
) -> str:
    """Build the whole page, self-contained, with test images of at most `shown` classes."""
    both = {"teacher": teacher, "student": student}
    labels = student.wanted.sum(axis=1)
    return pages.render(
        f"Evaluation: the student {'passed' if verdict['passed'] else 'did not pass'}",
        f"{student.figures['title']}; distilled from {teacher.figures['title']}; {len(split):,} test images, {len(classes)} classes, "
        f"{labels.mean():.2f} labels an image",
        [
            verdict_section(verdict),
            _comparison(teacher.figures, student.figures),
            latency_section({name: one.latencies for name, one in both.items()}, machine),
            _missed(student, classes, split, shown),
            _classes(both, classes),
        ],
    )


def _comparison(one: Mapping[str, Any], other: Mapping[str, Any]) -> PageSection:
    names = {
        "map": "test mAP (mean average precision)",
        "f1": "F1",
        "precision": "precision",
        "recall": "recall",
    }
    rows = [
        ("architecture", one["architecture"], other["architecture"], ""),
        *(
            (text, f"{one['test'][name]:.2%}", f"{other['test'][name]:.2%}", points(one, other, name))
            for name, text in names.items()
        ),
        ("F1 against what the teacher names", "", f"{other['test']['agreement']:.2%}", ""),
        ("threshold", f"{one['threshold']:.3f}", f"{other['threshold']:.3f}", ""),
        *size_rows(one, other),
    ]
    note = (
        "A class is named where its probability is above the threshold, which has the best F1 on the validation images; F1, precision and "
        f"recall count all decisions together. The student's logits are divided by the temperature {other['temperature']:.3f}, fitted to "
        "the validation images."
    )
    return PageSection("Teacher against student", [Table(["", "teacher", "student", ""], rows), Paragraph(note)])


def _missed(student: MeasuredSets, classes: Sequence[str], split: Split, shown: int) -> PageSection:
    """Show test images in which the student misses a class, of those classes that it finds worst."""
    missed, blocks = (student.wanted > 0) & ~student.named, list[Block]()
    known = np.flatnonzero(missed.any(axis=0))
    for one in known[np.argsort(student.average_precisions[known], kind="stable")][:shown].tolist():
        images = np.flatnonzero(missed[:, one])
        images = images[np.argsort(student.probabilities[images, one], kind="stable")]
        count = int(student.wanted[:, one].sum())
        caption = f"{isolated(classes[one])} is missed in {len(images)} of its {count} test images"
        blocks.append(Photo(strip(split.read(images[:_IMAGES].tolist()).numpy()), caption))
    return PageSection("What the student misses", blocks or [Paragraph("Nothing.")])


def _classes(both: Mapping[str, MeasuredSets], classes: Sequence[str]) -> PageSection:
    columns = {
        f"{name} {figure}": values
        for name, one in both.items()
        for figure, values in (
            ("average precision", one.average_precisions),
            ("precision", one.precision()),
            ("recall", one.recall()),
        )
    }
    images, rows = both["student"].wanted.sum(axis=0), []
    for index in np.argsort(both["student"].average_precisions, kind="stable").tolist():
        shares = [values[index] for values in columns.values()]
        shown = ["-" if np.isnan(share) else f"{share:.1%}" for share in shares]
        rows.append((classes[index], int(images[index]), *shown))
    found = {name: one.average_precisions for name, one in both.items()}
    chart = charts.recalls(found, classes, "Average precision of each class", figure="average precision")
    legend = Legend([("g0", "teacher"), ("g1", "student")])
    figure = Figure(chart, "Average precision, the student's worst classes first")
    return PageSection("Classes", [legend, figure, Table(["class", "test images", *columns], rows)])
