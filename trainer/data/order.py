"""Which sample comes when, as which view, beside which partner: a function of (seed, epoch), so that a resume needs one integer.

Training reads one endless stream of positions. Position p belongs to epoch `p // count`; an optimiser step takes the next `batch_size`
positions. A batch may reach over the end of an epoch, so every batch is full and every sample is used exactly once an epoch,
whatever the batch size or the number of processes.

Epoch e shows view e of each sample, or view e modulo `views` where only so many exist. Where views are mixed, the samples are paired anew
for each view (with an odd number of samples one is its own partner), and an epoch's order shuffles pairs, so that partners nearly always
stand in the same batch. The pairs are a function of the view, not of the epoch: what a teacher said of a mixed view holds in every
epoch that shows it.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from trainer.data.randomness import random_bits

Indices = npt.NDArray[np.int64]

_ORDER = 0x6F72646572
"""Keeps the order's draws apart from all others of the same seed."""
_PAIRS = 0x7061697273
"""Keeps the pairs' draws apart from all others of the same seed."""


class Taken(NamedTuple):
    """Some positions of the stream."""

    indices: Indices
    """Sample of each position."""
    numbers: Indices
    """Number of the sample's view."""
    partners: Indices | None
    """Sample that its view is mixed with; None where nothing is mixed."""


def pairing(count: int, seed: int, number: int) -> Indices:
    """The samples in an order in which 2i and 2i + 1 are partners in view `number`, [count]; the last of an odd number is alone."""
    bits = random_bits(_PAIRS, seed, number, np.arange(count, dtype=np.uint64))
    return np.argsort(bits, kind="stable").astype(np.int64)


def partners(count: int, seed: int, number: int) -> Indices:
    """The partner of each sample in view `number`, [count]."""
    return _beside(pairing(count, seed, number))


def _beside(paired: Indices) -> Indices:
    """The partner of each sample, from the samples in pairs."""
    result = np.empty_like(paired)
    result[paired] = paired[np.minimum(np.arange(len(paired)) ^ 1, len(paired) - 1)]
    return result


class SampleOrder:
    """The endless stream of a training set's samples."""

    def __init__(
        self, count: int, seed: int, *, view_seed: int | None = None, views: int = 0, paired: bool = False
    ) -> None:
        """`count` samples, shuffled anew each epoch from `seed`.

        Args:
            count: number of samples.
            seed: of the order.
            view_seed: of the views, and so of the pairs; as `seed` where not given.
            views: how many views of a sample there are; 0: one for each epoch.
            paired: whether views are mixed.
        """
        self.count = count
        self._seed = seed
        self._view_seed = seed if view_seed is None else view_seed
        self._views = views
        self._paired = paired
        self._epochs: dict[int, tuple[Indices, Indices]] = {}

    def take(self, start: int, stop: int) -> Taken:
        """The positions start..stop-1."""
        epochs, offsets = np.divmod(np.arange(start, stop, dtype=np.int64), self.count)
        numbers = epochs % self._views if self._views else epochs
        indices = np.empty_like(epochs)
        others = np.empty_like(epochs) if self._paired else None
        for epoch in np.unique(epochs):
            chosen = epochs == epoch
            order, partner = self._epoch(int(epoch))
            indices[chosen] = order[offsets[chosen]]
            if others is not None:
                others[chosen] = partner[indices[chosen]]
        return Taken(indices, numbers, others)

    def _epoch(self, epoch: int) -> tuple[Indices, Indices]:
        if epoch not in self._epochs:
            if len(self._epochs) >= 2:  # a batch touches two epochs at most, unless it is larger than the set
                self._epochs.clear()
            self._epochs[epoch] = self._make_epoch(epoch)
        return self._epochs[epoch]

    def _make_epoch(self, epoch: int) -> tuple[Indices, Indices]:
        """The samples of an epoch in their order, and the partner of each sample (empty where nothing is mixed)."""
        if not self._paired:
            return self._shuffled(self.count, epoch), np.empty(0, dtype=np.int64)
        number = epoch % self._views if self._views else epoch
        paired = pairing(self.count, self._view_seed, number)
        slots = self._shuffled((self.count + 1) // 2, epoch)
        places = (2 * slots[:, None] + np.arange(2)).ravel()
        return paired[places[places < self.count]], _beside(paired)

    def _shuffled(self, count: int, epoch: int) -> Indices:
        bits = random_bits(_ORDER, self._seed, epoch, np.arange(count, dtype=np.uint64))
        return np.argsort(bits, kind="stable").astype(np.int64)
