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


def all_logits(outputs: TeacherOutputs | Recorded, classes: int) -> Tensor:
    """The teacher's logits for all classes, [B, C]; the stage refuses recorded outputs that lack some where a loss needs them all."""
    whole = complete(outputs, classes) if isinstance(outputs, Recorded) else outputs
    assert whole is not None, f"{classes} logits are needed and fewer were recorded"
    return whole.logits


def top_class(outputs: TeacherOutputs | Recorded) -> Tensor:
    """The class that the teacher finds likeliest, int64 [B]."""
    return outputs.indices[:, 0] if isinstance(outputs, Recorded) else outputs.logits.argmax(1)
