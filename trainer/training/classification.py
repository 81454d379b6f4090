"""Learning from labels: softened targets and their cross-entropy, in float32 whatever the precision of the forward pass.

Shapes: B samples, K classes.
"""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor


def cross_entropy(logits: Tensor, targets: Tensor) -> Tensor:
    """-sum over classes of targets x log softmax(logits), mean over the batch.

    Args:
        logits: [B, K].
        targets: distributions [B, K].

    Returns:
        A scalar.
    """
    return -(targets * F.log_softmax(logits.float(), dim=1)).sum(1).mean()


def soft_targets(labels: Tensor, classes: int, smoothing: float) -> Tensor:
    """(1 - s) x one-hot + s / K (Szegedy et al. 2016): int64 [B] to float32 [B, K]."""
    return F.one_hot(labels, classes).float() * (1 - smoothing) + smoothing / classes
