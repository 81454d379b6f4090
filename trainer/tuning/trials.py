"""Real steps of the distillation, measured in this group of processes: those of candidates, and of the settings that will be used.

All processes take part, and take the decisions of the first one, which it sends them after each lap.
"""

from __future__ import annotations

import gc
import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from itertools import count

import torch
from pydantic import ValidationError

from trainer import storage
from trainer.base_models import StrictModel
from trainer.config import DistillSettings
from trainer.costs import THIS_MACHINE, Machines, place_here
from trainer.data.loader import MicroBatches, micro_batch_size
from trainer.errors import ObjectDamagedError, ObjectNotFoundError
from trainer.forecast import Measurement
from trainer.profiling.recorder import Recorder
from trainer.step_schedule import step_count
from trainer.tracking.stage_runs import Tracker
from trainer.training import loader_workers
from trainer.training.loader_workers import LoadingTime, measure_loading
from trainer.training.loop import Trainer
from trainer.training.metric_logger import MetricLogger, ProgressBar
from trainer.training.process_group import Processes
from trainer.training.spec import TrainingSpec
from trainer.tuning.memory import Memory, gauge_of
from trainer.tuning.step_timer import StepTimer
from trainer.tuning.tuning_schema import Candidate, Trial

logger = logging.getLogger(__name__)

LOG_FILE = "trials.jsonl"
WARM_STEPS = 2
"""Steps that may compile, fill caches or start loader processes, and are not measured."""

THOROUGHNESS = 6.0
"""How many times longer than in a trial the steps are measured of which hours and dollars are computed."""

MakeTraining = Callable[[DistillSettings, Processes], TrainingSpec]
"""Makes a distillation from its beginning, with models of its own."""


class Trials:
    """Measures candidates, one after another."""

    def __init__(self, make: MakeTraining, settings: DistillSettings, processes: Processes) -> None:
        """Of one distillation, which `make` makes with other settings of its section."""
        self._make, self._settings, self._processes = make, settings, processes
        self._memory = Memory(gauge_of(processes))
        self._loading: LoadingTime | None = None

    def measure(self, candidate: Candidate, rate_to_beat: float = 0.0) -> Trial:
        """Run a trial, stopped early below `rate_to_beat` images a second; gives the same on every process.

        Raises:
            SettingsError: its batch cannot be dealt to the processes.
        """
        began = time.perf_counter()
        trial = self._run(candidate, rate_to_beat, began) if self._fits(candidate) else None
        release()
        if trial is None:
            trial = Trial(candidate=candidate, ended="out of memory", seconds=time.perf_counter() - began)
        everyone = self._processes.gather(trial)
        most = {name: max(getattr(one, name) for one in everyone) for name in ("memory_bytes", "advised_workers")}
        most["fixed_bytes"] = min(one.fixed_bytes for one in everyone)
        trial = everyone[0].model_copy(update=most)
        self.learn(trial)
        return trial

    def learn(self, trial: Trial) -> None:
        """Take what a trial, also one of an earlier attempt, says of the memory that others will need."""
        if trial.failed:
            return
        kind, images = _beside_images(trial.candidate), self._images(trial.candidate)
        self._memory.learn(kind, images, trial.memory_bytes, fixed=trial.fixed_bytes)

    def _images(self, candidate: Candidate) -> int:
        """Return the images of the larger micro-batches."""
        return -(-candidate.held // self._processes.world_size)

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
        timer = StepTimer(candidate.batch_size, rate_to_beat, warm_steps=warm_steps(settings), total_steps=steps)
        self._memory.begin()
        try:
            trainer, startup_s = measure_steps(training, timer)
        except RuntimeError as error:
            if self._processes.world_size > 1 or not self._processes.device.is_out_of_memory(error):
                raise
            return None
        if not all(self._processes.gather(trainer.is_compiled)):
            return Trial(candidate=candidate, ended="not compiled", seconds=time.perf_counter() - began)
        rate, low, high = timer.rates
        shares = shares_of(trainer.recorder, warm_steps(settings))
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
            batches = MicroBatches(
                training.views, training.order, count=images, teacher_outputs=training.teacher_outputs
            )
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
    return settings.model_copy(update={"epochs": 1_000_000, "evidence": evidence})


def warm_steps(settings: DistillSettings) -> int:
    """Return the steps that are not measured; with `workers=auto` those too in which loading finds out how many it takes."""
    finding_out = loader_workers.WARM_STEPS + loader_workers.TIMED_STEPS if settings.workers in (None, "auto") else 0
    return WARM_STEPS + finding_out


def measure_steps(training: TrainingSpec, timer: StepTimer, tracker: Tracker | None = None) -> tuple[Trainer, float]:
    """Train from the beginning until the laps end.

    Args:
        training: with more steps than that takes.
        timer: says when it is enough.
        tracker: takes the metrics, which are else not computed.

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
            now = time.perf_counter()
            startup_s = startup_s or now - began
            timer.plan = processes.gather(timer.close(now))[0]
            if timer.plan.ended:
                break
            timer.open(time.perf_counter())
    return trainer, startup_s


def shares_of(recorder: Recorder, warm: int) -> Mapping[str, float]:
    """Range -> its share of the time of the steps after the first `warm` ones."""
    recorder.timeline.catch_up()
    steps = recorder.timeline.steps
    total = float(steps.column("seconds")[warm:].sum())
    return {name: float(steps.column(name)[warm:].sum()) / total for name in recorder.timeline.ranges} if total else {}


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
    timer = StepTimer(settings.batch_size, warm_steps=unmeasured, total_steps=steps, thoroughness=THOROUGHNESS)
    made_s = time.perf_counter() - began
    trainer, first_step_s = measure_steps(training, timer, tracker)
    if not trainer.is_compiled:
        logger.warning(
            "%s  nothing of the model was compiled, so what is forecast is an uncompiled training", training.name
        )
    validate, workers = training.validate, trainer.loader.workers or 0
    passes = 2 if processes.device.traces else 1  # the first one compiles, too
    validations = (
        [_timed(processes, lambda: validate(trainer.result, workers=workers)) for _ in range(passes)]
        if validate
        else [0.0]
    )
    checkpoint_s = _timed(processes, lambda: trainer.save_checkpoint(timer.steps)) if settings.checkpoint_every else 0.0
    if processes.is_first:
        training.checkpoints.finish()
        training.checkpoints.remove()
    record = trainer.recorder.snapshot().ranks[0].record
    late_s = validations[0] - validations[-1] + sum(one.seconds for one in record.compilations if one.step)
    mean, low, high = timer.step_s
    measured = Measurement(
        place=place_of(processes),
        settings=settings.model_dump(mode="json"),
        batch_size=settings.batch_size,
        step_s=mean,
        step_low_s=low,
        step_high_s=high,
        steps=timer.steps,
        startup_s=ready_s + made_s + first_step_s + max(0.0, late_s),
        compile_s=max(0.0, late_s) + sum(one.seconds for one in record.compilations if not one.step),
        validation_s=validations[-1],
        checkpoint_s=checkpoint_s,
        window_s=record.overhead["operators"],
        recording_s=recording_s,
    )
    return processes.gather(measured)[0]


def from_trial(
    measured: Measurement, trial: Trial, settings: DistillSettings, recording_s: float | None
) -> Measurement:
    """Estimate what other settings of a measured distillation take, by their trial; what lies beside the steps is as it was measured.

    Args:
        recording_s: seconds that it takes to record the teacher's outputs, if `settings` need that.
    """
    images = trial.candidate.batch_size
    return measured.model_copy(
        update={
            "settings": settings.model_dump(mode="json"),
            "batch_size": images,
            "step_s": images / trial.images_per_second,
            "step_low_s": images / trial.high,
            "step_high_s": images / trial.low,
            "steps": trial.steps,
            "recording_s": recording_s,
        }
    )


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

    The search is a function of what is measured, so with the same measurements it takes the same decisions and continues where it was; the
    time of the trials counts as if it had never been interrupted. Every process has the measurements, the first one writes them down; it
    raises `StorageError` where the store does not answer or refuses, `OutputError` where the file cannot be written.
    """

    def __init__(self, uri: str, processes: Processes) -> None:
        """Read what is below `uri`, a folder that is named by all that the measurements depend on."""
        self.uri, self._is_first = uri, processes.is_first
        self._notes = processes.gather(self._read() if self._is_first else _Notes())[0]
        if self._is_first and self._notes.trials:
            logger.info("tune  resuming: %d trials were measured by an earlier attempt", len(self._notes.trials))

    @property
    def recording(self) -> RecordingTime | None:
        """What was measured of recording."""
        return self._notes.recording

    def trial(self, candidate: Candidate) -> Trial | None:
        """The trial of a candidate; none if it was not measured."""
        return next((trial for trial in self._notes.trials if trial.candidate == candidate), None)

    def note_recording(self, recording: RecordingTime) -> None:
        """Keep what was measured of recording, the same on every process."""
        self._write(self._notes.model_copy(update={"recording": recording}))

    def note(self, trial: Trial) -> None:
        """Keep a trial, the same on every process."""
        self._write(self._notes.model_copy(update={"trials": (*self._notes.trials, trial)}))

    def remove(self) -> None:
        """Drop it: the tuning is complete."""
        if self._is_first:
            storage.remove(self.uri)

    def _read(self) -> _Notes:
        try:
            return _Notes.model_validate_json(storage.read_checksummed(storage.join(self.uri, LOG_FILE)))
        except ObjectNotFoundError:
            return _Notes()
        except ObjectDamagedError as error:
            logger.warning("%s; measuring again", error)
            return _Notes()
        except ValidationError:  # another version of this project has written it
            return _Notes()

    def _write(self, notes: _Notes) -> None:
        self._notes = notes
        if self._is_first:
            storage.write_checksummed(storage.join(self.uri, LOG_FILE), notes.model_dump_json())
