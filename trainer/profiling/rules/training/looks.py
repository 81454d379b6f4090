"""The looks at the tensors of weights as arrays.

Shapes: L looks, P tensors.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from trainer.profiling.evidence import TensorLooks
from trainer.profiling.rules.outcomes import Case
from trainer.profiling.series import Series

Grid = npt.NDArray[np.float64]
"""A value for each look at each tensor, [L, P]; NaN where there was nothing to see."""

_SMALLEST_SCALE = 1e-3
"""Weights of a smaller root mean square (tokens that start near zero) say nothing of the step's size."""


@dataclass(frozen=True, kw_only=True)
class TensorHistory:
    """What each look saw of each tensor."""

    names: Sequence[str]
    steps: Series
    """[L]."""
    seconds: Series
    """Since the recording began, [L]."""
    rows: npt.NDArray[np.int64]
    """Which look each row of the table belongs to."""
    columns: npt.NDArray[np.int64]
    """Which tensor."""
    table: TensorLooks

    def __len__(self) -> int:
        return len(self.steps)

    def grid(self, column: str) -> Grid:
        """A column of the table, [L, P]."""
        values = np.full((len(self.steps), len(self.names)), np.nan)
        values[self.rows, self.columns] = self.table.values[column]
        return values

    def scales(self) -> Grid:
        """Root mean square of the weights, [L, P]."""
        return self.grid("weight_norm") / np.sqrt(self.grid("elements"))

    def update_ratios(self) -> Series:
        """The middle matrix's update against its weights, [L]; NaN where no matrix tells."""
        ratios = np.where((self.scales() >= _SMALLEST_SCALE) & self.matrices(), self.grid("update_ratio"), np.nan)
        told = np.isfinite(ratios).any(1)
        medians = np.full(len(self), np.nan)
        medians[told] = np.nanmedian(ratios[told], axis=1)
        return medians

    def matrices(self) -> npt.NDArray[np.bool_]:
        """Whether a tensor multiplies a signal, [L, P]: biases and norms have one dimension, tokens and positions three."""
        dimensions = self.grid("dimensions")
        return np.asarray((dimensions >= 2) & (dimensions != 3))


def looks_of(case: Case) -> TensorHistory:
    """The first process's looks; all processes hold the same weights."""
    table = case.training.ranks[0].tensors
    index = {name: number for number, name in enumerate(dict.fromkeys(table.tensors))}
    steps, first, rows = np.unique(table.steps, return_index=True, return_inverse=True)
    columns = np.fromiter((index[name] for name in table.tensors), np.int64, len(table.tensors))
    return TensorHistory(
        names=list(index), steps=steps, seconds=table.seconds[first], rows=rows, columns=columns, table=table
    )
