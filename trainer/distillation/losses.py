"""Losses on logits, in float32 whatever the precision of the forward pass.

Shapes: B samples, K classes.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def distillation_kl(student: Tensor, teacher: Tensor, temperature: float) -> Tensor:
    """T^2 x KL(softmax(teacher / T) || softmax(student / T)), mean over the batch (Hinton, Vinyals, Dean 2015).

    T^2 keeps the size of the gradients independent of the temperature.

    Args:
        student: logits [B, K].
        teacher: logits [B, K].
        temperature: T > 0.

    Returns:
        A scalar.
    """
    student_log = F.log_softmax(student.float() / temperature, dim=1)
    teacher_log = F.log_softmax(teacher.float() / temperature, dim=1)
    return temperature**2 * F.kl_div(student_log, teacher_log, reduction="batchmean", log_target=True)


def agreement(student: Tensor, teacher: Tensor) -> Tensor:
    """Share of samples for which student and teacher have the same top class; logits [B, K] each, a scalar."""
    return (student.argmax(1) == teacher.argmax(1)).to(torch.float32).mean()
