"""The training loop that masked-autoencoder pretraining, fine-tuning and distillation share.

An objective turns a batch into named losses; the loop does the rest: the schedule, autocast, accumulation, the gradient's norm, the
optimiser, the average of the weights, evidence, metrics, validation, checkpoints and resume.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Generator, Iterator
from contextlib import AbstractContextManager, closing, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Protocol, TypeVar

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from trainer.config import DecodeOn, TrainingSettings, ViewsOn, WatchSettings, Workers
from trainer.data.batch import Batch
from trainer.data.loader import (
    MicroBatches,
    RecordedOutputs,
    Samples,
    Views,
    dealt,
    makes_views_on_device,
    micro_batch_size,
    positions,
)
from trainer.data.randomness import random_bits
from trainer.data.sampler import StatelessSampler
from trainer.data.views.mixing import mixes
from trainer.errors import SettingsError, TrainingError
from trainer.profiling.recorder import Recorder
from trainer.profiling.timeline import span
from trainer.profiling.watch import Watch
from trainer.tracking import Tracker
from trainer.training.attempts import Attempts
from trainer.training.averages import AveragedModel, running_statistics
from trainer.training.boundaries import Boundary, Validate
from trainer.training.checkpoints import Checkpoints, newest
from trainer.training.checkpoints.training_state import TrainingState, capture, restore
from trainer.training.loader_workers import MicroBatchLoader
from trainer.training.metric_logger import MetricLogger
from trainer.training.optimizers import make_optimizer, parameter_groups, set_learning_rate
from trainer.training.parallelize import DdpTimer, parallelize_model
from trainer.training.preemption import Preemption
from trainer.training.prefetch import Prefetcher, make_prefetcher
from trainer.training.process_group import Processes
from trainer.training.progress_bar import ProgressBar
from trainer.training.step_schedule import checkpoint_steps, learning_rate_at, step_count, validation_steps
from trainer.training.zero_redundancy import RowShardedOptimizer

logger = logging.getLogger(__name__)

Fitted = TypeVar("Fitted", bound=TrainingSettings)

Losses = dict[str, Tensor]
"""Named scalar losses; `loss` is the one that is minimised."""

_NOISE = 0x6E6F697365
"""Keeps the seeds of dropout and stochastic depth apart from all other draws of the same seed."""

_SHOWN = 4
"""Images on which attention is looked at."""

_NAMED = 3
"""Weights that a message names."""


class Objective(Protocol):
    """What is learned: a model to train and how a batch becomes losses."""

    model: nn.Module
    """Holds exactly the weights that are trained."""
    left_out: Collection[str]
    """Names of those weights that are not trained on purpose."""

    def __call__(self, model: nn.Module, batch: Batch) -> Losses:
        """Losses of a batch that is on the device; `model` is `self.model`, perhaps wrapped for several processes."""
        ...

    def show(self, batch: Batch) -> None:
        """A forward pass of `self.model` alone over a batch, for whoever watches its modules."""
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
    workers: Workers
    """Loader processes beside this process."""
    processes: Processes
    checkpoints: Checkpoints
    layer_decay: float = 1.0
    view_seed: int | None = None
    """Seed of the views; as `seed` where not given."""
    view_count: int = 0
    """How many views of a sample there are; 0: a new one each epoch."""
    teacher_outputs: RecordedOutputs | None = None
    """Recorded outputs, which travel with the batches."""
    views_on: ViewsOn = "auto"
    """Where views are made."""
    decode_on: DecodeOn = "cpu"
    """Where stored images are decoded."""
    validate: Validate | None = None
    """Measures a model on the validation split."""
    watch: WatchSettings = field(default_factory=WatchSettings)
    """How it judges itself while it runs."""
    labelled_share: float = 0.0
    """Share of labelled images in each step, where there are others too; 0: they come as all do."""

    @property
    def total_steps(self) -> int:
        """Optimiser steps of the whole training."""
        return step_count(self.settings, len(self.samples))

    @property
    def order(self) -> StatelessSampler:
        """Which sample comes when, as which view."""
        return StatelessSampler(
            len(self.samples),
            self.seed,
            view_seed=self.view_seed,
            views=self.view_count,
            paired=mixes(self.settings.views),
            labelled=self.samples.labelled,
            labelled_share=self.labelled_share,
        )

    @property
    def views(self) -> Views:
        """The views of the samples."""
        return Views(
            self.samples,
            size=self.view_size,
            seed=self.seed if self.view_seed is None else self.view_seed,
            settings=self.settings.views,
            on_device=makes_views_on_device(self.views_on, self.processes.device.kind),
            decode_on=self.decode_on,
            exact=self.teacher_outputs is not None,
        )

    def learning_rate(self, step: int) -> float:
        """The learning rate of a step."""
        return learning_rate_at(step, self.settings, samples=len(self.samples))

    def positions(self, first_step: int, last_step: int, rank: int) -> Iterator[int]:
        """Where the micro-batches of a process begin in the order."""
        world_size = self.processes.world_size
        return positions(self.settings, first_step=first_step, last_step=last_step, rank=rank, world_size=world_size)

    def names(self, step: int, rank: int) -> list[str]:
        """The samples that a process sees in a step."""
        order = self.order
        runs = dealt(self.settings, step=step, rank=rank, world_size=self.processes.world_size)
        return [name for run in runs for name in self.samples.names(order.take(run.start, run.stop).indices)]


def train(training: Training, recorder: Recorder, tracker: Tracker) -> nn.Module:
    """Run a training to its end, from its newest checkpoint if there is one.

    Returns:
        The trained model: the average of the weights where `ema_decay` is set.

    Raises:
        TrainingError: a loss is not finite; the step and the samples are named. Or a rule of `stop_on` has a finding.
        SettingsError: the batch cannot be dealt to the processes.
        PreemptedError: a process was asked to end; the checkpoint is written.
        LostProcessError: a process did not come to a step or a meeting within the limit, or is gone.
    """
    loop = Loop(training)
    first_step = loop.resume()
    settings, processes, timeline = training.settings, training.processes, recorder.timeline
    report = _report(training, recorder, tracker, first_step)
    say, active = report.progress.say, processes.is_first
    watch = Watch(recorder, training.watch, tracker=tracker, say=say, active=active)
    attempts = Attempts(
        training.checkpoints.uri,
        first_step,
        active=processes.is_first,
        rank=processes.rank,
        look=training.checkpoints.check_ours,
    )
    recorder.attempts = attempts.records
    tracker.go_on(training.checkpoints.uri)
    training.checkpoints.beforehand = tracker.keep
    with attempts, recorder, report.progress, watch, training.checkpoints, Preemption(processes) as preemption:
        boundary = _boundary(training, loop, report, preemption)
        boundary.catch_up(first_step - 1, loop.pending)
        with closing(loop.steps(first_step, recorder)) as steps:
            for step, feed in steps:
                with timeline.step(step, images=settings.batch_size), processes.waiting(f"step {step + 1}"):
                    losses = loop.step(step, feed, recorder)
                report.add(step, losses)
                watch.look(step)
                loop.look_back(step + 1 - first_step)
                attempts.seen(step + 1 - first_step)
                boundary.pass_over(step)
        boundary.finish(training.total_steps - 1)
    processes.barrier("the end of the training")
    return loop.result


def _boundary(training: Training, loop: Loop, report: MetricLogger, preemption: Preemption) -> Boundary:
    settings, samples = training.settings, len(training.samples)
    return Boundary(
        training.name,
        loop,
        validate=training.validate,
        validations=validation_steps(settings, samples),
        checkpoints=checkpoint_steps(settings, samples),
        kept=training.checkpoints,
        report=report,
        preemption=preemption,
    )


def _report(training: Training, recorder: Recorder, tracker: Tracker, first_step: int) -> MetricLogger:
    settings, processes = training.settings, training.processes
    progress = ProgressBar(
        training.name,
        first_step=first_step,
        total_steps=training.total_steps,
        images_per_step=settings.batch_size,
        active=processes.is_first,
    )
    return MetricLogger(
        training.name,
        processes,
        recorder,
        tracker,
        progress,
        log_every=settings.log_every,
        learning_rate=training.learning_rate,
        samples=training.names,
    )


def fit_batch(section: str, settings: Fitted, images: int, processes: Processes) -> Fitted:
    """The settings with a batch that the images can fill; a larger one is clamped, with a warning.

    Args:
        section: full name of the settings.
        settings: of a training.
        images: how many it has to train on.
        processes: that share a step.
    """
    parts = processes.world_size * settings.accumulation if processes.device.traces else 1
    fitted = settings.for_images(images, parts)
    if fitted is not settings and processes.is_first:
        logger.warning(settings.clamp_warning(section, images, fitted))
    return fitted


def check_batch(settings: TrainingSettings, processes: Processes) -> None:
    """Make sure that a step can be dealt to the processes.

    Raises:
        SettingsError: there are too few images, or not equally many for all where each size would be a graph of its own.
    """
    most, parts = micro_batch_size(settings, processes.world_size), processes.world_size * settings.accumulation
    if processes.device.traces and most * parts != settings.batch_size:
        raise SettingsError(
            f"batch_size = {settings.batch_size} cannot be dealt evenly to {processes.world_size} processes x {settings.accumulation} "
            f"micro-batches, and on XLA each size is compiled by itself; choose {most * parts}"
        )


class Loop:
    """The parts that a step moves."""

    def __init__(self, training: Training) -> None:
        settings, processes = training.settings, training.processes
        self._training, self._settings, self._processes = training, settings, processes
        check_batch(settings, processes)
        self._model = training.objective.model.to(processes.device.torch_device).train()
        with processes.waiting("the comparison of the models"):
            self._wrapped, self._graphs = parallelize_model(self._model, settings, processes)
        self._exchange = DdpTimer(self._wrapped) if isinstance(self._wrapped, DistributedDataParallel) else None
        groups = parameter_groups(self._model, weight_decay=settings.weight_decay, layer_decay=training.layer_decay)
        self._parameters = [parameter for group in groups for parameter in group["params"]]
        self._optimizer = make_optimizer(groups, settings, processes)
        self._average = AveragedModel(self._model, settings.ema_decay, processes.device) if settings.ema_decay else None
        self._best: float | None = None
        self._recorder: Recorder | None = None
        self._statistics = running_statistics(self._model) if processes.world_size > 1 else []
        self.pending: tuple[str, ...] = ()
        """What belongs to the step before the first one and is still to be done, where the training goes on."""

    @property
    def result(self) -> nn.Module:
        """The model to keep."""
        return self._average.model if self._average else self._model

    @property
    def is_compiled(self) -> bool:
        """Whether something was compiled, or nothing was to be."""
        return self._graphs is None or self._graphs.count > 0

    @property
    def loaders(self) -> int:
        """Loader processes beside this process: none before it is known how many the training needs."""
        return (self._recorder.workers if self._recorder is not None else None) or 0

    def steps(self, first_step: int, recorder: Recorder) -> Generator[tuple[int, Prefetcher]]:
        """Each step with the feed of micro-batches, of which it takes `accumulation`."""
        training, processes, self._recorder = self._training, self._processes, recorder
        if self._exchange is not None:
            recorder.communication = self._exchange.record
        alike = processes.device.traces and processes.world_size > 1
        recorder.looks.at(
            self._model,
            left_out=training.objective.left_out,
            attention=processes.is_first or alike,
            agreed=(lambda due: processes.gather(due, "a look at the weights")[0]) if alike else None,
        )
        views = training.views
        batches = MicroBatches(
            views,
            training.order,
            count=self._settings.batch_size,
            parts=processes.world_size * self._settings.accumulation,
            teacher_outputs=training.teacher_outputs,
        )
        starts = training.positions(first_step, training.total_steps, processes.rank)
        loading = MicroBatchLoader(
            batches,
            starts,
            accumulation=self._settings.accumulation,
            workers=training.workers,
            processes=processes,
            recorder=recorder,
        )
        feed = make_prefetcher(iter(loading), views, processes.device)
        processes.device.dispatch()  # what was made before is no part of a step
        with closing(feed):
            for step in range(first_step, training.total_steps):
                yield step, feed

    def step(self, step: int, feed: Prefetcher, recorder: Recorder) -> Losses:
        """One optimiser step; gives this process's losses, left on the device: their mean over the processes is that over the images."""
        settings, processes = self._settings, self._processes
        processes.device.seed(int(random_bits(_NOISE, self._training.seed, step, processes.rank)) >> 1)
        set_learning_rate(self._optimizer, self._training.learning_rate(step), processes.device)
        means: Losses = {}
        for micro in range(settings.accumulation):
            batch = feed.take()
            # So that the sum is the mean over the step's images however they are dealt; `accumulation` where evenly.
            parts = settings.batch_size / (len(batch.labels) * processes.world_size)
            with self._synchronised(last=micro == settings.accumulation - 1):
                with processes.device.autocast(settings.precision):
                    losses = self._training.objective(self._wrapped, batch)
                with span("backward"):
                    (losses["loss"] / parts).backward()
            for name, loss in losses.items():
                means[name] = means.get(name, 0) + loss.detach() / parts
            if micro < settings.accumulation - 1:
                processes.device.dispatch()
            feed.send()
        with recorder.looks.around_update(step, partial(self._show, batch)), span("optimizer"):
            self._update(step)
        with span("dispatch") if processes.device.traces else nullcontext():
            processes.device.dispatch()
        return means

    def _show(self, batch: Batch) -> None:
        few = batch._replace(images=batch.images[:_SHOWN], keys=batch.keys[:_SHOWN], numbers=batch.numbers[:_SHOWN])
        with self._processes.device.autocast(self._settings.precision):
            self._training.objective.show(few)

    def look_back(self, steps: int) -> None:
        """After `steps` steps of this process: warn where the compiler does not do what it is meant to; see how gradients travelled."""
        if self._graphs is not None:
            self._graphs.check(self._training.name, steps)
        if self._exchange is not None:
            self._exchange.look()
        self._training.checkpoints.look()

    def _update(self, step: int) -> None:
        exchanges = isinstance(self._optimizer, RowShardedOptimizer)
        if not exchanges and not isinstance(self._wrapped, DistributedDataParallel):
            bf16 = self._settings.gradient_compression == "bf16"
            self._processes.device.sum_gradients(self._parameters, world_size=self._processes.world_size, bf16=bf16)
        if self._settings.clip_norm and not exchanges:
            nn.utils.clip_grad_norm_(self._parameters, self._settings.clip_norm)
        self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)
        if self._statistics:
            self._processes.device.average(self._statistics, world_size=self._processes.world_size)
        if self._average:
            self._average.update(step)

    def _synchronised(self, *, last: bool) -> AbstractContextManager[object]:
        """Gradients are exchanged with the last micro-batch only."""
        if last or not isinstance(self._wrapped, DistributedDataParallel):
            return nullcontext()
        context: AbstractContextManager[object] = self._wrapped.no_sync()
        return context

    def is_best(self, top1: float | None) -> bool:
        """Whether a top-1 accuracy is the highest so far; the same on every process."""
        return top1 is not None and (self._best is None or top1 > self._best)

    def save(
        self, step: int, *, top1: float | None = None, pending: tuple[str, ...] = (), needed: bool = False
    ) -> None:
        """Copy the state after `step` steps, which is then written in the background; all processes take part, the first one writes.

        Args:
            step: optimiser steps done.
            top1: accuracy on the validation split after them, where it was measured.
            pending: what belongs to the last of them and is still to be done.
            needed: whether no step follows.

        Raises:
            TrainingError: weights are not finite; they are not kept.
            TrainerError: as `Checkpoints.save`.
        """
        average = self._average.model if self._average else None
        state = capture(step, self._model, self._optimizer, average, processes=self._processes, pending=pending)
        self._check_finite(step, state)
        if self.is_best(top1):
            self._best = top1
        if self._processes.is_first:
            self._training.checkpoints.save(state, top1=top1, needed=needed)

    def _check_finite(self, step: int, state: TrainingState) -> None:
        """The loss was finite, but the update that followed may have spoilt the weights, which would never heal."""
        weights = {name: state.model[name] for name, _ in self._model.named_parameters()}
        finite = torch.stack([torch.isfinite(weight).all() for weight in weights.values()]).tolist()
        bad = [name for name, is_finite in zip(weights, finite, strict=True) if not is_finite]
        if bad:
            shown = ", ".join(bad[:_NAMED]) + (f" and {len(bad) - _NAMED} more" if len(bad) > _NAMED else "")
            name = self._training.name
            raise TrainingError(
                f"{name}: weights are not finite after step {step} ({shown}), so no checkpoint of them is kept; lower {name} "
                "base_learning_rate or clip_norm, or use precision=fp32"
            )

    def resume(self) -> int:
        """Take over the newest checkpoint that is valid on all processes; gives the number of steps that it has done.

        Raises:
            ArtifactError: it does not fit the model.
            TrainerError: as `checkpoints.newest`.
        """
        checkpoints = self._training.checkpoints
        state = newest(checkpoints, self._processes)
        self._best = self._processes.gather(checkpoints.best, "the best accuracy so far")[0]
        if state is None:
            return 0
        restore(state, self._model, self._optimizer, self._average.model if self._average else None)
        self.pending = state.pending
        if self._processes.is_first:
            logger.info("%s  going on after step %d from a checkpoint", self._training.name, state.step)
        return state.step
