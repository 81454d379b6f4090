"""The training loop that masked-autoencoder pretraining, fine-tuning and distillation share.

An objective turns a batch into named losses; the loop does the rest: the schedule, autocast, accumulation, the gradient's norm, the
optimiser, the average of the weights, evidence, metrics, validation, checkpoints and resume.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar, cast

import torch
from torch import Tensor, nn
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel

from trainer.config import TrainingSettings
from trainer.data.batch import Batch, Mixing, Recorded
from trainer.data.loader import MicroBatches, Samples, TeacherOutputs, Views, make_loader, micro_batch_size, positions
from trainer.data.order import SampleOrder
from trainer.data.randomness import random_bits
from trainer.data.views.mixing import mix, mixes
from trainer.errors import TrainingError
from trainer.profiling.evidence import Recorder
from trainer.profiling.timeline import Timeline
from trainer.tracking import Tracker
from trainer.training.averages import AveragedModel
from trainer.training.checkpoints import Checkpoints, State
from trainer.training.kernels import use_fast_kernels
from trainer.training.optimizers import make_optimizer, parameter_groups, set_learning_rate
from trainer.training.processes import Processes
from trainer.training.progress import Progress
from trainer.training.schedules import learning_rate_at, step_count

logger = logging.getLogger(__name__)

Losses = dict[str, Tensor]
"""Named scalar losses; `loss` is the one that is minimised."""

_NOISE = 0x6E6F697365
"""Keeps the seeds of dropout and stochastic depth apart from all other draws of the same seed."""


class Objective(Protocol):
    """What is learned: a model to train and how a batch becomes losses."""

    model: nn.Module
    """Holds exactly the weights that are trained."""

    def __call__(self, model: nn.Module, batch: Batch, timeline: Timeline) -> Losses:
        """Losses of a batch that is on the device; `model` is `self.model`, perhaps wrapped for several processes."""
        ...


@dataclass(frozen=True, kw_only=True)
class Training:
    """One training: what is learned, from what, and how."""

    name: str
    """`mae`, `finetune` or `distill`: names its evidence, metrics and checkpoints."""
    objective: Objective
    samples: Samples
    view_size: int
    """Edge of the views, in pixels."""
    settings: TrainingSettings
    seed: int
    workers: int
    """Loader processes beside this process."""
    processes: Processes
    checkpoints: Checkpoints
    layer_decay: float = 1.0
    view_seed: int | None = None
    """Seed of the views; as `seed` where not given."""
    view_count: int = 0
    """How many views of a sample there are; 0: a new one each epoch."""
    teacher_outputs: TeacherOutputs | None = None
    """Recorded outputs, which travel with the batches."""
    validate: Callable[[nn.Module], Mapping[str, float]] | None = None
    """Measures a model on the validation split."""

    @property
    def total_steps(self) -> int:
        """Optimiser steps of the whole training."""
        return step_count(self.settings, len(self.samples))

    @property
    def order(self) -> SampleOrder:
        """Which sample comes when, as which view."""
        return SampleOrder(
            len(self.samples),
            self.seed,
            view_seed=self.view_seed,
            views=self.view_count,
            paired=mixes(self.settings.views),
        )

    @property
    def views(self) -> Views:
        """The views of the samples."""
        seed = self.seed if self.view_seed is None else self.view_seed
        return Views(self.samples, size=self.view_size, seed=seed, settings=self.settings.views)


def train(training: Training, recorder: Recorder, tracker: Tracker) -> nn.Module:
    """Run a training to its end, from its newest checkpoint if there is one.

    Returns:
        The trained model: the average of the weights where `ema_decay` is set.

    Raises:
        TrainingError: a loss is not finite; the step and the samples are named.
        SettingsError: the batch can not be dealt to the processes.
    """
    loop = _Loop(training)
    first_step = loop.resume()
    settings, processes = training.settings, training.processes
    report = _Report(training, recorder, tracker, first_step)
    with recorder, report.progress:
        for step, batches in loop.steps(first_step):
            with recorder.timeline.step(step, images=settings.batch_size):
                losses = loop.step(step, batches, recorder.timeline)
            report.add(step, losses)
            if report.is_due(step):
                report.publish(step)
            if loop.validation_is_due(step) and training.validate is not None:
                with recorder.timeline.range("evaluate"):
                    report.metrics(step, training.validate(loop.result))
            if loop.checkpoint_is_due(step):
                report.publish(step)
                with recorder.timeline.range("checkpoint"):
                    loop.save(step + 1)
    processes.barrier()
    return loop.result


class _Loop:
    """The parts that a step moves."""

    def __init__(self, training: Training) -> None:
        settings, processes = training.settings, training.processes
        self._training, self._settings, self._processes = training, settings, processes
        micro_batch_size(settings, processes.world_size)
        self._model = training.objective.model.to(processes.device.torch_device).train()
        if not processes.device.compiles_with(settings.compile):
            use_fast_kernels(self._model, processes.device, settings.precision)
        self._wrapped = _wrap(self._model, settings, processes)
        groups = parameter_groups(self._model, weight_decay=settings.weight_decay, layer_decay=training.layer_decay)
        self._parameters = [parameter for group in groups for parameter in group["params"]]
        self._optimizer = make_optimizer(groups, settings, processes)
        self._average = AveragedModel(self._model, settings.ema_decay) if settings.ema_decay else None

    @property
    def result(self) -> nn.Module:
        """The model to keep."""
        return self._average.model if self._average else self._model

    def steps(self, first_step: int) -> Iterator[tuple[int, Iterator[Batch]]]:
        """Each step with the stream of micro-batches, of which it takes `accumulation`."""
        training, processes = self._training, self._processes
        batches = MicroBatches(
            training.views,
            training.order,
            count=micro_batch_size(self._settings, processes.world_size),
            teacher_outputs=training.teacher_outputs,
        )
        starts = positions(
            self._settings,
            first_step=first_step,
            last_step=training.total_steps,
            rank=processes.rank,
            world_size=processes.world_size,
        )
        loader = make_loader(batches, starts, workers=training.workers, pin_memory=processes.device.pins_memory)
        stream = iter(loader)
        for step in range(first_step, training.total_steps):
            yield step, stream

    def step(self, step: int, batches: Iterator[Batch], timeline: Timeline) -> Losses:
        """One optimiser step; gives the mean losses of this process's micro-batches, left on the device."""
        settings, processes = self._settings, self._processes
        torch.manual_seed(int(random_bits(_NOISE, self._training.seed, step, processes.rank)) >> 1)
        set_learning_rate(self._optimizer, learning_rate_at(step, settings, samples=len(self._training.samples)))
        means: Losses = {}
        for micro in range(settings.accumulation):
            with timeline.range("data"):
                batch = next(batches)
            with timeline.range("to_device"):
                batch = _move(batch, processes)
            with self._synchronised(last=micro == settings.accumulation - 1):
                with processes.device.autocast(settings.precision):
                    losses = self._training.objective(self._wrapped, batch, timeline)
                with timeline.range("backward"):
                    (losses["loss"] / settings.accumulation).backward()
            for name, loss in losses.items():
                means[name] = means.get(name, 0) + loss.detach() / settings.accumulation
        with timeline.range("optimizer"):
            self._update(step)
        return means

    def _update(self, step: int) -> None:
        if self._settings.clip_norm:
            nn.utils.clip_grad_norm_(self._parameters, self._settings.clip_norm)
        self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)
        if self._average:
            self._average.update(step)

    def _synchronised(self, *, last: bool) -> AbstractContextManager[object]:
        """Gradients are exchanged with the last micro-batch only."""
        if last or not isinstance(self._wrapped, DistributedDataParallel):
            return nullcontext()
        context: AbstractContextManager[object] = self._wrapped.no_sync()
        return context

    def validation_is_due(self, step: int) -> bool:
        """Whether to measure after this step: at the end, and every `validate_every_epochs`."""
        if step + 1 == self._training.total_steps:
            return True
        every = self._settings.validate_every_epochs * len(self._training.samples)
        size = self._settings.batch_size
        return every > 0 and (step + 1) * size // every > step * size // every

    def checkpoint_is_due(self, step: int) -> bool:
        """Whether to write a checkpoint after this step: at the end, and every `checkpoint_every` steps."""
        every = self._settings.checkpoint_every
        return every > 0 and ((step + 1) % every == 0 or step + 1 == self._training.total_steps)

    def save(self, step: int) -> None:
        """Write the state after `step` steps; all processes take part, the first one writes."""
        if isinstance(self._optimizer, ZeroRedundancyOptimizer):
            self._optimizer.consolidate_state_dict(to=0)
        if self._processes.is_first:
            average = self._average.model.state_dict() if self._average else None
            self._training.checkpoints.save(
                State(
                    step=step, model=self._model.state_dict(), optimizer=self._optimizer.state_dict(), average=average
                )
            )
        self._processes.barrier()

    def resume(self) -> int:
        """Take over the newest checkpoint; gives the number of steps that it has done."""
        state = self._training.checkpoints.latest()
        steps = set(self._processes.gather(state.step if state else 0))
        if len(steps) > 1:
            raise TrainingError(
                f"{self._training.name}: the processes find different checkpoints (steps {sorted(steps)}) at "
                f"{self._training.checkpoints.uri}; let TRAINER_CHECKPOINTS name a place that all machines reach, such as s3://BUCKET/NAME"
            )
        if state is None:
            return 0
        self._model.load_state_dict(state.model)
        self._optimizer.load_state_dict(dict(state.optimizer))
        if self._average and state.average is not None:
            self._average.model.load_state_dict(state.average)
        if self._processes.is_first:
            logger.info("%s  going on after step %d from a checkpoint", self._training.name, state.step)
        return state.step


class _Report:
    """Reads the losses back every `log_every` steps, checks that they are finite, and passes them on."""

    def __init__(self, training: Training, recorder: Recorder, tracker: Tracker, first_step: int) -> None:
        self._training, self._recorder, self._tracker = training, recorder, tracker
        self._waiting: list[tuple[int, Losses]] = []
        self.progress = Progress(
            training.name,
            first_step=first_step,
            total_steps=training.total_steps,
            images_per_step=training.settings.batch_size,
            active=training.processes.is_first,
        )

    def add(self, step: int, losses: Losses) -> None:
        """Keep a step's losses, on the device, until they are read back."""
        self._waiting.append((step, losses))

    def is_due(self, step: int) -> bool:
        """Whether this step's end is the time to read losses back."""
        return (step + 1) % self._training.settings.log_every == 0 or step + 1 == self._training.total_steps

    def publish(self, step: int) -> None:
        """Read the waiting losses back (the only time that the host waits for the device) and report their means."""
        if not self._waiting:
            return
        names = list(self._waiting[0][1])
        steps = [number for number, _ in self._waiting]
        table = torch.stack([torch.stack([losses[name].float() for name in names]) for _, losses in self._waiting])
        self._waiting.clear()
        _check_finite(table, steps, self._training)
        means = self._training.processes.mean(table).mean(0).tolist()
        rate = learning_rate_at(step, self._training.settings, samples=len(self._training.samples))
        values = dict(zip(names, means, strict=True)) | {"learning_rate": rate}
        self.progress.show(step, values)
        self.metrics(step, values)

    def metrics(self, step: int, values: Mapping[str, float]) -> None:
        """Pass metrics on to the evidence and to MLflow."""
        self._recorder.metrics(step, values)
        self._tracker.metrics(step, {f"{self._training.name}/{name}": value for name, value in values.items()})
        if "val_top1" in values:
            self.progress.say(f"{self._training.name}  step {step + 1}  validation top-1 {values['val_top1']:.2%}")


def _check_finite(table: Tensor, steps: list[int], training: Training) -> None:
    """Stop all processes if any loss of any of them is not finite.

    Args:
        table: this process's losses, [steps, losses].
        steps: number of each step.
        training: tells which samples were in it.
    """
    processes, settings = training.processes, training.settings
    bad = torch.zeros(len(steps), processes.world_size, device=table.device)
    bad[:, processes.rank] = (~torch.isfinite(table)).any(1).float()
    bad = processes.total(bad).cpu()
    if not bad.any():
        return
    row = int(bad.any(1).nonzero()[0])
    ranks = bad[row].nonzero().flatten().tolist()
    order = training.order
    count = micro_batch_size(settings, processes.world_size)
    names = [
        name
        for rank in ranks
        for start in positions(
            settings, first_step=steps[row], last_step=steps[row] + 1, rank=rank, world_size=processes.world_size
        )
        for name in training.samples.names(order.take(start, start + count).indices)
    ]
    shown = ", ".join(names[:8]) + (f" and {len(names) - 8} more" if len(names) > 8 else "")
    raise TrainingError(
        f"{training.name}: the loss is not finite at step {steps[row] + 1} (process {', '.join(map(str, ranks))}; samples {shown}); "
        f"lower {training.name} base_learning_rate or clip_norm, use precision=fp32, or look at these samples"
    )


def _wrap(model: nn.Module, settings: TrainingSettings, processes: Processes) -> nn.Module:
    """Compile the model where asked, and let several processes share its gradients."""
    compiled: Any = torch.compile(model) if processes.device.compiles_with(settings.compile) else model
    if processes.world_size == 1:
        return cast("nn.Module", compiled)
    return DistributedDataParallel(compiled, gradient_as_bucket_view=True, forward_sync_buffers=False)


Parts = TypeVar("Parts", Mixing, Recorded)


def _map(parts: Parts | None, move: Callable[[Tensor], Tensor]) -> Parts | None:
    """The same parts, each moved; one that is not there stays so."""
    if parts is None:
        return None
    return parts._replace(**{name: move(part) for name, part in parts._asdict().items() if part is not None})


def _move(batch: Batch, processes: Processes) -> Batch:
    """The batch on the device, mixed; from page-locked memory the copy does not hold up the host."""

    def move(tensor: Tensor) -> Tensor:
        return tensor.to(processes.device.torch_device, non_blocking=True)

    mixing = _map(batch.mixing, move)
    images = move(batch.images)
    return batch._replace(
        images=mix(images, mixing) if mixing else images,
        labels=move(batch.labels),
        mixing=mixing,
        recorded=_map(batch.recorded, move),
    )
