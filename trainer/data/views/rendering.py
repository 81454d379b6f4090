"""Views: the augmented images that a training step sees.

A view is a function of (seed, sample key, view number, settings); so it does not depend on workers, processes, the batch size or a
resume. All draws are vectorised and counter-based (`trainer.data.randomness`).

Shapes: B images, S x S stored pixels, V x V pixels of a view.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from torch import Tensor

from trainer.config import ViewSettings
from trainer.data.randomness import uniform

_AREA, _ASPECT, _LEFT, _TOP, _FLIP, _BRIGHTNESS, _CONTRAST, _SATURATION = range(8)
"""Index of each draw of a view."""

_Draw = Callable[[int], npt.NDArray[np.float64]]

_GREY_WEIGHTS = (0.299, 0.587, 0.114)  # ITU-R BT.601


def make_views(
    images: Tensor,
    keys: npt.NDArray[np.uint64],
    numbers: npt.NDArray[np.int64],
    *,
    seed: int,
    size: int,
    settings: ViewSettings,
) -> Tensor:
    """Crop, flip and jitter a batch.

    Args:
        images: uint8 [B, 3, S, S].
        keys: key of each sample [B].
        numbers: number of each sample's view, such as the epoch [B].
        seed: the training's seed.
        size: edge V of the views, in pixels.
        settings: how strongly to augment.

    Returns:
        uint8 [B, 3, V, V].
    """

    def draw(index: int) -> npt.NDArray[np.float64]:
        return uniform(seed, keys, numbers, index)

    pixels = _sample(images, _crop_and_flip(draw, settings), size)
    if settings.color_jitter:
        pixels = _jitter(pixels, draw, settings.color_jitter)
    return pixels.round_().clamp_(0, 255).to(torch.uint8)


def _crop_and_flip(draw: _Draw, settings: ViewSettings) -> Tensor:
    """Affine maps from view to image coordinates [B, 2, 3], for `affine_grid`."""
    area = settings.min_scale + (1 - settings.min_scale) * draw(_AREA)
    aspect = (
        np.exp((2 * draw(_ASPECT) - 1) * np.log(settings.max_aspect)) if settings.min_scale < 1 else np.ones_like(area)
    )
    width, height = np.minimum(np.sqrt(area * aspect), 1), np.minimum(np.sqrt(area / aspect), 1)
    left, top = draw(_LEFT) * (1 - width), draw(_TOP) * (1 - height)
    mirror = np.where(draw(_FLIP) < 0.5, -1.0, 1.0) if settings.flip else np.ones_like(area)
    maps = np.zeros((len(area), 2, 3), dtype=np.float32)
    maps[:, 0, 0], maps[:, 0, 2] = width * mirror, 2 * left + width - 1
    maps[:, 1, 1], maps[:, 1, 2] = height, 2 * top + height - 1
    return torch.from_numpy(maps)


def _sample(images: Tensor, maps: Tensor, size: int) -> Tensor:
    """Bilinear sampling: uint8 [B, 3, S, S] to float32 [B, 3, V, V]."""
    if images.shape[-1] > 2 * size:  # a bilinear sample reads 2 x 2 pixels: shrink first, so that none is passed over
        images = F.interpolate(
            images.float(), size=(2 * size, 2 * size), mode="bilinear", antialias=True, align_corners=False
        )
    grid = F.affine_grid(maps, [len(images), 3, size, size], align_corners=False)
    return F.grid_sample(images.float(), grid, mode="bilinear", padding_mode="border", align_corners=False)


def _jitter(pixels: Tensor, draw: _Draw, strength: float) -> Tensor:
    """Change brightness, contrast and saturation by factors within 1 +- strength."""

    def factors(index: int) -> Tensor:
        return torch.from_numpy(1 + strength * (2 * draw(index) - 1)).float().view(-1, 1, 1, 1)

    pixels = (pixels * factors(_BRIGHTNESS)).clamp_(0, 255)
    weights = torch.tensor(_GREY_WEIGHTS).view(1, 3, 1, 1)
    mean = (pixels * weights).sum(1, keepdim=True).mean((2, 3), keepdim=True)
    pixels = torch.lerp(mean, pixels, factors(_CONTRAST)).clamp_(0, 255)
    grey = (pixels * weights).sum(1, keepdim=True)
    return torch.lerp(grey, pixels, factors(_SATURATION))
