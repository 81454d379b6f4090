"""Devices: what differs between a CPU, a GPU and an accelerator of XLA, behind one small adapter.

`Device` is the adapter; what it does by itself is right for a CPU. A new kind of device is a class of its own, a name in `run.device`,
and a line in `choose_device`: torch's name of the device, the backend that its processes exchange by, whether it compiles.
"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Mapping

import torch
from torch import Tensor

from trainer.config import DEVICE_VARIABLE
from trainer.devices.device import HOST as HOST
from trainer.devices.device import CudaDevice as CudaDevice
from trainer.devices.device import Device as Device
from trainer.devices.device import RowShardedOptimizer as RowShardedOptimizer
from trainer.devices.device import full_float32 as full_float32
from trainer.io.errors import SettingsError


def choose_device(local_rank: int = 0) -> Device:
    """Return the device that `TRAINER_DEVICE` names; by default a GPU if there is one. `open` it before it is used.

    Raises:
        SettingsError: the named device is not there, or there are more processes than GPUs.
    """
    wanted = os.environ.get(DEVICE_VARIABLE) or "auto"
    if wanted not in {"auto", "cpu", "cuda", "xla"}:
        raise SettingsError(f"{DEVICE_VARIABLE} must be auto, cpu, cuda or xla, got {wanted!r}")
    check_device(wanted)
    if wanted == "xla":
        try:
            from trainer.devices.xla import XlaDevice
        except ImportError as error:
            raise SettingsError(_no_xla(error)) from error
        return XlaDevice.choose()
    if wanted == "cpu" or not torch.cuda.is_available():
        return HOST
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


def check_device(wanted: str) -> None:
    """Make sure that this machine has a device of this kind, without opening it; a `SettingsError` if it has none."""
    if wanted == "cuda" and not torch.cuda.is_available():
        raise SettingsError("run.device is cuda, but torch finds no GPU on this machine; set run.device=cpu or auto")
    if wanted == "xla" and importlib.util.find_spec("torch_xla") is None:
        raise SettingsError(_no_xla("there is none"))


def _no_xla(reason: object) -> str:
    return (
        f"run.device is xla, but torch_xla cannot be loaded here ({reason}); take the Neuron image (docs/neuron.md), or set "
        "run.device=auto"
    )


class ReadBack:
    """Tensors of one device on their way to the host, which need not wait for them.

    On a CPU they are there; from a GPU they are copied into page-locked memory, behind the work before them; from XLA they are read when
    the work after them has begun.
    """

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        self._tensors, self._copied, self._in_flight = dict(tensors), None, None
        kinds = {tensor.device.type for tensor in tensors.values()}
        if "cuda" in kinds:
            for name, tensor in tensors.items():
                pinned = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
                self._tensors[name] = pinned.copy_(tensor, non_blocking=True)
            self._copied = torch.cuda.Event()
            self._copied.record()
        elif "xla" in kinds:
            from trainer.devices.xla import InFlight

            self._in_flight = InFlight([*tensors.values()])

    @property
    def arrived(self) -> bool:
        if self._in_flight is not None:
            return self._in_flight.arrived
        return self._copied is None or bool(self._copied.query())

    def wait(self) -> Mapping[str, Tensor]:
        if self._in_flight is not None:
            return dict(zip(self._tensors, self._in_flight.wait(), strict=True))
        if self._copied is not None:
            self._copied.synchronize()
        return self._tensors
