"""What could make a distillation faster, judged by where the time of its steps goes.

An idea is another candidate with the gain that can be expected of it. What is known is computed, as the gain of leaving the teacher's
part of a step out; what is not known is a guess that only says what to try first.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from trainer.devices import Device
from trainer.stages.tuning.tuning_schema import Candidate, Trial


@dataclass(frozen=True, kw_only=True)
class Workload:
    """What a search may not change: the images to train on, and the machines."""

    images: int
    """Images that the whole distillation sees."""
    largest_batch: int
    """That may be tried ..."""
    largest_batch_why: str
    """... and what does not allow a larger one."""
    device: Device
    world_size: int
    nodes: int
    most_workers: int
    """Loader processes beside each training process for which there are cores."""
    recording_s: float = 0.0
    """Seconds that it takes to record the teacher's outputs; 0 where they are there."""
    teacher_s: float = 0.0
    """Seconds that the teacher needs for an image, on all processes together."""
    no_recording: str = ""
    """Why the distillation cannot learn from recorded outputs; empty if it can."""
    least_part: int = 1
    """Fewest images in a micro-batch of a process; two where the student normalizes batches."""
    why_parts_count: str = ""
    """Why the size of a micro-batch is a part of what is learned; empty where it is not."""

    def fixed_s(self, candidate: Candidate, startup_s: float) -> float:
        """Seconds of the whole distillation that do not depend on its rate."""
        return startup_s + (self.recording_s if candidate.teacher == "recorded" else 0.0)

    def run_s(self, trial: Trial, rate: float | None = None) -> float:
        """Seconds of the whole distillation: at a trial's rate, or at another one."""
        rate = trial.images_per_second if rate is None else rate
        return self.fixed_s(trial.candidate, trial.startup_s) + self.images / rate


@dataclass(frozen=True, kw_only=True)
class Proposal:
    """Something to try."""

    field: str
    """The setting that it is about."""
    candidate: Candidate
    gain: float
    """How many times shorter the distillation may become: the most where that is known, else a guess."""
    why: str


@dataclass(frozen=True)
class Skipped:
    """Something that would not pay for its trial here."""

    field: str
    why: str


Proposals = Iterator[Proposal | Skipped]

_LEAST_WAIT = 0.05
"""A smaller share of a step that waits for data does not pay for a loader process."""
_HELD_UP = 1.05
"""Gain without waiting from which on a candidate that waits is tried with more loader processes."""
_CROWDED, _FEWER = 1.5, 1.03
"""Guesses of what it brings to take loader processes away, where there are more than cores and else."""
_BF16 = {"cuda": 2.0, "xla": 2.0, "cpu": 1.3}
_FP32 = {"cuda": 1.01, "xla": 1.01, "cpu": 1.3}
_LARGER_BATCH = {"cuda": 1.3, "xla": 1.3, "cpu": 1.08, "few": 1.4}
_FEW = 16
"""Images of a micro-batch that keep no processor busy."""
_COMPILED, _UNCOMPILED = 1.4, 1.1
_SHARDED, _UNSHARDED = 1.02, 1.05
_COMPRESSED, _UNCOMPRESSED = 1.15, 1.03
_FEWER_PARTS = {"cuda": 1.15, "xla": 1.15, "cpu": 1.05}


def propose(
    best: Trial, job: Workload, *, failed: Sequence[Candidate] = (), batch_gain: float | None = None
) -> list[Proposal | Skipped]:
    """List all that could be changed in the best candidate so far, and what would not pay for its trial.

    Args:
        failed: candidates that did not fit into memory.
        batch_gain: what the last larger batch brought.
    """
    return [
        *_workers(best, job),
        *_teacher(best, job),
        *_precision(best, job),
        *_batch(best, job, failed, batch_gain),
        *_accumulation(best, job, failed),
        *_compile(best, job),
        *_zero(best, job, failed),
        *_compression(best, job),
    ]


def less_memory(candidate: Candidate, job: Workload) -> Candidate | None:
    """Return the same batch in twice as many parts; none where it cannot be divided further."""
    half, odd = divmod(candidate.held // job.world_size, 2)
    if job.why_parts_count or odd or half < job.least_part:
        return None
    return candidate.model_copy(update={"accumulation": 2 * candidate.accumulation})


def _changed(field: str, trial: Trial, value: object, gain: float, why: str) -> Proposal:
    return Proposal(field=field, candidate=trial.candidate.model_copy(update={field: value}), gain=gain, why=why)


def _workers(best: Trial, job: Workload) -> Proposals:
    has, advised, waits = best.workers, best.advised_workers, best.shares.get("data", 0.0)
    crowded = has > job.most_workers
    fewer = {advised: "so many keep up with the step by what loading was measured to take"}
    if crowded:
        fewer.setdefault(job.most_workers, f"there are cores for {job.most_workers}")
    if job.device.kind == "cpu":
        fewer.setdefault(0, "where a CPU trains, a loader process takes from the training what it gives to it")
    if job.device.kind != "cpu" or not crowded:
        fewer.setdefault(has // 2, "each takes part of a core and of the memory")
    for number, why in fewer.items():
        if number < has:
            yield _changed("workers", best, number, _CROWDED if crowded else _FEWER, why)
    if waits < _LEAST_WAIT:
        yield Skipped("more loader processes", f"{waits:.1%} of a step waits for data")
        return
    bound = 1 / (1 - min(waits, 0.95))
    if advised > has:
        why = f"{waits:.0%} of a step waits for data, and so many keep up with it"
        yield _changed("workers", best, advised, bound, why)
    more = more_workers(best, job)
    if more > max(has, advised):
        # Where a CPU trains, a core that loads is one that does not train, and the wait is mostly loading itself.
        gain = bound if job.device.kind != "cpu" else 1 + (bound - 1) / 2
        yield _changed("workers", best, more, gain, f"{waits:.0%} of a step waits for data")


def more_workers(trial: Trial, job: Workload) -> int:
    """Return the loader processes for a candidate that waits for its data."""
    return max(trial.advised_workers, min(max(1, 2 * trial.workers), job.most_workers))


def held_up(trial: Trial, best: Trial, job: Workload) -> Iterator[Proposal]:
    """Propose one that would be clearly faster than the best if it did not wait for its data: the same with more loader processes."""
    workers = more_workers(trial, job)
    unhindered = trial.images_per_second / (1 - min(trial.shares.get("data", 0.0), 0.95))
    gain = job.run_s(best) / job.run_s(trial, unhindered) if unhindered else 0.0
    if gain >= _HELD_UP and workers > trial.workers:
        yield _changed("workers", trial, workers, gain, f"{trial.shares['data']:.0%} of its step waited for data")


def _teacher(best: Trial, job: Workload) -> Proposals:
    if job.no_recording:
        yield Skipped("recorded outputs of the teacher", job.no_recording)
        return
    if best.candidate.teacher == "recorded":
        online = best.startup_s + job.images * (1 / best.images_per_second + job.teacher_s)
        gain = job.run_s(best) / online
        if gain > 1:
            online_s = job.images * job.teacher_s
            why = f"to record its outputs takes {job.recording_s:.0f} s, and {online_s:.0f} s of it are needed in the steps"
            yield _changed("teacher", best, "online", gain, why)
        return
    share = best.shares.get("teacher_forward", 0.0)
    training = job.images / best.images_per_second
    gain = job.run_s(best) / (best.startup_s + job.recording_s + (1 - share) * training)
    if gain <= 1:
        yield Skipped(
            "recorded outputs of the teacher",
            f"it takes {share * training:.0f} s of this distillation, and to record its outputs would take {job.recording_s:.0f} s",
        )
        return
    why = f"the teacher takes {share:.0%} of a step, and to record its outputs takes {job.recording_s:.0f} s once"
    yield _changed("teacher", best, "recorded", gain, why)


def _precision(best: Trial, job: Workload) -> Proposals:
    if not job.device.uses_bf16("bf16"):
        yield Skipped("bf16", "this processor has no bf16 instructions")
    elif job.device.uses_bf16(best.candidate.precision):
        why = "bf16 is slower where the processor has no instructions for it"
        yield _changed("precision", best, "fp32", _FP32[job.device.kind], why)
    elif job.device.kind == "cuda" and not job.device.has_bf16:
        yield Skipped("bf16", "this GPU has no bf16")
    else:
        why = "half the bytes, and faster matrix products where the device has them"
        yield _changed("precision", best, "bf16", _BF16[job.device.kind], why)


def _batch(best: Trial, job: Workload, failed: Sequence[Candidate], batch_gain: float | None) -> Proposals:
    candidate = best.candidate
    size = 2 * candidate.batch_size
    if size > job.largest_batch:
        yield Skipped(f"batch_size={size}", f"more than {job.largest_batch} is not allowed: {job.largest_batch_why}")
        return
    per_step = best.shares.get("optimizer", 0.0)
    guess = _LARGER_BATCH["few" if candidate.held < _FEW * job.world_size else job.device.kind]
    expected = guess if batch_gain is None else 1 + (batch_gain - 1) / 2
    gain = max(expected, 1 / (1 - per_step / 2))
    why = "fewer and larger steps; the learning rate grows with the batch"
    larger = candidate.model_copy(update={"batch_size": size})
    if not any(_needs_as_much(other, larger) for other in failed):
        yield Proposal(field="batch_size", candidate=larger, gain=gain, why=why)
        return
    parted = less_memory(larger, job)
    if parted is not None:
        gain = 1 / (1 - per_step / 2) if job.world_size == 1 else gain
        why = f"{why}, in two parts, because it does not fit into memory in one"
        yield Proposal(field="batch_size", candidate=parted, gain=gain, why=why)


def _needs_as_much(failed: Candidate, candidate: Candidate) -> bool:
    """Whether a candidate holds as many images as one that did not fit, all else that takes memory being the same."""
    alike = ("precision", "compile", "zero", "teacher")
    return candidate.held >= failed.held and all(getattr(failed, name) == getattr(candidate, name) for name in alike)


def _accumulation(best: Trial, job: Workload, failed: Sequence[Candidate]) -> Proposals:
    candidate = best.candidate
    if job.why_parts_count:
        yield Skipped("accumulation", f"the size of a micro-batch is a part of what is learned ({job.why_parts_count})")
        return
    if candidate.accumulation % 2 == 0:
        whole = candidate.model_copy(update={"accumulation": candidate.accumulation // 2})
        if not any(_needs_as_much(other, whole) for other in failed):
            why = "a step in fewer parts; it fitted into memory"
            yield Proposal(field="accumulation", candidate=whole, gain=_FEWER_PARTS[job.device.kind], why=why)
    smaller = less_memory(candidate, job)
    if smaller is not None and job.device.kind == "cpu":
        why = "smaller parts may stay in the processor's caches"
        yield Proposal(field="accumulation", candidate=smaller, gain=1.04, why=why)


def _compile(best: Trial, job: Workload) -> Proposals:
    if job.device.compiles_with(best.candidate.compile):
        why = f"compiling took part of the {best.startup_s:.0f} s before the second step"
        yield _changed("compile", best, "off", _UNCOMPILED, why)
    elif job.device.kind == "cuda":
        yield _changed("compile", best, "on", _COMPILED, "fused kernels")
    elif job.device.kind == "xla":
        yield Skipped("compile", "XLA compiles whole steps by itself")
    else:
        yield Skipped("compile", "on a CPU the compiler's start takes longer than its code saves")


def _zero(best: Trial, job: Workload, failed: Sequence[Candidate]) -> Proposals:
    if job.world_size == 1:
        return
    if best.candidate.zero:
        why = "processes that keep the optimizer's whole state have less to exchange"
        yield _changed("zero", best, False, _UNSHARDED, why)
    elif failed:
        why = "less memory for the optimizer's state, where memory was the limit"
        yield _changed("zero", best, True, _SHARDED, why)
    else:
        yield Skipped("zero", "it saves memory, and memory was not the limit")


def _compression(best: Trial, job: Workload) -> Proposals:
    if best.candidate.gradient_compression == "bf16":
        yield _changed("gradient_compression", best, "none", _UNCOMPRESSED, "nothing to convert")
    elif job.nodes > 1:
        yield _changed("gradient_compression", best, "bf16", _COMPRESSED, "half the bytes between nodes")
    elif job.world_size > 1:
        yield Skipped("gradient_compression", "all processes are on one machine")
