"""Micro-batches for one training process, in the global order.

Step s takes the positions s x G .. (s + 1) x G - 1 of the order (G: `batch_size`). They are dealt in runs: micro-batch a of process r
is run a x W + r of the step (W processes), so that the union over processes does not depend on how many there are.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.utils.data import DataLoader
from torch.utils.data import Dataset as TorchDataset

from trainer.config import TrainingSettings, ViewSettings
from trainer.data.batch import Batch, Recorded
from trainer.data.dataset import Split
from trainer.data.order import Indices, SampleOrder, Taken
from trainer.data.views.mixing import draw_mixing
from trainer.data.views.parameters import draw_views
from trainer.data.views.rendering import make_views
from trainer.errors import DataError, SettingsError


class TeacherOutputs(Protocol):
    """Recorded outputs of a teacher, as a loader reads them."""

    def read(self, indices: npt.NDArray[np.int64], numbers: npt.NDArray[np.int64]) -> Recorded:
        """The outputs for these samples (indices into the training set) and views."""
        ...


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


class Views:
    """The views of a training set's samples, batch by batch."""

    def __init__(self, samples: Samples, *, size: int, seed: int, settings: ViewSettings) -> None:
        """Of `size` x `size` pixels, drawn from `seed`."""
        self.samples, self.size, self.seed, self.settings = samples, size, seed, settings

    def batch(self, taken: Taken) -> Batch:
        """The views that were taken from the order."""
        indices, numbers, partners = taken
        keys, labels = self.samples.keys[indices], self.samples.labels[indices]
        mixing, shown, shown_numbers = None, indices, numbers
        if partners is not None:
            shown, shown_numbers, rows = _with_partners(indices, numbers, partners)
            mixing = draw_mixing(
                keys, numbers, rows, self.samples.labels[partners], seed=self.seed, settings=self.settings
            )
        stored = self.samples.read(shown)
        parameters = draw_views(
            self.samples.keys[shown], shown_numbers, stored=stored.shape[-1], seed=self.seed, settings=self.settings
        )
        images = make_views(stored, parameters, self.size, self.settings)
        return Batch(
            images=images,
            labels=torch.from_numpy(labels),
            keys=torch.from_numpy(keys.view(np.int64)),
            numbers=torch.from_numpy(numbers),
            mixing=mixing,
        )


def _with_partners(indices: Indices, numbers: Indices, partners: Indices) -> tuple[Indices, Indices, Indices]:
    """The samples and view numbers of a batch with the partners that are not in it, and the row of each sample's partner."""
    shown = list(zip(indices.tolist(), numbers.tolist(), strict=True))
    wanted = list(zip(partners.tolist(), numbers.tolist(), strict=True))
    rows = {pair: row for row, pair in enumerate(shown)}
    for pair in wanted:
        if pair not in rows:
            rows[pair] = len(shown)
            shown.append(pair)
    pairs = np.array(shown, dtype=np.int64)
    return pairs[:, 0], pairs[:, 1], np.array([rows[pair] for pair in wanted], dtype=np.int64)


class MicroBatches(TorchDataset[Batch]):
    """Item p is the micro-batch that begins at position p of the order."""

    def __init__(
        self, views: Views, order: SampleOrder, *, count: int, teacher_outputs: TeacherOutputs | None = None
    ) -> None:
        """`count` samples a micro-batch."""
        self._views, self._order, self._count, self._teacher_outputs = views, order, count, teacher_outputs

    def __getitem__(self, position: int) -> Batch:
        taken = self._order.take(position, position + self._count)
        batch = self._views.batch(taken)
        if self._teacher_outputs is None:
            return batch
        return batch._replace(recorded=self._teacher_outputs.read(taken.indices, taken.numbers))


def micro_batch_size(settings: TrainingSettings, world_size: int) -> int:
    """Samples in a micro-batch of one process.

    Raises:
        SettingsError: `batch_size` can not be dealt evenly.
    """
    parts = world_size * settings.accumulation
    if settings.batch_size % parts:
        raise SettingsError(
            f"batch_size = {settings.batch_size} can not be dealt evenly to {world_size} processes x {settings.accumulation} "
            f"micro-batches; choose a multiple of {parts}"
        )
    return settings.batch_size // parts


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
