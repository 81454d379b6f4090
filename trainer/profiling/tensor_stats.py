"""How large each tensor of weights and its gradient are, and what a step changes of it.

Norms and means are of whole tensors. Zeros, elements that are not finite and what the step changes are counted on an evenly spread sample
of each tensor, which is all that is copied. A mean that is not finite shows what the sample may have missed.

Shapes: T tensors, E sampled elements of all of them together, Q quantities.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence

import torch
from torch import Tensor, nn

from trainer.devices.torch_private import norm_all

SAMPLED = 1024
"""Most elements of a tensor in its sample."""


class TensorStats:
    """Measures the weights of a model around one step of the optimiser, on their device, without waiting for it."""

    def __init__(self, model: nn.Module, *, left_out: Collection[str] = ()) -> None:
        """Of all weights of `model` but those named in `left_out`."""
        named = {name: parameter for name, parameter in model.named_parameters() if name not in left_out}
        self.names = list(named)
        self._parameters = list(named.values())
        self._weights = [parameter.detach() for parameter in self._parameters]
        self._strides = [_stride(weights) for weights in self._weights]
        device = self._weights[0].device
        lengths = [
            len(range(0, weights.numel(), stride)) for weights, stride in zip(self._weights, self._strides, strict=True)
        ]
        self._lengths = torch.tensor(lengths, device=device)
        self._owners: Tensor | None = None
        """The tensor of each sampled element, [E], where the device cannot sum neighbours by their numbers."""
        if device.type == "xla":
            self._owners = torch.repeat_interleave(torch.tensor(lengths)).to(device)
        self._sizes = torch.tensor([[weights.numel(), weights.dim()] for weights in self._weights], device=device)
        self._sampled = self._measured = torch.empty(0)

    @torch.no_grad()
    def before_update(self) -> None:
        """Measure weights and gradients; between the backward pass and the optimiser."""
        # a tensor without a gradient has as many NaN
        gradients = [
            parameter.new_full((1,), math.nan).expand(parameter.shape) if parameter.grad is None else parameter.grad
            for parameter in self._parameters
        ]
        self._sampled, sampled_gradients = self._sample(self._weights), self._sample(gradients)
        flags = [~self._sampled.isfinite(), sampled_gradients == 0, ~sampled_gradients.isfinite()]
        weight_nonfinite, zeros, nonfinite = self._means(flags)
        of_weights, of_gradients = self._norms(self._weights), self._norms(gradients)
        absent = self._absent()
        columns = [
            *of_weights,
            self._at_least_one(weight_nonfinite, of_weights[1]),
            *of_gradients,
            zeros + absent,
            self._at_least_one(nonfinite, of_gradients[1]) + absent,
        ]
        self._measured = torch.stack(columns, dim=1)

    @torch.no_grad()
    def after_update(self) -> Tensor:
        """What was measured before the step of the optimiser and what that changed, `TENSOR_COLUMNS`: [T, columns], on the device."""
        now, before = self._sample(self._weights), self._sampled
        change, size, unchanged = self._means([(now - before).square(), before.square(), now == before])
        ratio = torch.where(size > 0, change / size, math.nan).sqrt()
        self._sampled = torch.empty(0)
        return torch.cat([self._sizes, self._measured, ratio[:, None], unchanged[:, None]], dim=1)

    def _sample(self, tensors: Sequence[Tensor]) -> Tensor:
        """[E]"""
        return torch.cat(
            [tensor.reshape(-1)[::stride] for tensor, stride in zip(tensors, self._strides, strict=True)]
        ).float()

    def _means(self, quantities: Sequence[Tensor]) -> Tensor:
        """Mean over each tensor's sample of every quantity [E]: [Q, T]."""
        values = torch.stack([quantity.float() for quantity in quantities], dim=1)
        if self._owners is None:
            return torch.segment_reduce(
                values, "mean", lengths=self._lengths, axis=0, unsafe=True
            ).T  # checks would wait
        sums = values.new_zeros(len(self.names), len(quantities)).index_add(0, self._owners, values)
        return (sums / self._lengths[:, None]).T

    def _norms(self, tensors: list[Tensor]) -> tuple[Tensor, Tensor]:
        """Norm and mean absolute value of each tensor, [T] each."""
        return norm_all(tensors), norm_all(tensors, 1) / self._sizes[:, 0]

    def _at_least_one(self, share: Tensor, mean: Tensor) -> Tensor:
        """The share of elements that are not finite, at least one where the mean over all [T] is not."""
        return torch.where(mean.isfinite(), share, share.maximum(1 / self._sizes[:, 0]))

    def _absent(self) -> Tensor | float:
        """NaN for the tensors that have no gradient, and else 0."""
        if all(parameter.grad is not None for parameter in self._parameters):
            return 0.0
        zero = self._lengths.new_zeros((), dtype=torch.float32)
        return torch.stack([zero if parameter.grad is not None else zero + math.nan for parameter in self._parameters])


def _stride(weights: Tensor) -> int:
    """From one sampled element to the next; it has no divisor in common with a row's length, so all columns are met."""
    stride = math.ceil(weights.numel() / SAMPLED)
    while math.gcd(stride, weights.shape[-1] if weights.dim() else 1) > 1:
        stride += 1
    return stride
