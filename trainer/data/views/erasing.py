"""Random erasing (Zhong et al. 2020).

Shapes: B views, V x V pixels.
"""

from __future__ import annotations

import torch
from torch import Tensor

from trainer.data.batch import to_device
from trainer.data.views.colour import channel_means, levels


def erase(views: Tensor, boxes: Tensor) -> Tensor:
    """Fill a rectangle with the view's mean colour.

    Args:
        views: uint8 [B, 3, V, V]; changed in place.
        boxes: rectangles as shares of the edge: left, top, right, bottom; float32 [B, 4], zeros for none, on the CPU.

    Returns:
        `views`.
    """
    rows = (boxes[:, 2] > boxes[:, 0]).nonzero().squeeze(1)
    if len(rows):
        fill = _fill_one_by_one if views.device.type == "cpu" else fill_together
        fill(views, rows, (boxes[rows] * views.shape[-1]).round().long())
    return views


def _fill_one_by_one(views: Tensor, rows: Tensor, edges: Tensor) -> None:
    means = levels(channel_means(views.index_select(0, rows)))
    for row, (left, top, right, bottom), mean in zip(rows.tolist(), edges.tolist(), means, strict=True):
        views[row, :, top:bottom, left:right] = mean


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
