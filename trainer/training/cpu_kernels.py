"""Kernels for a CPU that take the place of torch's where those are slow.

They compute the same mathematics. None is chosen by timing: the rules look at the device, the processor, the precision and the shapes, so
that the same training gives the same bits again. Weights keep their names, so state dicts, copies and averages of a model fit one that was
left alone.

Shapes: M rows, K features in, N features out.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import torch
import torch.nn.functional as F
from timm.layers import Attention
from torch import Tensor, nn

from trainer.config import Precision
from trainer.devices import Device
from trainer.models.served_student.torch_network import Preprocessing

LEAST_ROWS, LEAST_WIDTH = 256, 96
"""Of M, and of K and N: a smaller matrix product is no faster as a convolution."""


class ConvolvedLinear(nn.Linear):
    """A linear layer that computes a float32 product of many rows as a 1x1 convolution, which torch gives to oneDNN.

    Torch gives float32 matrix products to MKL; which of the two is faster depends on the processor (`choose_cpu_kernels`). The rows are the
    pixels of one image in channels-last order, so nothing is copied.
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


def is_convolutional(model: nn.Module) -> bool:
    """Return whether a model has several convolutions; a transformer has one, of its patches."""
    return sum(isinstance(module, nn.Conv2d) for module in model.modules()) > 1


class CpuKernels(NamedTuple):
    """Which of our kernels take the place of torch's on a CPU."""

    convolved_linear: bool
    """Linear layers are `ConvolvedLinear`, but for narrow ones."""
    explicit_attention: bool
    """Attention is two matrix products and a softmax, not torch's fused one, which was made to save memory."""

    def __str__(self) -> str:
        """Name them for a log."""
        linear = "1x1 convolutions (oneDNN)" if self.convolved_linear else "torch's products"
        return f"linear layers by {linear}, attention {'by products and a softmax' if self.explicit_attention else 'fused by torch'}"


def choose_cpu_kernels(processor: Mapping[str, object], *, bf16: bool) -> CpuKernels:
    """Choose by maker and instruction sets: ours where they were measured to be faster, torch's everywhere else.

    The measurements are in docs/performance.md. Neither maker nor instruction set decides alone: on AMD's processors with AVX-512 oneDNN's
    convolution is 1.5 to 2.1 times as fast as MKL's product, on those with AVX2 alone half as fast. With AMX, which also says that it has
    `avx512_bf16`, nothing was measured.

    Args:
        processor: as `torch.cpu.get_capabilities` describes it.
        bf16: whether the model computes in bf16.
    """
    amd = str(processor.get("cpu_name", "")).startswith("AMD")
    return CpuKernels(
        convolved_linear=amd and not bf16 and bool(processor.get("avx512_f")) and torch.backends.mkldnn.is_available(),
        explicit_attention=amd and bf16 and bool(processor.get("avx512_bf16")),
    )


def use_fast_kernels(model: nn.Module, device: Device, precision: Precision) -> CpuKernels | None:
    """Let a model's layers use the fastest kernels of a CPU, in place, and return which; a model on another device is left alone.

    Images come to a convolutional network with the channels last, and so does what is made of them, which is what oneDNN's kernels compute
    with, whatever the processor.
    """
    # Torch 2.9, the last beside which there is a torch_xla, does not say what a processor can do.
    if device.kind != "cpu" or not hasattr(torch.cpu, "get_capabilities"):
        return None
    if is_convolutional(model):
        for preprocessing in (module for module in model.modules() if isinstance(module, Preprocessing)):
            preprocessing.memory_format = torch.channels_last
    chosen = choose_cpu_kernels(torch.cpu.get_capabilities(), bf16=device.uses_bf16(precision))
    for parent in list(model.modules()):
        if chosen.explicit_attention and isinstance(parent, Attention):
            parent.fused_attn = False  # type: ignore[misc]  # final for TorchScript, which is not used
        for name, child in parent.named_children() if chosen.convolved_linear else ():
            if type(child) is nn.Linear and min(child.in_features, child.out_features) >= LEAST_WIDTH:
                setattr(parent, name, ConvolvedLinear(child))
    return chosen
