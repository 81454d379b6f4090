"""Tensors on their way from the device to the host, which need not wait for them."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor


class ReadBack:
    """Tensors of one device on the host: at once on a CPU; from a GPU copied into page-locked memory, behind the work before them."""

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        """Send these tensors, each with its name."""
        self._tensors, self._event = tensors, None
        if any(tensor.is_cuda for tensor in tensors.values()):
            self._tensors = {name: _to_pinned(tensor) for name, tensor in tensors.items()}
            self._event = torch.cuda.Event()
            self._event.record()

    @property
    def arrived(self) -> bool:
        """Whether they can be read without waiting."""
        return self._event is None or self._event.query()

    def wait(self) -> Mapping[str, Tensor]:
        """The tensors on the host."""
        if self._event is not None:
            self._event.synchronize()
        return self._tensors


def _to_pinned(tensor: Tensor) -> Tensor:
    return torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True).copy_(tensor, non_blocking=True)
