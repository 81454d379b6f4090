"""Exponential moving average of weights."""

from __future__ import annotations

import copy

import torch
from torch import Tensor, nn

from trainer.devices import HOST, Device
from trainer.devices.torch_private import batch_norms, lerp_all


def running_statistics(model: nn.Module) -> list[Tensor]:
    """Return the running means and variances of a model's batch normalisations, of which each process sees its own images."""
    found = [part for module in batch_norms(model) for part in (module.running_mean, module.running_var)]
    return [part for part in found if part is not None]


class AveragedModel:
    """An exponential moving average of a model's weights, with a warm-up of its decay for the first steps.

    The decay at step t is min(decay, (1 + t) / (10 + t)), so that a short training isn't held back by its first weights.
    """

    def __init__(self, model: nn.Module, decay: float, device: Device = HOST) -> None:
        """Start from the model's present weights; `device` is where they are."""
        self.decay, self._device = decay, device
        self.model = copy.deepcopy(model).eval().requires_grad_(False)
        self._averages: list[Tensor] = list(self.model.parameters())
        self._sources: list[Tensor] = list(model.parameters())
        self._buffers = list(zip(self.model.buffers(), model.buffers(), strict=True))

    @torch.no_grad()
    def update(self, step: int) -> None:
        """Move the average towards the model's weights after optimiser step `step`; buffers are copied."""
        (share,) = self._device.numbers([1 - min(self.decay, (1 + step) / (10 + step))])
        if isinstance(share, Tensor):
            for average, source in zip(self._averages, self._sources, strict=True):
                average.lerp_(source, share)
        else:
            lerp_all(self._averages, self._sources, share)
        for average, source in self._buffers:
            average.copy_(source)
