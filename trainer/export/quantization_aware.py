"""Quantisation-aware fine-tuning: a student learns to give its own answers although its layers compute in int8.

Rounding is imitated where the int8 variant rounds (Jacob et al. 2018): each layer with weights gets its input in 256 steps of one range,
and its weights in 255 steps of one range for each output channel. Gradients pass the rounding as if it were none, and stop where it
clips. What is learned from is the student itself as it was, so no label and no teacher is needed.

Shapes: B images, S the edge of a square, K classes.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from trainer.data.dataset import Split
from trainer.distillation.losses import binary_kl, distillation_kl
from trainer.models import Classifier

logger = logging.getLogger(__name__)

BATCH_SIZE = 32
LEARNING_RATE = 3e-4
"""Adam's in the first step; it falls to 0 along a cosine."""
_OLD = 0.9
"""Share of an input's range that stays from one batch to the next."""


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

    The loss is KL(model || copy), or the sum of that of each class (`by_class`). Statistics of batch normalisation stay as they are, as do
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
        "export  quantisation-aware fine-tuning: KL %.4f in the first of %d steps, %.4f in the last", first, steps, last
    )
    return learner
