"""What makes a model faster on a GPU beside the compiler. Weights keep their names, and on other devices nothing changes.

Shapes: B images of C channels; patches of P x P pixels, h x w of them; D numbers of a token.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from timm.layers import LayerScale
from torch import Tensor, nn

from trainer.config import Precision
from trainer.devices import Device
from trainer.training.sharding import block_lists


def use_gpu_kernels(model: nn.Module, device: Device, precision: Precision) -> None:
    """Prepare a model, in place, for a training on a GPU; a model on another device is left alone."""
    if device.kind != "cuda":
        return
    for parent in list(model.modules()):
        for name, child in parent.named_children():
            if is_patch_embedding(child):
                setattr(parent, name, PatchProduct(child))
    if device.uses_bf16(precision):
        keep_stream_in_bf16(model)


def is_patch_embedding(module: nn.Module) -> bool:
    """Return whether a module is a convolution that cuts images of three channels into patches."""
    return (
        type(module) is nn.Conv2d
        and module.in_channels == 3
        and module.kernel_size == module.stride
        and module.padding == (0, 0)
        and module.dilation == (1, 1)
        and module.groups == 1
    )


class PatchProduct(nn.Conv2d):
    """A patch embedding as one matrix product. cuDNN's convolution of three channels is slow in bf16, above all its weights' gradient."""

    def __init__(self, convolution: nn.Module) -> None:
        """With the weights of `convolution`, which are shared."""
        assert isinstance(convolution, nn.Conv2d)
        patch: Any = convolution.kernel_size
        channels, width, biased = convolution.in_channels, convolution.out_channels, convolution.bias is not None
        super().__init__(channels, width, patch, patch, bias=biased, device="meta")
        self.weight, self.bias = convolution.weight, convolution.bias
        self.train(convolution.training)

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002  # as nn.Conv2d names it
        """[B, C, h x P, w x P] to [B, D, h, w]; what is left beside whole patches is dropped, as by the convolution."""
        (down, across), (batch, channels, height, width) = self.kernel_size, input.shape
        rows, columns = height // down, width // across
        whole = input[:, :, : rows * down, : columns * across]
        patches = whole.reshape(batch, channels, rows, down, columns, across).permute(0, 2, 4, 1, 3, 5)
        tokens: Tensor = F.linear(patches.reshape(batch, rows * columns, -1), self.weight.flatten(1), self.bias)
        return tokens.transpose(1, 2).reshape(batch, -1, rows, columns)


def keep_stream_in_bf16(model: nn.Module) -> None:
    """Let what flows from block to block be bf16 under autocast, whatever enters the first block; without autocast nothing changes.

    Autocast alone leaves it float32, because the position embedding, to which all else is added, is. Each block reads and writes it
    several times: without the cast a ViT-Ti moves a fifth more bytes (`tests/unit/training/test_bytes.py`).
    """
    for blocks in block_lists(model):
        blocks[0].register_forward_pre_hook(_cast_input)
    for module in model.modules():
        if isinstance(module, LayerScale):  # its float32 factors would make the stream float32 again
            module.register_forward_hook(_cast_output)


def _cast_input(_: nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
    tokens, *others = inputs
    kind = tokens.device.type
    return (tokens.to(torch.get_autocast_dtype(kind)), *others) if torch.is_autocast_enabled(kind) else inputs


def _cast_output(_: nn.Module, inputs: tuple[Any, ...], output: Tensor) -> Tensor:
    return output.to(inputs[0].dtype)
