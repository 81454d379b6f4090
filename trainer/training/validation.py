"""Accuracy on the validation split while a model is trained, shared out over the processes."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from trainer.config import Precision
from trainer.data.dataset import Split
from trainer.training.devices import Device
from trainer.training.processes import Processes

Ends = Callable[[], bool]
"""Whether to break off; all processes ask equally often and get the same answer."""


@torch.inference_mode()
def validate(
    model: nn.Module,
    split: Split,
    processes: Processes,
    *,
    batch_size: int,
    precision: Precision,
    ends: Ends | None = None,
) -> dict[str, float] | None:
    """Top-1 accuracy and cross-entropy of a classifier on a split; the same on every process.

    Args:
        model: takes uint8 images [B, 3, S, S], gives logits [B, K].
        split: labelled images.
        processes: each of them measures its share.
        batch_size: images a forward pass.
        precision: of the forward pass.
        ends: whether to break off; asked after each batch.

    Returns:
        `val_top1` and `val_loss`; None where it was broken off.

    Raises:
        LostProcessError: a process did not come within the limit, or is gone.
    """
    training, device = model.training, processes.device
    model.eval()
    totals = torch.zeros(3, dtype=torch.float64, device=device.torch_device)
    mine = range(processes.rank, len(split), processes.world_size)
    most = -(-len(split) // processes.world_size)
    broken_off = False
    for start in range(0, most, batch_size):
        totals += _measure(model, split, list(mine[start : start + batch_size]), device, precision)
        if ends is not None and ends():
            broken_off = True
            break
    model.train(training)
    if broken_off:
        return None
    everyone = processes.gather(totals.tolist(), "the validation's figures")
    correct, loss, count = (sum(column) for column in zip(*everyone, strict=True))
    return {"val_top1": correct / count, "val_loss": loss / count}


def _measure(model: nn.Module, split: Split, indices: list[int], device: Device, precision: Precision) -> Tensor:
    """Number of right answers, sum of the losses and number of some images, which may be none; float64 [3] on the device."""
    if not indices:
        return torch.zeros(3, dtype=torch.float64, device=device.torch_device)
    labels = torch.from_numpy(split.labels[indices]).to(device.torch_device)
    with device.autocast(precision):
        logits = model(split.read(indices).to(device.torch_device))
    logits = logits.float()
    right, loss = (logits.argmax(1) == labels).sum(), F.cross_entropy(logits, labels, reduction="sum")
    return torch.stack([right.double(), loss.double(), torch.full_like(loss, len(indices)).double()])
