"""Tensors on their way from the device to the host, which need not wait for them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

import torch
from torch import Tensor


class ReadBack:
    """Tensors of one device on the host: at once on a CPU; from a GPU copied into page-locked memory, behind the work before them; from XLA
    read when the work after them has begun.
    """

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        """Send these tensors, each with its name."""
        self._names, self._way = list(tensors), _way_of([*tensors.values()])

    @property
    def arrived(self) -> bool:
        """Whether they can be read without waiting."""
        return self._way.arrived

    def wait(self) -> Mapping[str, Tensor]:
        """The tensors on the host."""
        return dict(zip(self._names, self._way.wait(), strict=True))


class _Way(Protocol):
    """How tensors come to the host."""

    @property
    def arrived(self) -> bool: ...
    def wait(self) -> Sequence[Tensor]: ...


def _way_of(tensors: Sequence[Tensor]) -> _Way:
    kinds = {tensor.device.type for tensor in tensors}
    if "cuda" in kinds:
        return _Copies(tensors)
    if "xla" in kinds:
        from trainer.devices.xla import InFlight

        return InFlight(tensors)
    return _There(tensors)


class _There:
    """They are there."""

    arrived = True

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self._tensors = tensors

    def wait(self) -> Sequence[Tensor]:
        return self._tensors


class _Copies:
    """A GPU copies them into page-locked memory."""

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self._copies = [_to_pinned(tensor) for tensor in tensors]
        self._event = torch.cuda.Event()
        self._event.record()

    @property
    def arrived(self) -> bool:
        passed: bool = self._event.query()
        return passed

    def wait(self) -> Sequence[Tensor]:
        self._event.synchronize()
        return self._copies


def _to_pinned(tensor: Tensor) -> Tensor:
    return torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True).copy_(tensor, non_blocking=True)
