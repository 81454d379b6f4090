"""A student as an ONNX graph: squares of photos to logits, the network's own resizing and normalisation inside.

What stays outside is what makes a square of a photo's file: `served_student/preprocessing.py`, which needs numpy and Pillow alone.

Shapes: B images, S the edge of the square, K classes.
"""

from __future__ import annotations

import re
import warnings
from pathlib import Path

import torch
from torch import Tensor, nn

from trainer import limits
from trainer.errors import ModelError
from trainer.models import Classifier
from trainer.served_student.onnx_network import INPUT, OUTPUT

OPSET = 20
"""Of ONNX's operators: Resize has antialiasing since 18, and ONNX Runtime's tools for int8 know them."""

_OPERATOR = re.compile(r"(?:op='|target: )((?:aten|torchvision|prims)[.:\w]+)")


class _OfSquares(nn.Module):
    """A classifier that takes images as decoders give them: uint8 [B, S, S, 3]."""

    def __init__(self, classifier: Classifier) -> None:
        super().__init__()
        self.classifier = classifier

    def forward(self, images: Tensor) -> Tensor:
        logits: Tensor = self.classifier(images.permute(0, 3, 1, 2))
        return logits


def write(model: Classifier, size: int, file: Path) -> None:
    """Write a classifier as ONNX: `images`, uint8 [B, S, S, 3], to `logits`, float32 [B, K], for any B.

    Args:
        model: on the CPU, in evaluation mode.
        size: the edge S.

    Raises:
        ModelError: torch cannot express it in ONNX; names the operator where there is one.
    """
    import onnx

    example = torch.zeros(2, size, size, 3, dtype=torch.uint8)
    try:
        with warnings.catch_warnings(), torch.no_grad():
            warnings.simplefilter("ignore")  # of torch's own deprecations in torch.export
            program = torch.onnx.export(
                _OfSquares(model).eval(),
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
    """Say why torch could not export, by the operator that ONNX lacks if that is why."""
    texts: list[str] = []
    cause: BaseException | None = error
    while cause is not None:
        texts.append(str(cause))
        cause = cause.__cause__
    for text in reversed(texts):
        if found := _OPERATOR.search(text):
            return f"its operator {found[1]} cannot be expressed in ONNX (opset {OPSET}); choose a student without it"
    last = next(line for line in texts[-1].splitlines() if line.strip())
    return f"torch.export cannot follow its code ({limits.cut(last, 300)}); choose another student"
