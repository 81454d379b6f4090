"""Losses between a student's and a teacher's outputs, in float32 whatever the precision of the forward pass.

Shapes: B samples, C classes, K recorded logits.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from trainer.data.batch import Recorded
from trainer.distillation.outputs import complete


def distillation_kl(student: Tensor, teacher: Tensor, temperature: float) -> Tensor:
    """T^2 x KL(softmax(teacher / T) || softmax(student / T)), mean over the batch (Hinton, Vinyals, Dean 2015).

    T^2 keeps the size of the gradients independent of the temperature.

    Args:
        student: logits [B, C].
        teacher: logits [B, C].
        temperature: T > 0.

    Returns:
        A scalar.
    """
    student_log = F.log_softmax(student.float() / temperature, dim=1)
    teacher_log = F.log_softmax(teacher.float() / temperature, dim=1)
    return temperature**2 * F.kl_div(student_log, teacher_log, reduction="batchmean", log_target=True)


def recorded_kl(student: Tensor, teacher: Recorded, temperature: float) -> Tensor:
    """`distillation_kl` where only the teacher's K largest logits are known, and the sum of the rest.

    The C - K other classes count as one outcome, whose probability is the student's and the teacher's sum over them. This is at most
    the full divergence, and lacks of it only the teacher's mass of the rest times the divergence within the rest (chain rule).

    Args:
        student: logits [B, C].
        teacher: recorded outputs.
        temperature: T > 0.

    Returns:
        A scalar.
    """
    whole = complete(teacher, student.shape[1])
    if whole is not None:
        return distillation_kl(student, whole.logits, temperature)
    scaled = student.float() / temperature
    known = scaled.gather(1, teacher.indices)
    rest = scaled.scatter(1, teacher.indices, -math.inf).logsumexp(1, keepdim=True)
    student_log = F.log_softmax(torch.cat([known, rest], 1), dim=1)
    teacher_rest = rest_logit(teacher, student.shape[1], temperature).unsqueeze(1)
    teacher_log = F.log_softmax(torch.cat([teacher.logits / temperature, teacher_rest], 1), dim=1)
    return temperature**2 * F.kl_div(student_log, teacher_log, reduction="batchmean", log_target=True)


def rest_logit(teacher: Recorded, classes: int, temperature: float) -> Tensor:
    """Log of the sum of exp(logit / T) over the classes that were not recorded, [B].

    f(s) = log sum exp(s x logit) is convex in s = 1 / T; known are f(0), the logarithm of their number, f(1/2) and f(1). Between them the
    parabola through the three is taken.
    """
    others = classes - teacher.indices.shape[1]
    s = 1 / temperature
    at_0, at_1, at_half = math.log(others), teacher.rest[:, 0], teacher.rest[:, 1]
    return (2 * s - 1) * (s - 1) * at_0 + 4 * s * (1 - s) * at_half + s * (2 * s - 1) * at_1


def agreement(student: Tensor, top_class: Tensor) -> Tensor:
    """Share of samples for which the student's top class is the teacher's; logits [B, C] and classes [B] to a scalar."""
    return (student.argmax(1) == top_class).to(torch.float32).mean()
