"""The same mathematics by faster kernels, where torch's own choice is slow; measured on a Zen 5 with torch 2.15.

Nothing here is chosen by timing: the rules look at the device, the processor, the precision and the shapes, so that the same training
gives the same bits again. Weights keep their names, so state dicts, copies and averages of a model fit one that was left alone.

Shapes: M rows, K features in, N features out.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from timm.layers import Attention
from torch import Tensor, nn

from trainer.config import Precision
from trainer.devices import Device

LEAST_ROWS, LEAST_WIDTH = 256, 96
"""Of M, and of K and N: a smaller matrix product is no faster as a convolution."""


class ConvolvedLinear(nn.Linear):
    """A linear layer that computes a float32 product of many rows as a 1x1 convolution, which torch gives to oneDNN.

    Torch gives float32 matrix products to MKL, which is half as fast as oneDNN on AMD's processors (1.8 to 2.1 times, forward and
    backward). The rows are the pixels of one image in channels-last order, so nothing is copied.
    """

    def __init__(self, linear: nn.Linear) -> None:
        """With the weights of `linear`, which are shared."""
        super().__init__(linear.in_features, linear.out_features, bias=linear.bias is not None, device="meta")
        self.weight, self.bias = linear.weight, linear.bias
        self.train(linear.training)

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002  # as nn.Linear names it
        """[..., K] to [..., N]."""
        rows = input.numel() // self.in_features
        if rows < LEAST_ROWS or input.dtype != torch.float32 or torch.is_autocast_enabled("cpu"):
            return F.linear(input, self.weight, self.bias)
        image = input.reshape(1, rows, 1, self.in_features).permute(0, 3, 1, 2)
        # With one thread torch keeps a 1x1 convolution from oneDNN unless it is dilated, which means nothing for a single tap.
        output = F.conv2d(image, self.weight[:, :, None, None], self.bias, dilation=2)
        return output.permute(0, 2, 3, 1).reshape(*input.shape[:-1], self.out_features)


def use_fast_kernels(model: nn.Module, device: Device, precision: Precision) -> None:
    """Let a model's layers use the fastest kernels of a CPU, in place; a model on a GPU is left alone.

    - bf16, on a processor that multiplies it: attention is computed by two matrix products and a softmax. Torch's fused attention, made
      to save memory, takes 1.5 to 5 times as long forward and backward.
    - float32, on an AMD processor: linear layers are `ConvolvedLinear`, but for narrow ones.

    Args:
        model: what is trained or asked; not compiled.
        device: where it runs.
        precision: of its forward pass.
    """
    # Torch 2.9, the last beside which there is a torch_xla, does not say what a processor can do.
    if device.kind != "cpu" or not hasattr(torch.cpu, "get_capabilities"):
        return
    processor = torch.cpu.get_capabilities()
    if device.uses_bf16(precision):
        if processor.get("avx512_bf16"):
            _use_explicit_attention(model)
    elif str(processor.get("cpu_name", "")).startswith("AMD") and torch.backends.mkldnn.is_available():
        _use_convolutions(model)


def _use_explicit_attention(model: nn.Module) -> None:
    for module in model.modules():
        if isinstance(module, Attention):
            module.fused_attn = False  # type: ignore[misc]  # final for TorchScript, which is not used


def _use_convolutions(model: nn.Module) -> None:
    for parent in list(model.modules()):
        for name, child in parent.named_children():
            if type(child) is nn.Linear and min(child.in_features, child.out_features) >= LEAST_WIDTH:
                setattr(parent, name, ConvolvedLinear(child))
