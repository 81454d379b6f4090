"""Views: the augmented images that a training step sees, alone or mixed with one another (mixup and CutMix).

A view is a function of (seed, sample key, view number, settings, stored size, view size); so it does not depend on workers, processes,
the batch size or a resume. The loader makes it image by image, or a device makes a batch of them: crop, colour, RandAugment's operations,
erasing. On the CPU both ways give the same bits, with two exceptions: crops that shrink an axis to less than a quarter (one level), and
JPEG files whose crop is at least twice the view, which the loader decodes at a reduced size unless outputs are recorded (up to half a
view's pixel aside). A GPU rounds colours and RandAugment's bilinear warp differently by up to a level, which a later operation may enlarge.

Both ways resize with an antialiased triangle filter restricted to the box, whose weights are whole numbers (fixed point), and round after
each axis. So sums are exact in any order: a crop has the same bits in every batch and on every device.

A view is mixed with the same-numbered view of its partner, which is a function of (seed, view number) (`trainer.data.sampler`); the
mixture is one of (seed, sample key, view number). So a teacher's outputs for a mixed view can be recorded.

Shapes: B images, S x S stored pixels, V x V pixels of a view, T taps of the filter; b samples and b + x images that are mixed.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import scipy.special
import torch
import torch.nn.functional as F
from torch import Tensor

from trainer.config import ViewSettings
from trainer.data.batch import Mixing, cache_sized_slices, to_device
from trainer.data.sampler import Indices, Keys, uniform
from trainer.data.views.operations import adjust_colour, apply_operations, channel_means, levels
from trainer.data.views.parameters import Numbers, ViewParameters

_MIXING = 0x6D6978696E67  # keeps mixing's draws apart from those of the views


def make_views(images: Tensor, parameters: ViewParameters, size: int, settings: ViewSettings) -> Tensor:
    """Make the views of a batch of stored images, on their device: uint8 [B, 3, S, S] to [B, 3, V, V]; the parameters are on the CPU."""
    return finish_views(crop_batch(images, parameters, size), parameters, settings)


def finish_views(views: Tensor, parameters: ViewParameters, settings: ViewSettings) -> Tensor:
    """Apply what follows the crop: colour, RandAugment's operations, erasing; the crops, uint8 [B, 3, V, V], are changed and returned."""
    if not (settings.color_jitter or settings.randaugment_operations or settings.erasing):
        return views
    for rows in cache_sized_slices(views):
        part, drawn = views[rows], ViewParameters(*(values[rows] for values in parameters))
        if settings.color_jitter:
            part = adjust_colour(part, drawn.colour)
        if settings.randaugment_operations:  # they choose single views, which is twice as fast in planar memory
            part = apply_operations(part.contiguous(), drawn, settings.randaugment_magnitude)
        views[rows] = erase(part, drawn.erased) if settings.erasing else part
    return views


def erase(views: Tensor, boxes: Tensor) -> Tensor:
    """Fill a rectangle with the view's mean colour: random erasing (Zhong et al. 2020).

    The views, uint8 [B, 3, V, V], are changed and returned. The boxes are shares of the edge: left, top, right, bottom; float32 [B, 4],
    zeros for none, on the CPU.
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
    """Fill the rectangles of n views in a few operations, since the host has to launch each one on a device.

    The views, uint8 [B, 3, V, V], are changed. Which ones, int64 [n], and their rectangles in pixels (left, top, right, bottom), int64
    [n, 4], are on the CPU.
    """
    rows, edges = to_device(rows, views.device), to_device(edges, views.device)
    inside = _inside(edges, torch.arange(views.shape[-1], device=views.device))
    chosen = views.index_select(0, rows)
    views.index_copy_(0, rows, torch.where(inside, levels(channel_means(chosen)), chosen))


def _inside(boxes: Tensor, places: Tensor) -> Tensor:
    """Mark the pixels in boxes, left, top, right, bottom, [n, 4], of places along an edge, [V], in the same unit: bool [n, 1, V, V]."""
    left, top, right, bottom = boxes.view(-1, 4, 1).unbind(1)
    columns, lines = (places >= left) & (places < right), (places >= top) & (places < bottom)
    return (lines.unsqueeze(2) & columns.unsqueeze(1)).unsqueeze(1)


# ---------------------------------------------------------------------------------------------------------------------
# The crop


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

    It is exact in plain float32 only: not under autocast, nor with TF32, which torch turns off by default.
    """
    count, stored = len(images), images.shape[-1]
    box, mirror = (to_device(part, images.device) for part in (parameters.box, parameters.mirror))
    place = torch.arange(size, dtype=torch.float64, device=images.device)
    # Both axes in one go, since the host has to start each of these small kernels: columns, then rows.
    mirrored = torch.where(mirror.view(-1, 1), size - 1 - place, place)
    places = torch.cat([mirrored, place.expand(count, -1)]).unsqueeze(2)
    starts, lengths = box.view(-1, 2, 2).permute(1, 2, 0).reshape(2, 2 * count)  # left and top, width and height
    weights, units = _filter(starts, lengths, places, stored=stored)
    (columns, rows), (across, down) = weights.split(count), units.split(count)
    pixels = images.reshape(count, 3 * stored, stored).float() @ columns.mT
    pixels = _rounded(pixels, across).view(count, 3, stored, size)
    pixels = _rounded(rows.unsqueeze(1) @ pixels, down.unsqueeze(1))
    return pixels.clamp_(0, 255).to(torch.uint8)


def _rounded(sums: Tensor, unit: Tensor) -> Tensor:
    """Round weighted sums to whole levels, in place; `unit` is the sum of the weights, a power of two."""
    return sums.add_(unit / 2).div_(unit).floor_()


def _filter(start: Tensor, length: Tensor, place: Tensor, *, stored: int) -> tuple[Tensor, Tensor]:
    """Compute the weights of the stored pixels along one axis, which are whole numbers, and their sum.

    They are the weights of torch's own resize of uint8 images, except that a product of weight and pixel stays below 2^24, so that
    float32 is exact.

    Args:
        start: first pixel of each box, int64 [B].
        length: pixels of each box, int64 [B].
        place: which pixel of the resized box is at each place of the view, float64 [B, V, 1].
        stored: pixels S of the stored images.

    Returns:
        float32 [B, V, S] and float32 [B, 1, 1].
    """
    size = place.shape[1]
    taps = 2 * math.ceil(max(stored / size, 1)) + 1
    length = length.double().view(-1, 1, 1)
    scale = length / size
    support = scale.clamp(min=1)
    centre = scale * (place + 0.5)
    first = (centre - support + 0.5).floor_().clamp_(min=0)
    pixel = first + torch.arange(taps, dtype=place.dtype, device=place.device)  # [B, V, T]
    weights = (1 - (pixel - centre + 0.5).abs_() / support).clamp_(min=0)
    weights *= pixel < torch.minimum((centre + support + 0.5).floor_(), length)
    weights /= weights.sum(2, keepdim=True)
    # The fixed-point 1: 2^14, 2^15 or 2^16, the least with which the doubled largest weight does not fit into 15 bits.
    peak = weights.amax((1, 2), keepdim=True)
    unit = torch.where(peak >= 32767.5 / 2**16, 2.0**15, 2.0**16)
    unit = torch.where(peak >= 32767.5 / 2**15, 2.0**14, unit)
    weights = weights.mul_(unit).add_(0.5).floor_().float()
    dense = weights.new_zeros((len(start), size, stored + taps))  # a tap past the last pixel has no weight
    dense.scatter_(2, pixel.long() + start.view(-1, 1, 1), weights)
    return dense[:, :, :stored], unit.float()


# ---------------------------------------------------------------------------------------------------------------------
# Mixing


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
    share = np.where(is_cutmix, _beta(settings.cutmix, quantile), _beta(settings.mixup, quantile))
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


def _beta(alpha: float, quantile: Numbers) -> Numbers:
    """Compute quantiles of Beta(alpha, alpha); ones where alpha is 0, which leaves the image as it is."""
    if not alpha:
        return np.ones_like(quantile)
    values: Numbers = scipy.special.betaincinv(alpha, alpha, quantile)
    return values


def mix(images: Tensor, mixing: Mixing) -> Tensor:
    """Mix each sample's view with its partner's: uint8 [b + x, 3, V, V], the first b the samples' own, to uint8 [b, 3, V, V]."""
    mixed = torch.empty_like(images[: len(mixing.partner)])
    centre = (torch.arange(images.shape[-1], device=mixing.box.device) + 0.5) / images.shape[-1]  # of each pixel
    for rows in cache_sized_slices(mixed):
        own, partner = images[rows].float(), images[mixing.partner[rows]].float()
        weight = mixing.blend[rows].view(-1, 1, 1, 1).masked_fill(_inside(mixing.box[rows], centre), 0)
        mixed[rows] = levels(own.sub_(partner).mul_(weight).add_(partner))
    return mixed
