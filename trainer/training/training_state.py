"""What a training keeps in order to resume: each tensor by the name of its weight, copied into the host's memory, as files, and put back.

So a state fits the same model whatever the order of its weights and the number of processes, and whether the optimizer is sharded.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from pydantic import BaseModel, ConfigDict, ValidationError
from torch import Tensor, nn
from torch.distributed.optim import ZeroRedundancyOptimizer

from trainer.devices import RowShardedOptimizer
from trainer.devices.process_group import Processes
from trainer.io.base_models import NonNegative
from trainer.io.errors import ArtifactError
from trainer.io.formatting import listed
from trainer.training import optimizers
from trainer.training.sharding import shared_like, whole

OPTIONS = ("lr_scale", "weight_decay", "betas", "eps")
"""What a group of weights has of its own, beside the schedule's learning rate: it decides how a weight is changed."""
DESCRIPTION = "state.json"
"""What of a state is not a tensor."""
PARTS = ("model", "optimizer", "average")
"""Fields of `TrainingState` with tensors; each is one file."""

_TYPES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
"""Their names in safetensors."""
_ALIGNMENT = 8
"""Of the first tensor in its file, in bytes."""
_MAX_NAMES = 3
"""Names of each kind in a message."""


@dataclass(frozen=True, kw_only=True)
class TrainingState:
    """What a checkpoint holds."""

    step: int
    """Optimizer steps done."""
    model: Mapping[str, Tensor]
    optimizer: Mapping[str, Tensor]
    """Such as `exp_avg/NAME OF WEIGHT`; nothing of a weight that was never changed."""
    groups: Sequence[Mapping[str, Any]]
    """The optimizer's groups: their `params`, names of weights, and of `OPTIONS` those that the optimizer has."""
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
    processes: Processes,
    pending: tuple[str, ...] = (),
) -> TrainingState:
    """Return the state after `step` steps: the tensors themselves, which the next step changes.

    A collective if the optimizer is sharded: every rank of `processes` calls it, and rank 0 gets the full state, the others none. Of a
    model that is sharded too each rank gets its shares, which are gathered by `Snapshot.take` and `contribute`.
    """
    names = {parameter: name for name, parameter in model.named_parameters()}
    part, what = optimizers.local_optimizer(optimizer), f"the checkpoint of step {step}"
    tensors = {
        f"{key}/{names[weight]}": value
        for weight, own in optimizers.held(optimizer)
        for key, value in part.state.get(own, {}).items()
    }
    if isinstance(optimizer, ZeroRedundancyOptimizer):
        tensors = optimizers.gather_whole_states(tensors, processes, what)
    parts: dict[str, Mapping[str, Tensor]] = {"model": model.state_dict(), "optimizer": tensors}
    if average is not None:
        parts["average"] = average.state_dict()
    copies = processes.device.host_copies([tensor for held in parts.values() for tensor in held.values()])
    if copies is not None:  # where tensors of the device cannot be copied one by one
        left = iter(copies)
        parts = {key: {name: next(left) for name in held} for key, held in parts.items()}
    if isinstance(optimizer, RowShardedOptimizer):
        rows = {name: weight.shape[0] for weight, name in names.items() if weight.dim()}
        parts["optimizer"] = optimizers.gather_rows(parts["optimizer"], rows, processes, what)
    groups = [
        {"params": [names[parameter] for parameter in group["params"]]} | _options(group)
        for group in optimizer.param_groups
    ]
    return TrainingState(
        step=step,
        model=parts["model"],
        optimizer=parts["optimizer"],
        groups=groups,
        average=parts.get("average"),
        pending=pending,
    )


def restore(
    state: TrainingState, model: nn.Module, optimizer: torch.optim.Optimizer, average: nn.Module | None
) -> None:
    """Put a state into a model, its optimizer (of which a sharded one takes its share) and its average.

    Raises:
        ArtifactError: names, shapes or types do not fit; nothing was changed then.
    """
    names = {parameter: name for name, parameter in model.named_parameters()}
    _raise_if_any(state, "weights", _mismatches(state.model, model.state_dict()))
    _raise_if_any(
        state, "optimizer", [*_unknown_tensors(state.optimizer, names), *_other_options(state.groups, optimizer, names)]
    )
    if average is not None:
        _raise_if_any(state, "average", _mismatches(state.average or {}, average.state_dict()))
        average.load_state_dict(_shared(state.average or {}, average))
    model.load_state_dict(_shared(state.model, model))
    # By name: `load_state_dict` goes by numbers of weights, and a sharded optimizer does not get it right for a fused one.
    by_weight: dict[str, dict[str, Tensor]] = {}
    for name, tensor in state.optimizer.items():
        key, _, owner = name.partition("/")
        by_weight.setdefault(owner, {})[key] = tensor
    held = list(optimizers.held(optimizer))
    if isinstance(optimizer, RowShardedOptimizer):
        optimizers.scatter_rows(optimizer, [by_weight.get(names[weight]) for weight, _ in held])
        return
    part = optimizers.local_optimizer(optimizer)
    for weight, _ in held:
        found = by_weight.get(names[weight])
        if found is not None:
            part.state[weight] = {
                key: shared_like(value, weight).to(weight.device, copy=True) for key, value in found.items()
            }


def _shared(held: Mapping[str, Tensor], model: nn.Module) -> dict[str, Tensor]:
    """Return the tensors that a model is to take, shared out as its weights are."""
    wanted = model.state_dict()
    return {name: shared_like(tensor, wanted[name]) for name, tensor in held.items()}


def _options(group: Mapping[str, Any]) -> dict[str, Any]:
    options = {key: group[key] for key in OPTIONS if key in group}
    return {key: list(value) if isinstance(value, tuple) else value for key, value in options.items()}


# ---------------------------------------------------------------------------------------------------------------------
# What does not fit


def _raise_if_any(state: TrainingState, part: str, mismatches: Sequence[str]) -> None:
    if mismatches:
        named = listed(mismatches, _MAX_NAMES, between="; ", last="; and ")
        raise ArtifactError(
            f"checkpoint {state.uri or f'of step {state.step}'} does not fit this training in its {part}: {named}; "
            "continue with the version of the project that wrote it, or remove it to begin anew"
        )


def _mismatches(held: Mapping[str, Tensor], wanted: Mapping[str, Tensor]) -> list[str]:
    """List what differs between the tensors of a checkpoint and those of a model: names, shapes, types."""
    lacking = [f"it lacks {name}" for name in wanted if name not in held]
    strange = [f"it has {name}, which the model has not" for name in held if name not in wanted]
    pairs = {name: (_described(held[name]), _described(wanted[name])) for name in wanted if name in held}
    return (
        lacking
        + strange
        + [f"{name} is {one} instead of {other}" for name, (one, other) in pairs.items() if one != other]
    )


def _described(tensor: Tensor) -> str:
    return f"{list(tensor.shape)} {str(tensor.dtype).removeprefix('torch.')}"


def _unknown_tensors(tensors: Mapping[str, Tensor], names: Mapping[nn.Parameter, str]) -> list[str]:
    """List what of an optimizer's state belongs to no weight, or to one of another shape; single numbers, such as its steps, fit all."""
    weights = {name: parameter for parameter, name in names.items()}
    mismatches = []
    for name, tensor in tensors.items():
        weight = weights.get(name.partition("/")[2])
        if weight is None:
            mismatches.append(f"it has {name}, which the model has not")
        elif tensor.dim() and _described(tensor) != _described(weight):
            mismatches.append(f"{name} is {_described(tensor)} instead of {_described(weight)}")
    return mismatches


def _other_options(
    groups: Sequence[Mapping[str, Any]], optimizer: torch.optim.Optimizer, names: Mapping[nn.Parameter, str]
) -> list[str]:
    """List weights that were changed in another way than they would be now."""
    before = {weight: group for group in groups for weight in group["params"]}
    mismatches = []
    for group in optimizer.param_groups:
        now = _options(group)
        for weight in (names[parameter] for parameter in group["params"]):
            was = before.get(weight, {})
            mismatches += [
                f"{key} of {weight} was {was.get(key)}, is {value}"
                for key, value in now.items()
                if was.get(key, value) != value or weight not in before
            ]
    return mismatches


# ---------------------------------------------------------------------------------------------------------------------
# In the host's memory, and in files


class _Group(BaseModel):
    """One of the optimizer's groups, with its options."""

    model_config = ConfigDict(extra="allow")

    params: tuple[str, ...]


class _Description(BaseModel):
    """`state.json`."""

    model_config = ConfigDict(extra="forbid")

    step: NonNegative
    pending: tuple[str, ...]
    groups: tuple[_Group, ...]


class Snapshot:
    """A copy of a state in the host's memory.

    Each part is one block in the layout of a safetensors file, so that writing is one call, which neither copies it again nor keeps the
    thread that trains from running. The memory is used again for the next copy; beside a GPU it is page-locked.
    """

    def __init__(self) -> None:
        self._parts: dict[str, _Part] = {}
        self._description = _Description(step=0, pending=(), groups=())

    def take(self, state: TrainingState) -> None:
        """Copy a state; waits for the device until that is done."""
        held: dict[str, Mapping[str, Tensor] | None] = {name: getattr(state, name) for name in PARTS}
        for name, tensors in held.items():
            if tensors is None:
                self._parts.pop(name, None)
                continue
            if name not in self._parts or self._parts[name].layout != _layout(tensors):
                self._parts[name] = _Part(tensors)
            with torch.no_grad():  # from a GPU they are there when the current stream has come so far
                for tensor_name, view in self._parts[name].views.items():
                    view.copy_(whole(tensors[tensor_name]), non_blocking=True)
        if any(part.pinned for part in self._parts.values()):
            torch.cuda.current_stream().synchronize()
        self._description = _Description(
            step=state.step, pending=state.pending, groups=tuple(map(_Group.model_validate, state.groups))
        )

    @staticmethod
    def contribute(state: TrainingState) -> None:
        """Give this process's shares of a state's tensors to the first process, which takes it; each is gathered by itself."""
        for tensors in (getattr(state, name) or {} for name in PARTS):
            for tensor_name in _in_file(tensors):
                whole(tensors[tensor_name])

    def write(self, folder: Path) -> None:
        """Write the copy into a folder, and wait until the disk has it; raises `OSError` where that is full or refuses."""
        contents: dict[str, tuple[bytes | memoryview, ...]] = {
            _file(name): (part.header, part.memory.numpy().data) for name, part in self._parts.items()
        }
        contents[DESCRIPTION] = (self._description.model_dump_json(indent=2).encode(),)
        for name, content in contents.items():
            with (folder / name).open("wb") as file:
                file.writelines(content)
                file.flush()
                os.fsync(file.fileno())


def read_state(folder: Path, uri: str) -> TrainingState:
    """Read the state in a checkpoint's folder, on the CPU; raises `ArtifactError`, which names `uri`, where a file is damaged."""
    try:
        description = _Description.model_validate_json((folder / DESCRIPTION).read_bytes())
        # Required parts are read unconditionally, so that a missing file is reported by name.
        present = [name for name in PARTS if name != "average" or (folder / _file(name)).exists()]
        parts = {name: safetensors.torch.load_file(folder / _file(name)) for name in present}
    except (OSError, ValidationError, safetensors.SafetensorError) as error:
        raise ArtifactError(
            f"checkpoint {uri}: cannot be read ({' '.join(str(error).split())}); remove it to resume from the one before"
        ) from error
    return TrainingState(
        step=description.step,
        model=parts["model"],
        optimizer=parts["optimizer"],
        average=parts.get("average"),
        groups=[group.model_dump() for group in description.groups],
        pending=description.pending,
        uri=uri,
    )


def _file(part: str) -> str:
    return f"{part}.safetensors"


class _Part:
    """Memory for some tensors, in the layout of a safetensors file."""

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        names = _in_file(tensors)
        sizes = [tensors[name].numel() * tensors[name].element_size() for name in names]
        ends = list(accumulate(sizes))
        self.pinned = any(tensor.is_cuda for tensor in tensors.values())
        self.layout = _layout(tensors)
        """Names, shapes and types that it was made for."""
        self.memory = torch.empty(sum(sizes), dtype=torch.uint8, pin_memory=self.pinned)
        offsets = {name: [end - size, end] for name, size, end in zip(names, sizes, ends, strict=True)}
        entries = {name: {**self.layout[name], "data_offsets": offsets[name]} for name in names}
        text = json.dumps(entries, separators=(",", ":")).encode()
        length = _ALIGNMENT * math.ceil(len(text) / _ALIGNMENT)
        self.header = length.to_bytes(8, "little") + text.ljust(length)
        """The beginning of a safetensors file: its length in 8 bytes, then JSON, filled up with spaces."""
        self.views = {
            name: self.memory[begin:end].view(tensors[name].dtype).view(tensors[name].shape)
            for name, (begin, end) in offsets.items()
        }


def _in_file(tensors: Mapping[str, Tensor]) -> list[str]:
    """Return the names in the order of the file: the widest first, so that each begins at a multiple of its width."""
    return sorted(tensors, key=lambda name: (-tensors[name].element_size(), name))


def _layout(tensors: Mapping[str, Tensor]) -> dict[str, dict[str, Any]]:
    return {
        name: {"dtype": _TYPES[tensor.dtype], "shape": list(tensor.shape)} for name, tensor in sorted(tensors.items())
    }
