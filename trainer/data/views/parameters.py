"""What is drawn for a view: a function of (seed, sample key, view number, settings), counter-based and vectorised over a batch.

Each draw has its own index, so that a setting that is turned on or off changes no other draw.

Shapes: B views, R operations of RandAugment.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from trainer.config import ViewSettings
from trainer.data.randomness import uniform

Numbers = npt.NDArray[np.float64]

_AREA, _ASPECT, _LEFT, _TOP, _MIRROR, _BRIGHTNESS, _CONTRAST, _SATURATION = range(8)
_ERASED, _ERASED_AREA, _ERASED_ASPECT, _ERASED_LEFT, _ERASED_TOP = range(8, 13)
_OPERATIONS = 13
"""Index of the first of RandAugment's draws, two for each operation: which one, and its direction."""

OPERATIONS = (
    "identity",
    "shear_x",
    "shear_y",
    "translate_x",
    "translate_y",
    "rotate",
    "brightness",
    "colour",
    "contrast",
    "sharpness",
    "posterize",
    "solarize",
    "autocontrast",
    "equalize",
)
"""RandAugment's operations (Cubuk et al. 2020), in torchvision's order; an operation's number is its place."""

ERASED_AREA, ERASED_ASPECT = (0.02, 1 / 3), 10 / 3
"""Shares of a view that a rectangle may erase, and the largest ratio of its sides (Zhong et al. 2020)."""


class ViewParameters(NamedTuple):
    """What was drawn for B views. Small, and on the CPU whatever device the images are on: it decides which operations run."""

    box: Tensor
    """The crop in whole stored pixels: left, top, width, height; int64 [B, 4]."""
    mirror: Tensor
    """Whether the view is mirrored left to right, bool [B]."""
    colour: Tensor
    """Factors of brightness, contrast and saturation, float32 [B, 3]; 1 changes nothing."""
    operations: Tensor
    """RandAugment's operations, one after another, as numbers into OPERATIONS; int64 [B, R]."""
    negative: Tensor
    """Whether an operation that has a direction goes the negative way, bool [B, R]."""
    erased: Tensor
    """Rectangle to erase, as shares of the view's edge: left, top, right, bottom; float32 [B, 4], zeros for none."""


def draw_views(
    keys: npt.NDArray[np.uint64],
    numbers: npt.NDArray[np.int64],
    *,
    stored: int,
    seed: int,
    settings: ViewSettings,
) -> ViewParameters:
    """The parameters of these views.

    Args:
        keys: key of each sample [B].
        numbers: number of each sample's view [B].
        stored: edge of the stored images, in pixels.
        seed: of the views.
        settings: how strongly to augment.
    """
    rounds = settings.randaugment_operations
    indices = np.arange(_OPERATIONS + 2 * rounds)
    drawn = uniform(seed, keys[:, None], numbers[:, None], indices).T
    operations, negative = drawn[_OPERATIONS::2], drawn[_OPERATIONS + 1 :: 2]
    return ViewParameters(
        box=torch.from_numpy(_crops(drawn, stored, settings)),
        mirror=torch.from_numpy(settings.flip & (drawn[_MIRROR] < 0.5)),
        colour=torch.from_numpy(1 + settings.color_jitter * (2 * drawn[_BRIGHTNESS : _SATURATION + 1].T - 1)).float(),
        operations=torch.from_numpy((len(OPERATIONS) * operations.T).astype(np.int64)),
        negative=torch.from_numpy(negative.T < 0.5),
        erased=torch.from_numpy(_erased(drawn, settings.erasing)).float(),
    )


def _crops(drawn: Numbers, stored: int, settings: ViewSettings) -> npt.NDArray[np.int64]:
    """Boxes [B, 4] as torchvision's RandomResizedCrop draws them: the share of the area uniform, the ratio of the sides log-uniform."""
    area = settings.min_scale + (1 - settings.min_scale) * drawn[_AREA]
    sides = stored * _sides(area, drawn[_ASPECT], settings.max_aspect)
    sides = np.clip(np.rint(sides), 1, stored).astype(np.int64)
    corner = drawn[[_LEFT, _TOP]].T * (stored - sides + 1)
    return np.concatenate([corner.astype(np.int64), sides], axis=1)


def _sides(area: Numbers, quantile: Numbers, max_aspect: float) -> Numbers:
    """Width and height [B, 2] of rectangles within the unit square.

    The ratio of the sides is log-uniform among those with which the area fits; torchvision draws again where it does not fit.
    """
    largest = np.minimum(max_aspect, 1 / area)
    aspect = np.exp((2 * quantile - 1) * np.log(largest))
    return np.stack([np.sqrt(area * aspect), np.sqrt(area / aspect)], axis=1)


def _erased(drawn: Numbers, share: float) -> Numbers:
    """Rectangles [B, 4]: left, top, right, bottom."""
    smallest, largest = ERASED_AREA
    sides = _sides(smallest + (largest - smallest) * drawn[_ERASED_AREA], drawn[_ERASED_ASPECT], ERASED_ASPECT)
    corner = drawn[[_ERASED_LEFT, _ERASED_TOP]].T * (1 - sides)
    rectangles: Numbers = np.concatenate([corner, corner + sides], axis=1)
    rectangles[drawn[_ERASED] >= share] = 0
    return rectangles
