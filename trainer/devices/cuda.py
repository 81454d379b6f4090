"""GPUs of NVIDIA."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from trainer.devices import Device
from trainer.devices.torch_private import deterministic_kernels
from trainer.errors import SettingsError


@dataclass(frozen=True, kw_only=True)
class CudaDevice(Device):
    """A GPU."""

    def seed(self, seed: int) -> None:
        """Seed the CPU's generator and the GPU's."""
        super().seed(seed)
        torch.cuda.manual_seed(seed)

    @contextmanager
    def deterministic(self) -> Iterator[None]:
        """Only operations that add in the same order each time; one that has no such way ends the training with torch's message.

        Convolutions, scattered sums and the backward pass of fused attention then go their deterministic way by themselves.
        """
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # is read at the first matrix product
        torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]  # nothing here reads what was never written
        torch.use_deterministic_algorithms(True)
        try:
            with deterministic_kernels():
                yield
        finally:
            torch.use_deterministic_algorithms(False)

    def synchronize(self) -> None:
        """Wait for all that was given to the GPU."""
        torch.cuda.synchronize(self.torch_device)

    @property
    def pins_memory(self) -> bool:
        """Copies from page-locked memory go over a stream of their own."""
        return True


def choose_gpu(local_rank: int) -> CudaDevice:
    """The GPU of a process.

    Raises:
        SettingsError: there are more processes than GPUs.
    """
    if local_rank >= torch.cuda.device_count():
        raise SettingsError(
            f"process {local_rank} of this machine has no GPU: there are {torch.cuda.device_count()}; start fewer processes a node"
        )
    torch.cuda.set_device(local_rank)
    return CudaDevice(
        kind="cuda",
        torch_device=torch.device("cuda", local_rank),
        backend="nccl",
        has_bf16=torch.cuda.is_bf16_supported(including_emulation=False),  # emulated, it is slower than fp32
        compiles=True,
    )
