"""How a job stands, in words that all backends share."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

Phase = Literal["pending", "suspended", "running", "restarting", "succeeded", "failed"]


@dataclass(frozen=True, kw_only=True)
class JobState:
    """How a job stands."""

    phase: Phase
    reason: str = ""
    """The operator's word for why, such as PyTorchJobFailed."""
    message: str = ""
    """The operator's sentence."""


def from_conditions(job: Mapping[str, Any], phases: Mapping[str, Phase]) -> JobState:
    """The state that the conditions of a job's status tell.

    Args:
        job: the job as the API server shows it.
        phases: type of a condition -> what it means; where several are true, the first one named here decides.
    """
    conditions = job.get("status", {}).get("conditions") or []
    true = {condition["type"]: condition for condition in conditions if condition.get("status") == "True"}
    for kind, phase in phases.items():
        if kind in true:
            return JobState(phase=phase, reason=true[kind].get("reason", ""), message=true[kind].get("message", ""))
    return JobState(phase="pending")
