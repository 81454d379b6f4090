"""Static int8 quantisation of an ONNX student: weights by channel, activations by what training photos make of them.

Only layers with weights are quantised (convolutions and matrix products with a constant); resizing, normalisation, attention's products of
activations, and the activations stay float.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from trainer import limits
from trainer.errors import ModelError
from trainer.export.onnx_graph import RESIZING
from trainer.export.onnx_student import Pixels
from trainer.served_student.onnx_network import INPUT

LAYERS = ("Conv", "Gemm", "MatMul")
"""Kinds of ONNX operators that are quantised where they have weights."""
CLIPPING = ("Clip", "Relu")
"""Kinds that cut off a part of what a layer gives: where one follows, the steps are those of what is left, and it becomes a part of the
layer. Otherwise most steps would go to what is cut off."""


def weighted_layers(file: Path) -> list[str]:
    """List the names of the layers with weights, in the order in which they are computed; resizing is none."""
    import onnx

    return [node.name for node in _weighted(onnx.load(file).graph)]


def _weighted(graph: Any) -> list[Any]:
    """List the nodes of an ONNX graph that are layers with weights."""
    constants = {one.name for one in graph.initializer} - {*RESIZING}
    return [node for node in graph.node if node.op_type in LAYERS and constants & set(node.input)]


def _quantized(file: Path, kept: Collection[str]) -> list[str]:
    """List the names of the layers with weights, but for those `kept`, and of the nodes of `CLIPPING` that follow one of them."""
    import onnx

    graph = onnx.load(file).graph
    layers = [node for node in _weighted(graph) if node.name not in kept]
    given = {output for node in layers for output in node.output}
    clipping = [node for node in graph.node if node.op_type in CLIPPING and node.input[0] in given]
    return [node.name for node in (*layers, *clipping)]


def quantize(source: Path, target: Path, images: Pixels, *, kept: frozenset[str] = frozenset()) -> None:
    """Write an int8 variant of an ONNX file.

    Args:
        images: squares of training photos, uint8 [N, S, S, 3], by which the range of each activation is chosen.
        kept: names of layers that stay float.

    Raises:
        ModelError: ONNX Runtime's tools cannot quantise it.
    """
    from onnxruntime.quantization import CalibrationDataReader, QuantFormat, QuantType, quantize_static

    class Photos(CalibrationDataReader):  # type: ignore[misc]  # its package has no types
        def __init__(self) -> None:
            self._left: Iterator[Any] = iter(np.array_split(images, max(1, len(images) // 16)))

        def get_next(self) -> dict[str, Pixels] | None:
            batch = next(self._left, None)
            return None if batch is None else {INPUT: batch}

    with _quiet():
        try:
            quantize_static(
                source,
                target,
                Photos(),
                quant_format=QuantFormat.QDQ,
                op_types_to_quantize=[*LAYERS, *CLIPPING],
                nodes_to_quantize=_quantized(source, kept),
                per_channel=True,
                activation_type=QuantType.QUInt8,
                weight_type=QuantType.QInt8,
            )
        except Exception as error:  # its package raises nearly anything for a graph that it does not know
            said = limits.cut(" ".join(str(error).split()), 300)
            raise ModelError(
                f"ONNX Runtime cannot quantise this student ({said}); leave int8 out (export.int8=false, or --no-int8)"
            ) from error


@contextmanager
def _quiet() -> Iterator[None]:
    """Hide what onnxruntime's tools write to the root logger: a line for each scale that they correct."""
    root = logging.getLogger()
    level = root.level
    root.setLevel(logging.ERROR)
    try:
        yield
    finally:
        root.setLevel(level)
