"""Real steps of the distillation, measured in this group of processes: those of candidates, and of the settings that will be used.

All processes take part, and take the decisions of the first one, which it sends them after each lap.
"""

from __future__ import annotations

import gc
import logging
import math
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import count
from typing import Literal, NamedTuple

import torch
from pydantic import ValidationError

from trainer.config import DistillSettings, LowResolutionSettings
from trainer.config.step_schedule import step_count
from trainer.data.loader import PREFETCHED, MicroBatches, micro_batch_size
from trainer.devices.process_group import Processes
from trainer.io import storage
from trainer.io.base_models import StrictModel
from trainer.io.costs import THIS_MACHINE, Machines, place_here
from trainer.io.errors import ObjectDamagedError, ObjectNotFoundError
from trainer.profiling.recorder import Recorder
from trainer.report.forecast import LEAST_STEPS, Measurement, mean_interval
from trainer.report.tracking.stage_runs import Tracker
from trainer.stages.tuning.memory import Memory, gauge_of
from trainer.stages.tuning.tuning_schema import Candidate, Trial
from trainer.training import loader_workers
from trainer.training.classification import validate
from trainer.training.loader_workers import LoadingTime, measure_loading
from trainer.training.loop import Trainer
from trainer.training.metric_logger import MetricLogger, ProgressBar
from trainer.training.spec import TrainingSpec

logger = logging.getLogger(__name__)

LOG_FILE = "trials.jsonl"
WARM_STEPS = 2
"""Steps that may compile, fill caches or start loader processes, and are not measured."""

THOROUGHNESS = 6.0
"""How many times longer than in a trial the steps are measured of which hours and dollars are computed."""

# How long a trial takes: until it is clear whether the candidate is better than the best so far.

LAP_S = 0.2
"""About how long a lap takes; the host waits for the device once a lap."""
SHARE_LEAST, SHARE_MOST = 0.01, 0.04
"""How long a trial is measured at least, unless it is far behind, and at most, as a share of the whole distillation ..."""
LEAST_S, LONGEST_S = (0.5, 2.0), (1.0, 10.0)
"""... and in seconds, from and to, unless its steps are so long that the few that an interval needs take longer."""
FAR_BEHIND = 0.8
"""A candidate whose fastest lap is below this share of the rate to beat is stopped."""
PRECISE = 0.02
"""The interval of a rate is narrow enough at this share of it, each side."""

MakeTraining = Callable[[DistillSettings, Processes], TrainingSpec]
"""Makes a distillation from its beginning, with models of its own."""


class Plan(NamedTuple):
    """What a process would do after a lap; all do what the first one would, and drain if any of them would."""

    ended: Literal["", "measured", "outrun"]
    steps: int
    """Steps of the next lap."""
    drains: bool = False
    """Whether to drop the batches that are ready, and to measure again."""


class StepTimer:
    """The times of a trial's steps, lap by lap: first some steps to warm up, each a lap of its own, then laps that count.

    While the first steps compile, the loader processes fill their queue, `PREFETCHED` micro-batches each. A loader that is slower than
    the step would hide behind this stock for longer than a trial takes. So a trial lasts until every process was handed a new
    micro-batch, and if the queue is then at most half full, so that all of them are at work, and no fuller than before, the loader is
    the limit: the stock is dropped, and steps are measured again, in laps in which each process makes the same number of
    micro-batches. Such a lap may be long, but shorter ones would be either bursts or waits: the processes finish at much the same time.
    """

    def __init__(
        self,
        images: int,
        rate_to_beat: float = 0.0,
        *,
        warm_steps: int,
        total_steps: int,
        accumulation: int = 1,
        thoroughness: float = 1.0,
    ) -> None:
        """Of a candidate with so many images a step.

        Args:
            rate_to_beat: images a second below which the candidate cannot be the best.
            warm_steps: steps that are not measured.
            total_steps: of the whole distillation, whose length says how long a trial may be.
            accumulation: micro-batches a step.
            thoroughness: how many times longer than a trial.
        """
        self._images, self._rate_to_beat, self._accumulation = images, rate_to_beat, accumulation
        self._warm, self._total_steps, self._thoroughness = warm_steps, total_steps, thoroughness
        self._seconds: list[float] = []  # of a step, lap by lap
        self._began, self._done = 0.0, 0
        self._ready = 0.0  # micro-batches in the queue when the laps that count began
        self._round, self._drained = 1, False  # steps of which each lap has a multiple
        self.plan = Plan("", 1)

    def open(self, now: float) -> None:
        self._began, self._done = now, 0

    def step(self) -> bool:
        """A step is done; gives whether that completes the lap."""
        self._done += 1
        return self._done >= self.plan.steps

    def close(self, now: float, *, workers: int = 0, ready: float = 0.0) -> Plan:
        """A lap ends; gives what this process would do next.

        Args:
            workers: loader processes beside this one.
            ready: micro-batches that they have ready; NaN where that is not known.
        """
        seconds = (now - self._began) / self._done
        if self._warm:
            self._warm, self._ready = self._warm - 1, ready
            laps = max(1, round(LAP_S / max(seconds * self._round, 1e-9)))
            return Plan("", self._round if self._warm else self._round * laps)
        self._seconds.append(seconds)
        ended = self._ended()
        if ended != "outrun" and workers and not self._drained:
            if self.steps * self._accumulation <= workers:
                return Plan("", self.plan.steps)
            if not (ready > workers or ready > self._ready):
                return Plan("", workers // math.gcd(workers, self._accumulation), drains=True)
        return Plan(ended, self.plan.steps)

    def follow(self, plans: Sequence[Plan]) -> Plan:
        """Take the plan of all processes."""
        draining = [plan for plan in plans if plan.drains]
        self.plan = draining[0] if draining else plans[0]
        if draining:  # the first lap begins with an empty queue, and does not count
            self._seconds, self._warm, self._round, self._drained = [], 1, self.plan.steps, True
        return self.plan

    def _ended(self) -> Literal["", "measured", "outrun"]:
        if len(self._seconds) >= 2 and self._images / min(self._seconds) < FAR_BEHIND * self._rate_to_beat:
            return "outrun"
        measured = self.plan.steps * sum(self._seconds)
        whole = self._total_steps * sum(self._seconds) / len(self._seconds)
        if len(self._seconds) < LEAST_STEPS or measured < self._limit(SHARE_LEAST * whole, LEAST_S):
            return ""
        rate, low, high = self.rates
        if high < self._rate_to_beat:
            return "outrun"
        is_precise = high - low <= 2 * PRECISE * rate
        return "measured" if is_precise or measured >= self._limit(SHARE_MOST * whole, LONGEST_S) else ""

    def _limit(self, seconds: float, between: tuple[float, float]) -> float:
        return self._thoroughness * min(max(seconds, between[0]), between[1])

    @property
    def steps(self) -> int:
        return self.plan.steps * len(self._seconds)

    @property
    def step_s(self) -> tuple[float, float, float]:
        """Mean time of a step, and its 95 % interval: what many steps take, with all that disturbs them."""
        return mean_interval(self._seconds)

    @property
    def rates(self) -> tuple[float, float, float]:
        """Images a second: median over the laps and its 95 % interval, which a disturbance of some laps does not move.

        The interval is between two laps in the order of their times, as many places from the middle as a binomial count strays.
        """
        ordered = sorted(self._seconds)
        stray = math.ceil(0.98 * math.sqrt(len(ordered)))
        last = len(ordered) - 1
        slow, fast = ordered[min(last, len(ordered) // 2 + stray)], ordered[max(0, (last // 2) - stray)]
        return self._images / statistics.median(ordered), self._images / slow, self._images / fast


class Trials:
    """Measures candidates, one after another."""

    def __init__(self, make: MakeTraining, settings: DistillSettings, processes: Processes) -> None:
        """Of one distillation, which `make` makes with other settings of its section."""
        self._make, self._settings, self._processes = make, settings, processes
        self._memory = Memory(gauge_of(processes))
        self._loading: LoadingTime | None = None

    def measure(self, candidate: Candidate, rate_to_beat: float = 0.0) -> Trial:
        """Run a trial, the same on every process, stopped early below `rate_to_beat` images a second; raises as `check_batch` does."""
        began = time.perf_counter()
        trial = self._run(candidate, rate_to_beat, began) if self._fits(candidate) else None
        release()
        trial = trial or Trial(candidate=candidate, ended="out of memory", seconds=time.perf_counter() - began)
        everyone = self._processes.gather(trial)
        most = {name: max(getattr(one, name) for one in everyone) for name in ("memory_bytes", "advised_workers")}
        most["fixed_bytes"] = min(one.fixed_bytes for one in everyone)
        trial = everyone[0].model_copy(update=most)
        self.learn(trial)
        return trial

    def learn(self, trial: Trial) -> None:
        """Take what a trial, also one of an earlier attempt, says of the memory that others will need."""
        if not trial.failed:
            kind, images = _beside_images(trial.candidate), self._images(trial.candidate)
            self._memory.learn(kind, images, trial.memory_bytes, fixed=trial.fixed_bytes)

    def _images(self, candidate: Candidate) -> int:
        return -(-candidate.held // self._processes.world_size)  # of the larger micro-batches

    def _fits(self, candidate: Candidate) -> bool:
        """Check whether a micro-batch will fit, on all processes: judged by those before it, then by one that each process does alone.

        A process that ran out of memory in a step with the others would let them wait for it.
        """
        kind, images = _beside_images(candidate), self._images(candidate)
        if self._memory.ran(kind, images):
            return True
        if not all(self._processes.gather(self._memory.has_room(kind, images))):
            return False
        return self._processes.world_size == 1 or all(self._processes.gather(self._fits_alone(candidate, images)))

    def _fits_alone(self, candidate: Candidate, images: int) -> bool:
        alone = replace(self._processes, rank=0, world_size=1)
        part = {"batch_size": images, "accumulation": 1, "workers": 0}
        training = self._make(endless(candidate.applied(self._settings).model_copy(update=part)), alone)
        # Two steps: in the second all states are there.
        timer = StepTimer(images, float("inf"), warm_steps=0, total_steps=0)
        try:
            measure_steps(training, timer)
        except RuntimeError as error:
            if not self._processes.device.is_out_of_memory(error):
                raise
            return False
        finally:
            release()
        return True

    def _run(self, candidate: Candidate, rate_to_beat: float, began: float) -> Trial | None:
        """Run a trial; gives none if this process, which is alone, runs out of memory."""
        settings = endless(candidate.applied(self._settings))
        training = self._make(settings, self._processes)
        steps = step_count(candidate.applied(self._settings), len(training.samples))
        timer = StepTimer(
            candidate.batch_size,
            rate_to_beat,
            warm_steps=warm_steps(settings),
            total_steps=steps,
            accumulation=candidate.accumulation,
        )
        self._memory.begin()
        try:
            trainer, startup_s = measure_steps(training, timer)
        except RuntimeError as error:
            if self._processes.world_size > 1 or not self._processes.device.is_out_of_memory(error):
                raise
            return None
        failures: dict[Literal["not compiled", "not finite"], bool] = {
            "not compiled": not trainer.is_compiled,
            "not finite": not all(torch.isfinite(weight).all() for weight in trainer.model.parameters()),
        }
        for ended, failed in failures.items():
            if any(self._processes.gather(failed)):
                return Trial(candidate=candidate, ended=ended, seconds=time.perf_counter() - began)
        rate, low, high = timer.rates
        shares = shares_of(trainer.recorder, timer.steps)
        computing_s = (1 - shares["data"]) * candidate.batch_size / rate / candidate.accumulation
        assert timer.plan.ended, "the steps end when the laps do"
        return Trial(
            candidate=candidate,
            ended=timer.plan.ended,
            images_per_second=rate,
            low=low,
            high=high,
            steps=timer.steps,
            startup_s=startup_s,
            shares=shares,
            workers=trainer.loader.workers or 0,
            advised_workers=self._advise(training, computing_s),
            memory_bytes=self._memory.peak,
            fixed_bytes=self._memory.fixed,
            seconds=time.perf_counter() - began,
        )

    def _advise(self, training: TrainingSpec, computing_s: float) -> int:
        """Return as many loader processes as keep up with a micro-batch that takes so many seconds of computing."""
        images = micro_batch_size(training.settings, self._processes.world_size)
        if self._loading is None:
            recorded = training.teacher_outputs
            batches = MicroBatches(training.views, training.order, count=images, teacher_outputs=recorded)
            measured = measure_loading(batches, count(0, images))
            self._loading = LoadingTime(measured.seconds / images, measured.waiting / images)
        scaled = LoadingTime(images * self._loading.seconds, images * self._loading.waiting)
        return loader_workers.advised_workers(scaled, computing_s, self._processes)


def _beside_images(candidate: Candidate) -> Candidate:
    """Return what is the same for candidates that differ only in how many images they hold."""
    return candidate.model_copy(update={"workers": 0, "batch_size": 1, "accumulation": 1})


def endless(settings: DistillSettings, *, operators_at: tuple[int, ...] = ()) -> DistillSettings:
    """Return a distillation with more epochs than a trial can take, and torch.profiler at `operators_at` only."""
    evidence = settings.evidence.model_copy(update={"operators_at": operators_at})
    # What the smaller input of the first epochs saves is no part of a forecast.
    full = {"low_resolution": LowResolutionSettings()}
    return settings.model_copy(update={"epochs": 1_000_000, "evidence": evidence, **full})


def warm_steps(settings: DistillSettings) -> int:
    """Return the steps that are not measured; with `workers=auto` those too in which loading finds out how many it takes."""
    finding_out = loader_workers.WARM_STEPS + loader_workers.TIMED_STEPS if settings.workers in (None, "auto") else 0
    return WARM_STEPS + finding_out


def measure_steps(training: TrainingSpec, timer: StepTimer, tracker: Tracker | None = None) -> tuple[Trainer, float]:
    """Train from the beginning until the timer's laps end; a `tracker` takes the metrics, which are else not computed.

    Returns:
        The trainer after these steps, and the seconds from the beginning to the end of the first one.
    """
    processes, began, startup_s = training.processes, time.perf_counter(), 0.0
    trainer = Trainer(training)
    recorder, metrics = trainer.recorder, None
    if tracker is not None:
        metrics = MetricLogger(training, recorder, tracker, ProgressBar.of(training, 0, active=False))
    with recorder, trainer.prefetch(0) as batches:
        timer.open(time.perf_counter())
        for step in range(training.total_steps):
            with recorder.timeline.step(step, images=training.settings.batch_size):
                losses = trainer.train_step(step, batches)
            if metrics is not None:
                metrics.log(step, losses)
            if not timer.step():
                continue
            processes.device.synchronize()
            now, loader = time.perf_counter(), trainer.loader
            startup_s = startup_s or now - began
            workers = loader.workers or 0
            plan = timer.follow(processes.gather(timer.close(now, workers=workers, ready=loader.ready)))
            if plan.ended:
                break
            if plan.drains:
                batches.drop(PREFETCHED * workers if math.isnan(loader.ready) else int(loader.ready))
            timer.open(time.perf_counter())
    return trainer, startup_s


def shares_of(recorder: Recorder, last: int) -> Mapping[str, float]:
    """Range -> its share of the time of the `last` steps."""
    recorder.timeline.catch_up()
    steps = recorder.timeline.steps
    first = len(steps) - last
    total = float(steps.column("seconds")[first:].sum())
    return {name: float(steps.column(name)[first:].sum()) / total for name in recorder.timeline.ranges} if total else {}


def release() -> None:
    """Let go of a trial's models, so that the next one has their memory."""
    gc.collect()
    torch.compiler.reset()  # what is compiled may hold CUDA graphs, and these their memory
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


# ---------------------------------------------------------------------------------------------------------------------
# What a whole training takes


def measure_training(
    make: MakeTraining,
    settings: DistillSettings,
    processes: Processes,
    tracker: Tracker,
    *,
    ready_s: float,
    recording_s: float | None,
) -> Measurement:
    """Measure steps with their reports, before them a window of operators, then a validation and a checkpoint; the same on every process.

    Args:
        tracker: takes metrics, as it does in a whole training.
        ready_s: seconds from the start of the process until a distillation could be made.
        recording_s: seconds that it takes to record the teacher's outputs; none where the distillation reads none, or they are there.
    """
    began = time.perf_counter()
    window, warm = settings.evidence.operators_steps if settings.evidence.operators_at else 0, warm_steps(settings)
    training = make(endless(settings, operators_at=(warm,) if window else ()), processes)
    steps = step_count(settings, len(training.samples))
    # The step after the window sets how long laps are; the window's closing would count as its last one's.
    unmeasured = warm + window + 1
    timer = StepTimer(
        settings.batch_size,
        warm_steps=unmeasured,
        total_steps=steps,
        accumulation=settings.accumulation,
        thoroughness=THOROUGHNESS,
    )
    made_s = time.perf_counter() - began
    trainer, first_step_s = measure_steps(training, timer, tracker)
    if not trainer.is_compiled:
        what = "nothing of the model was compiled, so what is forecast is an uncompiled training"
        logger.warning("%s  %s", training.name, what)
    split, workers, validations = training.val_split, trainer.loader.workers or 0, [0.0]
    if split is not None:
        validated = partial(validate, trainer.result, split, processes, training.settings, workers=workers)
        passes = 2 if processes.device.is_lazy else 1  # the first one compiles, too
        validations = [_timed(processes, validated) for _ in range(passes)]
    checkpoint_s = _timed(processes, lambda: trainer.save_checkpoint(timer.steps)) if settings.checkpoint_every else 0.0
    if processes.is_first:
        training.checkpoints.finish()
        training.checkpoints.remove()
    record = trainer.recorder.snapshot().ranks[0].record
    late_s = validations[0] - validations[-1] + sum(one.seconds for one in record.compilations if one.step)
    mean, _, _ = timer.step_s
    measured = Measurement(
        place=place_of(processes),
        settings=settings.model_dump(mode="json"),
        batch_size=settings.batch_size,
        step_s=mean,
        steps=timer.steps,
        startup_s=ready_s + made_s + first_step_s + max(0.0, late_s),
        compile_s=max(0.0, late_s) + sum(one.seconds for one in record.compilations if not one.step),
        validation_s=validations[-1],
        checkpoint_s=checkpoint_s,
        window_s=record.overhead["operators"],
        recording_s=recording_s,
    )
    return processes.gather(measured)[0]


def place_of(processes: Processes) -> Machines:
    """Name the machines that the processes run on."""
    local = processes.local_world_size
    nodes = max(1, processes.world_size // local)
    return place_here() or Machines(pool=THIS_MACHINE, nodes=nodes, processes_per_node=local)


def _timed(processes: Processes, what: Callable[[], object]) -> float:
    """Measure the seconds that all processes together take for something."""
    processes.barrier()
    began = time.perf_counter()
    what()
    processes.device.synchronize()
    processes.barrier()
    return time.perf_counter() - began


# ---------------------------------------------------------------------------------------------------------------------
# What was measured before


class RecordingTime(StrictModel):
    """What it would take to record the teacher's outputs."""

    teacher_s: float
    """Seconds that the teacher needs for an image, on all processes together."""
    recording_s: float
    """Seconds that the whole recording takes."""


class _Notes(StrictModel):
    recording: RecordingTime | None = None
    trials: tuple[Trial, ...] = ()


class TrialLog:
    """What a tuning has measured, kept beside the checkpoints until it is complete: one that is started again does not measure it again.

    The search is a function of what is measured, so with the same measurements it continues where it was, as if it had never been
    interrupted. Every process has the measurements, the first one writes them down; it raises `StorageError` and `OutputError`.
    """

    def __init__(self, uri: str, processes: Processes) -> None:
        """Read what is below `uri`, a folder that is named by all that the measurements depend on."""
        self.uri, self._is_first = uri, processes.is_first
        self._notes = processes.gather(self._read() if self._is_first else _Notes())[0]
        if self._is_first and self._notes.trials:
            logger.info("tune  resuming: %d trials were measured by an earlier attempt", len(self._notes.trials))

    @property
    def recording(self) -> RecordingTime | None:
        return self._notes.recording

    def trial(self, candidate: Candidate) -> Trial | None:
        return next((trial for trial in self._notes.trials if trial.candidate == candidate), None)

    def note_recording(self, recording: RecordingTime) -> None:
        self._write(self._notes.model_copy(update={"recording": recording}))

    def note(self, trial: Trial) -> None:
        self._write(self._notes.model_copy(update={"trials": (*self._notes.trials, trial)}))

    def remove(self) -> None:
        if self._is_first:
            storage.remove(self.uri)

    def _read(self) -> _Notes:
        try:
            return _Notes.model_validate_json(storage.read_checksummed(storage.join(self.uri, LOG_FILE)))
        except (ObjectNotFoundError, ValidationError):  # another version of this project may have written it
            return _Notes()
        except ObjectDamagedError as error:
            logger.warning("%s; measuring again", error)
            return _Notes()

    def _write(self, notes: _Notes) -> None:
        self._notes = notes
        if self._is_first:
            storage.write_checksummed(storage.join(self.uri, LOG_FILE), notes.model_dump_json())
