"""Fully sharded data parallelism (FSDP2): each process keeps a share of every weight, of its gradient and of its optimizer state.

A block's weights are gathered while it computes, forward and backward, and dropped again. A share is rows of a weight, a `DTensor`, so
what is copied, averaged, updated or written works on shares or gathers one weight at a time; every gathering needs all processes.
"""

from __future__ import annotations

import copy
import functools
import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import TypeVar

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard, register_fsdp_forward_method
from torch.distributed.tensor import DTensor, distribute_tensor

from trainer.config import Sharding, TrainingSettings
from trainer.config.conflicts import sharding_conflict
from trainer.devices import Device
from trainer.devices.process_group import Processes
from trainer.io.errors import SettingsError
from trainer.io.formatting import size
from trainer.io.host import usable_memory

logger = logging.getLogger(__name__)

STATE_SHARE = 0.5
"""Of a process' memory, above which what it keeps of all weights is shared out."""

Fitted = TypeVar("Fitted", bound=TrainingSettings)


def is_fsdp(settings: TrainingSettings, processes: Processes) -> bool:
    """Return whether a training shares its weights out; a single process has nobody to share with."""
    return settings.sharding == "fsdp" and processes.world_size > 1


def decided(
    section: str, settings: Fitted, processes: Processes, model: nn.Module, teachers: Sequence[nn.Module] = ()
) -> Fitted:
    """Replace `sharding=auto` by what the memory decides, with a line in the log; the same on all processes and in each attempt.

    Counted in bytes is what a process keeps of all weights: 4 of each of the model, 12 of each that is trained for its gradient and
    AdamW's two averages, 4 for the moving average, and 4 of each of a teacher, or 2 in bf16. Activations, which are not known before a
    step, have the other half of the memory.

    Raises:
        SettingsError: `sharding=fsdp` on XLA.
    """
    if mistake := sharding_conflict(section, settings, processes.device.kind):
        raise SettingsError(mistake)
    if settings.sharding != "auto" or processes.world_size == 1 or processes.device.is_lazy:
        return settings
    of_teacher = 2 if processes.device.uses_bf16(settings.precision) else 4
    needed = sum(
        one.numel() * (4 + 12 * one.requires_grad + 4 * bool(settings.ema_decay)) for one in model.parameters()
    )
    needed += sum(of_teacher * one.numel() for teacher in teachers for one in teacher.parameters())
    if processes.device.kind == "cuda":
        memory = torch.cuda.get_device_properties(processes.device.torch_device).total_memory
    else:
        memory = usable_memory() // processes.local_world_size
    memory = min(processes.gather(memory, "the memory of each process"))
    sharding: Sharding = "fsdp" if needed > STATE_SHARE * memory else "none"
    if processes.is_first and needed > STATE_SHARE / 4 * memory:  # of a small model nobody asks
        text = "%s  sharding=%s: a process has %s, of which whole weights, gradients and optimizer state would take %s"
        logger.info(text, section, sharding, size(memory), size(needed))
    return settings.model_copy(update={"sharding": sharding})


def repeated_blocks(model: nn.Module) -> Iterator[nn.Module]:
    """Yield the blocks that a network is a sequence of: the elements of its outermost lists of modules of one kind."""
    for blocks in block_lists(model):
        yield from blocks


def block_lists(model: nn.Module) -> Iterator[nn.Sequential | nn.ModuleList]:
    """Yield the outermost lists of modules of one kind, such as those of an encoder and of a decoder."""
    for child in model.children():
        kinds = {type(element) for element in child.children()}
        if isinstance(child, (nn.Sequential, nn.ModuleList)) and len(child) > 1 and len(kinds) == 1:
            yield child
        else:
            yield from block_lists(child)


def shard(model: nn.Module, settings: TrainingSettings, processes: Processes) -> None:
    """Leave this process its share of a model's weights, in place, on its device; each block is brought there and cut by itself.

    The model has to be called as a whole, equally often on all processes. Without repeated blocks all weights are gathered at once, which
    still shares out gradients and optimizer state.
    """
    bf16 = processes.device.uses_bf16(settings.precision)
    policy = MixedPrecisionPolicy(
        param_dtype=torch.bfloat16 if bf16 else None,
        reduce_dtype=torch.bfloat16 if settings.gradient_compression == "bf16" else torch.float32,
        cast_forward_inputs=False,  # autocast does it, and leaves alone what is no activation, such as a mask's noise
    )
    for block in list(repeated_blocks(model)):
        fully_shard(block, mesh=_mesh(processes), mp_policy=policy)
    # The root's own weights stay until the backward pass, which begins with them.
    fully_shard(model, mesh=_mesh(processes), mp_policy=policy, reshard_after_forward=False)
    processes.device.return_freed_memory()  # blocks of many sizes are gathered and dropped: what is kept would be twice what is used


def shard_frozen(model: nn.Module, method: str, processes: Processes, place: Callable[[nn.Module], None]) -> None:
    """Share out the weights of the blocks of a model without gradients, in place; `method` of it is called, by all processes alike.

    `place` brings a block to the device, and what is left of the model when all are cut.
    """
    blocks = list(repeated_blocks(model))
    for block in blocks:
        place(block)
        fully_shard(block, mesh=_mesh(processes))
    place(model)
    of_blocks = {weight for block in blocks for weight in block.parameters()}
    fully_shard(model, mesh=_mesh(processes), ignored_params={*model.parameters()} - of_blocks)
    register_fsdp_forward_method(model, method)


@functools.cache
def _device_mesh(kind: str, *shape: int) -> DeviceMesh:
    return init_device_mesh(kind, shape, mesh_dim_names=("machines", "shares")[-len(shape) :])


def _mesh(processes: Processes) -> DeviceMesh:
    """All processes in a row; or, of several machines with several each, a row a machine, each of which has all shares (HSDP).

    Between machines only gradients travel then, already cut. Torchrun numbers the processes machine by machine.
    """
    machines, left = divmod(processes.world_size, processes.local_world_size)
    if machines == 1 or left or processes.local_world_size == 1:
        return _device_mesh(processes.device.kind, processes.world_size)
    return _device_mesh(processes.device.kind, machines, processes.local_world_size)


def inference(model: nn.Module, device: Device) -> AbstractContextManager[object]:
    """Around forward passes without a backward pass; weights gathered in torch's inference mode could not be trained afterward."""
    return torch.no_grad() if isinstance(model, FSDPModule) else device.inference()


def release_gathered(model: nn.Module) -> None:
    """Drop the weights that a forward pass without a backward pass has left gathered."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


# ---------------------------------------------------------------------------------------------------------------------
# Copies


def alias(model: nn.Module) -> nn.Module:
    """Copy a model without its weights, which the copy shares with it, frozen, until both are sharded."""
    return _copied(model, lambda weight: nn.Parameter(weight.detach(), requires_grad=False))


def outline(model: nn.Module) -> nn.Module:
    """Copy a model with its weights on the meta device, to be filled by `gather`."""
    return _copied(
        model, lambda weight: nn.Parameter(torch.empty_like(weight, device="meta"), requires_grad=weight.requires_grad)
    )


def _copied(model: nn.Module, weight: Callable[[nn.Parameter], nn.Parameter]) -> nn.Module:
    return copy.deepcopy(model, {id(one): weight(one) for one in model.parameters()})


def gather(model: nn.Module, into: nn.Module) -> nn.Module:
    """Gather the whole weights of a sharded model on every host, in its `outline`, and return that."""
    into.load_state_dict({name: whole(tensor).cpu() for name, tensor in model.state_dict().items()}, assign=True)
    return into


def whole(tensor: Tensor) -> Tensor:
    """Return a tensor, gathered from all processes where it is shared out."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def local(tensor: Tensor) -> Tensor:
    """Return this process's share of a tensor, which may be empty; all of it where it is not shared out."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def shared_like(tensor: Tensor, other: Tensor) -> Tensor:
    """Share out a whole tensor [R, ...], which every process has, as `other` is shared out; single numbers stay whole."""
    if not isinstance(other, DTensor) or not tensor.dim():
        return tensor
    return distribute_tensor(tensor, other.device_mesh, other.placements, src_data_rank=None)
