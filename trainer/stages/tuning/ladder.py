"""Faster settings of a distillation, one rung after another: loader processes, precision, compile, teacher, micro-batches, batch.

Each rung measures one change of the best settings so far and keeps it if the whole distillation becomes shorter by more than the noise.
Two rates are measured apart: that of the step on batches in memory, and that of loading on one core. Together they give the number of
loader processes, which a measurement of both at once then checks.

The ladder is a function of its measurements, so processes that share them decide alike, and a resumed tuning repeats its decisions.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Protocol

from trainer.devices import Device
from trainer.io.errors import SettingsError
from trainer.stages.tuning.tuning_schema import Candidate, Trial, TriedCandidate
from trainer.training.loader_workers import MARGIN, NEGLIGIBLE

LEAST_GAIN = 1.01  # a smaller gain is not kept, however precise the rates are: most changes have a price
KEEPS_UP = 0.95  # a loader keeps up if the step with it reaches this share of its rate on batches in memory
MOST_OF_THE_RUN = 0.1  # a rung is skipped where its trial would take a larger share of the distillation
BATCH_STEPS = 16  # the batch grows in steps of the given batch divided by this

FAILURES = {
    "out of memory": "does not fit into memory",
    "not compiled": "nothing of the model was compiled, so it does not show how fast these settings are",
    "not finite": "the student's weights are not finite after it",
}  # how a trial without a rate ended -> the verdict


class Measure(Protocol):
    """Measures the step of a candidate on batches in memory; with `loads` the training with its loader."""

    def __call__(self, candidate: Candidate, *, loads: bool = False) -> Trial: ...


@dataclass(frozen=True, kw_only=True)
class Workload:
    """The fixed part of a tuning: the images to train on, the machines, and their limits."""

    images: int  # images that the whole distillation sees
    largest_batch: int
    largest_batch_why: str  # the limit that sets `largest_batch`
    device: Device
    world_size: int
    most_workers: int  # loader processes beside each training process for which the machine has cores
    memory_limit: float = math.inf  # bytes that a process may use
    recording_s: float = 0.0  # seconds that recording the teacher's outputs takes; 0 where they are recorded already
    no_recording: str = ""  # why the distillation cannot learn from recorded outputs; empty if it can
    least_part: int = 1  # fewest images in a micro-batch of a process; two where the student normalizes batches
    why_parts_count: str = ""  # why the size of a micro-batch is a part of what is learned; empty where it is not

    def needed_workers(self, trial: Trial) -> int:
        """Return the fewest loader processes that keep up with the step, as far as the machine has cores.

        Where a CPU trains, they only take over the waiting for storage: a core that loads does not compute.
        """
        step_s = 1 / trial.images_per_second
        loading_s = trial.waiting_s if self.device.kind == "cpu" else trial.loading_s
        needed = math.ceil(MARGIN * loading_s / step_s) if loading_s > NEGLIGIBLE * step_s else 0
        return min(needed, self.most_workers)

    def run_s(self, trial: Trial) -> float:
        """Return the seconds of the whole distillation; a trial on batches in memory counts with the loader processes that it needs."""
        image_s = 1 / trial.images_per_second
        if not trial.loads:
            given = trial.candidate.workers
            workers = max(self.needed_workers(trial), 0 if given == "auto" else given)
            image_s = max(image_s, trial.loading_s / workers) if workers else image_s + trial.loading_s
        recording_s = self.recording_s if trial.candidate.teacher == "recorded" else 0.0
        return trial.startup_s + recording_s + self.images * image_s


@dataclass(kw_only=True)
class Ladder:
    """The climb so far."""

    job: Workload
    measure: Measure
    limit_s: float  # longest time of all trials together
    tried: list[TriedCandidate] = field(default_factory=list)
    untried: dict[str, str] = field(default_factory=dict)  # untried change -> reason
    stopped: str = "every rung was climbed"
    step: Trial = field(init=False)  # the best settings on batches in memory
    whole: Trial = field(init=False)  # the best settings with their loader
    given: Trial = field(init=False)
    """The given settings with their loader, in as many parts as it took for them to fit."""

    @property
    def seconds(self) -> float:
        return sum(tried.trial.seconds for tried in self.tried)

    def climb(self, start: Candidate) -> None:
        """Climb from the given settings as far as `limit_s` allows, to `whole`.

        A `SettingsError` if not even the smallest part of a batch fits into memory, or the given settings spoil the weights.
        """
        self._begin(start)
        self._settle_workers()
        for rung in (self._precision, self._compile, self._teacher, self._parts):
            for change, why in rung():
                self._try(change, why)
        self._batch()
        if self.step.candidate != self.whole.candidate:
            workers = max(self.job.needed_workers(self.step), self._workers)
            if self._keep_workers(workers, "all changes together, with their loader", must=True):
                self._settle_workers()

    @property
    def reasons(self) -> list[str]:
        """The changes that lead to `whole`, in words, with their gain."""
        kept = [tried for tried in self.tried if tried.taken]
        last = max(index for index, tried in enumerate(kept) if tried.trial.loads)
        reasons = [f"{tried.idea}: {tried.verdict}" for tried in kept[: last + 1] if tried.gain]
        before, after = self.given.candidate.batch_size, self.whole.candidate.batch_size
        if before != after:
            reasons.append(
                f"the batch has grown from {before} to {after} images: {after / before:g} times fewer steps, with a peak learning rate "
                "that is as many times larger (linear scaling, Goyal et al. 2017), since distill.base_learning_rate is for 256"
            )
        return reasons

    # -----------------------------------------------------------------------------------------------------------------
    # Measurements and verdicts

    def _begin(self, start: Candidate) -> None:
        """Measure the given settings: in as many parts as it takes for them to fit, uncompiled where nothing of them is compiled."""
        candidate: Candidate | None = start
        idea = "the given settings"
        while candidate is not None:
            trial = self.measure(candidate)
            if not trial.failed:
                self._note(trial, f"{idea}, on batches in memory", "the start", taken=True)
                self.step, trial = trial, self.measure(candidate, loads=True)
            self._note(trial, f"{idea}, with their loader" * trial.loads or idea, "the start", taken=not trial.failed)
            if not trial.failed:
                # The number of processes that `auto` found need not be found again.
                self.given = self.whole = _with(trial, workers=trial.workers)
                self.step = _with(self.step, workers=trial.workers)
                return
            if trial.ended == "not finite":
                raise SettingsError(
                    "distill: with the given settings the student's weights are not finite after a trial of a few steps; lower "
                    "distill.base_learning_rate or distill.clip_norm, or use distill.precision=fp32"
                )
            if trial.ended == "not compiled":
                candidate, idea = candidate.model_copy(update={"compile": "off"}), "the same, uncompiled on purpose"
                continue
            parts, idea = candidate.accumulation, "the same in twice as many parts, since it did not fit into memory"
            half, odd = divmod(candidate.held // self.job.world_size, 2)
            divisible = not (odd or half < self.job.least_part or self.job.why_parts_count)
            candidate = candidate.model_copy(update={"accumulation": 2 * parts}) if divisible else None
        raise SettingsError(
            f"distill.batch_size = {start.batch_size} does not fit into memory on {self.job.world_size} processes, not even in "
            f"{parts} micro-batches; choose a smaller batch, a smaller student, or a larger pool"
        )

    def _note(self, trial: Trial, idea: str, verdict: str, *, taken: bool, gain: float | None = None) -> None:
        run_s = None if trial.failed else self.job.run_s(trial)
        verdict = FAILURES.get(trial.ended, verdict)
        self.tried.append(TriedCandidate(trial=trial, idea=idea, run_s=run_s, gain=gain, taken=taken, verdict=verdict))

    def _has_time(self, name: str, cost_s: float) -> bool:
        """Return whether a trial of so many seconds pays; note why not."""
        run_s = self.job.run_s(self.whole)
        if cost_s > MOST_OF_THE_RUN * run_s:
            why = f"a trial takes about {cost_s:.1f} s, more than a tenth of a distillation of {run_s:.0f} s"
        elif self.seconds + cost_s > self.limit_s:
            why = f"the {self.limit_s / 60:g} minutes of the search are over (tune.minutes)"
        else:
            return True
        self.untried[name] = self.stopped = why
        return False

    def _try(self, change: dict[str, Any], why: str) -> bool:
        """Measure a change of the best step; keep it if it is better."""
        name = " ".join(f"{setting}={str(value).lower()}" for setting, value in change.items())
        candidate = self.step.candidate.model_copy(update=change)
        if not self._has_time(name, self.step.seconds):
            return False
        trial = self.measure(candidate)
        if taken := self._judge(trial, self.step, f"{name}: {why}"):
            self.step = trial
        return taken

    def _keep_workers(self, workers: int, why: str, *, must: bool = False) -> bool:
        """Measure the best step with a loader of so many processes, beyond the time limit if it `must` be; keep it if it is better."""
        candidate = self.step.candidate.model_copy(update={"workers": workers})
        name = f"workers={workers}"
        if not must and not self._has_time(name, self.whole.seconds):
            return False
        trial = self.measure(candidate, loads=True)
        if taken := self._judge(trial, self.whole, f"{name}: {why}"):
            self.whole, self.step = trial, _with(self.step, workers=workers)
        return taken

    def _judge(self, trial: Trial, best: Trial, idea: str) -> bool:
        """Note a trial and whether it makes the distillation shorter than the best one by more than the noise of both."""
        if trial.failed:
            self._note(trial, idea, "", taken=False)
            return False
        gain, needed = self.job.run_s(best) / self.job.run_s(trial), 1 + math.hypot(best.noise, trial.noise)
        taken = gain >= max(LEAST_GAIN, needed)
        verdict = f"{gain:.3f} times the speed of the best before"
        if not taken:
            verdict += f", and a change must bring {LEAST_GAIN}, or {needed:.3f} to stand out from the noise"
        self._note(trial, idea, verdict, taken=taken, gain=gain)
        return taken

    # -----------------------------------------------------------------------------------------------------------------
    # Rungs

    @property
    def _workers(self) -> int:
        workers = self.whole.candidate.workers
        assert workers != "auto", "it was replaced by the number that it found"
        return workers

    def _settle_workers(self) -> None:
        """Choose the loader processes: the fewest that keep up by the two rates, and more while the step still waits for them."""

        def keeps_up() -> bool:
            return self.whole.images_per_second >= KEEPS_UP * self.step.images_per_second

        if keeps_up():
            self.untried["workers"] = (
                f"with {self._workers} the step reaches {KEEPS_UP:.0%} of its rate without loading"
            )
            return
        self.untried.pop("workers", None)
        needed = self.job.needed_workers(self.step)
        if needed != self._workers:
            rates = f"the step takes {self.step.images_per_second:,.0f} images/s, a core of each process loads "
            rates += f"{1 / self.step.loading_s:,.0f}" if self.step.loading_s else "any number"
            self._keep_workers(needed, rates)
        while not keeps_up() and (more := min(max(1, 2 * self._workers), self.job.most_workers)) > self._workers:
            if not self._keep_workers(more, "the step waits for its data"):
                return

    def _precision(self) -> Iterator[tuple[dict[str, Any], str]]:
        device, precision = self.job.device, self.step.candidate.precision
        if not device.uses_bf16("bf16") or (device.kind == "cuda" and not device.has_bf16):
            self.untried["precision=bf16"] = "this device has no instructions for it"
        elif not device.uses_bf16(precision):
            yield {"precision": "bf16"}, "half the bytes, and faster matrix products where the device has them"
        elif device.kind == "cpu":
            yield {"precision": "fp32"}, "small models are often slower in bf16 on a CPU"

    def _compile(self) -> Iterator[tuple[dict[str, Any], str]]:
        device = self.job.device
        if device.kind == "xla":
            self.untried["compile"] = "XLA compiles whole steps by itself"
        elif device.compiles_with(self.step.candidate.compile):
            yield {"compile": "off"}, f"the first step came after {self.step.startup_s:.0f} s, part of them compiling"
        elif device.kind == "cpu":
            self.untried["compile"] = "on a CPU the compiler's start takes longer than its code saves"
        else:
            yield {"compile": "on"}, "fused kernels"

    def _teacher(self) -> Iterator[tuple[dict[str, Any], str]]:
        job, run_s = self.job, self.job.run_s(self.step)
        if self.step.candidate.teacher == "recorded":
            yield {"teacher": "online"}, f"recording takes {job.recording_s:.0f} s"
        elif job.no_recording or job.recording_s > run_s:
            too_long = f"the distillation takes {run_s:.0f} s, and recording alone would take {job.recording_s:.0f} s"
            self.untried["teacher=recorded"] = job.no_recording or too_long
        else:
            yield {"teacher": "recorded"}, f"no teacher in the steps, after a recording of {job.recording_s:.0f} s"

    def _parts(self) -> Iterator[tuple[dict[str, Any], str]]:
        while (parts := self.step.candidate.accumulation) % 2 == 0:
            if self.job.why_parts_count:
                self.untried["accumulation"] = (
                    f"the size of a micro-batch is a part of what is learned ({self.job.why_parts_count})"
                )
                return
            if 2 * self.step.candidate.held > self._most_held():
                self.untried[f"accumulation={parts // 2}"] = FAILURES["out of memory"]
                return
            yield {"accumulation": parts // 2}, "a step in fewer and larger micro-batches"
            if self.step.candidate.accumulation == parts:
                return

    def _batch(self) -> None:
        """Find the largest batch that fits, in steps of a sixteenth of the given one, as long as a larger one is faster."""
        job, start = self.job, self.step.candidate
        parts = job.world_size * start.accumulation
        unit = max(1, start.batch_size // BATCH_STEPS)
        if job.device.is_lazy:  # each size would be a graph of its own
            unit = -(-unit // parts) * parts
        if start.batch_size + unit > job.largest_batch:
            why = f"more than {job.largest_batch} is not allowed: {job.largest_batch_why}"
            self.untried[f"batch_size={start.batch_size + unit}"] = why
            return
        if job.device.kind == "cuda" and self._most_held() * start.accumulation < job.largest_batch:
            # A second size shows how much of the memory grows with the images.
            smaller = start.model_copy(update={"batch_size": max(parts * job.least_part, start.batch_size // 2)})
            if self._has_time(f"batch_size={smaller.batch_size}", self.step.seconds):
                self._note(self.measure(smaller), "a smaller batch, to measure memory", "for its memory", taken=False)
        while True:
            size = self.step.candidate.batch_size
            most = min(job.largest_batch, self._most_held() * start.accumulation)
            larger = size + min(size, most - size) // unit * unit
            if fails := [held * start.accumulation for held in self._too_many()]:
                larger = min(larger, size + (min(fails) - size) // (2 * unit) * unit)
            if larger <= size:
                limit = job.largest_batch_why if most == job.largest_batch else FAILURES["out of memory"]
                self.untried[f"batch_size={size + unit}"] = limit
                return
            why = "fewer and larger steps; the learning rate grows with the batch"
            fails = self._too_many()
            if not self._try({"batch_size": larger}, why) and self._too_many() == fails:
                return

    def _too_many(self) -> list[int]:
        """Return the numbers of images that settings like the best ones ran out of memory with."""
        alike = [tried.trial for tried in self.tried if _kind(tried.trial) == _kind(self.step)]
        return [trial.candidate.held for trial in alike if trial.ended == "out of memory"]

    def _most_held(self) -> int:
        """Return the most images that all processes together can hold at once, by the memory of the trials like the best one.

        One trial gives an upper bound on the bytes of an image: all memory that was not in use before it. Where a GPU measures each
        trial's peak, two sizes give the slope. The host's peak is the largest so far, so only the largest trial counts.
        """
        alike = [tried.trial for tried in self.tried if tried.run_s and _kind(tried.trial) == _kind(self.step)]
        large = max(alike, key=lambda trial: trial.candidate.held)
        slopes = [(large.memory_bytes - large.fixed_bytes) / large.candidate.held]
        if self.job.device.kind == "cuda":
            slopes += [
                (large.memory_bytes - small.memory_bytes) / (large.candidate.held - small.candidate.held)
                for small in alike
                if small.candidate.held < large.candidate.held
            ]
        most = min([2**62, *(held - 1 for held in self._too_many())])
        room = self.job.memory_limit - large.memory_bytes
        if math.isinf(room) or min(slopes) <= 0:
            return most
        return min(most, large.candidate.held + int(max(0.0, room) / min(slopes)))


def _with(trial: Trial, *, workers: int) -> Trial:
    return trial.model_copy(update={"candidate": trial.candidate.model_copy(update={"workers": workers})})


def _kind(trial: Trial) -> tuple[object, ...]:
    """Return the settings, beside the number of images, that a trial's memory depends on."""
    candidate = trial.candidate
    return candidate.precision, candidate.compile, candidate.teacher, trial.loads
