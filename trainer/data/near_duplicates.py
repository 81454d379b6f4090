"""Near-duplicates: images that look the same and are not equal, such as a photo and its copy in another size, or two shots of a burst.

Where one of them is learned from and the other one measures, the accuracy is too high. They are found by a perceptual hash of the stored
square, which `prepare` has in its hands anyway: N. Krawetz's difference hash ("Kind of Like That", hackerfactor.com, 2013), 64 bits that
say whether brightness rises from each of 9 x 8 points to the next one on its right. It ignores brightness and color, so the mean colors
of 4 x 4 cells have to fit too, without which all pictures of a single color would be one.

All pairs within the radius are found without comparing every image with every other (`_MASKS`). Imports nothing heavy, because every
process that decodes images loads it.

Shapes: N images.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
from PIL import Image

from trainer.data.curation import ImageCandidate
from trainer.data.dataset_schema import SPLITS, UNLABELED, SplitName

RADIUS = 7  # most bits of 64 in which the hashes of near-duplicates differ
COLOR_DIFFERENCE = 16  # largest mean difference of the colors of their cells, of 255
SMALLEST_EDGE = 32
"""Images with a shorter edge are not compared: there is so little in them that different ones have hashes within the radius, as digits of
8 pixels do (docs/data.md)."""

_CELLS = 4
_BYTES = 8 + 3 * _CELLS**2  # of an appearance
_BAND_BITS = 16
_MOST_COMPARED, _MOST_TWINS = 1024, 256
"""Images with which one is compared under each mask, and those that look like it, after which no more are looked for: many images that are
alike would take quadratic time."""
_TOGETHER = 2**20  # pairs that are compared at once

_MASKS = [
    np.uint64(((1 << _BAND_BITS) - 1 - (1 << bit)) << start)
    for start in range(0, 64, _BAND_BITS)
    for bit in range(_BAND_BITS)
]
"""Bits that two hashes may share: of 7 differing bits, at most one falls into at least one of four bands (pigeonhole principle), so any two
hashes within the radius are equal in one of the bands with one of its bits left out."""

_RANKS: Mapping[SplitName, int] = {"train": 0, "unlabeled": 0, "val": 1, "test": 2}
"""A near-duplicate is leakage where these differ."""
_HIGHEST, _BITS, _NONE = 2, 64, np.iinfo(np.int64).max

Ints: TypeAlias = npt.NDArray[np.intp]


def appearance(square: Image.Image, shortest_edge: int) -> str:
    """Describe the look of a stored RGB picture: its hash and its cells' colors, in hexadecimal; empty if the original is too small."""
    if min(shortest_edge, *square.size) < SMALLEST_EDGE:
        return ""
    points = square.resize((9, 8), Image.Resampling.BICUBIC, reducing_gap=3.0)
    gray = np.asarray(points.convert("L"))
    cells = points.resize((_CELLS, _CELLS), Image.Resampling.BOX)
    return np.packbits(gray[:, 1:] > gray[:, :-1]).tobytes().hex() + cells.tobytes().hex()


@dataclass(frozen=True, kw_only=True, slots=True)
class NearPair:
    """An image, and the nearest one of a split held out from it; of several test before val."""

    image: ImageCandidate
    twin: ImageCandidate
    bits: int  # in which their hashes differ

    def record(self, label_names: Sequence[str]) -> dict[str, Any]:
        """Return its entry in a file."""
        sides: dict[str, Any] = {"bits": self.bits}
        for side, one in (("image", self.image), ("twin", self.twin)):
            named = label_names[one.label] if one.label != UNLABELED else None
            sides[side] = {"name": one.name, "split": one.split, "class": named}
        return sides


@dataclass(frozen=True, kw_only=True)
class NearDuplicates:
    """The images that look like one of a held-out split: of val or test for training images, of test for those of val."""

    pairs: Sequence[NearPair]  # one for each such image, the nearest first
    measured: Mapping[tuple[SplitName, SplitName], int]  # (held-out split, another) -> its images that look like those
    skipped: int  # images that are too small to be compared
    complete: bool  # whether every image was compared with every one that it might look like


def find(candidates: Sequence[ImageCandidate]) -> NearDuplicates:
    """Find the near-duplicates in different splits."""
    search = _Search(candidates)
    splits, count = search.splits, len(search.chosen)
    ranks = np.array([_RANKS[split] for split in SPLITS], dtype=np.int8)[splits]
    seen = np.zeros((count, len(SPLITS)), dtype=np.bool_)  # of which splits an image looks like another one
    best = np.full(count, _NONE)  # of each image: rank of its twin, bits, twin; packed so that the smallest is the best
    for left, right, bits in search.pairs():
        seen[left, splits[right]] = seen[right, splits[left]] = True
        image, twin = np.where(ranks[left] < ranks[right], (left, right), (right, left))
        across = ranks[image] < ranks[twin]
        packed = ((_HIGHEST - ranks[twin].astype(np.int64)) * _BITS + bits) * count + twin
        np.minimum.at(best, image[across], packed[across])
    images = np.flatnonzero(best < _NONE)
    bits, twins = best[images] // max(count, 1) % _BITS, best[images] % max(count, 1)
    return NearDuplicates(
        pairs=[
            NearPair(
                image=candidates[int(search.chosen[images[place]])],
                twin=candidates[int(search.chosen[twins[place]])],
                bits=int(bits[place]),
            )
            for place in np.argsort(bits, kind="stable")
        ],
        measured={
            (split, other): int(seen[splits == number, SPLITS.index(other)].sum())
            for number, split in enumerate(SPLITS)
            for other in SPLITS
            if _RANKS[split] > _RANKS[other]
        },
        skipped=len(candidates) - count,
        complete=search.complete,
    )


def groups(candidates: Sequence[ImageCandidate]) -> dict[str, int]:
    """Group images that look the same, directly or by way of others: content key -> number of its group."""
    from scipy.sparse import coo_array  # here, because decoding processes have no use for it
    from scipy.sparse.csgraph import connected_components

    search = _Search(candidates)
    numbers = np.arange(len(search.chosen))

    def joined(edges: Sequence[tuple[Ints, Ints]]) -> Ints:
        ends = np.concatenate([np.empty((2, 0), dtype=np.intp), *map(np.stack, edges)], axis=1)
        graph = coo_array((np.ones(ends.shape[1], dtype=np.bool_), tuple(ends)), shape=(len(numbers), len(numbers)))
        found: Ints = connected_components(graph, directed=False)[1][numbers]
        return found

    waiting: list[tuple[Ints, Ints]] = []
    count = 0
    for left, right, _ in search.pairs():
        new = numbers[left] != numbers[right]
        if new.any():
            waiting.append((numbers[left[new]], numbers[right[new]]))
            count += len(waiting[-1][0])
        if count > _TOGETHER:
            numbers, waiting, count = joined(waiting), [], 0
    members = (candidate for candidate in candidates if candidate.appearance)
    return {member.key: number for member, number in zip(members, joined(waiting).tolist(), strict=True)}


class _Search:
    """Finds all pairs of images that look alike, in memory that grows with the images and not with the pairs."""

    def __init__(self, candidates: Sequence[ImageCandidate]) -> None:
        looks = np.empty((len(candidates), _BYTES), dtype=np.uint8)
        splits, places, count = np.empty(len(looks), dtype=np.uint8), np.empty(len(looks), dtype=np.int32), 0
        for place, candidate in enumerate(candidates):
            if candidate.appearance:
                looks[count] = np.frombuffer(bytes.fromhex(candidate.appearance), dtype=np.uint8)
                splits[count], places[count], count = SPLITS.index(candidate.split), place, count + 1
        self.candidates, self.chosen, self.splits = candidates, places[:count], splits[:count]  # those with a look
        hashes = np.ascontiguousarray(looks[:count, :8]).view(">u8").ravel().astype(np.uint64)
        # So that of those with equal bits the nearest stand together.
        self._places = np.argsort(hashes, kind="stable").astype(np.int32)
        self._hashes, self._colors = hashes[self._places], looks[:count, 8:]
        self._twins = np.zeros(count, dtype=np.int32)
        self.complete = True

    def pairs(self) -> Iterator[tuple[Ints, Ints, Ints]]:
        """Yield all pairs once, in blocks: indices of the one and of the other, and the bits in which their hashes differ."""
        for number, mask in enumerate(_MASKS):
            keys = self._hashes & mask
            order = np.argsort(keys, kind="stable")
            keys = keys[order]
            starts, step = np.flatnonzero(keys[:-1] == keys[1:]), 1
            while True:
                searched = starts[self._twins[order[starts]] < (_MOST_TWINS if step <= _MOST_COMPARED else 0)]
                self.complete &= len(searched) == len(starts)
                starts = searched
                if not len(starts):
                    break
                for block in range(0, len(starts), _TOGETHER):
                    part = starts[block : block + _TOGETHER]
                    yield self._near(order[part], order[part + step], number)
                step += 1
                starts = starts[: np.searchsorted(starts, len(keys) - step)]
                starts = starts[keys[starts] == keys[starts + step]]

    def _near(self, left: Ints, right: Ints, number: int) -> tuple[Ints, Ints, Ints]:
        """Choose from the pairs that agree under a mask those that look alike and agreed under no earlier mask."""
        differing = self._hashes[left] ^ self._hashes[right]
        chosen = np.flatnonzero(np.bitwise_count(differing) <= RADIUS)
        for earlier in _MASKS[:number]:
            chosen = chosen[(differing[chosen] & earlier) != 0]
        left, right, differing = left[chosen], right[chosen], differing[chosen]
        left_place, right_place = self._places[left].astype(np.intp), self._places[right].astype(np.intp)
        colors = self._colors[left_place].astype(np.int16) - self._colors[right_place]
        alike = np.abs(colors).mean(axis=1) <= COLOR_DIFFERENCE
        self._twins[left[alike]] += 1
        bits: Ints = np.bitwise_count(differing[alike]).astype(np.intp)
        return left_place[alike], right_place[alike], bits
