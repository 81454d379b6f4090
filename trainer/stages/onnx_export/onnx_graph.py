"""A student as an ONNX graph: squares of photos to logits, the network's own resizing and normalization inside.

What stays outside is what makes a square of a photo's file: `served_student/preprocessing.py`, which needs numpy and Pillow alone.

Squares are resized by two matrix products. ONNX's Resize would do, but not every runtime knows its antialiasing, which came with operator
set 18: OpenVINO 2026.4 leaves it out without a word, and gives other logits.

Shapes: B images, S the edge of the square, s that of the network's input, K classes.
"""

from __future__ import annotations

import re
import warnings
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from trainer.io import limits
from trainer.io.errors import ModelError
from trainer.models.networks import Classifier
from trainer.models.served_student.onnx_network import INPUT, OUTPUT

OPSET = 20  # of ONNX's operators: ONNX Runtime's tools for int8 know them
RESIZING = ("shrink_rows", "shrink_columns")
"""Names of the constants by which squares are resized, float32 [s, S] and [S, s]."""

_OPERATOR = re.compile(r"(?:op='|target: )((?:aten|torchvision|prims)[.:\w]+)")


class _OfSquares(nn.Module):
    """A classifier that takes images as decoders give them: uint8 [B, S, S, 3]."""

    def __init__(self, classifier: Classifier, size: int) -> None:
        """Of squares of this edge."""
        super().__init__()
        self.classifier, self._resizes = classifier, size != classifier.card.image_size
        if self._resizes:
            shape, mode = (classifier.card.image_size, size), classifier.card.interpolation
            # A column of the identity is resized to the weights of that pixel in each pixel of the result.
            rows = F.interpolate(
                torch.eye(size)[None, None], size=shape, mode=mode, antialias=True, align_corners=False
            )
            for name, matrix in zip(RESIZING, (rows[0, 0], rows[0, 0].T.contiguous()), strict=True):
                self.register_buffer(name, matrix)

    def forward(self, images: Tensor) -> Tensor:
        pixels = images.permute(0, 3, 1, 2).float()
        if self._resizes:
            pixels = self.get_buffer(RESIZING[0]) @ pixels @ self.get_buffer(RESIZING[1])
        logits: Tensor = self.classifier(pixels)  # which finds nothing to resize
        return logits


def write(model: Classifier, size: int, file: Path) -> None:
    """Write a classifier, on the CPU and in evaluation mode, as ONNX: `images`, uint8 [B, S, S, 3], to `logits`, float32 [B, K], for any B.

    A `ModelError` names the operator that ONNX lacks.
    """
    import onnx

    example = torch.zeros(2, size, size, 3, dtype=torch.uint8)
    try:
        with warnings.catch_warnings(), torch.no_grad():
            warnings.simplefilter("ignore")  # of torch's own deprecations in torch.export
            program = torch.onnx.export(
                _OfSquares(model, size).eval(),
                (example,),
                dynamo=True,
                verbose=False,
                opset_version=OPSET,
                input_names=[INPUT],
                output_names=[OUTPUT],
                dynamic_shapes={INPUT: {0: torch.export.Dim("batch")}},
            )
    except torch.onnx.OnnxExporterError as error:
        raise ModelError(f"architecture {model.card.architecture!r}: {_why(error)}") from error
    if program is None:
        raise AssertionError("torch.onnx.export gives a program where dynamo is chosen")
    program.save(file)
    # torch notes at each node which line of which file it stems from, on this machine.
    graph = onnx.load(file)
    for node in graph.graph.node:
        del node.metadata_props[:]
        node.doc_string = ""
    onnx.save(graph, file)


def _why(error: BaseException) -> str:
    """Explain why torch could not export, naming the operator that ONNX lacks if there is one."""
    texts: list[str] = []
    cause: BaseException | None = error
    while cause is not None:
        texts.append(str(cause).strip() or type(cause).__name__)  # an assert may have no text
        cause = cause.__cause__
    for text in reversed(texts):
        if found := _OPERATOR.search(text):
            return f"its operator {found[1]} cannot be expressed in ONNX (opset {OPSET}); choose a student without it"
    return f"torch.export cannot follow its code ({limits.cut(texts[-1].splitlines()[0], 300)}); choose another student"
