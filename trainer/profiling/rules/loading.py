"""The rules on loading: whether the training waits for its batches, and on what their making waits.

One diagnosis serves these rules, so that one cause has one finding: storage (`io_bottleneck`), too few or too many loader processes for the
cores (`loader_workers`), or cores that are busy already (`cpu_bottleneck`). Where batches are ready in time, and yet the training has no
core, `cores_oversubscribed` says who has them.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar, Literal

import numpy as np

from trainer.config import rules
from trainer.io import formatting
from trainer.profiling.evidence import RankEvidence, is_core
from trainer.profiling.rules.compared_steps import Steps, had_core, winsorized_mean, within_steps
from trainer.profiling.rules.outcomes import Case, Finding, Healthy, NotJudged, Outcome, Saving, SystemRule
from trainer.profiling.series import Series

_MARGIN = 1.25  # loaders should be faster than the step by this factor, since rates vary


@dataclass(frozen=True, kw_only=True)
class LoadingWait:
    """A process's wait for batches in a usual step, in seconds."""

    step_s: float
    waiting_s: float  # for the next batch, or while the process makes the batch itself
    computing_s: float  # part of the waiting in which a processor made the batch
    workers: int  # loader processes beside each training process
    per_core: float  # training and loader processes of the machine for each of its cores
    itself: bool  # whether the processor that trains makes the batches, too

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
        """Express seconds of loading as a part of the step."""
        verb = "goes into batches" if self.itself else "waits for batches"
        return f"{self.share(seconds):.0%} of each step ({_ms(seconds)} of {_ms(self.step_s)} undisturbed) {verb}"

    @property
    def processes(self) -> str:
        """The numbers of processes, in words."""
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

    The share of other programs, which slow training and loading alike, is left out as far as the kernel reports it. A loader process that
    is waited for computes if it takes more than `busy_loader_percent` of a core.
    """
    waiting = winsorized_mean(steps.phase("data")) / winsorized_mean(steps.seconds)
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
    step_s = float(winsorized_mean((steps.seconds - steps.delayed)[number]))
    host_s = float(winsorized_mean(steps.column("host_data_seconds")[number]))
    storage_s = min(host_s, max(0.0, float(winsorized_mean(_blocked(steps)[number]))))
    if steps.on_gpu:  # whose clock shows less of it than the host's
        data_s = float(winsorized_mean(steps.phase("data")[number]))
        storage_s *= data_s / max(host_s, 1e-9)
    else:
        data_s = float(winsorized_mean((steps.phase("data") - steps.delayed_in("data"))[number]))
    return max(0.0, step_s - data_s), storage_s, max(0.0, data_s - storage_s)


def _beside(steps: Steps, number: int, workers: int, busy_percent: float) -> tuple[float, float, float]:
    """Split a usual step: seconds of training, of waiting for loaders that wait for storage, and of waiting for loaders that compute.

    A step with a ready batch did not wait. Loaders compute as far as their own time for a batch exceeds the step.
    """
    waiting = steps.phase("data") if steps.on_gpu else _blocked(steps)
    training_s = float(winsorized_mean((steps.seconds - steps.delayed - waiting)[number]))
    waiting_s = float(winsorized_mean(np.where(steps.column("queued") > 0, 0.0, waiting)[number]))
    rank = steps.ranks[number]
    sampled = rank.system.get("loaders_cpu_percent", np.full(len(rank.system["end_s"]), np.nan))
    percent = sampled[np.isfinite(sampled) & within_steps(rank)]
    if not len(percent):
        return training_s, 0.0, waiting_s
    busy = float(percent.mean()) / 100 / workers
    computing_s = min(waiting_s, max(0.0, busy * float(winsorized_mean(steps.seconds[number])) - training_s))
    wait_themselves = 100 * busy < busy_percent * float(winsorized_mean(had_core(steps)[number]))
    return training_s, waiting_s - computing_s if wait_themselves else 0.0, computing_s


def _blocked(steps: Steps) -> Series:
    """Compute the seconds in `data` in which the training's thread wanted no core, [R, S]; 0 if its CPU time is unknown.

    A value may be negative: the kernel counts a wait for a core when the wait ends.
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
    within = within_steps(rank) & np.isfinite(signal) & np.isfinite(gpu)
    return float(np.mean((signal[within] > above) & (gpu[within] < gpu_below))) if within.any() else 0.0


class IoBottleneck(SystemRule, rules.IoBottleneckThresholds):
    """A training that waits for storage.

    Fires when more than `waiting_share` of the steps' time waits for batches while neither the training nor its loader processes compute
    (those below `loader_percent` of a core do not); or the cores wait for storage (above `iowait_percent`) beside an idle GPU (below
    `gpu_percent`) in more than `share` of the samples.

    Needs phase `data` of the steps; CPU time of the training's thread and of the loader processes; on a GPU its use, and iowait.
    Advises more loader processes, which wait at the same time; the data set on a disk of the machine.
    """

    title: ClassVar = "I/O bottleneck"

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
                f"Let more loader processes wait at the same time ({case.workers_setting}={loading.workers_that_keep_up()}; waiting needs "
                "no core), or put the prepared data set on a disk of the machine."
            ),
            saving=Saving(share * steps.total_s, "the steps without that waiting"),
            numbers={"waiting_share": share, "storage_s": loading.storage_s, "undisturbed_step_s": loading.step_s},
            steps=steps.span,
        )


class LoaderWorkers(SystemRule, rules.LoaderWorkersThresholds):
    """Too many or too few loader processes.

    Fires when there are more than `most_per_core` training and loader processes for each core; or fewer than `fewest_per_core` while
    more than `waiting_share` of the steps' time waits for batches that processors make (`own_share` where a CPU trains and loads itself).

    Needs how many loader processes and cores there are; phase `data` of the steps; CPU time as for the I/O bottleneck.
    Advises the number of loader processes that keeps up, as far as there are cores.
    """

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
                advice=f"Let more processes load: {case.workers_setting}={wanted}.",
                saving=Saving(hidden_s, "the waiting that this many loader processes hide, at the present rate"),
                numbers=loading.numbers,
                steps=steps.span,
            )
        if loading.per_core > self.most_per_core and not loading.is_for_storage(storage.waiting_share):
            cores = case.rule(CoresOversubscribed)
            if cores.enabled and not waits and cores.taken_by(case) == "loaders":
                return case.explained_by(cores)
            wanted = max(0, steps.record.cores // steps.processes_here() - 1)
            cause = f"{waiting}, and" if waits else "There are more processes than cores:"
            return Finding(
                severity="warning" if waits else "note",
                confidence=0.7 if waits else 0.5,
                text=f"{cause} {loading.processes}: they take the cores from one another, and memory.",
                advice=f"Let fewer processes load: {case.workers_setting}={wanted}, or auto, which measures how many keep up.",
                saving=Saving(share * steps.total_s, "the waiting for data") if waits else None,
                numbers=loading.numbers,
                steps=steps.span,
            )
        return Healthy(f"{loading.processes}; {loading.share(loading.waiting_s):.0%} of a step waits for data.")


class CpuBottleneck(SystemRule, rules.CpuBottleneckThresholds):
    """A device that waits while the processor is busy.

    Fires when more than `waiting_share` of the steps' time waits for batches that processors make (`own_share` where a CPU trains and
    loads itself), and the number of loader processes fits the cores; or a core is busy (above `busy_percent`) beside an idle GPU (below
    `gpu_percent`) in more than `share` of the samples.

    Needs phase `data` of the steps; CPU time as for the I/O bottleneck; use of the cores and of the GPU.
    Advises views and decoding on the GPU, smaller stored images, more cores.
    """

    title: ClassVar = "CPU bottleneck"

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
            if other := case.first_cause(CoresOversubscribed):
                return other
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


Taker = Literal["loaders", "threads", "processes", "others"]
"""Who has the cores: loader processes, threads of the training processes beside the one that trains, more training processes than cores, or
other programs on the machine."""


@dataclass(frozen=True, kw_only=True)
class CoresInUse:
    """Who has the cores of the machine of a training process, while that is at its steps."""

    processes: int  # training processes on the machine
    cores: int  # cores that they may use
    training: float  # cores in use by the training
    loaders: float
    others: float
    busiest_percent: float  # use of the busiest core, in the median

    @property
    def percent(self) -> float:
        """Mean use of the cores that the processes may use."""
        return 100 * (self.training + self.loaders + self.others) / self.cores


@dataclass(frozen=True, kw_only=True)
class CoreShortage:
    """How long the training process with the median shortage was ready and had no core, and who had the cores meanwhile."""

    number: int  # of the process
    waiting_s: float  # in a usual step
    waiting_share: float  # of the steps' time
    idle_share: float  # of the time at steps in which the GPU idled; 1 without a GPU, or where its use is not known
    is_found: bool  # whether the shortage exceeds the limit while cores are busy
    phase: str  # the phase with most of the shortage, in words
    use: CoresInUse

    @property
    def share(self) -> float:
        """Share of the steps' time that is lost: a GPU that has work continues without its host."""
        return min(self.waiting_share, self.idle_share)

    @property
    def taker(self) -> Taker:
        use = self.use
        beyond: dict[Taker, float] = {
            "loaders": use.loaders,
            "threads": use.training - use.processes,
            "processes": float(use.processes - use.cores),
            "others": use.others,
        }
        return max(beyond, key=lambda taker: beyond[taker])


class CoresOversubscribed(SystemRule, rules.CoresOversubscribedThresholds):
    """Loader processes, or others, that have the cores which the training needs.

    Fires when a process that trains was ready and had no core for more than `share` of the steps' time, in whichever phase (`own_share`
    where a CPU trains, which shares its cores with loading by nature), while cores were busy (above `busy_percent`). On a GPU, which keeps
    working, only its idle time counts. The finding names who had the cores; if other programs on the machine did, it is a note, which
    spoils no verdict. Waiting for batches is left to the rules on loading.

    Needs how long the training was ready and had no core, which Linux counts; use of the cores; CPU time of the training and its loaders.
    Advises fewer loader processes or threads.
    """

    def judge(self, case: Case) -> Outcome:
        found = self._shortage(case)
        if isinstance(found, NotJudged):
            return found
        steps = Steps(case)
        record, use = steps.ranks[found.number].record, found.use
        waited = f"For {formatting.percent(found.waiting_share)} of a step the training was ready and had no core"
        if found.idle_share < 1:
            waited += f", and the GPU idles for {formatting.percent(found.idle_share)}"
        had = (
            f"of the {use.cores} cores of {record.host} loader processes take {use.loaders:.1f}, the training "
            f"{use.training:.1f}, other programs {use.others:.1f}"
        )
        if not found.is_found:
            return Healthy(f"{waited}; {had}.")
        workers, setting, seconds = record.workers or 0, case.workers_setting, found.share * steps.total_s
        each = use.loaders / max(1, workers * use.processes)
        fewer = max(0, min(workers // 2, int((use.cores / use.processes - 1) / max(each, 1.0))))
        threads = max(1, use.cores // use.processes)
        who, advice, reason = {
            "loaders": (
                f"Loader processes take the cores: {workers} beside each training process",
                (
                    f"Let fewer processes load: {setting}={fewer} in place of {workers}, one thread in each (OMP_NUM_THREADS=1; "
                    "libraries that decode have settings of their own)."
                ),
                "the time without a core, if fewer loader processes still keep up",
            ),
            "threads": (
                "The training's own threads take the cores from one another",
                f"Start fewer threads: OMP_NUM_THREADS={threads} for each of {use.processes} training processes.",
                "",
            ),
            "processes": (
                f"{use.processes} training processes share {use.cores} cores",
                f"Start at most {use.cores} training processes on the machine, or take one with more cores.",
                "",
            ),
            "others": (
                "Other programs on the machine take the cores",
                "Give the training cores of its own (on Kubernetes requests that equal its limits), or end what else runs there.",
                "the time without a core",
            ),
        }[found.taker]
        return Finding(
            severity="note" if found.taker == "others" else "warning",
            confidence=0.8,
            text=f"{who}. {waited}, mostly in {found.phase}, though its batches were there: {had}.",
            advice=advice,
            saving=Saving(seconds, reason) if reason else None,
            numbers={
                "without_core_share": found.waiting_share,
                "without_core_s": found.waiting_s,
                "loaders_cores": use.loaders,
                "training_cores": use.training,
                "other_cores": use.others,
                "workers": float(workers),
            },
            steps=steps.span,
        )

    def taken_by(self, case: Case) -> Taker | None:
        """Return who has the cores that the training lacks; None where it does not lack them, or that is not known."""
        found = self._shortage(case)
        return found.taker if isinstance(found, CoreShortage) and found.is_found else None

    def _shortage(self, case: Case) -> CoreShortage | NotJudged:
        steps = Steps(case)
        if steps.too_few:
            return steps.too_few
        delayed = steps.column("host_delayed_seconds")
        if not np.isfinite(delayed).all():
            return NotJudged("how long the training was ready and had no core was not recorded")
        workers = case.rule(LoaderWorkers)
        loading = diagnose(steps, busy_loader_percent=case.rule(IoBottleneck).loader_percent)
        if loading.is_for_processor(workers.waiting_share, workers.own_share):
            return NotJudged("the training waits for its batches, which comes first (loader_workers, cpu_bottleneck)")
        shares = winsorized_mean(delayed) / np.maximum(winsorized_mean(steps.seconds), 1e-9)
        number = int(np.argsort(shares)[(len(shares) - 1) // 2])
        rank = steps.ranks[number]
        use = cores_in_use(case, number)
        if use is None:
            return NotJudged("the use of the cores was not sampled")
        parts = {
            "`data`": steps.column("host_data_delayed_seconds"),
            "`backward`": steps.column("host_backward_delayed_seconds"),
        }
        spent = {name: float(winsorized_mean(values[number])) for name, values in parts.items()}
        spent["the other phases"] = float(winsorized_mean(delayed[number])) - sum(spent.values())
        waiting_share, idle_share = min(1.0, float(shares[number])), 1 - _mean(rank, "gpu_percent") / 100
        limit = self.share if steps.on_gpu or case.is_traced else self.own_share
        of_training = 100 * (use.training + use.loaders)
        is_busy = use.busiest_percent > self.busy_percent or of_training > self.busy_percent * use.cores
        return CoreShortage(
            number=number,
            waiting_s=float(winsorized_mean(delayed[number])),
            waiting_share=waiting_share,
            idle_share=idle_share,
            is_found=is_busy and min(waiting_share, idle_share) > limit,
            phase=max(spent, key=lambda name: spent[name]),
            use=use,
        )


def cores_in_use(case: Case, number: int = 0) -> CoresInUse | None:
    """Measure who has the cores of the machine of a process; None where their use was not sampled."""
    steps = Steps(case)
    rank = steps.ranks[number]
    here = [each for each in steps.ranks if each.record.host == rank.record.host]
    cores = next((found for found in map(_core_use, here) if len(found)), None)
    if cores is None:
        return None
    processes = max(len(here), steps.processes_here() if len(steps.ranks) < steps.record.world_size else 1)
    training, loaders = (
        processes * float(np.mean([_mean(each, f"{name}_cpu_percent") for each in here])) / 100
        for name in ("process", "loaders")
    )
    # those that are busiest: which ones a process may use is not recorded
    taken = float(np.sort(cores.mean(axis=1))[-rank.record.cores :].sum()) / 100
    return CoresInUse(
        processes=processes,
        cores=rank.record.cores,
        training=training,
        loaders=loaders,
        others=max(0.0, taken - training - loaders),
        busiest_percent=float(np.median(cores.max(axis=0))),
    )


def _core_use(rank: RankEvidence) -> Series:
    """Collect how busy each core of a process's machine was at its steps, in percent, [cores, samples]; empty where that is unknown."""
    cores = [values for name, values in rank.system.items() if is_core(name)]
    known: Series = np.array(cores)[:, within_steps(rank)] if cores else np.empty((0, 0))
    known = known[:, np.isfinite(known).all(axis=0)]
    return known if known.size else np.empty((0, 0))


def _mean(rank: RankEvidence, signal: str) -> float:
    """Average a signal while the process was at its steps; 0 where it was not sampled."""
    values = rank.system.get(signal, np.full(len(rank.system["end_s"]), np.nan))
    known = values[np.isfinite(values) & within_steps(rank)]
    return float(known.mean()) if len(known) else 0.0


def _ms(seconds: float) -> str:
    return f"{1e3 * seconds:.3g} ms"
