"""Labels for what the reports show: a training, a phase or a signal as people call it, and a number with the unit of its name."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from trainer import formatting

TRAININGS = {"mae": "Masked autoencoder", "finetune": "Fine-tuning", "distill": "Distillation"}
LABELS = {
    "data": "waiting for data",
    "to_device": "host to device",
    "teacher_forward": "teacher's forward pass",
    "forward": "forward pass",
    "backward": "backward pass",
    "optimizer": "optimiser",
    "dispatch": "waiting for XLA",
    "recorder": "tensor statistics",
    "other": "rest of the step",
    "evaluate": "evaluation",
    "checkpoint": "checkpoint",
    "profiler": "operator window",
    "rules": "judging the training",
    "interrupted": "interrupted step",
    "between": "between steps",
    "named": "named ranges",
}

SIGNALS = {
    "iowait_percent": "waiting for storage",
    "stolen_percent": "core taken by the host",
    "memory_used_bytes": "memory of the machine",
    "disk_read_bytes_per_s": "disk, read",
    "disk_write_bytes_per_s": "disk, written",
    "swap_in_bytes_per_s": "swapped in",
    "swap_out_bytes_per_s": "swapped out",
    "network_received_bytes_per_s": "network, received",
    "network_sent_bytes_per_s": "network, sent",
    "process_rss_bytes": "memory of the process",
    "process_private_bytes": "of that, its own",
    "process_cpu_percent": "processor, this process",
    "loaders_cpu_percent": "processor, its loaders",
    "gpu_percent": "GPU",
    "gpu_memory_used_bytes": "GPU memory",
    "gpu_memory_allocated_bytes": "GPU memory, tensors",
    "gpu_memory_total_bytes": "GPU memory there is",
    "device_memory_used_bytes": "memory of the device",
    "device_memory_total_bytes": "memory that the device has",
    "cores_percent": "cores",
    "busiest_core_percent": "busiest core",
}


def training(name: str) -> str:
    """Name a training as people call it: `mae` -> Masked autoencoder."""
    return TRAININGS.get(name, name)


def label(name: str) -> str:
    """Name a phase or range as people call it: `optimizer` -> optimiser."""
    return LABELS.get(name, name)


def named_number(name: str, value: float) -> tuple[str, str]:
    """Split the unit off a number's name: `waiting_share`, 0.4 -> waiting share, 40 %."""
    for suffix, shown in _UNITS.items():
        if name.endswith(suffix):
            bare = name if suffix == "_share" else name.removesuffix(suffix)
            return SIGNALS.get(name, bare.replace("_", " ")), shown(value)
    return name.replace("_", " "), formatting.short(value)


_UNITS: Mapping[str, Callable[[float], str]] = {
    "_bytes_per_s": lambda value: f"{formatting.size(value)}/s",
    "_bytes": formatting.size,
    "_percent": lambda value: formatting.percent(value / 100),
    "_share": formatting.percent,
    "_ms": formatting.milliseconds,
    "_seconds": formatting.duration,
    "_s": formatting.duration,
    "_hours": lambda value: formatting.duration(3600 * value),
    "_minutes": lambda value: formatting.duration(60 * value),
}
