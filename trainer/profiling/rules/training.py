"""The rules on what is learned."""

from __future__ import annotations

from collections.abc import Sequence

from trainer.profiling.rules.outcomes import Rule

TRAINING_RULES: Sequence[Rule] = ()
