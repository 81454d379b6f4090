"""Exponential moving average of weights."""

from __future__ import annotations

import copy

import torch
from torch import Tensor, nn


class AveragedModel:
    """An exponential moving average of a model's weights, with a warm-up of its decay for the first steps.

    The decay at step t is min(decay, (1 + t) / (10 + t)), so that a short training isn't held back by its first weights.
    """

    def __init__(self, model: nn.Module, decay: float) -> None:
        """Start from the model's present weights."""
        self.decay = decay
        self.model = copy.deepcopy(model).eval().requires_grad_(False)
        self._averages: list[Tensor] = list(self.model.parameters())
        self._sources: list[Tensor] = list(model.parameters())
        self._buffers = list(zip(self.model.buffers(), model.buffers(), strict=True))

    @torch.no_grad()
    def update(self, step: int) -> None:
        """Move the average towards the model's weights after optimiser step `step`; buffers are copied."""
        decay = min(self.decay, (1 + step) / (10 + step))
        torch._foreach_lerp_(self._averages, self._sources, 1 - decay)
        for average, source in self._buffers:
            average.copy_(source)
