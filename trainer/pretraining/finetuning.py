"""Supervised fine-tuning: labels, softened by label smoothing and mixed by mixup and CutMix."""

from __future__ import annotations

from collections.abc import Collection

from torch import nn

from trainer.data.batch import Batch
from trainer.models import Classifier
from trainer.profiling.timeline import span
from trainer.training.classification import cross_entropy
from trainer.training.spec import Losses


class FinetuneObjective:
    """Cross-entropy with the labels."""

    def __init__(self, model: Classifier, *, label_smoothing: float) -> None:
        """Train `model`; `label_smoothing` of each target is spread over all classes."""
        self.model: nn.Module = model
        self.left_out: Collection[str] = ()
        self._smoothing = label_smoothing

    def __call__(self, model: nn.Module, batch: Batch) -> Losses:
        """The cross-entropy of a batch."""
        with span("forward"):
            loss = cross_entropy(model(batch.images), batch.labels, batch.mixing, smoothing=self._smoothing)
        return {"loss": loss}

    def show(self, batch: Batch) -> None:
        """A forward pass of the model alone."""
        self.model(batch.images)
