"""Optimisers whose state is dealt to the processes: by whole weights, as torch does it, or by rows of each weight, as torch_xla does.

Shapes: a weight has R rows, its first dimension; each of W processes holds ceil(R / W) of them, the last ones filled up with zeros.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.optim import ZeroRedundancyOptimizer

from trainer.devices import RowShardedOptimizer
from trainer.training.process_group import Processes


def local_optimizer(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """Return the optimiser of what this process holds, which is everything unless it is sharded."""
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
        processes: all take part.
        what: they are for, for the message.

    Raises:
        LostProcessError: a process did not come within the limit, or is gone.
    """
    with processes.waiting(what):
        whole = {
            name: _joined(tensor, rows[name.partition("/")[2]], processes) if tensor.dim() else tensor
            for name, tensor in tensors.items()
        }
    return whole if processes.is_first else {}


def _joined(own: Tensor, count: int, processes: Processes) -> Tensor:
    """Return all rows on the first process, and nothing of use on the others."""
    if processes.world_size == 1:
        return own[:count]
    parts = [torch.empty_like(own) for _ in range(processes.world_size)] if processes.is_first else None
    dist.gather(own.contiguous(), parts, dst=0, group=processes.host)
    return own if parts is None else torch.cat(parts)[:count]


def deal_rows(optimizer: RowShardedOptimizer, states: Sequence[Mapping[str, Tensor] | None]) -> None:
    """Give this process its rows of all weights, as they are now, and of their states; single numbers are the same for all.

    Args:
        optimizer: takes them.
        states: of each weight in its order, such as `exp_avg` -> [R, ...]; None of one that has none yet.
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
