"""What a teacher says of a batch: all its logits, or the largest ones and the sum of the rest.

Shapes: B samples, C classes, K recorded logits, D features.
"""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from trainer.data.batch import Recorded


class TeacherOutputs(NamedTuple):
    """Complete outputs."""

    logits: Tensor
    """float32 [B, C]."""
    features: Tensor | None = None
    """Pooled features, float32 [B, D]."""


def complete(recorded: Recorded, classes: int) -> TeacherOutputs | None:
    """Recorded outputs as complete ones; None if some logits were not recorded."""
    if recorded.indices.shape[1] < classes:
        return None
    logits = recorded.logits.new_empty(len(recorded.logits), classes).scatter_(1, recorded.indices, recorded.logits)
    return TeacherOutputs(logits, recorded.features)
