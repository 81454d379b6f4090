"""The evidence schema: what a training records of itself, and how it is kept.

An evidence artifact (version: `graph.SCHEMA_VERSIONS["evidence"]`) holds one directory for each part of the training that ran: `mae`,
`finetune` or `distill`. It holds none where nothing was trained (given weights, zero epochs). Every rank writes its own files:

    NAME/rank0.json             a `RankRecord`
    NAME/rank0-steps.arrow      a row a step: `STEP_COLUMNS`, then seconds of each range by its path (`other`, the phases, what users
                                named); evenly thinned when long
    NAME/rank0-spans.arrow      a row for each range outside of a step: range, start_s, seconds; evenly thinned when long
    NAME/rank0-tensors.arrow    a row for each sample of each tensor of weights: step, seconds, tensor, then `TENSOR_COLUMNS`
    NAME/rank0-system.arrow     a row a sample: end_s, then the signals, NaN where a signal stopped; averaged when long
    NAME/rank1.json, ...
    NAME/metrics.arrow          of rank 0: step, seconds, name, value; evenly thinned when long

Arrow files are IPC files. Times ending in `_s` are seconds since the rank's recording began, at `began_unix`. On a GPU `seconds` and the
ranges are times on the device, the `host_` columns times on the host; on a CPU and on XLA `seconds` and `host_seconds` agree.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import Field

from trainer.base_models import StrictModel
from trainer.config import EvidenceSettings
from trainer.costs import Machines
from trainer.graph import SCHEMA_VERSIONS

SCHEMA_VERSION = SCHEMA_VERSIONS["evidence"]

STEP_COLUMNS = (
    "step",
    "start_s",
    "seconds",
    "images",
    "profiled",
    "host_seconds",
    "host_data_seconds",
    "host_cpu_seconds",
    "host_delayed_seconds",
    "host_data_cpu_seconds",
    "host_data_delayed_seconds",
    "host_backward_cpu_seconds",
    "host_backward_delayed_seconds",
    "queued",
    "transfers",
)
"""Columns of the step table before its ranges. `host_`: of the training's thread in the step, in `data`, and in `backward`; `cpu`:
while it computed; `delayed`: while it was ready and no core was free, NaN where the kernel does not say. `queued`: batches that the
loader processes had ready when the step asked for one, NaN where there are none. `transfers`: how often values came from the device to
the host, on XLA, where that breaks up the step; NaN where it was not counted, as in most steps of a long training."""
SPAN_COLUMNS = ("range", "start_s", "seconds")
SYSTEM_COLUMNS = ("end_s",)
"""Columns of the system table before its signals."""
TENSOR_COLUMNS = (
    "elements",
    "dimensions",
    "weight_norm",
    "weight_mean_abs",
    "weight_nonfinite",
    "gradient_norm",
    "gradient_mean_abs",
    "gradient_zeros",
    "gradient_nonfinite",
    "update_ratio",
    "unchanged",
)
"""Of a tensor of weights in a sample: how many elements and dimensions; norm and mean absolute value of the weights before the step and
of the gradient before clipping; share of elements that are not finite, or zero; norm of the step's update against the norm of the
weights, NaN where that is 0; share of elements that the step did not change. What is of the gradient is NaN where there is none."""
METRIC_COLUMNS = ("step", "seconds", "name", "value")

Category = Literal[
    "matrix product", "attention", "convolution", "normalisation", "copy", "communication", "optimiser", "other"
]
"""The kinds of work that operators do."""

Seconds = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Count = Annotated[int, Field(ge=0)]


class ProcessRecord(StrictModel):
    """The process that recorded."""

    pid: int
    started_unix: float
    imported_unix: float
    """When torch and the trainer were loaded."""


class StepRecord(StrictModel):
    """Sums over all steps, also those that the table no longer holds."""

    count: Count
    kept_of: Annotated[int, Field(ge=1)]
    """Steps for which each row of the table stands."""
    lost: Count
    """Steps that could not be timed because the device was too far behind."""
    seconds: Seconds
    images: Count
    """Over all processes; 0 where the training did not say."""
    ranges: Mapping[str, Seconds]
    """Path of each range -> seconds in it and in none of its own ranges."""


class OutsideRecord(StrictModel):
    """All ranges of one name outside of steps."""

    count: Count
    seconds: Seconds


class CompilationRecord(StrictModel):
    """Graphs that were compiled within one step; those of a validation are not among them."""

    step: Count
    """Steps that this process had completed."""
    graphs: Count
    seconds: Seconds


class TransferRecord(StrictModel):
    """What an XLA device and the host exchanged, between the steps too: losses that are read, validations, checkpoints."""

    from_device: Count
    from_device_s: Seconds
    """That the host waited for it."""
    from_device_bytes: Count
    to_device_bytes: Count
    fallbacks: Mapping[str, Count]
    """Operator that ran on the host within steps -> calls: XLA has it not, or, `aten::_local_scalar_dense`, its result was read."""


class CommunicationRecord(StrictModel):
    """How long gradients travel, as DistributedDataParallel measures it; seconds a step, means over the steps that it looked at."""

    steps: Count
    backward_s: Seconds
    """Computing the backward pass."""
    exchange_s: Seconds
    """Exchanging gradients."""
    hidden_s: Seconds
    """Of that, while the backward pass computed."""


class AttemptRecord(StrictModel):
    """One attempt at this training: a later one resumes from a checkpoint."""

    began_unix: float
    seen_unix: float
    """The last sign of life."""
    first_step: Count
    steps_seen: Count
    """Steps that it completed, as far as is known."""


class ContextRecord(StrictModel):
    """What a rule needs to know of the training beside what is measured; none where it is not known."""

    settings: Mapping[str, Any] = {}
    """Of this training: the section, or the part of it."""
    total_steps: Count | None = None
    samples: Count | None = None
    """Training images."""
    val_samples: Count | None = None
    """Images of the validation split."""
    classes: Mapping[str, Count] | None = None
    """Name of each class -> its training images."""
    micro_batch: Count | None = None
    """Images of a process's micro-batch."""
    parameters: Count | None = None
    teacher_val_top1: float | None = None
    recorded_mass: Mapping[str, float] | None = None
    """Temperature, as text -> mean probability of the classes that the teacher's recorded outputs hold."""


@dataclass(frozen=True, kw_only=True)
class Operator:
    """All calls of one operator or kernel within the window."""

    name: str
    kind: Literal["operator", "kernel"]
    """`operator`: called on the host; `kernel`: what ran on the device (its time is also counted with the operator that called it)."""
    category: Category
    calls: int
    self_cpu_ms: float
    """Time on the host, without the operators that it calls."""
    self_device_ms: float
    """Time on the device of the kernels that it started itself."""


@dataclass(frozen=True, kw_only=True)
class OperatorTable:
    """What torch.profiler saw."""

    steps: int
    """Steps in the window."""
    operators: tuple[Operator, ...]
    """By time, the longest first."""


class RankRecord(StrictModel):
    """What one process records beside its tables."""

    schema_version: int
    name: str
    """The part of the training."""
    rank: Count
    world_size: Annotated[int, Field(ge=1)]
    device: str
    host: str
    cores: Annotated[int, Field(ge=1)]
    """Cores that the process may use."""
    processor: str = ""
    """Its model; empty in recordings that were made before this was recorded."""
    memory_bytes: Count
    """Memory of the machine."""
    workers: Count | None = None
    """Loader processes beside the process; none where nothing was loaded."""
    process: ProcessRecord
    place: Machines | None = None
    """The node pool and its price; None where it is not known."""
    context: ContextRecord = ContextRecord()
    attempts: tuple[AttemptRecord, ...] = ()
    """All attempts, the last one is this; known to rank 0."""
    failed: str | None = None
    """Message of the error that ended it; only the first process leaves evidence then."""
    startup: Mapping[str, Seconds] = {}
    """Part of the time before the end of the first step -> seconds: `launch` (from the launch of the job on this machine to the start of
    this process), `imports`, `fetch`, `join`, `preparation`, `compile`, `first_step`. Parts that did not happen are left out, and a later
    training of the same process begins with its `preparation`."""
    compilations: tuple[CompilationRecord, ...] = ()
    compile_beside_s: Seconds = 0.0
    """Compiling graphs between steps, mostly of validations; known on XLA."""
    transfers: TransferRecord | None = None
    """None where the device is not one of XLA."""
    communication: CommunicationRecord | None = None
    overhead: Mapping[str, Seconds] = {}
    """Part of the recorder's own work -> seconds that it cost: `marks` (calibrated), `tensors`, `monitor` (CPU time of its thread),
    `operators` (opening and closing windows, and their steps' excess over the median), `rules` (judging while it runs)."""
    began_unix: float
    """When the recording began."""
    first_step_s: Seconds | None
    """End of the first step; none where there was no step."""
    ended_s: Seconds
    """End of the recording."""
    settings: EvidenceSettings
    steps: StepRecord
    outside: Mapping[str, OutsideRecord]
    """Ranges outside of steps; `between` is what no range covers."""
    system_interval_s: Seconds
    """Between two samples of the system, at the end."""
    operators: OperatorTable | None
    """Of all windows together."""
    missing: Mapping[str, str]
    """What could not be recorded -> the reason."""
