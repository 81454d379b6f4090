"""Micro-batches for one training process, in the global order.

Step s takes the positions s x G .. (s + 1) x G - 1 of the order (G: `batch_size`). They are dealt in runs: micro-batch a of process r
is run a x W + r of the step (W processes), so that the union over processes does not depend on how many there are.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.utils.data import DataLoader
from torch.utils.data import Dataset as TorchDataset

from trainer.config import TrainingSettings
from trainer.data.dataset import Split
from trainer.data.order import SampleOrder
from trainer.data.views import Mixing, draw_mixing, make_views
from trainer.errors import DataError, SettingsError


class Batch(NamedTuple):
    """A micro-batch of b samples."""

    images: Tensor
    """Views, uint8 [b, 3, V, V]."""
    labels: Tensor
    """int64 [b]; -1 for a sample without label."""
    keys: Tensor
    """Sample keys, the bits of a uint64 as int64 [b]; on the CPU, where random numbers are drawn."""
    numbers: Tensor
    """View numbers (epochs), int64 [b]; on the CPU."""
    mixing: Mixing | None
    """How to mix the images, or None."""


class Samples:
    """One or several splits, read as one training set."""

    def __init__(self, splits: Sequence[Split]) -> None:
        """Join `splits`, in this order.

        Raises:
            DataError: there is no sample in them.
        """
        self._splits = [split for split in splits if len(split)]
        if not self._splits:
            raise DataError(
                "there are no images to train on; look at the data set's card, and prepare it with more images"
            )
        for split in self._splits:
            split.load()  # once, before loader processes are forked, which then share the decoded images
        self._ends = np.cumsum([len(split) for split in self._splits])
        self.labels = np.concatenate([split.labels for split in self._splits])
        self.keys = np.concatenate([split.keys for split in self._splits])

    def __len__(self) -> int:
        return int(self._ends[-1])

    def read(self, indices: npt.NDArray[np.int64]) -> Tensor:
        """Stored images, uint8 [B, 3, S, S]."""
        if len(self._splits) == 1:
            return self._splits[0].read(indices.tolist())
        which = np.searchsorted(self._ends, indices, side="right")
        starts = self._ends - [len(split) for split in self._splits]
        images: Tensor | None = None
        for number, split in enumerate(self._splits):
            chosen = np.flatnonzero(which == number)
            if len(chosen):
                part = split.read((indices[chosen] - starts[number]).tolist())
                images = part.new_empty((len(indices), *part.shape[1:])) if images is None else images
                images[torch.from_numpy(chosen)] = part
        assert images is not None, "no indices"
        return images

    def names(self, indices: npt.NDArray[np.int64]) -> list[str]:
        """Key and source of each sample, for messages."""
        which = np.searchsorted(self._ends, indices, side="right")
        starts = self._ends - [len(split) for split in self._splits]
        sources = [
            self._splits[number].sources[int(index - starts[number])]
            for number, index in zip(which, indices, strict=True)
        ]
        return [f"{int(self.keys[index]):016x} {source}" for index, source in zip(indices, sources, strict=True)]


class MicroBatches(TorchDataset[Batch]):
    """Item p is the micro-batch that begins at position p of the order."""

    def __init__(
        self, samples: Samples, order: SampleOrder, *, size: int, seed: int, settings: TrainingSettings, count: int
    ) -> None:
        """`count` samples a micro-batch, as views of `size` x `size` pixels."""
        self._samples, self._order, self._size, self._seed = samples, order, size, seed
        self._views, self._count = settings.views, count

    def __getitem__(self, position: int) -> Batch:
        stop = position + self._count
        indices, epochs = self._order.take(position, stop)
        keys = self._samples.keys[indices]
        images = make_views(
            self._samples.read(indices), keys, epochs, seed=self._seed, size=self._size, settings=self._views
        )
        return Batch(
            images=images,
            labels=torch.from_numpy(self._samples.labels[indices]),
            keys=torch.from_numpy(keys.view(np.int64)),
            numbers=torch.from_numpy(epochs),
            mixing=draw_mixing(np.arange(position, stop), seed=self._seed, settings=self._views),
        )


def micro_batch_size(settings: TrainingSettings, world_size: int) -> int:
    """Samples in a micro-batch of one process.

    Raises:
        SettingsError: `batch_size` can not be dealt evenly, or in pairs where views are mixed.
    """
    parts = world_size * settings.accumulation
    if settings.batch_size % parts:
        raise SettingsError(
            f"batch_size = {settings.batch_size} can not be dealt evenly to {world_size} processes x {settings.accumulation} "
            f"micro-batches; choose a multiple of {parts}"
        )
    count = settings.batch_size // parts
    if count % 2 and (settings.views.mixup or settings.views.cutmix):
        raise SettingsError(
            f"batch_size = {settings.batch_size} gives micro-batches of {count}, but mixup and cutmix need pairs; "
            f"choose a multiple of {2 * parts}"
        )
    return count


def positions(
    settings: TrainingSettings, *, first_step: int, last_step: int, rank: int, world_size: int
) -> Iterator[int]:
    """Where each micro-batch of this process begins, step by step."""
    count = micro_batch_size(settings, world_size)
    for step in range(first_step, last_step):
        for micro in range(settings.accumulation):
            yield step * settings.batch_size + (micro * world_size + rank) * count


def make_loader(batches: MicroBatches, starts: Iterable[int], *, workers: int, pin_memory: bool) -> DataLoader[Batch]:
    """A loader that gives the micro-batches at `starts`, in this order, prefetched by `workers` processes."""
    return DataLoader(
        batches,
        batch_size=None,
        sampler=starts,
        num_workers=workers,
        pin_memory=pin_memory,
        worker_init_fn=_use_one_thread,
    )


def _use_one_thread(_worker: int) -> None:
    torch.set_num_threads(1)
