"""The pictures of an evaluation, as PNG.

Shapes: K classes.
"""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from PIL import Image

from trainer.evaluation.metrics import Calibration, Ints

_COLORS = ("#8a94a6", "#2563eb")  # teacher, student: told apart in grey print too
_CELLS_WITH_NUMBERS = 25
_CLASSES_WITH_NAMES = 100
_NAME_LENGTH = 24


def confusion(matrix: Ints, labels: Sequence[str]) -> bytes:
    """The confusion matrix as shares of each row, with counts where they are readable.

    Args:
        matrix: counts [K, K], rows are the truth.
        labels: name of each class.
    """
    classes = len(labels)
    edge = float(np.clip(0.32 * classes + 2.2, 4.5, 15))
    figure = Figure(figsize=(edge, edge), layout="constrained")
    axes = figure.add_subplot()
    shares = matrix / np.maximum(matrix.sum(axis=1, keepdims=True), 1)
    image = axes.imshow(shares, cmap="Blues", vmin=0, vmax=1, interpolation="nearest")
    figure.colorbar(image, ax=axes, shrink=0.6, label="share of the class")
    axes.set(xlabel="taken for", ylabel="class")
    if classes <= _CLASSES_WITH_NAMES:
        names, size = [_short(label) for label in labels], 9 if classes <= 40 else 6.5
        axes.set_xticks(range(classes), names, rotation=90, fontsize=size, parse_math=False)
        axes.set_yticks(range(classes), names, fontsize=size, parse_math=False)
    if classes <= _CELLS_WITH_NUMBERS:
        for row, column in np.argwhere(matrix > 0):
            color = "white" if shares[row, column] > 0.5 else "black"
            axes.text(column, row, str(matrix[row, column]), ha="center", va="center", fontsize=8, color=color)
    return _png(figure)


def _short(label: str) -> str:
    return label if len(label) <= _NAME_LENGTH else f"{label[: _NAME_LENGTH - 1]}…"


def reliability(calibrations: Mapping[str, Calibration]) -> bytes:
    """Accuracy against confidence for each model, above the number of images in each bin."""
    figure = Figure(figsize=(6.5, 5.5), layout="constrained")
    upper, lower = figure.subplots(2, 1, sharex=True, height_ratios=[3, 1])
    upper.plot([0, 1], [0, 1], color="#5b6677", linestyle=":", label="calibrated")
    for (name, calibration), color in zip(calibrations.items(), _COLORS, strict=False):
        bins = [
            (confidence, accuracy)
            for confidence, accuracy in zip(calibration.confidence, calibration.accuracy, strict=True)
            if confidence is not None and accuracy is not None
        ]
        upper.plot(*zip(*bins, strict=True), "o-", color=color, label=f"{name}, error {calibration.error:.3f}")
        edges = np.linspace(0, 1, len(calibration.counts) + 1)
        lower.stairs(calibration.counts, edges, color=color, linewidth=1.5)
    upper.set(ylabel="accuracy", xlim=(0, 1), ylim=(0, 1.02))
    upper.legend(loc="lower left", bbox_to_anchor=(0, 1), ncols=3, frameon=False)  # above, clear of any curve
    lower.set(xlabel="confidence", ylabel="images")
    return _png(figure)


def recalls(by_model: Mapping[str, npt.NDArray[np.float64]], labels: Sequence[str]) -> bytes:
    """Recall of each class for each model, the student's worst classes first; at most `_CLASSES_WITH_NAMES` classes.

    Args:
        by_model: name -> recall [K], NaN for a class without images; the last one gives the order.
        labels: name of each class.
    """
    order = np.argsort(list(by_model.values())[-1], kind="stable")[:_CLASSES_WITH_NAMES]
    rows = np.arange(len(order))
    figure = Figure(figsize=(8, max(2.5, 0.22 * len(order) + 1)), layout="constrained")
    axes = figure.add_subplot()
    for (name, recall), color in zip(by_model.items(), _COLORS, strict=False):
        axes.plot(recall[order], rows, "o", color=color, markersize=5, label=name)
    axes.set_yticks(
        rows, [_short(labels[index]) for index in order], fontsize=9 if len(order) <= 40 else 7, parse_math=False
    )
    axes.set(xlabel="recall", xlim=(-0.02, 1.02), ylim=(len(order) - 0.5, -0.5))
    axes.grid(axis="both", color="#d9dee6", linewidth=0.5)
    axes.legend(loc="lower left", bbox_to_anchor=(0, 1), ncols=2, frameon=False)
    return _png(figure)


def strip(images: npt.NDArray[np.uint8], edge: int = 96) -> bytes:
    """Images side by side, scaled to one edge.

    Args:
        images: [B, 3, S, S].
        edge: of each image in the strip, in pixels.
    """
    sharp = Image.Resampling.NEAREST if images.shape[-1] < edge else Image.Resampling.LANCZOS
    gap = 4
    picture = Image.new("RGB", (len(images) * (edge + gap) - gap, edge), "white")
    for position, pixels in enumerate(images):
        tile = Image.fromarray(pixels.transpose(1, 2, 0)).resize((edge, edge), sharp)
        picture.paste(tile, (position * (edge + gap), 0))
    return _encoded(picture)


def _encoded(picture: Image.Image) -> bytes:
    buffer = io.BytesIO()
    picture.save(buffer, "PNG", optimize=True)
    return buffer.getvalue()


def _png(figure: Figure) -> bytes:
    """Without pyplot, whose global state keeps every figure."""
    FigureCanvasAgg(figure)
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=110, bbox_inches="tight", metadata={"Software": None})
    with Image.open(buffer) as drawn:  # a palette of 128 colours makes it four times smaller
        return _encoded(drawn.convert("RGB").quantize(128))
