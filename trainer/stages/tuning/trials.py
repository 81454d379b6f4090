"""Real steps of the distillation, measured in this group of processes: of candidates, and of the settings that will be used.

All processes take part, and take the decisions of the first one, which it sends them after each lap.
"""

from __future__ import annotations

import gc
import logging
import math
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import replace
from functools import partial
from itertools import count, cycle
from typing import Literal, NamedTuple

import torch
from pydantic import ValidationError

from trainer.config import DistillSettings, LowResolutionSettings
from trainer.config.step_schedule import step_count
from trainer.data.loader import PREFETCHED, MicroBatches, make_loader, micro_batch_size, positions
from trainer.devices.process_group import Processes
from trainer.io import storage
from trainer.io.base_models import StrictModel
from trainer.io.costs import THIS_MACHINE, Machines, place_here
from trainer.io.errors import ObjectDamagedError, ObjectNotFoundError
from trainer.report.forecast import Measurement
from trainer.report.tracking.stage_runs import Tracker
from trainer.stages.tuning.memory import MemoryGauge
from trainer.stages.tuning.tuning_schema import Candidate, Trial
from trainer.training import loader_workers
from trainer.training.checkpointing import save
from trainer.training.checkpoints import Checkpoints
from trainer.training.classification import ValidationBatches, validate
from trainer.training.loader_workers import LoadingTime, measure_loading
from trainer.training.loop import Hook, Trainer
from trainer.training.metric_logger import MetricLogger
from trainer.training.prefetch import Prefetcher, make_prefetcher
from trainer.training.spec import TrainingSpec
from trainer.training.trace import Trace

logger = logging.getLogger(__name__)

LOG_FILE = "trials.jsonl"
WARM_STEPS = 2  # steps that may compile, fill caches or start loader processes, and are not measured

THOROUGHNESS = 6.0
"""How many times longer than in a trial the steps are measured of which hours and dollars are computed."""
LAP_S = 0.2  # approximate duration of a lap; the host waits for the device once a lap
PRECISE = 0.02  # a trial ends when the interval of its rate is within this share of it, each side; ..
LEAST_LAPS = 4  # fewer laps give no interval of the rate
LEAST_S, LONGEST_S, SHARE = 0.5, 10.0, 0.04
"""... not before so many seconds, and at the latest after so many, or after this share of the whole distillation."""

MakeTraining = Callable[[DistillSettings, Processes], TrainingSpec]
"""Makes a distillation from its beginning, with models of its own."""


class Plan(NamedTuple):
    """The next lap, the same on all processes."""

    steps: int  # 0: the measurement is complete
    drop: int = 0  # micro-batches of each process to drop before it


class StepTimer:
    """The times of a trial's steps, lap by lap: first steps to warm up, each a lap, then laps that count.

    Loader processes prefetch `PREFETCHED` micro-batches each while the first steps compile, and a loader slower than the step would hide
    behind them. So this stock is dropped after the warm-up, and in each lap all loader processes make the same number of micro-batches:
    they finish at much the same time, so shorter laps would be either bursts or waits.
    """

    def __init__(
        self, images: int, *, warm_steps: int, total_steps: int, accumulation: int = 1, thoroughness: float = 1.0
    ) -> None:
        """Time steps of `images` images in `accumulation` micro-batches.

        Args:
            warm_steps: steps that are not measured.
            total_steps: of the whole distillation, whose length limits that of a trial.
            thoroughness: how many times longer than a trial.
        """
        self._images, self._accumulation, self._warm = images, accumulation, warm_steps
        self._total_steps, self._thoroughness = total_steps, thoroughness
        self._seconds: list[float] = []  # duration of a step, by lap
        self._began, self._done = 0.0, 0
        self._settles = False
        self.plan = Plan(1)

    def open(self, now: float) -> None:
        self._began, self._done = now, 0

    def step(self) -> bool:
        """Count a step; return whether it completes the lap."""
        self._done += 1
        return self._done >= self.plan.steps

    def close(self, now: float, *, workers: int = 0) -> Plan:
        """End a lap; return the next one as this process would choose it.

        Args:
            workers: loader processes beside this one.
        """
        seconds = (now - self._began) / self._done
        # Steps in which each of them has as much to do.
        turn = workers // math.gcd(workers, self._accumulation) if workers else 1
        if self._warm:
            self._warm -= 1
            self._settles = not self._warm and workers > 0
            if self._settles:
                return Plan(turn, drop=PREFETCHED * workers)
        elif self._settles:
            self._settles = False
        else:
            self._seconds.append(seconds)
            return Plan(0) if self._is_enough() else self.plan
        return Plan(1 if self._warm else turn * max(1, round(LAP_S / max(seconds * turn, 1e-9))))

    def _is_enough(self) -> bool:
        laps, lap_s = len(self._seconds), statistics.mean(self._seconds)
        measured = self.plan.steps * lap_s * laps / self._thoroughness
        if laps < LEAST_LAPS or measured < LEAST_S:
            return False
        rate, low, high = self.rates
        return high - low <= 2 * PRECISE * rate or measured >= min(SHARE * self._total_steps * lap_s, LONGEST_S)

    @property
    def steps(self) -> int:
        return self._done * len(self._seconds)

    @property
    def step_s(self) -> float:
        """Mean time of a step, with all disturbances: the expected time of many steps."""
        return statistics.mean(self._seconds)

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
        """Measure one distillation; `make` builds a training from a `distill` section."""
        self._make, self._settings, self._processes = make, settings, processes
        self._gauge = MemoryGauge(processes)
        self.memory_limit = min(processes.gather(self._gauge.limit))  # bytes that each process may use
        self._loading: dict[str, LoadingTime] = {}  # loading time of an image, by kind of teacher
        self._ran: set[Candidate] = set()

    def measure(self, candidate: Candidate, *, loads: bool = False) -> Trial:
        """Run a trial, the same on every process: on batches in memory, or with the loader. Raises as `check_batch` does."""
        began = time.perf_counter()
        trial = self._run(candidate, loads, began) if self._fits_alone(candidate) else None
        release()
        seconds = time.perf_counter() - began
        trial = trial or Trial(candidate=candidate, loads=loads, ended="out of memory", seconds=seconds)
        everyone = self._processes.gather(trial)
        most = {
            name: max(getattr(one, name) for one in everyone) for name in ("memory_bytes", "loading_s", "waiting_s")
        }
        most["fixed_bytes"] = min(one.fixed_bytes for one in everyone)
        return everyone[0].model_copy(update=most)

    def _fits_alone(self, candidate: Candidate) -> bool:
        """Take two steps of each process alone, where there are several; return whether all had memory enough.

        A process that ran out of memory in a step with the others would leave them waiting for it.
        """
        processes = self._processes
        without_loader = candidate.model_copy(update={"workers": 0})
        if processes.world_size == 1 or without_loader in self._ran:
            return True
        images = -(-candidate.held // processes.world_size)  # of the larger micro-batches
        part = {"batch_size": images, "accumulation": 1, "workers": 0}
        training = self._make(
            endless(candidate.applied(self._settings).model_copy(update=part)), replace(processes, rank=0, world_size=1)
        )
        fits = True
        try:
            trainer = Trainer(training)
            with at_hand(trainer) as batches:
                for step in range(2):  # in the second one all states exist
                    trainer.train_step(step, batches)
            processes.device.synchronize()
        except RuntimeError as error:
            if not processes.device.is_out_of_memory(error):
                raise
            fits = False
        finally:
            release()
        fits = all(processes.gather(fits))
        if fits:
            self._ran.add(without_loader)
        return fits

    def _run(self, candidate: Candidate, loads: bool, began: float) -> Trial | None:
        """Run a trial; return none if this process, which is alone, runs out of memory."""
        processes, settings = self._processes, endless(candidate.applied(self._settings))
        training = self._make(settings, processes)
        timer = StepTimer(
            candidate.batch_size,
            warm_steps=warm_steps(settings) if loads else WARM_STEPS,
            total_steps=step_count(candidate.applied(self._settings), len(training.samples)),
            accumulation=candidate.accumulation,
        )
        fixed_bytes = self._gauge.begin()
        try:
            trainer, startup_s = measure_steps(training, timer, [Trace()], loads=loads)
        except RuntimeError as error:
            if processes.world_size > 1 or not processes.device.is_out_of_memory(error):
                raise
            return None
        failures: dict[Literal["not compiled", "not finite"], bool] = {
            "not compiled": not trainer.is_compiled,
            "not finite": not all(torch.isfinite(weight).all() for weight in trainer.model.parameters()),
        }
        for ended, failed in failures.items():
            if any(processes.gather(failed)):
                return Trial(candidate=candidate, loads=loads, ended=ended, seconds=time.perf_counter() - began)
        rate, low, high = timer.rates
        # one core's time to load an image, once for each kind of teacher: recorded outputs are loaded too
        kind = "online" if training.teacher_outputs is None else "recorded"
        if kind not in self._loading:
            images = micro_batch_size(training.settings, self._processes.world_size)
            recorded = training.teacher_outputs
            batches = MicroBatches(training.views, training.order, count=images, teacher_outputs=recorded)
            measured = measure_loading(batches, count(0, images))
            self._loading[kind] = LoadingTime(measured.seconds / images, measured.waiting / images)
        loading = self._loading[kind]
        return Trial(
            candidate=candidate,
            loads=loads,
            ended="measured",
            images_per_second=rate,
            low=low,
            high=high,
            steps=timer.steps,
            startup_s=startup_s,
            loading_s=loading.seconds / processes.world_size,
            waiting_s=loading.waiting / processes.world_size,
            workers=trainer.loader.workers or 0,
            memory_bytes=self._gauge.peak,
            fixed_bytes=fixed_bytes,
            seconds=time.perf_counter() - began,
        )


@contextmanager
def at_hand(trainer: Trainer) -> Iterator[Prefetcher]:
    """Load the micro-batches of this process's first step, and repeat them without end: steps that never wait for a loader."""
    training, processes = trainer.spec, trainer.processes
    settings, device = training.settings, processes.device
    batches = MicroBatches(
        training.views,
        training.order,
        count=settings.batch_size,
        parts=processes.world_size * settings.accumulation,
        teacher_outputs=training.teacher_outputs,
    )
    starts = positions(settings, first_step=0, last_step=1, rank=processes.rank, world_size=processes.world_size)
    loaded = list(make_loader(batches, starts, workers=0, pin_memory=device.pins_memory))
    with closing(make_prefetcher(cycle(loaded), training.views, device)) as prefetcher:
        yield prefetcher


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


def measure_steps(
    training: TrainingSpec, timer: StepTimer, hooks: Sequence[Hook], *, loads: bool = True
) -> tuple[Trainer, float]:
    """Train from the beginning until the timer's laps end; returns the trainer and the seconds to the end of the first step.

    `loads`: steps wait for the loader; otherwise they take batches in memory.
    """
    processes, began, startup_s = training.processes, time.perf_counter(), 0.0
    trainer = Trainer(training, hooks)
    with trainer.running(), trainer.prefetch(0) if loads else at_hand(trainer) as batches:
        timer.open(time.perf_counter())
        for step in range(training.total_steps):
            losses = trainer.take_step(step, batches)
            for hook in hooks:
                hook.after_step(step, losses)
            if not timer.step():
                continue
            processes.device.synchronize()
            now = time.perf_counter()
            startup_s = startup_s or now - began
            plan = processes.gather(timer.close(now, workers=trainer.loader.workers or 0))[0]
            if not plan.steps:
                break
            timer.plan = plan
            batches.drop(plan.drop)
            timer.open(time.perf_counter())
    return trainer, startup_s


def release() -> None:
    """Let go of a trial's models, so that the next one has their memory."""
    gc.collect()
    torch.compiler.reset()  # what is compiled may hold CUDA graphs, and these their memory
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


# ---- What a whole training takes


def measure_training(
    make: MakeTraining,
    settings: DistillSettings,
    processes: Processes,
    tracker: Tracker,
    checkpoints: Checkpoints,
    *,
    ready_s: float,
    recording_s: float | None,
) -> Measurement:
    """Measure an operator window, steps with their reports, a validation and a checkpoint; the same on every process.

    Args:
        tracker: takes metrics, as it does in a whole training.
        checkpoints: the place of the one that is timed; it is removed.
        ready_s: seconds from the start of the process until a distillation could be made.
        recording_s: seconds to record the teacher's outputs; None where they are not needed or exist.
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
    trace = Trace()
    trainer, first_step_s = measure_steps(training, timer, [MetricLogger(trace, tracker, shown=False), trace])
    if not trainer.is_compiled:
        what = "nothing of the model was compiled, so what is forecast is an uncompiled training"
        logger.warning("%s  %s", training.name, what)
    split, workers, validations = training.val_split, trainer.loader.workers or 0, [0.0]
    if split is not None:
        with closing(ValidationBatches(split, processes, training.settings, workers)) as batches:
            validated = partial(validate, trainer.result, batches)
            passes = (
                2 if processes.device.is_lazy or (workers and not split.in_memory) else 1
            )  # the first one compiles, or starts processes
            validations = [_timed(processes, validated) for _ in range(passes)]
    checkpoint_s = 0.0
    if settings.checkpoint_every:
        checkpoint_s = _timed(processes, lambda: save(trainer, checkpoints, timer.steps))
    if processes.is_first:
        checkpoints.finish()
        checkpoints.remove()
    record = trace.recorder.snapshot().ranks[0].record
    late_s = validations[0] - validations[-1] + sum(one.seconds for one in record.compilations if one.step)
    measured = Measurement(
        place=place_of(processes),
        settings=settings.model_dump(mode="json"),
        batch_size=settings.batch_size,
        step_s=timer.step_s,
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


# ---- What was measured before


class _Notes(StrictModel):
    recording_s: float | None = None  # seconds that recording the teacher's outputs takes
    trials: tuple[Trial, ...] = ()


class TrialLog:
    """The measurements of a tuning, kept beside the checkpoints until it is complete, so that a restarted tuning does not repeat them.

    The ladder is a function of its measurements, so with the same ones it resumes where it was interrupted. Every process has them, the
    first one writes them down; it raises `StorageError` and `OutputError`.
    """

    def __init__(self, uri: str, processes: Processes) -> None:
        """Read what is below `uri`, a folder that is named by all that the measurements depend on."""
        self.uri, self._is_first = uri, processes.is_first
        self._notes = processes.gather(self._read() if self._is_first else _Notes())[0]
        if self._is_first and self._notes.trials:
            logger.info("tune  resuming: %d trials were measured by an earlier attempt", len(self._notes.trials))

    @property
    def recording_s(self) -> float | None:
        return self._notes.recording_s

    def trial(self, candidate: Candidate, *, loads: bool) -> Trial | None:
        return next((one for one in self._notes.trials if (one.candidate, one.loads) == (candidate, loads)), None)

    def note_recording(self, seconds: float) -> None:
        self._write(self._notes.model_copy(update={"recording_s": seconds}))

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
