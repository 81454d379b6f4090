"""LoRA (Hu et al. 2021, "LoRA: Low-Rank Adaptation of Large Language Models"): linear layers stay, and learn an update of low rank.

Shapes: K features in, N features out, rank r; [..., K] are any number of rows.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from trainer.config import LoraSettings
from trainer.errors import ModelError

_NAMED = 8
"""Names that a message lists."""


class LoraLinear(nn.Module):
    """y = x W^T + bias + alpha / r x (x down^T) up^T, with W and bias frozen; `up` begins at zero, so the layer does too."""

    def __init__(self, base: nn.Linear, settings: LoraSettings) -> None:
        """Adapt `base`, which is kept and frozen."""
        super().__init__()
        self.base = base.requires_grad_(False)
        self.down = nn.Parameter(base.weight.new_empty(settings.rank, base.in_features))
        self.up = nn.Parameter(base.weight.new_zeros(base.out_features, settings.rank))
        self.scale = settings.alpha / settings.rank
        nn.init.kaiming_uniform_(self.down, a=math.sqrt(5))  # as in the authors' loralib

    @property
    def weight(self) -> Tensor:
        """What the layer multiplies with, [N, K]: BEiT's and EVA's attention does it by itself."""
        return self.base.weight + self.scale * (self.up @ self.down)

    @property
    def bias(self) -> Tensor | None:
        return self.base.bias

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002  # as nn.Linear names it
        """[..., K] to [..., N]."""
        output: Tensor = self.base(input)
        return output + F.linear(self.scale * F.linear(input, self.down), self.up)


def add_lora(network: nn.Module, settings: LoraSettings, *, leave: Callable[[str], bool]) -> None:
    """Replace a network's linear layers by `LoraLinear` ones, in place, but for the weights whose names `leave` tells.

    Raises:
        ModelError: it has no linear layer, or none that a name in `settings.layers` means.
    """
    linear = {
        name: module
        for name, module in network.named_modules()
        if type(module) is nn.Linear and not leave(f"{name}.weight")
    }
    if not linear:
        raise ModelError(
            f"pretrain.finetune.method is lora, but {type(network).__name__} has no linear layer beside its head; set method=full or "
            "method=head, or choose another teacher"
        )
    parts = {part for name in linear for part in name.split(".")}
    for wanted in settings.layers:
        if wanted not in parts:
            known = sorted(part for part in parts if not part.isdigit())[:_NAMED]
            raise ModelError(
                f"pretrain.finetune.lora.layers: {type(network).__name__} has no linear layer named {wanted!r}; its layers' names have "
                f"the parts {', '.join(known)}"
            )
    for name, module in linear.items():
        if not settings.layers or {*settings.layers} & {*name.split(".")}:
            network.set_submodule(name, LoraLinear(module, settings))


@torch.no_grad()
def merge_lora(network: nn.Module) -> None:
    """Add what was learned to the layers' own weights, and put the layers back, in place: the network is as if it had none."""
    for name, module in list(network.named_modules()):
        if isinstance(module, LoraLinear):
            module.base.weight.copy_(module.weight)
            network.set_submodule(name, module.base)
