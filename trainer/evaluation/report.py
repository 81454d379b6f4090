"""The page on an evaluation: the verdict, teacher against student, and where the student errs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from trainer import html, summary
from trainer.evaluation import metrics, plots
from trainer.evaluation.latency import Latency, Machine
from trainer.evaluation.metrics import Calibration, Confusion, Ints


@dataclass(frozen=True, kw_only=True)
class Measured:
    """What was measured of one model."""

    figures: Mapping[str, Any]
    """Its main numbers, as `summary.json` shows them."""
    matrix: Ints
    """Confusion matrix [K, K], rows are the truth."""
    calibration: Calibration
    latencies: Sequence[Latency]


@dataclass(frozen=True, kw_only=True)
class Example:
    """A confusion and images that show it."""

    confusion: Confusion
    images: npt.NDArray[np.uint8]
    """Test images of the one class taken for the other, [B, 3, S, S]."""


def render(
    *,
    classes: Sequence[str],
    teacher: Measured,
    student: Measured,
    machine: Machine,
    verdict: Mapping[str, Any],
    examples: Sequence[Example],
) -> str:
    """The whole page, self-contained."""
    outcome = "passed" if verdict["passed"] else "did not pass"
    images = int(teacher.matrix.sum())
    both = {"teacher": teacher, "student": student}
    return html.page(
        f"Evaluation: the student {outcome}",
        f"{student.figures['architecture']} distilled from {teacher.figures['architecture']}, "
        f"{images:,} test images, {len(classes)} classes",
        [
            _verdict(verdict),
            _comparison(teacher, student, images),
            _latency(both, machine),
            _calibration(both),
            _confusions(student, classes, examples),
            _classes(both, classes),
        ],
    )


def _verdict(verdict: Mapping[str, Any]) -> str:
    if verdict["passed"]:
        return html.section("Verdict", '<p class="good">Passed: every condition of the gate holds.</p>')
    reasons = "".join(f"<li>{html.escape(reason)}</li>" for reason in verdict["reasons"])
    return html.section("Verdict", f'<p class="bad">Not passed:</p><ul>{reasons}</ul>')


def _comparison(teacher: Measured, student: Measured, images: int) -> str:
    one, other = teacher.figures, student.figures
    rows = [
        ("architecture", one["architecture"], other["architecture"], ""),
        ("test top-1", _interval(one, images), _interval(other, images), _points(one, other, "top1")),
        ("test top-5", f"{one['test']['top5']:.2%}", f"{other['test']['top5']:.2%}", _points(one, other, "top5")),
        ("agreement with the teacher", "", f"{other['test']['agreement']:.2%}", ""),
        ("expected calibration error", f"{one['test']['ece']:.4f}", f"{other['test']['ece']:.4f}", ""),
        *(
            (name, f"{one[key]:,}", f"{other[key]:,}", summary.ratio(one[key], other[key], "smaller", "larger"))
            for name, key in _SIZES.items()
        ),
    ]
    note = f"In brackets: the 95 % interval (Wilson) that {images:,} test images allow."
    return html.section(
        "Teacher against student", html.table(["", "teacher", "student", ""], rows), html.paragraph(note)
    )


_SIZES = {"parameters": "parameters", "multiply-accumulates an image": "macs", "bytes of weights": "size_bytes"}


def _interval(figures: Mapping[str, Any], images: int) -> str:
    top1 = figures["test"]["top1"]
    low, high = metrics.wilson_interval(top1, images)
    return f"{top1:.2%} ({low:.1%} to {high:.1%})"


def _points(teacher: Mapping[str, Any], student: Mapping[str, Any], name: str) -> str:
    return f"{100 * (student['test'][name] - teacher['test'][name]):+.2f} points"


def _latency(both: Mapping[str, Measured], machine: Machine) -> str:
    rows = [
        (name, latency.batch_size, latency.p50_ms, latency.p95_ms, latency.images_per_second)
        for batch in zip(*(measured.latencies for measured in both.values()), strict=True)
        for name, latency in zip(both, batch, strict=True)
    ]
    note = (
        f"From raw images to logits on {machine.processor}, {machine.threads} threads, torch {machine.torch}; "
        "the models took turns, so that other work on the machine falls on both."
    )
    headers = ["", "batch", "p50 (ms)", "p95 (ms)", "images a second"]
    return html.section("Latency on the CPU", html.table(headers, rows), html.paragraph(note))


def _calibration(both: Mapping[str, Measured]) -> str:
    picture = plots.reliability({name: measured.calibration for name, measured in both.items()})
    caption = "How often a prediction is right, by its confidence; above the dotted line the model is too modest, below it too sure"
    return html.section("Calibration", html.picture(picture, caption))


def _confusions(student: Measured, classes: Sequence[str], examples: Sequence[Example]) -> str:
    pictures = []
    for example in examples:
        truth, predicted = classes[example.confusion.truth], classes[example.confusion.predicted]
        of_class = int(student.matrix[example.confusion.truth].sum())
        caption = f"{truth} taken for {predicted}: {example.confusion.count} of its {of_class} test images"
        pictures.append(html.picture(plots.strip(example.images), caption))
    if not pictures:
        pictures.append(html.paragraph("No test image was taken for another class."))
    matrix = html.picture(
        plots.confusion(student.matrix, classes), "Rows: the class; columns: what the student took it for"
    )
    return html.section("What the student confuses", *pictures, matrix)


def _classes(both: Mapping[str, Measured], classes: Sequence[str]) -> str:
    precision = {name: metrics.precision(measured.matrix) for name, measured in both.items()}
    recall = {name: metrics.recall(measured.matrix) for name, measured in both.items()}
    images = both["student"].matrix.sum(axis=1)
    rows = [
        (
            classes[index],
            int(images[index]),
            *(_share(values[name][index]) for name in both for values in (precision, recall)),
        )
        for index in np.argsort(recall["student"], kind="stable")
    ]
    headers = ["class", "test images", *(f"{name} {figure}" for name in both for figure in ("precision", "recall"))]
    picture = html.picture(plots.recalls(recall, classes), "Recall, the student's worst classes first")
    return html.section("Classes", picture, html.table(headers, rows))


def _share(value: float) -> str:
    return "-" if np.isnan(value) else f"{value:.1%}"
