"""Brightness, contrast and saturation in one application; RandAugment's operations, on those views of a batch that drew them.

The operations (Cubuk et al. 2020) have torchvision's names, ranges and meanings. Those on whole numbers alone are torchvision's own
functions. The others are ours, since torchvision's give other bits: they round down, not to the nearest level, and twice where they
compute a grey first, which darkens a view with each operation.

Shapes: B or n views, V x V pixels. An amount is signed, and 1 is the largest that torchvision has.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor
from torchvision.transforms.v2 import functional as torchvision

from trainer.data.batch import to_device
from trainer.data.views.parameters import OPERATIONS, ViewParameters

GREY_WEIGHTS = (0.299, 0.587, 0.114)  # shares of red, green and blue in grey (ITU-R BT.601)

_Map = tuple[tuple[float, float, float], tuple[float, float, float]]

_LARGEST_SHEAR, _LARGEST_SHIFT, _LARGEST_ANGLE, _LARGEST_CHANGE = 0.3, 150 / 331, math.radians(30), 0.9


def adjust_colour(views: Tensor, factors: Tensor) -> Tensor:
    """Change brightness, contrast and saturation of uint8 [B, 3, V, V], in this order, as torchvision's functions of these names do.

    Sums over pixels are exact, so a view does not depend on the batch around it. The factors, float32 [B, 3], are at least 0, on the CPU.
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


def apply_operations(views: Tensor, parameters: ViewParameters, magnitude: float) -> Tensor:
    """Apply each view's operations, of a magnitude from 0 to 10, one after another; the views, uint8 [B, 3, V, V], are changed.

    The host decides which views an operation changes, so it never waits for the device.
    """
    for numbers, negative in zip(parameters.operations.unbind(1), parameters.negative.unbind(1), strict=True):
        amounts = [-magnitude / 10 if backwards else magnitude / 10 for backwards in negative.tolist()]
        names = [OPERATIONS[number] for number in numbers.tolist()]
        for family, apply in _FAMILIES:
            rows = [row for row, name in enumerate(names) if name in family]
            if rows:
                on_device = to_device(torch.tensor(rows), views.device)
                chosen = views.index_select(0, on_device)
                changed = apply(chosen, [names[row] for row in rows], [amounts[row] for row in rows])
                views.index_copy_(0, on_device, changed)
    return views


def _warp(views: Tensor, names: list[str], amounts: list[float]) -> Tensor:
    """Shear, shift or rotate: bilinear, black outside of the image."""
    # torchvision's default is the nearest pixel, which leaves ragged edges. Its bilinear warp takes one map for a whole batch.
    size = views.shape[-1]
    maps = torch.tensor([_inverse_map(name, amount, size) for name, amount in zip(names, amounts, strict=True)])
    maps = to_device(maps, views.device).view(-1, 2, 3, 1, 1)
    centred = torch.arange(size, dtype=torch.float32, device=views.device) + (0.5 - size / 2)
    x, y = centred.view(1, 1, size), centred.view(1, size, 1)
    grid = maps[:, :, 0] * x + maps[:, :, 1] * y + maps[:, :, 2]  # [n, 2, V, V], in pixels from the centre
    grid = grid.mul_(2 / size).permute(0, 2, 3, 1)
    return levels(F.grid_sample(views.float(), grid, mode="bilinear", padding_mode="zeros", align_corners=False))


def _inverse_map(name: str, amount: float, size: int) -> _Map:
    """Return the map from a place in the new view to its place in the old one, both in pixels from the centre."""
    shear, shift = _LARGEST_SHEAR * amount, int(_LARGEST_SHIFT * size * amount)
    if name == "shear_x":  # about the upper left corner
        return (1, shear, shear * size / 2), (0, 1, 0)
    if name == "shear_y":
        return (1, 0, 0), (shear, 1, shear * size / 2)
    if name == "translate_x":
        return (1, 0, -shift), (0, 1, 0)
    if name == "translate_y":
        return (1, 0, 0), (0, 1, -shift)
    cosine, sine = math.cos(_LARGEST_ANGLE * amount), math.sin(_LARGEST_ANGLE * amount)
    return (cosine, -sine, 0), (sine, cosine, 0)


def _recolour(views: Tensor, names: list[str], amounts: list[float]) -> Tensor:
    factors = torch.ones(len(names), 3)
    for row, (name, amount) in enumerate(zip(names, amounts, strict=True)):
        factors[row, ("brightness", "contrast", "colour").index(name)] += _LARGEST_CHANGE * amount
    return adjust_colour(views, factors)


def _sharpen(views: Tensor, _: list[str], amounts: list[float]) -> Tensor:
    """Move away from, or towards, the image smoothed with weights 1 around a 5; the outermost pixels stay."""
    pixels = views.float()
    inner = pixels[:, :, 1:-1, 1:-1]
    three = pixels[:, :, :-2] + pixels[:, :, 1:-1] + pixels[:, :, 2:]
    nine = three[..., :-2] + three[..., 1:-1] + three[..., 2:]
    smooth = nine.add_(4 * inner).div_(13).round_()
    change = to_device(_LARGEST_CHANGE * torch.tensor(amounts), views.device).view(-1, 1, 1, 1)
    inner += (inner - smooth).mul_(change)
    return levels(pixels)


def _autocontrast(views: Tensor, _: list[str], __: list[float]) -> Tensor:
    """Stretch each channel to 0..255; a channel of a single level stays."""
    pixels = views.float()
    darkest, brightest = pixels.amin((2, 3), keepdim=True), pixels.amax((2, 3), keepdim=True)
    extent = brightest - darkest
    stretched = (pixels - darkest).mul_(255).div_(extent.clamp(min=1))
    return levels(torch.where(extent > 0, stretched, pixels))


_FAMILIES: tuple[tuple[set[str], Callable[[Tensor, list[str], list[float]], Tensor]], ...] = (
    ({"shear_x", "shear_y", "translate_x", "translate_y", "rotate"}, _warp),
    ({"brightness", "contrast", "colour"}, _recolour),
    ({"sharpness"}, _sharpen),
    # Keep the upper bits, at least four.
    ({"posterize"}, lambda views, _, amounts: torchvision.posterize(views, bits=8 - round(4 * abs(amounts[0])))),
    # Invert the brighter pixels.
    ({"solarize"}, lambda views, _, amounts: torchvision.solarize(views, threshold=255 * (1 - abs(amounts[0])))),
    ({"autocontrast"}, _autocontrast),
    # Give each channel's levels equal shares, by Pillow's rule; a channel with hardly more than one level stays.
    ({"equalize"}, lambda views, _, __: torchvision.equalize(views)),
)
"""Operations that are applied together, and by what."""
