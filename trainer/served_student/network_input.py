"""From squares to a network's input: resize and normalise.

Shapes: B images, H x W pixels, S the edge of the input.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Preprocessing(nn.Module):
    """Turns raw images into a network's input; a module, so that its statistics move to the device with the model that holds it."""

    mean: Tensor
    std: Tensor

    def __init__(self, size: int, mean: Sequence[float], std: Sequence[float], interpolation: str) -> None:
        """Take the arguments from a model's card.

        Args:
            size: edge S, in pixels.
            mean: mean of each channel, with pixels in [0, 1].
            std: standard deviation of each channel, with pixels in [0, 1].
            interpolation: how images of another size are resized, with antialiasing.
        """
        super().__init__()
        self._size = size
        self._interpolation = interpolation
        self.register_buffer("mean", torch.tensor(mean).view(1, 3, 1, 1) * 255, persistent=False)
        self.register_buffer("std", torch.tensor(std).view(1, 3, 1, 1) * 255, persistent=False)

    def forward(self, images: Tensor) -> Tensor:
        """Resize and normalise.

        Args:
            images: uint8 or float pixels in 0..255, [B, 3, H, W].

        Returns:
            float32 [B, 3, S, S].
        """
        pixels = images.float()
        size = (self._size, self._size)
        if images.shape[-2:] != size:
            pixels = F.interpolate(pixels, size=size, mode=self._interpolation, antialias=True, align_corners=False)
        return (pixels - self.mean) / self.std
