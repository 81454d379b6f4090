import math

import pytest
import torch
import torch.nn.functional as F

from trainer.data.batch import Mixing
from trainer.training.classification import cross_entropy

LOGITS = torch.randn(7, 4, generator=torch.Generator().manual_seed(0))
LABELS = torch.tensor([0, 1, 2, 3, 3, 0, 1])


def mixing(share):
    """Every sample with its right neighbour, as much of itself as `share` says."""
    partner = torch.arange(7).roll(-1)
    share = torch.as_tensor(share)
    return Mixing(partner, LABELS[partner], share, share, torch.zeros(7, 4))


@pytest.mark.parametrize("smoothing", [0.0, 0.1, 0.5])
def test_it_is_torchs_cross_entropy_with_label_smoothing(smoothing):
    theirs = F.cross_entropy(LOGITS, LABELS, label_smoothing=smoothing)
    assert float(cross_entropy(LOGITS, LABELS, smoothing=smoothing)) == pytest.approx(float(theirs), rel=1e-6)


@pytest.mark.parametrize("smoothing", [0.0, 0.2])
def test_mixed_labels_share_the_target(smoothing):
    """Zhang et al. 2018: the target is the same mixture of one-hot labels as the pixels are of images; softened as torch softens it."""
    share = torch.linspace(0, 1, 7)
    mixed = mixing(share)
    one_hot = F.one_hot(LABELS, 4).float()
    target = share[:, None] * one_hot + (1 - share[:, None]) * one_hot[mixed.partner]
    ours = cross_entropy(LOGITS, LABELS, mixed, smoothing=smoothing)
    assert float(ours) == pytest.approx(float(F.cross_entropy(LOGITS, target, label_smoothing=smoothing)), rel=1e-6)
    by_hand = 0.0
    for row, wanted in zip(LOGITS.double().tolist(), target.double().tolist(), strict=True):
        total = sum(math.exp(value) for value in row)
        soft = [(1 - smoothing) * part + smoothing / 4 for part in wanted]
        by_hand -= sum(part * (value - math.log(total)) for part, value in zip(soft, row, strict=True)) / 7
    assert float(ours) == pytest.approx(by_hand, rel=1e-5)


def test_a_sample_that_is_its_own_partner_keeps_its_label():
    own = Mixing(torch.arange(7), LABELS, torch.full((7,), 0.3), torch.full((7,), 0.3), torch.zeros(7, 4))
    assert float(cross_entropy(LOGITS, LABELS, own)) == pytest.approx(float(cross_entropy(LOGITS, LABELS)), rel=1e-6)


def test_it_is_computed_in_float32_from_half_precision():
    half = LOGITS.bfloat16()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        ours = cross_entropy(half, LABELS, mixing(torch.linspace(0, 1, 7)), smoothing=0.1)
    assert ours.dtype == torch.float32
    whole = cross_entropy(half.float(), LABELS, mixing(torch.linspace(0, 1, 7)), smoothing=0.1)
    assert float(ours) == pytest.approx(float(whole), rel=1e-6)


def test_no_value_is_read_back():
    """Tensors without values stand in for those of a device: whatever waits for a value raises."""
    logits = LOGITS.to("meta").requires_grad_()
    mixed = Mixing(*(part.to("meta") for part in mixing(torch.linspace(0, 1, 7))))
    cross_entropy(logits, LABELS.to("meta"), mixed, smoothing=0.1).backward()
    assert logits.grad.shape == logits.shape
