"""What an evaluation measured of teacher and student, and the page on it: the verdict, both beside one another, where the student errs.

Shapes: N test images, K classes.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt
from PIL import Image

from trainer.data.dataset import Split, Targets
from trainer.evaluation import metrics
from trainer.evaluation.label_issues import JudgedLabels
from trainer.evaluation.metrics import Answers, Calibration, ConfusionMatrix, Floats, Latency, Machine, Shares
from trainer.evaluation.slices import Slicing
from trainer.io import limits
from trainer.io.formatting import isolated, ratio
from trainer.models.served_student.class_tags import ClassTags
from trainer.report import charts, pages, provenance, scores
from trainer.report.charts import ReliabilityCurve, ScatterPoint
from trainer.report.pages import (
    Block,
    Details,
    Figure,
    Legend,
    PageSection,
    Paragraph,
    Photo,
    PhotoGrid,
    SideBySide,
    Subsection,
    Table,
    gate_table,
)

_ISSUES, _NAME = 24, 100  # labels that the page shows with pictures, and most characters of an image's name
_MISSED = 5  # test images of a class that the page shows
_OF_A_PAIR, _SUREST = 3, 12  # images of a confused pair of classes, and wrong answers, that the page shows
_TOP5_CLASSES = 20  # with fewer classes top-5 is close to 100 % for every model
_PAIRS = 100  # confused classes that are listed where the matrix is too large to draw
_ROWS = 1000  # classes that the page lists, the worst ones


@dataclass(frozen=True, kw_only=True)
class Measured:
    """The measurements of one model."""

    figures: dict[str, Any]  # its main numbers, as `summary.json` shows them
    answers: Answers  # to the test images
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


@dataclass(frozen=True, kw_only=True)
class EarlierRun:
    """Another run whose models were tested on the same data set."""

    name: str
    teacher: Mapping[str, Any]  # its figures
    student: Mapping[str, Any]
    cost: str = ""  # time and dollars of its distillation


def render(
    *,
    classes: Sequence[str],
    teacher: Measured,
    student: Measured,
    machine: Machine,
    verdict: Mapping[str, Any],
    split: Split,
    shown: int,
    bins: int,
    slicings: Sequence[Slicing] = (),
    earlier: Sequence[EarlierRun] = (),
    tags: ClassTags | None = None,
    judged: JudgedLabels | None = None,
    student_answers: Mapping[str, Answers] | None = None,
) -> str:
    """Build the whole page, self-contained.

    Args:
        split: the test images.
        shown: confused pairs of classes that are shown with images.
        bins: of the calibration.
        tags: the hierarchy by whose levels was measured, if there is one.
        student_answers: the student's answers to all images of some splits, for the doubtful labels.
    """
    images, both = len(split), {"teacher": teacher, "student": student}
    return _page(
        both,
        f"{images:,} test images, {len(classes)} classes",
        machine,
        verdict,
        [
            _comparison(teacher, student, classes),
            _earlier(both, earlier, images),
            _levels(teacher, student, tags) if tags is not None else None,
        ],
        [
            _calibration(both, bins),
            *_mistakes(both, classes, split, shown),
            _label_issues(judged, teacher, classes, student_answers or {}) if judged is not None else None,
            _classes(both, classes, student.matrix.sum(axis=1), "recall"),
            _slices(slicings),
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
    earlier: Sequence[EarlierRun] = (),
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
        [_comparison_of_sets(teacher.figures, student.figures), _earlier(both, earlier, len(split))],
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
        facts=provenance.here(),
    )


def _verdict(verdict: Mapping[str, Any]) -> PageSection:
    """Show each condition of the gate, and whether it holds."""
    passed = Paragraph("Passed: every condition of the gate holds.", style="good")
    refused = Paragraph("Not passed: the student is registered, but not promoted.", style="bad")
    return PageSection("Verdict", [passed if verdict["passed"] else refused, *gate_table(verdict)])


def _size_rows(one: Mapping[str, Any], other: Mapping[str, Any]) -> list[tuple[str, ...]]:
    """Return the rows of a table that compare the sizes of teacher and student."""
    sizes = {"parameters": "parameters", "multiply-accumulates an image": "macs", "bytes of weights": "size_bytes"}
    return [
        (name, f"{one[key]:,}", f"{other[key]:,}", ratio(one[key], other[key], "smaller", "larger"))
        for name, key in sizes.items()
    ]


def _comparison(teacher: Measured, student: Measured, classes: Sequence[str]) -> PageSection:
    one, other, images = teacher.figures, student.figures, len(student.answers.labels)
    errors = {
        "ece_equal_mass": "expected calibration error (bins of equal mass)",
        "nll": "negative log-likelihood (nats)",
    }
    rows = [
        ("architecture", one["architecture"], other["architecture"], ""),
        ("test top-1", _interval(one, images), _interval(other, images), _points(one, other, "top1")),
        ("agreement with the teacher", "", f"{other['test']['agreement']:.2%}", ""),
        *(
            (text, f"{one['test'][name]:.4f}", f"{other['test'][name]:.4f}", "lower is better")
            for name, text in errors.items()
        ),
        *_size_rows(one, other),
    ]
    more = {"top5": "test top-5"} if len(classes) > _TOP5_CLASSES else {}
    if "knn_top1" in other["test"]:
        more["knn_top1"] = "k-NN top-1 of the embeddings"
    for name, text in more.items():
        theirs, ours = (f"{figures['test'][name]:.2%}" for figures in (one, other))
        rows.insert(2, (text, theirs, ours, _points(one, other, name)))
    pair = metrics.paired_difference(teacher.answers.right, student.answers.right)
    likely = "more than chance explains" if pair.p_value < 0.05 else "no more than chance explains"
    tested = (
        f"The teacher alone is right on {pair.only_first:,} images, the student alone on {pair.only_second:,}: {likely} (McNemar's exact "
        f"test, p = {pair.p_value:.2g}). The student's top-1 differs from the teacher's by {100 * pair.gain:+.2f} points, 95 % interval "
        f"{100 * pair.low:+.2f} to {100 * pair.high:+.2f}."
    )
    note = f"In brackets: the 95 % interval (Wilson) that {images:,} test images allow."
    if one.get("head"):
        note += f" The teacher has no head; its answers are those of a {one['head']} on its embeddings, fitted to training images."
    table = Table(["", "teacher", "student", ""], rows)
    return PageSection("Teacher against student", [table, Paragraph(tested), Paragraph(note, "soft")])


def _earlier(
    both: Mapping[str, Measured | MeasuredSets], earlier: Sequence[EarlierRun], images: int
) -> PageSection | None:
    """Compare accuracy, size and latency with earlier runs of the same data; None without any."""
    if not earlier:
        return None
    this = EarlierRun(name="this run", teacher=both["teacher"].figures, student=both["student"].figures)
    rows, points = [], dict[str, list[ScatterPoint]]()
    axes: Mapping[str, Callable[[Mapping[str, Any]], float]] = {
        "latency of one photo on the CPU (ms)": lambda figures: figures["latency_ms"]["p50"],
        "million parameters": lambda figures: figures["parameters"] / 1e6,
    }

    def interval(share: float) -> tuple[float, float] | None:
        return None if scores.name(this.student["test"]) == "map" else metrics.wilson_interval(share, images)

    for run in (this, *earlier):
        score = scores.score(run.student["test"])
        within = interval(score)
        latency, size = (of(run.student) for of in axes.values())
        shown = f"{score:.2%}" + (f" ({within[0]:.1%} to {within[1]:.1%})" if within else "")
        rows.append((run.name, run.student["title"], shown, float(size), float(latency), run.cost))
        for series, figures in enumerate((run.teacher, run.student)):
            label = f"{run.name}, {('teacher', 'student')[series]} {figures['title']}"
            share = scores.score(figures["test"])
            for axis, of in axes.items():
                point = ScatterPoint(
                    label=label,
                    x=of(figures),
                    share=share,
                    interval=interval(share),
                    series=series,
                    is_main=run is this,
                )
                points.setdefault(axis, []).append(point)
    title = scores.title(this.student["test"])
    headers = ["run", "student", f"test {title}", "million parameters", "p50 (ms)", "distillation"]
    charts_of = [Figure(charts.scatter(drawn, axis, f"Accuracy against {axis}")) for axis, drawn in points.items()]
    return PageSection(
        "Earlier runs of the same data",
        [
            Legend([("g0", "teachers"), ("g1", "students")]),
            SideBySide(charts_of),
            Table(headers, rows),
            Paragraph(
                "Runs beside this run's directory whose data set has the same fingerprint. Earlier runs are pale. Their latencies were "
                "measured when they ran.",
                "soft",
            ),
        ],
    )


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


def _calibration(both: Mapping[str, Measured], bins: int) -> PageSection:
    drawn, legend = [], []
    for series, (name, measured) in enumerate(both.items()):
        one = metrics.equal_mass_calibration(measured.answers, bins)
        pairs = [(share or 0.0, count) for share, count in zip(one.accuracy, one.counts, strict=True)]
        drawn.append(
            ReliabilityCurve(
                name=name,
                confidence=[value or 0.0 for value in one.confidence],  # no bin is empty
                accuracy=[share for share, _ in pairs],
                intervals=[metrics.wilson_interval(share, count) for share, count in pairs],
                counts=one.counts,
            )
        )
        legend.append((f"g{series}", f"{name}, error {one.error:.3f}"))
    caption = (
        "How often a prediction is right, by its confidence, in bins of equally many images, with 95 % intervals (Wilson); above the "
        "dotted line the model is too modest, below it too sure"
    )
    student = both["student"].figures
    fitted = Paragraph(
        f"Wherever the student is served, its logits are divided by the temperature {student['temperature']:.3f}, fitted to the validation "
        f"images (Guo et al. 2017). In bins of equal width its error on the test images is {student['test']['ece']:.4f} with it, and "
        f"{student['test']['ece_uncalibrated']:.4f} without."
    )
    return PageSection(
        "Calibration", [fitted, Legend(legend), Figure(charts.reliability(drawn, "Calibration"), caption)]
    )


def _mistakes(
    both: Mapping[str, Measured], classes: Sequence[str], split: Split, shown: int
) -> tuple[PageSection, PageSection | None]:
    """Show which classes the student confuses, and the wrong answers of which it is surest."""
    student = both["student"]
    answers, images_of_class = student.answers, student.matrix.sum(axis=1)
    known = {name: one.answers for name, one in both.items()}
    cards = []
    for found in metrics.worst_confusions(student.matrix, shown):
        chosen = np.flatnonzero((answers.labels == found.truth) & (answers.predicted == found.predicted))
        truth, predicted = isolated(classes[found.truth]), isolated(classes[found.predicted])
        caption = f"{truth}, taken for {predicted} ({found.count} of its {int(images_of_class[found.truth])})"
        cards += [_card(split, index, caption, known, classes) for index in chosen[:_OF_A_PAIR].tolist()]
    blocks: list[Block] = (
        [PhotoGrid(cards, small=True)] if cards else [Paragraph("No test image was taken for another class.")]
    )
    if len(classes) > charts.MOST_CONFUSED_CLASSES:
        rows = [
            (classes[pair.truth], classes[pair.predicted], pair.count, int(images_of_class[pair.truth]))
            for pair in metrics.worst_confusions(student.matrix, _PAIRS)
        ]
        listed = Table(["class", "taken for", "test images", "of the class"], rows)
        blocks += [Paragraph(f"The {len(rows)} most frequent confusions:"), listed]
    else:
        caption = "Rows: the class; columns: what the student took it for."
        if student.matrix.nnz > charts.MOST_CELLS:
            caption += f" The {charts.MOST_CELLS:,} largest shares are drawn."
        chart = charts.confusion(student.matrix.toarray(), classes, "Confusion matrix of the student")
        blocks.append(Figure(chart, caption))
    wrong = np.flatnonzero(~answers.right)
    surest = wrong[np.argsort(-answers.confidence[wrong], kind="stable")[:_SUREST]].tolist()
    grid = PhotoGrid(
        [_card(split, index, isolated(classes[answers.labels[index]]), known, classes) for index in surest], True
    )
    text = f"Of {len(wrong):,} wrong answers to {len(answers.labels):,} test images the most probable; below each image its label."
    return (
        PageSection("What the student confuses", blocks),
        PageSection("Surest mistakes", [Paragraph(text), grid]) if surest else None,
    )


def _card(
    split: Split,
    index: int,
    caption: str,
    answers: Mapping[str, Answers],
    classes: Sequence[str],
    *more: tuple[str, str, str],
) -> Photo:
    """Show an image with its label and the answers of some models to all images of its split."""
    lines = [
        (
            name,
            f"{isolated(classes[one.predicted[index]])}  {one.confidence[index]:.0%}",
            "good" if one.right[index] else "bad",
        )
        for name, one in answers.items()
    ]
    return Photo(strip(split.read([index]).numpy()), caption, answers=(*more, *lines))


def _label_issues(
    judged: JudgedLabels, teacher: Measured, classes: Sequence[str], student_answers: Mapping[str, Answers]
) -> PageSection:
    photos = []
    for one in judged.issues[:_ISSUES]:
        answers = {"student": student_answers[one.split.name]} if one.split.name in student_answers else {}
        lines = (
            ("label", f"{isolated(classes[one.label])}  {one.label_confidence:.0%}", ""),
            ("teacher", f"{isolated(classes[one.suggested])}  {one.confidence:.0%}", ""),
        )
        source = f"{one.split.name}, {limits.cut(one.split.sources[one.index], _NAME)}"
        photos.append(_card(one.split, one.index, source, answers, classes, *lines))
    rows = [
        (split, count.judged, count.contradicted, f"{count.contradicted / max(count.judged, 1):.1%}")
        for split, count in judged.counts.items()
    ]
    contradicted = sum(count.contradicted for count in judged.counts.values())
    which = "All" if contradicted == len(judged.issues) else f"The worst {len(judged.issues):,}"
    text = (
        "These labels may be wrong: the teacher gives another class at least the probability that images of that class get on average "
        "(confident learning). Many are right all the same, so look at them. The worst come first, each with the teacher's probability of "
        f"its label and of the other class. {which} are in label_issues.csv."
    )
    by_heart = (
        "The teacher was trained on the labels of train, so those that it has learned by heart, though wrong, are not contradicted."
        if "train" in judged.counts and not teacher.figures.get("head")
        else ""
    )
    table = Table(["split", "labels", "contradicted", "share"], rows)
    return PageSection(
        "Labels that the teacher contradicts",
        [
            Paragraph(text),
            table,
            Paragraph(by_heart) if by_heart else None,
            PhotoGrid(photos, small=True) if photos else None,
        ],
    )


def _slices(slicings: Sequence[Slicing]) -> PageSection:
    """Show the groups of images by which the student's mistakes differ."""
    blocks = list[Block]()
    for slicing in slicings:
        rows = []
        for one in slicing.groups:
            share = one.student / one.images
            low, high = metrics.wilson_interval(share, one.images)
            shown = f"{share:.1%} ({low:.1%} to {high:.1%})"
            rows.append((one.name, one.images, f"{one.teacher / one.images:.1%}", shown))
        table = Table([slicing.title, "test images", "teacher", "student (95 % interval)"], rows)
        blocks.append(Subsection(f"By {slicing.title}", [table, Paragraph(f"p = {slicing.p_value:.2g}", "soft")]))
    tried = "Folder, original size and brightness of the test images were tested within the classes, corrected for their number (p < 0.05)."
    found = (
        "The student's mistakes differ more than chance explains:"
        if blocks
        else "No group of images has more mistakes than chance explains."
    )
    return PageSection("Groups of images", [Paragraph(found), *blocks, Paragraph(tried, "soft")])


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
    shares, counts = {name: one.shares for name, one in both.items()}, images.astype(int).tolist()
    columns = {f"{name} {share}": values for name, known in shares.items() for share, values in known.items()}
    order = np.argsort(shares["student"][drawn], kind="stable")[:_ROWS].tolist()
    intervals = {}
    if drawn == "recall":  # a share of images, which an average precision is not
        worst = [index for index in order[: charts.WORST_CLASSES] if counts[index]]
        intervals = {index: metrics.wilson_interval(shares["student"][drawn][index], counts[index]) for index in worst}
    rows = []
    for index in order:
        shown = {name: "-" if np.isnan(values[index]) else f"{values[index]:.1%}" for name, values in columns.items()}
        if index in intervals:
            low, high = intervals[index]
            shown[f"student {drawn}"] += f" ({low:.0%} to {high:.0%})"
        rows.append((classes[index], counts[index], *shown.values()))
    figure = drawn.replace("_", " ")
    chart = charts.recalls(
        {name: known[drawn] for name, known in shares.items()},
        classes,
        f"{figure.capitalize()} of each class",
        figure=figure,
        intervals=intervals,
    )
    headers = ["class", "test images", *(name.replace("_", " ") for name in columns)]
    worst_rows, others = rows[: charts.WORST_CLASSES], rows[charts.WORST_CLASSES :]
    caption = f"{figure.capitalize()}, the student's worst classes first" + (
        ", with 95 % intervals (Wilson)" if intervals else ""
    )
    return PageSection(
        "Classes",
        [
            Legend([("g0", "teacher"), ("g1", "student")]),
            Figure(chart, caption),
            Table(headers, worst_rows),
            Details(f"{len(others):,} more classes", [Table(headers, others)]) if others else None,
            Paragraph(f"The worst {len(rows):,} of {len(classes):,} classes; metrics.json has all.")
            if len(rows) < len(classes)
            else None,
        ],
    )
