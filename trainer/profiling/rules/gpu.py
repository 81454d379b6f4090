"""The rules on how well a GPU is used, what keeps it waiting that is not loading, and what the teacher takes of each step."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

import numpy as np

from trainer.config import rules
from trainer.config.loss_terms import RECORDED_BY, RECORDED_VIEWS
from trainer.io import formatting
from trainer.profiling.evidence import READ, TransferRecord, is_core, phase_shares
from trainer.profiling.rules.compared_steps import IGNORED, XLA_DEBUG, Steps, winsorized_mean, within_steps
from trainer.profiling.rules.lifecycle import UnevenSteps
from trainer.profiling.rules.loading import CoresOversubscribed, CpuBottleneck, IoBottleneck, LoaderWorkers
from trainer.profiling.rules.outcomes import (
    Case,
    Finding,
    Healthy,
    NotJudged,
    Outcome,
    Saving,
    SystemRule,
    listed,
    too_short,
)
from trainer.profiling.rules.processes import Communication, LoadBalance, Stragglers
from trainer.profiling.series import Series

FEWEST_SAMPLES = 20  # fewer samples of the system may be an exception
_FEWEST_COUNTED = 10  # fewer steps with counted transfers may be an exception
_WAITING_CALLS = ("cudaStreamSynchronize", "cudaDeviceSynchronize", "cudaEventSynchronize")
_KEEP_ON_DEVICE = (
    "Look for .item(), float(), print or an if on a tensor in the objective and the model; keep values on the device and read them every "
    "log_every steps"
)
_TEACHER = "teacher_forward"
_BUSY_PERCENT = 90.0
"""Used so much, a GPU has work waiting for it while the host starts the next kernels, and a core is busy."""


def _use(case: Case) -> Mapping[str, Series] | NotJudged:
    """Return how much of the GPU, its memory and the cores was used while the first process was at its steps, in percent, where sampled."""
    rank = case.rank
    if not rank.record.device.startswith("cuda"):
        return NotJudged(f"the training runs on {rank.record.device if case.is_traced else 'a CPU'}")
    if "gpu_percent" not in rank.system:
        reason = rank.record.missing.get("gpu_utilization", "it was not sampled")
        return NotJudged(f"the use of the GPU is not known: {reason}")
    used = ("gpu_percent", "gpu_memory_used_bytes", "gpu_memory_total_bytes")
    known = [values for name, values in rank.system.items() if name in used or is_core(name)]
    # what could not be read any more, from some moment on, does not take the rest with it
    within = within_steps(rank) & np.all([np.isfinite(values) for values in known if np.isfinite(values).any()], axis=0)
    if within.sum() < FEWEST_SAMPLES:
        return too_short(f"only {within.sum()} samples of the GPU were taken at steps; {FEWEST_SAMPLES} are needed")
    system = {name: values[within] for name, values in rank.system.items()}
    use = {"GPU": system["gpu_percent"]}
    if {"gpu_memory_used_bytes", "gpu_memory_total_bytes"} <= system.keys():
        use["GPU memory"] = 100 * system["gpu_memory_used_bytes"] / system["gpu_memory_total_bytes"]
    if cores := [values for name, values in system.items() if is_core(name)]:
        use["CPU"] = np.mean(cores, axis=0)
    return use


class BatchSize(SystemRule, rules.BatchSizeThresholds):
    """A batch that leaves the machine idle.

    Fires when the 95th percentiles of the use of the cores, of the GPU and of its memory all lie below `largest_percent`, and no finding
    says what the GPU waits for.

    Needs use of the cores, of the GPU and of its memory.
    Advises a larger batch, or a smaller machine.
    """

    def judge(self, case: Case) -> Outcome:
        use, limit = _use(case), self.largest_percent
        if isinstance(use, NotJudged):
            return use
        if len(use) < 3:
            return NotJudged("the use of the cores, or the GPU's memory, is not known")
        used = {name: float(np.percentile(values, 95)) for name, values in use.items()}
        summary = ", ".join(f"{name} {percent:.0f} %" for name, percent in used.items())
        if max(used.values()) >= limit:
            return Healthy(f"95th percentiles: {summary}.")
        if other := case.first_cause(*_WHAT_KEEPS_WAITING):
            return other
        micro = case.record.context.micro_batch
        twice = f"batch_size of {2 * micro} images in each micro-batch" if micro else "batch_size twice as large"
        return Finding(
            confidence=0.7,
            text=f"The machine is idle: the 95th percentiles are {summary}.{_slow_host(case)}",
            advice=(
                f"Try a {twice} (the learning rate scales with it), or take a smaller machine; the stage tune measures which batch is "
                "fastest."
            ),
            saving=_if_used(case, use["GPU"], limit),
            numbers={f"{name.lower().replace(' ', '_')}_p95_percent": percent for name, percent in used.items()},
        )


class GpuUtilization(SystemRule, rules.GpuUtilizationThresholds):
    """A GPU that is little used, or by fits and starts.

    Fires when its 95th percentile lies below `low_percent`, or its 5th below `idle_percent` (by fits and starts), and neither the batch
    size nor a finding of waiting explains it.

    Needs use of the GPU.
    Advises compilation, bf16, a larger batch, less between steps.
    """

    title: ClassVar = "GPU utilization"

    def judge(self, case: Case) -> Outcome:
        use = _use(case)
        if isinstance(use, NotJudged):
            return use
        low, high = np.percentile(use["GPU"], (5, 95)).tolist()
        if high >= self.low_percent and low >= self.idle_percent:
            return Healthy(f"The GPU's use is between {low:.0f} % and {high:.0f} % (5th and 95th percentile).")
        if other := case.first_cause(*_WHAT_KEEPS_WAITING, BatchSize):
            return other
        what = f"little: 95th percentile {high:.0f} %"
        if high >= self.low_percent:
            what = f"by fits and starts: 5th percentile {low:.0f} %, 95th {high:.0f} %"
        return Finding(
            confidence=0.6,
            text=f"The GPU is used {what}, and no cause of waiting was found.{_slow_host(case)}",
            advice=(
                "Check the operators for many small kernels; set compile=on, a larger batch_size, or precision=bf16, and look "
                "for work between steps."
            ),
            saving=_if_used(case, use["GPU"], self.low_percent),
            numbers={"gpu_p5_percent": low, "gpu_p95_percent": high},
        )


def _slow_host(case: Case) -> str:
    """Add that the GPU waits for the host to start kernels, if the training's process keeps a core busy."""
    rank = case.rank
    if "process_cpu_percent" not in rank.system:
        return ""
    busy = rank.system["process_cpu_percent"]
    busy = busy[np.isfinite(busy) & within_steps(rank)]
    percent = float(np.median(busy)) if len(busy) else 0.0
    if percent < _BUSY_PERCENT:
        return ""
    return f" The training's process computes meanwhile ({percent:.0f} % of a core): the GPU waits for it to start the next kernels."


def _if_used(case: Case, gpu: Series, percent: float) -> Saving:
    """Estimate by how much shorter the steps would be if the GPU were used up to the limit on average."""
    mean = float(gpu.mean())
    seconds = case.record.steps.seconds * max(0.0, 1 - mean / percent)
    return Saving(seconds, f"the same work with the GPU used at {percent:.0f} % instead of {mean:.0f} % on average")


class HostToDevice(SystemRule, rules.HostToDeviceThresholds):
    """A step that waits for copies to the device.

    Fires when copies to the GPU and views made there take more than `share` of the steps' time. Where the GPU is often idle, the time
    that the host needs to start them does not count: any small kernels would take it, which `gpu_utilization` judges.

    Needs phase `to_device` of the steps, on a GPU, and the host's time in it; the use of the GPU.
    Advises fewer bytes, or views made by the loader processes.
    """

    def judge(self, case: Case) -> Outcome:
        steps, limit = Steps(case), self.share
        if case.is_traced:
            return NotJudged("on XLA batches are sent ahead, while the device computes")
        if not steps.on_gpu:
            return NotJudged("the training runs on a CPU, to which nothing is copied")
        if steps.too_few:
            return steps.too_few
        spent, use = steps.phase("to_device"), _use(case)
        busy = isinstance(use, Mapping) and float(np.median(use["GPU"])) >= _BUSY_PERCENT
        if not busy:
            spent = np.maximum(spent - np.nan_to_num(steps.column("host_to_device_seconds")), 0.0)
        seconds = float(np.median(winsorized_mean(spent)))
        share = seconds / steps.step_s
        summary = f"{share:.0%} of each step ({1e3 * seconds:.3g} of {1e3 * steps.step_s:.3g} ms undisturbed)"
        if share <= limit:
            return Healthy(f"{summary} goes into copies to the GPU and views made there.")
        return Finding(
            confidence=0.7,
            text=f"{summary} the GPU waits for copies to it, or makes views.",
            advice=(
                "Compare `to_device` with data.views_on=cpu, which copies finished views and leaves making them to the loader processes; "
                "send smaller stored images (data.image_size); let the GPU decode (data.decode_on=cuda), so that compressed files travel."
            ),
            saving=Saving(share * steps.total_s, "the steps without them"),
            numbers={"to_device_share": share, "to_device_s": seconds, "undisturbed_step_s": steps.step_s},
            steps=steps.span,
        )


class HostSyncs(SystemRule, rules.HostSyncsThresholds):
    """Reading values back from the device in each step.

    Fires when a step waits for the device more than `most_per_step` times; on a CPU, where nothing waits: reads more single values,
    apart from AdamW's; on XLA: values come from the device in more than `share_of_steps` of the steps.

    Needs a window of operators; on a CPU a measurement of the weights, too; on XLA its own counters.
    Advises keeping values on the device; on XLA the operators that it lacks.
    """

    def judge(self, case: Case) -> Outcome:
        rank, limit = case.rank, self.most_per_step
        if rank.record.transfers is not None:
            return self._judge_transfers(case, rank.record.transfers)
        table, settings = rank.record.operators, rank.record.settings
        if table is None:
            planned = settings.operators_at if settings.operators_steps else ()
            return NotJudged(
                f"no operators were recorded: {rank.record.missing.get('operators', 'no window has closed yet')}",
                too_short=bool(planned) and rank.record.steps.count < min(planned) + settings.operators_steps,
            )
        on_gpu = rank.record.device.startswith("cuda")
        if not on_gpu and not len(rank.tensors.steps):
            return NotJudged(
                "no measurement of the weights shows how many values the optimizer reads, as it would on a CPU"
            )
        names = _WAITING_CALLS if on_gpu else (READ,)
        reads = sum(operator.calls for operator in table.operators if operator.name in names) / table.steps
        if not on_gpu:
            # torch itself reads AdamW's step count of each tensor and, in DistributedDataParallel, whether it was used
            trained = int(np.isfinite(rank.tensors.values["gradient_norm"]).any(axis=0).sum())
            reads = max(0.0, reads - trained * (2 if rank.record.world_size > 1 else 1))
        what = "waits for the device" if on_gpu else "values read one by one"
        if reads <= limit:
            return Healthy(f"{reads:.3g} {what} in a step.")
        saving, busy = None, rank.system.get("gpu_percent")
        if on_gpu and busy is not None and len(busy):
            idle = 1 - float(np.nanmean(busy)) / 100
            saving = Saving(idle * rank.record.steps.seconds, "at most: the steps without the GPU's idle time")
        return Finding(
            severity="warning" if on_gpu else "note",
            confidence=0.8 if on_gpu else 0.6,
            text=(
                f"{reads:.3g} {what} in each step: the host stops until the device has come so far, and the device then has nothing to do."
                if on_gpu
                else f"{reads:.3g} {what} in each step; a CPU loses little by it, but a GPU would stop and wait each time."
            ),
            advice=f"{_KEEP_ON_DEVICE}.",
            saving=saving,
            numbers={"reads_per_step": reads},
        )

    def _judge_transfers(self, case: Case, record: TransferRecord) -> Outcome:
        """Judge whether the steps of a training on a device of XLA wait for values from it."""
        rank, limit = case.rank, self.share_of_steps
        counted = np.isfinite(rank.steps["transfers"])
        counted[:IGNORED] = False
        if counted.sum() < _FEWEST_COUNTED:
            return too_short(
                f"transfers were counted in only {counted.sum()} steps after the first {IGNORED}; {_FEWEST_COUNTED} are needed"
            )
        numbers, values = rank.steps["step"][counted], rank.steps["transfers"][counted]
        share = float(np.mean(values > 0))
        summary = f"In {share:.0%} of the steps values come from the device"
        if share <= limit:
            return Healthy(f"{summary}.")
        at, reads = numbers[values > 0], record.fallbacks.get(READ)
        lacking = sorted((name for name in record.fallbacks if name != READ), key=lambda name: -record.fallbacks[name])
        debug = XLA_DEBUG.format("asked for each execution")
        on_host, saving = "", None
        if lacking:
            calls = [f"{name} ({record.fallbacks[name]} calls)" for name in lacking]
            read = f"; single values were read {reads} times ({READ})" if reads else ""
            on_host = f" {listed(calls)} ran on the host{read}."
            advice = (
                f"XLA has no {listed(lacking)}: write it with operators that XLA has, or let it run on the host before the batch is "
                "sent."
            )
        elif reads:
            on_host = f" Single values were read {reads} times ({READ})."
            advice = f"{_KEEP_ON_DEVICE}; {debug}."
        else:
            advice = (
                f"Look for .cpu(), .tolist(), .numpy() or print of a tensor in the objective and the model; {debug}."
            )
        if record.from_device:
            in_steps = float(values.mean()) * rank.record.steps.count
            seconds = record.from_device_s * min(1.0, in_steps / record.from_device)
            saving = Saving(seconds, "the time that the host waited for these transfers")
        return Finding(
            confidence=0.9,
            text=(
                f"{summary} ({values.mean():.3g} times a step, first in step {at[0] + 1:.0f} of those after the warm-up): each time what "
                f"they depend on becomes a graph of its own, for which the host waits.{on_host}"
            ),
            advice=advice,
            saving=saving,
            numbers={"transfers_per_step": float(values.mean()), "transferring_share": share}
            | {f"{name}_calls": float(calls) for name, calls in record.fallbacks.items()},
            steps=(int(at[0]), int(at[-1])),
        )


class TeacherShare(SystemRule, rules.TeacherShareThresholds):
    """A teacher that takes much of each step, which recorded outputs would save.

    Fires when the teacher's forward pass takes more than `share` of the steps' time; this is a note, which spoils no verdict. The saving
    is the teacher's time less that of recording its outputs; there is none where the epochs are not more than `views`.

    Needs phase `teacher_forward` of the steps.
    Advises recorded outputs, and when they pay.
    """

    title: ClassVar = "Teacher in every step"

    def judge(self, case: Case) -> Outcome:
        steps, limit = Steps(case), self.share
        rank, settings = steps.ranks[0], steps.record.context.settings
        if settings.get("teacher") != "online" or _TEACHER not in rank.ranges:
            return NotJudged("no teacher runs in the steps")
        if case.is_traced:
            return NotJudged("on XLA a step is one graph, in which the teacher's part is not seen")
        if steps.too_few:
            return steps.too_few
        share = phase_shares(rank).get(_TEACHER, 0.0)
        summary = f"The teacher's forward pass takes {formatting.percent(share)} of a step"
        if share <= limit:
            return Healthy(f"{summary}.")
        # where the run's settings are not known, a recording takes as many passes over the images as by default
        epochs, views = int(settings["epochs"]), self.views or RECORDED_VIEWS
        seconds = share * (steps.total_s + case.remaining_s)
        if epochs > views:
            pays = f"it pays in one distillation already, because {epochs} epochs are more than {views} views"
            reason = (
                f"the teacher's time in the steps, less that of {views} views in place of {epochs} epochs; the next distillation saves "
                "all"
            )
            saving = Saving(seconds * (1 - views / epochs), reason)
        else:  # a recording takes as long as the teacher in the steps
            least = views // epochs + 1
            pays = f"it pays where there are at least {least} distillations of {epochs} epochs, or with reinforce.views below {epochs}"
            saving = None
        needed = {name for term, name in RECORDED_BY.items() if settings.get(f"{term}_weight")}
        kept = "".join(f" and reinforce.{name}=true" for name in sorted(needed))
        return Finding(
            severity="note",
            confidence=0.7,
            text=(
                f"{summary}: from recorded outputs a step would be up to {1 / (1 - share):.2g} times as fast. To record them the teacher "
                f"sees each image {views} times (reinforce.views), once for all distillations; in this one it sees each image "
                f"{epochs} times, once an epoch."
            ),
            advice=f"Set distill.teacher=recorded{kept}: {pays}. The student then sees each image in these views only.",
            saving=saving,
            numbers={"teacher_share": share, "teacher_s": seconds},
            steps=steps.span,
        )


_WHAT_KEEPS_WAITING = (
    IoBottleneck,
    LoaderWorkers,
    CpuBottleneck,
    CoresOversubscribed,
    HostToDevice,
    HostSyncs,
    Communication,
    Stragglers,
    LoadBalance,
    UnevenSteps,
)
