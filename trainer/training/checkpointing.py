"""Saves and resumes a training: checkpoints, the attempts at it, and its end on request."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from trainer.config.step_schedule import is_checkpoint_step
from trainer.io.errors import PreemptedError, TrainingError
from trainer.io.formatting import listed
from trainer.profiling.timeline import span
from trainer.report.tracking.stage_runs import Tracker
from trainer.training.attempts import AttemptLog
from trainer.training.checkpoints import Checkpoints, newest
from trainer.training.loop import Hook, Trainer
from trainer.training.sharding import local
from trainer.training.spec import Losses
from trainer.training.training_state import Snapshot, capture, restore

logger = logging.getLogger(__name__)

VALIDATION = "validation"
"""In `TrainingState.pending`: the validation of the last step is still to be done."""
_MAX_NAMES = 3  # weights that a message names


class Checkpointing(Hook):
    """Resumes a training from its newest valid checkpoint, saves it every so many steps, and stops it on request."""

    def __init__(self, checkpoints: Checkpoints, tracker: Tracker, *, rank: int = 0) -> None:
        self._checkpoints, self._tracker = checkpoints, tracker
        self.attempts = AttemptLog(checkpoints.uri, rank=rank, check_ours=checkpoints.check_ours)

    @contextmanager
    def running(self, trainer: Trainer) -> Iterator[None]:
        """Resume.

        Raises:
            ArtifactError: the checkpoint does not fit the model.
            TrainerError: as `checkpoints.newest`.
        """
        self._trainer = trainer
        state = newest(self._checkpoints, trainer.processes)
        if state is not None:
            restore(state, trainer.model, trainer.optimizer, trainer.averaged)
            trainer.first_step, trainer.owes_validation = state.step, VALIDATION in state.pending
            if trainer.processes.is_first:
                logger.info("%s  resuming after step %d from a checkpoint", trainer.spec.name, state.step)
        self._tracker.resume(self._checkpoints.uri)
        with self.attempts.resumed_at(trainer.first_step), self._checkpoints:
            yield

    def after_step(self, step: int, losses: Losses) -> None:  # noqa: ARG002  # they are logged
        """Save the state after `step` if that is due.

        Raises:
            PreemptedError: a process was asked to end; the checkpoint is written.
            SupersededError: a later attempt at this training has begun.
        """
        trainer = self._trainer
        self._checkpoints.check_failures()
        self.attempts.heartbeat(step + 1 - trainer.first_step)
        if trainer.preemption.should_stop(f"step {step + 1}"):
            self._stop(step)
        spec, is_last = trainer.spec, step == trainer.spec.last_step - 1
        paused = is_last and spec.last_step < spec.total_steps
        if paused or is_checkpoint_step(step, trainer.settings, len(spec.samples)):
            self._flush()
            with span("checkpoint"):
                save(trainer, self._checkpoints, step + 1, needed=is_last)

    def after_last_step(self) -> None:
        """Wait until the last checkpoint is written, which has to be where the training pauses; raises as `after_step`."""
        if self._trainer.preemption.should_stop("the end of the training", wait=True):
            self._stop(self._trainer.spec.last_step - 1)
        with span("checkpoint"):
            self._checkpoints.finish(needed=self._trainer.spec.last_step < self._trainer.spec.total_steps)

    def _flush(self) -> None:
        for hook in self._trainer.hooks:
            hook.before_checkpoint()

    def _stop(self, step: int) -> None:
        """Write the last checkpoint after `step`, and end this attempt by `PreemptedError`."""
        self._flush()
        with span("checkpoint"):
            pending = (VALIDATION,) if self._trainer.owes_validation else ()
            save(self._trainer, self._checkpoints, step + 1, pending=pending, needed=True)
            self._checkpoints.finish(needed=True)
        raise PreemptedError(
            f"{self._trainer.spec.name}: was asked to end after step {step + 1}; its checkpoint is written, and the same command "
            "continues from there"
        )


def save(
    trainer: Trainer, checkpoints: Checkpoints, steps: int, *, pending: tuple[str, ...] = (), needed: bool = False
) -> None:
    """Copy the state after `steps` steps, which is then written in the background; all processes take part, the first one writes.

    The arguments are those of `capture` and `Checkpoints.save`, as are the errors; besides, weights that are not finite are refused.
    """
    state = capture(
        steps, trainer.model, trainer.optimizer, trainer.averaged, processes=trainer.processes, pending=pending
    )
    # The loss was finite, but the update that followed may have spoilt the weights, which would never heal.
    weights = {name: local(state.model[name]) for name, _ in trainer.model.named_parameters()}
    finite = torch.stack([torch.isfinite(weight).all() for weight in weights.values()]).tolist()
    bad = [name for name, is_finite in zip(weights, finite, strict=True) if not is_finite]
    if trainer.is_sharded:  # each has looked at its shares
        found = trainer.processes.gather(bad, f"the weights that are not finite after step {steps}")
        bad = [name for name in weights if any(name in one for one in found)]
    if bad:
        name, shown = trainer.spec.name, listed(bad, _MAX_NAMES)
        raise TrainingError(
            f"{name}: weights are not finite after step {steps} ({shown}), so no checkpoint of them is kept; lower {name} "
            "base_learning_rate or clip_norm, or use precision=fp32"
        )
    if not trainer.is_sharded:
        if trainer.processes.is_first:
            checkpoints.save(state, needed=needed)
        return
    what, is_first = f"the checkpoint of step {steps}", trainer.processes.is_first
    if trainer.processes.gather(is_first and checkpoints.takes(steps, needed=needed), what)[0]:
        with trainer.processes.waiting(what):
            (checkpoints.take if is_first else Snapshot.contribute)(state)
