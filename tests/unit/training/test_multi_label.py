import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from trainer.data.batch import Mixing
from trainer.training.classification import cross_entropy, label_loss
from trainer.training.multi_label import LabelSetLoss, asymmetric_loss, binary_cross_entropy

LOGITS = 4 * torch.randn(5, 3, generator=torch.Generator().manual_seed(0))
SETS = np.array([[0, 0, 0], [1, 0, 1], [0, 1, 0]], dtype=np.uint8)
LABELS = torch.tensor([0, 1, 2, 1, 0])
TARGETS = torch.from_numpy(SETS)[LABELS].float()


def test_the_binary_cross_entropy_is_torchs_summed_over_the_classes():
    theirs = F.binary_cross_entropy_with_logits(LOGITS, TARGETS, reduction="none").sum(1)
    assert torch.allclose(binary_cross_entropy(LOGITS.bfloat16().float(), TARGETS), theirs, rtol=2e-2)
    assert torch.equal(binary_cross_entropy(LOGITS, TARGETS), theirs)


def test_the_asymmetric_loss_is_that_of_a_slow_loop_in_double_precision():
    """Ridnik et al. 2021, equations 4 to 7, with no focusing of positives, 4 of negatives and a margin of 0.05."""
    wanted = []
    for logits, targets in zip(LOGITS.double().tolist(), TARGETS.tolist(), strict=True):
        total = 0.0
        for logit, target in zip(logits, targets, strict=True):
            p = 1 / (1 + math.exp(-logit))
            q = max(p - 0.05, 0)
            total -= math.log(p) if target else q**4 * math.log(1 - q)
        wanted.append(total)
    assert asymmetric_loss(LOGITS, TARGETS).tolist() == pytest.approx(wanted, rel=1e-4)


@pytest.mark.parametrize("logit", [-200.0, 200.0])
def test_far_logits_have_finite_losses_and_gradients(logit):
    for loss in (binary_cross_entropy, asymmetric_loss):
        for target in (0.0, 1.0):
            logits = torch.full((1, 1), logit, requires_grad=True)
            value = loss(logits, torch.full((1, 1), target)).sum()
            (gradient,) = torch.autograd.grad(value, logits)
            assert value.isfinite()
            assert gradient.isfinite().all()


def test_labels_are_the_indices_of_sets_which_are_smoothed_and_mixed_as_one_hot_labels_are():
    partner, share = torch.arange(5).roll(1), torch.linspace(0, 1, 5)
    mixed = Mixing(partner, LABELS[partner], share, share, torch.zeros(5, 4))
    targets = share[:, None] * TARGETS + (1 - share[:, None]) * TARGETS[partner]
    targets = 0.9 * targets + 0.1 / 3
    ours = LabelSetLoss(SETS, "bce")(LOGITS, LABELS, mixed, smoothing=0.1)
    assert float(ours) == pytest.approx(float(binary_cross_entropy(LOGITS, targets).mean()), rel=1e-6)


def test_a_sample_without_a_label_weighs_nothing():
    labels, weights = LABELS.clone(), torch.full((5,), 5 / 4)
    labels[2], weights[2] = -1, 0
    known = labels >= 0
    ours = LabelSetLoss(SETS, "asymmetric")(LOGITS, labels, weights=weights)
    assert float(ours) == pytest.approx(float(asymmetric_loss(LOGITS[known], TARGETS[known]).mean()), rel=1e-6)


def test_the_loss_is_the_one_that_the_data_set_needs():
    assert label_loss(None, "bce") is cross_entropy
    assert isinstance(label_loss(SETS, "asymmetric"), LabelSetLoss)
