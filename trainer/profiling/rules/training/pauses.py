"""The rule on a training in which nothing happens."""

from __future__ import annotations

import numpy as np

from trainer.profiling.evidence import RankEvidence, Spans
from trainer.profiling.rules.outcomes import Case, Finding, Healthy, NotJudged, Outcome, Rule, Saving
from trainer.profiling.series import Series

_ADVICE = (
    "Look at the log and the machine of that time: storage that did not answer, a loader process or another process of the job that hung, "
    "a machine that was paused."
)


def hanging(seconds: float, step: int, place: str) -> Finding:
    """Return the finding on a training in which no step has ended for some time, reported while that lasts.

    Args:
        seconds: how long.
        step: the last one that ended.
        place: in the code, where the training is.
    """
    return Finding(
        severity="severe",
        confidence=0.9,
        text=f"No step has ended for {seconds:,.0f} s, since step {step + 1}; the first process is in {place}.",
        advice=_ADVICE,
        saving=None,
        numbers={"longest_s": seconds},
        steps=(step, step + 1),
    )


def _judge_stalled(case: Case) -> Outcome:
    rank, limit = case.training.ranks[0], case.rules.stalled_training.seconds
    if len(rank.steps["step"]) < 2:
        return NotJudged(reason="fewer than two steps were measured", too_short=True)
    pauses = _pauses(rank)
    worst = int(pauses.argmax())
    if pauses[worst] <= limit:
        return Healthy(text=f"the longest time without a step was {pauses[worst]:.3g} s")
    before, after = int(rank.steps["step"][worst]), int(rank.steps["step"][worst + 1])
    start_s = float(rank.steps["start_s"][worst] + rank.steps["seconds"][worst])
    stalls = pauses[pauses > limit]
    times = f"{len(stalls)} times, together for {stalls.sum():,.0f} s; the longest time" if len(stalls) > 1 else ""
    return Finding(
        severity="severe",
        confidence=0.9,
        text=(
            f"No step ended for {pauses[worst]:,.0f} s between steps {before + 1} and {after + 1} (limit {limit:g} s), with no validation "
            f"or checkpoint to account for it{'; it happened ' + times if times else ''}."
        ),
        advice=_ADVICE,
        saving=Saving(seconds=float(stalls.sum()), reason="the time without a step"),
        numbers={"longest_s": float(pauses[worst]), "stalls": float(len(stalls))},
        window_s=(start_s, start_s + float(pauses[worst])),
        steps=(before, after),
    )


def _pauses(rank: RankEvidence) -> Series:
    """Compute the time from the end of each step in the table to the end of the next.

    Less ranges outside of steps, time in the compiler, and steps that the table left out.
    """
    ends = rank.steps["start_s"] + rank.steps["seconds"]
    left_out = np.maximum(np.diff(rank.steps["step"]) - 1, 0) * np.median(rank.steps["seconds"])
    return np.asarray(np.diff(ends) - left_out - _spent_between(rank.spans, ends) - _spent_compiling(rank))


def _spent_between(spans: Spans, ends: Series) -> Series:
    """Sum the seconds of the ranges outside of steps, in each of the times between two ends."""
    spent = np.zeros(len(ends) - 1)
    middles = spans.start_s + spans.seconds / 2  # a start may be rounded to before the end of the step
    places = np.searchsorted(ends, middles) - 1
    inside = (places >= 0) & (places < len(spent))
    np.add.at(spent, places[inside], spans.seconds[inside])
    return spent


def _spent_compiling(rank: RankEvidence) -> Series:
    """Sum the seconds in the compiler, in each of the times between two ends."""
    numbers = rank.steps["step"]
    spent = np.zeros(len(numbers) - 1)
    for compilation in rank.record.compilations:
        place = int(np.searchsorted(numbers, numbers[0] + compilation.step)) - 1
        if 0 <= place < len(spent):
            spent[place] += compilation.seconds
    return spent


STALLED_TRAINING = Rule(
    name="stalled_training",
    kind="training",
    title="Stalled training",
    needs="Two steps.",
    fires=(
        "For longer than `seconds` no step ends, compilation, validation, checkpoints and other named ranges taken off. While the training "
        "runs, an alarm reports it after that time without waiting for the next step."
    ),
    advises="Looking at the storage, the loader processes and the other processes of the job.",
    judge=_judge_stalled,
)
