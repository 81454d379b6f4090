"""Views: the augmented images that a training step sees.

A view is a function of (seed, sample key, view number, settings), and the pairing of mixup and CutMix a function of the position in
the global order; so neither depends on workers, processes, the batch size or a resume. All draws are vectorised and
counter-based (`trainer.data.randomness`).

Shapes: B images, S x S stored pixels, V x V pixels of a view, K classes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import scipy.special
import torch
import torch.nn.functional as F
from torch import Tensor

from trainer.config import ViewSettings
from trainer.data.randomness import uniform

_AREA, _ASPECT, _LEFT, _TOP, _FLIP, _BRIGHTNESS, _CONTRAST, _SATURATION = range(8)
"""Index of each draw of a view."""
_MIX_KIND, _MIX_SHARE, _MIX_X, _MIX_Y = range(100, 104)
"""Index of each draw of a pair."""

_Draw = Callable[[int], npt.NDArray[np.float64]]

_GREY_WEIGHTS = (0.299, 0.587, 0.114)  # ITU-R BT.601


class Mixing(NamedTuple):
    """How each image is mixed with its partner, which stands beside it: images 2i and 2i+1 are a pair."""

    share: Tensor
    """Weight of the image itself in the target, float32 [B]; the partner has the rest."""
    blend: Tensor
    """Weight of the image itself in its pixels outside of the box, float32 [B]; 1 for CutMix."""
    box: Tensor
    """Part that CutMix takes from the partner, as shares of the edge: left, top, right, bottom; float32 [B, 4]."""


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


def draw_mixing(positions: npt.NDArray[np.int64], *, seed: int, settings: ViewSettings) -> Mixing | None:
    """How the samples at these positions of the global order are mixed; None where the settings mix nothing.

    Args:
        positions: consecutive positions that begin at an even one [B], B even.
        seed: the training's seed.
        settings: mixup's and CutMix's alphas.
    """
    if not settings.mixup and not settings.cutmix:
        return None
    pairs = positions // 2

    def draw(index: int) -> npt.NDArray[np.float64]:
        return uniform(seed, pairs, index)

    kind_share = {(True, False): 0.0, (False, True): 1.0, (True, True): 0.5}[settings.mixup > 0, settings.cutmix > 0]
    is_cutmix = draw(_MIX_KIND) < kind_share
    share_draw = draw(_MIX_SHARE)
    share = np.where(is_cutmix, _beta(settings.cutmix, share_draw), _beta(settings.mixup, share_draw))
    edge = np.sqrt(1 - share) / 2
    x, y = draw(_MIX_X), draw(_MIX_Y)
    box = np.clip(np.stack([x - edge, y - edge, x + edge, y + edge], axis=1), 0, 1)
    box[~is_cutmix] = 0
    outside = 1 - (box[:, 2] - box[:, 0]) * (box[:, 3] - box[:, 1])
    return Mixing(
        share=torch.from_numpy(np.where(is_cutmix, outside, share)).float(),
        blend=torch.from_numpy(np.where(is_cutmix, 1.0, share)).float(),
        box=torch.from_numpy(box).float(),
    )


def _beta(alpha: float, quantile: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """Quantiles of Beta(alpha, alpha); ones where alpha is 0, which leaves the image as it is."""
    if not alpha:
        return np.ones_like(quantile)
    values: npt.NDArray[np.float64] = scipy.special.betaincinv(alpha, alpha, quantile)
    return values


def mix(images: Tensor, targets: Tensor, mixing: Mixing | None) -> tuple[Tensor, Tensor]:
    """Mix each image and its target with its partner's.

    Args:
        images: uint8 or float [B, 3, V, V].
        targets: class distributions [B, K].
        mixing: shares and boxes for the B images, or None.

    Returns:
        Images, float [B, 3, V, V] where mixed, and targets [B, K].
    """
    if mixing is None:
        return images, targets
    pixels = images.float()
    partner, partner_target = _swap(pixels), _swap(targets)
    size = pixels.shape[-1]
    centre = (torch.arange(size, device=pixels.device) + 0.5) / size
    left, top, right, bottom = mixing.box.view(-1, 4, 1).unbind(1)
    in_x, in_y = (centre >= left) & (centre < right), (centre >= top) & (centre < bottom)
    inside = (in_y.unsqueeze(2) & in_x.unsqueeze(1)).unsqueeze(1)
    blended = torch.where(inside, partner, torch.lerp(partner, pixels, mixing.blend.view(-1, 1, 1, 1)))
    return blended, torch.lerp(partner_target, targets, mixing.share.view(-1, 1))


def _swap(values: Tensor) -> Tensor:
    """Exchange the members of each pair of rows."""
    return values.view(-1, 2, *values.shape[1:]).flip(1).reshape(values.shape)
