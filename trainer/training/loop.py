"""The training loop that masked-autoencoder pretraining, fine-tuning and distillation share.

An objective turns a batch into named losses; the loop does the rest: the schedule, autocast, accumulation, the gradient's norm, the
optimizer, the average of the weights, evidence, metrics, validation, checkpoints and resume.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, closing, contextmanager, nullcontext
from functools import partial

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from trainer.config.step_schedule import is_checkpoint_step, is_validation_step
from trainer.data.batch import Batch
from trainer.data.loader import MicroBatches, positions
from trainer.data.sampler import random_bits
from trainer.devices import RowShardedOptimizer
from trainer.devices.process_group import Preemption
from trainer.io.errors import PreemptedError, SettingsError, TrainingError
from trainer.io.formatting import listed
from trainer.models.networks import check_input_size, checkpoint_activations, input_size
from trainer.profiling.evidence import ContextRecord
from trainer.profiling.live_rules import LiveRules
from trainer.profiling.recorder import LoaderStats, Recorder, Sources, Startup
from trainer.profiling.timeline import span
from trainer.report.tracking.stage_runs import Tracker
from trainer.training.attempts import AttemptLog
from trainer.training.checkpoints import newest
from trainer.training.classification import validate
from trainer.training.loader_workers import MicroBatchLoader
from trainer.training.metric_logger import MetricLogger, ProgressBar
from trainer.training.optimizers import (
    AveragedModel,
    make_optimizer,
    parameter_groups,
    running_statistics,
    set_learning_rate,
)
from trainer.training.parallelize import DdpTimer, parallelize_model
from trainer.training.prefetch import Prefetcher, make_prefetcher
from trainer.training.spec import Losses, TrainingSpec, check_batch
from trainer.training.training_state import capture, restore

logger = logging.getLogger(__name__)

VALIDATION = "validation"
"""In `TrainingState.pending`: the last step's validation is still to be done."""
_NOISE = 0x6E6F697365
"""Keeps the seeds of dropout and stochastic depth apart from all other draws of the same seed."""
_ATTENTION_SAMPLES = 4
"""Images whose attention is recorded."""
_MAX_NAMES = 3
"""Weights that a message names."""


class Trainer:
    """A model, its optimizer and its recorder, and the loop over the steps, on one of the processes.

    All processes take the same decisions after a step, so no rank blocks on one that left.
    """

    def __init__(
        self, training: TrainingSpec, *, context: ContextRecord | None = None, startup: Startup | None = None
    ) -> None:
        """Bring the model to the device and make what a step needs.

        Args:
            context: what is known of the training beside what is measured, for its evidence.
            startup: what the time before it went into.

        Raises:
            SettingsError: the batch cannot be dealt to the processes.
            ModelError: as `checkpoint_activations`, if that is set.
            LostProcessError: a process did not come to the comparison of the models within the limit, or is gone.
        """
        settings, processes, objective = training.settings, training.processes, training.objective
        check_batch(objective.model, settings, processes)
        self.training, self.settings, self.processes = training, settings, processes
        self.model = objective.model.to(processes.device.torch_device).train()
        if settings.activation_checkpointing:
            checkpoint_activations(self.model)
        self._check_low_resolution()
        with processes.waiting("the comparison of the models"):
            self._parallel, self._graphs = parallelize_model(self.model, settings, processes)
        self._ddp_timer = DdpTimer(self._parallel) if isinstance(self._parallel, DistributedDataParallel) else None
        groups = parameter_groups(self.model, weight_decay=settings.weight_decay, layer_decay=training.layer_decay)
        self._parameters = [parameter for group in groups for parameter in group["params"]]
        self._optimizer = make_optimizer(groups, settings, processes)
        self._ema = AveragedModel(self.model, settings.ema_decay, processes.device) if settings.ema_decay else None
        self._statistics = running_statistics(self.model) if processes.world_size > 1 else []
        self.measured: Mapping[str, float] = {}
        """What the last validation measured."""
        checkpoints = training.checkpoints
        self._attempts = AttemptLog(checkpoints.uri, rank=processes.rank, check_ours=checkpoints.check_ours)
        self.loader = LoaderStats()
        # What is measured is a part of a common graph where devices trace.
        alike = processes.device.is_lazy and processes.world_size > 1
        self.recorder = Recorder(
            settings.evidence,
            name=training.name,
            device=processes.device.torch_device,
            rank=processes.rank,
            world_size=processes.world_size,
            context=context,
            startup=startup,
            sources=Sources(
                model=self.model,
                left_out=objective.left_out,
                attention=processes.is_first or alike,
                agree=(lambda due: processes.gather(due, "a sample of the weights")[0]) if alike else None,
                loader=self.loader,
                attempts=self._attempts.records,
                communication=self._ddp_timer.record if self._ddp_timer is not None else None,
            ),
        )

    @property
    def result(self) -> nn.Module:
        """The model to keep: the average of the weights where `ema_decay` is set."""
        return self._ema.model if self._ema else self.model

    @property
    def is_compiled(self) -> bool:
        """Whether something was compiled, or nothing was to be."""
        return self._graphs is None or self._graphs.count > 0

    def train(self, tracker: Tracker) -> nn.Module:
        """Train from the newest checkpoint, or from the beginning, to the end, and return `result`.

        Raises:
            TrainingError: a loss is not finite; the step and the samples are named. Or a rule of `stop_on` has a finding.
            PreemptedError: a process was asked to end; the checkpoint is written.
            LostProcessError: a process did not come to a step or a collective within the limit, or is gone.
        """
        training, settings, processes = self.training, self.settings, self.processes
        recorder, checkpoints, last_step = self.recorder, training.checkpoints, training.total_steps - 1
        first_step, pending = self.load_checkpoint()
        tracker.resume(checkpoints.uri)
        progress = ProgressBar.of(training, first_step)
        metrics = MetricLogger(training, recorder, tracker, progress)
        rules = LiveRules(recorder, training.watch, tracker=tracker, say=progress.say, active=processes.is_first)
        attempt = self._attempts.resumed_at(first_step)
        with attempt, recorder, progress, rules, checkpoints, Preemption(processes) as preemption:
            if VALIDATION in pending:  # the attempt before was asked to stop in the middle of it
                self._validate(first_step - 1, metrics)
            with self.prefetch(first_step) as batches:
                for step in range(first_step, training.total_steps):
                    with (
                        recorder.timeline.step(step, images=settings.batch_size),
                        processes.waiting(f"step {step + 1}"),
                    ):
                        losses = self.train_step(step, batches)
                    metrics.log(step, losses)
                    rules.check(step)
                    self._check_health(step, step + 1 - first_step)
                    validates = is_validation_step(step, settings, len(training.samples))
                    scores = self._validate(step, metrics, preemption) if validates else {}
                    if preemption.should_stop(f"step {step + 1}"):
                        self._stop(step, scores, metrics)
                    if is_checkpoint_step(step, settings, len(training.samples)):
                        self._save(step, metrics)
            metrics.flush()
            if preemption.should_stop("the end of the training", wait=True):
                self._stop(last_step, {}, metrics)
            with span("checkpoint"):
                checkpoints.finish()
        processes.barrier("the end of the training")
        return self.result

    @contextmanager
    def prefetch(self, first_step: int) -> Iterator[Prefetcher]:
        """Load this process's micro-batches from `first_step` on, `accumulation` a step, one ahead on the device."""
        training, processes, accumulation = self.training, self.processes, self.settings.accumulation
        views, last_step, world_size = training.views, training.total_steps, processes.world_size
        batches = MicroBatches(
            views,
            training.order,
            count=self.settings.batch_size,
            parts=world_size * accumulation,
            teacher_outputs=training.teacher_outputs,
        )
        loader = MicroBatchLoader(
            training.name,
            batches,
            positions(
                self.settings, first_step=first_step, last_step=last_step, rank=processes.rank, world_size=world_size
            ),
            accumulation=accumulation,
            workers="auto" if training.loading.workers is None else training.loading.workers,
            processes=processes,
            timeline=self.recorder.timeline,
            stats=self.loader,
        )
        with closing(make_prefetcher(iter(loader), views, processes.device)) as prefetcher:
            processes.device.dispatch()  # what was made before is no part of a step
            yield prefetcher

    def train_step(self, step: int, batches: Prefetcher) -> Losses:
        """Take one optimizer step.

        Returns this process's losses, left on the device: their mean over the processes is that over the step's images.
        """
        settings, processes = self.settings, self.processes
        processes.device.seed(int(random_bits(_NOISE, self.training.seed, step, processes.rank)) >> 1)
        set_learning_rate(self._optimizer, self.training.learning_rate(step), processes.device)
        means: Losses = {}
        for micro in range(settings.accumulation):
            batch = batches.next()
            # So that the sum is the mean over the step's images however they are dealt; `accumulation` where evenly.
            parts = settings.batch_size / (len(batch.labels) * processes.world_size)
            last = micro == settings.accumulation - 1
            context: AbstractContextManager[object] = nullcontext()
            if isinstance(self._parallel, DistributedDataParallel) and not last:
                context = self._parallel.no_sync()  # gradients are exchanged with the last micro-batch only
            with context:
                with processes.device.autocast(settings.precision), self._resolution(step):
                    losses = self.training.objective(self._parallel, batch)
                with span("backward"):
                    (losses["loss"] / parts).backward()
            for name, loss in losses.items():
                means[name] = means.get(name, 0) + loss.detach() / parts
            if not last:
                processes.device.dispatch()
            batches.preload()
        with self.recorder.tensor_sampler.around_update(step, partial(self._show, batch)), span("optimizer"):
            self._update(step)
        with span("dispatch") if processes.device.is_lazy else nullcontext():
            processes.device.dispatch()
        return means

    def _check_low_resolution(self) -> None:
        """Make sure that the models take the smaller input of the first steps, where `low_resolution` wants one."""
        (steps, models), size = self.training.low_resolution, self.settings.low_resolution.image_size
        if models and self.processes.device.is_lazy:
            raise SettingsError("low_resolution: on XLA each size is compiled by itself; leave it out")
        for model in models:
            check_input_size(model, size)
            if self.processes.is_first:
                sizes = f"{size} pixels, the others of {model.card.image_size}"
                logger.info("%s  the first %d steps see images of %s", self.training.name, steps, sizes)

    @contextmanager
    def _resolution(self, step: int) -> Iterator[None]:
        """Make the input smaller in the first steps, where `low_resolution` says so."""
        steps, models = self.training.low_resolution
        with ExitStack() as stack:
            for model in models if step < steps else ():
                stack.enter_context(input_size(model, self.settings.low_resolution.image_size))
            yield

    def _update(self, step: int) -> None:
        settings, processes = self.settings, self.processes
        exchanges = isinstance(self._optimizer, RowShardedOptimizer)  # it sums and clips gradients by itself
        if not exchanges and not isinstance(self._parallel, DistributedDataParallel):
            bf16 = settings.gradient_compression == "bf16"
            processes.device.sum_gradients(self._parameters, world_size=processes.world_size, bf16=bf16)
        if settings.clip_norm and not exchanges:
            nn.utils.clip_grad_norm_(self._parameters, settings.clip_norm)
        self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)
        if self._statistics:
            processes.device.average(self._statistics, world_size=processes.world_size)
        self.training.objective.end_step(settings, processes)
        if self._ema:
            self._ema.update(step)

    def _show(self, batch: Batch) -> None:
        """Send a few images through the model, so that the recorder sees its attention."""
        few = batch._replace(
            images=batch.images[:_ATTENTION_SAMPLES],
            keys=batch.keys[:_ATTENTION_SAMPLES],
            numbers=batch.numbers[:_ATTENTION_SAMPLES],
        )
        with self.processes.device.autocast(self.settings.precision):
            self.training.objective.forward_for_hooks(few)

    def _check_health(self, step: int, steps: int) -> None:
        """Note that `step` is done, and `steps` of this attempt; warn if too little or too much is compiled; raise what a write met."""
        if self._graphs is not None:
            self._graphs.check(self.training.name, steps, planned=step == self.training.low_resolution[0])
        if self._ddp_timer is not None:
            self._ddp_timer.read()
        self.training.checkpoints.check_failures()
        self._attempts.heartbeat(steps)

    # -----------------------------------------------------------------------------------------------------------------
    # Validation and checkpoints

    def _validate(
        self, step: int, metrics: MetricLogger, preemption: Preemption | None = None
    ) -> Mapping[str, float] | None:
        """Measure the model after `step`; empty where there is no way to, None where `preemption` has ended it."""
        split, workers = self.training.val_split, self.loader.workers or 0
        if split is None:
            return {}
        # Without `preemption` a request to end takes effect at once.
        what = f"the validation after step {step + 1}"
        should_stop = None if preemption is None else partial(preemption.should_stop, what)
        with span("evaluate"):
            scores = validate(
                self.result, split, self.processes, self.settings, should_stop=should_stop, workers=workers
            )
            if scores is not None:
                self.measured = scores
                metrics.metrics(step, scores)
        return scores

    def _save(self, step: int, metrics: MetricLogger) -> None:
        """Save a checkpoint of the state after `step`."""
        metrics.flush()  # a loss that is not finite ends the training before its weights are kept
        with span("checkpoint"):
            self.save_checkpoint(step + 1, needed=step == self.training.total_steps - 1)

    def _stop(self, step: int, scores: Mapping[str, float] | None, metrics: MetricLogger) -> None:
        """Write the last checkpoint after `step`, and end this attempt by `PreemptedError`."""
        metrics.flush()
        with span("checkpoint"):
            pending = (VALIDATION,) if scores is None else ()
            self.save_checkpoint(step + 1, pending=pending, needed=True)
            self.training.checkpoints.finish(needed=True)
        raise PreemptedError(
            f"{self.training.name}: was asked to end after step {step + 1}; its checkpoint is written, and the same command continues "
            "from there"
        )

    def save_checkpoint(self, steps: int, *, pending: tuple[str, ...] = (), needed: bool = False) -> None:
        """Copy the state after `steps` steps, which is then written in the background; all processes take part, the first one writes.

        The arguments are those of `capture` and `Checkpoints.save`, as are the errors; besides, weights that are not finite are refused.
        """
        average = self._ema.model if self._ema else None
        state = capture(steps, self.model, self._optimizer, average, processes=self.processes, pending=pending)
        # The loss was finite, but the update that followed may have spoilt the weights, which would never heal.
        weights = {name: state.model[name] for name, _ in self.model.named_parameters()}
        finite = torch.stack([torch.isfinite(weight).all() for weight in weights.values()]).tolist()
        bad = [name for name, is_finite in zip(weights, finite, strict=True) if not is_finite]
        if bad:
            name, shown = self.training.name, listed(bad, _MAX_NAMES)
            raise TrainingError(
                f"{name}: weights are not finite after step {steps} ({shown}), so no checkpoint of them is kept; lower {name} "
                "base_learning_rate or clip_norm, or use precision=fp32"
            )
        if self.processes.is_first:
            self.training.checkpoints.save(state, needed=needed)

    def load_checkpoint(self) -> tuple[int, tuple[str, ...]]:
        """Take over the newest checkpoint that is valid on all processes.

        Returns:
            The steps that it has done, and what of the last one is still to be done; 0 and nothing without a checkpoint.

        Raises:
            ArtifactError: it does not fit the model.
            TrainerError: as `checkpoints.newest`.
        """
        state = newest(self.training.checkpoints, self.processes)
        if state is None:
            return 0, ()
        restore(state, self.model, self._optimizer, self._ema.model if self._ema else None)
        if self.processes.is_first:
            logger.info("%s  resuming after step %d from a checkpoint", self.training.name, state.step)
        return state.step, state.pending
