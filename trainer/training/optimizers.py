"""AdamW with weight-decay groups and layer-wise learning rates, sharded or not."""

from __future__ import annotations

from typing import Any

import torch
from timm.optim import param_groups_layer_decay, param_groups_weight_decay
from torch import nn

from trainer.config import TrainingSettings
from trainer.devices import Device
from trainer.models import Classifier
from trainer.training.process_group import Processes
from trainer.training.zero_redundancy import local_optimizer


def parameter_groups(model: nn.Module, *, weight_decay: float, layer_decay: float = 1.0) -> list[dict[str, Any]]:
    """Sort the trainable weights into groups with their `weight_decay` and `lr_scale`.

    Biases, norms and what the model's `no_weight_decay()` names are not decayed. With `layer_decay` below 1 the learning rate of
    each block is that of the block above times `layer_decay`.
    """
    groups: list[dict[str, Any]]
    if isinstance(model, Classifier):  # all its weights are its network's, which knows its own layers
        model = model.network
    named: Any = getattr(model, "no_weight_decay", tuple)  # timm's models and ours have it, torch's own have not
    exempt = tuple(named())
    if layer_decay < 1:
        groups = param_groups_layer_decay(
            model, weight_decay=weight_decay, no_weight_decay_list=exempt, layer_decay=layer_decay
        )
    else:
        groups = param_groups_weight_decay(model, weight_decay=weight_decay, no_weight_decay_list=exempt)
    return [{"lr_scale": 1.0} | group for group in groups if group["params"]]


def make_optimizer(
    groups: list[dict[str, Any]], settings: TrainingSettings, processes: Processes
) -> torch.optim.Optimizer:
    """Make a fused AdamW over `groups`; its state is sharded over the processes where `zero` is set and there are several."""
    options: dict[str, Any] = {
        "lr": settings.peak_learning_rate(),
        "betas": (settings.beta1, settings.beta2),
    } | processes.device.adamw_options
    optimizer = (
        processes.device.sharded_adamw(groups, options, clip_norm=settings.clip_norm)
        if settings.zero and processes.world_size > 1
        else torch.optim.AdamW(groups, **options)
    )
    if processes.device.traces:
        _make_state(local_optimizer(optimizer))
    return optimizer


def _make_state(optimizer: torch.optim.Optimizer) -> None:
    """Make AdamW's state now: made in the first step, it would make that another graph than those that follow."""
    for group in optimizer.param_groups:
        for weight in group["params"]:
            optimizer.state[weight] = {
                "step": torch.zeros((), dtype=torch.float32, device=weight.device),
                "exp_avg": torch.zeros_like(weight, memory_format=torch.preserve_format),
                "exp_avg_sq": torch.zeros_like(weight, memory_format=torch.preserve_format),
            }


def set_learning_rate(optimizer: torch.optim.Optimizer, rate: float, device: Device) -> None:
    """Set every group's learning rate to `rate` times the group's scale, as `device` takes it."""
    rates = device.numbers([rate * group["lr_scale"] for group in optimizer.param_groups])
    for group, own in zip(optimizer.param_groups, rates, strict=True):
        group["lr"] = own
