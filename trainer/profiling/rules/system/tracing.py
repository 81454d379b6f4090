"""What rules say of devices of XLA, where a step is noted, compiled as one graph, and handed over: what compiles it again or breaks it up.

Shapes: S steps.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from trainer.profiling.evidence import RankEvidence
from trainer.profiling.evidence_schema import CompilationRecord, TransferRecord
from trainer.profiling.rules.causes import listed
from trainer.profiling.rules.outcomes import Case, Finding, Healthy, NotJudged, Outcome, Saving
from trainer.profiling.rules.system.compared_steps import IGNORED
from trainer.profiling.series import Series

_FEWEST_COUNTED = 10
"""Fewer steps with counted transfers may be an exception."""
_READ = "aten::_local_scalar_dense"
"""What torch calls the reading of a value: `.item()`, `float()`, an `if` on a tensor."""
_DEBUG = "PT_XLA_DEBUG_LEVEL=2 in the environment prints the line of the program that {}"

_CHANGED = (
    "A shape changed, or a Python value that the graph depends on.",
    f"Keep both the same from step to step; {_DEBUG.format('asked for each graph')}.",
)


def is_traced(rank: RankEvidence) -> bool:
    """Return whether a process trained on a device of XLA."""
    return rank.record.device.startswith("xla")


# ---------------------------------------------------------------------------------------------------------------------
# Compilations


def cause_of(rank: RankEvidence, late: Sequence[CompilationRecord]) -> tuple[str, str]:
    """Say what most likely changed in the steps that compiled again, and what to do about it, in a sentence each.

    Args:
        rank: the process.
        late: its compilations after the first steps.
    """
    if not len(rank.steps["step"]):
        return _CHANGED
    steps = np.array([one.step for one in late])
    usual, changed = _other_sizes(rank, steps)
    if len(changed):
        return (
            f"The number of images had changed: {changed[0]:.0f} instead of {usual:.0f}.",
            "Give every step the same number of images, and pad or drop what is left over.",
        )
    if np.isin(steps + rank.steps["step"][:1], rank.tensors.steps).all():
        return (
            "All of these steps held a measurement of the weights.",
            "Look more rarely (evidence.tensors_every), or never (0).",
        )
    if len(late) > (rank.record.steps.count - steps[0]) / 2:
        return (
            "Nearly every step since then did: a number that changes in each step (a rate, a count) has become a constant of the graph.",
            f"Put such numbers into tensors on the device; {_DEBUG.format('asked for each graph')}.",
        )
    return _CHANGED


def _other_sizes(rank: RankEvidence, steps: Series) -> tuple[float, Series]:
    """Find the images of a usual step, and of those of `steps` (counted from the recording's start) in the table that had others."""
    within = np.isin(rank.steps["step"], steps + rank.steps["step"][:1])
    images, usual = rank.steps["images"][within], float(np.median(rank.steps["images"]))
    return usual, images[images != usual]


# ---------------------------------------------------------------------------------------------------------------------
# Transfers


def transfers(case: Case, record: TransferRecord) -> Outcome:
    """Judge whether steps wait for values from the device.

    Args:
        case: a training on a device of XLA.
        record: what its first process counted.
    """
    rank, limit = case.training.ranks[0], case.rules.host_syncs.share_of_steps
    numbers = rank.steps["step"]
    counted = np.isfinite(rank.steps["transfers"])
    counted[:IGNORED] = False
    if counted.sum() < _FEWEST_COUNTED:
        return NotJudged(
            reason=f"transfers were counted in only {counted.sum()} steps after the first {IGNORED}; {_FEWEST_COUNTED} are needed",
            too_short=True,
        )
    numbers, values = numbers[counted], rank.steps["transfers"][counted]
    share = float(np.mean(values > 0))
    summary = f"In {share:.0%} of the steps values come from the device"
    if share <= limit:
        return Healthy(text=f"{summary}.")
    at = numbers[values > 0]
    return Finding(
        severity="warning",
        confidence=0.9,
        text=(
            f"{summary} ({values.mean():.3g} times a step, first in step {at[0]:.0f} of those after the warm-up): each time what they "
            f"depend on becomes a graph of its own, for which the host waits.{_on_host(record)}"
        ),
        advice=_advice(record),
        saving=_without(record, float(values.mean()) * rank.record.steps.count),
        numbers={"transfers_per_step": float(values.mean()), "transferring_share": share}
        | {f"{name}_calls": float(calls) for name, calls in record.fallbacks.items()},
        steps=(int(at[0]), int(at[-1])),
    )


def _lacking(record: TransferRecord) -> list[str]:
    """List the operators that XLA lacks, the most called first."""
    calls = {name: count for name, count in record.fallbacks.items() if name != _READ}
    return sorted(calls, key=lambda name: -calls[name])


def _on_host(record: TransferRecord) -> str:
    parts = []
    if lacking := _lacking(record):
        parts.append(f"{listed([f'{name} ({record.fallbacks[name]} calls)' for name in lacking])} ran on the host")
    if reads := record.fallbacks.get(_READ):
        parts.append(f"single values were read {reads} times ({_READ})")
    return f" {'; '.join(parts).capitalize() if not lacking else '; '.join(parts)}." if parts else ""


def _advice(record: TransferRecord) -> str:
    if lacking := _lacking(record):
        return f"XLA has no {listed(lacking)}: write it with operators that XLA has, or let it run on the host before the batch is sent."
    if record.fallbacks.get(_READ):
        return (
            "Look for .item(), float(), print or an if on a tensor in the objective and the model; keep values on the device and read "
            f"them every log_every steps; {_DEBUG.format('asked for each execution')}."
        )
    return (
        "Look for .cpu(), .tolist(), .numpy() or print of a tensor in the objective and the model; "
        f"{_DEBUG.format('asked for each execution')}."
    )


def _without(record: TransferRecord, in_steps: float) -> Saving | None:
    """Estimate the host's waiting in steps, by the share of all transfers that were made there."""
    if not record.from_device:
        return None
    seconds = record.from_device_s * min(1.0, in_steps / record.from_device)
    return Saving(seconds=seconds, reason="the time that the host waited for these transfers")
