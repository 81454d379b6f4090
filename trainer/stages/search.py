"""search: find settings of the distillation with which the student is more accurate on the validation split.

Trials share the data set, the teacher and its recorded outputs. Each is a training of its own, launched as the distillation itself is.
They are compared after a share of their epochs, and the best resume from their checkpoints (successive halving), so nothing is trained
twice. The best settings are then trained with further seeds, as are the recipe's own, and the means decide.
"""

from __future__ import annotations

import logging
import math
import statistics
import threading
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

from trainer import config
from trainer.config import DistillSettings, GateSettings, SearchSettings
from trainer.config.conflicts import Facts
from trainer.evaluation import metrics
from trainer.graph import STAGES, JobSpec, Kind
from trainer.io import artifacts, storage
from trainer.io.costs import Machines
from trainer.io.errors import (
    BudgetError,
    LaunchError,
    ObjectDamagedError,
    ObjectNotFoundError,
    PreemptedError,
)
from trainer.io.formatting import duration
from trainer.report import forecast, scores, tracking
from trainer.report.tracking.stage_runs import Tracker, stage_run
from trainer.stages.searching import search_page
from trainer.stages.searching.search_schema import FILE, PAGE, Attempt, SearchResult, SearchTrial
from trainer.stages.searching.study import propose

logger = logging.getLogger(__name__)

NAME = "search"
Launch = Callable[[JobSpec, threading.Event], None]
"""Runs a training to its end, where the run trains; the event interrupts it."""
_LATENCY_RUNS = 50
_BESIDE_THE_TRIALS = {"enabled", "trials", "finalists", "seeds", "budget_hours", "budget_usd", "gate"}
"""Settings that change neither a trial nor the order of proposals, so a search with others goes on with the trials that there are."""


def run(
    settings: SearchSettings,
    *,
    dataset: str | Path,
    teacher: str | Path,
    search: str | Path,
    launch: Launch,
    in_turns: bool = True,
    teacher_outputs: str | Path | None = None,
) -> None:
    """Search, and write what was found.

    Args:
        in_turns: whether trials train one after another, whatever `parallel` is, as on one machine.

    Raises:
        SettingsError: a value of the space is not one of its setting.
        BudgetError: the budget is too small for one trial, or the price of the machines is not known.
        LaunchError: the recipe's own settings fail, or most of the others.
    """
    distill = settings.distill or DistillSettings()
    config.check_search(settings, Facts(distill=distill))
    inputs = {"dataset": str(dataset), "teacher": str(teacher)}
    if teacher_outputs is not None and distill.reads_recording:
        inputs["teacher_outputs"] = str(teacher_outputs)
    kinds: Mapping[str, Kind] = STAGES["distill"].all_inputs
    parents = {name: artifacts.manifest(uri, kinds[name]).fingerprint for name, uri in inputs.items()}
    if weights := artifacts.weights_version(distill.weights, distill.weights_file):
        parents["weights"] = weights
    for number, uri in enumerate(distill.further_teachers, start=2):
        parents[f"teacher_{number}"] = artifacts.manifest(uri, "model").fingerprint
    for number, uri in enumerate(distill.further_recordings, start=2):
        parents[f"teacher_outputs_{number}"] = artifacts.manifest(uri, "teacher_outputs").fingerprint
    values = settings.model_dump(mode="json")
    depends_on = {"settings": settings.model_dump(mode="json", exclude=_BESIDE_THE_TRIALS), "parents": parents}
    identity = artifacts.digest(depends_on)[:16]
    folder = storage.join(artifacts.unfinished(search), f"{NAME}-{identity}")
    with (
        stage_run(NAME, values, training=identity) as tracker,
        artifacts.create(search, "search", settings=values, parents=parents) as draft,
    ):
        at_a_time = 1 if in_turns else settings.parallel
        searching = _Searching(settings, distill, inputs, folder, launch, tracker, at_a_time)
        found = searching.run()
        (draft.path / FILE).write_text(found.model_dump_json(indent=2) + "\n", encoding="utf-8")
        (draft.path / PAGE).write_text(search_page.render(found), encoding="utf-8")
        draft.figures.update(search_page.figures(found))
        if place := searching.place:
            draft.place = place.model_copy(update={"nodes": place.nodes * at_a_time})
        for one in found.trials:
            points = [(round(attempt.epochs), "val_score", attempt.score) for attempt in one.attempts]
            tracker.nested(f"trial {one.number}", one.values, points)
        tracker.metrics(0, tracking.numbers(draft.figures))
        tracker.file(draft.path / PAGE)
    storage.remove(folder)


@dataclass
class _Searching:
    """A search under way."""

    settings: SearchSettings
    distill: DistillSettings
    inputs: Mapping[str, str]
    folder: str
    """URI below which each trial has its folder, with its record and its checkpoints, until the search is complete."""
    launch: Launch
    tracker: Tracker
    at_a_time: int
    trials: list[SearchTrial] = field(default_factory=list)
    place: Machines | None = None
    """Where the trials train."""
    stop: threading.Event = field(default_factory=threading.Event)
    """Interrupts the trainings that run."""

    def run(self) -> SearchResult:
        """Go through the rungs, then through the finalists' seeds."""
        self._begin_trials()
        going = ranking = self._ranked(range(len(self.trials)), 0)
        rungs = self.settings.rungs
        trainings = len(self.trials) * rungs[0]
        for rung in range(1, len(rungs)):
            going = going[: max(1, len(going) // self.settings.reduction)]
            self._forget_all_but({0, *going, *ranking[: self.settings.finalists + 1]})
            self._train([(number, rung) for number in going])
            trainings += len(going) * (rungs[rung] - rungs[rung - 1])
            going = self._ranked(going, rung)
            ranking = [*going, *(number for number in ranking if number not in going)]
        return self._found(self._repeat_finalists(ranking), trainings)

    def _begin_trials(self) -> None:
        """Train every trial to the first rung, in rounds of as many as train at a time; the first has the recipe's own settings."""
        space, settings = config.search_space(self.settings), self.settings
        own = {name: config.setting_of(self.distill, name) for name in space}
        while len(self.trials) < settings.trials:
            told, count = list(self.trials), min(settings.parallel, settings.trials - len(self.trials))
            proposed = propose(
                space, told, count, sampler=settings.sampler, trials=settings.trials, seed=self.distill.seed or 0
            )
            if not told:
                proposed[0] = {name: value for name, value in own.items() if value is not None}
            if told and not (count := self._within_budget(count)):
                logger.warning("search  no further trial: the search would exceed its budget")
                return
            for values in proposed[:count]:
                self.trials.append(self._record(SearchTrial(number=len(self.trials), values=values)))
            self._train([(number, 0) for number in range(len(told), len(self.trials))])

    def _ranked(self, numbers: Iterable[int], rung: int) -> list[int]:
        """Return those of the trials that reached a rung, the best first; whatever became of them later does not count."""
        epochs = self.settings.rungs[rung] * self.distill.epochs
        attempts = [(number, one) for number in numbers for one in self.trials[number].attempts if one.epochs == epochs]
        ranked = [number for number, one in sorted(attempts, key=lambda pair: -pair[1].score)]
        if self.settings.cost == "none":
            return ranked
        # By fronts: first those than which no other trial is both better and no dearer, then those of the rest, and so on.
        ordered: list[int] = []
        while ranked:
            least, front = math.inf, list[int]()
            for number in ranked:
                if (cost := self.trials[number].cost(self.settings.cost)) < least:
                    front.append(number)
                    least = cost
            ordered += front
            ranked = [number for number in ranked if number not in front]
        return ordered

    def _repeat_finalists(self, ranking: Sequence[int]) -> list[SearchTrial]:
        """Train the best trials and the recipe's own settings to the end with every seed; returns them."""
        finalists = [0, *[number for number in ranking if number][: self.settings.finalists]]
        last = len(self.settings.rungs) - 1
        self._train([(number, last) for number in finalists])
        for repeat in range(1, self.settings.seeds):
            self._train([(number, last) for number in finalists], seed=(self.distill.seed or 0) + repeat)
        return [self.trials[number] for number in finalists if not self.trials[number].failure]

    def _choose(self, finalists: Sequence[SearchTrial]) -> tuple[int, str]:
        """Return the number of the trial whose settings are taken, and why.

        That is the best mean, where it exceeds the recipe's by more than the seeds differ; or with `cost` the cheapest student that passes.
        """
        scored = [one.scores(self.distill.epochs) for one in finalists]
        means = {one.number: statistics.mean(scores) for one, scores in zip(finalists, scored, strict=True)}
        if self.settings.cost != "none":
            passing = [one for one in finalists if self._passes(one, means[one.number])]
            if passing:
                kind = self.settings.cost
                cheapest = min(passing, key=lambda one: (one.cost(kind), -means[one.number]))
                which = f"trial {cheapest.number}" if cheapest.number else "the recipe"
                reason = f"{which} is the cheapest that passes the gate on the validation split"
                return cheapest.number, f"{reason}: {cheapest.costs(kind)}, {means[cheapest.number]:.1%}"
            logger.warning("search  no finalist passes the gate on the validation split, so cost does not decide")
        best = max(means, key=lambda number: (means[number], -number))
        gain, deviation = means[best] - means[0], _deviation(scored)
        gained, differ = f"{100 * gain:+.2f} points", f"{100 * deviation:.2f} points"
        if self.settings.seeds == 1 and best:
            return (
                best,
                f"trial {best} is better than the recipe by {gained} with one seed, which does not tell how much seeds differ",
            )
        if best == 0:
            return 0, "no other settings are better than the recipe's own in the mean of the seeds"
        if gain <= deviation:
            reason = f"trial {best} is better by {gained}, which is not more than seeds differ ({differ})"
            return 0, f"{reason}; the recipe stays"
        reason = f"trial {best} is better than the recipe by {gained}, and seeds differ by {differ}"
        return best, f"{reason} (standard deviation)"

    def _passes(self, trial: SearchTrial, score: float) -> bool:
        """Return whether a student passes the gate by what is known before it is evaluated."""
        gate = self.settings.gate or GateSettings()
        teacher = artifacts.manifest(self.inputs["teacher"], "model").figures
        name = scores.val_name(teacher)
        conditions = metrics.judge_scores(
            gate, teacher_score=score if name is None else teacher[name], student_score=score
        )
        conditions += metrics.judge_cost(
            gate, teacher_parameters=teacher["parameters"], student_parameters=trial.parameters or 1, student_p95_ms=0.0
        )
        return not any(one.reason for one in conditions)

    def _found(self, finalists: Sequence[SearchTrial], trainings: float) -> SearchResult:
        best, reason = self._choose(finalists)
        logger.info("search  %s", reason)
        chosen = config.distill_with(self.distill, self.trials[best].values)
        space = config.search_space(self.settings)
        return SearchResult(
            space={name: str(dimension) for name, dimension in space.items()},
            given=self.distill.model_dump(mode="json"),
            chosen=chosen.model_dump(mode="json"),
            trials=tuple(self.trials),
            best=best,
            reason=reason,
            cost="parameters" if self.settings.cost == "none" else self.settings.cost,
            trainings=trainings,
            seconds=sum(one.seconds for one in self.trials),
        )

    # -----------------------------------------------------------------------------------------------------------------
    # Trainings

    def _train(self, wanted: Sequence[tuple[int, int]], *, seed: int | None = None) -> None:
        """Train trials, by their numbers, up to a rung each, as many at a time as `parallel`; recorded ones are not trained again."""
        if self.at_a_time == 1:  # in this thread, which Ctrl-C reaches
            made = [self._train_one(self.trials[number], rung, seed) for number, rung in wanted]
        else:
            with ThreadPoolExecutor(self.at_a_time, thread_name_prefix=NAME) as pool:
                try:
                    training = [
                        pool.submit(self._train_one, self.trials[number], rung, seed) for number, rung in wanted
                    ]
                    made = [one.result() for one in training]
                except Exception:  # the others come to their end, and are recorded
                    pool.shutdown(cancel_futures=True)
                    raise
                except BaseException:  # Ctrl-C and SIGTERM reach this thread alone
                    self.stop.set()
                    pool.shutdown(cancel_futures=True)
                    raise
        for trial in made:
            self.trials[trial.number] = trial
        failed = [one for one in self.trials if one.failure]
        if self.trials[0].failure or 2 * len(failed) > max(len(self.trials), 4):
            last = failed[-1] if not self.trials[0].failure else self.trials[0]
            which = (
                "the recipe's own settings fail"
                if last.number == 0
                else f"{len(failed)} of {len(self.trials)} trials failed"
            )
            raise LaunchError(f"search: {which}: {last.failure}")

    def _train_one(self, trial: SearchTrial, rung: int, seed: int | None) -> SearchTrial:
        epochs = self.settings.rungs[rung] * self.distill.epochs
        known = [one.epochs for one in trial.attempts]
        if trial.failure or (epochs in known if seed is None else seed in trial.repeats):
            return trial
        is_whole = self.settings.rungs[rung] == 1
        place = storage.join(self.folder, f"trial-{trial.number:03d}")
        own = self._section(trial, pause_epochs=0.0 if is_whole else epochs, seed=seed)
        name = f"{rung}" if seed is None else f"seed-{seed}"
        outputs = {
            "student": storage.join(place, f"student-{name}"),
            "evidence": storage.join(place, f"evidence-{name}"),
        }
        spec = JobSpec(
            stage="distill",
            part=f"{trial.number:03d}-{name}",
            settings=own,
            inputs=self.inputs,
            outputs=outputs,
            # Of a trial's own, so that they are found at the next rung, and nothing of it remains.
            environment={artifacts.CHECKPOINTS_VARIABLE: storage.join(place, "checkpoints"), tracking.URI: ""},
        )
        began = time.monotonic()
        try:
            if not artifacts.exists(outputs["student"]):
                self.launch(spec, self.stop)
        except PreemptedError:
            raise
        except LaunchError as error:
            if error.is_transient:
                raise
            logger.warning("search  trial %d failed: %s", trial.number, error)
            return self._record(trial.model_copy(update={"failure": str(error)}))
        made_of = artifacts.manifest(outputs["student"], "model")
        self.place, figures = made_of.place, made_of.figures
        score = figures[scores.val_name(figures) or ""]
        seconds = time.monotonic() - began
        forecast.check_budget(made_of.place, self.settings.budget_usd, "search")
        dollars = made_of.place.dollars(seconds) if made_of.place else None
        attempt = Attempt(epochs=epochs, score=score, seconds=seconds, dollars=dollars)
        # One measurement of a student, so that noise does not change its rank between rungs.
        latency_ms = figures.get("latency_ms") if trial.latency_ms is None else trial.latency_ms
        done: dict[str, Any] = {"parameters": figures["parameters"], "latency_ms": latency_ms}
        if seed is None:
            done["attempts"] = (*trial.attempts, attempt)
        else:
            done["repeats"] = {**trial.repeats, seed: attempt}
        made = self._record(trial.model_copy(update=done))
        for uri in outputs.values():
            artifacts.remove(uri)
        text = "search  trial %d%s after %g of %d epochs: %.2f %%, %s"
        of_seed = "" if seed is None else f", seed {seed},"
        logger.info(text, trial.number, of_seed, epochs, self.distill.epochs, 100 * score, duration(attempt.seconds))
        self.tracker.metrics(trial.number, {f"rung_{rung}": score})
        return made

    def _section(self, trial: SearchTrial, *, pause_epochs: float, seed: int | None) -> dict[str, Any]:
        """Return the section `distill` of a trial, which is measured where it ends alone."""
        tried = config.distill_with(self.distill, trial.values)
        quiet = {"operators_at": (), "operators_steps": 0}
        changed = {
            "pause_epochs": pause_epochs,
            "latency_runs": _LATENCY_RUNS if self.settings.cost == "latency" else 0,
            "validate_every_epochs": 0,
            "evidence": tried.evidence.model_copy(update=quiet),
            "seed": tried.seed if seed is None else seed,
        }
        section: dict[str, Any] = tried.model_copy(update=changed).model_dump(mode="json")
        return section

    def _within_budget(self, count: int) -> int:
        """Return how many of so many further trials the budget allows, by what the trials so far took."""
        settings, begun = self.settings, len(self.trials)
        if not settings.budget_hours and not settings.budget_usd:
            return count
        first = [one.attempts[0] for one in self.trials if one.attempts]
        first_s, spent_s = sum(one.seconds for one in first), sum(one.seconds for one in self.trials)
        budget_s = 3600 * settings.budget_hours * self.at_a_time if settings.budget_hours else math.inf
        if settings.budget_usd:
            dollars = sum(one.dollars or 0.0 for one in first)  # known: else the first attempt has ended the search
            budget_s = min(budget_s, settings.budget_usd / dollars * first_s)
        epoch_s = first_s / sum(one.epochs for one in first)
        for further in range(count, 0, -1):
            if spent_s + epoch_s * self._epochs_ahead(further) <= budget_s:
                return further
        if begun == 1:
            least = spent_s + epoch_s * self._epochs_ahead(1)
            raise BudgetError(
                f"search: one more trial and the finalists take {duration(least)} of training by what the recipe's own settings took, and "
                f"the budget is {duration(budget_s)}; raise search.budget_hours or search.budget_usd, or lower search.finalists or "
                "search.seeds"
            )
        return 0

    def _epochs_ahead(self, further: int) -> float:
        """Return the most epochs that are left, where so many trials are begun beside those that there are."""
        settings, standing = self.settings, len(self.trials) + further
        shares = further * settings.rungs[0]
        for before, rung in pairwise(settings.rungs):
            standing = max(1, standing // settings.reduction)
            shares += standing * (rung - before)
        finalists = min(settings.finalists, len(self.trials) + further - 1) + 1  # with the recipe's own settings
        shares += finalists * (settings.seeds - 1) + (finalists - 1) * (1 - settings.rungs[0])
        return self.distill.epochs * shares

    def _forget_all_but(self, kept: Collection[int]) -> None:
        """Remove the checkpoints of trials that cannot be finalists any more."""
        for one in self.trials:
            if one.number not in kept:
                storage.remove(storage.join(self.folder, f"trial-{one.number:03d}", "checkpoints"))

    # -----------------------------------------------------------------------------------------------------------------
    # Records

    def _record(self, trial: SearchTrial) -> SearchTrial:
        """Write a trial's record, unless it is new and there is one: then that of an interrupted search is returned."""
        uri = storage.join(self.folder, f"trial-{trial.number:03d}.json")
        if not trial.attempts and not trial.failure:
            try:
                known = SearchTrial.model_validate_json(storage.read_checksummed(uri))
            except ObjectNotFoundError:
                return trial
            except ObjectDamagedError as error:
                logger.warning("%s; training it again", error)
                return trial
            return known if known.values == trial.values else trial
        storage.write_checksummed(uri, trial.model_dump_json())
        return trial


def _deviation(groups: Sequence[Sequence[float]]) -> float:
    """Return the pooled standard deviation of scores that differ by their seeds alone; 0 where there is one of each."""
    free = sum(len(scores) - 1 for scores in groups)
    squares = sum(statistics.variance(scores) * (len(scores) - 1) for scores in groups if len(scores) > 1)
    return math.sqrt(squares / free) if free else 0.0
