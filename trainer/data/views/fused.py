"""The views of a batch on a GPU in a few kernels, which torch's compiler writes.

Operation by operation, 256 views of 224 px take 62 kernels, which move 4.7 GB; with RandAugment, erasing and mixing 585 kernels. Here each
axis is resized in a kernel of its own, which takes the few pixels that a filter has a weight for, and what follows a crop is fused with it.
Crops have the same bits as in `rendering`, since sums are of whole numbers; colors may differ by a level, as on a GPU anyway.

Batches differ in size, as mixing brings partners along, so graphs are compiled for any number of images.

Shapes: B images, S x S stored pixels, V x V pixels of a view, T taps of the filter; b samples and b + x images that are mixed.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor

from trainer.config import ViewSettings
from trainer.data.batch import Mixing, to_device
from trainer.data.views import rendering
from trainer.data.views.parameters import ViewParameters
from trainer.devices.torch_private import any_number, compiler_backend

INLINED = dict.fromkeys(("realize_reads_threshold", "realize_acc_reads_threshold", "realize_opcount_threshold"), 10_000)
"""Inductor's limits of what one kernel computes, high enough that it keeps no sum of a filter's taps in memory."""


def make_views(images: Tensor, parameters: ViewParameters, size: int, settings: ViewSettings) -> Tensor:
    """Make the views of a batch as `rendering.make_views`, uint8 [B, 3, S, S] to [B, 3, V, V]."""
    box, mirror = (to_device(part, images.device) for part in (parameters.box, parameters.mirror))
    columns = _compiled(_resize_columns)(images, box, mirror, size)
    color = to_device(parameters.color, images.device) if settings.color_jitter else None
    boxes = to_device(parameters.erased, images.device) if settings.erasing else None
    if not settings.randaugment_operations:
        return _compiled(_finish_rows)(columns, box, color, boxes, size)
    views = _compiled(_finish_rows)(columns, box, color, None, size)
    views = rendering.apply_operations(views, parameters, settings.randaugment_magnitude, run=_compiled_if_ours)
    return views if boxes is None else _compiled(_erase)(views, boxes)


def mix(images: Tensor, mixing: Mixing) -> Tensor:
    """Mix each sample's view with its partner's as `rendering.mix`, uint8 [b + x, 3, V, V] to uint8 [b, 3, V, V]."""
    return _compiled(_mix)(images, mixing.partner, mixing.blend, mixing.box)


def _resize_columns(images: Tensor, box: Tensor, mirror: Tensor, size: int) -> Tensor:
    """Resize the columns of boxes, int64 [B, 4], and mirror them: uint8 [B, 3, S, S] to [B, 3, S, V]."""
    place = torch.arange(size, dtype=torch.float64, device=images.device)
    places = torch.where(mirror.view(-1, 1), size - 1 - place, place).unsqueeze(2)
    return _resize(images, box[:, 0], box[:, 2], places, axis=3)


def _finish_rows(columns: Tensor, box: Tensor, color: Tensor | None, boxes: Tensor | None, size: int) -> Tensor:
    """Resize the rows of uint8 [B, 3, S, V] to [B, 3, V, V]; then change the color and erase, where that is wanted."""
    place = torch.arange(size, dtype=torch.float64, device=columns.device)
    views = _resize(columns, box[:, 1], box[:, 3], place.expand(len(columns), size).unsqueeze(2), axis=2)
    if color is not None:
        views = rendering.adjust_color(views, color)
    return views if boxes is None else _erase(views, boxes)


def _resize(images: Tensor, start: Tensor, length: Tensor, places: Tensor, *, axis: int) -> Tensor:
    """Resize one axis of uint8 [B, 3, H, W] as `rendering.crop_by_products` does, to the same bits."""
    pixels, weights, unit = rendering.filter_taps(start, length, places, stored=images.shape[axis])
    pixels = pixels.clamp(max=images.shape[axis] - 1)
    shape, across = list(images.shape), [-1, 1, 1, 1]
    shape[axis] = across[axis] = places.shape[1]
    sums = torch.zeros((), device=images.device)
    for tap in range(pixels.shape[2]):
        chosen = images.gather(axis, pixels[:, :, tap].view(across).expand(shape))
        sums = sums + chosen.float() * weights[:, :, tap].view(across)
    return rendering.rounded(sums, unit.unsqueeze(3)).clamp(max=255).to(torch.uint8)


def _erase(views: Tensor, boxes: Tensor) -> Tensor:
    """Fill boxes, as shares of the edge, float32 [B, 4], with the mean color of each view, uint8 [B, 3, V, V]."""
    edges = (boxes * views.shape[-1]).round().long()
    inside = rendering.inside(edges, torch.arange(views.shape[-1], device=views.device))
    return torch.where(inside, rendering.levels(rendering.channel_means(views)), views)


def _mix(images: Tensor, partner: Tensor, blend: Tensor, box: Tensor) -> Tensor:
    own, other = images[: len(partner)].float(), images.index_select(0, partner).float()
    center = (torch.arange(images.shape[-1], device=images.device) + 0.5) / images.shape[-1]
    weight = blend.view(-1, 1, 1, 1).masked_fill(rendering.inside(box, center), 0)
    return rendering.levels((own - other) * weight + other)


@cache
def _compiled(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Compile a function of tensors that begin with any number of images, and of numbers, each of which gets a graph of its own."""
    compiled: Any = torch.compile(function, backend=compiler_backend("inductor", INLINED), dynamic=False)

    def run(*values: Any) -> Tensor:
        for value in values:
            if isinstance(value, Tensor):
                any_number(value)
        result: Tensor = compiled(*values)
        return result

    return run


def _compiled_if_ours(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Compile an operation of `rendering`; torchvision's choose by the type of their input, or wait for the device."""
    return _compiled(function) if function.__module__ == rendering.__name__ else function
