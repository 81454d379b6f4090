"""Small tensors on their way from the host to a device."""

from __future__ import annotations

import torch
from torch import Tensor


def send(tensor: Tensor, device: torch.device) -> Tensor:
    """A tensor of the host on `device`; to a GPU by way of page-locked memory, as the host would wait for a copy from other memory."""
    return (tensor.pin_memory() if device.type == "cuda" else tensor).to(device, non_blocking=True)
