"""The rules on a training's start-up, recompilation, slow single steps, growing memory, and the cost of recording it."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import pairwise

import numpy as np

from trainer.costs import duration_text
from trainer.profiling.evidence import RankEvidence
from trainer.profiling.rules.causes import first_cause
from trainer.profiling.rules.outcomes import Case, Finding, Healthy, NotJudged, Outcome, Rule, Saving
from trainer.profiling.rules.system.compared_steps import Steps, within_steps
from trainer.profiling.rules.system.loading import CPU_BOTTLENECK, IO_BOTTLENECK, LOADER_WORKERS
from trainer.profiling.rules.system.tracing import cause_of, is_traced
from trainer.profiling.series import Rows, Series
from trainer.profiling.throughput import phase_of, step_ms

_AVOIDABLE: Mapping[str, str] = {
    "compile": "keep compiled graphs between runs (TORCHINDUCTOR_CACHE_DIR on a volume that stays), or set compile=off",
    "fetch": "keep inputs where the training runs (TRAINER_CACHE on a volume that stays), or in a nearer object store",
}
"""Part of the start-up that need not be -> what makes it short."""
_ON_XLA: Mapping[str, str] = {
    **_AVOIDABLE,
    "compile": "keep compiled graphs between runs (NEURON_COMPILE_CACHE_URL), and compile them beforehand (make neuron-warm-up)",
}
_KEEP_GRAPHS = (
    "Keep shapes and Python values that the model reads the same from step to step (TORCH_LOGS=recompiles names the one that changed), "
    "or set compile=off."
)
_PARTS = 6
"""Parts of a training in each of which a leak shows."""
_FEWEST_SAMPLES = 3
"""In each of them."""
_STEADY = 0.2
"""In each of them memory grows by at least this share of what it grows on average."""
_ONCE = frozenset({"operators"})
"""Work of the recorder that a longer training has no more of: the windows of operators."""
_MEMORY: Mapping[str, str] = {
    "gpu_memory_allocated_bytes": "the GPU",
    "device_memory_used_bytes": "the device",
    "process_private_bytes": "the process",
    "process_rss_bytes": "the process",
}
"""Signal of memory that a training holds -> whose; the first of each owner that was recorded counts."""
_SIZES: Mapping[str, str] = {"the GPU": "gpu_memory_total_bytes", "the device": "device_memory_total_bytes"}
"""Owner -> signal of how much it has; the machine's memory where there is none."""


def _start_up(case: Case) -> Outcome:
    rank, limits = case.training.ranks[0], case.rules.start_up
    record = rank.record
    if record.first_step_s is None:
        return NotJudged(reason="no step has ended")
    parts = dict(record.startup)
    if not parts:
        return NotJudged(reason="the parts of the start-up were not recorded")
    seconds = sum(parts.values())
    summary = ", ".join(
        f"{name} {duration_text(part)}" for name, part in sorted(parts.items(), key=lambda item: -item[1])
    )
    is_long = seconds > 60 * limits.largest_minutes
    share = seconds / case.stage_s if case.stage_s else 0.0  # how long a stage takes is known at its end
    whole = f", {share:.0%} of the stage's {duration_text(case.stage_s)}" if case.stage_s else ""
    if not is_long and (share <= limits.share or seconds < limits.fewest_seconds):
        return Healthy(text=f"The first step ended after {duration_text(seconds)}{whole}: {summary}.")
    avoidable = {name: parts[name] for name in _AVOIDABLE if parts.get(name)}
    cures = [
        (_ON_XLA if is_traced(rank) else _AVOIDABLE)[name]
        for name in sorted(avoidable, key=lambda name: -avoidable[name])
    ]
    advice = "; ".join(cures) or "find out what the longest part waits for"
    if not is_long:
        advice += "; a longer training bears a start-up better"
    return Finding(
        severity="warning" if is_long else "note",
        confidence=0.9,
        text=f"The first step ended only after {duration_text(seconds)}{whole}: {summary}.",
        advice=f"{advice[0].upper()}{advice[1:]}.",
        saving=Saving(seconds=sum(avoidable.values()), reason=f"the parts {' and '.join(avoidable)}")
        if avoidable
        else None,
        numbers={f"{name}_s": part for name, part in parts.items()} | ({"startup_share": share} if share else {}),
        window_s=(0.0, record.first_step_s),
    )


def _step_outliers(case: Case) -> Outcome:
    limits = case.rules.step_outliers
    steps = Steps(case, ignored=limits.ignored)
    if steps.too_few:
        return steps.too_few
    seconds = steps.undisturbed
    median, limit = float(np.median(seconds)), float(seconds.mean() + limits.sigmas * seconds.std())
    far = np.flatnonzero(seconds > limit)
    excess_s = float((seconds[far] - median).sum()) * steps.record.steps.kept_of
    share = excess_s / max(steps.total_s, 1e-9)
    usual = step_ms(steps.ranks[0])
    assert usual is not None, "there are steps to compare"
    summary = (
        f"{len(far)} of {len(steps)} steps took longer than {1e3 * limit:.3g} ms, without what other programs took of them (median of all "
        f"steps {usual.p50:.3g} ms), which cost {share:.1%} of the steps' time"
    )
    if share <= limits.share:
        return Healthy(text=f"{summary}.")
    other = first_cause(case, IO_BOTTLENECK, LOADER_WORKERS, CPU_BOTTLENECK, RECOMPILATION)
    if other is not None:
        return other
    phase = _longer_phase(steps, far)
    return Finding(
        severity="warning",
        confidence=0.7,
        text=f"{summary}; most of it in `{phase}`. The longest was step {int(steps.numbers[int(seconds.argmax())])}.",
        advice=(
            "Look at what else happened at these steps: storage, other programs on the machine, garbage collection, or what "
            f"`{phase}` does now and then."
        ),
        saving=Saving(seconds=excess_s, reason="these steps' time above the median of the undisturbed ones"),
        numbers={"outliers": float(len(far)), "limit_s": limit, "median_step_ms": usual.p50, "excess_s": excess_s},
        steps=(int(steps.numbers[far[0]]), int(steps.numbers[far[-1]])),
    )


def _longer_phase(steps: Steps, far: Rows) -> str:
    """Find the phase that is longest in these steps relative to its median."""
    phases = dict.fromkeys(phase_of(path) for path in steps.ranks[0].ranges if path != "recorder")

    def excess(phase: str) -> float:
        seconds = steps.phase(phase)[0]
        return float((seconds[far] - np.median(seconds)).sum())

    return max(phases, key=excess)


def _memory_growth(case: Case) -> Outcome:
    rank, limit = case.training.ranks[0], case.rules.gpu_memory_growth.growth
    signals = {
        owner: name
        for name, owner in reversed(list(_MEMORY.items()))
        if np.isfinite(rank.system.get(name, np.array([]))).any()
    }
    if not signals:
        return NotJudged(reason="no memory was sampled")
    by_owner = {owner: _levels(rank, name) for owner, name in signals.items()}
    if all(levels is None for levels in by_owner.values()):
        return NotJudged(
            reason=f"fewer than {_FEWEST_SAMPLES} samples of memory were taken in a part of the steps", too_short=True
        )
    for owner, levels in by_owner.items():
        if levels is not None and _grows_steadily(levels, limit):
            return _leak(rank, owner, levels)
    summary = " ".join(
        f"Memory of {owner} went from {_mib(levels[0])} to {_mib(levels[-1])}."
        for owner, levels in by_owner.items()
        if levels is not None
    )
    return Healthy(text=summary)


def _levels(rank: RankEvidence, name: str) -> Series | None:
    """Median of the signal in each part of the steps after their first quarter, which warms up; none where there are too few samples."""
    usable = np.isfinite(rank.system[name]) & within_steps(rank)
    values, done = rank.system[name][usable], np.searchsorted(rank.steps["start_s"], rank.system["end_s"][usable])
    edges = np.linspace(len(rank.steps["step"]) / 4, len(rank.steps["step"]), _PARTS + 1)
    parts = [values[(done > low) & (done <= high)] for low, high in pairwise(edges)]
    if min(len(part) for part in parts) < _FEWEST_SAMPLES:
        return None
    return np.array([np.median(part) for part in parts])


def _grows_steadily(levels: Series, limit: float) -> bool:
    rises, whole = np.diff(levels), levels[-1] - levels[0]
    return bool(whole > limit * levels[0] and rises.min() > _STEADY * whole / len(rises))


def _leak(rank: RankEvidence, owner: str, levels: Series) -> Finding:
    seconds = 0.75 * (rank.record.ended_s - (rank.record.first_step_s or 0.0)) * (_PARTS - 1) / _PARTS
    an_hour = (levels[-1] - levels[0]) / max(seconds, 1e-9) * 3600
    sizes = rank.system.get(_SIZES.get(owner, ""), [rank.record.memory_bytes])
    left_h = max(0.0, float(sizes[-1]) - float(levels[-1])) / an_hour
    return Finding(
        severity="warning",
        confidence=0.8,
        text=(
            f"Memory of {owner} grows all the time, from {_mib(levels[0])} to {_mib(levels[-1])} after the warm-up; at this "
            "rate it is full in "
            f"{left_h:.1f} h."
        ),
        advice=(
            "Look for what is kept from step to step: losses or outputs with their graphs in a list (detach them), a cache "
            "without a limit, "
            "tensors on an object that lives on."
        ),
        saving=None,
        numbers={"first_bytes": float(levels[0]), "last_bytes": float(levels[-1]), "bytes_an_hour": float(an_hour)},
    )


def _mib(value: float) -> str:
    return f"{value / 2**20:.0f} MiB"


def _recompilation(case: Case) -> Outcome:
    rank, after = case.training.ranks[0], case.rules.recompilation.after_steps
    record = rank.record
    if not record.compilations:
        return NotJudged(reason="nothing was compiled")
    late = [one for one in record.compilations if one.step >= after]
    graphs, seconds = sum(one.graphs for one in late), sum(one.seconds for one in late)
    if not graphs:
        return Healthy(
            text=f"{sum(one.graphs for one in record.compilations)} graphs were compiled, all in the first {after} steps."
        )
    cause, advice = cause_of(rank, late) if is_traced(rank) else ("", _KEEP_GRAPHS)
    return Finding(
        severity="warning",
        confidence=0.9,
        text=(
            f"{graphs} graphs were compiled again after {after} steps (first after step {late[0].step}), which took "
            f"{duration_text(seconds)}. {cause}".rstrip()
        ),
        advice=advice,
        saving=Saving(seconds=seconds, reason="the time inside of the compiler after these steps"),
        numbers={"graphs": float(graphs), "seconds": seconds},
        steps=(late[0].step, late[-1].step),
    )


def _own_overhead(case: Case) -> Outcome:
    record, limits = case.training.ranks[0].record, case.rules.own_overhead
    if not record.overhead:
        return NotJudged(reason="what recording costs was not recorded")
    if record.ended_s < limits.fewest_seconds:
        lasts, needed = duration_text(record.ended_s), duration_text(limits.fewest_seconds)
        return NotJudged(reason=f"the recording lasts {lasts}; {needed} are needed", too_short=True)
    going_on = {name: seconds for name, seconds in record.overhead.items() if name not in _ONCE}
    seconds = sum(going_on.values())
    share = seconds / record.ended_s
    parts = sorted(record.overhead.items(), key=lambda item: -item[1])
    summary = ", ".join(f"{name} {duration_text(part)}{' (once)' * (name in _ONCE)}" for name, part in parts)
    if share <= limits.share:
        return Healthy(text=f"Recording costs {share:.2%} of the training's time: {summary}.")
    return Finding(
        severity="warning",
        confidence=0.9,
        text=f"Recording costs {share:.1%} of the training's time: {summary}.",
        advice="Look more rarely: evidence.tensors_every, evidence.tensors_budget and evidence.system_interval_s.",
        saving=Saving(seconds=seconds - limits.share * record.ended_s, reason="what it costs above the limit"),
        numbers={f"{name}_s": part for name, part in record.overhead.items()} | {"overhead_share": share},
    )


START_UP = Rule(
    name="start_up",
    kind="system",
    title="Start-up",
    needs="the parts of the start-up; after the training also how long its stage took",
    fires=(
        "the first step ended later than `largest_minutes` after the process began, or after the end of the training before it; or, as a "
        "note, it took more than `share` of its stage's time and at least `fewest_seconds`"
    ),
    advises="a cache of compiled graphs, inputs near the machine",
    judge=_start_up,
)
RECOMPILATION = Rule(
    name="recompilation",
    kind="system",
    title="Recompilation",
    needs="when graphs were compiled",
    fires="a graph was compiled after more than `after_steps` steps",
    advises="shapes and values that stay the same, or no compilation; on XLA it names what probably changed",
    judge=_recompilation,
)
STEP_OUTLIERS = Rule(
    name="step_outliers",
    kind="system",
    title="Step outliers",
    needs="the duration of the steps, and how long the training's thread had no core",
    fires=(
        "steps after the first `ignored` that took longer than `sigmas` standard deviations above the mean cost more than "
        "`share` of the steps' time; "
        "not where another finding explains them, nor where other programs took the core"
    ),
    advises="what to look for, and in which phase",
    judge=_step_outliers,
)
MEMORY_GROWTH = Rule(
    name="gpu_memory_growth",
    kind="system",
    title="Memory growth",
    needs="samples of the memory that torch has allocated on the GPU, or that is used of an XLA device, and of the process's own memory",
    fires="either grows by more than `growth` after the first quarter of the training, and in every part of the rest",
    advises="what keeps graphs or tensors",
    judge=_memory_growth,
)
OWN_OVERHEAD = Rule(
    name="own_overhead",
    kind="system",
    title="Own overhead",
    needs="what the recorder measures of itself, in recordings of at least `fewest_seconds`",
    fires="recording takes more than `share` of the training's time, without the windows of operators, which are opened once",
    advises="rarer measurements of tensors",
    judge=_own_overhead,
)
