"""The record of a training, as a hook."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager

from trainer.profiling.evidence import AttemptRecord, ContextRecord
from trainer.profiling.recorder import Recorder, Sources, Startup
from trainer.training.loop import Hook, Trainer


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
        # Measurements are part of a common graph where devices trace, and need all shares where weights are sharded.
        alike = (processes.device.is_lazy and processes.world_size > 1) or trainer.is_sharded
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
                layers=(processes.is_first or alike) and not processes.device.is_lazy,
                agree=(lambda due: processes.gather(due, "a sample of the weights")[0]) if alike else None,
                loader=trainer.loader,
                attempts=self._attempts,
                communication=trainer.communication,
                confused=trainer.confused.records,
            ),
        )
        self._images = spec.settings.batch_size
        with self.recorder:
            yield

    def around_step(self, step: int) -> AbstractContextManager[object]:
        return self.recorder.timeline.step(step, images=self._images)

    def around_update(self, step: int, forward: Callable[[], None]) -> AbstractContextManager[object]:
        return self.recorder.tensor_sampler.around_update(step, forward)
