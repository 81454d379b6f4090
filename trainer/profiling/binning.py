"""Long series, reduced to bins of time for drawing."""

from __future__ import annotations

import numpy as np

from trainer.profiling.series import Series


def mean_in_bins(ends: Series, values: Series, edges: Series) -> Series:
    """Average a signal within each bin.

    Args:
        ends: end of the time that each value stands for, which began at the end of the one before it, [samples].
        values: the signal, NaN where unknown, [samples].
        edges: of the bins, [bins + 1].

    Returns:
        [bins]; NaN where nothing is known.
    """
    spent = np.diff(ends, prepend=0.0)
    known = np.isfinite(values)
    weight = _integral(ends, spent * known, edges)
    total = _integral(ends, spent * np.where(known, values, 0.0), edges)
    return np.where(weight > 1e-9, total / np.maximum(weight, 1e-9), np.nan)


def _integral(ends: Series, amounts: Series, edges: Series) -> Series:
    """Sum what falls into each bin of amounts that are spread evenly over their time."""
    x, y = np.concatenate(([0.0], ends)), np.concatenate(([0.0], np.cumsum(amounts)))
    return np.diff(np.interp(edges, x, y))


def thin_curve(seconds: Series, values: Series, points: int) -> tuple[Series, Series]:
    """Average neighbouring points of a curve that has more than `points`; leave another as it is."""
    if len(values) <= points:
        return seconds, values
    starts = np.linspace(0, len(values), points + 1)[:-1].astype(int)
    counts = np.diff(np.append(starts, len(values)))
    return np.add.reduceat(seconds, starts) / counts, np.add.reduceat(values, starts) / counts


def spread_over(starts: Series, ends: Series, amounts: Series, edges: Series) -> Series:
    """Sum what falls into each bin of amounts that are spread evenly from their starts to their ends."""
    x = np.stack([starts, ends], axis=1).ravel()
    after = np.cumsum(amounts)
    y = np.stack([after - amounts, after], axis=1).ravel()
    return np.diff(np.interp(edges, x, y))
