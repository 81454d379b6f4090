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

from torch import Tensor

from trainer.config import ViewSettings
from trainer.data.batch import cache_sized_slices
from trainer.data.views.colour import adjust_colour
from trainer.data.views.erasing import erase
from trainer.data.views.geometry import crop_batch
from trainer.data.views.operations import apply_operations
from trainer.data.views.parameters import ViewParameters


def make_views(images: Tensor, parameters: ViewParameters, size: int, settings: ViewSettings) -> Tensor:
    """Make the views of a batch of stored images, on the images' device.

    Args:
        images: uint8 [B, 3, S, S].
        parameters: parameters of the B views, on the CPU.
        size: edge V of the views, in pixels.
        settings: the settings that the parameters were drawn with.

    Returns:
        uint8 [B, 3, V, V].
    """
    return finish_views(crop_batch(images, parameters, size), parameters, settings)


def finish_views(views: Tensor, parameters: ViewParameters, settings: ViewSettings) -> Tensor:
    """Apply what follows the crop: colour, RandAugment's operations, erasing.

    Args:
        views: crops, uint8 [B, 3, V, V]; changed in place.
        parameters: parameters of the B views, on the CPU.
        settings: the settings that the parameters were drawn with.

    Returns:
        `views`.
    """
    if not (settings.color_jitter or settings.randaugment_operations or settings.erasing):
        return views
    for rows in cache_sized_slices(views):
        part = ViewParameters(*(values[rows] for values in parameters))
        views[rows] = _finish(views[rows], part, settings)
    return views


def _finish(views: Tensor, parameters: ViewParameters, settings: ViewSettings) -> Tensor:
    if settings.color_jitter:
        views = adjust_colour(views, parameters.colour)
    if settings.randaugment_operations:  # they choose single views, which is twice as fast in planar memory
        views = apply_operations(views.contiguous(), parameters, settings.randaugment_magnitude)
    return erase(views, parameters.erased) if settings.erasing else views
