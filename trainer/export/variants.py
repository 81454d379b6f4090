"""The ways to serve a student, measured beside one another on this machine, and the fastest that passes.

Shapes: N images, S the edge of a square, K classes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from trainer.data.dataset import Split
from trainer.errors import ModelError
from trainer.evaluation import metrics
from trainer.evaluation.metrics import Latency
from trainer.export.onnx_student import Logits, OnnxStudent, Pixels
from trainer.models import Classifier
from trainer.served_student.onnx_network import ONNX_RUNTIME
from trainer.summary import aligned

FLOAT = "fp32"
"""The candidate that must give the student's own logits."""
TOLERANCE = 1e-3
"""Largest difference of its logits, absolute and relative to the logit."""
ALIKE = 0.05
"""Share by which times differ from one measurement to the next."""
_BATCH = 64


@dataclass(frozen=True, kw_only=True)
class ServingCandidate:
    """A way to serve the student."""

    name: str
    size_bytes: int
    top1: float
    """Share of the test photos."""
    same: float
    """Share of the test photos with the student's own first class."""
    difference: float
    """Largest difference of a logit from the student's own."""
    shift: float
    """Total variation distance of its probabilities from the student's own: half the sum of the differences, in the mean."""
    latencies: Sequence[Latency]
    reasons: Sequence[str] = ()
    """Why it is not to be chosen; empty where it passes."""
    runtime: str = ONNX_RUNTIME
    """Which computes it."""


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
        logits: Logits = model(torch.from_numpy(images).permute(0, 3, 1, 2)).numpy()
        return logits

    return answer


def shift(own: Logits, found: Logits, temperature: float) -> float:
    """Return the total variation distance of the probabilities of `found` from those of `own`, in the mean over N images, [N, K] each."""
    probabilities = [metrics.probabilities(logits / temperature) for logits in (own, found)]
    return float(np.abs(probabilities[1] - probabilities[0]).sum(axis=1).mean() / 2)


def check_float(own: Logits, exported: Logits, names: Sequence[str]) -> None:
    """Make sure that the exported student answers as the student itself: the same first class everywhere, logits within `TOLERANCE`.

    Args:
        own: logits of images, [N, K], and those of the exported student.
        names: of these images.

    Raises:
        ModelError: it does not; names the worst photo.
    """
    far = np.abs(exported - own) - (TOLERANCE + TOLERANCE * np.abs(own))
    other = own.argmax(axis=1) != exported.argmax(axis=1)
    worst = int(np.where(other, np.inf, far.max(axis=1)).argmax())
    if other.any() or far.max() > 0:
        raise ModelError(
            f"the exported student differs from the student: {int(other.sum())} of {len(own)} test photos get another class, and logits "
            f"differ by up to {np.abs(exported - own).max():.2g} where {TOLERANCE:g} is allowed, most for image {names[worst]}; "
            "this is an error of the export, so serve the registered student"
        )


def measure(
    logits: Mapping[str, Logits],
    students: Mapping[str, OnnxStudent],
    model: Classifier,
    size_bytes: int,
    split: Split,
    indices: Sequence[int],
    *,
    temperature: float,
    batch_sizes: Sequence[int],
    runs: int,
) -> list[ServingCandidate]:
    """Measure the student itself (`torch`) and its exported variants on images of the test split, all in turns.

    Args:
        logits: what each says of N images of the split, [N, K], those at `indices`.
        model: the student, on the CPU, and `size_bytes` of its weights.
        temperature: by which logits are divided for probabilities.
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
            top1=metrics.top_k(found, split.labels[indices], 1),
            same=metrics.agreement(found, own),
            difference=float(np.abs(found - own).max()),
            shift=shift(own, found, temperature),
            latencies=timed[name],
            runtime=students[name].runtime if name in students else "torch",
        )
        for name, found in logits.items()
    ]


def rows(candidates: Sequence[ServingCandidate], chosen: str | None) -> list[tuple[str, ...]]:
    """Return a heading and a row for each candidate, the chosen one marked."""
    sizes = [one.batch_size for one in candidates[0].latencies]
    return [
        ("", "test top-1", "same class", "shift", "MB", *(f"p50, p95 ms at {size}" for size in sizes), ""),
        *(
            (
                one.name,
                f"{one.top1:.2%}",
                f"{one.same:.2%}",
                f"{one.shift:.2%}",
                f"{one.size_bytes / 1e6:.1f}",
                *(f"{timed.p50_ms:.2f}, {timed.p95_ms:.2f}" for timed in one.latencies),
                "chosen" if one.name == chosen else "",
            )
            for one in candidates
        ),
    ]


def refusals(candidates: Sequence[ServingCandidate]) -> list[str]:
    """Say why candidates other than the student itself, which is the first one, do not pass."""
    return [f"{one.name}: {reason}" for one in candidates[1:] for reason in one.reasons]


def table(candidates: Sequence[ServingCandidate], chosen: str | None) -> list[str]:
    """Format the candidates as lines, and below why others do not pass."""
    cells = rows(candidates, chosen)
    refused = [f"  - {text}" for text in refusals(candidates)]
    return [*aligned(cells, right=range(1, len(cells[0]) - 1)), *refused]


def figures(one: ServingCandidate) -> dict[str, float]:
    """Return the main numbers of a candidate, its times at the first batch size."""
    first = one.latencies[0]
    return {
        "top1": one.top1,
        "same": one.same,
        "shift": one.shift,
        "size_bytes": one.size_bytes,
        "p50_ms": first.p50_ms,
        "p95_ms": first.p95_ms,
    }


def fastest(candidates: Sequence[ServingCandidate]) -> ServingCandidate | None:
    """Choose among those that pass the one with the least median time at the first batch size; None where none passes.

    Of those that take no longer than that but for `ALIKE`, the one with the smallest shift.
    """
    passing = [one for one in candidates if not one.reasons]
    least = min((one.latencies[0].p50_ms for one in passing), default=0.0)
    alike = [one for one in passing if one.latencies[0].p50_ms <= (1 + ALIKE) * least]
    return min(alike, key=lambda one: (one.shift, one.latencies[0].p50_ms), default=None)
