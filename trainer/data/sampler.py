"""The sampler: the sample, view and partner at each position, a function of (seed, epoch), so that a resume needs one integer.

Training reads one endless stream of positions. Position p belongs to epoch `p // count`; an optimizer step takes the next `batch_size`
positions. A batch may cross the end of an epoch, so every batch is full and every sample is used exactly once per epoch, whatever the
batch size or the number of processes.

Epoch e shows view e of each sample, or view e modulo `views` where only so many exist. Where views are mixed, the samples are paired anew
for each view (with an odd number of samples one is its own partner), and an epoch's order shuffles pairs, so that partners nearly always
are in the same batch. The pairs are a function of the view, not of the epoch: a teacher's recorded outputs for a mixed view hold in
every epoch that shows it.

A large set is read window by window, so that neither a process nor a disk needs more than a window of it: each view deals the shards,
`SHARD` samples with consecutive indices, anew to windows of `WINDOW` shards, an epoch shuffles the windows, and within a window samples are
shuffled and paired as all are in a set of one window.

Labeled samples are paired with labeled ones, and unlabeled with unlabeled: with one label in a pair, the mixture would be taught as
wholly of that class. So the labeled samples' pairs do not depend on whether unlabeled ones are read too, in a set of one window.

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
_PAIRS = 0x7061697273  # likewise those of the pairs
_SHARDS = 0x736861726473  # those that deal shards to windows
_WINDOWS = 0x77696E646F7773  # those of the windows' order

SHARD = 4096  # samples with consecutive indices that are read in the same window
WINDOW = 64  # shards that are shuffled together
AHEAD = 2  # windows that are fetched from a store while one is read
HELD = (
    2 + AHEAD
)  # windows that a machine needs room for: those, the one that is read, and what is left of the one before

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


def partners(count: int, seed: int, number: int, labeled: Mask | None = None, of: range | None = None) -> Indices:
    """Return the partner of each sample in view `number`, [count], or of each in `of`; `labeled` marks samples with a label, None: all."""
    of = range(count) if of is None else of
    dealt = _Windows(count, labeled, None)
    result = np.empty(len(of), dtype=np.int64)
    for window in dealt.containing(dealt.deal(seed, number), of):
        pairs = _pairs(dealt.kinds(window), seed, number)
        for one, other in (pairs.T, pairs.T[::-1]):
            inside = (one >= of.start) & (one < of.stop)
            result[one[inside] - of.start] = other[inside]
    return result


def _pairs(kinds: Sequence[Indices], seed: int, number: int) -> Indices:
    """Pair the samples of each kind for view `number`, [P, 2]; the last of an odd number is its own partner."""
    pairs = []
    for samples in kinds:
        shuffled = samples[np.argsort(random_bits(_PAIRS, seed, number, samples.astype(np.uint64)), kind="stable")]
        pairs.append(np.append(shuffled, shuffled[len(shuffled) - len(shuffled) % 2 :]).reshape(-1, 2))
    return np.concatenate(pairs)


class _Windows:
    """Deals the shards of some of `count` samples to windows."""

    def __init__(self, count: int, labeled: Mask | None, kind: bool | None) -> None:
        """Of the samples with a label (`kind` is True), those without (False), or of both (None)."""
        self._count, self._labeled, self._kind = count, labeled, kind
        starts = np.arange(0, count, SHARD)
        self.sizes = np.minimum(starts + SHARD, count) - starts  # samples in each shard
        if kind is not None and labeled is not None:
            self.sizes = np.add.reduceat(labeled if kind else ~labeled, starts, dtype=np.int64)

    def deal(self, seed: int, number: int) -> list[Indices]:
        """Return the shards of each window of view `number`, in ascending order."""
        shards = np.argsort(random_bits(_SHARDS, seed, number, np.arange(len(self.sizes))), kind="stable")
        return [np.sort(shards[first : first + WINDOW]) for first in range(0, len(shards), WINDOW)]

    def containing(self, windows: Sequence[Indices], samples: range) -> list[Indices]:
        """Return the windows that have any of these samples."""
        first, last = samples.start // SHARD, (samples.stop - 1) // SHARD
        return [shards for shards in windows if ((shards >= first) & (shards <= last)).any()]

    def kinds(self, shards: Indices) -> list[Indices]:
        """Return the samples of a window, in ascending order: labeled ones, then the others."""
        samples = (shards[:, None] * SHARD + np.arange(SHARD)).ravel()
        samples = samples[samples < self._count]
        if self._labeled is None:
            return [samples]
        labeled = self._labeled[samples]
        wanted = [labeled, ~labeled] if self._kind is None else [labeled == self._kind]
        return [samples[chosen] for chosen in wanted if chosen.any()]


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
        both = labeled is not None and 0 < np.count_nonzero(labeled) < count
        self._share = Fraction(str(labeled_share)) if both else Fraction(0)
        self._streams = [
            _SampleStream(
                _Windows(count, labeled, kind),
                seed,
                view_seed=seed if view_seed is None else view_seed,
                views=views,
                paired=paired,
            )
            for kind in ((True, False) if self._share else (None,))
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

    def windows(self, position: int, count: int) -> list[Indices]:
        """Return the shards of the window that is read at a position, and of those after it, `count` in all; of each stream, if two."""
        if not self._share:
            return self._streams[0].windows(position, count)
        before = int(self._share * position)
        each = [
            stream.windows(at, count) for stream, at in zip(self._streams, (before, position - before), strict=True)
        ]
        return [np.union1d(*together) for together in zip(*each, strict=True)]


class _Epoch(NamedTuple):
    """The windows of an epoch, in its order."""

    windows: list[Indices]  # the shards of each
    numbers: Indices  # its number in its view, from which its first position there follows
    ends: Indices  # position in the epoch after it


class _SampleStream:
    """The endless stream of some samples, each once an epoch."""

    def __init__(self, samples: _Windows, seed: int, *, view_seed: int, views: int, paired: bool) -> None:
        """Stream these samples; pairs are of one kind."""
        self._samples, self._count = samples, int(samples.sizes.sum())
        self._seed, self._view_seed, self._views, self._is_paired = seed, view_seed, views, paired
        self._epochs: dict[int, _Epoch] = {}
        self._windows: dict[tuple[int, int], tuple[Indices, Indices]] = {}

    def take(self, start: int, stop: int) -> SampleSlice:
        epochs, offsets = np.divmod(np.arange(start, stop, dtype=np.int64), self._count)
        numbers = epochs % self._views if self._views else epochs
        indices = np.empty_like(epochs)
        others = np.empty_like(epochs) if self._is_paired else None
        for epoch in np.unique(epochs).tolist():
            ends = self._epoch(epoch).ends
            windows = np.searchsorted(ends, offsets, side="right")
            for window in np.unique(windows[epochs == epoch]).tolist():
                chosen = (epochs == epoch) & (windows == window)
                order, partner = self._window(epoch, window)
                places = offsets[chosen] - (ends[window] - len(order))
                indices[chosen] = order[places]
                if others is not None:
                    others[chosen] = partner[places]
        return SampleSlice(indices, numbers, others)

    def windows(self, position: int, count: int) -> list[Indices]:
        """Return what `StatelessSampler.windows` does; keeps nothing, so that a thread of its own may ask."""
        epoch, offset = divmod(position, self._count)
        windows, _, ends = self._dealt(epoch)
        found = windows[int(np.searchsorted(ends, offset, side="right")) :]
        while len(found) < count:
            epoch += 1
            found += self._dealt(epoch).windows
        return found[:count]

    def _number(self, epoch: int) -> int:
        return epoch % self._views if self._views else epoch

    def _epoch(self, epoch: int) -> _Epoch:
        """Return the windows of an epoch."""
        if epoch not in self._epochs:
            if len(self._epochs) >= 2:  # a batch touches two epochs at most, unless it is larger than the set
                self._epochs.clear()
            self._epochs[epoch] = self._dealt(epoch)
        return self._epochs[epoch]

    def _dealt(self, epoch: int) -> _Epoch:
        dealt = self._samples.deal(self._view_seed, self._number(epoch))
        numbers = np.argsort(random_bits(_WINDOWS, self._seed, epoch, np.arange(len(dealt))), kind="stable")
        windows = [dealt[number] for number in numbers]
        return _Epoch(windows, numbers, np.cumsum([self._samples.sizes[shards].sum() for shards in windows]))

    def _window(self, epoch: int, place: int) -> tuple[Indices, Indices]:
        """Return the samples of a window in their order, and the partner of each (empty where views are not mixed)."""
        if (epoch, place) in self._windows:
            return self._windows[epoch, place]
        if len(self._windows) >= 2:  # likewise
            self._windows.clear()
        windows, numbers, _ = self._epoch(epoch)
        kinds, first = self._samples.kinds(windows[place]), int(numbers[place]) * WINDOW * SHARD
        if self._is_paired:
            pairs = _pairs(kinds, self._view_seed, self._number(epoch))
            pairs = pairs[self._shuffled(len(pairs), epoch, first)]
            is_there = np.stack([np.ones(len(pairs), dtype=np.bool_), pairs[:, 0] != pairs[:, 1]], axis=1)
            order, partner = pairs[is_there], pairs[:, ::-1][is_there]
        else:
            order, partner = np.concatenate(kinds), np.empty(0, dtype=np.int64)
            order = order[self._shuffled(len(order), epoch, first)]
        self._windows[epoch, place] = order, partner
        return order, partner

    def _shuffled(self, count: int, epoch: int, first: int) -> Indices:
        bits = random_bits(_ORDER, self._seed, epoch, first + np.arange(count, dtype=np.uint64))
        return np.argsort(bits, kind="stable").astype(np.int64)
