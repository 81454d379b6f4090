"""Tables of numbers that stay small however long a training runs."""

from __future__ import annotations

import random
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

Series = NDArray[np.float64]
Rows = NDArray[np.intp]


class ThinnedTable:
    """Rows of numbers, at most `capacity` of them, spread evenly over everything that was appended.

    All rows are kept until the table is full. Then one of every two neighbours is dropped and from there on only one of every
    two appended rows is kept, then one of four, and so on (`stride`). Which one is drawn at random: a fixed choice would fall in with
    anything periodic in the training, such as a log line every tenth step. The draw depends only on how many rows were appended, so
    all ranks keep the same steps, and it does not touch the training's generators.
    """

    def __init__(self, columns: Sequence[str], capacity: int) -> None:
        if capacity < 2 or capacity % 2:
            raise ValueError(f"capacity must be even and at least 2, got {capacity}")
        self.columns = list(columns)
        self.capacity = capacity
        self.stride = 1
        """Appended rows for each row that is kept."""
        self.appended = 0
        self._kept = 0
        self._wanted = 0
        self._draw = random.Random(0)
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
        if self.appended == self._wanted:
            if self._kept == self.capacity:
                self._thin()
            self._values[self._kept, : len(row)] = row
            self._kept += 1
        self.appended += 1
        if self.appended % self.stride == 0:
            self._wanted = self.appended + (self._draw.randrange(self.stride) if self.stride > 1 else 0)

    def _thin(self) -> None:
        half = self.capacity // 2
        chosen = [2 * pair + self._draw.randrange(2) for pair in range(half)]
        self._values[:half] = self._values[chosen]
        self._values[half:] = 0
        self._kept = half
        self.stride *= 2

    def array(self) -> Series:
        """A copy of the kept rows, [rows, columns]."""
        return self._values[: self._kept, : len(self.columns)].copy()

    def column(self, name: str) -> Series:
        """A copy of one column of the kept rows."""
        return self._values[: self._kept, self.columns.index(name)].copy()
