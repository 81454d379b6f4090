"""The distillation objective: a student, a teacher or its recorded outputs, and the losses between them.

Beside the student linear maps into the teacher's spaces are trained, and not kept.

Shapes: B images of C = 3 channels, K classes, S numbers of the student, D of the teacher; maps of h x w places have the channels last.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from trainer.config import DistillSettings, LogitSettings, TrainingSettings
from trainer.data.batch import Batch, Recorded
from trainer.data.dataset import Targets
from trainer.data.loader import shard_positions
from trainer.devices import Device
from trainer.devices.process_group import Processes
from trainer.models import networks
from trainer.models.networks import Classifier, MapShape, ModelOutputs
from trainer.objectives.distillation import losses
from trainer.objectives.distillation.frozen_teacher import Balance, FrozenTeacher
from trainer.objectives.distillation.losses import TeacherOutputs, all_logits, top_class
from trainer.objectives.distillation.recording import RecordingDescription
from trainer.profiling.timeline import span
from trainer.training.classification import label_loss
from trainer.training.spec import Losses

TeacherSignal = TeacherOutputs | Recorded  # what the teacher says of a batch


class DistillObjective:
    """loss = the sum of weight x loss over what has a weight: logits, features, patch tokens, blocks, similarities, labels.

    Teacher and student see the same view, each resized and normalized as it wants it. A loss without a weight is not computed, and
    where none compares with the teacher it is not asked: the student learns from the labels alone. The cross-entropy is the mean over the
    step's images with a label, the other losses are means over all. A student in distilled training learns the labels with its class
    token's head and the teacher's logits with its distillation token's, as in DeiT.

    Of several teachers the logit loss is the weighted mean over those with a head, which for the divergence has the gradient of the
    divergence from the mean of their softened probabilities; the feature loss is that over all, each with its own part of the projection.
    """

    def __init__(
        self,
        student: Classifier | ProjectedStudent,
        teachers: Sequence[FrozenTeacher],
        settings: DistillSettings,
        targets: Targets | None = None,
    ) -> None:
        """Combine what is trained with who teaches it.

        Args:
            student: a `ProjectedStudent` where more than logits is compared.
            teachers: the pipeline's own first; none where batches bring recorded outputs.
            settings: the losses and their weights.
            targets: of the data set, where an image may have several labels: each class is then compared by itself.
        """
        self.model: nn.Module = student
        self.left_out: Collection[str] = ()
        self._teachers, self._settings = teachers, settings
        self._by_class = targets is not None
        self._label_loss = label_loss(targets, settings.multi_label_loss)
        self._balances: list[Balance] = []  # what the features of each teacher go through; none of a single teacher
        self._seen: list[Tensor] = []  # the teacher's features of this step's micro-batches, for the queue
        self._feature_loss = FEATURE_LOSSES[settings.feature_loss]
        self._logit_loss: Callable[..., Tensor] = logit_loss

    def balance(self, batches: Iterable[Batch], device: Device) -> None:
        """Measure how the features of each of several teachers vary over some batches, so that from then on they are compared balanced.

        Raises:
            ModelError: they do not vary, or cannot be balanced.
        """
        asked = (batch._replace(images=batch.images.to(device.torch_device)) for batch in batches)
        said = [[_required(one.features).cpu().numpy() for _, one in self._ask(batch)] for batch in asked]
        self._balances = [Balance(np.concatenate(parts), device.torch_device) for parts in zip(*said, strict=True)]

    def __call__(self, model: nn.Module, batch: Batch) -> Losses:
        """Named losses of a batch: `loss`, each term that has a weight (`TERMS`), and the share of `agreement`.

        There is no agreement with a teacher without logits.
        """
        settings, said = self._settings, self._ask(batch)
        with span("forward"):
            compared = isinstance(self.model, ProjectedStudent)
            ours = model(batch.images, compared=True) if compared else ModelOutputs(model(batch.images))
            logits = _required(ours.logits)
            taught = logits if ours.distilled is None else ours.distilled
            parts = self._compare_all(ours._replace(logits=taught), said, batch.labels)
            if settings.label_weight:
                smoothing, weights = settings.label_smoothing, batch.label_weights
                parts["label"] = self._label_loss(logits, batch.labels, batch.mixing, smoothing, weights)
            first, *others = (settings.weight(name) * part for name, part in parts.items())
            loss = sum(others, first)
            answer = (logits + taught).detach()
            agreed = []
            for weight, one in said:
                if one.logits.shape[1] and self._by_class:
                    agreed.append((weight, losses.class_agreement(answer, all_logits(one, answer.shape[1]))))
                elif one.logits.shape[1]:
                    agreed.append((weight, losses.agreement(answer, top_class(one))))
            if agreed:
                parts["agreement"] = _mean(agreed)
        return {"loss": loss} | parts

    def _compare_all(self, ours: ModelOutputs, said: Sequence[tuple[float, TeacherSignal]], labels: Tensor) -> Losses:
        """Compare the student's outputs with those of each teacher; gives the mean of each loss over those that it is taken from."""
        projected: Sequence[Tensor | None] = [ours.features] * len(said)
        if len(said) > 1 and ours.features is not None:
            projected = ours.features.split([_required(one.features).shape[1] for _, one in said], 1)
        found: dict[str, list[tuple[float, Tensor]]] = {}
        for place, (weight, one) in enumerate(said):
            target = one._replace(features=self._balances[place](_required(one.features))) if self._balances else one
            for name, part in self._compare(ours._replace(features=projected[place]), target, labels):
                found.setdefault(name, []).append((weight, part))
        return {name: _mean(parts) for name, parts in found.items()}

    def _compare(self, ours: ModelOutputs, said: TeacherSignal, labels: Tensor) -> Iterator[tuple[str, Tensor]]:
        """Yield each loss between the student's outputs, in the teacher's spaces, and the teacher's."""
        settings, between = self._settings, self._feature_loss
        if settings.logit_weight and said.logits.shape[1]:
            logits = _required(ours.logits)
            if self._by_class:
                assert settings.logit.loss == "kl", "the settings refuse others for several labels"
                whole = all_logits(said, logits.shape[1])
                yield "logit", losses.binary_kl(logits, whole, settings.logit.temperature)
            else:
                yield "logit", self._logit_loss(settings.logit, logits, said, labels)
        if settings.feature_weight:
            yield "feature", between(_required(ours.features), _required(said.features))
        if settings.token_weight:
            yield "token", between(_required(ours.tokens).flatten(0, 2), _required(said.tokens).flatten(0, 2))
        if settings.block_weight:
            assert isinstance(said, TeacherOutputs), "the settings refuse recorded outputs with blocks"
            pairs = zip(ours.blocks, said.blocks, strict=True)
            yield "block", torch.stack([between(own.flatten(0, 2), their.flatten(0, 2)) for own, their in pairs]).mean()
        if settings.similarity_weight:
            assert isinstance(self.model, ProjectedStudent), "it holds the queue"
            own, theirs, queue = _required(ours.features), _required(said.features), _required(self.model.queue)
            self._seen.append(theirs)
            t, teacher_t = settings.similarity_temperature, settings.similarity_teacher_temperature
            loss = losses.similarity_loss(own, theirs, queue, temperature=t, teacher_temperature=teacher_t)
            yield "similarity", loss

    def compile(self, backend: Callable[..., Any]) -> None:
        """Compile the loss between logits, which is up to thirty kernels of little work each way."""
        self._logit_loss = torch.compile(logit_loss, backend=backend, dynamic=False)

    def forward_for_hooks(self, batch: Batch) -> None:
        """A forward pass of the student alone."""
        self.model(batch.images)

    def end_step(self, settings: TrainingSettings, processes: Processes) -> None:
        """Put the features of the step's images into the queue, in the order of the images.

        All micro-batches of a step are compared with the same queue, and every process holds all of it: how the images are dealt to
        micro-batches and processes changes nothing.
        """
        if not self._seen or not isinstance(self.model, ProjectedStudent):
            return
        together = self._seen[0].new_zeros(settings.batch_size, self._seen[0].shape[1])
        rows = shard_positions(settings, step=0, rank=processes.rank, world_size=processes.world_size)
        for row, features in zip(rows, self._seen, strict=True):
            together[row.start : row.stop] = features
        self._seen.clear()
        self.model.remember(processes.total(together, "the teacher's features of a step"))

    def _ask(self, batch: Batch) -> list[tuple[float, TeacherSignal]]:
        """Return what each teacher says, with its weight; nothing where no loss compares with one."""
        said: list[TeacherSignal] = []
        if self._settings.needs_teacher and self._teachers:
            with span("teacher_forward"):
                said += [teacher(batch.images) for teacher in self._teachers]
        elif self._settings.needs_teacher and batch.recorded is not None:
            said += [one.restored() for one in (batch.recorded, *batch.recorded.further)]
        weights = self._settings.teacher_weights or [1.0] * len(said)
        return list(zip(weights, said, strict=True)) if said else []


def _mean(parts: Sequence[tuple[float, Tensor]]) -> Tensor:
    """Return the mean of values by their weights; a single one as it is."""
    if len(parts) == 1:
        return parts[0][1]
    total = sum(weight for weight, _ in parts)
    return torch.stack([weight / total * part for weight, part in parts]).sum()


def _required(part: Tensor | None) -> Tensor:
    """Return a part of the outputs that was asked for."""
    assert part is not None, "the stage refuses recorded outputs without it, and asks teacher and student for it"
    return part


def logit_loss(settings: LogitSettings, student: Tensor, said: TeacherSignal, labels: Tensor) -> Tensor:
    """Compute a loss of the student's logits [B, C]; the labels [B] are -1 where there is none."""
    classes = student.shape[1]
    if settings.standardize:
        student, said = losses.standardize(student), TeacherOutputs(losses.standardize(all_logits(said, classes)))
    match settings.loss:
        case "kl":
            if isinstance(said, Recorded):
                return losses.recorded_kl(student, said, settings.temperature)
            return losses.distillation_kl(student, said.logits, settings.temperature)
        case "hard":
            return losses.hard_distillation(student, top_class(said))
        case "dkd":
            return losses.decoupled_kl(
                student,
                all_logits(said, classes),
                # Where there is no label, the teacher's top class stands for it: the divergence can be decoupled around any class.
                labels.where(labels >= 0, top_class(said)),
                temperature=settings.temperature,
                alpha=settings.alpha,
                beta=settings.beta,
            )
        case "dist":
            temperature, beta, gamma = settings.temperature, settings.beta, settings.gamma
            return losses.relation_loss(
                student, all_logits(said, classes), temperature=temperature, beta=beta, gamma=gamma
            )


FEATURE_LOSSES: Mapping[str, Callable[[Tensor, Tensor], Tensor]] = {
    "cosine": losses.feature_cosine,
    "mse": losses.feature_mse,
    "cosine_smooth_l1": losses.feature_cosine_smooth_l1,
}
"""Name of each feature loss -> its function, of the student's projected features and the teacher's, of images or of places, [B, D] each."""


# ---------------------------------------------------------------------------------------------------------------------
# The student


class MapProjection(nn.Module):
    """A linear map of each place, from the student's map, resized bilinearly to the teacher's grid.

    It is the student's map that is resized, as in LightlyTrain: the target stays what the teacher has said, online and recorded alike.
    A finer map is averaged (antialiased), so that each of its places is taught.
    """

    rows: Tensor  # share of each of the student's h places in each of the teacher's, [H, h]
    columns: Tensor  # the same of w places

    def __init__(self, own: MapShape, wanted: MapShape) -> None:
        """From maps [B, h, w, S] to maps [B, H, W, D], with `own` = (h, w, S) and `wanted` = (H, W, D)."""
        super().__init__()
        self.linear = nn.Linear(own[2], wanted[2])
        self.register_buffer("rows", _shares(own[0], wanted[0]), persistent=False)
        self.register_buffer("columns", _shares(own[1], wanted[1]), persistent=False)

    def forward(self, maps: Tensor) -> Tensor:
        """Maps [B, h, w, S] to maps [B, H, W, D]."""
        (height, width), rows, columns = maps.shape[1:3], self.rows, self.columns
        if (height, width) != (rows.shape[1], columns.shape[1]):  # of a smaller input (`low_resolution`)
            rows, columns = _shares(height, len(rows), maps.device), _shares(width, len(columns), maps.device)
        if (height, width) != (len(rows), len(columns)):
            # As products of matrices: torch's own resizing has no deterministic backward pass on a GPU.
            maps = torch.einsum("Ww,bHws->bHWs", columns, torch.einsum("Hh,bhws->bHws", rows, maps))
        projected: Tensor = self.linear(maps)
        return projected


def _shares(given: int, wanted: int, device: torch.device | None = None) -> Tensor:
    """Return the matrix [wanted, given] that resizes so many places in a row, whose rows sum to 1."""
    places = torch.eye(given, device=device)[None, None]
    return F.interpolate(places, size=(wanted, given), mode="bilinear", antialias=True)[0, 0]


class ProjectedStudent(nn.Module):
    """A classifier, and linear maps from what it makes of an image to the teacher's spaces, which are trained with it and not kept.

    They are there for equal lengths too: the same features may stand in any basis, and a student that is held to the teacher's own
    basis learns worse (Miles and Mikolajczyk 2024, "Understanding the Role of the Projector in Knowledge Distillation").
    """

    queue: Tensor | None
    """The teacher's features of the last Q images of earlier steps, each of length 1, the newest last, [Q, D]; None where not compared."""

    def __init__(
        self,
        classifier: Classifier,
        features: int = 0,
        *,
        tokens: MapShape | None = None,
        blocks: Mapping[int, MapShape] | None = None,
        queue: int = 0,
    ) -> None:
        """Wrap `classifier`.

        Args:
            features: length of the teacher's pooled features; 0 where they are not compared.
            tokens: shape of the teacher's patch tokens, where they are compared.
            blocks: block of the student -> shape of what the teacher's block gives with which it is compared.
            queue: how many of the teacher's features to keep of earlier images.

        Raises:
            ModelError: the classifier has none of what is compared.
        """
        super().__init__()
        self.classifier = classifier
        self.projection: nn.Module | None = nn.Linear(networks.feature_size(classifier), features) if features else None
        self.token_projection: nn.Module | None = None
        if tokens:
            self.token_projection = MapProjection(networks.token_shape(classifier), tokens)
        self.blocks = [*(blocks or {})]
        own = networks.block_shapes(classifier, self.blocks) if blocks else []
        pairs = zip(own, (blocks or {}).values(), strict=True)
        self.block_projections = nn.ModuleList(MapProjection(given, wanted) for given, wanted in pairs)
        # Random directions until the first images have replaced them, as in SEED's code.
        self.register_buffer("queue", F.normalize(torch.randn(queue, features)) if queue else None)

    @torch.no_grad()
    def remember(self, features: Tensor) -> None:
        """Put the teacher's features of a step's images, [B, D], into the queue, from which the oldest fall out."""
        if self.queue is not None:
            self.queue.copy_(torch.cat([self.queue, F.normalize(features)])[-len(self.queue) :])

    def forward(self, images: Tensor, *, compared: bool = False) -> Tensor | ModelOutputs:
        """Raw images [B, 3, H, W] to logits [B, K]; or to all that is compared with the teacher, in its spaces, in one forward pass."""
        if not compared:
            logits: Tensor = self.classifier(images)
            return logits
        own = self.classifier.outputs(
            images, features=self.projection is not None, tokens=self.token_projection is not None, blocks=self.blocks
        )
        return own._replace(
            features=None if self.projection is None else self.projection(own.features),
            tokens=None if self.token_projection is None else self.token_projection(own.tokens),
            blocks=tuple(project(block) for project, block in zip(self.block_projections, own.blocks, strict=True)),
        )

    def no_weight_decay(self) -> set[str]:
        """Names of the weights that the classifier's network wants undecayed."""
        named: Any = getattr(self.classifier.network, "no_weight_decay", set)
        return {f"classifier.network.{name}" for name in named()}


def check_compared(model: Classifier, settings: DistillSettings, *, student: bool) -> None:
    """Make sure that the student, or else the teacher, has what is compared beside logits; one forward pass of one image or two.

    Raises:
        ModelError: it has not.
    """
    if settings.compares_features:
        networks.feature_size(model)
    if settings.token_weight:
        networks.token_shape(model)
        if student and (small := settings.low_resolution.image_size):
            networks.check_input_size(model, small)
            with networks.input_size(model, small):
                networks.token_shape(model)
    if settings.block_weight:
        networks.block_shapes(model, [*(settings.blocks if student else settings.blocks.values())])
    if settings.distillation_token and student:
        networks.train_distilled(model)


def prepared_student(
    student: Classifier,
    settings: DistillSettings,
    teacher: Classifier | RecordingDescription,
    *further: Classifier | RecordingDescription,
) -> Classifier | ProjectedStudent:
    """Give the student the projections that its losses need, into the spaces of a teacher or of its recorded outputs.

    Those into the pooled features of several teachers stand side by side, as one. The student itself comes back where only logits are
    compared, and those of one head.

    Raises:
        ModelError: it or the teacher has none of what is compared.
    """
    spaces: dict[str, Any] = {}
    if settings.compares_features:
        lengths = [
            networks.feature_size(one) if isinstance(one, Classifier) else one.features for one in (teacher, *further)
        ]
        spaces["features"] = sum(lengths)
    if settings.token_weight:
        spaces["tokens"] = networks.token_shape(teacher) if isinstance(teacher, Classifier) else teacher.tokens
    if settings.block_weight:
        assert isinstance(teacher, Classifier), "the settings refuse recorded outputs with blocks"
        shapes = networks.block_shapes(teacher, [*settings.blocks.values()])
        spaces["blocks"] = dict(zip(settings.blocks, shapes, strict=True))
    if settings.similarity_weight:
        spaces["queue"] = settings.similarity_queue
    if settings.distillation_token:
        networks.train_distilled(student)
    return ProjectedStudent(student, **spaces) if spaces or settings.distillation_token else student
