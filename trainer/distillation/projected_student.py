"""The student with what is trained beside it and not kept: linear maps into the teacher's spaces.

Shapes: B images of 3 channels, K classes, S numbers of the student, D of the teacher; maps of h x w places have the channels last.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from trainer import models
from trainer.config import DistillSettings
from trainer.distillation.recording import RecordingDescription
from trainer.models import Classifier, MapShape, ModelOutputs


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
        self.projection: nn.Module | None = nn.Linear(models.feature_size(classifier), features) if features else None
        self.token_projection: nn.Module | None = None
        if tokens:
            self.token_projection = MapProjection(models.token_shape(classifier), tokens)
        self.blocks = [*(blocks or {})]
        own = models.block_shapes(classifier, self.blocks) if blocks else []
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
        models.feature_size(model)
    if settings.token_weight:
        models.token_shape(model)
        if student and (small := settings.low_resolution.image_size):
            models.check_input_size(model, small)
            with models.input_size(model, small):
                models.token_shape(model)
    if settings.block_weight:
        models.block_shapes(model, [*(settings.blocks if student else settings.blocks.values())])
    if settings.distillation_token and student:
        models.train_distilled(model)


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
            models.feature_size(one) if isinstance(one, Classifier) else one.features for one in (teacher, *further)
        ]
        spaces["features"] = sum(lengths)
    if settings.token_weight:
        spaces["tokens"] = models.token_shape(teacher) if isinstance(teacher, Classifier) else teacher.tokens
    if settings.block_weight:
        assert isinstance(teacher, Classifier), "the settings refuse recorded outputs with blocks"
        shapes = models.block_shapes(teacher, [*settings.blocks.values()])
        spaces["blocks"] = dict(zip(settings.blocks, shapes, strict=True))
    if settings.similarity_weight:
        spaces["queue"] = settings.similarity_queue
    if settings.distillation_token:
        models.train_distilled(student)
    return ProjectedStudent(student, **spaces) if spaces or settings.distillation_token else student
