"""Evidence: what a training records of itself, and how fast it was by that.

`profiling.recorder` makes it, `profiling.evidence_files` writes and reads it.

Times ending in `_s` are seconds since the rank's recording began, at `began_unix`. On a GPU `seconds` and the ranges are times on the
device, the `host_` columns times on the host; on a CPU and on XLA `seconds` and `host_seconds` agree.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal, Self

import numpy as np
from pydantic import AfterValidator, BeforeValidator, Field

from trainer.config import EvidenceSettings, with_present_names
from trainer.graph import SCHEMA_VERSIONS
from trainer.io.base_models import StrictModel
from trainer.io.costs import Machines
from trainer.profiling.series import Rows, Series

SCHEMA_VERSION = SCHEMA_VERSIONS["evidence"]

PHASES = ("data", "to_device", "teacher_forward", "forward", "backward", "optimizer")
"""The phases that every training loop has, in their order."""
OTHER = "other"  # time of a step outside of all ranges
BETWEEN = "between"  # time between steps outside of all ranges
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
    "host_to_device_seconds",
    "queued",
    "transfers",
)
"""Columns of the step table before its ranges. `host_`: of the training's thread in the step, in `data`, in `backward`, and in `to_device`
(`LATER_COLUMNS` are missing in older recordings); `cpu`: while it computed; `delayed`: while it, or the thread that runs the backward pass
of a GPU, was ready and no core was free, NaN where the kernel does not say. `queued`: batches that the loader processes had ready when the
step asked for one, NaN where there are none. `transfers`: how often values came from the device to the host, on XLA, where that breaks up
the step; NaN where it was not counted, as in most steps of a long training."""
LATER_COLUMNS = {"host_to_device_seconds"}
SPAN_COLUMNS = ("range", "start_s", "seconds")
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
INPUT = "input/"  # what the names of the input's channels begin with, among the layers; the number follows
LAYER_COLUMNS = ("images", "mean", "std", "smallest", "largest", "blank", "inactive", "saturated")
"""Of a layer, or a channel of the input, in a sample of a forward pass: how many images; mean, standard deviation, smallest and largest
value of what it gives; of a channel the share of images that have one value only. Of the functions that clip, such as ReLU, the share of
units that gave 0 at each place of each image in the last looks; of bounded ones, such as tanh, the share of units that were at an end of
their range as long. NaN where it does not apply."""
ATTENTION_ENTROPY = "attention_entropy/"  # what the names of such metrics begin with; the block's name follows

_FORMER_CATEGORIES = {"normalisation": "normalization", "optimiser": "optimizer"}  # as earlier versions wrote them
Category = Annotated[
    Literal[
        "matrix product", "attention", "convolution", "normalization", "copy", "communication", "optimizer", "other"
    ],
    BeforeValidator(lambda category: _FORMER_CATEGORIES.get(category, category)),
]  # the kinds of work that operators do

Seconds = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Count = Annotated[int, Field(ge=0)]


class ProcessRecord(StrictModel):
    """The process that recorded."""

    pid: int
    started_unix: float
    imported_unix: float  # when torch and the trainer were loaded


class StepRecord(StrictModel):
    """Sums over all steps, including those that the table has dropped."""

    count: Count
    kept_of: Annotated[int, Field(ge=1)]  # steps for which each row of the table stands
    lost: Count  # steps that could not be timed because the device was too far behind
    seconds: Seconds
    images: Count  # over all processes; 0 if unknown
    ranges: Mapping[str, Seconds]  # path of each range -> its seconds, without those of ranges within it


class OutsideRecord(StrictModel):
    """All ranges of one name outside of steps."""

    count: Count
    seconds: Seconds


class CompilationRecord(StrictModel):
    """Graphs compiled within one step, without those of validations."""

    step: Count  # steps that this process had completed
    graphs: Count
    seconds: Seconds


class TransferRecord(StrictModel):
    """Transfers between an XLA device and the host, within steps and between them: losses, validations, checkpoints."""

    from_device: Count
    from_device_s: Seconds  # time that the host waited for these transfers
    from_device_bytes: Count
    to_device_bytes: Count
    fallbacks: Mapping[str, Count]
    """Calls of operators that fell back to the host, as XLA lacks them or (`aten::_local_scalar_dense`) Python read a value."""


class CommunicationRecord(StrictModel):
    """How long gradients travel, as DistributedDataParallel measures it; seconds a step, means over the steps that it looked at."""

    steps: Count
    backward_s: Seconds  # computing the backward pass
    exchange_s: Seconds  # exchanging gradients
    hidden_s: Seconds  # part of the exchange that overlaps with the backward pass


class ConfusedRecord(StrictModel):
    """Images of one class that the last validation's model took for another one."""

    label: str  # their class
    answer: str  # the other one
    images: Count  # so many of them
    of: Count  # of as many images of their class


class AttemptRecord(StrictModel):
    """One attempt at this training: a later one resumes from a checkpoint."""

    began_unix: float
    seen_unix: float  # last sign of life
    first_step: Count
    steps_seen: Count  # completed steps, as far as is known


class ContextRecord(StrictModel):
    """Facts on the training that rules need beside the measurements; None if unknown."""

    settings: Annotated[Mapping[str, Any], AfterValidator(partial(with_present_names, section="distill"))] = {}
    """The training's section, or its part of a section; of these only `distill` has had other names."""
    total_steps: Count | None = None
    low_resolution_steps: Count | None = None
    """The first steps, in which the input is smaller: the one after them compiles again, by plan."""
    samples: Count | None = None  # training images
    val_samples: Count | None = None  # images of the validation split
    labeled: Count | None = None  # training images whose label is known
    classes: Mapping[str, Count] | None = None  # name of each class -> its training images
    micro_batch: Count | None = None  # images of a process's micro-batch
    parameters: Count | None = None
    teacher_val_top1: float | None = None
    teacher_val_map: float | None = None  # mean average precision, where an image may have several labels
    recorded_mass: Mapping[str, float] | None = None
    """Temperature, as text -> mean probability of the classes that the teacher's recorded outputs hold."""


ANNOTATION = "span "
"""What the name of a range of a step begins with in a trace of its operators."""
READ = "aten::_local_scalar_dense"
"""What torch calls the reading of a value: `.item()`, `float()`, an `if` on a tensor."""


@dataclass(frozen=True, kw_only=True)
class Operator:
    """All calls of one operator or kernel within the window."""

    name: str
    kind: Literal["operator", "kernel"]
    """`operator`: called on the host; `kernel`: what ran on the device (its time is also counted with the operator that called it)."""
    category: Category
    calls: int  # of `READ`, without those that load a batch, from the host's memory
    self_cpu_ms: float  # time on the host, without the operators that it calls
    self_device_ms: float  # time on the device of the kernels that it started itself
    flops: float = 0.0  # operations of its calls in the first window; 0 where it is not known
    moved_bytes: float = 0.0  # bytes that they read and write, at least
    bits: int = 0  # of the numbers


@dataclass(frozen=True, kw_only=True)
class OperatorTable:
    """Operators and kernels seen by torch.profiler."""

    steps: int  # steps in the window
    operators: tuple[Operator, ...]  # by time, the longest first


class RankRecord(StrictModel):
    """One process's record beside its tables."""

    schema_version: int
    name: str  # of the training: mae, finetune or distill
    rank: Count
    world_size: Annotated[int, Field(ge=1)]
    device: str
    host: str
    cores: Annotated[int, Field(ge=1)]  # cores that the process may use
    processor: str = ""  # model of the processor; empty in older recordings
    memory_bytes: Count  # memory of the machine
    workers: Count | None = None  # loader processes beside the process; none where nothing was loaded
    loader_images_per_second: float | None = (
        None  # that the loaders of all processes can give; not recorded by older versions
    )
    process: ProcessRecord
    place: Machines | None = None  # the node pool and its price; None where it is not known
    context: ContextRecord = ContextRecord()
    attempts: tuple[AttemptRecord, ...] = ()  # all attempts, this one last; known to rank 0
    confused: tuple[ConfusedRecord, ...] | None = None
    """The classes that are most often taken for another one, by share; None where no validation compared them."""
    failed: str | None = None  # message of the error that ended it; only the first process leaves evidence then
    startup: Mapping[str, Seconds] = {}
    """Part of the time before the end of the first step -> seconds: `launch` (from the launch of the job on this machine to the start of
    this process), `imports`, `fetch`, `join`, `preparation`, `compile`, `first_step`. Parts that did not happen are left out, and a later
    training of the same process begins with its `preparation`."""
    compilations: tuple[CompilationRecord, ...] = ()
    compile_beside_s: Seconds = 0.0  # compiling graphs between steps, mostly of validations; known on XLA
    transfers: TransferRecord | None = None  # None without XLA
    communication: CommunicationRecord | None = None
    overhead: Mapping[str, Seconds] = {}
    """Part of the recorder's own work -> seconds that it cost: `marks` (calibrated), `tensors`, `monitor` (CPU time of its thread),
    `operators` (opening and closing windows, and their steps' excess over the median), `rules` (judging while it runs)."""
    began_unix: float  # when the recording began
    first_step_s: Seconds | None  # end of the first step; none where there was no step
    ended_s: Seconds  # end of the recording
    settings: EvidenceSettings
    steps: StepRecord
    outside: Mapping[str, OutsideRecord]  # ranges outside of steps; `between` is what no range covers
    system_interval_s: Seconds  # between two samples of the machine, at the end of the recording
    operators: OperatorTable | None  # over all windows
    missing: Mapping[str, str]  # what could not be recorded -> the reason


@dataclass(frozen=True, kw_only=True)
class Curve:
    """The points of one metric, in their order."""

    steps: Series
    seconds: Series  # since the recording began
    values: Series


@dataclass(frozen=True, kw_only=True)
class Spans:
    """Ranges outside of steps, in their order."""

    names: Sequence[str]
    start_s: Series
    seconds: Series


@dataclass(frozen=True, kw_only=True)
class TensorSamples:
    """L looks at P tensors of weights, or layers, in their order."""

    tensors: Sequence[str]  # their names, [P]
    steps: Series  # [L]
    seconds: Series  # since the recording began, [L]
    values: Mapping[str, Series]  # each of `TENSOR_COLUMNS`, or `LAYER_COLUMNS` -> [L, P]

    @classmethod
    def none(cls, columns: Sequence[str]) -> Self:
        """No look at anything."""
        empty = np.zeros((0, 0))
        return cls(tensors=[], steps=np.zeros(0), seconds=np.zeros(0), values=dict.fromkeys(columns, empty))


@dataclass(frozen=True, kw_only=True)
class RankEvidence:
    """One process's evidence; the module's docstring describes the columns."""

    record: RankRecord
    steps: Mapping[str, Series]  # column -> a value a step
    spans: Spans
    tensors: TensorSamples
    system: Mapping[str, Series]  # column -> a value a sample
    trace: bytes = b""  # of the first window of operators, JSON compressed by gzip; empty where none was kept
    layers: TensorSamples = field(default_factory=partial(TensorSamples.none, LAYER_COLUMNS))  # not in older recordings

    @property
    def ranges(self) -> list[str]:
        """Paths of the ranges, which are columns of `steps`."""
        return [name for name in self.steps if name not in STEP_COLUMNS]


@dataclass(frozen=True, kw_only=True)
class TrainingEvidence:
    """One part of a training."""

    name: str
    ranks: Sequence[RankEvidence]  # in the order of the ranks; at least rank 0
    metrics: Mapping[str, Curve]


@dataclass(frozen=True, kw_only=True)
class Evidence:
    """The parts of a training, in the order in which they ran; none where nothing was trained."""

    path: Path
    fingerprint: str
    trainings: Sequence[TrainingEvidence]


# ---- How fast a training is: each measure is defined once, and the page, the rules, the log and a comparison share it.
#
# The measured steps are those that torch.profiler did not slow, without the first one, which also warms up. Their times are as they were,
# with what other programs and the recorder's samples took of them. Rules on speed set what they find against the undisturbed step instead,
# which is without both (`rules.compared_steps.Steps`), and call it so.


@dataclass(frozen=True, kw_only=True)
class Spread:
    """How a quantity is distributed over the steps."""

    p5: float
    p50: float
    p95: float
    mean: float
    max: float


def phase_of(path: str) -> str:
    """The phase or outermost range that a range's path belongs to."""
    return path.split("/", 1)[0]


def is_core(signal: str) -> bool:
    """Whether a signal of the system is how busy one core is."""
    return signal.startswith("cpu") and signal.endswith("_percent")


def measured_steps(steps: Mapping[str, Series]) -> Rows:
    """Rows of a process's step table that are neither the first step nor under the profiler (all rows, if none remain)."""
    rows = np.arange(len(steps["profiled"]))
    usual = rows[(rows > 0) & (steps["profiled"] == 0)]
    return usual if len(usual) else rows


def step_ms(rank: RankEvidence) -> Spread | None:
    """Return the spread of the measured steps' duration; None without steps."""
    return quantiles(1000 * rank.steps["seconds"][measured_steps(rank.steps)])


def images_per_second(steps: Mapping[str, Series]) -> float | None:
    """Return the rate of all processes within the measured steps; None without steps or where the number of images is unknown.

    Validation, checkpoints and start-up lie outside of steps. `steps` is the table so far: `profiled`, `images` and `seconds`.
    """
    rows = measured_steps(steps)
    images, seconds = float(steps["images"][rows].sum()), float(steps["seconds"][rows].sum())
    return images / seconds if images and seconds else None


def step_images_per_second(steps: Mapping[str, Series]) -> float | None:
    """Return the rate of `images_per_second` if no step waited for its data; `steps` also has `data`."""
    return images_per_second({**steps, "seconds": steps["seconds"] - steps["data"]})


def quantiles(values: Series) -> Spread | None:
    """Percentiles, mean and maximum; none of no values."""
    if not len(values):
        return None
    p5, p50, p95 = np.percentile(values, [5, 50, 95]).tolist()
    return Spread(p5=p5, p50=p50, p95=p95, mean=float(values.mean()), max=float(values.max()))


def phase_seconds(rank: RankEvidence) -> dict[str, Series]:
    """Seconds of each phase in each step, user-named ranges counted with the phase around them; phases that never ran are left out."""
    sums: dict[str, Series] = {}
    for path in rank.ranges:
        phase = phase_of(path)
        sums[phase] = sums[phase] + rank.steps[path] if phase in sums else rank.steps[path]
    order = [*PHASES, *(name for name in sums if name not in PHASES and name != OTHER), OTHER]
    return {name: sums[name] for name in order if name in sums and sums[name].any()}


def phase_shares(rank: RankEvidence) -> dict[str, float]:
    """Share of the measured steps' time of each phase."""
    measured = measured_steps(rank.steps)
    total = max(float(rank.steps["seconds"][measured].sum()), 1e-12)
    return {name: float(seconds[measured].sum()) / total for name, seconds in phase_seconds(rank).items()}
