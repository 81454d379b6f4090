"""A state copied into the host's memory, as it will stand in its files, and read again.

Each part is one block of memory in the layout of a safetensors file, so that writing is one call, which neither copies it again nor keeps
the thread that trains from running. The memory is used again for the next snapshot; beside a GPU it is page-locked.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
from itertools import accumulate
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from pydantic import BaseModel, ConfigDict, ValidationError
from torch import Tensor

from trainer.base_models import NonNegative
from trainer.errors import ArtifactError
from trainer.training.checkpoints.training_state import TrainingState

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


class _Group(BaseModel):
    """One of the optimiser's groups, with its options."""

    model_config = ConfigDict(extra="allow")

    params: tuple[str, ...]


class _Description(BaseModel):
    """`state.json`."""

    model_config = ConfigDict(extra="forbid")

    step: NonNegative
    pending: tuple[str, ...]
    groups: tuple[_Group, ...]


class Snapshot:
    """A copy of a state in the host's memory."""

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
                    view.copy_(tensors[tensor_name], non_blocking=True)
        if any(part.pinned for part in self._parts.values()):
            torch.cuda.current_stream().synchronize()
        self._description = _Description(
            step=state.step, pending=state.pending, groups=tuple(map(_Group.model_validate, state.groups))
        )

    def write(self, folder: Path) -> None:
        """Write the copy into a folder, and wait until the disk has it.

        Raises:
            OSError: the disk is full, or the folder cannot be written.
        """
        for name, part in self._parts.items():
            _write(folder / _file(name), part.header, part.memory.numpy().data)
        _write(folder / DESCRIPTION, self._description.model_dump_json(indent=2).encode())


def read(folder: Path, uri: str) -> TrainingState:
    """Read the state in the folder of a checkpoint, on the CPU; `uri` names it in messages.

    Raises:
        ArtifactError: a file is not what it should be.
    """
    try:
        description = _Description.model_validate_json((folder / DESCRIPTION).read_bytes())
        # One that every state has is read even where it is missing, so that an error names it.
        there = [name for name in PARTS if name != "average" or (folder / _file(name)).exists()]
        parts = {name: safetensors.torch.load_file(folder / _file(name)) for name in there}
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


def _write(path: Path, *content: bytes | memoryview) -> None:
    with path.open("wb") as file:
        for piece in content:
            file.write(piece)
        file.flush()
        os.fsync(file.fileno())


class _Part:
    """Memory for some tensors, in the layout of a safetensors file."""

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        # The widest first, so that each begins at a multiple of its width.
        names = sorted(tensors, key=lambda name: (-tensors[name].element_size(), name))
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


def _layout(tensors: Mapping[str, Tensor]) -> dict[str, dict[str, Any]]:
    return {
        name: {"dtype": _TYPES[tensor.dtype], "shape": list(tensor.shape)} for name, tensor in sorted(tensors.items())
    }
