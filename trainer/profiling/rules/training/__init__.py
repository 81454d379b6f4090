"""The rules on what is learned."""

from __future__ import annotations

from collections.abc import Sequence

from trainer.profiling.rules.outcomes import Rule
from trainer.profiling.rules.training.inputs import (
    CLASS_IMBALANCE,
    LOW_RECORDED_MASS,
    VANISHING_LOSS_TERM,
    WEAK_TEACHER,
)
from trainer.profiling.rules.training.loss_curves import LOSS_NOT_FALLING, OVERFITTING
from trainer.profiling.rules.training.pauses import STALLED_TRAINING
from trainer.profiling.rules.training.weights import (
    EXPLODING_GRADIENTS,
    POOR_INITIALISATION,
    UNCHANGED_WEIGHTS,
    UPDATE_RATIO,
    VANISHING_GRADIENTS,
)

TRAINING_RULES: Sequence[Rule] = (
    POOR_INITIALISATION,
    EXPLODING_GRADIENTS,
    VANISHING_GRADIENTS,
    UPDATE_RATIO,
    UNCHANGED_WEIGHTS,
    LOSS_NOT_FALLING,
    OVERFITTING,
    STALLED_TRAINING,
    CLASS_IMBALANCE,
    WEAK_TEACHER,
    VANISHING_LOSS_TERM,
    LOW_RECORDED_MASS,
)
