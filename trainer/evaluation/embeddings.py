"""What a model without a head makes of images, and how that is distributed over a data set.

Shapes: N images, D numbers of an embedding.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from trainer.data.dataset import Split
from trainer.devices import Device
from trainer.errors import ModelError
from trainer.models import Classifier, EmbeddingStatistics
from trainer.training.process_group import Processes

Embeddings = npt.NDArray[np.float32]

TOGETHER = 64
"""Images of a forward pass that shares a device with nothing else; a training's batch may be many thousands."""
_LEAST_STD = 0.01
"""Smallest standard deviation of a number of the embedding, as a share of that of all: one that hardly varies is no target."""


def embed(
    model: Classifier, split: Split, indices: Sequence[int], device: Device, batch_size: int, *, moments: bool = False
) -> Embeddings:
    """Compute the pooled features of images as they are stored, in fp32, [N, D]; the model is moved to the device and stays there.

    With `moments` those of its T-dimensional patch tokens over an image's places come after them, mean and mean square, [N, D + 2 T].

    Raises:
        ModelError: a number is not finite.
    """
    model.to(device.torch_device).eval()
    parts = [indices[start : start + batch_size] for start in range(0, len(indices), batch_size)]
    with device.inference():
        batches = [
            _embed(model, split.read(device.filled(part, batch_size)).to(device.torch_device), moments).cpu()[
                : len(part)
            ]
            for part in parts
        ]
    embeddings: Embeddings = torch.cat(batches).numpy() if batches else np.empty((0, 0), dtype=np.float32)
    broken = np.flatnonzero(~np.isfinite(embeddings).all(axis=1))
    if len(broken):
        raise ModelError(
            f"{model.card.architecture}: gives an embedding that is not finite for {len(broken)} of {len(indices)} images, first for "
            f"{split.names[indices[int(broken[0])]]}; look at the model's weights, or train it again with a lower learning rate"
        )
    return embeddings


def _embed(model: Classifier, images: Tensor, moments: bool) -> Tensor:
    outputs = model.outputs(images, logits=False, features=True, tokens=moments)
    parts = (
        []
        if outputs.tokens is None
        else [outputs.tokens.float().mean((1, 2)), outputs.tokens.float().square().mean((1, 2))]
    )
    assert outputs.features is not None, "they were asked for"
    return torch.cat([outputs.features.float(), *parts], 1)


def embed_together(
    model: Classifier,
    split: Split,
    indices: Sequence[int],
    processes: Processes,
    batch_size: int = TOGETHER,
    *,
    moments: bool = False,
) -> Embeddings:
    """Compute the same with the images dealt to all processes; every process gets all of them, [N, D] or [N, D + 2 T]."""
    rank, world_size = processes.rank, processes.world_size
    own = embed(model, split, indices[rank::world_size], processes.device, batch_size, moments=moments)
    parts = [part for part in processes.gather(own, "the embeddings") if len(part)]
    together = np.empty((len(indices), parts[0].shape[1]), dtype=np.float32)
    for place, part in enumerate(parts):
        together[place::world_size] = part
    return together


def spread(count: int, most: int) -> list[int]:
    """Choose at most so many of `count` images, evenly from the first to the last."""
    if count <= most:
        return list(range(count))
    chosen: list[int] = np.linspace(0, count - 1, most).round().astype(np.int64).tolist()
    return chosen


def statistics(embeddings: Embeddings) -> EmbeddingStatistics:
    """Compute mean and standard deviation of each number over the images."""
    values = embeddings.astype(np.float64)
    return _statistics(values.mean(0), values.var(0))


def token_statistics(moments: Embeddings) -> EmbeddingStatistics | None:
    """Compute the same of patch tokens over all places of all images, from their moments [N, 2 T]; None where there are none."""
    if not moments.shape[1]:
        return None
    mean, square = np.split(moments.astype(np.float64).mean(0), 2)
    return _statistics(mean, np.maximum(square - mean**2, 0))


def _statistics(mean: npt.NDArray[np.float64], variance: npt.NDArray[np.float64]) -> EmbeddingStatistics:
    """Return the statistics of each number.

    With s the root mean square of all standard deviations, (0.01 s)^2 is added to each variance: where a number hardly varies, the noise
    of rounding would become a target as large as the others.
    """
    std = np.sqrt(variance + _LEAST_STD**2 * variance.mean())
    if not variance.mean() > 0:
        raise ModelError(
            "the teacher's embedding is the same for all training images, so there is nothing to learn from it; give other weights "
            "(pretrain.weights)"
        )
    return EmbeddingStatistics(mean=_rounded(mean), std=_rounded(std))


def _rounded(values: npt.NDArray[np.float64]) -> tuple[float, ...]:
    """Return float32 values, in which they are used."""
    return tuple(values.astype(np.float32).astype(np.float64).tolist())
