"""The rules on how fast the machine is used."""

from __future__ import annotations

from collections.abc import Sequence

from trainer.profiling.rules.outcomes import Rule

SYSTEM_RULES: Sequence[Rule] = ()
