"""Learning labels of which an image may have several, each class by itself: losses in float32, summed over the classes.

Shapes: B samples, K classes, S different sets of labels.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
import torch.nn.functional as F
from torch import Tensor

from trainer.config import MultiLabelLoss
from trainer.data.batch import Mixing
from trainer.data.dataset import Targets

_FOCUS, _MARGIN = 4, 0.05
"""The asymmetric loss' focusing exponent of classes that an image is not of, and the probability that they may have for nothing."""


def binary_cross_entropy(logits: Tensor, targets: Tensor) -> Tensor:
    """-sum over classes of y x log p + (1 - y) x log(1 - p), p the logit's sigmoid: [B] of logits and targets y in 0..1, [B, K]."""
    return F.binary_cross_entropy_with_logits(logits.float(), targets, reduction="none").sum(1)


def asymmetric_loss(logits: Tensor, targets: Tensor) -> Tensor:
    """-sum over classes of y x log p + (1 - y) x q^4 x log(1 - q), with q = max(p - 0.05, 0): [B] (Ridnik et al. 2021, equations 4 to 7).

    Classes that an image is not of, which are the many, count the less the surer that is, and nothing where p is below 0.05. The
    exponents are those that the paper takes for MS-COCO; its targets y are 0 or 1, and mixed ones weight the two terms.
    """
    positive = -F.logsigmoid(logits.float())
    shifted = (logits.float().sigmoid() - _MARGIN).clamp(min=0)
    negative = -(shifted**_FOCUS) * (1 - shifted).log()
    return (targets * positive + (1 - targets) * negative).sum(1)


LOSSES: Mapping[str, Callable[[Tensor, Tensor], Tensor]] = {
    "bce": binary_cross_entropy,
    "asymmetric": asymmetric_loss,
}
"""Name of each loss -> its function."""


class LabelSetLoss:
    """A loss with sets of labels, called as `classification.cross_entropy` is: a label is the index of its set."""

    def __init__(self, targets: Targets, loss: MultiLabelLoss) -> None:
        """Take whether each class is one of each set, [S, K]."""
        self._targets = torch.from_numpy(targets)
        self._loss = LOSSES[loss]

    def __call__(
        self,
        logits: Tensor,
        labels: Tensor,
        mixing: Mixing | None = None,
        *,
        smoothing: float = 0.0,
        weights: Tensor | None = None,
    ) -> Tensor:
        """Compute the mean over the batch; the arguments are as of `cross_entropy`, and so are the targets' smoothing and mixing."""
        targets = self._of(labels)
        if mixing is not None:
            share = mixing.share.unsqueeze(1)
            targets = share * targets + (1 - share) * self._of(mixing.labels)
        targets = (1 - smoothing) * targets + smoothing / logits.shape[1]
        loss = self._loss(logits, targets)
        return (loss if weights is None else weights * loss).mean()

    def _of(self, labels: Tensor) -> Tensor:
        """Return the target of each label, [B, K]; of any set where there is no label, which a weight of 0 then takes out."""
        self._targets = self._targets.to(labels.device)
        return self._targets[labels.clamp(min=0)].float()
