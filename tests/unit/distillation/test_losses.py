import math

import numpy as np
import pytest
import torch

from trainer.distillation.losses import agreement, distillation_kl


def logits(seed, batch=6, classes=5, scale=3.0):
    return torch.randn(batch, classes, generator=torch.Generator().manual_seed(seed)) * scale


def kl_by_hand(student, teacher, temperature):
    """KL divergence from its definition, in float64, one sample and class at a time."""
    total = 0.0
    for student_row, teacher_row in zip(student.double().tolist(), teacher.double().tolist(), strict=True):
        q = np.exp(np.array(student_row) / temperature) / np.exp(np.array(student_row) / temperature).sum()
        p = np.exp(np.array(teacher_row) / temperature) / np.exp(np.array(teacher_row) / temperature).sum()
        total += sum(p[k] * math.log(p[k] / q[k]) for k in range(len(p)))
    return temperature**2 * total / len(student)


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0, 8.0])
def test_kl_is_its_definition(temperature):
    student, teacher = logits(0), logits(1)
    ours = distillation_kl(student, teacher, temperature)
    assert float(ours) == pytest.approx(kl_by_hand(student, teacher, temperature), rel=1e-5)


def test_kl_is_zero_for_equal_logits_up_to_a_constant():
    student = logits(0)
    assert float(distillation_kl(student, student + 7, 2.0)) == pytest.approx(0, abs=1e-6)


def test_the_gradient_is_that_of_the_paper():
    """Hinton et al. 2015, equation 2, times T^2: T x (softmax(z / T) - softmax(v / T)), a batch's mean."""
    student, teacher, temperature = logits(0).requires_grad_(), logits(1), 3.0
    distillation_kl(student, teacher, temperature).backward()
    expected = temperature * ((student / temperature).softmax(1) - (teacher / temperature).softmax(1)) / len(student)
    assert torch.allclose(student.grad, expected.detach(), atol=1e-6)


def test_at_a_high_temperature_logits_are_matched():
    """Hinton et al. 2015, equation 4: with zero-mean logits the gradient tends to (z - v) / K."""
    student, teacher = logits(0), logits(1)
    student, teacher = (
        (student - student.mean(1, keepdim=True)).requires_grad_(),
        teacher - teacher.mean(1, keepdim=True),
    )
    distillation_kl(student, teacher, 1000.0).backward()
    assert torch.allclose(student.grad, (student - teacher).detach() / 5 / len(student), atol=2e-3)


def test_losses_are_computed_in_float32_from_bfloat16_logits():
    student, teacher = logits(0).bfloat16(), logits(1).bfloat16()
    ours = distillation_kl(student, teacher, 2.0)
    assert ours.dtype == torch.float32
    assert float(ours) == pytest.approx(kl_by_hand(student.float(), teacher.float(), 2.0), rel=1e-5)


def test_agreement_counts_equal_top_classes():
    student = torch.tensor([[2.0, 1.0], [0.0, 3.0], [5.0, 4.0]])
    teacher = torch.tensor([[9.0, 1.0], [4.0, 3.0], [1.0, 0.0]])
    assert float(agreement(student, teacher)) == pytest.approx(2 / 3)
