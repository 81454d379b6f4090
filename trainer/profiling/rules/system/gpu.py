"""The rules on how well a GPU is used, and on what keeps it waiting that is not loading."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from trainer.profiling.evidence import RankEvidence
from trainer.profiling.evidence_schema import RankRecord
from trainer.profiling.operators import OperatorTable
from trainer.profiling.rules.causes import first_cause
from trainer.profiling.rules.outcomes import Case, Finding, Healthy, NotJudged, Outcome, Rule, Saving
from trainer.profiling.rules.system.compared_steps import Steps, usual, within_steps
from trainer.profiling.rules.system.loading import CPU_BOTTLENECK, IO_BOTTLENECK, LOADER_WORKERS
from trainer.profiling.rules.system.processes import COMMUNICATION, LOAD_BALANCE, STRAGGLERS
from trainer.profiling.rules.system.tracing import is_traced, transfers
from trainer.profiling.series import Series
from trainer.profiling.throughput import is_core

FEWEST_SAMPLES = 20
"""Fewer samples of the system may be an exception."""
_WAITING_CALLS = ("cudaStreamSynchronize", "cudaDeviceSynchronize", "cudaEventSynchronize")
_READING_OPERATOR = "aten::_local_scalar_dense"


class _GpuSamples:
    """What the system did while the first process was at its steps, in percent."""

    def __init__(self, rank: RankEvidence) -> None:
        within = np.isfinite(rank.system["gpu_percent"]) & within_steps(rank)
        self.gpu = rank.system["gpu_percent"][within]
        self.cpu = _mean([values[within] for name, values in rank.system.items() if is_core(name)])
        used, total = (rank.system.get(f"gpu_memory_{name}_bytes") for name in ("used", "total"))
        self.memory = None if used is None or total is None else 100 * used[within] / total[within]

    def __len__(self) -> int:
        return len(self.gpu)


def _mean(cores: Sequence[Series]) -> Series | None:
    return np.mean(cores, axis=0) if cores else None


def _samples(case: Case) -> _GpuSamples | NotJudged:
    rank = case.training.ranks[0]
    if not rank.record.device.startswith("cuda"):
        return NotJudged(reason=f"the training runs on {rank.record.device if is_traced(rank) else 'a CPU'}")
    if "gpu_percent" not in rank.system:
        reason = rank.record.missing.get("gpu_utilization", "it was not sampled")
        return NotJudged(reason=f"the use of the GPU is not known: {reason}")
    samples = _GpuSamples(rank)
    if len(samples) < FEWEST_SAMPLES:
        return NotJudged(
            reason=f"only {len(samples)} samples of the GPU were taken at steps; {FEWEST_SAMPLES} are needed",
            too_short=True,
        )
    return samples


def _p95(values: Series) -> float:
    return float(np.percentile(values, 95))


def _batch_size(case: Case) -> Outcome:
    samples, limit = _samples(case), case.rules.batch_size.largest_percent
    if isinstance(samples, NotJudged):
        return samples
    if samples.cpu is None or samples.memory is None:
        return NotJudged(reason="the use of the cores, or the GPU's memory, is not known")
    used = {"GPU": _p95(samples.gpu), "GPU memory": _p95(samples.memory), "CPU": _p95(samples.cpu)}
    summary = ", ".join(f"{name} {percent:.0f} %" for name, percent in used.items())
    if max(used.values()) >= limit:
        return Healthy(text=f"95th percentiles: {summary}.")
    other = first_cause(case, *_WHAT_KEEPS_WAITING)
    if other is not None:
        return other
    micro = case.training.ranks[0].record.context.micro_batch
    twice = f"batch_size of {2 * micro} images in each micro-batch" if micro else "batch_size twice as large"
    return Finding(
        severity="warning",
        confidence=0.7,
        text=f"The machine is idle: the 95th percentiles are {summary}.",
        advice=(
            f"Try a {twice} (the learning rate scales with it), or take a smaller machine; the stage tune measures which batch "
            "is fastest."
        ),
        saving=_if_used(case, samples, limit),
        numbers={f"{name.lower().replace(' ', '_')}_p95_percent": percent for name, percent in used.items()},
    )


def _gpu_utilization(case: Case) -> Outcome:
    samples, limits = _samples(case), case.rules.gpu_utilization
    if isinstance(samples, NotJudged):
        return samples
    low, high = float(np.percentile(samples.gpu, 5)), _p95(samples.gpu)
    if high >= limits.low_percent and low >= limits.idle_percent:
        return Healthy(text=f"The GPU's use is between {low:.0f} % and {high:.0f} % (5th and 95th percentile).")
    other = first_cause(case, *_WHAT_KEEPS_WAITING, BATCH_SIZE)
    if other is not None:
        return other
    fluctuating = high >= limits.low_percent
    what = (
        f"by fits and starts: 5th percentile {low:.0f} %, 95th {high:.0f} %"
        if fluctuating
        else f"little: 95th percentile {high:.0f} %"
    )
    return Finding(
        severity="warning",
        confidence=0.6,
        text=f"The GPU is used {what}, and no cause of waiting was found.",
        advice=(
            "Check the operators for many small kernels; set compile=on, a larger batch_size, or precision=bf16, and look "
            "for work between steps."
        ),
        saving=_if_used(case, samples, limits.low_percent),
        numbers={"gpu_p5_percent": low, "gpu_p95_percent": high},
    )


def _if_used(case: Case, samples: _GpuSamples, percent: float) -> Saving:
    """Estimate by how much shorter the steps would be if the GPU were used up to the limit on average."""
    mean = float(samples.gpu.mean())
    seconds = case.training.ranks[0].record.steps.seconds * max(0.0, 1 - mean / percent)
    return Saving(
        seconds=seconds, reason=f"the same work with the GPU used at {percent:.0f} % instead of {mean:.0f} % on average"
    )


def _host_to_device(case: Case) -> Outcome:
    steps, limit = Steps(case), case.rules.host_to_device.share
    if not steps.on_gpu:
        if is_traced(steps.ranks[0]):
            return NotJudged(reason="on XLA batches are sent ahead, while the device computes")
        return NotJudged(reason="the training runs on a CPU, to which nothing is copied")
    if steps.too_few:
        return steps.too_few
    seconds = float(np.median(usual(steps.phase("to_device"))))
    share = seconds / steps.step_s
    summary = f"{share:.0%} of each step ({1e3 * seconds:.3g} of {1e3 * steps.step_s:.3g} ms undisturbed)"
    if share <= limit:
        return Healthy(text=f"{summary} goes into copies to the GPU and views made there.")
    return Finding(
        severity="warning",
        confidence=0.7,
        text=f"{summary} the GPU waits for copies to it, or makes views.",
        advice=(
            "Compare `to_device` with data.views_on=cpu, which copies finished views and leaves making them to the loader "
            "processes; send smaller stored "
            "images (data.image_size); let the GPU decode (data.decode_on=cuda), so that compressed files travel."
        ),
        saving=Saving(seconds=share * steps.total_s, reason="the steps without them"),
        numbers={"to_device_share": share, "to_device_s": seconds, "undisturbed_step_s": steps.step_s},
        steps=steps.span,
    )


def _ended_before_a_window(record: RankRecord) -> bool:
    """Return whether the training ended before a planned window of torch.profiler could close."""
    settings = record.settings
    if not settings.operators_at or not settings.operators_steps:
        return False
    return record.steps.count < min(settings.operators_at) + settings.operators_steps


def _host_syncs(case: Case) -> Outcome:
    rank, limit = case.training.ranks[0], case.rules.host_syncs.most_per_step
    if rank.record.transfers is not None:
        return transfers(case, rank.record.transfers)
    table = rank.record.operators
    if table is None:
        return NotJudged(
            reason=f"no operators were recorded: {rank.record.missing.get('operators', 'no window has closed yet')}",
            too_short=_ended_before_a_window(rank.record),
        )
    on_gpu = rank.record.device.startswith("cuda")
    if not on_gpu and not rank.tensors.tensors:
        return NotJudged(
            reason="no measurement of the weights shows how many values the optimiser reads, as it would on a CPU"
        )
    reads = _calls(table, _WAITING_CALLS) if on_gpu else _calls(table, (_READING_OPERATOR,)) - _reads_of_torch(rank)
    reads = max(reads, 0.0)
    what = "waits for the device" if on_gpu else "values read one by one"
    if reads <= limit:
        return Healthy(text=f"{reads:.3g} {what} in a step.")
    idle = rank.system.get("gpu_percent") if on_gpu else None
    return Finding(
        severity="warning" if on_gpu else "note",
        confidence=0.8 if on_gpu else 0.6,
        text=(
            f"{reads:.3g} {what} in each step: the host stops until the device has come so far, and the device then has nothing to do."
            if on_gpu
            else f"{reads:.3g} {what} in each step; a CPU loses little by it, but a GPU would stop and wait each time."
        ),
        advice=(
            "Look for .item(), float(), print or an if on a tensor in the objective and the model; keep values on the device "
            "and read them every log_every steps."
        ),
        saving=None if idle is None or not len(idle) else _without_waits(rank, idle),
        numbers={"reads_per_step": reads},
    )


def _without_waits(rank: RankEvidence, gpu_percent: Series) -> Saving:
    idle = 1 - float(np.nanmean(gpu_percent)) / 100
    return Saving(seconds=idle * rank.record.steps.seconds, reason="at most: the steps without the GPU's idle time")


def _calls(table: OperatorTable, names: Sequence[str]) -> float:
    """Count calls per step."""
    return sum(operator.calls for operator in table.operators if operator.name in names) / table.steps


def _reads_of_torch(rank: RankEvidence) -> int:
    """Count the values that torch reads per step on a CPU: AdamW each tensor's step count, DistributedDataParallel whether it was used."""
    gradients = rank.tensors.values["gradient_norm"]
    trained = {name for name, norm in zip(rank.tensors.tensors, gradients, strict=True) if np.isfinite(norm)}
    return len(trained) * (2 if rank.record.world_size > 1 else 1)


HOST_TO_DEVICE = Rule(
    name="host_to_device",
    kind="system",
    title="Host to device",
    needs="phase `to_device` of the steps, on a GPU",
    fires="copies to the GPU and views made there take more than `share` of the steps' time",
    advises="fewer bytes, or views made by the loader processes",
    judge=_host_to_device,
)
HOST_SYNCS = Rule(
    name="host_syncs",
    kind="system",
    title="Host syncs",
    needs="a window of operators; on a CPU a measurement of the weights, too; on XLA its own counters",
    fires=(
        "a step waits for the device more than `most_per_step` times; on a CPU, where nothing waits: reads more values one by "
        "one, beside those "
        "that AdamW reads; on XLA: values come from the device in more than `share_of_steps` of the steps"
    ),
    advises="keeping values on the device; on XLA the operators that it lacks",
    judge=_host_syncs,
)
_WHAT_KEEPS_WAITING = (
    IO_BOTTLENECK,
    LOADER_WORKERS,
    CPU_BOTTLENECK,
    HOST_TO_DEVICE,
    HOST_SYNCS,
    COMMUNICATION,
    STRAGGLERS,
    LOAD_BALANCE,
)
BATCH_SIZE = Rule(
    name="batch_size",
    kind="system",
    title="Batch size",
    needs="use of the cores, of the GPU and of its memory",
    fires="the 95th percentiles of all three lie below `largest_percent`, and no finding says what the GPU waits for",
    advises="a larger batch, or a smaller machine",
    judge=_batch_size,
)
GPU_UTILIZATION = Rule(
    name="gpu_utilization",
    kind="system",
    title="GPU utilisation",
    needs="use of the GPU",
    fires=(
        "its 95th percentile lies below `low_percent`, or its 5th below `idle_percent` (by fits and starts), and neither the "
        "batch size nor a "
        "finding of waiting explains it"
    ),
    advises="compilation, bf16, a larger batch, less between steps",
    judge=_gpu_utilization,
)
