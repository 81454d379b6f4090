"""Views: the augmented images that a training step sees, alone or mixed with one another (mixup and CutMix).

A view is a function of (seed, sample key, view number, settings, stored size, view size); so it does not depend on workers, processes,
the batch size or a resume. The loader makes it image by image, or a device makes a batch of them: crop, color, RandAugment's operations,
erasing. On the CPU both ways give the same bits, with two exceptions: crops that shrink an axis to less than a quarter (one level), and
JPEG files whose crop is at least twice the view, which the loader decodes at a reduced size unless outputs are recorded (up to half a
view's pixel aside). A GPU rounds colors and RandAugment's bilinear warp differently by up to a level, which a later operation may enlarge.

Both ways resize with an antialiased triangle filter restricted to the box, whose weights are whole numbers (fixed point), and round after
each axis. So sums are exact in any order: a crop has the same bits in every batch and on every device.

A view is mixed with the same-numbered view of its partner, which is a function of (seed, view number) (`trainer.data.sampler`); the
mixture is one of (seed, sample key, view number). So a teacher's outputs for a mixed view can be recorded.

Shapes: B images, S x S stored pixels, V x V pixels of a view, T taps of the filter; n of the
views; b samples and b + x images that are mixed.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import numpy as np
import scipy.special
import torch
import torch.nn.functional as F
from torch import Tensor
from torchvision.transforms.v2 import functional as torchvision

from trainer.config import ViewSettings
from trainer.data.batch import Mixing, cache_sized_slices, to_device
from trainer.data.sampler import Indices, Keys, uniform
from trainer.data.views.parameters import OPERATIONS, ViewParameters
from trainer.devices import full_float32

_MIXING = 0x6D6978696E67  # keeps mixing's draws apart from those of the views

GRAY_WEIGHTS = (0.299, 0.587, 0.114)  # shares of red, green and blue in gray (ITU-R BT.601)

_Map = tuple[tuple[float, float, float], tuple[float, float, float]]

_LARGEST_SHEAR, _LARGEST_SHIFT, _LARGEST_ANGLE, _LARGEST_CHANGE = 0.3, 150 / 331, math.radians(30), 0.9


def make_views(images: Tensor, parameters: ViewParameters, size: int, settings: ViewSettings) -> Tensor:
    """Make the views of a batch of stored images, on their device: uint8 [B, 3, S, S] to [B, 3, V, V]; the parameters are on the CPU."""
    return finish_views(crop_batch(images, parameters, size), parameters, settings)


def finish_views(views: Tensor, parameters: ViewParameters, settings: ViewSettings) -> Tensor:
    """Apply what follows the crop: color, RandAugment's operations, erasing; the crops, uint8 [B, 3, V, V], are changed and returned."""
    if not (settings.color_jitter or settings.randaugment_operations or settings.erasing):
        return views
    for rows in cache_sized_slices(views):
        part, drawn = views[rows], ViewParameters(*(values[rows] for values in parameters))
        if settings.color_jitter:
            part = adjust_color(part, to_device(drawn.color, part.device))
        if settings.randaugment_operations:  # they choose single views, which is twice as fast in planar memory
            part = apply_operations(part.contiguous(), drawn, settings.randaugment_magnitude)
        views[rows] = erase(part, drawn.erased) if settings.erasing else part
    return views


def erase(views: Tensor, boxes: Tensor) -> Tensor:
    """Fill a rectangle of each view, uint8 [B, 3, V, V], with the view's mean color, in place: random erasing (Zhong et al. 2020).

    Boxes are shares of the edge: left, top, right, bottom; float32 [B, 4], zeros for none, on the CPU.
    """
    rows = (boxes[:, 2] > boxes[:, 0]).nonzero().squeeze(1)
    if len(rows):
        edges = (boxes[rows] * views.shape[-1]).round().long()
        if views.device.type != "cpu":
            fill_together(views, rows, edges)
            return views
        means = levels(channel_means(views.index_select(0, rows)))
        for row, (left, top, right, bottom), mean in zip(rows.tolist(), edges.tolist(), means, strict=True):
            views[row, :, top:bottom, left:right] = mean
    return views


def fill_together(views: Tensor, rows: Tensor, edges: Tensor) -> None:
    """Fill rectangles of n views, uint8 [B, 3, V, V], in place, in a few operations, since the host launches each one on a device.

    Indices int64 [n] and rectangles in pixels (left, top, right, bottom), int64 [n, 4], are on the CPU.
    """
    rows, edges = to_device(rows, views.device), to_device(edges, views.device)
    filled = inside(edges, torch.arange(views.shape[-1], device=views.device))
    chosen = views.index_select(0, rows)
    views.index_copy_(0, rows, torch.where(filled, levels(channel_means(chosen)), chosen))


def inside(boxes: Tensor, places: Tensor) -> Tensor:
    """Mark the pixels in boxes, left, top, right, bottom, [n, 4], of places along an edge, [V], in the same unit: bool [n, 1, V, V]."""
    left, top, right, bottom = boxes.view(-1, 4, 1).unbind(1)
    columns, lines = (places >= left) & (places < right), (places >= top) & (places < bottom)
    return (lines.unsqueeze(2) & columns.unsqueeze(1)).unsqueeze(1)


# ---- Color and RandAugment
#
# The operations (Cubuk et al. 2020) have torchvision's names, ranges and meanings. Those on whole numbers alone are torchvision's own
# functions. The others are ours, since torchvision's give other bits: they round down, not to the nearest level, and twice where they
# compute a gray first, which darkens a view with each operation. An amount is signed, and 1 is the largest that torchvision has.


def adjust_color(views: Tensor, factors: Tensor) -> Tensor:
    """Change brightness, contrast and saturation of uint8 [B, 3, V, V], in this order, as torchvision's functions of these names do.

    Sums over pixels are exact, so a view does not depend on the batch around it. The factors, float32 [B, 3], are at least 0.
    """
    # torchvision's three functions take one factor for a whole batch, clip to 0..255 and round down after each, and the gray too. Each
    # of the three is linear in the pixels, so together they are a factor for the pixel, one for its gray and an offset, of which the sum
    # is clipped and rounded to the nearest level once.
    brightness, contrast, saturation = factors.view(-1, 3, 1, 1, 1).unbind(1)
    pixels = views.float()
    gain = brightness * contrast
    gray = _gray(pixels) * ((1 - saturation) * gain)
    gray += (1 - contrast) * brightness * _gray(channel_means(views))
    return levels(pixels.mul_(saturation * gain).add_(gray))


def channel_means(views: Tensor) -> Tensor:
    """Average each channel: uint8 [B, 3, V, V] to float32 [B, 3, 1, 1]; the sum is of whole numbers, so it is exact in any order."""
    return views.sum((2, 3), keepdim=True, dtype=torch.int32).float() / (views.shape[-2] * views.shape[-1])


def _gray(pixels: Tensor) -> Tensor:
    """Weigh the channels: [B, 3, H, W] to [B, 1, H, W]."""
    # Not torchvision's rgb_to_grayscale, which rounds the gray of uint8 images down to a whole level.
    red, green, blue = (pixels[:, channel] * weight for channel, weight in enumerate(GRAY_WEIGHTS))
    return (red + green + blue).unsqueeze(1)


def levels(pixels: Tensor) -> Tensor:
    """Round float pixels to the nearest of the 256 levels; changes `pixels`."""
    return pixels.round_().clamp_(0, 255).to(torch.uint8)


def apply_operations(
    views: Tensor,
    parameters: ViewParameters,
    magnitude: float,
    *,
    run: Callable[[Any], Any] = lambda function: function,
) -> Tensor:
    """Apply each view's operations, of a magnitude from 0 to 10, one after another; the views, uint8 [B, 3, V, V], are changed.

    The host decides which views an operation changes, so it never waits for the device. `run` may compile what the device computes.
    """
    for numbers, negative in zip(parameters.operations.unbind(1), parameters.negative.unbind(1), strict=True):
        amounts = [-magnitude / 10 if backwards else magnitude / 10 for backwards in negative.tolist()]
        names = [OPERATIONS[number] for number in numbers.tolist()]
        for family, values_of, apply in _FAMILIES:
            rows = [row for row, name in enumerate(names) if name in family]
            if rows:
                on_device = to_device(torch.tensor(rows), views.device)
                values = values_of([names[row] for row in rows], [amounts[row] for row in rows], views.shape[-1])
                if isinstance(values, Tensor):
                    values = to_device(values, views.device)
                chosen = views.index_select(0, on_device)
                changed = run(apply)(chosen) if values is None else run(apply)(chosen, values)
                views.index_copy_(0, on_device, changed)
    return views


def _maps(names: list[str], amounts: list[float], size: int) -> Tensor:
    """Return the maps of `_inverse_map`, float32 [n, 2, 3]."""
    return torch.tensor([_inverse_map(name, amount, size) for name, amount in zip(names, amounts, strict=True)])


def _warp(views: Tensor, maps: Tensor) -> Tensor:
    """Shear, shift or rotate: bilinear, black outside of the image."""
    # torchvision's default is the nearest pixel, which leaves ragged edges. Its bilinear warp takes one map for a whole batch.
    size = views.shape[-1]
    maps = maps.view(-1, 2, 3, 1, 1)
    centered = torch.arange(size, dtype=torch.float32, device=views.device) + (0.5 - size / 2)
    x, y = centered.view(1, 1, size), centered.view(1, size, 1)
    grid = maps[:, :, 0] * x + maps[:, :, 1] * y + maps[:, :, 2]  # [n, 2, V, V], in pixels from the center
    grid = grid.mul_(2 / size).permute(0, 2, 3, 1)
    return levels(F.grid_sample(views.float(), grid, mode="bilinear", padding_mode="zeros", align_corners=False))


def _inverse_map(name: str, amount: float, size: int) -> _Map:
    """Return the map from a place in the new view to its place in the old one, both in pixels from the center."""
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


def _factors(names: list[str], amounts: list[float], _: int) -> Tensor:
    factors = torch.ones(len(names), 3)
    for row, (name, amount) in enumerate(zip(names, amounts, strict=True)):
        factors[row, ("brightness", "contrast", "color").index(name)] += _LARGEST_CHANGE * amount
    return factors


def _sharpen(views: Tensor, changes: Tensor) -> Tensor:
    """Move away from, or toward, the image smoothed with weights 1 around a 5; the outermost pixels stay."""
    pixels = views.float()
    inner = pixels[:, :, 1:-1, 1:-1]
    three = pixels[:, :, :-2] + pixels[:, :, 1:-1] + pixels[:, :, 2:]
    nine = three[..., :-2] + three[..., 1:-1] + three[..., 2:]
    smooth = nine.add_(4 * inner).div_(13).round_()
    inner += (inner - smooth).mul_(changes.view(-1, 1, 1, 1))
    return levels(pixels)


def _autocontrast(views: Tensor) -> Tensor:
    """Stretch each channel to 0..255; a channel of a single level stays."""
    pixels = views.float()
    darkest, brightest = pixels.amin((2, 3), keepdim=True), pixels.amax((2, 3), keepdim=True)
    extent = brightest - darkest
    stretched = (pixels - darkest).mul_(255).div_(extent.clamp(min=1))
    return levels(torch.where(extent > 0, stretched, pixels))


_Values: TypeAlias = Tensor | float | None

_FAMILIES: tuple[tuple[set[str], Callable[[list[str], list[float], int], _Values], Callable[..., Tensor]], ...] = (
    ({"shear_x", "shear_y", "translate_x", "translate_y", "rotate"}, _maps, _warp),
    ({"brightness", "contrast", "color"}, _factors, adjust_color),
    ({"sharpness"}, lambda _, amounts, __: _LARGEST_CHANGE * torch.tensor(amounts), _sharpen),
    # Keep the upper bits, at least four.
    ({"posterize"}, lambda _, amounts, __: 8 - round(4 * abs(amounts[0])), torchvision.posterize),
    # Invert the brighter pixels.
    ({"solarize"}, lambda _, amounts, __: 255 * (1 - abs(amounts[0])), torchvision.solarize),
    ({"autocontrast"}, lambda *_: None, _autocontrast),
    # Give each channel's levels equal shares, by Pillow's rule; a channel with hardly more than one level stays.
    ({"equalize"}, lambda *_: None, torchvision.equalize),
)
"""Operations that are applied together: what the host computes from names, amounts and the edge of a view, and what is done with it."""


# ---- The crop


def crop_sample(image: Tensor, box: Sequence[float], *, mirror: bool, out: Tensor) -> None:
    """Crop, resize and mirror one image on the CPU: uint8 [3, h, w], in any memory layout, into `out`, uint8 [3, V, V].

    The bits are those of torchvision's `resized_crop` and `horizontal_flip`. The box is left, top, width, height in pixels of the image;
    fractions (of one that was shrunk while it was decoded) are rounded to whole pixels, which moves the view by at most half of one.
    """
    # torch's resize of uint8 images is fastest for a decoder's interleaved pixels, permuted. torchvision's functions copy them to planar
    # memory first and take twice as long (0.57 ms against 0.27 ms for 100 x 90 of 160 x 160 pixels to 64 x 64, one core).
    left, top, width, height = box
    columns, rows = slice(round(left), round(left + width)), slice(round(top), round(top + height))
    view = image[:, rows, columns].permute(1, 2, 0)[None].permute(0, 3, 1, 2)  # strides that torch knows as interleaved
    if view.shape[-2:] != out.shape[-2:]:
        view = F.interpolate(view, size=out.shape[-2:], mode="bilinear", antialias=True)
    out.copy_(view[0].flip(-1) if mirror else view[0])


def crop_batch(images: Tensor, parameters: ViewParameters, size: int) -> Tensor:
    """Crop, resize and mirror a batch, uint8 [B, 3, S, S] to [B, 3, V, V]: image by image on the CPU, all at once on another device."""
    if images.device.type != "cpu":
        return crop_by_products(images, parameters, size)
    views = images.new_empty((len(images), 3, size, size))
    for image, box, mirror, out in zip(images, parameters.box.tolist(), parameters.mirror.tolist(), views, strict=True):
        crop_sample(image, box, mirror=mirror, out=out)
    return views


def crop_by_products(images: Tensor, parameters: ViewParameters, size: int) -> Tensor:
    """Crop, resize and mirror a batch by a matrix product along each axis, without waiting for the device.

    The products are of whole numbers below 2^24, so float32 is exact; not under autocast.
    """
    count, stored = len(images), images.shape[-1]
    box, mirror = (to_device(part, images.device) for part in (parameters.box, parameters.mirror))
    place = torch.arange(size, dtype=torch.float64, device=images.device)
    # Both axes in one go, since the host has to start each of these small kernels: columns, then rows.
    mirrored = torch.where(mirror.view(-1, 1), size - 1 - place, place)
    places = torch.cat([mirrored, place.expand(count, -1)]).unsqueeze(2)
    starts, lengths = box.view(-1, 2, 2).permute(1, 2, 0).reshape(2, 2 * count)  # left and top, width and height
    taps, weights, units = filter_taps(starts, lengths, places, stored=stored)
    dense = weights.new_zeros((2 * count, size, stored + taps.shape[2]))  # room for taps past the last pixel
    dense.scatter_(2, taps, weights)
    (columns, rows), (across, down) = dense[:, :, :stored].split(count), units.split(count)
    with full_float32():
        pixels = images.reshape(count, 3 * stored, stored).float() @ columns.mT
        pixels = rounded(pixels, across).view(count, 3, stored, size)
        pixels = rounded(rows.unsqueeze(1) @ pixels, down.unsqueeze(1))
    return pixels.clamp_(0, 255).to(torch.uint8)


def rounded(sums: Tensor, unit: Tensor) -> Tensor:
    """Round weighted sums to whole levels, in place; `unit` is the sum of the weights, a power of two."""
    return sums.add_(unit / 2).div_(unit).floor_()


def filter_taps(start: Tensor, length: Tensor, place: Tensor, *, stored: int) -> tuple[Tensor, Tensor, Tensor]:
    """Compute which stored pixels along one axis a view's pixel is made of, and their weights, which are whole numbers.

    They are the weights of torch's own resize of uint8 images, except that a product of weight and pixel stays below 2^24, so that
    float32 is exact. Boxes have a `start` and a `length`, int64 [B]; `place`, float64 [B, V, 1], maps the view's places to the resized
    box's pixels.

    Returns:
        The pixels, int64 [B, V, T], of which one past the last pixel has no weight; the weights, float32 [B, V, T]; and their sum, float32
        [B, 1, 1].
    """
    size = place.shape[1]
    taps = 2 * math.ceil(max(stored / size, 1)) + 1
    length = length.double().view(-1, 1, 1)
    scale = length / size
    support = scale.clamp(min=1)
    center = scale * (place + 0.5)
    first = (center - support + 0.5).floor_().clamp_(min=0)
    pixel = first + torch.arange(taps, dtype=place.dtype, device=place.device)
    weights = (1 - (pixel - center + 0.5).abs_() / support).clamp_(min=0)
    weights *= pixel < torch.minimum((center + support + 0.5).floor_(), length)
    weights /= weights.sum(2, keepdim=True)
    # The fixed-point 1: 2^14, 2^15 or 2^16, the least with which the doubled largest weight does not fit into 15 bits.
    peak = weights.amax((1, 2), keepdim=True)
    unit = torch.where(peak >= 32767.5 / 2**16, 2.0**15, 2.0**16)
    unit = torch.where(peak >= 32767.5 / 2**15, 2.0**14, unit)
    weights = weights.mul_(unit).add_(0.5).floor_().float()
    return pixel.long() + start.view(-1, 1, 1), weights, unit.float()


# ---- Mixing


def mixes(settings: ViewSettings) -> bool:
    """Return whether views are mixed at all."""
    return settings.mixup > 0 or settings.cutmix > 0


def draw_mixing(
    keys: Keys, numbers: Indices, partner: Indices, partner_labels: Indices, *, seed: int, settings: ViewSettings
) -> Mixing:
    """Draw how the views of samples with these keys and view numbers, [b], are mixed with their partners'.

    `partner` has the row of each one's partner among the batch's images, [b]; at least one of mixup's and CutMix's alphas is above 0.
    """
    kind, quantile, x, y = uniform(_MIXING, seed, keys, numbers, np.arange(4)[:, None])
    kind_share = {(True, False): 0.0, (False, True): 1.0, (True, True): 0.5}[settings.mixup > 0, settings.cutmix > 0]
    is_cutmix = kind < kind_share
    # Quantiles of Beta(alpha, alpha); ones where alpha is 0, which leaves the image as it is.
    cutmix, mixup = (
        scipy.special.betaincinv(alpha, alpha, quantile) if alpha else np.ones_like(quantile)
        for alpha in (settings.cutmix, settings.mixup)
    )
    share = np.where(is_cutmix, cutmix, mixup)
    edge = np.sqrt(1 - share) / 2
    box = np.clip(np.stack([x - edge, y - edge, x + edge, y + edge], axis=1), 0, 1)
    box[~is_cutmix] = 0
    outside = 1 - (box[:, 2] - box[:, 0]) * (box[:, 3] - box[:, 1])
    return Mixing(
        partner=torch.from_numpy(partner),
        labels=torch.from_numpy(partner_labels),
        share=torch.from_numpy(np.where(is_cutmix, outside, share)).float(),
        blend=torch.from_numpy(np.where(is_cutmix, 1.0, share)).float(),
        box=torch.from_numpy(box).float(),
    )


def mix(images: Tensor, mixing: Mixing) -> Tensor:
    """Mix each sample's view with its partner's: uint8 [b + x, 3, V, V], the first b the samples' own, to uint8 [b, 3, V, V]."""
    mixed = torch.empty_like(images[: len(mixing.partner)])
    center = (torch.arange(images.shape[-1], device=mixing.box.device) + 0.5) / images.shape[-1]  # of each pixel
    for rows in cache_sized_slices(mixed):
        own, partner = images[rows].float(), images[mixing.partner[rows]].float()
        weight = mixing.blend[rows].view(-1, 1, 1, 1).masked_fill(inside(mixing.box[rows], center), 0)
        mixed[rows] = levels(own.sub_(partner).mul_(weight).add_(partner))
    return mixed
