"""What a training has to keep to go on, each tensor by the name of its weight.

So a state fits the same model whatever the order of its weights and the number of processes, and whether the optimiser is sharded.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.optim import ZeroRedundancyOptimizer

from trainer.errors import ArtifactError
from trainer.training.devices import Device
from trainer.training.processes import Processes

OPTIONS = ("lr_scale", "weight_decay", "betas", "eps")
"""What a group of weights has of its own, beside the schedule's learning rate: it decides how a weight is changed."""
_SHOWN = 3
"""Names of each kind in a message."""


@dataclass(frozen=True, kw_only=True)
class State:
    """What a checkpoint holds."""

    step: int
    """Optimiser steps done."""
    model: Mapping[str, Tensor]
    optimizer: Mapping[str, Tensor]
    """Such as `exp_avg/NAME OF WEIGHT`; nothing of a weight that was never changed."""
    groups: Sequence[Mapping[str, Any]]
    """The optimiser's groups: their `params`, names of weights, and of `OPTIONS` those that the optimiser has."""
    average: Mapping[str, Tensor] | None
    """The moving average of the weights, where there is one."""
    pending: tuple[str, ...] = ()
    """What belongs to the last step and is still to be done, such as `validation`."""
    uri: str = ""
    """Where it was read; empty for one that was not."""


def capture(
    step: int,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    average: nn.Module | None,
    *,
    processes: Processes | None = None,
    pending: tuple[str, ...] = (),
) -> State:
    """The state after `step` steps: the tensors themselves, which the next step changes.

    Args:
        step: optimiser steps done.
        model: whose weights are trained.
        optimizer: theirs.
        average: of the weights.
        processes: of the training; where the optimiser is sharded, all of them call this, and the first one has the whole state then,
            the others none.
        pending: what belongs to the last step and is still to be done.

    Raises:
        LostProcessError: a process did not come within the limit, or is gone.
    """
    names, local = _names(model), _local(optimizer)
    tensors = {
        f"{key}/{names[parameter]}": value
        for parameter in _parameters(local)
        for key, value in local.state.get(parameter, {}).items()
    }
    if local is not optimizer:
        assert processes is not None, "an optimiser is sharded over some"
        tensors = _gather(tensors, processes, f"the checkpoint of step {step}")
    state = State(
        step=step,
        model=model.state_dict(),
        optimizer=tensors,
        groups=[
            {"params": [names[parameter] for parameter in group["params"]]} | _options(group)
            for group in optimizer.param_groups
        ],
        average=average.state_dict() if average is not None else None,
        pending=pending,
    )
    return state if processes is None else _on_host(state, processes.device)


def _on_host(state: State, device: Device) -> State:
    """The state itself, or copies on the host where tensors of the device are not copied one by one."""
    held = [part for part in (state.model, state.optimizer, state.average) if part is not None]
    copies = device.host_copies([tensor for part in held for tensor in part.values()])
    if copies is None:
        return state
    left = iter(copies)
    model, optimizer, *average = ({name: next(left) for name in part} for part in held)
    return replace(state, model=model, optimizer=optimizer, average=average[0] if average else None)


def restore(state: State, model: nn.Module, optimizer: torch.optim.Optimizer, average: nn.Module | None) -> None:
    """Put a state into a model, its optimiser (of which a sharded one takes its share) and its average.

    Raises:
        ArtifactError: names, shapes or types do not fit; nothing was changed then.
    """
    names = _names(model)
    _refuse(state, "weights", _misfits(state.model, model.state_dict()))
    _refuse(state, "optimiser", [*_strangers(state.optimizer, names), *_other_options(state.groups, optimizer, names)])
    if average is not None:
        _refuse(state, "average", _misfits(state.average or {}, average.state_dict()))
        average.load_state_dict(dict(state.average or {}))
    model.load_state_dict(dict(state.model))
    _restore_optimizer(state.optimizer, optimizer, names)


def _names(model: nn.Module) -> dict[nn.Parameter, str]:
    return {parameter: name for name, parameter in model.named_parameters()}


def _options(group: Mapping[str, Any]) -> dict[str, Any]:
    options = {key: group[key] for key in OPTIONS if key in group}
    return {key: list(value) if isinstance(value, tuple) else value for key, value in options.items()}


def _restore_optimizer(
    tensors: Mapping[str, Tensor], optimizer: torch.optim.Optimizer, names: Mapping[nn.Parameter, str]
) -> None:
    """Not by `load_state_dict`, which goes by numbers of weights, and which a sharded optimiser does not get right for a fused one."""
    local = _local(optimizer)
    by_weight: dict[str, dict[str, Tensor]] = {}
    for name, tensor in tensors.items():
        key, _, weight = name.partition("/")
        by_weight.setdefault(weight, {})[key] = tensor
    for parameter in _parameters(local):
        held = by_weight.get(names[parameter])
        if held is not None:
            local.state[parameter] = {key: value.to(parameter.device, copy=True) for key, value in held.items()}


def _gather(tensors: Mapping[str, Tensor], processes: Processes, what: str) -> dict[str, Tensor]:
    """The tensors of all processes, on the first one.

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


def _local(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """The optimiser of this process's weights, which are all but in a sharded one."""
    return optimizer.optim if isinstance(optimizer, ZeroRedundancyOptimizer) else optimizer


def _parameters(optimizer: torch.optim.Optimizer) -> Iterator[nn.Parameter]:
    for group in optimizer.param_groups:
        yield from group["params"]


# ---------------------------------------------------------------------------------------------------------------------
# What does not fit


def _refuse(state: State, part: str, misfits: Sequence[str]) -> None:
    if misfits:
        raise ArtifactError(
            f"checkpoint {state.uri or f'of step {state.step}'} does not fit this training in its {part}: {_listed(misfits)}; "
            "go on with the version of the project that wrote it, or remove it to begin anew"
        )


def _listed(texts: Sequence[str]) -> str:
    more = len(texts) - _SHOWN
    return "; ".join(texts[:_SHOWN]) + (f"; and {more} more" if more > 0 else "")


def _misfits(held: Mapping[str, Tensor], wanted: Mapping[str, Tensor]) -> list[str]:
    """What differs between the tensors of a checkpoint and those of a model: names, shapes, types."""
    lacking = [f"it lacks {name}" for name in wanted if name not in held]
    strange = [f"it has {name}, which the model has not" for name in held if name not in wanted]
    others = [
        f"{name} is {_described(held[name])} instead of {_described(tensor)}"
        for name, tensor in wanted.items()
        if name in held and _described(held[name]) != _described(tensor)
    ]
    return lacking + strange + others


def _described(tensor: Tensor) -> str:
    return f"{list(tensor.shape)} {str(tensor.dtype).removeprefix('torch.')}"


def _strangers(tensors: Mapping[str, Tensor], names: Mapping[nn.Parameter, str]) -> list[str]:
    """What of an optimiser's state belongs to no weight, or to one of another shape; single numbers, such as its steps, fit all."""
    weights = {name: parameter for parameter, name in names.items()}
    told = []
    for name, tensor in tensors.items():
        weight = weights.get(name.partition("/")[2])
        if weight is None:
            told.append(f"it has {name}, which the model has not")
        elif tensor.dim() and _described(tensor) != _described(weight):
            told.append(f"{name} is {_described(tensor)} instead of {_described(weight)}")
    return told


def _other_options(
    groups: Sequence[Mapping[str, Any]], optimizer: torch.optim.Optimizer, names: Mapping[nn.Parameter, str]
) -> list[str]:
    """Weights that were changed in another way than they would be now."""
    before = {weight: group for group in groups for weight in group["params"]}
    told = []
    for group in optimizer.param_groups:
        now = _options(group)
        for weight in (names[parameter] for parameter in group["params"]):
            was = before.get(weight, {})
            told += [
                f"{key} of {weight} was {was.get(key)}, is {value}"
                for key, value in now.items()
                if was.get(key, value) != value or weight not in before
            ]
    return told
