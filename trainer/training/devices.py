"""Devices: what differs between a CPU and a GPU, behind one small adapter."""

from __future__ import annotations

import os
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Literal

import torch

from trainer.config import DEVICE_VARIABLE, Compile, Precision
from trainer.errors import SettingsError


@dataclass(frozen=True, kw_only=True)
class Device:
    """Where a process trains."""

    kind: Literal["cpu", "cuda"]
    torch_device: torch.device
    backend: str
    """torch.distributed's backend for it."""
    has_bf16: bool
    """Whether bf16 is worth taking without being asked."""
    compiles: bool
    """Whether torch.compile pays for itself here."""

    def uses_bf16(self, precision: Precision) -> bool:
        """Whether this precision is bf16 here."""
        return precision == "bf16" or (precision == "auto" and self.has_bf16)

    def compiles_with(self, setting: Compile) -> bool:
        """Whether torch.compile is used here."""
        return setting == "on" or (setting == "auto" and self.compiles)

    def autocast(self, precision: Precision) -> AbstractContextManager[object]:
        """bf16 autocast, or none."""
        return torch.autocast(self.kind, dtype=torch.bfloat16, enabled=self.uses_bf16(precision))

    def seed(self, seed: int) -> None:
        """Seed what draws here; `torch.manual_seed` asks every kind of device there is, in every step a tenth of a millisecond."""
        torch.default_generator.manual_seed(seed)
        if self.kind == "cuda":
            torch.cuda.manual_seed(seed)

    def synchronize(self) -> None:
        """Wait for all that was given to the device."""
        if self.kind == "cuda":
            torch.cuda.synchronize(self.torch_device)

    @property
    def pins_memory(self) -> bool:
        """Whether transfers from page-locked memory overlap with the device's work."""
        return self.kind == "cuda"


def choose_device(local_rank: int = 0) -> Device:
    """The device that `TRAINER_DEVICE` names; by default a GPU if there is one.

    Raises:
        SettingsError: the named device is not there.
    """
    wanted = os.environ.get(DEVICE_VARIABLE) or "auto"
    if wanted not in {"auto", "cpu", "cuda"}:
        raise SettingsError(f"{DEVICE_VARIABLE} must be auto, cpu or cuda, got {wanted!r}")
    if wanted == "cuda" and not torch.cuda.is_available():
        raise SettingsError("run.device is cuda, but torch finds no GPU on this machine; set run.device=cpu or auto")
    if wanted == "cpu" or not torch.cuda.is_available():
        # On a CPU without bf16 instructions autocast is many times slower, and for small models it is slower on any.
        return Device(kind="cpu", torch_device=torch.device("cpu"), backend="gloo", has_bf16=False, compiles=False)
    if local_rank >= torch.cuda.device_count():
        raise SettingsError(
            f"process {local_rank} of this machine has no GPU: there are {torch.cuda.device_count()}; start fewer processes a node"
        )
    torch.cuda.set_device(local_rank)
    return Device(
        kind="cuda",
        torch_device=torch.device("cuda", local_rank),
        backend="nccl",
        has_bf16=torch.cuda.is_bf16_supported(),
        compiles=True,
    )
