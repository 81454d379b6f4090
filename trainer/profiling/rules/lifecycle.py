"""The rules on a training's course: start-up, recompilation, slow steps, growing memory, and the cost of recording it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import ClassVar

import numpy as np

from trainer.config import rules
from trainer.io.formatting import duration
from trainer.profiling.evidence import CompilationRecord, RankEvidence, phase_of, step_ms
from trainer.profiling.rules.compared_steps import XLA_DEBUG, Steps, within_steps
from trainer.profiling.rules.loading import (
    CoresOversubscribed,
    CpuBottleneck,
    IoBottleneck,
    LoaderWorkers,
    cores_in_use,
)
from trainer.profiling.rules.outcomes import Case, Finding, Healthy, NotJudged, Outcome, Saving, SystemRule, too_short
from trainer.profiling.rules.processes import Communication, LoadBalance, Stragglers
from trainer.profiling.series import Series

_AVOIDABLE: Mapping[str, str] = {
    "compile": "keep compiled graphs between runs (TORCHINDUCTOR_CACHE_DIR on a volume that stays), or set compile=off",
    "fetch": "keep inputs where the training runs (TRAINER_CACHE on a volume that stays), or in a nearer object store",
}  # part of the start-up that need not be -> what makes it short
_ON_XLA: Mapping[str, str] = {
    **_AVOIDABLE,
    "compile": "keep compiled graphs between runs (NEURON_COMPILE_CACHE_URL), and compile them beforehand (make neuron-warm-up)",
}
_PARTS = 6  # a leak shows in each of this many parts of a training
_FEWEST_SAMPLES = 3  # samples in each part
_STEADY = 0.2  # least growth of memory in each part, as a share of the average growth
_MEMORY: Mapping[str, str] = {
    "gpu_memory_allocated_bytes": "the GPU",
    "device_memory_used_bytes": "the device",
    "process_private_bytes": "the process",
    "process_rss_bytes": "the process",
}  # signal of memory that a training holds -> whose; the first of each owner that was recorded counts
_WITHIN_STEPS = {"gpu_memory_allocated_bytes"}
"""Signals that rise and fall within each step: a leak raises their lowest samples, so the minimum counts in place of the median."""
_SIZES: Mapping[str, str] = {"the GPU": "gpu_memory_total_bytes", "the device": "device_memory_total_bytes"}
"""Owner -> signal of its total memory; without one, the memory of the machine."""
_KEEP_GRAPHS = (
    "Keep shapes and Python values that the model reads the same from step to step (TORCH_LOGS=recompiles names the one that changed), "
    "or set compile=off."
)


class StartUp(SystemRule, rules.StartUpThresholds):
    """A long time before the first step.

    Fires when the first step ended later than `largest_minutes` after the process began, or after the end of the training before it; or,
    as a note, it took more than `share` of its stage's time and at least `fewest_seconds`.

    Needs the parts of the start-up; after the training also how long its stage took.
    Advises a cache of compiled graphs, inputs near the machine.
    """

    title: ClassVar = "Start-up"

    def judge(self, case: Case) -> Outcome:
        record = case.record
        if record.first_step_s is None:
            return NotJudged("no step has ended")
        parts = dict(record.startup)
        if not parts:
            return NotJudged("the parts of the start-up were not recorded")
        seconds = sum(parts.values())
        longest = sorted(parts, key=lambda name: -parts[name])
        summary = ", ".join(f"{name} {duration(parts[name])}" for name in longest)
        is_long = seconds > 60 * self.largest_minutes
        share = seconds / case.stage_s if case.stage_s else 0.0  # how long a stage takes is known at its end
        whole = f", {share:.0%} of the stage's {duration(case.stage_s)}" if case.stage_s else ""
        if not is_long and (share <= self.share or seconds < self.fewest_seconds):
            return Healthy(f"The first step ended after {duration(seconds)}{whole}: {summary}.")
        avoidable = {name: parts[name] for name in _AVOIDABLE if parts.get(name)}
        cures = _ON_XLA if case.is_traced else _AVOIDABLE
        advice = "; ".join(cures[name] for name in longest if name in avoidable)
        advice = advice or "find out what the longest part waits for"
        saving = Saving(sum(avoidable.values()), f"the parts {' and '.join(avoidable)}")
        if not is_long:
            advice += "; a longer training bears a start-up better"
        return Finding(
            severity="warning" if is_long else "note",
            confidence=0.9,
            text=f"The first step ended only after {duration(seconds)}{whole}: {summary}.",
            advice=f"{advice[0].upper()}{advice[1:]}.",
            saving=saving if avoidable else None,
            numbers={f"{name}_s": part for name, part in parts.items()} | ({"startup_share": share} if share else {}),
            window_s=(0.0, record.first_step_s),
        )


class UnevenSteps(SystemRule, rules.UnevenStepsThresholds):
    """Steps that take turns between fast and slow.

    Fires when the median change from one step's duration to the next is above `spread` of the median step, which neither a few
    outliers nor a slow drift moves; and the time above that of the fastest quarter is more than `share` of the steps' time. Where the
    cores are full (above `busy_percent`, in the mean of all) and the kernel does not count the time without a core, it names who has
    them. Not where another finding explains it.

    Needs the duration of the steps and their phases; use of the cores; all processes' steps, if there are several.
    Advises fewer loader processes or threads where the cores are full; else what to look for, and in which phase.
    """

    def judge(self, case: Case) -> Outcome:
        steps = Steps(case)
        if steps.too_few:
            return steps.too_few
        if case.live and steps.record.world_size > 1:
            return NotJudged("while a training runs, only one process's record is at hand")
        seconds = steps.undisturbed
        change, median = float(np.median(np.abs(np.diff(seconds)))), float(np.median(seconds))
        spread = change / max(median, 1e-9)
        share = float(np.maximum(seconds - np.quantile(seconds, 0.25), 0).mean() / max(steps.seconds.mean(), 1e-9))
        summary = (
            f"From one step to the next the duration changes by {spread:.0%} of the median step ({1e3 * median:.3g} ms)"
        )
        if spread <= self.spread or share <= self.share:
            return Healthy(f"{summary}, without what other programs took.")
        on_gpu = [CoresOversubscribed] if steps.on_gpu else []  # on a CPU their share is subtracted above
        causes = (IoBottleneck, LoaderWorkers, CpuBottleneck, Recompilation, Stragglers, LoadBalance, Communication)
        if other := case.first_cause(*causes, *on_gpu):
            return other
        phases = dict.fromkeys(phase_of(path) for path in steps.ranks[0].ranges if path != "recorder")
        changes = {name: float(np.median(np.abs(np.diff(steps.phase(name)[0])))) for name in phases}
        phase = max(changes, key=changes.__getitem__)
        p5, p95 = np.percentile(steps.phase(phase)[0], (5, 95)).tolist()
        text = (
            f"{summary}, most of it in `{phase}`, which takes between {duration(p5)} and {duration(p95)} (5 and 95 %)."
        )
        advice = (
            f"Look at what `{phase}` does in every few steps, whether batches differ in size or shape, and what else runs on the machine "
            "and its network."
        )
        # Where it was recorded, the time without a core was judged above.
        use = None if np.isfinite(steps.column("host_delayed_seconds")).all() else cores_in_use(case)
        taken = {}
        if use is not None and use.percent > self.busy_percent:
            taken = {"loaders_cores": use.loaders, "training_cores": use.training, "other_cores": use.others}
            text += (
                f" All {use.cores} cores are taken ({use.percent:.0f} %): loader processes take {use.loaders:.1f}, the training "
                f"{use.training:.1f}, other programs {use.others:.1f}; a step that gets no core waits."
            )
            threads = (
                f"one thread in each process (OMP_NUM_THREADS={max(1, use.cores // use.processes)} in the training's)"
            )
            workers = steps.record.workers or 0
            fewer = (
                f"fewer loader processes ({case.workers_setting}={workers // 2} in place of {workers}, then 1 and 0), "
            )
            advice = (
                f"Leave cores for the training: {fewer if workers else ''}{threads}, or no other programs beside it."
            )
        return Finding(
            confidence=0.7 if taken else 0.6,
            text=text,
            advice=advice,
            saving=Saving(share * steps.total_s, "the steps if each were as fast as the fastest quarter"),
            numbers={"spread": spread, "slow_share": share, "median_step_ms": 1e3 * median} | taken,
            steps=steps.span,
        )


class StepOutliers(SystemRule, rules.StepOutliersThresholds):
    """Single steps that take far longer than the others.

    Fires when steps after the first `ignored` that took longer than `sigmas` standard deviations above the mean cost more than `share`
    of the steps' time, and a single one more than `alone_seconds`, too; not where another finding explains them, nor where other programs
    took the core.

    Needs the duration of the steps, and how long the training's thread had no core.
    Advises what to look for, and in which phase.
    """

    def judge(self, case: Case) -> Outcome:
        steps = Steps(case, ignored=self.ignored)
        if steps.too_few:
            return steps.too_few
        seconds = steps.undisturbed
        median, limit = float(np.median(seconds)), float(seconds.mean() + self.sigmas * seconds.std())
        far = np.flatnonzero(seconds > limit)
        kept_of = steps.record.steps.kept_of  # steps for which a row of the record stands
        excess_s = float((seconds[far] - median).sum()) * kept_of
        share = excess_s / max(steps.total_s, 1e-9)
        usual = step_ms(steps.ranks[0])
        assert usual is not None, "there are steps to compare"
        summary = (
            f"{len(far)} of {len(steps)} steps took longer than {1e3 * limit:.3g} ms, without what other programs took of them (median "
            f"of all steps {usual.p50:.3g} ms), which cost {share:.1%} of the steps' time"
        )
        if share <= self.share or (len(far) * kept_of == 1 and excess_s <= self.alone_seconds):
            return Healthy(f"{summary}.")
        on_gpu = [CoresOversubscribed] if steps.on_gpu else []  # on a CPU their share is subtracted above
        if other := case.first_cause(IoBottleneck, LoaderWorkers, CpuBottleneck, Recompilation, UnevenSteps, *on_gpu):
            return other
        excess = {}
        for name in dict.fromkeys(phase_of(path) for path in steps.ranks[0].ranges if path != "recorder"):
            spent = steps.phase(name)[0]
            excess[name] = float((spent[far] - np.median(spent)).sum())
        phase = max(excess, key=excess.__getitem__)
        return Finding(
            confidence=0.7,
            text=f"{summary}; most of it in `{phase}`. The longest was step {int(steps.numbers[int(seconds.argmax())]) + 1}.",
            advice=(
                "Look at what else happened at these steps: storage, other programs on the machine, garbage collection, or what "
                f"`{phase}` does now and then."
            ),
            saving=Saving(excess_s, "these steps' time above the median of the undisturbed ones"),
            numbers={"outliers": float(len(far)), "limit_s": limit, "median_step_ms": usual.p50, "excess_s": excess_s},
            steps=(int(steps.numbers[far[0]]), int(steps.numbers[far[-1]])),
        )


class GpuMemoryGrowth(SystemRule, rules.GpuMemoryGrowthThresholds):
    """Memory that grows from step to step.

    Fires when the memory of the device or of the process grows by more than `growth` after the first quarter of the training, and in every
    part of the rest.

    Needs samples of the memory that torch has allocated on the GPU, or that is used of an XLA device, and of the process's own memory.
    Advises what keeps graphs or tensors.
    """

    title: ClassVar = "Memory growth"

    def judge(self, case: Case) -> Outcome:
        rank, limit = case.rank, self.growth
        signals = {
            owner: name
            for name, owner in reversed(list(_MEMORY.items()))
            if np.isfinite(rank.system.get(name, np.array([]))).any()
        }
        if not signals:
            return NotJudged("no memory was sampled")
        found = {owner: _levels(rank, name) for owner, name in signals.items()}
        by_owner = {owner: levels for owner, levels in found.items() if levels is not None}
        if not by_owner:
            return too_short(f"fewer than {_FEWEST_SAMPLES} samples of memory were taken in a part of the steps")
        went = []
        for owner, levels in by_owner.items():
            rises, whole = np.diff(levels), levels[-1] - levels[0]
            change = f"from {levels[0] / 2**20:.0f} MiB to {levels[-1] / 2**20:.0f} MiB"
            if whole > limit * levels[0] and rises.min() > _STEADY * whole / len(rises):
                seconds = 0.75 * (rank.record.ended_s - (rank.record.first_step_s or 0.0)) * (_PARTS - 1) / _PARTS
                an_hour = whole / max(seconds, 1e-9) * 3600
                sizes = rank.system.get(_SIZES.get(owner, ""), [rank.record.memory_bytes])
                left_h = max(0.0, float(sizes[-1]) - float(levels[-1])) / an_hour
                return Finding(
                    confidence=0.8,
                    text=(
                        f"Memory of {owner} grows all the time, {change} after the warm-up; at this rate it is full in {left_h:.1f} h."
                    ),
                    advice=(
                        "Look for what is kept from step to step: losses or outputs with their graphs in a list (detach them), a cache "
                        "without a limit, tensors on an object that lives on."
                    ),
                    numbers={
                        "first_bytes": float(levels[0]),
                        "last_bytes": float(levels[-1]),
                        "hourly_bytes": float(an_hour),
                    },
                )
            went.append(f"Memory of {owner} went {change}.")
        return Healthy(" ".join(went))


def _levels(rank: RankEvidence, name: str) -> Series | None:
    """Level of the signal in each part of the steps after their first quarter, which warms up: its median, or the lowest value of one of
    `_WITHIN_STEPS`; none where there are too few samples.
    """
    usable = np.isfinite(rank.system[name]) & within_steps(rank)
    values, done = rank.system[name][usable], np.searchsorted(rank.steps["start_s"], rank.system["end_s"][usable])
    edges = np.linspace(len(rank.steps["step"]) / 4, len(rank.steps["step"]), _PARTS + 1)
    parts = [values[(done > low) & (done <= high)] for low, high in pairwise(edges)]
    if min(len(part) for part in parts) < _FEWEST_SAMPLES:
        return None
    level = np.min if name in _WITHIN_STEPS else np.median
    return np.array([level(part) for part in parts])


class Recompilation(SystemRule, rules.RecompilationThresholds):
    """Graphs that are compiled repeatedly.

    Fires when a graph was compiled after more than `after_steps` steps, but for the step in which the input grows to its full size
    (`low_resolution`).

    Needs when graphs were compiled.
    Advises shapes and values that stay the same, or no compilation; on XLA it names what probably changed.
    """

    def judge(self, case: Case) -> Outcome:
        compilations, after = case.record.compilations, self.after_steps
        if not compilations:
            return NotJudged("nothing was compiled")
        # compilations are counted from where this process began, or resumed
        began, planned = int(next(iter(case.rank.steps["step"]), 0)), case.grows_at
        late = [one for one in compilations if one.step >= after and began + one.step != planned]
        graphs, seconds = sum(one.graphs for one in late), sum(one.seconds for one in late)
        if not graphs:
            by_plan = f" or at step {planned + 1}, as the input grew" if planned else ""
            return Healthy(
                f"{sum(one.graphs for one in compilations)} graphs were compiled, all in the first {after} steps{by_plan}."
            )
        cause, advice = _what_changed(case.rank, late) if case.is_traced else ("", _KEEP_GRAPHS)
        first, last = began + late[0].step, began + late[-1].step
        return Finding(
            confidence=0.9,
            text=(
                f"{graphs} graphs were compiled again after {after} steps (first after step {first}), which took "
                f"{duration(seconds)}. {cause}".rstrip()
            ),
            advice=advice,
            saving=Saving(seconds, "the time inside of the compiler after these steps"),
            numbers={"graphs": float(graphs), "seconds": seconds},
            steps=(first, last),
        )


def _what_changed(rank: RankEvidence, late: Sequence[CompilationRecord]) -> tuple[str, str]:
    """Return the likely cause of repeated compilations on XLA and its cure, a sentence each."""
    debug = XLA_DEBUG.format("asked for each graph")
    unknown = (
        "A shape changed, or a Python value that the graph depends on.",
        f"Keep both the same from step to step; {debug}.",
    )
    if not len(rank.steps["step"]):
        return unknown
    steps = rank.steps["step"][0] + [one.step for one in late]
    images, usual = rank.steps["images"], float(np.median(rank.steps["images"]))
    images = images[np.isin(rank.steps["step"], steps)]
    changed = images[images != usual]
    if len(changed):
        return (
            f"The number of images had changed: {changed[0]:.0f} instead of {usual:.0f}.",
            "Give every step the same number of images, and pad or drop what is left over.",
        )
    if np.isin(steps, rank.tensors.steps).all():
        return (
            "All of these steps held a measurement of the weights.",
            "Look more rarely (evidence.tensors_every), or never (0).",
        )
    if len(late) > (rank.record.steps.count - late[0].step) / 2:
        return (
            "Nearly every step since then did: a number that changes in each step (a rate, a count) has become a constant of the graph.",
            f"Put such numbers into tensors on the device; {debug}.",
        )
    return unknown


class OwnOverhead(SystemRule, rules.OwnOverheadThresholds):
    """What watching costs.

    Fires when recording takes more than `share` of the training's time, without the windows of operators, which are opened once.

    Needs what the recorder measures of itself, in recordings of at least `fewest_seconds`.
    Advises rarer measurements of tensors.
    """

    def judge(self, case: Case) -> Outcome:
        record = case.record
        if not record.overhead:
            return NotJudged("what recording costs was not recorded")
        if record.ended_s < self.fewest_seconds:
            lasts, needed = duration(record.ended_s), duration(self.fewest_seconds)
            return too_short(f"the recording lasts {lasts}; {needed} are needed")
        # a longer training has no more windows of operators
        seconds = sum(part for name, part in record.overhead.items() if name != "operators")
        share = seconds / record.ended_s
        parts = sorted(record.overhead.items(), key=lambda item: -item[1])
        summary = ", ".join(f"{name} {duration(part)}{' (once)' * (name == 'operators')}" for name, part in parts)
        if share <= self.share:
            return Healthy(f"Recording costs {share:.2%} of the training's time: {summary}.")
        return Finding(
            confidence=0.9,
            text=f"Recording costs {share:.1%} of the training's time: {summary}.",
            advice="Look more rarely: evidence.tensors_every, evidence.tensors_budget and evidence.system_interval_s.",
            saving=Saving(seconds - self.share * record.ended_s, "what it costs above the limit"),
            numbers={f"{name}_s": part for name, part in record.overhead.items()} | {"overhead_share": share},
        )
