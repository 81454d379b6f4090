"""The settings that a distillation will use, measured with all that a whole training does besides its steps."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

from trainer.config import DistillSettings
from trainer.costs import THIS_MACHINE, Machines, place_here
from trainer.forecast import Measurement
from trainer.step_schedule import step_count
from trainer.tracking.stage_runs import Tracker
from trainer.training.process_group import Processes
from trainer.tuning.step_timer import StepTimer
from trainer.tuning.trials import MakeTraining, endless, measure_steps, warm_steps
from trainer.tuning.tuning_schema import Trial

logger = logging.getLogger(__name__)

THOROUGHNESS = 6.0
"""How many times longer than in a trial the steps are measured, since hours and dollars are computed from them."""


def measure(
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
        make: makes the distillation.
        settings: section `distill`.
        processes: this process among the others.
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
    measured_steps = measure_steps(training, timer, tracker)
    trainer, recorder = measured_steps.trainer, measured_steps.trainer.recorder
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
    record = recorder.snapshot().ranks[0].record
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
        startup_s=ready_s + made_s + measured_steps.startup_s + max(0.0, late_s),
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
    """Estimate what other settings take, by their trial; what lies beside the steps as it was measured.

    Args:
        measured: other settings of the same distillation.
        trial: of these settings.
        settings: section `distill` with them.
        recording_s: seconds that it takes to record the teacher's outputs, if they need that.
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
