"""What recorded outputs hold of a teacher: probability mass, labels. Counted shard by shard and added up, over all processes.

Shapes: B records, K logits a record, L numbers of entries (1, 2, 4, ... K).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from trainer.data.dataset_schema import UNLABELED

Floats = npt.NDArray[np.float64]
Counts = npt.NDArray[np.int64]

TEMPERATURES = (1, 2)
"""At which the sum of the other classes was recorded."""

LEAST_MISSING = 1e-6
"""Missing mass below this counts as none in the distribution; the means are exact."""
_BINS = 600
EDGES: Floats = np.logspace(np.log10(LEAST_MISSING), 0, _BINS + 1)
"""Edges of the distribution's bins, in missing mass; below the first edge is one bin more."""


def entries(top_k: int) -> list[int]:
    """The numbers of entries that are looked at: powers of two, and `top_k` itself."""
    return [2**power for power in range(top_k.bit_length()) if 2**power < top_k] + [top_k]


@dataclass(frozen=True, kw_only=True)
class Coverage:
    """Sums over views."""

    views: int
    labelled: int
    """Views whose image has a label."""
    labels_recorded: int
    """Views whose image's label is among the K entries."""
    labels_first: int
    """Views whose image's label is the teacher's top class."""
    held: Floats
    """Probability mass of the largest entries, for each temperature and number of entries, [2, L]."""
    missing: Floats
    """Probability mass of the classes that were not recorded, for each temperature, [2]."""
    next_at_most: Floats
    """What K entries more could hold of it at most, because none is larger than the K-th, [2]."""
    distribution: Counts
    """Views by missing mass, for each temperature: none, then the bins between `EDGES`, [2, bins + 1]."""

    def mean_held(self) -> Floats:
        """Mean mass of the largest entries, for each temperature and number of entries, [2, L]."""
        return self.held / self.views

    def mean_mass(self) -> Floats:
        """Mean mass of all K entries, for each temperature, [2]."""
        return 1 - self.missing / self.views

    def mean_mass_of_twice(self) -> Floats:
        """What 2K entries would hold at most in the mean, for each temperature, [2]."""
        return 1 - (self.missing - self.next_at_most) / self.views

    def quantile(self, share: float, temperature: int) -> float:
        """The mass of the K entries that this share of the views stays below, to within 1.2 % of the missing mass."""
        counts = self.distribution[TEMPERATURES.index(temperature)]
        position = np.searchsorted(counts[::-1].cumsum(), max(1, np.ceil(share * self.views)))
        bin_number = len(counts) - 1 - int(position)
        return 1.0 if bin_number == 0 else float(1 - np.sqrt(EDGES[bin_number - 1] * EDGES[bin_number]))

    def figures(self) -> dict[str, Any]:
        """The main numbers, as `summary.json` shows them."""
        mass = {
            f"t{temperature}": {
                "mean": float(mean),
                "p5": self.quantile(0.05, temperature),
                "p1": self.quantile(0.01, temperature),
            }
            for temperature, mean in zip(TEMPERATURES, self.mean_mass(), strict=True)
        }
        return {
            "mass": mass,
            "label_recorded": self.labels_recorded / max(1, self.labelled),
            "teacher_top1": self.labels_first / max(1, self.labelled),
        }


def count(records: npt.NDArray[np.void], labels: npt.NDArray[np.int64], classes: int) -> Coverage:
    """The coverage of records [B] of a teacher with so many classes; `labels` [B] of their images are -1 where there is none."""
    logits, top_k = records["logits"].astype(np.float64), records["logits"].shape[1]
    held, missing, at_most, distribution = [], [], [], []
    for column, temperature in enumerate(TEMPERATURES):
        scaled, rest = logits / temperature, records["rest"][:, column].astype(np.float64)
        total = np.logaddexp(np.logaddexp.reduce(scaled, axis=1), rest)
        mass, lacking = np.exp(scaled - total[:, None]), np.exp(rest - total)
        held.append(mass.cumsum(1)[:, np.array(entries(top_k)) - 1].sum(0))
        missing.append(lacking.sum())
        at_most.append(np.minimum(lacking, mass[:, -1] * min(top_k, classes - top_k)).sum())
        bins = np.minimum(np.searchsorted(EDGES, lacking, side="right"), _BINS)
        distribution.append(np.bincount(bins, minlength=_BINS + 1))
    is_label = records["indices"] == labels[:, None]
    return Coverage(
        views=len(records),
        labelled=int((labels != UNLABELED).sum()),
        labels_recorded=int(is_label.any(1).sum()),
        labels_first=int(is_label[:, 0].sum()),
        held=np.stack(held),
        missing=np.array(missing),
        next_at_most=np.array(at_most),
        distribution=np.stack(distribution),
    )


def total(parts: Iterable[Coverage]) -> Coverage:
    """The coverage of all parts together; there is one at least."""
    values = [vars(part) for part in parts]
    return Coverage(**{name: sum(value[name] for value in values[1:]) + values[0][name] for name in values[0]})
