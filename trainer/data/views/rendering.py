"""Views: the augmented images that a training step sees.

A view is a function of (seed, sample key, view number, settings, stored size, view size); so it does not depend on workers, processes,
the batch size or a resume. The loader makes it image by image, or a device makes a batch of them: crop (`geometry`), colour, RandAugment's
operations, erasing. On the CPU both ways give the same bits, with two exceptions: crops that shrink an axis to less than a quarter (one
level), and JPEG files whose crop is at least twice the view, which the loader decodes at a reduced size unless outputs are recorded (up
to half a view's pixel aside). A GPU rounds colours and RandAugment's bilinear warp differently by up to a level, which a later operation
may enlarge.

Shapes: B images, S x S stored pixels, V x V pixels of a view.
"""

from __future__ import annotations

import torch
from torch import Tensor

from trainer.config import ViewSettings
from trainer.data.batch import cache_sized_slices, to_device
from trainer.data.views.geometry import crop_batch
from trainer.data.views.operations import adjust_colour, apply_operations, channel_means, levels
from trainer.data.views.parameters import ViewParameters


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

    Args:
        views: uint8 [B, 3, V, V]; changed in place.
        boxes: rectangles as shares of the edge: left, top, right, bottom; float32 [B, 4], zeros for none, on the CPU.

    Returns:
        `views`.
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
    """Fill the rectangles of all views in a few operations, since the host has to launch each one on a device.

    Args:
        views: uint8 [B, 3, V, V]; changed in place.
        rows: the n views to change, int64 [n], on the CPU.
        edges: their rectangles in pixels: left, top, right, bottom; int64 [n, 4], on the CPU.
    """
    rows, edges = to_device(rows, views.device), to_device(edges, views.device)
    left, top, right, bottom = edges.view(-1, 4, 1).unbind(1)
    place = torch.arange(views.shape[-1], device=views.device)
    columns, lines = (place >= left) & (place < right), (place >= top) & (place < bottom)
    inside = (lines.unsqueeze(2) & columns.unsqueeze(1)).unsqueeze(1)  # [n, 1, V, V]
    chosen = views.index_select(0, rows)
    views.index_copy_(0, rows, torch.where(inside, levels(channel_means(chosen)), chosen))
