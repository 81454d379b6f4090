"""What a training is: the objective, the images, the settings and the processes that share a step."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from torch import Tensor, nn

from trainer.config import DistillSettings, ResidentSettings, TrainingSettings
from trainer.config.step_schedule import learning_rate_at, low_resolution_steps, step_count
from trainer.data import loader
from trainer.data.batch import Batch
from trainer.data.dataset import Split
from trainer.data.sampler import StatelessSampler
from trainer.data.views.rendering import mixes
from trainer.devices.process_group import Processes
from trainer.io.errors import SettingsError
from trainer.models.networks import Classifier, batch_norms

if TYPE_CHECKING:
    from trainer.training.checkpoints import Checkpoints

logger = logging.getLogger(__name__)

Fitted = TypeVar("Fitted", bound=TrainingSettings)

Losses = dict[str, Tensor]
"""Named scalar losses; `loss` is the one that is minimized."""


class Objective(Protocol):
    """What is learned: a model to train and how a batch becomes losses."""

    model: nn.Module
    """Holds exactly the weights that are trained."""
    left_out: Collection[str]
    """Names of those weights that are not trained on purpose."""

    def __call__(self, model: nn.Module, batch: Batch) -> Losses:
        """Compute the losses of a batch that is on the device; `model` is `self.model`, perhaps compiled or wrapped by DDP."""
        ...

    def compile(self, backend: Callable[..., Any]) -> None:  # noqa: ARG002  # most have nothing to compile
        """Compile what is computed besides the model, with a backend of torch.compile."""
        return

    def end_step(self, settings: TrainingSettings, processes: Processes) -> None:  # noqa: ARG002  # most have nothing to do
        """Do what belongs to the end of a step, on all processes, when its weights are updated."""
        return

    def forward_for_hooks(self, batch: Batch) -> None:
        """Run a forward pass of `self.model` alone over a batch, for hooks on its modules."""
        ...


@dataclass(frozen=True, kw_only=True)
class TrainingSpec:
    """One training: what is learned, from what, and how."""

    name: str
    """`mae`, `finetune` or `distill`: names its evidence, metrics and checkpoints."""
    objective: Objective
    samples: loader.Samples
    view_size: int
    """Edge of the views, in pixels."""
    settings: TrainingSettings
    loading: ResidentSettings
    """The seed of all draws; how many processes load, and where images are decoded and views made."""
    processes: Processes
    layer_decay: float = 1.0
    teacher_outputs: loader.RecordedOutputs | None = None
    """Recorded outputs, which travel with the batches; their views are seen again. None: a new view each epoch, drawn from `seed`."""
    val_split: Split | None = None
    """Where the model's accuracy is measured; None where it is no classifier."""
    labeled_share: float = 0.0
    """Share of labeled images in each step, where there are others too; 0: they come as all do."""
    pause_epochs: float = 0.0
    """Epochs after which this attempt ends, to be resumed later; 0: at the end of the training."""

    @property
    def seed(self) -> int:
        return self.loading.seed or 0

    @property
    def total_steps(self) -> int:
        return step_count(self.settings, len(self.samples))

    @property
    def last_step(self) -> int:
        """The step before which this attempt ends."""
        paused = math.ceil(self.pause_epochs * len(self.samples) / self.settings.batch_size)
        return min(paused or self.total_steps, self.total_steps)

    @property
    def order(self) -> StatelessSampler:
        """Which sample comes when, as which view."""
        recorded = self.teacher_outputs
        return StatelessSampler(
            len(self.samples),
            self.seed,
            view_seed=None if recorded is None else recorded.view_seed,
            views=0 if recorded is None else recorded.view_count,
            paired=mixes(self.settings.views),
            labeled=self.samples.labeled,
            labeled_share=self.labeled_share,
        )

    @property
    def views(self) -> loader.Views:
        device = self.processes.device
        return loader.Views(
            self.samples,
            size=self.view_size,
            seed=self.seed if self.teacher_outputs is None else self.teacher_outputs.view_seed,
            settings=self.settings.views,
            on_device=loader.makes_views_on_device(self.loading.views_on or "auto", device.kind),
            decode_on=self.loading.decode_on or "cpu",
            exact=self.teacher_outputs is not None,
            fused=device.kind == "cuda" and device.compiles_with(self.settings.compile),
        )

    def learning_rate(self, step: int) -> float:
        return learning_rate_at(step, self.settings, samples=len(self.samples))

    @cached_property
    def low_resolution(self) -> tuple[int, Sequence[Classifier]]:
        """How many of the first steps have a smaller input, and the models whose input it is; none where all steps are alike."""
        steps = low_resolution_steps(self.settings, len(self.samples))
        return steps, [one for one in self.objective.model.modules() if isinstance(one, Classifier)] if steps else []

    def work(self, steps: int) -> float:
        """Return how many steps at full resolution the first steps are, by the pixels of their input."""
        low, models = self.low_resolution
        shares = [(self.settings.low_resolution.image_size / model.card.image_size) ** 2 for model in models[:1]]
        return steps - sum(min(steps, low) * (1 - share) for share in shares)

    def names(self, step: int, rank: int) -> list[str]:
        """Return the names of the samples that a process sees in a step."""
        order = self.order
        runs = loader.shard_positions(self.settings, step=step, rank=rank, world_size=self.processes.world_size)
        return [name for run in runs for name in self.samples.names(order.take(run.start, run.stop).indices)]


def fit_batch(section: str, settings: Fitted, images: int, processes: Processes) -> Fitted:
    """Clamp the batch to one that the images can fill, with a warning."""
    parts = processes.world_size * settings.accumulation if processes.device.is_lazy else 1
    fitted = settings.for_images(images, parts)
    if fitted is not settings and processes.is_first:
        logger.warning(settings.clamp_warning(section, images, fitted))
    return fitted


def check_micro_batches(model: nn.Module, settings: TrainingSettings, world_size: int) -> int:
    """Return the images of the largest micro-batch of a process, after a check that the smallest one is enough for the model.

    Raises:
        SettingsError: a micro-batch would have no image, or a single one to normalize a batch by.
    """
    most, parts = loader.micro_batch_size(settings, world_size), world_size * settings.accumulation
    if settings.batch_size < smallest_micro_batch(model) * parts:
        raise SettingsError(
            f"batch_size = {settings.batch_size} leaves one image to some of {world_size} processes x {settings.accumulation} "
            "micro-batches, but batch normalization computes a variance over the images of each and needs two; choose "
            f"{smallest_micro_batch(model) * parts} or more, or less accumulation or fewer processes"
        )
    return most


def smallest_micro_batch(model: nn.Module) -> int:
    """Return the fewest images that a model can be trained with at once: two where batch normalization learns from them.

    Leaves the model in training mode.
    """
    return 2 if any(module.training for module in batch_norms(model.train())) else 1


def why_micro_batches_count(section: ResidentSettings, model: nn.Module) -> str:
    """Say why the size of a micro-batch is a part of what a model learns; empty where it only decides how a step is computed."""
    if isinstance(section, DistillSettings) and section.relates_images:
        return "logit.loss=dist compares its images with one another"
    if smallest_micro_batch(model) > 1:
        return "batch normalization takes mean and variance over its images"
    return ""


def keep_micro_batches(
    section: str, settings: Fitted, checkpoints: Checkpoints, processes: Processes, *, because: str
) -> Fitted:
    """Deal the steps of a resumed training into as many micro-batches as before, on whatever number of processes: by accumulation.

    Args:
        because: why the size of a micro-batch is a part of what is learned.

    Raises:
        SettingsError: the processes cannot share so many, or the settings ask for another number.
    """
    found = checkpoints.last_dealing() if processes.is_first else None
    before = processes.gather(found, "how the checkpoints' steps are dealt")[0]
    world_size, parts = processes.world_size, processes.world_size * settings.accumulation
    if before is None or before.micro_batches == parts:
        return settings
    accumulation, left = divmod(before.micro_batches, world_size)
    began = f"it began with {before.micro_batches} micro-batches a step, whose size is a part of what is learned ({because})"
    if left or settings.accumulation != before.accumulation:
        fitting = (
            f"a number of processes that divides {before.micro_batches}" if left else f"accumulation={accumulation}"
        )
        raise SettingsError(
            f"{section}.accumulation = {settings.accumulation} on {world_size} processes makes {parts} micro-batches a step of the "
            f"training at {checkpoints.uri}; {began}; give {fitting} to continue it, or remove that folder to begin anew"
        )
    if processes.is_first:
        text = "%s  continues on %d processes with accumulation=%d in place of %d: %s"
        logger.warning(text, section, world_size, accumulation, settings.accumulation, began)
    return settings.model_copy(update={"accumulation": accumulation})


def check_batch(model: nn.Module, settings: TrainingSettings, processes: Processes) -> None:
    """Make sure that a step can be dealt to the processes.

    Raises:
        SettingsError: there are too few images, or not equally many for all where each size would be a graph of its own.
    """
    parts, most = (
        processes.world_size * settings.accumulation,
        check_micro_batches(model, settings, processes.world_size),
    )
    if processes.device.is_lazy and most * parts != settings.batch_size:
        raise SettingsError(
            f"batch_size = {settings.batch_size} cannot be dealt evenly to {processes.world_size} processes x {settings.accumulation} "
            f"micro-batches, and on XLA each size is compiled by itself; choose {most * parts}"
        )
