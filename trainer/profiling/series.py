"""Long series of numbers: tables that stay small however long a training runs, and bins of time for drawing."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

Series = NDArray[np.float64]
Rows = NDArray[np.intp]
Flags = NDArray[np.bool_]


class ThinnedTable:
    """Rows of numbers, at most `capacity` (even) of them: every `stride`-th appended row.

    A full table drops every second row and doubles the stride. All ranks keep the same steps, and the first row, from which rules and
    reports count.
    """

    def __init__(self, columns: Sequence[str], capacity: int) -> None:
        self.columns = list(columns)
        self.capacity = capacity
        self.stride = 1  # appended rows for each row that is kept
        self.appended = 0
        self._kept = 0
        self._values = np.zeros((capacity, len(self.columns)))

    def __len__(self) -> int:
        return self._kept

    def add_column(self, name: str) -> None:
        """Add a column on the right; rows already there hold 0 in it."""
        self.columns.append(name)
        if len(self.columns) > self._values.shape[1]:
            wider = np.zeros((self.capacity, 2 * len(self.columns)))
            wider[: self._kept, : self._values.shape[1]] = self._values[: self._kept]  # the rest stays untouched memory
            self._values = wider

    def append(self, row: Sequence[float]) -> None:
        """Append one value for each column, or drop the row where the table is being thinned."""
        if self.appended % self.stride == 0:
            if self._kept == self.capacity:
                self._kept //= 2
                self._values[: self._kept] = self._values[::2].copy()
                self._values[self._kept :] = 0
                self.stride *= 2
            self._values[self._kept, : len(row)] = row
            self._kept += 1
        self.appended += 1

    def array(self) -> Series:
        """A copy of the kept rows, [rows, columns]."""
        return self._values[: self._kept, : len(self.columns)].copy()

    def column(self, name: str) -> Series:
        """A copy of one column of the kept rows."""
        return self._values[: self._kept, self.columns.index(name)].copy()


def mean_in_bins(ends: Series, values: Series, edges: Series) -> Series:
    """Average a signal within each bin, [bins]; NaN where nothing is known.

    Args:
        ends: end of the interval of each value, which began at the end of the previous one, [samples].
        values: the signal, NaN where unknown, [samples].
        edges: of the bins, [bins + 1].
    """
    spent = np.diff(ends, prepend=0.0)
    known = np.isfinite(values)
    ends = np.concatenate(([0.0], ends))
    weight, total = (  # what falls into each bin of amounts that are spread evenly over their time
        np.diff(np.interp(edges, ends, np.concatenate(([0.0], np.cumsum(amounts)))))
        for amounts in (spent * known, spent * np.where(known, values, 0.0))
    )
    return np.where(weight > 1e-9, total / np.maximum(weight, 1e-9), np.nan)


def thin_curve(seconds: Series, values: Series, points: int) -> tuple[Series, Series]:
    """Average neighboring points of a curve that has more than `points`, NaN where none is known; leave another as it is."""
    if len(values) <= points:
        return seconds, values
    starts = np.linspace(0, len(values), points + 1)[:-1].astype(np.intp)
    return means_from(starts, seconds), means_from(starts, values)


def means_from(starts: Rows, values: Series) -> Series:
    """Average the known values from each start to the next, along the last axis; NaN where none is known."""
    known = np.isfinite(values)
    sums, counts = (np.add.reduceat(each, starts, axis=-1) for each in (np.where(known, values, 0.0), known * 1.0))
    return np.where(counts, sums / np.maximum(counts, 1), np.nan)


def spread_over(starts: Series, ends: Series, amounts: Series, edges: Series) -> Series:
    """Sum what falls into each bin of amounts that are spread evenly from their starts to their ends."""
    x = np.stack([starts, ends], axis=1).ravel()
    after = np.cumsum(amounts)
    y = np.stack([after - amounts, after], axis=1).ravel()
    return np.diff(np.interp(edges, x, y))
