"""Small states of trainings, for tests of checkpoints."""

import torch
from torch import nn

from trainer.training.checkpoints.snapshots import PARTS
from trainer.training.checkpoints.state import capture

__all__ = ["PARTS", "everything", "learner", "snapshot_of"]


def learner(seed=0, *, steps=2, dtype=torch.float32, order=(0, 1)):
    """A model, its optimiser after some steps, and its average."""
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2)).to(dtype)
    weights = [list(model[0].parameters()), [*model[1].parameters(), *model[2].parameters()]]
    options = [{"weight_decay": 0.05, "lr_scale": 1.0}, {"weight_decay": 0.0, "lr_scale": 0.5}]
    groups = [{"params": weights[one], **options[one]} for one in order]
    optimizer = torch.optim.AdamW(groups, lr=0.1, fused=True)
    for _ in range(steps):
        model(torch.randn(5, 3, dtype=dtype)).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    average = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2)).to(dtype)
    return model, optimizer, average


def snapshot_of(step, parts, **options):
    """The state of a `learner`."""
    return capture(step, *parts, **options)


def everything(state):
    """All that a state holds, to be compared bit by bit."""
    tensors = {
        (part, name): (tensor.dtype, tuple(tensor.shape), tensor.contiguous().view(-1).view(torch.uint8).tolist())
        for part in PARTS
        for name, tensor in (getattr(state, part) or {}).items()
    }
    groups = {weight: {**group, "params": None} for group in state.groups for weight in group["params"]}
    return state.step, state.pending, groups, tensors
