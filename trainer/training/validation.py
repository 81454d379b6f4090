"""Accuracy on the validation split while a model is trained, shared out over the processes."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from trainer.config import Precision
from trainer.data.dataset import Split
from trainer.training.devices import Device
from trainer.training.processes import Processes
from trainer.training.readback import ReadBack

Ends = Callable[[], bool]
"""Whether to break off; all processes ask equally often and get the same answer."""


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
    measured: list[Tensor] = []
    mine = range(processes.rank, len(split), processes.world_size)
    most = -(-len(split) // processes.world_size)
    broken_off = False
    for start in range(0, most, batch_size):
        indices = list(mine[start : start + batch_size])
        if indices:
            measured.append(_measure(model, split, indices, device, precision, batch_size))
        device.dispatch()
        if ends is not None and ends():
            broken_off = True
            break
    model.train(training)
    if broken_off:
        return None
    everyone = processes.gather(_total(measured), "the validation's figures")
    correct, loss = (sum(column) for column in zip(*everyone, strict=True))
    return {"val_top1": correct / len(split), "val_loss": loss / len(split)}


def _measure(
    model: nn.Module, split: Split, indices: Sequence[int], device: Device, precision: Precision, batch_size: int
) -> Tensor:
    """Number of right answers and sum of the losses of some images; float32 [2] on the device.

    Where another number of images would be another graph, the last image fills the batch up, and does not count.
    """
    filled = device.filled(indices, batch_size)
    counts = (torch.arange(len(filled)) < len(indices)).to(device.torch_device)
    labels = torch.from_numpy(split.labels[filled]).to(device.torch_device)
    images = split.read(filled).to(device.torch_device)
    with device.inference():
        with device.autocast(precision):
            logits = model(images)
        logits = logits.float()
        right, loss = logits.argmax(1) == labels, F.cross_entropy(logits, labels, reduction="none")
        return torch.stack([(right & counts).sum().float(), (loss * counts).sum()])


def _total(measured: Sequence[Tensor]) -> list[float]:
    """The sums over all batches of a process, in double precision."""
    if not measured:
        return [0.0, 0.0]
    arrived = ReadBack({str(number): figures for number, figures in enumerate(measured)}).wait()
    total: list[float] = torch.stack([*arrived.values()]).double().sum(0).tolist()
    return total
