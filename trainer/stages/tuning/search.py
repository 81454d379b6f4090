"""Which candidate to measure next, and when to stop: the largest expected gain first, as long as it would pay for its trial.

The search climbs: each idea changes the best candidate in one setting, and is taken if it makes the whole distillation clearly shorter.
It is a function of what is measured alone, so that processes which see the same measurements take the same decisions.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from trainer.io.errors import SettingsError
from trainer.stages.tuning.candidates import Proposal, Skipped, Workload, held_up, less_memory, propose
from trainer.stages.tuning.tuning_schema import Candidate, Trial, TriedCandidate

LEAST_GAIN = 1.03
"""A change that brings less is not taken: it may be noise, and most changes have a price."""
ANOTHER_CHANCE = 1.2
"""What brought nothing is tried again when the best has since become so many times faster or shorter: what held it up may be gone."""

FAILURES = {
    "out of memory": "does not fit into memory",
    "not compiled": "nothing of the model was compiled, so it does not show how fast these settings are",
    "not finite": "the student's weights are no numbers after it",
}
"""How a trial without a rate ended -> the verdict."""

Measure = Callable[[Candidate, float], Trial]
"""A candidate, and the rate in images a second below which it cannot be the best, to its trial."""


@dataclass(kw_only=True)
class SearchResult:
    """What a search has found so far; at its end, with what it left out."""

    job: Workload
    best: Trial
    tried: list[TriedCandidate]
    untried: dict[str, str] = field(default_factory=dict)
    """What was left out -> why."""
    stopped: str = ""
    """Why it ended."""
    rejected: dict[str, Trial] = field(default_factory=dict)
    """A change in words -> the best trial when it brought nothing, or when its opposite brought something."""
    batch_gain: float | None = None
    """What the last larger batch brought."""

    @property
    def given(self) -> Trial:
        """The trial of the given settings, in as many parts as it took for them to fit."""
        return next(tried.trial for tried in self.tried if tried.taken)

    @property
    def seconds(self) -> float:
        return sum(tried.trial.seconds for tried in self.tried)

    def name(self, candidate: Candidate) -> str:
        """How a candidate differs from the best one: `precision=bf16`, `batch_size=64 accumulation=2`."""
        best = self.best.candidate
        return " ".join(f"{name}={str(value).lower()}" for name, value in candidate if value != getattr(best, name))

    def propose(self) -> tuple[dict[str, Proposal], dict[str, str]]:
        """What is to be tried, by its name, and what is left out -> why."""
        slower = [tried.trial for tried in self.tried if not tried.taken]
        failed = [trial.candidate for trial in slower if trial.ended == "out of memory"]
        waited = [idea for trial in slower for idea in held_up(trial, self.best, self.job)]
        found = [*propose(self.best, self.job, failed=failed, batch_gain=self.batch_gain), *waited]
        new = {self.name(one.candidate): one for one in found if isinstance(one, Proposal) and self._is_new(one)}
        return new, {one.field: one.why for one in found if isinstance(one, Skipped)}

    def _is_new(self, idea: Proposal) -> bool:
        if any(tried.trial.candidate == idea.candidate for tried in self.tried):
            return False
        before = self.rejected.get(self.name(idea.candidate))
        if before is None:
            return True
        rates = self.best.images_per_second / before.images_per_second
        return max(rates, self.job.run_s(before) / self.job.run_s(self.best)) >= ANOTHER_CHANCE


def search(start: Candidate, job: Workload, measure: Measure, *, limit_s: float) -> SearchResult:
    """Measure candidates, the given settings `start` first, until nothing is left that would pay for its trial, or for `limit_s`.

    Raises:
        SettingsError: not even the smallest part of a batch fits into memory.
    """
    state = _begin(start, job, measure)
    while True:
        new, left_out = state.propose()
        name = max(new, key=lambda one: new[one].gain, default="")
        state.stopped = _reason_to_stop(state, name, new[name].gain, limit_s) if name else "nothing is left to try"
        if state.stopped:
            state.untried = left_out | {one: _reason_to_stop(state, one, new[one].gain, limit_s) for one in new}
            return state
        _try(state, name, new[name], measure)


def _begin(start: Candidate, job: Workload, measure: Measure) -> SearchResult:
    """Try the given settings, in as many parts as it takes for them to fit; uncompiled where nothing of them is compiled."""
    tried: list[TriedCandidate] = []
    candidate: Candidate | None = start
    idea = "the given settings"
    while candidate is not None:
        trial = measure(candidate, 0.0)
        works, verdict = not trial.failed, FAILURES.get(trial.ended, "this is what is to be bettered")
        run_s = job.run_s(trial) if works else None
        tried.append(TriedCandidate(trial=trial, idea=idea, run_s=run_s, gain=None, taken=works, verdict=verdict))
        if works:
            known = candidate.model_copy(update={"workers": trial.workers})  # what `auto` found need not be found again
            return SearchResult(job=job, best=trial.model_copy(update={"candidate": known}), tried=tried)
        if trial.ended == "not finite":
            raise SettingsError(
                "distill: with the given settings the student's weights are not finite after a trial of a few steps; lower "
                "distill.base_learning_rate or distill.clip_norm, or use distill.precision=fp32"
            )
        if trial.ended == "not compiled":
            candidate, idea = candidate.model_copy(update={"compile": "off"}), "the same, uncompiled on purpose"
        else:
            candidate = less_memory(candidate, job)
            idea = "the same batch in twice as many parts, because it did not fit into memory"
    raise SettingsError(
        f"distill.batch_size = {start.batch_size} does not fit into memory on {job.world_size} processes, not even in "
        f"{tried[-1].trial.candidate.accumulation} micro-batches; choose a smaller batch, a smaller student, or a larger pool"
    )


def _reason_to_stop(state: SearchResult, name: str, gain: float, limit_s: float) -> str:
    """Say why the search ends here; empty if it continues with that proposal."""
    cost, run_s = state.best.seconds, state.job.run_s(state.best)
    saving = run_s * (1 - 1 / gain)
    if saving < cost:
        return f"{name} may save about {saving:.0f} s of a distillation of {run_s:.0f} s, and to try it takes about {cost:.0f} s"
    if state.seconds + cost > limit_s:
        return f"the {limit_s / 60:g} minutes of the search are over (tune.minutes)"
    return ""


def _try(state: SearchResult, name: str, idea: Proposal, measure: Measure) -> None:
    job, best = state.job, state.best
    before = job.run_s(best)
    trial = measure(idea.candidate, rate_to_beat(job, best, idea.candidate))
    run_s, gain, taken = None, None, False
    if trial.failed:
        verdict = FAILURES[trial.ended]
    else:
        run_s = job.run_s(trial)
        gain = before / run_s
        if trial.ended == "outrun":
            verdict = f"clearly slower: {gain:.2f} times the speed of the best, when it was stopped"
        elif gain < LEAST_GAIN:
            needed = f"which is less than the {LEAST_GAIN} that a change must bring"
            verdict = f"{gain:.3f} times the speed of the best, {needed}"
        # Half-way to the bound of a 95 % interval: one standard error.
        elif job.run_s(trial, (trial.images_per_second + trial.low) / 2) > before:
            verdict = f"{gain:.3f} times the speed of the best, but its steps vary too much to be sure"
        else:
            taken, verdict = True, f"{gain:.2f} times the speed of the best before"
    if taken:
        state.best = trial
        state.rejected[state.name(best.candidate)] = trial  # the way back was measured with it
        state.batch_gain = gain if idea.field == "batch_size" else state.batch_gain
    else:
        state.rejected[name] = best
    state.tried.append(
        TriedCandidate(trial=trial, idea=f"{name}: {idea.why}", run_s=run_s, gain=gain, taken=taken, verdict=verdict)
    )


def rate_to_beat(job: Workload, best: Trial, candidate: Candidate) -> float:
    """Compute the images a second below which a candidate makes the distillation no shorter than the best one does."""
    left = job.run_s(best) - job.fixed_s(candidate, 0.0)
    return job.images / left if left > 0 else float("inf")
