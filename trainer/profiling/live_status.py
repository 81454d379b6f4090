"""The state of a running training as a small file beside its outputs, and how `python -m trainer watch` shows it.

The first process writes `.live/NAME.json` below the folder of its outputs, here or in a store, each time that it judges the training.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Literal

from pydantic import ValidationError

from trainer.io import formatting, storage
from trainer.io.base_models import StrictModel
from trainer.io.errors import ArtifactError
from trainer.io.limits import printable
from trainer.profiling.evidence import TrainingEvidence, is_core, measured_steps, phase_shares, step_ms
from trainer.profiling.evidence import images_per_second as rate_of
from trainer.profiling.training_summary import named_number, phase_label, training_label

State = Literal["running", "ended", "failed"]
FOLDER = ".live"
RECENT_S = 60.0
"""The use of the machine is the mean of the last minute."""
_SILENT_S = 60.0
_BAR = 24  # characters of a whole step
_BEFORE = ("mae", "finetune")  # trainings that another one follows
_SHOWN = ("cores_percent", "gpu_percent", "gpu_memory_used_bytes", "memory_used_bytes", "network_received_bytes_per_s")


class LiveFinding(StrictModel):
    """A finding, as the log has it."""

    severity: Literal["note", "warning", "severe"]
    title: str
    text: str
    step: int  # counted from 0


class LiveStatus(StrictModel):
    """A training at a moment."""

    name: str
    state: State
    written_unix: float
    interval_s: float  # the least time between two writes
    step: int  # steps done
    total_steps: int | None
    step_p50_ms: float | None
    images_per_second: float | None
    phases: Mapping[str, float]  # phase -> share of the steps' time
    last: Mapping[str, float]  # curve -> its last value
    machine: Mapping[str, float]  # signal -> mean of the last minute
    findings: Sequence[LiveFinding]


class NothingYetError(ArtifactError):
    """No training of a run has written its state yet."""


def status_of(
    training: TrainingEvidence, *, step: int, interval_s: float, findings: Sequence[LiveFinding], state: State
) -> LiveStatus:
    """Reduce the evidence of a training so far."""
    rank = training.ranks[0]
    spread, ends = step_ms(rank), rank.system["end_s"]
    recent = ends > (ends[-1] if len(ends) else 0.0) - RECENT_S
    means = {
        name: float(values[recent].mean()) for name, values in rank.system.items() if name != "end_s" and recent.any()
    }
    cores = [value for name, value in means.items() if is_core(name)]
    machine = {"cores_percent": sum(cores) / len(cores)} if cores else {}
    machine |= {name: value for name, value in means.items() if name in _SHOWN and math.isfinite(value)}
    last = {name: float(curve.values[-1]) for name, curve in training.metrics.items() if len(curve.values)}
    return LiveStatus(
        name=training.name,
        state=state,
        written_unix=time.time(),
        interval_s=interval_s,
        step=step,
        total_steps=rank.record.context.total_steps,
        step_p50_ms=spread.p50 if spread else None,
        images_per_second=rate_of(rank.steps) if len(measured_steps(rank.steps)) else None,
        phases=phase_shares(rank) if len(rank.steps["step"]) else {},
        last={name: value for name, value in last.items() if "/" not in name and math.isfinite(value)},
        machine=machine,
        findings=findings,
    )


def place(output: str | Path, name: str) -> str:
    """Return the URI of the file of a training whose stage writes the model `output`."""
    return storage.join(storage.parent(output), FOLDER, f"{name}.json")


def read(run: str) -> list[LiveStatus]:
    """Read the trainings of a run, in the order in which they were last seen.

    A `NothingYetError` if there is none, an `ArtifactError` if one is not readable.
    """
    found, folder = [], storage.join(run, FOLDER)
    for name in storage.files(folder):
        if "/" in name or not name.endswith(".json") or name.startswith("."):
            continue
        uri = storage.join(folder, name)
        try:
            found.append(LiveStatus.model_validate_json(storage.read_bytes(uri)))
        except ValidationError as error:
            raise ArtifactError(
                f"{uri}: is not the state of a training ({error}); another version may have written it"
            ) from error
    if not found:
        raise NothingYetError(
            f"{run}: no training has been judged there yet (no files in {folder}); give the folder of a run that trains"
        )
    return sorted(found, key=lambda status: status.written_unix)


def screen(statuses: Sequence[LiveStatus], *, now_unix: float) -> str:
    """Show trainings as text: of each how far it is and how fast, where its time goes, the machine, and the findings."""
    return printable("\n\n".join("\n".join(_lines(status, now_unix)) for status in statuses))


def _lines(status: LiveStatus, now_unix: float) -> list[str]:
    silent_s = now_unix - status.written_unix
    state: str = status.state
    if state == "running" and silent_s > _SILENT_S + 2 * status.interval_s:
        state = f"no sign of life for {formatting.duration(silent_s)}"
    total = f"/{status.total_steps}" if status.total_steps else ""
    head = [f"{training_label(status.name)}: {state}, step {status.step}{total}"]
    if status.step_p50_ms is not None:
        head.append(f"{formatting.milliseconds(status.step_p50_ms)} a step")
    if status.images_per_second is not None:
        head.append(f"{status.images_per_second:,.0f} images/s")
    if status.total_steps and status.step_p50_ms is not None and state == "running":
        left_s = (status.total_steps - status.step) * status.step_p50_ms / 1000
        head.append(f"about {formatting.duration(max(0.0, left_s))} of steps left")
    lines = ["  ".join(head)]
    lines += [
        f"  {phase_label(name):24} {'█' * round(_BAR * share):{_BAR}} {formatting.percent(share):>6}"
        for name, share in status.phases.items()
        if share >= 0.005
    ]
    values = [f"{name} {value:.4g}" for name, value in status.last.items()]
    machine = [" ".join(named_number(name, value)) for name, value in status.machine.items()]
    lines += [f"  {'  '.join(part)}" for part in (values, machine) if part]
    findings = [f"  {one.severity}: {one.title} (step {one.step + 1}). {one.text}" for one in status.findings]
    return lines + (findings or ["  no finding so far"])


def watch(run: str, *, interval_s: float, once: bool, show: Callable[[str], None]) -> None:
    """Show a run again and again until its distillation has ended, or `once`; before its first training wait for that."""
    if not storage.is_remote(run) and not storage.local_path(run).is_dir():
        raise ArtifactError(f"{run}: no such folder; give the folder of a run that trains, such as runs/latest")
    while True:
        try:
            statuses = read(run)
        except NothingYetError:
            if once:
                raise
            show(f"{run}: no training has been judged there yet; waiting")
        else:
            show(screen(statuses, now_unix=time.time()))
            if once or (statuses[-1].state != "running" and statuses[-1].name not in _BEFORE):
                return
        time.sleep(interval_s)
