"""Evidence of what is learned that was never recorded: measurements of three tensors of weights, and curves.

Shapes: L measurements, P tensors.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt

from tests.unit.profiling.rules.synthetic import rank_of, steps_of
from trainer.config.rules import RuleSettings
from trainer.profiling.evidence import ContextRecord, Curve, TensorSamples, TrainingEvidence
from trainer.profiling.rules.outcomes import Case

TENSORS = ("blocks.0.mlp.weight", "blocks.1.mlp.weight", "norm.weight")
USUAL: Mapping[str, npt.ArrayLike] = {
    "elements": [4096, 4096, 64],
    "dimensions": [2, 2, 1],
    "weight_norm": [0.02 * 64, 0.02 * 64, 8],
    "weight_mean_abs": [0.016, 0.016, 1],
    "weight_nonfinite": 0,
    "gradient_norm": [1, 1, 0.1],
    "gradient_mean_abs": 1e-3,
    "gradient_zeros": 0,
    "gradient_nonfinite": 0,
    "update_ratio": 0.01,
    "unchanged": 0,
}
"""A healthy look: two matrices of 64 x 64, drawn with a standard deviation of 0.02, and a norm."""
SETTINGS = {"base_learning_rate": 1e-3, "batch_size": 256, "clip_norm": 1.0}


def measured(count: int = 5, *, first_step: int = 0, **columns: npt.ArrayLike) -> TensorSamples:
    """A measurement at every tenth step, a second apart; a column is [P], [L, 1] or [L, P], `USUAL` where it is not given."""
    shape = (count, len(TENSORS))
    values = {name: np.broadcast_to(np.asarray(column, float), shape) for name, column in (USUAL | columns).items()}
    number = np.arange(count, dtype=float)
    return TensorSamples(tensors=TENSORS, steps=first_step + 10 * number, seconds=number, values=values)


def curve_of(values: Sequence[float] | npt.NDArray[np.float64], *, every: int = 10) -> Curve:
    """A point every so many steps, a second apart."""
    points = np.asarray(values, float)
    number = np.arange(1, len(points) + 1)
    return Curve(steps=every * number - 1.0, seconds=number.astype(float), values=points)


def case_of(
    tensors: TensorSamples | None = None,
    *,
    name: str = "distill",
    steps: Mapping[str, Any] | None = None,
    metrics: Mapping[str, Curve] | None = None,
    context: Mapping[str, Any] | None = None,
    rules: Mapping[str, Any] | None = None,
    live: bool = False,
    **record: Any,
) -> Case:
    """A training of 100 seconds.

    Args:
        tensors: measurements of its weights.
        name: of the training.
        steps: its step table.
        metrics: its curves.
        context: fields of its `ContextRecord`; `settings` are added to `SETTINGS`.
        rules: thresholds, by rule.
        live: whether it still runs.
        record: fields of its `RankRecord`.
    """
    known = dict(context or {})
    known["settings"] = SETTINGS | known.get("settings", {})
    rank = rank_of(steps or steps_of(), context=ContextRecord(**known), name=name, **({"ended_s": 100.0} | record))
    rank = replace(rank, tensors=tensors or measured(0))
    training = TrainingEvidence(name=name, ranks=[rank], metrics=metrics or {})
    return Case(training=training, rules=RuleSettings(**(rules or {})), live=live)
