"""Learning from labels: the cross-entropy with softened and mixed labels, in float32 whatever the precision of the forward pass.

Shapes: B samples, K classes.
"""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from trainer.data.batch import Mixing


def cross_entropy(
    logits: Tensor,
    labels: Tensor,
    mixing: Mixing | None = None,
    *,
    smoothing: float = 0.0,
    weights: Tensor | None = None,
) -> Tensor:
    """-sum over classes of target x log softmax(logits), mean over the batch.

    The target of a sample is (1 - s) x one-hot + s / K (Szegedy et al. 2016), with the one-hot shared between its own label and its
    partner's where views are mixed (Zhang et al. 2018).

    Args:
        logits: [B, K].
        labels: int64 [B]; -1 for a sample without one.
        mixing: how the views were mixed, or None; a sample without a label has a partner without one (`trainer.data.sampler`).
        smoothing: s.
        weights: of each sample in the mean, float32 [B], 0 for one without a label (`Batch.label_weights`); None where all have one.

    Returns:
        A scalar.
    """
    log_probabilities = F.log_softmax(logits.float(), dim=1)
    loss = -_of(log_probabilities, labels)
    if mixing is not None:
        loss = mixing.share * loss - (1 - mixing.share) * _of(log_probabilities, mixing.labels)
    loss = (1 - smoothing) * loss - smoothing * log_probabilities.mean(1)
    return (loss if weights is None else weights * loss).mean()


def _of(log_probabilities: Tensor, labels: Tensor) -> Tensor:
    """Return the log probability of each sample's class, [B]; of any class where there is no label, which a weight of 0 then takes out."""
    return log_probabilities.gather(1, labels.clamp(min=0).unsqueeze(1)).squeeze(1)
