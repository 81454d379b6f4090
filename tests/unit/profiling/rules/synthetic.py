"""Evidence that was never recorded: whole trainings from a few numbers, for the two sides of a threshold."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from trainer.config import EvidenceSettings
from trainer.config.rules import RuleSettings
from trainer.profiling.evidence import (
    PHASES,
    SCHEMA_VERSION,
    TENSOR_COLUMNS,
    CompilationRecord,
    ProcessRecord,
    RankEvidence,
    RankRecord,
    Spans,
    StepRecord,
    TensorSamples,
    TrainingEvidence,
    TransferRecord,
)
from trainer.profiling.rules import judge
from trainer.profiling.rules.outcomes import Case, Finding, Rule

GPU = "cuda:0 (a GPU)"
XLA = "xla:0 (NEURON)"
STEPS = 110
"""Of which rules look at 100: the first ten warm up."""
USUAL_MS = {"data": 1, "to_device": 0, "teacher_forward": 4, "forward": 2, "backward": 2, "optimizer": 1}
"""A step of ten milliseconds."""

Milliseconds = float | Sequence[float]
"""The same in each step, or of each."""


def steps_of(count: int = STEPS, **milliseconds: Milliseconds) -> dict[str, np.ndarray]:
    """A step table: of each phase its milliseconds, `USUAL_MS` where they are not given; other names are columns as they are."""
    ranges = {name: np.full(count, 1e-3) * value for name, value in (USUAL_MS | milliseconds).items()}
    columns = {name: values * 1e3 for name, values in ranges.items() if name in ("profiled", "queued", "transfers")}
    ranges = {name: values for name, values in ranges.items() if name not in columns}
    host = {name: ranges.pop(name) for name in list(ranges) if name.startswith("host_")}
    seconds = np.sum(list(ranges.values()), axis=0)
    usual = {
        "step": np.arange(count, dtype=float),
        "start_s": np.cumsum(seconds) - seconds,
        "seconds": seconds,
        "images": np.full(count, 128.0),
        "profiled": np.zeros(count),
        "host_seconds": seconds,
        "host_data_seconds": ranges["data"],
        "host_cpu_seconds": seconds,
        "host_data_cpu_seconds": ranges["data"],
        "host_delayed_seconds": np.zeros(count),
        "host_data_delayed_seconds": np.zeros(count),
        "host_backward_cpu_seconds": np.minimum(ranges["backward"], 2e-3),
        "host_backward_delayed_seconds": np.zeros(count),
        "host_to_device_seconds": np.full(count, 0.2e-3),
        "queued": np.full(count, np.nan),
        "transfers": np.full(count, np.nan),
    }
    return usual | host | columns | {"other": np.zeros(count)} | ranges


def rank_of(
    steps: Mapping[str, np.ndarray] | None = None,
    *,
    system: Mapping[str, Sequence[float] | float] | None = None,
    samples: int = 100,
    tensors: int = 0,
    **record: Any,
) -> RankEvidence:
    """What a process recorded.

    Args:
        steps: its step table.
        system: signal -> its samples, or what they all are.
        samples: of the system, evenly over the recording.
        tensors: of weights, that were looked at once.
        record: fields of its `RankRecord`.
    """
    steps = steps or steps_of()
    seconds = float(steps["seconds"].sum())
    usual = {
        "schema_version": SCHEMA_VERSION,
        "name": "distill",
        "rank": 0,
        "world_size": 1,
        "device": "cpu",
        "host": "node-a",
        "cores": 2,
        "memory_bytes": 8 * 2**30,
        "workers": 0,
        "process": ProcessRecord(pid=1, started_unix=0.0, imported_unix=5.0),
        "began_unix": 10.0,
        "first_step_s": float(steps["seconds"][0]) if len(steps["seconds"]) else None,
        "ended_s": seconds,
        "settings": EvidenceSettings(),
        "steps": StepRecord(
            count=len(steps["step"]),
            kept_of=1,
            lost=0,
            seconds=seconds,
            images=0,
            ranges={name: 0.0 for name in steps if name in PHASES},
        ),
        "outside": {},
        "system_interval_s": seconds / samples,
        "operators": None,
        "missing": {},
    }
    looks = min(tensors, 1)
    return RankEvidence(
        record=RankRecord(**(usual | record)),
        steps=steps,
        spans=Spans(names=[], start_s=np.array([]), seconds=np.array([])),
        tensors=TensorSamples(
            tensors=[f"weight{n}" for n in range(tensors)],
            steps=np.zeros(looks),
            seconds=np.zeros(looks),
            values={name: np.ones((looks, tensors)) for name in TENSOR_COLUMNS},
        ),
        system={"end_s": np.linspace(0, seconds, samples + 1)[1:]}
        | {name: np.full(samples, 1.0) * np.asarray(values) for name, values in (system or {}).items()},
    )


def on_xla(
    steps: Mapping[str, np.ndarray] | None = None,
    *,
    transfers: Any = 0.0,
    fallbacks: Mapping[str, int] | None = None,
    compiled: Mapping[int, float] | None = None,
    **record: Any,
) -> RankEvidence:
    """A process on XLA.

    Args:
        steps: its step table.
        transfers: from the device, in each step.
        fallbacks: operator that ran on the host -> calls.
        compiled: step -> seconds in the compiler.
        record: further fields of its record.
    """
    steps = dict(steps or steps_of())
    steps["transfers"] = np.zeros(len(steps["step"])) + transfers
    exchanged = TransferRecord(
        from_device=200, from_device_s=2.0, from_device_bytes=800, to_device_bytes=10**6, fallbacks=fallbacks or {}
    )
    compilations = tuple(
        CompilationRecord(step=step, graphs=1, seconds=spent)
        for step, spent in ({0: 60.0, 1: 50.0} | dict(compiled or {})).items()
    )
    return rank_of(steps, device=XLA, transfers=exchanged, compilations=compilations, **record)


def case_of(
    *ranks: RankEvidence, rules: RuleSettings | None = None, live: bool = False, stage_s: float | None = None
) -> Case:
    """A training by these processes; by one healthy one where none is given."""
    training = TrainingEvidence(name="distill", ranks=ranks or [rank_of()], metrics={})
    return Case(training=training, rules=rules or RuleSettings(), live=live, stage_s=stage_s)


def together(*steps: Mapping[str, np.ndarray], **record: Any) -> list[RankEvidence]:
    """Processes that train together, each with its step table."""
    return [rank_of(table, rank=rank, world_size=len(steps), **record) for rank, table in enumerate(steps)]


def judge_by(kind: type[Rule], case: Case) -> Any:
    return case.rule(kind).judge(case)


def finding(kind: type[Rule], *ranks: RankEvidence) -> Finding:
    """What a rule finds in a training by these processes."""
    outcome = judge_by(kind, case_of(*ranks))
    assert isinstance(outcome, Finding), outcome
    return outcome


def all_fired(*ranks: RankEvidence, rules: Mapping[str, Any] | None = None) -> list[str]:
    """Names of all rules that have a finding."""
    case = case_of(*ranks, rules=RuleSettings(**(rules or {})))
    return [rule.name for rule, outcome in judge(case).items() if isinstance(outcome, Finding)]
