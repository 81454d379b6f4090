"""What a teacher says of a batch, and losses between that and a student's outputs, in float32 whatever the forward pass computes in.

A loss is a scalar, the mean over the batch; `student` and `teacher` are logits [B, C] unless it says otherwise, `labels` are int64 [B].

Shapes: B samples, C classes, K recorded logits, D features.
"""

from __future__ import annotations

import math
from contextlib import nullcontext
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from trainer.data.batch import Recorded

_HALF_ROUNDING = 2.0**-11  # largest relative error of a number that is stored in half precision


class TeacherOutputs(NamedTuple):
    """Complete outputs of a teacher; `Recorded` has its largest logits and the sum of the rest."""

    logits: Tensor  # float32 [B, C]; C is 0 for a teacher without a head
    features: Tensor | None = None  # pooled features, float32 [B, D]
    tokens: Tensor | None = None  # patch tokens, float32 [B, h, w, D]
    blocks: tuple[Tensor, ...] = ()  # what blocks give, each float32 [B, h, w, D] with its own h, w, D


def complete(recorded: Recorded, classes: int) -> TeacherOutputs | None:
    """Return recorded outputs as complete ones; None if some logits were not recorded."""
    if recorded.indices.shape[1] < classes:
        return None
    logits = recorded.logits.new_empty(len(recorded.logits), classes).scatter_(1, recorded.indices, recorded.logits)
    return TeacherOutputs(logits, recorded.features, recorded.tokens)


def all_logits(outputs: TeacherOutputs | Recorded, classes: int) -> Tensor:
    """Return the teacher's logits for all classes, [B, C]; the stage refuses recordings that lack some where a loss needs them all."""
    whole = complete(outputs, classes) if isinstance(outputs, Recorded) else outputs
    assert whole is not None, f"{classes} logits are needed and fewer were recorded"
    return whole.logits


def top_class(outputs: TeacherOutputs | Recorded) -> Tensor:
    """Return the class that the teacher finds likeliest, int64 [B]."""
    return outputs.indices[:, 0] if isinstance(outputs, Recorded) else outputs.logits.argmax(1)


# ---------------------------------------------------------------------------------------------------------------------
# Between logits


def distillation_kl(student: Tensor, teacher: Tensor, temperature: float) -> Tensor:
    """T^2 x KL(softmax(teacher / T) || softmax(student / T)) (Hinton, Vinyals, Dean 2015).

    T^2 keeps the size of the gradients independent of the temperature T > 0.
    """
    student_log = F.log_softmax(student.float() / temperature, dim=1)
    teacher_log = F.log_softmax(teacher.float() / temperature, dim=1)
    return temperature**2 * _kl(student_log, teacher_log)


def binary_kl(student: Tensor, teacher: Tensor, temperature: float) -> Tensor:
    """T^2 x the sum over classes of KL between the two-way distributions sigmoid(teacher / T) and sigmoid(student / T).

    For labels of which an image may have several: what the teacher says of each class, whatever it says of the others (the logit term of
    Yang et al. 2023, "Multi-Label Knowledge Distillation").
    """
    ours, theirs = student.float() / temperature, teacher.float() / temperature
    there = theirs.sigmoid() * (F.logsigmoid(theirs) - F.logsigmoid(ours))
    absent = (-theirs).sigmoid() * (F.logsigmoid(-theirs) - F.logsigmoid(-ours))
    return temperature**2 * (there + absent).sum() / len(student)


def hard_distillation(student: Tensor, top_class: Tensor) -> Tensor:
    """Cross-entropy with the teacher's top class, int64 [B] (DeiT, Touvron et al. 2021, equation 3).

    DeiT gives it and the cross-entropy with the labels the weight 1/2 each.
    """
    return F.cross_entropy(student.float(), top_class)


def decoupled_kl(
    student: Tensor, teacher: Tensor, labels: Tensor, *, temperature: float, alpha: float, beta: float
) -> Tensor:
    """T^2 x (alpha x TCKD + beta x NCKD) (DKD, Zhao et al. 2022, equation 7).

    TCKD is the divergence between the two-way distributions (the true class, all others), NCKD that between the distributions over the
    others alone. With p the teacher's probability of the true class, KL = TCKD + (1 - p) x NCKD: the plain divergence looks at the
    others the less, the surer the teacher is.
    """
    student_true, student_others = _decouple(student.float() / temperature, labels)
    teacher_true, teacher_others = _decouple(teacher.float() / temperature, labels)
    return temperature**2 * (alpha * _kl(student_true, teacher_true) + beta * _kl(student_others, teacher_others))


def _decouple(logits: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """Log probabilities of (true class, all others), [B, 2], and of each other class among the others, [B, C] with 0 at the true one."""
    true = labels.unsqueeze(1)
    log_others = F.log_softmax(logits.scatter(1, true, -math.inf), dim=1)
    return _one_against_rest(logits, true), log_others.scatter(1, true, 0.0)


def relation_loss(student: Tensor, teacher: Tensor, *, temperature: float, beta: float, gamma: float) -> Tensor:
    """T^2 x (beta x inter + gamma x intra), of the probabilities at temperature T (DIST, Huang et al. 2022, equations 7 to 9).

    inter is 1 - Pearson's correlation between the student's and the teacher's probabilities of a sample's classes, mean over the
    samples; intra is the same of a class's samples, mean over the classes. T^2 stands in the authors' code. intra needs other samples:
    it sees those of its micro-batch, so unlike the other losses it depends on how a batch is dealt to processes.
    """
    student_probabilities = (student.float() / temperature).softmax(1)
    teacher_probabilities = (teacher.float() / temperature).softmax(1)
    inter = 1 - _correlation(student_probabilities, teacher_probabilities, dim=1).mean()
    intra = 1 - _correlation(student_probabilities, teacher_probabilities, dim=0).mean()
    return temperature**2 * (beta * inter + gamma * intra)


def _correlation(first: Tensor, second: Tensor, *, dim: int) -> Tensor:
    """Pearson's correlation along a dimension; 0 where one of them is constant."""
    return F.cosine_similarity(first - first.mean(dim, keepdim=True), second - second.mean(dim, keepdim=True), dim=dim)


def standardize(logits: Tensor) -> Tensor:
    """(logits - mean) / standard deviation of each sample, [B, C] (Sun et al. 2024, "Logit Standardization in Knowledge Distillation").

    Applied to both before they are compared, it leaves the student its own size of logits; the temperature then counts in standard
    deviations. The deviation is the paper's, over C (its code divides by C - 1).
    Equal logits, such as a head's that starts from zeros, become zeros with finite gradients.
    """
    centered = logits.float() - logits.float().mean(1, keepdim=True)
    variance = centered.square().mean(1, keepdim=True).clamp(min=1e-14)
    return centered / (variance.sqrt() + 1e-7)


def _kl(student_log: Tensor, teacher_log: Tensor) -> Tensor:
    """KL(teacher || student) of log probabilities; torch's own has no gradient on XLA."""
    return (teacher_log.exp() * (teacher_log - student_log)).sum() / len(student_log)


def agreement(student: Tensor, top_class: Tensor) -> Tensor:
    """Share of samples for which the student's top class is the teacher's."""
    return (student.argmax(1) == top_class).to(torch.float32).mean()


def class_agreement(student: Tensor, teacher: Tensor) -> Tensor:
    """F1 between the classes that the student and the teacher find likelier than not, of all samples together; 1 where there are none."""
    ours, theirs = student > 0, teacher > 0
    either = (ours.sum() + theirs.sum()).to(torch.float32)
    return torch.where(either > 0, 2 * (ours & theirs).sum() / either.clamp(min=1), 1.0)


# ---------------------------------------------------------------------------------------------------------------------
# With the teacher's largest logits alone


def recorded_kl(student: Tensor, teacher: Recorded, temperature: float) -> Tensor:
    """Compute `distillation_kl` where only the teacher's K largest logits are known, and the sum of the rest.

    The C - K other classes count as one outcome, whose probability is the student's and the teacher's sum over them. By the chain rule
    the full divergence is this one + T^2 x (the teacher's mass of the rest) x KL within the rest, so this is at most the full one. The
    rest's mass at T is exact for T = 1 and T = 2 and interpolated otherwise (`rest_logit`).
    """
    whole = complete(teacher, student.shape[1])
    if whole is not None:
        return distillation_kl(student, whole.logits, temperature)
    student_log = _one_against_rest(student.float() / temperature, teacher.indices)
    teacher_rest = rest_logit(teacher, student.shape[1], temperature).unsqueeze(1)
    teacher_log = F.log_softmax(torch.cat([teacher.logits / temperature, teacher_rest], 1), dim=1)
    return temperature**2 * _kl(student_log, teacher_log)


def _one_against_rest(logits: Tensor, indices: Tensor) -> Tensor:
    """Log probabilities of some classes, int64 [B, K] with K < C, and of all others together in the last column, [B, K + 1]."""
    rest = logits.scatter(1, indices, -math.inf).logsumexp(1, keepdim=True)
    return F.log_softmax(torch.cat([logits.gather(1, indices), rest], 1), dim=1)


def rest_logit(teacher: Recorded, classes: int, temperature: float) -> Tensor:
    """Log of the sum of exp(logit / T) over the classes that were not recorded, [B].

    With s = 1 / T it is f(s) = log sum exp(s x logit). Known are f(0), the logarithm of their number, f(1/2) and f(1); elsewhere the
    parabola through these three is taken, held within `rest_bounds`.
    """
    s = 1 / temperature
    at_0, at_1, at_half = math.log(classes - teacher.indices.shape[1]), teacher.rest[:, 0], teacher.rest[:, 1]
    parabola = (2 * s - 1) * (s - 1) * at_0 + 4 * s * (1 - s) * at_half + s * (2 * s - 1) * at_1
    lower, upper = rest_bounds(teacher, classes, temperature)
    return parabola.clamp(lower, upper)


def rest_bounds(teacher: Recorded, classes: int, temperature: float) -> tuple[Tensor, Tensor]:
    """The smallest and the largest value of f(1 / T) that the stored numbers allow, [B] each (see `rest_logit`).

    f is convex: a chord lies above it, and a chord's extension below. Its slope is a mean of the logits, so it is at most the smallest
    recorded one, m; and f(s) / s falls, because the entropy f(s) - s x f'(s) is not negative.
    """
    s = 1 / temperature
    at_0, at_1, at_half = math.log(classes - teacher.indices.shape[1]), teacher.rest[:, 0], teacher.rest[:, 1]
    smallest = teacher.logits[:, -1]
    steepest = smallest + smallest.abs() * _HALF_ROUNDING
    low_chord = at_0 + 2 * s * (at_half - at_0)
    high_chord = at_1 + 2 * (s - 1) * (at_1 - at_half)
    if s <= 0.5:
        return torch.stack([high_chord, at_half + (s - 0.5) * steepest, 2 * s * at_half]).amax(0), low_chord
    if s <= 1:
        return torch.stack([low_chord, at_1 + (s - 1) * steepest, s * at_1]).amax(0), high_chord
    return high_chord, torch.minimum(at_1 + (s - 1) * steepest, s * at_1)


# ---------------------------------------------------------------------------------------------------------------------
# Between features
#
# A teacher in inference mode gives tensors that no backward pass may keep: they go through an operation of their own first.


def feature_cosine(student: Tensor, teacher: Tensor) -> Tensor:
    """1 - cosine of the angle between the features, [B, D] each."""
    return 1 - (F.normalize(student.float()) * F.normalize(teacher.float())).sum(1).mean()


def feature_mse(student: Tensor, teacher: Tensor) -> Tensor:
    """Mean squared difference of the features (FitNets, Romero et al. 2015, but for a factor), [B, D] each."""
    return (student.float() - teacher.float()).square().mean()


def feature_cosine_smooth_l1(student: Tensor, teacher: Tensor) -> Tensor:
    """(1 - cosine) / 2 + smooth-L1 / 2 of the features, [B, D] each (UNIC, Sariyildiz et al. 2024, with its code's weights).

    Smooth-L1 of a difference d is d^2 / 2 where |d| < 1 and |d| - 1/2 elsewhere (Girshick 2015), mean over the D features. UNIC has the
    teacher's features standardized, as those of a teacher without a head are here: only then is 1 a size that means something.
    """
    smooth_l1 = F.smooth_l1_loss(student.float(), teacher.float())
    return (feature_cosine(student, teacher) + smooth_l1) / 2


def similarity_loss(
    student: Tensor, teacher: Tensor, queue: Tensor, *, temperature: float, teacher_temperature: float
) -> Tensor:
    """Cross-entropy of similarities to the teacher's features of other images (SEED, Fang et al. 2021, equations 3 to 6).

    The candidates of an image are its own feature, as the teacher sees it, and those of the queue, [Q, D]. The softmax of the cosines
    between the student's feature, [B, D], and these has to be that of the teacher's.
    """
    with nullcontext() if student.is_meta else torch.autocast(student.device.type, enabled=False):
        ours, theirs = F.normalize(student.float()), F.normalize(teacher.float())
        own = [(one * theirs).sum(1, keepdim=True) for one in (ours, theirs)]
        similar, target = (
            torch.cat([to_own, one @ queue.T], 1) for to_own, one in zip(own, (ours, theirs), strict=True)
        )
        share, log_share = (target / teacher_temperature).softmax(1), (similar / temperature).log_softmax(1)
        return -(share * log_share).sum() / len(share)
