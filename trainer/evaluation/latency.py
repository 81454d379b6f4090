"""Latency of models on this machine's CPU, and their multiply-accumulate operations.

B: images in a batch.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from trainer.host import processor_name

_WARM_UP_RUNS = 5


@dataclass(frozen=True, kw_only=True)
class Latency:
    """The time that a model takes for a batch."""

    batch_size: int
    p50_ms: float
    """Median time of a batch, in milliseconds."""
    p95_ms: float
    """95th percentile of the time of a batch, in milliseconds."""
    images_per_second: float
    """Images of all timed batches, divided by their time."""


@dataclass(frozen=True, kw_only=True)
class Machine:
    """The machine on which latencies were measured; they mean nothing without it."""

    processor: str
    threads: int
    """Threads that torch used."""
    torch: str


def machine() -> Machine:
    """Describe this machine: its processor, torch's threads and version."""
    return Machine(processor=processor_name(), threads=torch.get_num_threads(), torch=torch.__version__)


def measure(
    models: Mapping[str, nn.Module], images: Tensor, *, batch_sizes: Sequence[int], runs: int
) -> dict[str, list[Latency]]:
    """Time models on the CPU, from raw images to logits.

    The models take turns in one loop, so that other work on the machine slows all of them alike.

    Args:
        models: by name, on the CPU, in evaluation mode.
        images: at least one, uint8 [N, 3, H, W]; repeated to fill a batch.
        batch_sizes: batch sizes B, each measured separately.
        runs: timed batches for each model and batch size, after a few for warm-up.

    Returns:
        For each model, one latency for each batch size.
    """
    latencies: dict[str, list[Latency]] = {name: [] for name in models}
    with torch.inference_mode():
        for batch_size in batch_sizes:
            batch = images[torch.arange(batch_size) % len(images)]
            seconds: dict[str, list[float]] = {name: [] for name in models}
            for _, (name, model) in itertools.product(range(_WARM_UP_RUNS + runs), models.items()):
                start = time.perf_counter()
                model(batch)
                seconds[name].append(time.perf_counter() - start)
            for name, all_runs in seconds.items():
                timed = all_runs[_WARM_UP_RUNS:]
                p50, p95 = np.percentile(timed, [50, 95])
                latency = Latency(
                    batch_size=batch_size,
                    p50_ms=float(p50) * 1e3,
                    p95_ms=float(p95) * 1e3,
                    images_per_second=batch_size * len(timed) / sum(timed),
                )
                latencies[name].append(latency)
    return latencies


def multiply_accumulates(model: nn.Module, image: Tensor) -> int:
    """Count the multiply-accumulate operations of matrix products, convolutions and attention for one image, uint8 [1, 3, H, W]."""
    # Attention as matrix products, since the counter of torch 2.9 ignores a CPU's fused attention.
    with torch.no_grad(), sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        model(image)
    return int(counter.get_total_flops()) // 2
