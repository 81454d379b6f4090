"""Brightness, contrast and saturation in one application.

Shapes: B views, V x V pixels.
"""

from __future__ import annotations

import torch
from torch import Tensor

from trainer.data.batch import to_device

GREY_WEIGHTS = (0.299, 0.587, 0.114)
"""Shares of red, green and blue in grey (ITU-R BT.601)."""


def adjust_colour(views: Tensor, factors: Tensor) -> Tensor:
    """Change brightness, then contrast, then saturation, as torchvision's functions of these names do.

    Sums over pixels are exact, so a view does not depend on the batch around it.

    Args:
        views: uint8 [B, 3, V, V].
        factors: of brightness, contrast and saturation, at least 0; float32 [B, 3], on the CPU.

    Returns:
        uint8 [B, 3, V, V].
    """
    # torchvision's three functions take one factor for a whole batch, clip to 0..255 and round down after each, and the grey too. Each
    # of the three is linear in the pixels, so together they are a factor for the pixel, one for its grey and an offset, of which the sum
    # is clipped and rounded to the nearest level once.
    brightness, contrast, saturation = to_device(factors, views.device).view(-1, 3, 1, 1, 1).unbind(1)
    pixels = views.float()
    gain = brightness * contrast
    grey = _grey(pixels) * ((1 - saturation) * gain)
    grey += (1 - contrast) * brightness * _grey(channel_means(views))
    return levels(pixels.mul_(saturation * gain).add_(grey))


def channel_means(views: Tensor) -> Tensor:
    """Average each channel: uint8 [B, 3, V, V] to float32 [B, 3, 1, 1]; the sum is of whole numbers, so it is exact in any order."""
    return views.sum((2, 3), keepdim=True, dtype=torch.int32).float() / (views.shape[-2] * views.shape[-1])


def _grey(pixels: Tensor) -> Tensor:
    """Weigh the channels: [B, 3, H, W] to [B, 1, H, W]."""
    # Not torchvision's rgb_to_grayscale, which rounds the grey of uint8 images down to a whole level.
    red, green, blue = (pixels[:, channel] * weight for channel, weight in enumerate(GREY_WEIGHTS))
    return (red + green + blue).unsqueeze(1)


def levels(pixels: Tensor) -> Tensor:
    """Round float pixels to the nearest of the 256 levels; changes `pixels`."""
    return pixels.round_().clamp_(0, 255).to(torch.uint8)
