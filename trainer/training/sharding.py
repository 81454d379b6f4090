"""Fully sharded data parallelism (FSDP2): each process keeps a share of every weight, of its gradient and of its optimizer state.

A block's weights are gathered while it computes, forward and backward, and dropped again. A share is rows of a weight, a `DTensor`, so
what is copied, averaged, updated or written works on shares or gathers one weight at a time; every gathering needs all processes.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard, register_fsdp_forward_method
from torch.distributed.tensor import DTensor, distribute_tensor

from trainer.config import TrainingSettings
from trainer.devices import Device
from trainer.devices.process_group import Processes
from trainer.io.errors import SettingsError


def is_fsdp(settings: TrainingSettings, processes: Processes) -> bool:
    """Return whether a training shares its weights out; a single process has nobody to share with.

    Raises:
        SettingsError: the device is one of XLA.
    """
    if settings.sharding == "fsdp" and processes.device.is_lazy:
        raise SettingsError(
            "sharding is fsdp, which torch has not for XLA; set sharding=none, and zero=true to save memory"
        )
    return settings.sharding == "fsdp" and processes.world_size > 1


def repeated_blocks(model: nn.Module) -> Iterator[nn.Module]:
    """Yield the blocks that a network is a sequence of: the elements of its outermost lists of modules of one kind."""
    for child in model.children():
        kinds = {type(element) for element in child.children()}
        if isinstance(child, (nn.Sequential, nn.ModuleList)) and len(child) > 1 and len(kinds) == 1:
            yield from child
        else:
            yield from repeated_blocks(child)


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
def _device_mesh(kind: str, world_size: int) -> DeviceMesh:
    return init_device_mesh(kind, (world_size,))


def _mesh(processes: Processes) -> DeviceMesh:
    return _device_mesh(processes.device.kind, processes.world_size)


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
