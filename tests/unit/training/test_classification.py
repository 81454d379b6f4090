import pytest
import torch
import torch.nn.functional as F

from trainer.training.classification import cross_entropy, soft_targets

LOGITS = torch.randn(7, 4, generator=torch.Generator().manual_seed(0))
LABELS = torch.tensor([0, 1, 2, 3, 3, 0, 1])


@pytest.mark.parametrize("smoothing", [0.0, 0.1, 0.5])
def test_soft_cross_entropy_is_torchs_label_smoothing(smoothing):
    ours = cross_entropy(LOGITS, soft_targets(LABELS, 4, smoothing))
    theirs = F.cross_entropy(LOGITS, LABELS, label_smoothing=smoothing)
    assert float(ours) == pytest.approx(float(theirs), rel=1e-6)


def test_targets_are_distributions():
    targets = soft_targets(LABELS, 4, 0.2)
    assert torch.allclose(targets.sum(1), torch.ones(7))
    assert torch.equal(targets.argmax(1), LABELS)
