"""The ways to serve a student, measured beside one another on this machine, and the fastest that passes.

Shapes: N images, S the edge of a square, K classes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from trainer.data.dataset import Split, Targets
from trainer.devices import full_float32
from trainer.evaluation import metrics
from trainer.evaluation.metrics import Latency, Machine, f1, mean_average_precision
from trainer.io.errors import ModelError
from trainer.io.formatting import aligned
from trainer.models.networks import Classifier
from trainer.models.onnx_student import Logits, OnnxStudent, Pixels
from trainer.models.served_student.onnx_network import ONNX_RUNTIME
from trainer.models.served_student.student import to_probabilities
from trainer.report import pages, provenance
from trainer.report.pages import BulletList, PageSection, Paragraph, Table
from trainer.report.scores import TITLES

FLOAT = "fp32"  # the candidate that must give the student's own logits
TOLERANCE = 1e-3  # largest difference of its logits, absolute and relative to the logit
ALIKE = 0.05  # share by which times differ from one measurement to the next
_BATCH = 64


@dataclass(frozen=True, kw_only=True)
class FinalFigures:
    """What the test images show of a candidate after the choice: nothing is chosen by them."""

    score: float
    same: float  # see `ServingCandidate.same`
    shift: float  # see `ServingCandidate.shift`


@dataclass(frozen=True, kw_only=True)
class ServingCandidate:
    """A way to serve the student, as the validation images show it."""

    name: str
    size_bytes: int
    measure: str  # name of its score (`scores.TITLES`)
    score: float  # on the validation images
    same: float
    """Share of the images with the student's own first class; F1 against what it names where images may have several."""
    difference: float  # largest difference of a logit from the student's own
    shift: float
    """Total variation distance of its probabilities from the student's own: half the sum of the differences, in the mean over the images;
    where images may have several classes the largest difference of a class's."""
    latencies: Sequence[Latency]
    reasons: Sequence[str] = ()  # why it does not pass; empty if it passes
    runtime: str = ONNX_RUNTIME  # the runtime that computes it
    test: FinalFigures | None = None  # of the student itself and of the chosen variant; None for others


def squares(split: Split, indices: Sequence[int]) -> Pixels:
    """Read squares of a split as the graph takes them: uint8 [N, S, S, 3]."""
    images: Pixels = np.ascontiguousarray(split.read(indices).permute(0, 2, 3, 1).numpy())
    return images


def predict(answer: Callable[[Pixels], Logits], split: Split, indices: Sequence[int]) -> Logits:
    """Compute the logits of N images of a split, [N, K]."""
    parts = (indices[start : start + _BATCH] for start in range(0, len(indices), _BATCH))
    return np.concatenate([answer(squares(split, part)) for part in parts])


def answering(model: Classifier) -> Callable[[Pixels], Logits]:
    """Let a model on the CPU answer as its graph does."""

    @torch.inference_mode()
    def answer(images: Pixels) -> Logits:
        with full_float32():
            logits: Logits = model(torch.from_numpy(images).permute(0, 3, 1, 2)).numpy()
        return logits

    return answer


@dataclass(frozen=True, kw_only=True)
class Scoring:
    """What answers on N images of a split are measured by; answers are logits, [N, K]."""

    labels: npt.NDArray[np.int64]  # index of each image's class, or of its set of classes, [N]
    temperature: float  # divisor of the logits
    targets: Targets | None = None
    """`PreparedDataset.targets`: where images may have several labels each class is judged by itself."""
    threshold: float = 0.5  # probability above which a class is named

    @property
    def measure(self) -> str:
        """Name of the score."""
        return "top1" if self.targets is None else "map"

    def probabilities(self, logits: Logits) -> npt.NDArray[np.float64]:
        """Compute the probability of each class, [N, K]."""
        return to_probabilities(logits / self.temperature, by_class=self.targets is not None)

    def score(self, logits: Logits) -> float:
        """Compute top-1 accuracy, or mAP."""
        if self.targets is None:
            return metrics.top_k(logits, self.labels, 1)
        return mean_average_precision(logits, self.targets[self.labels])

    def same(self, logits: Logits, own: Logits) -> float:
        """Compute how much of what is answered is the same: the share of the first classes, or F1 between what is named."""
        if self.targets is None:
            return metrics.agreement(logits, own)
        named, before = (self.probabilities(one) > self.threshold for one in (logits, own))
        return f1(named, before)

    def shift(self, own: Logits, found: Logits) -> float:
        """Compute the total variation distance of the probabilities, as `ServingCandidate.shift`."""
        apart = np.abs(self.probabilities(found) - self.probabilities(own))
        return float((apart.sum(axis=1) / 2 if self.targets is None else apart.max(axis=1)).mean())


def check_float(own: Logits, exported: Logits, names: Sequence[str]) -> None:
    """Make sure that the exported student's logits equal its `own` logits [N, K] within `TOLERANCE`; a `ModelError` names an image.

    The classes are then equal too, except for images whose first two logits, or a probability and the threshold, are nearer than that.
    """
    far = (np.abs(exported - own) - (TOLERANCE + TOLERANCE * np.abs(own))).max(axis=1)
    worst = int(far.argmax())
    if far[worst] > 0:
        raise ModelError(
            f"the exported student differs from the student: logits of {int((far > 0).sum())} of {len(own)} images differ by more than "
            f"{TOLERANCE:g}, the largest by {np.abs(exported - own).max():.2g}, most for image {names[worst]}; this is an error of the "
            "export, so serve the registered student"
        )


def measure(
    logits: Mapping[str, Logits],
    students: Mapping[str, OnnxStudent],
    model: Classifier,
    size_bytes: int,
    split: Split,
    indices: Sequence[int],
    *,
    yardstick: Scoring,
    batch_sizes: Sequence[int],
    runs: int,
) -> list[ServingCandidate]:
    """Measure the student itself (`torch`) and its exported variants on images of a split, all in turns.

    Args:
        logits: what each says of N images of the split, [N, K], those at `indices`.
        model: the student, on the CPU, and `size_bytes` of its weights.
        yardstick: what they are measured by.
    """
    own = logits["torch"]
    sizes = {"torch": size_bytes, **{name: student.file.stat().st_size for name, student in students.items()}}

    def timed_alike(student: OnnxStudent) -> Callable[[Tensor], Logits]:
        return lambda images: student.logits(images.permute(0, 2, 3, 1).numpy())

    timed = metrics.measure_latency(
        {"torch": model, **{name: timed_alike(student) for name, student in students.items()}},
        split.read(indices[: max(batch_sizes)]),
        batch_sizes=batch_sizes,
        runs=runs,
    )
    return [
        ServingCandidate(
            name=name,
            size_bytes=sizes[name],
            measure=yardstick.measure,
            score=yardstick.score(found),
            same=yardstick.same(found, own),
            difference=float(np.abs(found - own).max()),
            shift=yardstick.shift(own, found),
            latencies=timed[name],
            runtime=students[name].runtime if name in students else "torch",
        )
        for name, found in logits.items()
    ]


def rows(candidates: Sequence[ServingCandidate], chosen: str | None) -> list[tuple[str, ...]]:
    """Return a heading and a row for each candidate, the chosen one marked."""
    sizes = [one.batch_size for one in candidates[0].latencies]
    return [
        (
            "",
            f"val {TITLES[candidates[0].measure]}",
            "same class" if candidates[0].measure == "top1" else "F1 of names",
            "shift",
            "MB",
            *(f"p50, p95 ms at {size}" for size in sizes),
            f"test {TITLES[candidates[0].measure]}",
            "",
        ),
        *(
            (
                one.name,
                f"{one.score:.2%}",
                f"{one.same:.2%}",
                f"{one.shift:.2%}",
                f"{one.size_bytes / 1e6:.1f}",
                *(f"{timed.p50_ms:.2f}, {timed.p95_ms:.2f}" for timed in one.latencies),
                f"{one.test.score:.2%}" if one.test else "",
                "chosen" if one.name == chosen else "",
            )
            for one in candidates
        ),
    ]


def refusals(candidates: Sequence[ServingCandidate]) -> list[str]:
    """Return why each candidate does not pass, except for the first, the student itself."""
    return [f"{one.name}: {reason}" for one in candidates[1:] for reason in one.reasons]


def table(candidates: Sequence[ServingCandidate], chosen: str | None) -> list[str]:
    """Format the candidates as lines, and below why others do not pass."""
    cells = rows(candidates, chosen)
    refused = [f"  - {text}" for text in refusals(candidates)]
    return [*aligned(cells, right=range(1, len(cells[0]) - 1)), *refused]


def page(
    title: str,
    candidates: Sequence[ServingCandidate],
    chosen: str | None,
    notes: Sequence[str],
    machine: Machine,
    *,
    images: Mapping[str, int],
) -> str:
    """Build the whole page, self-contained: the chosen variant, the measurements of each, and why others were not taken.

    Args:
        chosen: the name of a candidate; None where the student stays in torch.
        notes: why there is no variant, or none that passes.
        images: number of answered images of val and test.
    """
    heading, *cells = rows(candidates, chosen) if candidates else [()]
    alike = f" (of those within {ALIKE:.0%} of its time the one nearest to the student)"
    verdict = Paragraph(f"{chosen} is served: the fastest that passes{alike}." if chosen else "No ONNX file is served.")
    threads = "1 thread" if machine.threads == 1 else f"{machine.threads} threads"
    measured = Paragraph(
        f"Compared and chosen on {images['val']:,} validation images, and timed in turns on {machine.processor}, {threads}, from squares "
        "to logits. Shift: how much of the probability goes to other classes than the student itself gives it to. "
        f"After the choice, {images['test']:,} test images show the score of what was chosen.",
        "soft",
    )
    refused = refusals(candidates)
    return pages.render(
        f"Export: {chosen or 'the student stays in torch'}",
        title,
        [
            PageSection("Choice", [verdict, BulletList(notes) if notes else None]),
            PageSection("Variants", [Table(heading, cells), measured]) if candidates else None,
            PageSection("Why not", [BulletList(refused)]) if refused else None,
        ],
        facts=provenance.here(),
    )


def record(one: ServingCandidate) -> dict[str, Any]:
    """Return all that is known of a candidate, its scores as `val_top1` and `test.top1`, or those of mAP."""
    known = {name: value for name, value in asdict(one).items() if name not in ("measure", "score", "test")}
    return {**known, f"val_{one.measure}": one.score, **_tested(one)}


def figures(one: ServingCandidate) -> dict[str, Any]:
    """Return the main numbers of a candidate for `summary.json`, its times at the first batch size."""
    first = one.latencies[0]
    return {
        one.measure: one.score,
        "same": one.same,
        "shift": one.shift,
        "size_bytes": one.size_bytes,
        "p50_ms": first.p50_ms,
        "p95_ms": first.p95_ms,
        **_tested(one),
    }


def _tested(one: ServingCandidate) -> dict[str, Any]:
    final = one.test
    return {"test": {one.measure: final.score, "same": final.same, "shift": final.shift}} if final else {}


def fastest(candidates: Sequence[ServingCandidate]) -> ServingCandidate | None:
    """Choose among the passing variants the one with the smallest shift of those within `ALIKE` of the least median time, or None."""
    passing = [one for one in candidates if not one.reasons]
    least = min((one.latencies[0].p50_ms for one in passing), default=0.0)
    alike = [one for one in passing if one.latencies[0].p50_ms <= (1 + ALIKE) * least]
    return min(alike, key=lambda one: (one.shift, one.latencies[0].p50_ms), default=None)
