"""The rules on loading: whether the training waits for its batches, and on what their making waits.

One diagnosis serves three rules, so that one cause has one finding: storage (`io_bottleneck`), too few or too many loader processes for the
cores (`loader_workers`), or cores that are busy already (`cpu_bottleneck`).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from trainer.base_models import Fraction, NonNegativeFloat, Percent
from trainer.evidence import RankEvidence, is_core
from trainer.rules.compared_steps import Steps, had_core, usual, within_steps
from trainer.rules.outcomes import Case, Finding, Healthy, NotJudged, Outcome, Saving, SystemRule
from trainer.series import Series

_MARGIN = 1.25
"""Loader processes together should be this many times as fast as the step, since rates vary."""


@dataclass(frozen=True, kw_only=True)
class LoadingWait:
    """What a process waits for its batches in a usual step; seconds."""

    step_s: float
    waiting_s: float
    """For its next batch, or while it makes it itself."""
    computing_s: float
    """Of that, while a processor made it."""
    workers: int
    """Loader processes beside each training process."""
    per_core: float
    """Training and loader processes of the machine for each of its cores."""
    itself: bool
    """Whether the processor that trains makes the batches, too."""

    @property
    def storage_s(self) -> float:
        """Of the waiting, while nothing was computed."""
        return self.waiting_s - self.computing_s

    def share(self, seconds: float) -> float:
        """Return seconds as a share of the step."""
        return seconds / self.step_s

    def is_for_storage(self, waiting_share: float) -> bool:
        return self.storage_s > self.computing_s and self.share(self.storage_s) > waiting_share

    def is_for_processor(self, waiting_share: float, own_share: float) -> bool:
        limit = own_share if self.itself else waiting_share
        return self.computing_s >= self.storage_s and self.share(self.computing_s) > limit

    def part(self, seconds: float) -> str:
        """Say how much of a step seconds of loading are."""
        verb = "goes into batches" if self.itself else "waits for batches"
        return f"{self.share(seconds):.0%} of each step ({_ms(seconds)} of {_ms(self.step_s)} undisturbed) {verb}"

    @property
    def processes(self) -> str:
        """How many processes there are, in words."""
        beside = f"{self.workers or 'no'} loader process{'es' * (self.workers > 1)}"
        return f"{beside} beside each training process, {self.per_core:.1f} processes for each core"

    @property
    def numbers(self) -> dict[str, float]:
        """Of a finding on processors."""
        return {
            "waiting_share": self.share(self.computing_s),
            "undisturbed_step_s": self.step_s,
            "workers": float(self.workers),
            "processes_per_core": self.per_core,
        }

    def workers_that_keep_up(self) -> int:
        """Loader processes beside each training process with which it would not wait, at the present rate."""
        making_s = self.workers * self.step_s if self.workers else self.waiting_s
        return max(self.workers + 1, math.ceil(_MARGIN * making_s / max(self.step_s - self.waiting_s, 1e-9)))


def diagnose(steps: Steps, *, busy_loader_percent: float) -> LoadingWait:
    """Diagnose how the process with the median waiting time loads.

    Other programs on the machine slow training and loading alike; their share is left out, as far as the kernel reports it. A loader
    process that is waited for computes if it takes more than `busy_loader_percent` of a core.
    """
    waiting = usual(steps.phase("data")) / usual(steps.seconds)
    number = int(np.argsort(waiting)[(len(waiting) - 1) // 2])
    record = steps.ranks[number].record
    workers = record.workers or 0
    split = _beside(steps, number, workers, busy_loader_percent) if workers else _itself(steps, number)
    training_s, storage_s, computing_s = split
    return LoadingWait(
        step_s=max(training_s + storage_s + computing_s, 1e-9),
        waiting_s=storage_s + computing_s,
        computing_s=computing_s,
        workers=workers,
        per_core=steps.processes_here() * (1 + workers) / record.cores,
        itself=not workers and not steps.on_gpu,
    )


def _itself(steps: Steps, number: int) -> tuple[float, float, float]:
    """Split a usual step of a process that loads itself: seconds of training, of waiting for storage, and of computing for its batch."""
    step_s = float(usual((steps.seconds - steps.delayed)[number]))
    host_s = float(usual(steps.column("host_data_seconds")[number]))
    storage_s = min(host_s, max(0.0, float(usual(_blocked(steps)[number]))))
    if steps.on_gpu:  # whose clock shows less of it than the host's
        data_s = float(usual(steps.phase("data")[number]))
        storage_s *= data_s / max(host_s, 1e-9)
    else:
        data_s = float(usual((steps.phase("data") - steps.delayed_in("data"))[number]))
    return max(0.0, step_s - data_s), storage_s, max(0.0, data_s - storage_s)


def _beside(steps: Steps, number: int, workers: int, busy_percent: float) -> tuple[float, float, float]:
    """Split a usual step: seconds of training, of waiting for loader processes that wait for storage, and for ones that compute.

    A step in which a batch was ready has not waited. Computing they are as far as their own time for a batch is longer than the step.
    """
    waiting = steps.phase("data") if steps.on_gpu else _blocked(steps)
    training_s = float(usual((steps.seconds - steps.delayed - waiting)[number]))
    waiting_s = float(usual(np.where(steps.column("queued") > 0, 0.0, waiting)[number]))
    rank = steps.ranks[number]
    sampled = rank.system.get("loaders_cpu_percent", np.full(len(rank.system["end_s"]), np.nan))
    percent = sampled[np.isfinite(sampled) & within_steps(rank)]
    if not len(percent):
        return training_s, 0.0, waiting_s
    busy = float(percent.mean()) / 100 / workers
    computing_s = min(waiting_s, max(0.0, busy * float(usual(steps.seconds[number])) - training_s))
    wait_themselves = 100 * busy < busy_percent * float(usual(had_core(steps)[number]))
    return training_s, waiting_s - computing_s if wait_themselves else 0.0, computing_s


def _blocked(steps: Steps) -> Series:
    """Compute the seconds in `data` in which the training's thread wanted no core, [R, S]; 0 where its CPU time is not known.

    Single ones may be negative: the kernel counts waiting for a core when it ends.
    """
    waited = steps.column("host_data_seconds") - steps.column("host_data_cpu_seconds")
    return np.nan_to_num(waited) - steps.without_core("host_data")


def _gpu_idles_while(rank: RankEvidence, signal: Series | None, above: float, gpu_below: float) -> float:
    """Compute the share of the samples at steps in which a signal was above a limit and the GPU below another; 0 where either was not
    sampled.
    """
    gpu = rank.system.get("gpu_percent")
    if signal is None or gpu is None:
        return 0.0
    # Not while the first step compiles, for which a core computes and the GPU has nothing to do.
    within = within_steps(rank)
    return float(np.mean((signal[within] > above) & (gpu[within] < gpu_below))) if within.any() else 0.0


class IoBottleneck(SystemRule):
    """A training that waits for storage.

    Fires when more than `waiting_share` of the steps' time waits for batches while neither the training nor its loader processes compute
    (those below `loader_percent` of a core do not); or the cores wait for storage (above `iowait_percent`) beside an idle GPU (below
    `gpu_percent`) in more than `share` of the samples.

    Needs phase `data` of the steps; CPU time of the training's thread and of the loader processes; on a GPU its use, and iowait.
    Advises more loader processes, which wait at the same time; the data set on a disk of the machine.
    """

    title: ClassVar = "I/O bottleneck"

    iowait_percent: Percent = 50.0
    """Above this the cores wait for storage, in percent of their time."""
    gpu_percent: Percent = 10.0
    """Below this the GPU waits, in percent."""
    share: Fraction = 0.5
    """Share of the samples in which that must be so."""
    waiting_share: Fraction = 0.15
    """Share of the steps' time that waits for data while the training and its loaders have nothing to do."""
    loader_percent: NonNegativeFloat = 30.0
    """Below this a loader process that is waited for waits itself, in percent of a core."""

    def judge(self, case: Case) -> Outcome:
        steps = Steps(case)
        if steps.too_few:
            return steps.too_few
        loading = diagnose(steps, busy_loader_percent=self.loader_percent)
        share = loading.share(loading.storage_s)
        waits = case.rank.system.get("iowait_percent")
        sampled = _gpu_idles_while(case.rank, waits, self.iowait_percent, self.gpu_percent)
        if loading.is_for_storage(self.waiting_share):
            text = f"{loading.part(loading.storage_s)} that storage has to deliver, and nothing is computed meanwhile."
        elif sampled > self.share:
            share = sampled
            text = f"In {sampled:.0%} of the samples the GPU was idle while the cores waited for storage."
        else:
            return Healthy(f"{share:.0%} of a step waits for storage ({_ms(loading.storage_s)}).")
        return Finding(
            confidence=0.9 if loading.workers == 0 else 0.8,
            text=text,
            advice=(
                f"Let more loader processes wait at the same time (data.workers={loading.workers_that_keep_up()}; waiting needs no "
                "core), or put the prepared data set on a disk of the machine."
            ),
            saving=Saving(share * steps.total_s, "the steps without that waiting"),
            numbers={"waiting_share": share, "storage_s": loading.storage_s, "undisturbed_step_s": loading.step_s},
            steps=steps.span,
        )


class LoaderWorkers(SystemRule):
    """Too many or too few loader processes.

    Fires when there are more than `most_per_core` training and loader processes for each core; or fewer than `fewest_per_core` while
    more than `waiting_share` of the steps' time waits for batches that processors make (`own_share` where a CPU trains and loads itself).

    Needs how many loader processes and cores there are; phase `data` of the steps; CPU time as for the I/O bottleneck.
    Advises the number of loader processes that keeps up, as far as there are cores.
    """

    title: ClassVar = "Loader workers"

    most_per_core: NonNegativeFloat = 2.0
    """More loader and training processes for each core than this are too many."""
    fewest_per_core: Fraction = 0.7
    """Fewer than this are too few where the training waits for data."""
    waiting_share: Fraction = 0.15
    """Share of the steps' time that waits for data."""
    own_share: Fraction = 0.65
    """The same where the processes that train on a CPU load for themselves."""

    def judge(self, case: Case) -> Outcome:
        steps, storage = Steps(case), case.rule(IoBottleneck)
        if steps.too_few:
            return steps.too_few
        loading = diagnose(steps, busy_loader_percent=storage.loader_percent)
        waits = loading.is_for_processor(self.waiting_share, self.own_share)
        share, waiting = loading.share(loading.computing_s), loading.part(loading.computing_s)
        if loading.per_core < self.fewest_per_core and waits:
            keeps_up = loading.workers_that_keep_up()
            most = int(steps.record.cores // steps.processes_here()) - (0 if loading.itself else 1)
            wanted = max(loading.workers + 1, min(keeps_up, most))
            hidden_s = share * steps.total_s * min(1.0, wanted / keeps_up)
            return Finding(
                confidence=0.8,
                text=f"{waiting} that processors make, and cores are free: {loading.processes}.",
                advice=f"Let more processes load: data.workers={wanted}.",
                saving=Saving(hidden_s, "the waiting that this many loader processes hide, at the present rate"),
                numbers=loading.numbers,
                steps=steps.span,
            )
        if loading.per_core > self.most_per_core and not loading.is_for_storage(storage.waiting_share):
            wanted = max(0, steps.record.cores // steps.processes_here() - 1)
            cause = f"{waiting}, and" if waits else "There are more processes than cores:"
            return Finding(
                severity="warning" if waits else "note",
                confidence=0.7 if waits else 0.5,
                text=f"{cause} {loading.processes}: they take the cores from one another, and memory.",
                advice=f"Let fewer processes load: data.workers={wanted}, or auto, which measures how many keep up.",
                saving=Saving(share * steps.total_s, "the waiting for data") if waits else None,
                numbers=loading.numbers,
                steps=steps.span,
            )
        return Healthy(f"{loading.processes}; {loading.share(loading.waiting_s):.0%} of a step waits for data.")


class CpuBottleneck(SystemRule):
    """A device that waits while the processor is busy.

    Fires when more than `waiting_share` of the steps' time waits for batches that processors make (`own_share` where a CPU trains and
    loads itself), and the number of loader processes fits the cores; or a core is busy (above `busy_percent`) beside an idle GPU (below
    `gpu_percent`) in more than `share` of the samples.

    Needs phase `data` of the steps; CPU time as for the I/O bottleneck; use of the cores and of the GPU.
    Advises views and decoding on the GPU, smaller stored images, more cores.
    """

    title: ClassVar = "CPU bottleneck"

    busy_percent: Percent = 90.0
    """Above this a core is busy, in percent."""
    gpu_percent: Percent = 10.0
    """Below this the GPU waits, in percent."""
    share: Fraction = 0.5
    """Share of the samples in which that must be so."""
    waiting_share: Fraction = 0.15
    """Share of the steps' time that waits for data which the processor makes."""
    own_share: Fraction = 0.65
    """The same where the processes that train on a CPU load for themselves: there loading is a part of the work."""

    def judge(self, case: Case) -> Outcome:
        steps, processes = Steps(case), case.rule(LoaderWorkers)
        if steps.too_few:
            return steps.too_few
        loading = diagnose(steps, busy_loader_percent=case.rule(IoBottleneck).loader_percent)
        share = loading.share(loading.computing_s)
        cores = [values for name, values in case.rank.system.items() if is_core(name)]
        busiest = np.max(cores, axis=0) if cores else None
        sampled = _gpu_idles_while(case.rank, busiest, self.busy_percent, self.gpu_percent)
        if loading.is_for_processor(self.waiting_share, self.own_share):
            if not processes.fewest_per_core <= loading.per_core <= processes.most_per_core:
                return NotJudged(f"the number of loader processes comes first (loader_workers): {loading.processes}")
            text = f"{loading.part(loading.computing_s)} that processors make, and none is free: {loading.processes}."
        elif sampled > self.share and loading.share(loading.waiting_s) <= self.waiting_share:
            share = sampled
            text = f"In {sampled:.0%} of the samples a core was busy and the GPU idle, though batches were ready."
        else:
            return Healthy(
                f"{share:.0%} of a step waits for batches that processors make ({_ms(loading.computing_s)})."
            )
        advice = (
            "Store smaller images (data.image_size), which are cheaper to decode, or take a machine with more cores."
        )
        if steps.on_gpu:
            advice = (
                "Let the GPU make the views (data.views_on=device) and decode (data.decode_on=cuda), store smaller images "
                "(data.image_size), or take machines with more cores for each GPU."
            )
        return Finding(
            confidence=0.8,
            text=text,
            advice=advice,
            saving=Saving(share * steps.total_s, "the steps if batches were always ready"),
            numbers={**loading.numbers, "waiting_share": share},
            steps=steps.span,
        )


def _ms(seconds: float) -> str:
    return f"{1e3 * seconds:.3g} ms"
