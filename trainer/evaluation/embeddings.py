"""What a model without a head makes of images, and how that is distributed over a data set.

Shapes: N images, D numbers of an embedding.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch

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


def embed(model: Classifier, split: Split, indices: Sequence[int], device: Device, batch_size: int) -> Embeddings:
    """Compute the pooled features of images as they are stored, in fp32, [N, D]; the model is moved to the device and stays there.

    Raises:
        ModelError: a number is not finite.
    """
    model.to(device.torch_device).eval()
    parts = [indices[start : start + batch_size] for start in range(0, len(indices), batch_size)]
    with device.inference():
        batches = [
            model.pooled(split.read(device.filled(part, batch_size)).to(device.torch_device)).float().cpu()[: len(part)]
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


def embed_together(
    model: Classifier, split: Split, indices: Sequence[int], processes: Processes, batch_size: int = TOGETHER
) -> Embeddings:
    """Compute the same with the images dealt to all processes; every process gets all of them, [N, D]."""
    rank, world_size = processes.rank, processes.world_size
    own = embed(model, split, indices[rank::world_size], processes.device, batch_size)
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
    """Compute mean and standard deviation of each number over the images.

    With s the root mean square of all standard deviations, (0.01 s)^2 is added to each variance: where a number hardly varies, the noise
    of rounding would become a target as large as the others.
    """
    values = embeddings.astype(np.float64)
    mean, variance = values.mean(0), values.var(0)
    std = np.sqrt(variance + _LEAST_STD**2 * variance.mean())
    if not variance.mean() > 0:
        raise ModelError(
            f"the teacher's embedding is the same for all of {len(values)} training images, so there is nothing to learn from it; give "
            "other weights (pretrain.weights)"
        )
    return EmbeddingStatistics(mean=_rounded(mean), std=_rounded(std))


def _rounded(values: npt.NDArray[np.float64]) -> tuple[float, ...]:
    """Return float32 values, in which they are used."""
    return tuple(values.astype(np.float32).astype(np.float64).tolist())
