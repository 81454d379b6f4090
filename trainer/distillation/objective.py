"""The distillation objective: a student, a teacher or its recorded outputs, and the losses between them.

Shapes: B images of C = 3 channels, K classes, S features of the student, D features of the teacher.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from functools import partial
from typing import Any

from torch import Tensor, nn

from trainer import models
from trainer.config import DistillSettings
from trainer.data.batch import Batch, Recorded
from trainer.distillation import losses
from trainer.distillation.frozen_teacher import FrozenTeacher
from trainer.distillation.losses import TeacherOutputs, all_logits, top_class
from trainer.models import Classifier
from trainer.profiling.timeline import span
from trainer.training.classification import cross_entropy
from trainer.training.spec import Losses

TeacherSignal = TeacherOutputs | Recorded
"""What the teacher says of a batch."""

LogitLoss = Callable[[Tensor, TeacherSignal, Tensor], Tensor]
"""The student's logits [B, C], what the teacher says, and the labels [B], -1 where there is none, to a scalar."""

FeatureLoss = Callable[[Tensor, Tensor], Tensor]
"""The student's projected features and the teacher's, [B, D] each, to a scalar."""


class ProjectedStudent(nn.Module):
    """A classifier and the linear map from its pooled features to the teacher's space, which is trained with it and not kept.

    The map is there for equal lengths too: the same features may stand in any basis, and a student that is held to the teacher's own
    basis learns worse (Miles and Mikolajczyk 2024, "Understanding the Role of the Projector in Knowledge Distillation").
    """

    def __init__(self, classifier: Classifier, teacher_features: int) -> None:
        """Wrap `classifier`; the teacher has `teacher_features` features.

        Raises:
            ModelError: the classifier's head does not read pooled features.
        """
        super().__init__()
        self.classifier = classifier
        self.projection = nn.Linear(models.feature_size(classifier), teacher_features)

    def forward(self, images: Tensor, *, features: bool = False) -> Tensor | tuple[Tensor, Tensor]:
        """Raw images [B, 3, H, W] to logits [B, K], and where asked to projected features [B, D] too, in one forward pass."""
        if not features:
            logits: Tensor = self.classifier(images)
            return logits
        logits, own = self.classifier.forward_with_features(images)
        return logits, self.projection(own)

    def no_weight_decay(self) -> set[str]:
        """Names of the weights that the classifier's network wants undecayed."""
        named: Any = getattr(self.classifier.network, "no_weight_decay", set)
        return {f"classifier.network.{name}" for name in named()}


class DistillObjective:
    """loss = logit_weight x logit loss + feature_weight x feature loss + label_weight x cross-entropy with the labels.

    Teacher and student see the same view, each resized and normalised as it wants it. A loss without a weight is not computed, and
    where none compares with the teacher it is not asked: the student learns from the labels alone. The cross-entropy is the mean over the
    step's images with a label, the other losses are means over all.
    """

    def __init__(
        self, student: Classifier | ProjectedStudent, teacher: FrozenTeacher | None, settings: DistillSettings
    ) -> None:
        """Train `student`, a `ProjectedStudent` where there is a feature loss; without a `teacher` the batches bring recorded outputs."""
        self.model: nn.Module = student
        self.left_out: Collection[str] = ()
        self._teacher, self._settings = teacher, settings
        self._logit_loss = choose_logit_loss(settings)
        self._feature_loss = FEATURE_LOSSES[settings.feature_loss]

    def __call__(self, model: nn.Module, batch: Batch) -> Losses:
        """Named losses of a batch: `loss`, of `logit`, `feature` and `label` those that have a weight, and the share of `agreement`.

        There is no agreement with a teacher without logits.
        """
        settings, signal = self._settings, self._ask(batch)
        with span("forward"):
            parts: Losses = {}
            features: Tensor | None = None
            if settings.feature_weight:
                logits, features = model(batch.images, features=True)
            else:
                logits = model(batch.images)
            if signal is not None and settings.logit_weight:
                parts["logit"] = self._logit_loss(logits, signal, batch.labels)
            if signal is not None and features is not None:
                assert signal.features is not None, (
                    "the stage refuses recorded outputs without features, and asks a teacher for them"
                )
                parts["feature"] = self._feature_loss(features, signal.features)
            if settings.label_weight:
                smoothing = settings.label_smoothing
                parts["label"] = cross_entropy(
                    logits, batch.labels, batch.mixing, smoothing=smoothing, weights=batch.label_weights
                )
            weights = {
                "logit": settings.logit_weight,
                "feature": settings.feature_weight,
                "label": settings.label_weight,
            }
            first, *others = (weights[name] * part for name, part in parts.items())
            loss = sum(others, first)
            if signal is not None and signal.logits.shape[1]:
                parts["agreement"] = losses.agreement(logits.detach(), top_class(signal))
        return {"loss": loss} | parts

    def show(self, batch: Batch) -> None:
        """A forward pass of the student alone."""
        self.model(batch.images)

    def _ask(self, batch: Batch) -> TeacherSignal | None:
        if not self._settings.needs_teacher:
            return None
        if self._teacher is None:
            return batch.recorded
        with span("teacher_forward"):
            return self._teacher(batch.images)


def choose_logit_loss(settings: DistillSettings) -> LogitLoss:
    """The loss that `logit_loss` names, with its settings."""
    loss = partial(_LOGIT_LOSSES[settings.logit_loss], settings)
    return partial(_standardized, loss) if settings.standardize_logits else loss


def _kl(settings: DistillSettings, student: Tensor, signal: TeacherSignal, _labels: Tensor) -> Tensor:
    if isinstance(signal, Recorded):
        return losses.recorded_kl(student, signal, settings.temperature)
    return losses.distillation_kl(student, signal.logits, settings.temperature)


def _hard(_settings: DistillSettings, student: Tensor, signal: TeacherSignal, _labels: Tensor) -> Tensor:
    return losses.hard_distillation(student, top_class(signal))


def _dkd(settings: DistillSettings, student: Tensor, signal: TeacherSignal, labels: Tensor) -> Tensor:
    """DKD; where there is no label, the teacher's top class stands for it: the divergence can be decoupled around any class."""
    return losses.decoupled_kl(
        student,
        all_logits(signal, student.shape[1]),
        labels.where(labels >= 0, top_class(signal)),
        temperature=settings.temperature,
        alpha=settings.dkd_alpha,
        beta=settings.dkd_beta,
    )


def _dist(settings: DistillSettings, student: Tensor, signal: TeacherSignal, _labels: Tensor) -> Tensor:
    return losses.relation_loss(
        student,
        all_logits(signal, student.shape[1]),
        temperature=settings.temperature,
        beta=settings.dist_beta,
        gamma=settings.dist_gamma,
    )


def _standardized(loss: LogitLoss, student: Tensor, signal: TeacherSignal, labels: Tensor) -> Tensor:
    """A loss between standardised logits."""
    teacher = losses.standardize(all_logits(signal, student.shape[1]))
    return loss(losses.standardize(student), TeacherOutputs(teacher), labels)


_LOGIT_LOSSES: Mapping[str, Callable[[DistillSettings, Tensor, TeacherSignal, Tensor], Tensor]] = {
    "kl": _kl,
    "hard": _hard,
    "dkd": _dkd,
    "dist": _dist,
}

FEATURE_LOSSES: Mapping[str, FeatureLoss] = {
    "cosine": losses.feature_cosine,
    "mse": losses.feature_mse,
    "cosine_smooth_l1": losses.feature_cosine_smooth_l1,
}
"""Name of each feature loss -> its function."""
