"""Int8: static quantization of an ONNX student, and the fine-tuning of a student that loses by it.

Weights are quantized by channel, activations by what training photos make of them. Only layers with weights are quantized (convolutions
and matrix products with a constant); resizing, normalization, attention's products of activations, and the activations stay float.

By quantization-aware fine-tuning a student learns to give its own answers although its layers compute in int8. Rounding is imitated where
the int8 variant rounds (Jacob et al. 2018): each layer with weights gets its input in 256 steps of one range, and its weights in 255 steps
of one range for each output channel. Gradients pass the rounding as if it were none, and stop where it clips. What is learned from is the
student itself as it was, so no label and no teacher is needed.

Shapes: N images, S the edge of a square.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from trainer.data.dataset import Split
from trainer.io import limits
from trainer.io.errors import ModelError
from trainer.models.networks import Classifier
from trainer.models.onnx_student import Pixels
from trainer.models.served_student.onnx_network import INPUT
from trainer.objectives.distillation.losses import binary_kl, distillation_kl
from trainer.stages.onnx_export.onnx_graph import RESIZING

logger = logging.getLogger(__name__)

LAYERS = ("Conv", "Gemm", "MatMul")  # kinds of ONNX operators that are quantized where they have weights
CLIPPING = ("Clip", "Relu")
"""Kinds that cut off a part of what a layer gives: where one follows, the steps are those of what is left, and it becomes a part of the
layer. Otherwise most steps would go to what is cut off."""

BATCH_SIZE = 32
LEARNING_RATE = 3e-4  # Adam's in the first step; it falls to 0 along a cosine
_OLD = 0.9  # share of an input's range that stays from one batch to the next


def weighted_layers(file: Path) -> list[str]:
    """List the names of the layers with weights, in the order in which they are computed; resizing is none."""
    import onnx

    return [node.name for node in _weighted(onnx.load(file).graph)]


def _weighted(graph: Any) -> list[Any]:
    constants = {one.name for one in graph.initializer} - {*RESIZING}
    return [node for node in graph.node if node.op_type in LAYERS and constants & set(node.input)]


def quantize(source: Path, target: Path, images: Pixels, *, kept: frozenset[str] = frozenset()) -> None:
    """Write an int8 variant of an ONNX file; a `ModelError` if ONNX Runtime cannot quantize it.

    The range of each activation comes from `images`, squares of training photos, uint8 [N, S, S, 3]; layers named in `kept` stay float.
    """
    import onnx
    from onnxruntime.quantization import CalibrationDataReader, QuantFormat, QuantType, quantize_static

    class Photos(CalibrationDataReader):  # type: ignore[misc]  # its package has no types
        def __init__(self) -> None:
            self._left: Iterator[Any] = iter(np.array_split(images, max(1, len(images) // 16)))

        def get_next(self) -> dict[str, Pixels] | None:
            batch = next(self._left, None)
            return None if batch is None else {INPUT: batch}

    graph = onnx.load(source).graph
    layers = [node for node in _weighted(graph) if node.name not in kept]
    given = {output for node in layers for output in node.output}
    clipping = [node for node in graph.node if node.op_type in CLIPPING and node.input[0] in given]
    root = logging.getLogger()
    level = root.level
    root.setLevel(logging.ERROR)  # the tools write a line there for each scale that they correct
    try:
        quantize_static(
            source,
            target,
            Photos(),
            quant_format=QuantFormat.QDQ,
            op_types_to_quantize=[*LAYERS, *CLIPPING],
            nodes_to_quantize=[node.name for node in (*layers, *clipping)],
            per_channel=True,
            activation_type=QuantType.QUInt8,
            weight_type=QuantType.QInt8,
        )
    except Exception as error:  # its package raises nearly anything for a graph that it does not know
        said = limits.cut(" ".join(str(error).split()), 300)
        raise ModelError(
            f"ONNX Runtime cannot quantize this student ({said}); leave int8 out (export.int8=false, or --no-int8)"
        ) from error
    finally:
        root.setLevel(level)


# ---- Fine-tuning


class RoundedWeight(nn.Module):
    """Weights in 255 steps for each output channel, from minus to plus the largest: a parametrization."""

    def forward(self, weight: Tensor) -> Tensor:
        """[N, ...] to the same."""
        scale = weight.detach().flatten(1).abs().amax(1).clamp(min=1e-12) / 127
        zero = torch.zeros_like(scale, dtype=torch.int32)
        return torch.fake_quantize_per_channel_affine(weight, scale, zero, 0, -127, 127)


class RoundedInput:
    """A layer's input in 256 steps, from the smallest to the largest number of the last batches: a hook before the layer."""

    def __init__(self) -> None:
        self._range: Tensor | None = None

    def __call__(self, _: nn.Module, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """Round the first input."""
        values = inputs[0]
        zero = values.new_zeros(())
        found = torch.stack([torch.minimum(values.detach().amin(), zero), torch.maximum(values.detach().amax(), zero)])
        self._range = found if self._range is None else _OLD * self._range + (1 - _OLD) * found
        lowest, highest = self._range
        scale = ((highest - lowest) / 255).clamp(min=1e-12)
        rounded = torch.fake_quantize_per_tensor_affine(
            values, scale, (-lowest / scale).round().to(torch.int32), 0, 255
        )
        return rounded, *inputs[1:]


@contextmanager
def rounding(network: nn.Module) -> Iterator[None]:
    """Let the layers of a network that have weights compute in imitated int8 within the block."""
    layers = [layer for layer in network.modules() if isinstance(layer, nn.Linear | nn.Conv2d)]
    hooks = [layer.register_forward_pre_hook(RoundedInput()) for layer in layers]
    for layer in layers:
        parametrize.register_parametrization(layer, "weight", RoundedWeight())
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()
        for layer in layers:
            parametrize.remove_parametrizations(layer, "weight", leave_parametrized=False)


def finetune(model: Classifier, split: Split, *, steps: int, by_class: bool = False, seed: int = 0) -> Classifier:
    """Fine-tune a copy of a model, which is on the CPU and has a head, on images of a split, so that its int8 variant answers as the model.

    The loss is KL(model || copy), or the sum of that of each class (`by_class`). Statistics of batch normalization stay as they are, as do
    dropout and stochastic depth: off.
    """
    learner = copy.deepcopy(model).eval()
    order, size = np.random.default_rng(seed), min(BATCH_SIZE, len(split))
    first = last = 0.0
    with rounding(learner.network):
        optimizer = torch.optim.Adam(learner.network.parameters(), lr=LEARNING_RATE)
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=steps)
        for step in range(steps):
            images = split.read(order.choice(len(split), size, replace=False).tolist())
            with torch.no_grad():
                target = model(images)
            loss = (binary_kl if by_class else distillation_kl)(learner(images), target, temperature=1.0)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            schedule.step()
            first, last = (loss.item() if step == 0 else first), loss.item()
    logger.info(
        "export  quantization-aware fine-tuning: KL %.4f in the first of %d steps, %.4f in the last", first, steps, last
    )
    return learner
