"""The distillation objective: a frozen teacher, a student, and the losses between them."""

from __future__ import annotations

import torch
from torch import nn

from trainer.config import DistillSettings
from trainer.data.loader import Batch
from trainer.data.views import mix
from trainer.distillation.losses import agreement, distillation_kl
from trainer.models import Classifier
from trainer.profiling.timeline import Timeline
from trainer.training.classification import cross_entropy, soft_targets
from trainer.training.loop import Losses


class DistillObjective:
    """loss = kl_weight x T^2 x KL(teacher || student) + label_weight x cross-entropy with the labels.

    Teacher and student see the same view, each resized and normalised as it wants it.
    """

    def __init__(self, student: Classifier, teacher: Classifier, settings: DistillSettings) -> None:
        """Train `student`; `teacher` is frozen here."""
        self.model: nn.Module = student
        self._teacher = teacher.eval().requires_grad_(False)
        self._settings, self._classes = settings, len(student.card.labels)

    def __call__(self, model: nn.Module, batch: Batch, timeline: Timeline) -> Losses:
        """Named losses of a batch: `loss`, `label`, and with a `kl_weight` `kl` and the share of samples on which both agree.

        Without a `kl_weight` the teacher is not asked: the student learns from the labels alone.
        """
        settings = self._settings
        targets = soft_targets(batch.labels, self._classes, settings.label_smoothing)
        images, targets = mix(batch.images, targets, batch.mixing)
        if settings.kl_weight:
            with timeline.range("teacher_forward"), torch.inference_mode():
                teacher = self._teacher(images).float()
        with timeline.range("forward"):
            student = model(images)
            label = cross_entropy(student, targets)
            if not settings.kl_weight:
                return {"loss": settings.label_weight * label, "label": label}
            kl = distillation_kl(student, teacher, settings.temperature)
            loss = settings.kl_weight * kl + settings.label_weight * label
        return {"loss": loss, "kl": kl, "label": label, "agreement": agreement(student.detach(), teacher)}
