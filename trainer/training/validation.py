"""Accuracy on the validation split while a model is trained, shared out over the processes."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from trainer.config import Precision
from trainer.data.dataset import Split
from trainer.training.processes import Processes


@torch.inference_mode()
def validate(
    model: nn.Module, split: Split, processes: Processes, *, batch_size: int, precision: Precision
) -> dict[str, float]:
    """Top-1 accuracy and cross-entropy of a classifier on a split; the same on every process.

    Args:
        model: takes uint8 images [B, 3, S, S], gives logits [B, K].
        split: labelled images.
        processes: each of them measures its share.
        batch_size: images a forward pass.
        precision: of the forward pass.
    """
    training, device = model.training, processes.device
    model.eval()
    totals = torch.zeros(3, dtype=torch.float64, device=device.torch_device)
    mine = range(processes.rank, len(split), processes.world_size)
    for start in range(0, len(mine), batch_size):
        indices = list(mine[start : start + batch_size])
        labels = torch.from_numpy(split.labels[indices]).to(device.torch_device)
        with device.autocast(precision):
            logits = model(split.read(indices).to(device.torch_device))
        logits = logits.float()
        totals[0] += (logits.argmax(1) == labels).sum()
        totals[1] += F.cross_entropy(logits, labels, reduction="sum")
        totals[2] += len(indices)
    model.train(training)
    correct, loss, count = processes.total(totals).tolist()
    return {"val_top1": correct / count, "val_loss": loss / count}
