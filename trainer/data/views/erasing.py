"""Random erasing (Zhong et al. 2020).

Shapes: B views, V x V pixels.
"""

from __future__ import annotations

from torch import Tensor

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
        means = levels(channel_means(views.index_select(0, rows.to(views.device, non_blocking=True))))
        edges = (boxes[rows] * views.shape[-1]).round().long().tolist()
        for row, (left, top, right, bottom), mean in zip(rows.tolist(), edges, means, strict=True):
            views[row, :, top:bottom, left:right] = mean
    return views
