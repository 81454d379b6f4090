"""The distillation objective: a student, a teacher or its recorded outputs, and the losses between them."""

from __future__ import annotations

from torch import Tensor, nn

from trainer.config import DistillSettings
from trainer.data.batch import Batch
from trainer.distillation.losses import agreement, distillation_kl, recorded_kl
from trainer.distillation.teacher import FrozenTeacher
from trainer.models import Classifier
from trainer.profiling.timeline import Timeline
from trainer.training.classification import cross_entropy
from trainer.training.loop import Losses


class DistillObjective:
    """loss = logit_weight x logit loss + label_weight x cross-entropy with the labels.

    Teacher and student see the same view, each resized and normalised as it wants it.
    """

    def __init__(self, student: Classifier, teacher: FrozenTeacher | None, settings: DistillSettings) -> None:
        """Train `student`; without a `teacher` the batches bring its recorded outputs."""
        self.model: nn.Module = student
        self._teacher, self._settings = teacher, settings

    def __call__(self, model: nn.Module, batch: Batch, timeline: Timeline) -> Losses:
        """Named losses of a batch: `loss`, `label`, and with a `logit_weight` `logit` and the share of samples on which both agree.

        Where no loss compares with the teacher it is not asked: the student learns from the labels alone.
        """
        settings = self._settings
        if settings.logit_weight and self._teacher is not None:
            with timeline.range("teacher_forward"):
                teacher = self._teacher(batch.images)
        with timeline.range("forward"):
            student: Tensor = model(batch.images)
            label = cross_entropy(student, batch.labels, batch.mixing, smoothing=settings.label_smoothing)
            if not settings.logit_weight:
                return {"loss": settings.label_weight * label, "label": label}
            if batch.recorded is not None:
                logit = recorded_kl(student, batch.recorded, settings.temperature)
                top_class = batch.recorded.indices[:, 0]
            else:
                logit = distillation_kl(student, teacher.logits, settings.temperature)
                top_class = teacher.logits.argmax(1)
            loss = settings.logit_weight * logit + settings.label_weight * label
        return {"loss": loss, "logit": logit, "label": label, "agreement": agreement(student.detach(), top_class)}
