"""The training loop that masked-autoencoder pretraining, fine-tuning and distillation share.

An objective turns a batch into named losses; the loop does the rest of a step: the schedule, autocast, accumulation, the gradient's
norm, the optimizer, the average of the weights, validation. Hooks do what accompanies the steps: checkpoints, metrics, the record, rules.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, closing, contextmanager, nullcontext
from functools import partial

from torch import nn
from torch.nn.parallel import DistributedDataParallel

from trainer.config.conflicts import low_resolution_conflict
from trainer.config.step_schedule import is_validation_step
from trainer.data.batch import Batch
from trainer.data.fetch_ahead import FetchAhead
from trainer.data.loader import MicroBatches, positions
from trainer.data.sampler import random_bits
from trainer.devices import RowShardedOptimizer
from trainer.devices.process_group import Preemption
from trainer.io.errors import SettingsError
from trainer.models.networks import Classifier, check_input_size, checkpoint_activations, input_size
from trainer.profiling.recorder import LoaderStats
from trainer.profiling.timeline import current_timeline, span
from trainer.training.classification import ConfusedPairs, ValidationBatches, validate
from trainer.training.loader_workers import MicroBatchLoader
from trainer.training.optimizers import (
    AveragedModel,
    make_optimizer,
    parameter_groups,
    running_statistics,
    set_learning_rate,
)
from trainer.training.parallelize import DdpTimer, parallelize_model
from trainer.training.prefetch import Prefetcher, make_prefetcher
from trainer.training.sharding import alias, gather, is_fsdp, outline, release_gathered, shard
from trainer.training.spec import Losses, TrainingSpec, check_batch

logger = logging.getLogger(__name__)

_NOISE = 0x6E6F697365
"""Keeps the seeds of dropout and stochastic depth apart from all other draws of the same seed."""
_ATTENTION_SAMPLES = 4
"""Images whose attention is recorded."""


class Hook:
    """Base of what accompanies a training; each method does nothing unless overridden.

    All processes have the same hooks. `Trainer` enters `running` from the last hook to the first, and calls the other methods from the
    first to the last.
    """

    @contextmanager
    def running(self, trainer: Trainer) -> Iterator[None]:  # noqa: ARG002  # hooks override it
        """Surround all steps; the code before the `yield` may change where the training begins."""
        yield

    def around_step(self, step: int) -> AbstractContextManager[object]:  # noqa: ARG002  # hooks override it
        """Surround a step."""
        return nullcontext()

    def around_update(
        self,
        step: int,  # noqa: ARG002  # hooks override it
        forward: Callable[[], None],  # noqa: ARG002  # hooks override it
    ) -> AbstractContextManager[object]:
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


class Trainer:
    """A model, its optimizer and the loop over the steps, on one of the processes.

    All processes take the same decisions after a step, so no rank blocks on one that left.
    """

    def __init__(self, spec: TrainingSpec, hooks: Sequence[Hook] = ()) -> None:
        """Bring the model to the device and make what a step needs.

        Raises:
            SettingsError: the batch cannot be dealt to the processes.
            ModelError: as `checkpoint_activations`, if that is set.
            LostProcessError: a process did not come to the comparison of the models within the limit, or is gone.
        """
        settings, processes, objective = spec.settings, spec.processes, spec.objective
        check_batch(objective.model, settings, processes)
        self.spec, self.settings, self.processes, self.hooks = spec, settings, processes, hooks
        self.is_sharded = is_fsdp(settings, processes)
        """Whether each process keeps a share of the weights."""
        self.model = objective.model.train()
        if not self.is_sharded:  # whose blocks go to the device as they are cut
            self.model.to(processes.device.torch_device)
        if settings.activation_checkpointing:
            checkpoint_activations(self.model)
        self._check_low_resolution()
        self._outline = outline(self.model) if self.is_sharded else None
        average = alias(self.model) if self.is_sharded and settings.ema_decay else None
        with processes.waiting("the comparison of the models"):
            self._parallel, self._graphs = parallelize_model(self.model, settings, processes)
            if average is not None:
                shard(average, settings, processes)
        if (
            self._graphs is not None and processes.device.kind == "cuda"
        ):  # on a CPU it would round otherwise, and gain nothing
            objective.compile(self._graphs)
        self._ddp_timer = DdpTimer(self._parallel) if isinstance(self._parallel, DistributedDataParallel) else None
        self.communication = None if self._ddp_timer is None else self._ddp_timer.record
        """Returns how long gradients travel, where DDP exchanges them."""
        groups = parameter_groups(self.model, weight_decay=settings.weight_decay, layer_decay=spec.layer_decay)
        self._parameters = [parameter for group in groups for parameter in group["params"]]
        self.optimizer = make_optimizer(groups, settings, processes)
        self._ema: AveragedModel | None = None
        if settings.ema_decay:
            self._ema = AveragedModel(self.model, settings.ema_decay, processes.device, average)
        self._statistics = running_statistics(self.model) if processes.world_size > 1 else []
        self.loader = LoaderStats()
        self.preemption = Preemption(processes)
        self.first_step = 0
        """Where this attempt begins."""
        self.owes_validation = False
        """Whether the validation of the last step was interrupted."""
        self.measured: Mapping[str, float] = {}
        """Scores of the last validation."""
        classifier = next((one for one in self.model.modules() if isinstance(one, Classifier)), None)
        self._validation: ValidationBatches | None = None
        self.confused = ConfusedPairs(classifier.card.labels if classifier is not None else ())

    @property
    def result(self) -> nn.Module:
        """The model to keep: the average of the weights where `ema_decay` is set; sharded as the training is."""
        return self.averaged or self.model

    @property
    def averaged(self) -> nn.Module | None:
        """The average of the weights, where `ema_decay` is set."""
        return self._ema.model if self._ema else None

    @property
    def is_compiled(self) -> bool:
        """Whether something was compiled, or nothing was to be."""
        return self._graphs is None or self._graphs.count > 0

    def train(self) -> nn.Module:
        """Take all steps that are left, and return `result`; where it is sharded, a copy with whole weights, on the host.

        Raises:
            TrainerError: as a hook raises, such as `TrainingError` of a loss that is not finite, or `PreemptedError`.
            LostProcessError: a process did not come to a step or a collective within the limit, or is gone.
        """
        spec, settings, processes = self.spec, self.settings, self.processes
        with self.running(), self.preemption as preemption:
            if self.owes_validation:  # a request to end takes effect at once
                self._validate(self.first_step - 1)
            with self.prefetch(self.first_step) as batches:
                for step in range(self.first_step, spec.last_step):
                    with processes.waiting(f"step {step + 1}"):
                        losses = self.take_step(step, batches)
                    self._check_compilation(step)
                    if step == spec.last_step - 1 or is_validation_step(step, settings, len(spec.samples)):
                        what = f"the validation after step {step + 1}"
                        self._validate(step, partial(preemption.should_stop, what))
                    for hook in self.hooks:
                        hook.after_step(step, losses)
            for hook in self.hooks:
                hook.after_last_step()
        processes.barrier("the end of the training")
        if self._outline is None:
            return self.result
        self.optimizer.state.clear()  # makes room for the whole weights
        with processes.waiting("the gathering of the trained weights"):
            return gather(self.result, self._outline)

    @contextmanager
    def running(self) -> Iterator[None]:
        """Surround the steps with the hooks."""
        with ExitStack() as stack:
            for hook in reversed(self.hooks):
                stack.enter_context(hook.running(self))
            try:
                yield
            finally:
                if self._validation is not None:
                    self._validation.close()

    @contextmanager
    def prefetch(self, first_step: int) -> Iterator[Prefetcher]:
        """Load this process's micro-batches from `first_step` on, `accumulation` a step, one ahead on the device."""
        spec, processes, accumulation = self.spec, self.processes, self.settings.accumulation
        views, last_step, world_size = spec.views, spec.last_step, processes.world_size
        if views.reside(processes.device, spec.loading.resident or "auto") and processes.is_first:
            logger.info("%s  all %d images lie on the device (data.resident)", spec.name, len(spec.samples))
        batches = MicroBatches(
            views,
            spec.order,
            count=self.settings.batch_size,
            parts=world_size * accumulation,
            teacher_outputs=spec.teacher_outputs,
        )
        starts = positions(
            self.settings, first_step=first_step, last_step=last_step, rank=processes.rank, world_size=world_size
        )
        with FetchAhead(
            spec.samples, spec.order, rank=processes.local_rank, processes=processes.local_world_size
        ) as fetching:
            loader = MicroBatchLoader(
                spec.name,
                batches,
                starts if views.resident is not None else fetching.noted(starts),
                accumulation=accumulation,
                timeline=current_timeline(),
                workers="auto" if spec.loading.workers is None else spec.loading.workers,
                processes=processes,
                stats=self.loader,
            )
            with closing(make_prefetcher(iter(loader), views, processes.device)) as prefetcher:
                processes.device.dispatch()  # what was made before is no part of a step
                yield prefetcher

    def take_step(self, step: int, batches: Prefetcher) -> Losses:
        """Take a step within its hooks; returns as `train_step`."""
        with ExitStack() as stack:
            for hook in self.hooks:
                stack.enter_context(hook.around_step(step))
            return self.train_step(step, batches)

    def train_step(self, step: int, batches: Prefetcher) -> Losses:
        """Take one optimizer step.

        Returns this process's losses, left on the device: their mean over the processes is that over the step's images.
        """
        settings, processes = self.settings, self.processes
        processes.device.seed(int(random_bits(_NOISE, self.spec.seed, step, processes.rank)) >> 1)
        set_learning_rate(self.optimizer, self.spec.learning_rate(step), processes.device)
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
                    losses = self.spec.objective(self._parallel, batch)
                with span("backward"):
                    (losses["loss"] / parts).backward()
            for name, loss in losses.items():
                means[name] = means.get(name, 0) + loss.detach() / parts
            if not last:
                processes.device.dispatch()
            batches.preload()
        with ExitStack() as stack:
            for hook in self.hooks:
                stack.enter_context(hook.around_update(step, partial(self._forward_for_hooks, batch)))
            stack.enter_context(span("optimizer"))
            self._update(step)
        with span("dispatch") if processes.device.is_lazy else nullcontext():
            processes.device.dispatch()
        return means

    def _check_low_resolution(self) -> None:
        """Make sure that the models take the smaller input of the first steps, where `low_resolution` wants one."""
        (steps, models), size = self.spec.low_resolution, self.settings.low_resolution.image_size
        if mistake := low_resolution_conflict(self.spec.name, self.settings, self.processes.device.kind):
            raise SettingsError(mistake)
        for model in models:
            check_input_size(model, size)
            if self.processes.is_first:
                sizes = f"{size} pixels, the others of {model.card.image_size}"
                logger.info("%s  the first %d steps see images of %s", self.spec.name, steps, sizes)

    @contextmanager
    def _resolution(self, step: int) -> Iterator[None]:
        """Make the input smaller in the first steps, where `low_resolution` says so."""
        steps, models = self.spec.low_resolution
        with ExitStack() as stack:
            for model in models if step < steps else ():
                stack.enter_context(input_size(model, self.settings.low_resolution.image_size))
            yield

    def _update(self, step: int) -> None:
        settings, processes = self.settings, self.processes
        exchanges = isinstance(self.optimizer, RowShardedOptimizer)  # it sums and clips gradients by itself
        if not exchanges and not isinstance(self._parallel, DistributedDataParallel):
            bf16 = settings.gradient_compression == "bf16"
            processes.device.sum_gradients(self._parameters, world_size=processes.world_size, bf16=bf16)
        if settings.clip_norm and not exchanges:
            nn.utils.clip_grad_norm_(self._parameters, settings.clip_norm)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        if self._statistics:
            processes.device.average(self._statistics, world_size=processes.world_size)
        self.spec.objective.end_step(settings, processes)
        if self._ema:
            self._ema.update(step)

    def _forward_for_hooks(self, batch: Batch) -> None:
        """Send a few images through the model, so that hooks on its modules see their attention."""
        few = batch._replace(
            images=batch.images[:_ATTENTION_SAMPLES],
            keys=batch.keys[:_ATTENTION_SAMPLES],
            numbers=batch.numbers[:_ATTENTION_SAMPLES],
        )
        with self.processes.device.autocast(self.settings.precision):
            self.spec.objective.forward_for_hooks(few)
        release_gathered(self.model)

    def _check_compilation(self, step: int) -> None:
        """Warn if too little or too much is compiled; read how long gradients traveled."""
        if self._graphs is not None:
            steps = step + 1 - self.first_step
            self._graphs.check(self.spec.name, steps, planned=step == self.spec.low_resolution[0])
        if self._ddp_timer is not None:
            self._ddp_timer.read()

    def _validate(self, step: int, should_stop: Callable[[], bool] | None = None) -> None:
        """Measure the model after `step`, where there is a way to; `should_stop` may interrupt it."""
        split, workers = self.spec.val_split, self.loader.workers or 0
        if split is None:
            return
        with span("evaluate"):
            if self._validation is None:
                self._validation = ValidationBatches(split, self.processes, self.settings, workers)
            scores = validate(self.result, self._validation, should_stop=should_stop, confused=self.confused)
            release_gathered(self.result)
            self.owes_validation = scores is None
            if scores is not None:
                self.measured = scores
                for hook in self.hooks:
                    hook.after_validation(step, scores)
