"""A student whose features are compared with the teacher's.

Shapes: B images of C = 3 channels, K classes, S features of the student, D features of the teacher.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from trainer import models
from trainer.models import Classifier


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
