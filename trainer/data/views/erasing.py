"""Random erasing (Zhong et al. 2020).

Shapes: B views, V x V pixels.
"""

from __future__ import annotations

import torch
from torch import Tensor

from trainer.data.sending import send
from trainer.data.views.colour import channel_means, levels


def erase(views: Tensor, boxes: Tensor) -> Tensor:
    """Fill a rectangle with the view's mean colour.

    Args:
        views: uint8 [B, 3, V, V]; changed in place.
        boxes: as shares of the edge: left, top, right, bottom; float32 [B, 4], zeros for none, on the CPU.

    Returns:
        `views`.
    """
    rows = (boxes[:, 2] > boxes[:, 0]).nonzero().squeeze(1)
    if len(rows):
        size = views.shape[-1]
        edges = send((boxes[rows] * size).round(), views.device)
        left, top, right, bottom = edges.view(-1, 4, 1).unbind(1)
        place = torch.arange(size, device=views.device)
        columns, lines = (place >= left) & (place < right), (place >= top) & (place < bottom)
        inside = (lines.unsqueeze(2) & columns.unsqueeze(1)).unsqueeze(1)  # [rows, 1, V, V]
        on_device = send(rows, views.device)
        chosen = views.index_select(0, on_device)
        views.index_copy_(0, on_device, torch.where(inside, levels(channel_means(chosen)), chosen))
    return views
