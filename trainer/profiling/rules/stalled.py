"""The rule on trainings in which nothing happens; an alarm reports the same while it lasts."""

from __future__ import annotations

import numpy as np

from trainer.config import rules
from trainer.profiling.rules.outcomes import Case, Finding, Healthy, Outcome, Saving, TrainingRule, too_short

_STALL_ADVICE = (
    "Look at the log and the machine of that time: storage that did not answer, a loader process or another process of the job that hung, "
    "a machine that was paused."
)


class StalledTraining(TrainingRule, rules.StalledTrainingThresholds):
    """A training in which nothing happens.

    Fires when for longer than `seconds` no step ends, compilation, validation, checkpoints and other named ranges taken off. While the
    training runs, an alarm reports it after that time without waiting for the next step.

    Needs two steps.
    Advises looking at the storage, the loader processes and the other processes of the job.
    """

    def judge(self, case: Case) -> Outcome:
        rank, limit = case.rank, self.seconds
        if len(rank.steps["step"]) < 2:
            return too_short("fewer than two steps were measured")
        # from the end of each step in the table to the end of the next, less steps that the table left out, ranges outside of steps, and
        # time in the compiler
        numbers, ends = rank.steps["step"], rank.steps["start_s"] + rank.steps["seconds"]
        pauses = np.diff(ends) - np.maximum(np.diff(numbers) - 1, 0) * np.median(rank.steps["seconds"])
        middles = rank.spans.start_s + rank.spans.seconds / 2  # a start may be rounded to before the end of the step
        places = np.searchsorted(ends, middles) - 1
        inside = (places >= 0) & (places < len(pauses))
        np.subtract.at(pauses, places[inside], rank.spans.seconds[inside])
        for compilation in rank.record.compilations:
            place = int(np.searchsorted(numbers, numbers[0] + compilation.step)) - 1
            if 0 <= place < len(pauses):
                pauses[place] -= compilation.seconds
        worst = int(pauses.argmax())
        if pauses[worst] <= limit:
            return Healthy(f"the longest time without a step was {pauses[worst]:.3g} s")
        before, after, start_s = int(numbers[worst]), int(numbers[worst + 1]), float(ends[worst])
        stalls = pauses[pauses > limit]
        times = f"{len(stalls)} times, together for {stalls.sum():,.0f} s; the longest time" if len(stalls) > 1 else ""
        return Finding(
            severity="severe",
            confidence=0.9,
            text=(
                f"No step ended for {pauses[worst]:,.0f} s between steps {before + 1} and {after + 1} (limit {limit:g} s), with no "
                f"validation or checkpoint to account for it{'; it happened ' + times if times else ''}."
            ),
            advice=_STALL_ADVICE,
            saving=Saving(float(stalls.sum()), "the time without a step"),
            numbers={"longest_s": float(pauses[worst]), "stalls": float(len(stalls))},
            window_s=(start_s, start_s + float(pauses[worst])),
            steps=(before, after),
        )


def hanging(seconds: float, step: int, place: str) -> Finding:
    """Return the finding on a training in which no step has ended for so long since `step`; `place` is its place in the code."""
    return Finding(
        severity="severe",
        confidence=0.9,
        text=f"No step has ended for {seconds:,.0f} s, since step {step + 1}; the first process is in {place}.",
        advice=_STALL_ADVICE,
        numbers={"longest_s": seconds},
        steps=(step, step + 1),
    )
