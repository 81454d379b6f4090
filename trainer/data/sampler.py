"""The sampler: the sample, view and partner at each position, a function of (seed, epoch), so that a resume needs one integer.

Training reads one endless stream of positions. Position p belongs to epoch `p // count`; an optimizer step takes the next `batch_size`
positions. A batch may cross the end of an epoch, so every batch is full and every sample is used exactly once per epoch, whatever the
batch size or the number of processes.

Epoch e shows view e of each sample, or view e modulo `views` where only so many exist. Where views are mixed, the samples are paired anew
for each view (with an odd number of samples one is its own partner), and an epoch's order shuffles pairs, so that partners nearly always
are in the same batch. The pairs are a function of the view, not of the epoch: a teacher's recorded outputs for a mixed view hold in
every epoch that shows it.

Labeled samples are paired with labeled ones, and unlabeled with unlabeled: with one label in a pair, the mixture would be taught as
wholly of that class. So the labeled samples' pairs do not depend on whether unlabeled ones are read too.

Where labeled samples are to be a given share of each batch, there are two such streams, one of labeled and one of unlabeled samples,
each with epochs of its own, and they are interleaved: of the first p positions `floor(share x p)` are labeled.

All draws, also those of views and masks, are counter-based: a draw is a function of what it is for, without state.
"""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

Keys = npt.NDArray[np.uint64]
Indices = npt.NDArray[np.int64]
Words = int | Keys | Indices
Mask = npt.NDArray[np.bool_]

_ORDER = 0x6F72646572  # separates the draws of the order from all others of the same seed
_PAIRS = 0x7061697273  # separates the draws of the pairs from all others of the same seed

_GAMMA = np.uint64(0x9E3779B97F4A7C15)
_MIX_1 = np.uint64(0xBF58476D1CE4E5B9)
_MIX_2 = np.uint64(0x94D049BB133111EB)


def random_bits(*words: Words) -> npt.NDArray[np.uint64]:
    """Draw 64 random bits for each tuple of words (seed, sample key, view number, ...); arrays are broadcast against one another.

    The words are mixed with the finalizer of SplitMix64 (Steele, Lea, Flood 2014). So a draw does not depend on the number of workers or
    processes, on the batch size, or on earlier draws.
    """
    state = np.zeros((), dtype=np.uint64)
    with np.errstate(over="ignore"):  # arithmetic modulo 2^64 is intended
        for word in words:
            state = (state ^ np.asarray(word).astype(np.uint64)) + _GAMMA
            state = (state ^ (state >> np.uint64(30))) * _MIX_1
            state = (state ^ (state >> np.uint64(27))) * _MIX_2
            state = state ^ (state >> np.uint64(31))
    return np.asarray(state)


def uniform(*words: Words) -> npt.NDArray[np.float64]:
    """Draw a number in [0, 1) for each tuple of words, with 53 random bits."""
    numbers: npt.NDArray[np.float64] = (random_bits(*words) >> np.uint64(11)).astype(np.float64) * 2.0**-53
    return numbers


class SampleSlice(NamedTuple):
    """Consecutive positions of the stream."""

    indices: Indices  # sample of each position
    numbers: Indices  # number of the view of each sample
    partners: Indices | None  # sample that each view is mixed with; None where views are not mixed


def partners(count: int, seed: int, number: int, labeled: Mask | None = None) -> Indices:
    """Return the partner of each sample in view `number`, [count]; `labeled` marks the samples with a label, None: all."""
    return _beside(_pairs(_kinds(count, labeled), seed, number), count)


def _kinds(count: int, labeled: Mask | None) -> list[Indices]:
    everyone = np.arange(count, dtype=np.int64)
    kinds = [everyone] if labeled is None else [everyone[labeled], everyone[~labeled]]
    return [kind for kind in kinds if len(kind)]


def _pairs(kinds: Sequence[Indices], seed: int, number: int) -> Indices:
    """Pair the samples of each kind for view `number`, [P, 2]; the last of an odd number is its own partner."""
    pairs = []
    for samples in kinds:
        shuffled = samples[np.argsort(random_bits(_PAIRS, seed, number, samples.astype(np.uint64)), kind="stable")]
        pairs.append(np.append(shuffled, shuffled[len(shuffled) - len(shuffled) % 2 :]).reshape(-1, 2))
    return np.concatenate(pairs)


def _beside(pairs: Indices, count: int) -> Indices:
    """Turn pairs into the partner of each of `count` samples."""
    result = np.empty(count, dtype=np.int64)
    result[pairs[:, 0]], result[pairs[:, 1]] = pairs[:, 1], pairs[:, 0]
    return result


class StatelessSampler:
    """The endless stream of a training set's samples."""

    def __init__(
        self,
        count: int,
        seed: int,
        *,
        view_seed: int | None = None,
        views: int = 0,
        paired: bool = False,
        labeled: Mask | None = None,
        labeled_share: float = 0.0,
    ) -> None:
        """Shuffle `count` samples anew each epoch.

        Args:
            view_seed: seed of the views, and so of the pairs; as `seed` where not given.
            views: number of views of a sample; 0: one for each epoch.
            labeled: which samples have a label, [count]; None: all.
            labeled_share: share of the positions of labeled samples, where there are others too; 0: they are shuffled together.
        """
        self.count = count
        kinds = _kinds(count, labeled)
        self._share = Fraction(str(labeled_share)) if len(kinds) > 1 else Fraction(0)
        self._streams = [
            _SampleStream(
                one, count, seed, view_seed=seed if view_seed is None else view_seed, views=views, paired=paired
            )
            for one in ([[kind] for kind in kinds] if self._share else [kinds])
        ]

    def take(self, start: int, stop: int) -> SampleSlice:
        """Return the positions start..stop-1."""
        if not self._share:
            return self._streams[0].take(start, stop)
        share, of = self._share.as_integer_ratio()
        before = np.array([share * position // of for position in range(start, stop + 1)], dtype=np.int64)
        is_other = before[1:] == before[:-1]
        first, last = int(before[0]), int(before[-1])
        labeled, others = self._streams[0].take(first, last), self._streams[1].take(start - first, stop - last)
        place = np.argsort(np.argsort(is_other, kind="stable"), kind="stable")  # labeled ones lie first
        indices, numbers = (np.append(*both)[place] for both in zip(labeled[:2], others[:2], strict=True))
        if labeled.partners is None or others.partners is None:
            return SampleSlice(indices, numbers, None)
        return SampleSlice(indices, numbers, np.append(labeled.partners, others.partners)[place])


class _SampleStream:
    """The endless stream of some samples, each once an epoch."""

    def __init__(
        self, kinds: Sequence[Indices], everyone: int, seed: int, *, view_seed: int, views: int, paired: bool
    ) -> None:
        """Stream the samples of these kinds, out of `everyone`; pairs are of one kind."""
        self._kinds, self._everyone = kinds, everyone
        self._samples = np.concatenate(kinds)
        self._seed, self._view_seed, self._views, self._is_paired = seed, view_seed, views, paired
        self._epochs: dict[int, tuple[Indices, Indices]] = {}

    def take(self, start: int, stop: int) -> SampleSlice:
        epochs, offsets = np.divmod(np.arange(start, stop, dtype=np.int64), len(self._samples))
        numbers = epochs % self._views if self._views else epochs
        indices = np.empty_like(epochs)
        others = np.empty_like(epochs) if self._is_paired else None
        for epoch in np.unique(epochs):
            chosen = epochs == epoch
            order, partner = self._epoch(int(epoch))
            indices[chosen] = order[offsets[chosen]]
            if others is not None:
                others[chosen] = partner[indices[chosen]]
        return SampleSlice(indices, numbers, others)

    def _epoch(self, epoch: int) -> tuple[Indices, Indices]:
        """Return the samples of an epoch in their order, and the partner of each sample (empty where views are not mixed)."""
        if epoch in self._epochs:
            return self._epochs[epoch]
        if len(self._epochs) >= 2:  # a batch touches two epochs at most, unless it is larger than the set
            self._epochs.clear()
        order, partner = self._samples, np.empty(0, dtype=np.int64)
        if self._is_paired:
            pairs = _pairs(self._kinds, self._view_seed, epoch % self._views if self._views else epoch)
            shuffled = pairs[self._shuffled(len(pairs), epoch)]
            is_another = shuffled[:, 0] != shuffled[:, 1]
            order = shuffled[np.stack([np.ones(len(pairs), dtype=np.bool_), is_another], axis=1)]
            partner = _beside(pairs, self._everyone)
        else:
            order = order[self._shuffled(len(order), epoch)]
        self._epochs[epoch] = order, partner
        return order, partner

    def _shuffled(self, count: int, epoch: int) -> Indices:
        bits = random_bits(_ORDER, self._seed, epoch, np.arange(count, dtype=np.uint64))
        return np.argsort(bits, kind="stable").astype(np.int64)
