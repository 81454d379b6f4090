"""Random parameters of a view: a function of (seed, sample key, view number, settings), counter-based and vectorized over a batch.

Each draw has its own index, so that a setting that is turned on or off changes no other draw.

Shapes: B views, R operations of RandAugment.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from trainer.config import ViewSettings
from trainer.data.sampler import Indices, Keys, uniform

Numbers = npt.NDArray[np.float64]
Rows = Indices | slice
Draw = Callable[[Indices, Rows], Numbers]  # indices of draws [N] and rows of the batch -> numbers in [0, 1), [N, rows]

_AREA, _ASPECT, _LEFT, _TOP, _MIRROR, _BRIGHTNESS, _CONTRAST, _SATURATION = range(8)
_ERASED, _ERASED_AREA, _ERASED_ASPECT, _ERASED_LEFT, _ERASED_TOP = range(8, 13)
_OPERATIONS = 13  # index of the first of RandAugment's draws, two for each operation: which one, and its direction
_CROP_AGAIN, _ERASED_AGAIN = 1_000, 1_100
"""Index of the first of the draws that replace an area and a ratio that do not fit, two for each further attempt."""
_ATTEMPTS = 10  # most draws of an area and a ratio, as in torchvision's RandomResizedCrop and RandomErasing

OPERATIONS = (
    "identity",
    "shear_x",
    "shear_y",
    "translate_x",
    "translate_y",
    "rotate",
    "brightness",
    "color",
    "contrast",
    "sharpness",
    "posterize",
    "solarize",
    "autocontrast",
    "equalize",
)  # randAugment's operations (Cubuk et al. 2020), in torchvision's order; an operation's number is its place.

ERASED_AREA, ERASED_ASPECT = (0.02, 1 / 3), 10 / 3
"""Shares of a view that a rectangle may erase, and the largest ratio of its sides (Zhong et al. 2020)."""


class ViewParameters(NamedTuple):
    """Parameters drawn for B views. Small, and always on the CPU, since the host decides from them which operations run."""

    box: Tensor  # the crop in whole stored pixels: left, top, width, height; int64 [B, 4]
    mirror: Tensor  # whether the view is mirrored left to right, bool [B]
    color: Tensor  # factors of brightness, contrast and saturation, float32 [B, 3]; 1 changes nothing
    operations: Tensor  # RandAugment's operations, one after another, as numbers into OPERATIONS; int64 [B, R]
    negative: Tensor  # whether an operation that has a direction goes the negative way, bool [B, R]
    erased: Tensor  # what to erase, as shares of the edge: left, top, right, bottom; float32 [B, 4], zeros for none


def draw_views(keys: Keys, numbers: Indices, *, stored: int, seed: int, settings: ViewSettings) -> ViewParameters:
    """Draw the parameters of views of samples with these keys and view numbers, [B], stored as squares of `stored` pixels."""
    rounds = settings.randaugment_operations

    def draw(indices: Indices, rows: Rows) -> Numbers:
        return uniform(seed, keys[rows, None], numbers[rows, None], indices).T

    drawn = draw(np.arange(_OPERATIONS + 2 * rounds), slice(None))
    operations, negative = drawn[_OPERATIONS::2], drawn[_OPERATIONS + 1 :: 2]
    # The crop as torchvision's RandomResizedCrop draws it; where no attempt fits, it is the whole image.
    sides = _sides(
        draw,
        drawn[[_AREA, _ASPECT]],
        _CROP_AGAIN,
        areas=(settings.min_scale, 1),
        max_aspect=settings.max_aspect,
        longest=1 + 0.5 / stored,  # what is rounded to the whole edge fits
    )
    pixels = np.clip(np.rint(stored * sides), 1, stored)
    edges = np.where(np.isnan(sides), stored, pixels).astype(np.int64)
    corner = drawn[[_LEFT, _TOP]].T * (stored - edges + 1)
    erased = _sides(
        draw,
        drawn[[_ERASED_AREA, _ERASED_ASPECT]],
        _ERASED_AGAIN,
        areas=ERASED_AREA,
        max_aspect=ERASED_ASPECT,
        longest=1,
    )
    place = drawn[[_ERASED_LEFT, _ERASED_TOP]].T * (1 - erased)
    rectangles: Numbers = np.concatenate([place, place + erased], axis=1)  # left, top, right, bottom
    rectangles[(drawn[_ERASED] >= settings.erasing) | np.isnan(erased).any(axis=1)] = 0
    return ViewParameters(
        box=torch.from_numpy(np.concatenate([corner.astype(np.int64), edges], axis=1)),
        mirror=torch.from_numpy(settings.flip & (drawn[_MIRROR] < 0.5)),
        color=torch.from_numpy(1 + settings.color_jitter * (2 * drawn[_BRIGHTNESS : _SATURATION + 1].T - 1)).float(),
        operations=torch.from_numpy((len(OPERATIONS) * operations.T).astype(np.int64)),
        negative=torch.from_numpy(negative.T < 0.5),
        erased=torch.from_numpy(rectangles).float(),
    )


def _sides(
    draw: Draw, first: Numbers, again: int, *, areas: tuple[float, float], max_aspect: float, longest: float
) -> Numbers:
    """Draw width and height [B, 2] of rectangles, as shares of a square image's edge; NaN where no attempt fits.

    The share of the area is uniform and the ratio of the sides log-uniform; both are drawn again while a side exceeds `longest`. `first`,
    [2, B], are the draws of the first attempt; `draw` makes those of further ones, from the index `again` on.
    """
    smallest, largest = areas
    sides = np.full((first.shape[1], 2), np.nan)
    rows = np.arange(len(sides))
    for attempt in range(_ATTEMPTS):
        quantiles = first if attempt == 0 else draw(again + 2 * attempt - 2 + np.arange(2), rows)
        area = smallest + (largest - smallest) * quantiles[0]
        aspect = np.exp((2 * quantiles[1] - 1) * np.log(max_aspect))
        tried = np.stack([np.sqrt(area * aspect), np.sqrt(area / aspect)], axis=1)
        fits = (tried <= longest).all(axis=1)
        sides[rows[fits]] = tried[fits]
        rows = rows[~fits]
        if not len(rows):
            break
    return sides
