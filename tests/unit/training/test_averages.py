import pytest
import torch

from trainer.training.averages import AveragedModel


def test_the_average_follows_its_recurrence():
    model = torch.nn.Linear(1, 1, bias=False)
    torch.nn.init.constant_(model.weight, 0.0)
    average = AveragedModel(model, decay=0.6)
    expected = 0.0
    for step in range(20):
        torch.nn.init.constant_(model.weight, float(step))
        average.update(step)
        decay = min(0.6, (1 + step) / (10 + step))
        expected = decay * expected + (1 - decay) * step
        assert float(average.model.weight) == pytest.approx(expected, rel=1e-5)


def test_buffers_are_copied_and_nothing_is_trained():
    model = torch.nn.BatchNorm1d(3)
    average = AveragedModel(model, decay=0.9)
    model(torch.randn(16, 3) + 5)
    average.update(0)
    assert torch.equal(average.model.running_mean, model.running_mean)
    assert not any(parameter.requires_grad for parameter in average.model.parameters())
    assert not average.model.training
