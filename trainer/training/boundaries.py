"""What happens between two steps: a validation, a checkpoint, or the end before its time."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from torch import nn

from trainer.errors import PreemptedError
from trainer.profiling.timeline import span
from trainer.training.checkpoints import Checkpoints
from trainer.training.checkpoints.collection import TOP1
from trainer.training.metric_logger import MetricLogger
from trainer.training.preemption import Preemption
from trainer.training.validation import Ends

VALIDATION = "validation"
"""In `State.pending`: the last step's validation is still to be done."""


class Validate(Protocol):
    """Measures a model on the validation split."""

    def __call__(self, model: nn.Module, ends: Ends | None = None, *, workers: int = 0) -> Mapping[str, float] | None:
        """Its figures, with images from `workers` loader processes; None where it was broken off."""
        ...


class Trained(Protocol):
    """What is trained, as far as its checkpoints and its validation need it."""

    @property
    def result(self) -> nn.Module:
        """The model to keep."""
        ...

    @property
    def loaders(self) -> int:
        """Loader processes beside this process."""
        ...

    def is_best(self, top1: float | None) -> bool:
        """Whether a top-1 accuracy is the highest so far."""
        ...

    def save(
        self, step: int, *, top1: float | None = None, pending: tuple[str, ...] = (), needed: bool = False
    ) -> None:
        """Copy the state after `step` steps, which is then written in the background."""
        ...


class Boundary:
    """The end of each step of one training, on one of its processes; all of them decide the same.

    Where the training is asked to end, a validation is broken off, to be done when it goes on.
    """

    def __init__(
        self,
        name: str,
        trained: Trained,
        *,
        validate: Validate | None,
        validations: set[int],
        checkpoints: set[int],
        kept: Checkpoints,
        report: MetricLogger,
        preemption: Preemption,
    ) -> None:
        """Of the training `name`.

        Args:
            name: for messages.
            trained: what is measured and kept.
            validate: measures it; None where nothing can be measured.
            validations: steps after which it is measured.
            checkpoints: steps after which it is kept; where there are none, it is only kept when it ends before its time.
            kept: the checkpoints.
            report: passes on what was measured.
            preemption: knows whether to end.
        """
        self._name, self._trained, self._validate = name, trained, validate
        self._validations, self._checkpoints, self._kept = validations, checkpoints, kept
        self._report, self._preemption = report, preemption

    def catch_up(self, step: int, pending: tuple[str, ...]) -> None:
        """Do what was left undone after `step` when the training ended before its time. A request to end ends this at once."""
        if VALIDATION in pending:
            self._keep(step, self._measure(step, lambda: False), wanted=False)

    def pass_over(self, step: int) -> None:
        """After `step`: measure and keep, if it is time; end, if the processes agree on it.

        Raises:
            PreemptedError: the training was asked to end, and its checkpoint is written.
            TrainerError: as the parts that it calls.
        """
        measured: Mapping[str, float] | None = {}
        if step in self._validations:
            measured = self._measure(step, lambda: self._preemption.agreed(f"the validation after step {step + 1}"))
        if self._preemption.agreed(f"step {step + 1}"):
            self._end(step, measured)
        self._keep(step, measured, wanted=step in self._checkpoints)

    def finish(self, step: int) -> None:
        """After the last step: wait for the last checkpoint; end, if the processes were asked to meanwhile.

        Raises:
            PreemptedError: the training was asked to end, and its checkpoint is written.
            TrainerError: as the parts that it calls.
        """
        self._report.flush()
        if self._preemption.settled("the end of the training"):
            self._end(step, {})
        with span("checkpoint"):
            self._kept.finish()

    def _measure(self, step: int, ends: Ends) -> Mapping[str, float] | None:
        """Accuracy and loss, passed on; nothing where there is no way to measure, None where it was broken off."""
        if self._validate is None:
            return {}
        with span("evaluate"):
            measured = self._validate(self._trained.result, ends, workers=self._trained.loaders)
            if measured is not None:
                self._report.metrics(step, measured)
        return measured

    def _keep(self, step: int, measured: Mapping[str, float] | None, *, wanted: bool) -> None:
        top1 = (measured or {}).get(TOP1)
        if wanted or (self._checkpoints and self._trained.is_best(top1)):
            self._report.flush()
            with span("checkpoint"):
                self._trained.save(step + 1, top1=top1, needed=step == max(self._checkpoints, default=None))

    def _end(self, step: int, measured: Mapping[str, float] | None) -> None:
        self._report.flush()
        with span("checkpoint"):
            pending = (VALIDATION,) if measured is None else ()
            self._trained.save(step + 1, top1=(measured or {}).get(TOP1), pending=pending, needed=True)
            self._kept.finish(needed=True)
        raise PreemptedError(
            f"{self._name}: was asked to end after step {step + 1}; its checkpoint is written, and the same command goes on from there"
        )
