"""Which sample comes when: a function of (seed, epoch), so that a resume needs one integer.

Training reads one endless stream of positions. Position p is sample `permutation(seed, epoch)[p % count]` of epoch `p // count`; an
optimiser step takes the next `batch_size` positions. A batch may reach over the end of an epoch, so every batch is full and
every sample is used exactly once an epoch, whatever the batch size or the number of processes.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from trainer.data.randomness import random_bits

_ORDER = 0x6F72646572
"""Keeps the order's draws apart from all others of the same seed."""


class SampleOrder:
    """The endless stream of a training set's samples."""

    def __init__(self, count: int, seed: int) -> None:
        """`count` samples, shuffled anew each epoch from `seed`."""
        self.count = count
        self._seed = seed
        self._permutations: dict[int, npt.NDArray[np.int64]] = {}

    def take(self, start: int, stop: int) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        """Samples and epochs of the positions start..stop-1.

        Returns:
            Indices into the training set [stop - start], and the epoch of each [stop - start].
        """
        epochs, offsets = np.divmod(np.arange(start, stop, dtype=np.int64), self.count)
        indices = np.empty_like(epochs)
        for epoch in np.unique(epochs):
            chosen = epochs == epoch
            indices[chosen] = self._permutation(int(epoch))[offsets[chosen]]
        return indices, epochs

    def _permutation(self, epoch: int) -> npt.NDArray[np.int64]:
        if epoch not in self._permutations:
            if len(self._permutations) >= 2:  # a batch touches two epochs at most, unless it is larger than the set
                self._permutations.clear()
            bits = random_bits(_ORDER, self._seed, epoch, np.arange(self.count, dtype=np.uint64))
            self._permutations[epoch] = np.argsort(bits, kind="stable").astype(np.int64)
        return self._permutations[epoch]
