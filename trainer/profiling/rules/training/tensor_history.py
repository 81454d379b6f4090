"""The measurements of the tensors of weights as arrays.

Shapes: L measurements, P tensors.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from trainer.profiling.evidence import TensorSamples
from trainer.profiling.rules.outcomes import Case
from trainer.profiling.series import Series

Grid = npt.NDArray[np.float64]
"""A value of each measurement of each tensor, [L, P]; NaN where there is none."""

_SMALLEST_SCALE = 1e-3
"""The update of weights with a smaller root mean square (tokens that start near zero) does not show the step's size."""


@dataclass(frozen=True, kw_only=True)
class TensorHistory:
    """Every measurement of each tensor."""

    names: Sequence[str]
    steps: Series
    """[L]."""
    seconds: Series
    """Since the recording began, [L]."""
    rows: npt.NDArray[np.int64]
    """The measurement of each row of the table."""
    columns: npt.NDArray[np.int64]
    """The tensor of each row of the table."""
    table: TensorSamples

    def __len__(self) -> int:
        return len(self.steps)

    def grid(self, column: str) -> Grid:
        """Arrange a column of the table as [L, P]."""
        values = np.full((len(self.steps), len(self.names)), np.nan)
        values[self.rows, self.columns] = self.table.values[column]
        return values

    def scales(self) -> Grid:
        """Compute the root mean square of the weights, [L, P]."""
        return self.grid("weight_norm") / np.sqrt(self.grid("elements"))

    def update_ratios(self) -> Series:
        """Compute the median matrix's update relative to its weights, [L]; NaN where no matrix is large enough."""
        ratios = np.where((self.scales() >= _SMALLEST_SCALE) & self.matrices(), self.grid("update_ratio"), np.nan)
        known = np.isfinite(ratios).any(1)
        medians = np.full(len(self), np.nan)
        medians[known] = np.nanmedian(ratios[known], axis=1)
        return medians

    def matrices(self) -> npt.NDArray[np.bool_]:
        """Mark the tensors that multiply a signal, [L, P]: biases and norms have one dimension, tokens and positions three."""
        dimensions = self.grid("dimensions")
        return np.asarray((dimensions >= 2) & (dimensions != 3))


def tensor_history(case: Case) -> TensorHistory:
    """Read the first process's measurements; all processes hold the same weights."""
    table = case.training.ranks[0].tensors
    index = {name: number for number, name in enumerate(dict.fromkeys(table.tensors))}
    steps, first, rows = np.unique(table.steps, return_index=True, return_inverse=True)
    columns = np.fromiter((index[name] for name in table.tensors), np.int64, len(table.tensors))
    return TensorHistory(
        names=list(index), steps=steps, seconds=table.seconds[first], rows=rows, columns=columns, table=table
    )
