"""What an evaluation measured of teacher and student, and the page on it: the verdict, both beside one another, where the student errs.

Shapes: N test images, K classes.
"""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
from PIL import Image

from trainer.data.dataset import Split, Targets
from trainer.evaluation import metrics
from trainer.evaluation.label_issues import JudgedLabels
from trainer.evaluation.metrics import Calibration, Confusion, ConfusionMatrix, Floats, Latency, Machine, Shares
from trainer.io import limits
from trainer.io.formatting import isolated, ratio
from trainer.models.served_student.class_tags import ClassTags
from trainer.report import charts, pages
from trainer.report.charts import ReliabilityCurve
from trainer.report.pages import Block, BulletList, Figure, Legend, PageSection, Paragraph, Photo, PhotoGrid, Table

Example: TypeAlias = tuple[Confusion, npt.NDArray[np.uint8]]
"""A confusion, and test images of the one class taken for the other, [B, 3, S, S]."""

_ISSUES, _NAME = 24, 100  # labels that the page shows with pictures, and most characters of an image's name
_MISSED = 5  # test images of a class that the page shows
_PAIRS = 100  # confused classes that are listed where the matrix is too large to draw
_ROWS = 1000  # classes that the page lists, the worst ones


@dataclass(frozen=True, kw_only=True)
class Measured:
    """The measurements of one model."""

    figures: dict[str, Any]  # its main numbers, as `summary.json` shows them
    matrix: ConfusionMatrix
    calibration: Calibration
    latencies: Sequence[Latency]

    @property
    def shares(self) -> dict[str, Shares]:
        """Precision and recall of each class."""
        return {"precision": metrics.precision(self.matrix), "recall": metrics.recall(self.matrix)}

    def details(self, classes: Sequence[str]) -> dict[str, Any]:
        """Return the model's part of `metrics.json`."""
        return {
            **_details(self, classes, self.matrix.sum(axis=1)),
            "calibration": asdict(self.calibration),
            "worst_confusions": [
                {"truth": classes[pair.truth], "predicted": classes[pair.predicted], "count": pair.count}
                for pair in metrics.worst_confusions(self.matrix, len(classes))
            ],
        }


@dataclass(frozen=True, kw_only=True)
class MeasuredSets:
    """The measurements of one model where images may have several labels."""

    figures: dict[str, Any]  # as `Measured`
    probabilities: Floats  # of each class, [N, K]
    wanted: Targets  # whether each image is of each class, [N, K]
    latencies: Sequence[Latency]

    def __post_init__(self) -> None:
        """Add what the probabilities are worth on the test images to the figures, of which `threshold` is known."""
        right = int((self.named & (self.wanted > 0)).sum())
        self.figures["test"] = {
            "map": metrics.mean_of_known(self.average_precisions),
            "f1": metrics.f1(self.named, self.wanted),
            "precision": right / max(int(self.named.sum()), 1),
            "recall": right / max(int(self.wanted.sum()), 1),
        }

    @cached_property
    def average_precisions(self) -> Shares:
        """Average precision of each class."""
        return metrics.average_precisions(self.probabilities, self.wanted)

    @property
    def named(self) -> npt.NDArray[np.bool_]:
        """Whether each class is named for each image: its probability is above the threshold, [N, K]."""
        named: npt.NDArray[np.bool_] = self.probabilities > self.figures["threshold"]
        return named

    @property
    def shares(self) -> dict[str, Shares]:
        """Average precision of each class, and precision and recall of naming it."""
        right = (self.named & (self.wanted > 0)).sum(axis=0)
        return {
            "average_precision": self.average_precisions,
            "precision": metrics.ratios(right, self.named.sum(axis=0)),
            "recall": metrics.ratios(right, self.wanted.sum(axis=0)),
        }

    def details(self, classes: Sequence[str], bins: int) -> dict[str, Any]:
        """Return the model's part of `metrics.json`; `calibration` is of the most probable class of each image."""
        place = metrics.confidence_bins(self.probabilities.max(axis=1), bins)
        return {
            **_details(self, classes, self.wanted.sum(axis=0)),
            "named": dict(zip(classes, self.named.sum(axis=0).tolist(), strict=True)),
            "none_named": int((~self.named.any(axis=1)).sum()),
            "calibration": {"counts": np.bincount(place, minlength=bins).tolist()},
        }


def _details(measured: Measured | MeasuredSets, classes: Sequence[str], images: npt.NDArray[Any]) -> dict[str, Any]:
    """Return the common part of both kinds in `metrics.json`, which has no NaN."""
    shares = measured.shares
    return {
        **measured.figures,
        "latency": [asdict(timed) for timed in measured.latencies],
        "classes": {
            label: {
                "images": int(count),
                **{
                    name: None if np.isnan(share) else float(share)
                    for name, share in zip(shares, of_class, strict=True)
                },
            }
            for label, count, *of_class in zip(classes, images, *shares.values(), strict=True)
        },
    }


def render(
    *,
    classes: Sequence[str],
    teacher: Measured,
    student: Measured,
    machine: Machine,
    verdict: Mapping[str, Any],
    examples: Sequence[Example],
    tags: ClassTags | None = None,
    judged: JudgedLabels | None = None,
) -> str:
    """Build the whole page, self-contained; `tags` has the hierarchy by whose levels was measured, if there is one."""
    images, both = int(teacher.matrix.sum()), {"teacher": teacher, "student": student}
    return _page(
        both,
        f"{images:,} test images, {len(classes)} classes",
        machine,
        verdict,
        [_comparison(teacher, student, images), _levels(teacher, student, tags) if tags is not None else None],
        [
            _calibration(both),
            _confusions(student, classes, examples),
            _classes(both, classes, student.matrix.sum(axis=1), "recall"),
            _label_issues(judged, teacher, classes) if judged is not None else None,
        ],
    )


def render_sets(
    classes: Sequence[str],
    *,
    teacher: MeasuredSets,
    student: MeasuredSets,
    machine: Machine,
    verdict: Mapping[str, Any],
    split: Split,
    shown: int,
) -> str:
    """Build the whole page where images may have several labels, with test images of at most `shown` classes."""
    both = {"teacher": teacher, "student": student}
    # the classes of the lowest average precision, with the images whose class has the lowest probability
    missed, blocks = (student.wanted > 0) & ~student.named, list[Block]()
    known = np.flatnonzero(missed.any(axis=0))
    for one in known[np.argsort(student.average_precisions[known], kind="stable")][:shown].tolist():
        images = np.flatnonzero(missed[:, one])
        images = images[np.argsort(student.probabilities[images, one], kind="stable")]
        count = int(student.wanted[:, one].sum())
        caption = f"{isolated(classes[one])} is missed in {len(images)} of its {count} test images"
        blocks.append(Photo(strip(split.read(images[:_MISSED].tolist()).numpy()), caption))
    return _page(
        both,
        f"{len(split):,} test images, {len(classes)} classes, {student.wanted.sum(axis=1).mean():.2f} labels an image",
        machine,
        verdict,
        [_comparison_of_sets(teacher.figures, student.figures)],
        [
            PageSection("What the student misses", blocks or [Paragraph("Nothing.")]),
            _classes(both, classes, student.wanted.sum(axis=0), "average_precision"),
        ],
    )


def _page(
    both: Mapping[str, Measured | MeasuredSets],
    counted: str,
    machine: Machine,
    verdict: Mapping[str, Any],
    compared: Sequence[Block | None],
    errors: Sequence[Block | None],
) -> str:
    """Put the page together: how both compare, and where they err, stand before and after their latencies."""
    theirs, ours = (one.figures["title"] for one in both.values())
    return pages.render(
        f"Evaluation: the student {'passed' if verdict['passed'] else 'did not pass'}",
        f"{ours}; distilled from {theirs}; {counted}",
        [_verdict(verdict), *compared, _latencies(both, machine), *errors],
    )


def _verdict(verdict: Mapping[str, Any]) -> PageSection:
    """Show whether the student passed its gate, or why not."""
    passed: Block = Paragraph("Passed: every condition of the gate holds.", style="good")
    refused: list[Block] = [Paragraph("Not passed:", style="bad"), BulletList(verdict["reasons"])]
    return PageSection("Verdict", [passed] if verdict["passed"] else refused)


def _size_rows(one: Mapping[str, Any], other: Mapping[str, Any]) -> list[tuple[str, ...]]:
    """Return the rows of a table that compare the sizes of teacher and student."""
    sizes = {"parameters": "parameters", "multiply-accumulates an image": "macs", "bytes of weights": "size_bytes"}
    return [
        (name, f"{one[key]:,}", f"{other[key]:,}", ratio(one[key], other[key], "smaller", "larger"))
        for name, key in sizes.items()
    ]


def _comparison(teacher: Measured, student: Measured, images: int) -> PageSection:
    one, other = teacher.figures, student.figures
    rows = [
        ("architecture", one["architecture"], other["architecture"], ""),
        ("test top-1", _interval(one, images), _interval(other, images), _points(one, other, "top1")),
        ("test top-5", f"{one['test']['top5']:.2%}", f"{other['test']['top5']:.2%}", _points(one, other, "top5")),
        ("agreement with the teacher", "", f"{other['test']['agreement']:.2%}", ""),
        ("expected calibration error", f"{one['test']['ece']:.4f}", f"{other['test']['ece']:.4f}", ""),
        ("the same without temperature", "", f"{other['test']['ece_uncalibrated']:.4f}", ""),
        *_size_rows(one, other),
    ]
    if "knn_top1" in other["test"]:
        theirs, ours = (f"{figures['test']['knn_top1']:.2%}" for figures in (one, other))
        rows.insert(3, ("k-NN top-1 of the embeddings", theirs, ours, _points(one, other, "knn_top1")))
    note = f"In brackets: the 95 % interval (Wilson) that {images:,} test images allow."
    if one.get("head"):
        note += f" The teacher has no head; its answers are those of a {one['head']} on its embeddings, fitted to training images."
    return PageSection("Teacher against student", [Table(["", "teacher", "student", ""], rows), Paragraph(note)])


def _comparison_of_sets(one: Mapping[str, Any], other: Mapping[str, Any]) -> PageSection:
    names = {"map": "test mAP (mean average precision)", "f1": "F1", "precision": "precision", "recall": "recall"}
    rows = [
        ("architecture", one["architecture"], other["architecture"], ""),
        *(
            (text, f"{one['test'][name]:.2%}", f"{other['test'][name]:.2%}", _points(one, other, name))
            for name, text in names.items()
        ),
        ("F1 against what the teacher names", "", f"{other['test']['agreement']:.2%}", ""),
        ("threshold", f"{one['threshold']:.3f}", f"{other['threshold']:.3f}", ""),
        *_size_rows(one, other),
    ]
    note = (
        "A class is named where its probability is above the threshold, which has the best F1 on the validation images; F1, precision and "
        f"recall count all decisions together. The student's logits are divided by the temperature {other['temperature']:.3f}, fitted to "
        "the validation images."
    )
    return PageSection("Teacher against student", [Table(["", "teacher", "student", ""], rows), Paragraph(note)])


def _interval(figures: Mapping[str, Any], images: int) -> str:
    top1 = figures["test"]["top1"]
    low, high = metrics.wilson_interval(top1, images)
    return f"{top1:.2%} ({low:.1%} to {high:.1%})"


def _points(teacher: Mapping[str, Any], student: Mapping[str, Any], name: str) -> str:
    """Format the difference of a figure of the test images in points."""
    return f"{100 * (student['test'][name] - teacher['test'][name]):+.2f} points"


def _levels(teacher: Measured, student: Measured, tags: ClassTags) -> PageSection:
    """Show how often the predicted class is below the right group, and what the student answers with its threshold."""
    accuracies = [model.figures["test"]["levels"] for model in (teacher, student)]
    answers = student.figures["test"].get("answers")
    rows = []
    for number, level in enumerate(tags.levels, start=1):
        first = ", ".join(map(isolated, level.names[:4])) + (", ..." if len(level.names) > 4 else "")
        named = "classes" if level is tags.levels[-1] else f"{len(level.names):,}: {first}"
        shares = [f"{accuracy[str(number)]:.2%}" for accuracy in accuracies]
        rows.append((number, named, *shares, *([f"{answers['named'][str(number)]:.1%}"] if answers else [])))
    headers = ["level", "names", "teacher", "student", *(["answers of the student"] if answers else [])]
    note = "How often the predicted class belongs to the right name of each level; a class that ends above a level stands for itself."
    return PageSection("Levels of the hierarchy", [Table(headers, rows), Paragraph(note), _answers(answers)])


def _answers(answers: Mapping[str, Any] | None) -> Paragraph | None:
    if answers is None:
        return None
    none = (
        f" In {answers['none']:.1%} of the images it is sure of none, and gives no answer." if answers["none"] else ""
    )
    return Paragraph(
        f"The student answers with the deepest name of which it is more than {answers['threshold']:.1%} sure.{none} That threshold was "
        f"chosen on the validation images, so that at most {answers['risk']:.1%} of all images get a wrong answer; of the test images "
        f"{answers['wrong']:.1%} do.",
        style="" if answers["wrong"] <= answers["risk"] else "bad",
    )


def _latencies(both: Mapping[str, Measured | MeasuredSets], machine: Machine) -> PageSection:
    rows = [
        (name, latency.batch_size, latency.p50_ms, latency.p95_ms, latency.images_per_second)
        for batch in zip(*(one.latencies for one in both.values()), strict=True)
        for name, latency in zip(both, batch, strict=True)
    ]
    note = (
        f"From raw images to logits on {machine.processor}, {machine.threads} threads, torch {machine.torch}; "
        "the models took turns, so that other work on the machine falls on both. Accuracy was measured in "
        f"{machine.precision} on {'this processor' if machine.device == 'cpu' else machine.device}."
    )
    headers = ["", "batch", "p50 (ms)", "p95 (ms)", "images a second"]
    return PageSection("Latency on the CPU", [Table(headers, rows), Paragraph(note)])


def _calibration(both: Mapping[str, Measured]) -> PageSection:
    drawn, legend = [], []
    for series, (name, measured) in enumerate(both.items()):
        one = measured.calibration
        drawn.append(ReliabilityCurve(name=name, confidence=one.confidence, accuracy=one.accuracy, counts=one.counts))
        legend.append((f"g{series}", f"{name}, error {one.error:.3f}"))
    caption = "How often a prediction is right, by its confidence; above the dotted line the model is too modest, below it too sure"
    student = both["student"].figures
    fitted = Paragraph(
        f"Wherever the student is served, its logits are divided by the temperature {student['temperature']:.3f}, fitted to the validation "
        f"images (Guo et al. 2017). Its error on the test images is {student['test']['ece']:.4f} with it, and "
        f"{student['test']['ece_uncalibrated']:.4f} without."
    )
    return PageSection(
        "Calibration", [fitted, Legend(legend), Figure(charts.reliability(drawn, "Calibration"), caption)]
    )


def _confusions(student: Measured, classes: Sequence[str], examples: Sequence[Example]) -> PageSection:
    blocks: list[Block] = []
    images_of_class = student.matrix.sum(axis=1)
    for found, images in examples:
        truth, predicted = isolated(classes[found.truth]), isolated(classes[found.predicted])
        of_class = int(images_of_class[found.truth])
        caption = f"{truth} taken for {predicted}: {found.count} of its {of_class} test images"
        blocks.append(Photo(strip(images), caption))
    if not blocks:
        blocks.append(Paragraph("No test image was taken for another class."))
    title = "What the student confuses"
    if len(classes) > charts.MOST_CONFUSED_CLASSES:
        rows = [
            (classes[pair.truth], classes[pair.predicted], pair.count, int(images_of_class[pair.truth]))
            for pair in metrics.worst_confusions(student.matrix, _PAIRS)
        ]
        listed = Table(["class", "taken for", "test images", "of the class"], rows)
        return PageSection(title, [*blocks, Paragraph(f"The {len(rows)} most frequent confusions:"), listed])
    caption = "Rows: the class; columns: what the student took it for."
    if student.matrix.nnz > charts.MOST_CELLS:
        caption += f" The {charts.MOST_CELLS:,} largest shares are drawn."
    chart = charts.confusion(student.matrix.toarray(), classes, "Confusion matrix of the student")
    return PageSection(title, [*blocks, Figure(chart, caption)])


def _label_issues(judged: JudgedLabels, teacher: Measured, classes: Sequence[str]) -> PageSection:
    photos = [
        Photo(
            strip(one.split.read([one.index]).numpy()),
            f"{isolated(classes[one.label])}, or {isolated(classes[one.suggested])} ({one.confidence:.0%})? "
            f"{one.split.name}, {limits.cut(one.split.sources[one.index], _NAME)}",
        )
        for one in judged.issues[:_ISSUES]
    ]
    rows = [
        (split, count.judged, count.contradicted, f"{count.contradicted / max(count.judged, 1):.1%}")
        for split, count in judged.counts.items()
    ]
    contradicted = sum(count.contradicted for count in judged.counts.values())
    which = "All" if contradicted == len(judged.issues) else f"The worst {len(judged.issues):,}"
    text = (
        "These labels may be wrong: the teacher gives another class at least the probability that images of that class get on average "
        "(confident learning). Many are right all the same, so look at them. The worst come first: the label, and what the teacher says. "
        f"{which} are in label_issues.csv."
    )
    by_heart = (
        "The teacher was trained on the labels of train, so those that it has learned by heart, though wrong, are not contradicted."
        if "train" in judged.counts and not teacher.figures.get("head")
        else ""
    )
    table = Table(["split", "labels", "contradicted", "share"], rows)
    return PageSection(
        "Labels that the teacher contradicts",
        [Paragraph(text), table, Paragraph(by_heart) if by_heart else None, PhotoGrid(photos)],
    )


def strip(images: npt.NDArray[np.uint8], edge: int = 96) -> bytes:
    """Put images [B, 3, S, S] side by side, scaled to one edge in pixels, as a PNG file."""
    sharp = Image.Resampling.NEAREST if images.shape[-1] < edge else Image.Resampling.LANCZOS
    gap = 4
    size = (len(images) * (edge + gap) - gap, edge)
    picture = Image.new("RGBA", size, (255, 255, 255, 0))  # a gap shows the page's own color
    for position, pixels in enumerate(images):
        tile = Image.fromarray(pixels.transpose(1, 2, 0)).resize((edge, edge), sharp)
        picture.paste(tile, (position * (edge + gap), 0))
    buffer = io.BytesIO()
    picture.save(buffer, "PNG", optimize=True)
    return buffer.getvalue()


def _classes(
    both: Mapping[str, Measured | MeasuredSets], classes: Sequence[str], images: npt.NDArray[Any], drawn: str
) -> PageSection:
    """Compare the shares of each class; the one that is drawn says what the worst classes are."""
    shares = {name: one.shares for name, one in both.items()}
    columns = {f"{name} {share}": values for name, known in shares.items() for share, values in known.items()}
    rows = []
    for index in np.argsort(shares["student"][drawn], kind="stable")[:_ROWS]:
        shown = ["-" if np.isnan(values[index]) else f"{values[index]:.1%}" for values in columns.values()]
        rows.append((classes[index], int(images[index]), *shown))
    figure = drawn.replace("_", " ")
    chart = charts.recalls(
        {name: known[drawn] for name, known in shares.items()},
        classes,
        f"{figure.capitalize()} of each class",
        figure=figure,
    )
    headers = ["class", "test images", *(name.replace("_", " ") for name in columns)]
    return PageSection(
        "Classes",
        [
            Legend([("g0", "teacher"), ("g1", "student")]),
            Figure(chart, f"{figure.capitalize()}, the student's worst classes first"),
            Table(headers, rows),
            Paragraph(f"The worst {len(rows):,} of {len(classes):,} classes; metrics.json has all.")
            if len(rows) < len(classes)
            else None,
        ],
    )
