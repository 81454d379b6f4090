"""What accompanies a training: one small interface for its checkpoints, metrics, record and live rules."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TYPE_CHECKING

from trainer.profiling.evidence import AttemptRecord, ContextRecord
from trainer.profiling.recorder import Recorder, Sources, Startup
from trainer.training.spec import Losses

if TYPE_CHECKING:
    from trainer.training.loop import Trainer


class Hook:
    """Base of what accompanies a training; each method does nothing unless overridden.

    All processes have the same hooks. `Trainer` enters `running` from the last hook to the first, and calls the other methods from the
    first to the last.
    """

    @contextmanager
    def running(self, trainer: Trainer) -> Iterator[None]:  # noqa: ARG002
        """Surround all steps; the code before the `yield` may change where the training begins."""
        yield

    def around_step(self, step: int) -> AbstractContextManager[object]:  # noqa: ARG002
        """Surround a step."""
        return nullcontext()

    def around_update(self, step: int, forward: Callable[[], None]) -> AbstractContextManager[object]:  # noqa: ARG002
        """Surround the update of the weights; `forward` runs the model alone over a few images of the step."""
        return nullcontext()

    def after_validation(self, step: int, scores: Mapping[str, float]) -> None:
        """Receive the scores of the validation after `step`."""

    def after_step(self, step: int, losses: Losses) -> None:
        """Receive the losses of a step, on the device; its validation, if it has one, is done."""

    def before_checkpoint(self) -> None:
        """Prepare for a checkpoint; an error keeps it from being written."""

    def after_last_step(self) -> None:
        """End a training that has taken all its steps."""


class Trace(Hook):
    """Records a training: steps, machine, operators, curves, and samples of its tensors."""

    recorder: Recorder
    """Exists once the training runs."""

    def __init__(
        self,
        *,
        context: ContextRecord | None = None,
        startup: Startup | None = None,
        attempts: Callable[[], tuple[AttemptRecord, ...]] = tuple,
    ) -> None:
        """Record beside what is measured the context, how the time before the training was spent, and its attempts."""
        self._context, self._startup, self._attempts = context, startup, attempts

    @property
    def has_begun(self) -> bool:
        return hasattr(self, "recorder") and self.recorder.has_begun

    @contextmanager
    def running(self, trainer: Trainer) -> Iterator[None]:
        spec, processes = trainer.spec, trainer.spec.processes
        # Measurements are part of a common graph where devices trace.
        alike = processes.device.is_lazy and processes.world_size > 1
        self.recorder = Recorder(
            spec.settings.evidence,
            name=spec.name,
            device=processes.device.torch_device,
            rank=processes.rank,
            world_size=processes.world_size,
            context=self._context,
            startup=self._startup,
            sources=Sources(
                model=trainer.model,
                left_out=spec.objective.left_out,
                attention=processes.is_first or alike,
                agree=(lambda due: processes.gather(due, "a sample of the weights")[0]) if alike else None,
                loader=trainer.loader,
                attempts=self._attempts,
                communication=trainer.communication,
            ),
        )
        self._images = spec.settings.batch_size
        with self.recorder:
            yield

    def around_step(self, step: int) -> AbstractContextManager[object]:
        return self.recorder.timeline.step(step, images=self._images)

    def around_update(self, step: int, forward: Callable[[], None]) -> AbstractContextManager[object]:
        return self.recorder.tensor_sampler.around_update(step, forward)
