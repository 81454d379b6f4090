"""AdamW with weight-decay groups and layer-wise learning rates, sharded or not; and the moving average of the weights.

A sharded optimizer's state is dealt to the processes: by whole weights, as torch does it, or by rows of each weight, as torch_xla does.

Shapes: a weight has R rows, its first dimension; each of W processes holds ceil(R / W) of them, the last ones filled up with zeros.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from timm.optim import param_groups_layer_decay, param_groups_weight_decay
from torch import Tensor, nn
from torch.distributed.optim import ZeroRedundancyOptimizer

from trainer.config import TrainingSettings
from trainer.devices import HOST, Device, RowShardedOptimizer
from trainer.devices.process_group import Processes
from trainer.devices.torch_private import copy_all, lerp_all
from trainer.models.networks import Classifier, batch_norms


def parameter_groups(model: nn.Module, *, weight_decay: float, layer_decay: float = 1.0) -> list[dict[str, Any]]:
    """Sort the trainable weights into groups with their `weight_decay` and `lr_scale`.

    Biases, norms and what the model's `no_weight_decay()` names are not decayed. With `layer_decay` below 1 the learning rate of
    each block is that of the block above times `layer_decay`.
    """
    if isinstance(model, Classifier):  # all its weights are its network's, which knows its own layers
        model = model.network
    named: Any = getattr(model, "no_weight_decay", tuple)  # timm's models and ours have it, torch's own have not
    options: dict[str, Any] = {"weight_decay": weight_decay, "no_weight_decay_list": tuple(named())}
    groups: list[dict[str, Any]]
    if layer_decay < 1:
        groups = param_groups_layer_decay(model, layer_decay=layer_decay, **options)
    else:
        groups = param_groups_weight_decay(model, **options)
    return [{"lr_scale": 1.0} | group for group in groups if group["params"]]


def make_optimizer(
    groups: list[dict[str, Any]], settings: TrainingSettings, processes: Processes
) -> torch.optim.Optimizer:
    """Make a fused AdamW over `groups`; its state is sharded over the processes where `zero` is set and there are several."""
    device, betas = processes.device, (settings.beta1, settings.beta2)
    options: dict[str, Any] = {"lr": settings.peak_learning_rate(), "betas": betas} | device.adamw_options
    optimizer: torch.optim.Optimizer
    if settings.zero and processes.world_size > 1:
        optimizer = device.sharded_adamw(groups, options, clip_norm=settings.clip_norm)
    else:
        optimizer = torch.optim.AdamW(groups, **options)
    device.make_adamw_state(local_optimizer(optimizer))
    return optimizer


def set_learning_rate(optimizer: torch.optim.Optimizer, rate: float, device: Device) -> None:
    """Set every group's learning rate to `rate` times the group's scale, as `device` takes it."""
    rates = device.numbers([rate * group["lr_scale"] for group in optimizer.param_groups])
    for group, own in zip(optimizer.param_groups, rates, strict=True):
        group["lr"] = own


def local_optimizer(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """Return the optimizer of what this process holds, which is everything unless it is sharded."""
    if isinstance(optimizer, RowShardedOptimizer):
        return optimizer.base_optimizer
    part: torch.optim.Optimizer = optimizer.optim if isinstance(optimizer, ZeroRedundancyOptimizer) else optimizer
    return part


def held(optimizer: torch.optim.Optimizer) -> Iterator[tuple[nn.Parameter, nn.Parameter]]:
    """Yield each weight of which this process holds the state, with what the state belongs to: itself, or its rows."""
    part = local_optimizer(optimizer)
    wholes = optimizer if isinstance(optimizer, RowShardedOptimizer) else part
    for whole, own in zip(wholes.param_groups, part.param_groups, strict=True):
        yield from zip(whole["params"], own["params"], strict=True)


def rows_of(tensor: Tensor, rank: int, world_size: int) -> Tensor:
    """Return the rows [ceil(R / W), ...] of a process, of all of them [R, ...]."""
    most = math.ceil(len(tensor) / world_size)
    filled = F.pad(tensor, [0, 0] * (tensor.dim() - 1) + [0, most * world_size - len(tensor)])
    return filled[rank * most : (rank + 1) * most]


def gather_whole_states(tensors: Mapping[str, Tensor], processes: Processes, what: str) -> dict[str, Tensor]:
    """Gather the tensors of all processes, each of which one process holds, on the first one; the others get none.

    `consolidate_state_dict` does the same by pickling, and takes twenty times as long.
    """
    layouts = processes.gather({name: (tensor.shape, tensor.dtype) for name, tensor in tensors.items()}, what)
    with processes.waiting(what):
        if not processes.is_first:
            for tensor in tensors.values():
                dist.send(tensor.contiguous(), 0)
            return {}
        gathered = dict(tensors)
        for rank, layout in enumerate(layouts[1:], start=1):
            for name, (shape, dtype) in layout.items():
                received = torch.empty(shape, dtype=dtype, device=processes.device.torch_device)
                dist.recv(received, rank)
                gathered[name] = received.cpu()  # the device may have no room for all shares
    return gathered


def gather_rows(
    tensors: Mapping[str, Tensor], rows: Mapping[str, int], processes: Processes, what: str
) -> Mapping[str, Tensor]:
    """Gather whole tensors, of which each process has rows, on the first one; the others get none. They travel between the hosts.

    Args:
        tensors: of this process, on the host, such as `exp_avg/NAME OF WEIGHT`; single numbers are the same for all.
        rows: name of each weight -> R.
    """
    whole = dict(tensors)
    with processes.waiting(what):
        for name, own in tensors.items():
            if not own.dim():
                continue
            parts = [own]
            if processes.world_size > 1:
                parts = [torch.empty_like(own) for _ in range(processes.world_size)] if processes.is_first else []
                dist.gather(own.contiguous(), parts or None, dst=0, group=processes.host)
            if parts:
                whole[name] = torch.cat(parts)[: rows[name.partition("/")[2]]]
    return whole if processes.is_first else {}


def scatter_rows(optimizer: RowShardedOptimizer, states: Sequence[Mapping[str, Tensor] | None]) -> None:
    """Give this process its rows of all weights, as they are now, and of their states; single numbers are the same for all.

    The states are in the order of the weights, such as `exp_avg` -> [R, ...]; None of one that has none yet.
    """
    rank, world_size = optimizer.local_rank, optimizer.local_world_size
    for (whole, own), state in zip(held(optimizer), states, strict=True):
        with torch.no_grad():
            own.copy_(rows_of(whole, rank, world_size))
        if state is not None:
            optimizer.base_optimizer.state[own] = {
                key: (rows_of(value, rank, world_size) if value.dim() else value).to(own.device, copy=True)
                for key, value in state.items()
            }


def running_statistics(model: nn.Module) -> list[Tensor]:
    """Return the running means and variances that a model's batch normalizations learn, of which each process sees its own images."""
    learning = [module for module in batch_norms(model) if module.training]
    found = [part for module in learning for part in (module.running_mean, module.running_var)]
    return [part for part in found if part is not None]


class AveragedModel:
    """An exponential moving average of a model's weights, with a warm-up of its decay for the first steps.

    The decay at step t is min(decay, (1 + t) / (10 + t)), so that a short training isn't held back by its first weights.
    """

    def __init__(self, model: nn.Module, decay: float, device: Device = HOST, copied: nn.Module | None = None) -> None:
        """Start from the model's present weights; `device` is where they are, `copied` a copy of the model, by default made here."""
        self.decay, self._device = decay, device
        self.model = (copied or copy.deepcopy(model)).eval().requires_grad_(False)
        self._averages: list[Tensor] = list(self.model.parameters())
        self._sources: list[Tensor] = list(model.parameters())
        self._buffers = list(zip(self.model.buffers(), model.buffers(), strict=True))

    @torch.no_grad()
    def update(self, step: int) -> None:
        """Move the average toward the model's weights after optimizer step `step`; buffers are copied."""
        (share,) = self._device.numbers([1 - min(self.decay, (1 + step) / (10 + step))])
        if isinstance(share, Tensor):
            for average, source in zip(self._averages, self._sources, strict=True):
                average.lerp_(source, share)
            for average, source in self._buffers:
                average.copy_(source)
        else:
            lerp_all(self._averages, self._sources, share)
            copy_all([average for average, _ in self._buffers], [source for _, source in self._buffers])
