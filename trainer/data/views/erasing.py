"""Random erasing (Zhong et al. 2020).

Shapes: B views, V x V pixels.
"""

from __future__ import annotations

import torch
from torch import Tensor

from trainer.data.views.colour import channel_means, levels
from trainer.data.views.geometry import inside


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
        on_device = rows.to(views.device, non_blocking=True)
        whole = views.index_select(0, on_device)
        hole = inside(boxes[rows].to(views.device, non_blocking=True), views.shape[-1])
        views.index_copy_(0, on_device, torch.where(hole, levels(channel_means(whole)), whole))
    return views
