"""A counter-based random number generator: a draw is a function of what it is for, without state.

Words (seed, sample key, view number, index of the draw) are mixed with the finaliser of SplitMix64 (Steele, Lea, Flood 2014), vectorised
over arrays. So a draw does not depend on the number of workers or processes, on the batch size, or on earlier draws.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

Keys = npt.NDArray[np.uint64]
Indices = npt.NDArray[np.int64]
Words = int | Keys | Indices

_GAMMA = np.uint64(0x9E3779B97F4A7C15)
_MIX_1 = np.uint64(0xBF58476D1CE4E5B9)
_MIX_2 = np.uint64(0x94D049BB133111EB)


def random_bits(*words: Words) -> npt.NDArray[np.uint64]:
    """Draw 64 random bits for each tuple of words; arrays of words are broadcast against one another."""
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
