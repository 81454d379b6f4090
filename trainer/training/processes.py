"""The group of training processes that torchrun started, and the proof that it is one group."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from trainer.errors import TrainingError
from trainer.training.devices import Device, choose_device

T = TypeVar("T")

TIMEOUT = timedelta(minutes=10)
"""How long a process waits for the others before it gives up."""


@dataclass(frozen=True, kw_only=True)
class Processes:
    """This process among the others."""

    rank: int
    world_size: int
    local_rank: int
    device: Device
    local_world_size: int = 1
    """Processes on this machine."""

    @property
    def is_first(self) -> bool:
        """Whether this is the process that writes and reports."""
        return self.rank == 0

    @property
    def first_of_node(self) -> int:
        """Rank of the first process of this machine; torchrun numbers the processes machine by machine."""
        return self.rank - self.local_rank

    def barrier(self) -> None:
        """Wait for all processes."""
        if self.world_size > 1:
            dist.barrier()

    def gather(self, value: T) -> list[T]:
        """The value of every process, in the order of the ranks; the same list on every process."""
        if self.world_size == 1:
            return [value]
        values: list[Any] = [None] * self.world_size
        dist.all_gather_object(values, value)
        return values

    def mean(self, values: torch.Tensor) -> torch.Tensor:
        """Mean over the processes, element by element; the same on every process."""
        return self.total(values) / self.world_size

    def total(self, values: torch.Tensor) -> torch.Tensor:
        """Sum over the processes, element by element; the same on every process."""
        if self.world_size == 1:
            return values
        summed = values.clone()
        dist.all_reduce(summed)
        return summed


@contextmanager
def join_processes() -> Iterator[Processes]:
    """Join the group that the environment describes (torchrun's variables; without them one process alone).

    Raises:
        TrainingError: the group does not sum over all its processes.
    """
    world_size = int(os.environ.get("WORLD_SIZE", "1"))
    local_rank = int(os.environ.get("LOCAL_RANK", "0"))
    device = choose_device(local_rank)
    if world_size == 1:
        yield Processes(rank=0, world_size=1, local_rank=local_rank, device=device)
        return
    device_id = device.torch_device if device.kind == "cuda" else None
    dist.init_process_group(device.backend, timeout=TIMEOUT, device_id=device_id)
    processes = Processes(
        rank=dist.get_rank(),
        world_size=dist.get_world_size(),
        local_rank=local_rank,
        device=device,
        local_world_size=int(os.environ.get("LOCAL_WORLD_SIZE", "1")),
    )
    prove_one_group(processes, expected=world_size)
    yield processes
    # Not after an exception: the others must not miss this process before it has left its message.
    dist.destroy_process_group()


def prove_one_group(processes: Processes, *, expected: int) -> None:
    """Sum the ranks over the real group: some set-ups silently train isolated copies.

    Raises:
        TrainingError: the sum is not 1 + 2 + ... + `expected`.
    """
    ones = torch.tensor([float(processes.rank + 1)], device=processes.device.torch_device)
    got, wanted = int(processes.total(ones).item()), expected * (expected + 1) // 2
    if got != wanted:
        raise TrainingError(
            f"{expected} processes were started, but the sum over their ranks is {got} instead of {wanted}: they do not form one "
            f"group (backend {processes.device.backend}, world size {processes.world_size}) and would train isolated copies; "
            "check the launcher's environment"
        )
