"""Small states of trainings, for tests of checkpoints."""

import torch
import torch.distributed as dist
from torch import nn

from trainer.devices import HOST
from trainer.devices.process_group import Processes
from trainer.training.optimizers import RowShardedOptimizer, held, rows_of
from trainer.training.training_state import PARTS, capture

__all__ = ["PARTS", "Rows", "everything", "learner", "snapshot_of"]


def learner(seed=0, *, steps=2, dtype=torch.float32, order=(0, 1)):
    """A model, its optimizer after some steps, and its average."""
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


class Rows(RowShardedOptimizer):
    """AdamW for rows of each weight on a CPU, as torch_xla's on its devices; gradients are alike on all processes."""

    def __init__(self, groups, **options):
        super().__init__(groups, {})
        self.local_rank, self.local_world_size = dist.get_rank(), dist.get_world_size()
        own = [group | {"params": [self._rows(weight) for weight in group["params"]]} for group in groups]
        self.base_optimizer = torch.optim.AdamW(own, **options)
        for outer, inner in zip(self.param_groups, self.base_optimizer.param_groups, strict=True):
            outer.update({name: value for name, value in inner.items() if name != "params"})

    def _rows(self, weight):
        return nn.Parameter(rows_of(weight.detach(), self.local_rank, self.local_world_size).clone())

    @torch.no_grad()
    def step(self):
        for whole, own in held(self):
            own.grad = rows_of(whole.grad, self.local_rank, self.local_world_size)
        self.base_optimizer.step()
        for whole, own in held(self):
            parts = [torch.empty_like(own) for _ in range(self.local_world_size)]
            dist.all_gather(parts, own.detach())
            whole.copy_(torch.cat(parts)[: len(whole)])


def snapshot_of(step, parts, **options):
    """The state of a `learner`."""
    alone = Processes(rank=0, world_size=1, local_rank=0, device=HOST)
    return capture(step, *parts, processes=alone, **options)


def everything(state):
    """All that a state holds, to be compared bit by bit."""
    tensors = {
        (part, name): (tensor.dtype, tuple(tensor.shape), tensor.contiguous().view(-1).view(torch.uint8).tolist())
        for part in PARTS
        for name, tensor in (getattr(state, part) or {}).items()
    }
    groups = {weight: {**group, "params": None} for group in state.groups for weight in group["params"]}
    return state.step, state.pending, groups, tensors
