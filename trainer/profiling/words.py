"""Words for what the report shows: names as people say them, numbers with their units."""

from __future__ import annotations

from collections.abc import Callable, Mapping

TRAININGS = {"mae": "Masked autoencoder", "finetune": "Fine-tuning", "distill": "Distillation"}
LABELS = {
    "data": "waiting for data",
    "to_device": "host to device",
    "teacher_forward": "teacher's forward pass",
    "forward": "forward pass",
    "backward": "backward pass",
    "optimizer": "optimiser",
    "dispatch": "waiting for XLA",
    "recorder": "looking at tensors",
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
    """A part of the training, as people say it."""
    return TRAININGS.get(name, name)


def label(name: str) -> str:
    """A phase or range, as people say it."""
    return LABELS.get(name, name)


def named_number(name: str, value: float) -> tuple[str, str]:
    """A number whose name ends with its unit: `waiting_share`, 0.4 -> waiting share, 40 %."""
    for suffix, shown in _UNITS.items():
        if name.endswith(suffix):
            bare = name if suffix == "_share" else name.removesuffix(suffix)
            return SIGNALS.get(name, bare.replace("_", " ")), shown(value)
    return name.replace("_", " "), short(value)


def short(value: float) -> str:
    """A number in about three digits."""
    if value == 0:
        return "0"
    if 1e9 > abs(value) >= 100 or value == round(value, 0):
        return f"{value:,.0f}" if abs(value) < 1e9 else f"{value:.3g}"
    return f"{value:.3g}"


def percent(share: float) -> str:
    """A share from 0 to 1."""
    value = 100 * share
    if 0 < value < 0.05:
        return "< 0.1 %"
    return f"{value:.1f} %" if 0 < value < 9.95 else f"{value:,.0f} %"


def milliseconds(value: float) -> str:
    """A time of a step."""
    return f"{value / 1000:.3g} s" if value >= 10_000 else f"{short(value)} ms"


def size(count: float) -> str:
    """Bytes."""
    if abs(count) >= 1e9:
        return f"{count / 1e9:.2f} GB"
    return f"{short(count / 1e6)} MB" if abs(count) >= 1e5 or not count else f"{short(count / 1e3)} kB"


def duration(seconds: float) -> str:
    """A time of a training."""
    if 0 < seconds < 1:
        return milliseconds(1000 * seconds)
    if seconds < 120:
        return f"{short(seconds)} s"
    if seconds < 2 * 3600:
        return f"{int(seconds // 60)} min {int(seconds % 60)} s"
    return f"{int(seconds // 3600):,} h {int(seconds % 3600 // 60)} min"


def clipped(name: str, length: int = 90) -> str:
    """A name that would be too long for a table."""
    return name if len(name) <= length else f"{name[: length - 1]}…"


_UNITS: Mapping[str, Callable[[float], str]] = {
    "_bytes_per_s": lambda value: f"{size(value)}/s",
    "_bytes": size,
    "_percent": lambda value: percent(value / 100),
    "_share": percent,
    "_ms": milliseconds,
    "_seconds": duration,
    "_s": duration,
    "_hours": lambda value: duration(3600 * value),
    "_minutes": lambda value: duration(60 * value),
}
