"""Mixup and CutMix: each view mixed with the same-numbered view of its partner.

The partner is a function of (seed, view number) (`trainer.data.sampler`), the mixture one of (seed, sample key, view number); so a
teacher's outputs for a mixed view can be recorded.

Shapes: b samples, b + x images, V x V pixels.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import scipy.special
import torch
from torch import Tensor

from trainer.config import ViewSettings
from trainer.data.batch import Mixing, cache_sized_slices
from trainer.data.randomness import Indices, Keys, uniform
from trainer.data.views.operations import levels

_MIXING = 0x6D6978696E67
"""Keeps mixing's draws apart from those of the views."""


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


def _beta(alpha: float, quantile: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """Compute quantiles of Beta(alpha, alpha); ones where alpha is 0, which leaves the image as it is."""
    if not alpha:
        return np.ones_like(quantile)
    values: npt.NDArray[np.float64] = scipy.special.betaincinv(alpha, alpha, quantile)
    return values


def mix(images: Tensor, mixing: Mixing) -> Tensor:
    """Mix each sample's view with its partner's.

    Args:
        images: uint8 [b + x, 3, V, V], the first b the samples' own.
        mixing: mixtures of the b samples, on the images' device.

    Returns:
        uint8 [b, 3, V, V].
    """
    mixed = torch.empty_like(images[: len(mixing.partner)])
    centre = (torch.arange(images.shape[-1], device=mixing.box.device) + 0.5) / images.shape[-1]  # of each pixel
    for rows in cache_sized_slices(mixed):
        own, partner = images[rows].float(), images[mixing.partner[rows]].float()
        left, top, right, bottom = mixing.box[rows].view(-1, 4, 1).unbind(1)
        columns, lines = (centre >= left) & (centre < right), (centre >= top) & (centre < bottom)
        inside = (lines.unsqueeze(2) & columns.unsqueeze(1)).unsqueeze(1)  # [b, 1, V, V]
        weight = mixing.blend[rows].view(-1, 1, 1, 1).masked_fill(inside, 0)
        mixed[rows] = levels(own.sub_(partner).mul_(weight).add_(partner))
    return mixed
