"""What the trainings of a run compute: operations of a forward pass, times passes, times images."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

from trainer.config import Settings, TrainingSettings
from trainer.io import artifacts
from trainer.io.formatting import short
from trainer.runner import preflight

if TYPE_CHECKING:
    from torch import nn

    from trainer.models.networks import Classifier


def count(settings: Settings, *, taught: float, unlabeled: float) -> dict[str, dict[str, float]]:
    """Count the operations of each training of a run with so many labeled and other training images: stage -> training -> operations.

    Builds the networks on the meta device; NaN for those that cannot be built here.
    """
    parts = TrainingWork(settings=settings, taught=taught, unlabeled=unlabeled).parts()
    return {stage: {name: seen * each for name, (_, seen, each) in one.items()} for stage, one in parts.items()}


@dataclass(frozen=True, kw_only=True)
class TrainingWork:
    """What the trainings of a run compute."""

    settings: Settings
    taught: float  # labeled images in train
    unlabeled: float

    @cached_property
    def teacher(self) -> tuple[Classifier | None, Mapping[str, nn.Module]]:
        return preflight.build_teacher(self.settings.pretrain, (), trains_here=False)

    @cached_property
    def student(self) -> Classifier:
        return preflight.build_student(self.settings.distill, (), trains_here=False)

    @cached_property
    def operations(self) -> tuple[float, float]:
        """Operations of a forward pass for an image, of teacher and student."""
        return _operations(self.teacher[0]), _operations(self.student)

    @property
    def learned(self) -> float:
        """Images that the student learns from."""
        return self.taught + self.unlabeled * self.settings.distill.reads_unlabeled

    def parts(self) -> dict[str, dict[str, tuple[str, float, float]]]:
        """Stage -> training -> what it is as text, images that are seen, operations for each."""
        pretrain, distill, reinforce = self.settings.pretrain, self.settings.distill, self.settings.reinforce
        trained, (teacher, _) = self.teacher[1], self.operations
        parts = dict[str, dict[str, tuple[str, float, float]]]()
        if pretrain.mae.epochs:
            operations = (3 + pretrain.mae.activation_checkpointing) * _masked_operations(trained["pretrain.mae"])
            images = self.taught + self.unlabeled
            parts["pretrain"] = {"mae": _epochs("MAE, ", pretrain.mae.epochs, images, operations)}
        if pretrain.finetune.epochs:
            # A backward pass is two forward passes, and one where only its input's gradient is needed.
            passes = {"full": 3, "lora": 2, "head": 1}[pretrain.finetune.method]
            operations = _trained(pretrain.finetune, trained.get("pretrain.finetune"), passes)
            finetune = _epochs("fine-tuning, ", pretrain.finetune.epochs, self.taught, operations)
            parts.setdefault("pretrain", {})["finetune"] = finetune
        if distill.reads_recording:
            seen = reinforce.views * self.learned
            parts["reinforce"] = {"reinforce": (f"{reinforce.views} views of {short(self.learned)}", seen, teacher)}
        is_online = distill.needs_teacher and not distill.reads_recording
        online = teacher + sum(_further(uri) for uri in distill.further_teachers) if is_online else 0.0
        parts["distill"] = {
            "distill": _epochs("", distill.epochs, self.learned, online + _trained(distill, self.student))
        }
        return parts


def _epochs(name: str, count: int, images: float, operations: float) -> tuple[str, float, float]:
    return f"{name}{count} epochs of {short(images)}", count * images, operations


def _trained(settings: TrainingSettings, model: Any, passes: int = 3) -> float:
    """Count the operations of a step for an image, of as many forward passes: the mean of all epochs, some of which may be smaller."""
    low = settings.low_resolution
    smaller = 1 - (low.image_size / model.card.image_size) ** 2 if low.epochs and model is not None else 0.0
    again = settings.activation_checkpointing and passes > 1  # what a backward pass needs is computed once more
    return (passes + again) * (1 - low.epochs / settings.epochs * smaller) * _operations(model)


def _further(uri: str) -> float:
    from trainer.models import networks

    return _operations(networks.outline(uri) if artifacts.exists(uri) else None)


def _operations(model: Any) -> float:
    """Count the operations of a forward pass for an image; NaN for a network that cannot be built here."""
    import torch

    from trainer.evaluation.metrics import multiply_accumulates

    if model is None:
        return math.nan
    edge = model.card.image_size
    return 2.0 * multiply_accumulates(model, torch.empty(1, 3, edge, edge, dtype=torch.uint8, device="meta"))


def _masked_operations(autoencoder: Any) -> float:
    import torch
    from torch.utils.flop_counter import FlopCounterMode

    patches = autoencoder.encoder.patch_embed
    edge = patches.img_size[0]
    with torch.no_grad(), torch.device("meta"), FlopCounterMode(display=False) as counter:
        autoencoder(torch.empty(1, 3, edge, edge, dtype=torch.uint8), torch.empty(1, patches.num_patches))
    return float(counter.get_total_flops())
