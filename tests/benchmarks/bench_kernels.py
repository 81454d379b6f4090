"""What the faster kernels of `trainer/training/cpu_kernels.py` give on this CPU: `python tests/benchmarks/bench_kernels.py`.

Each pair runs in turns in one process, forward and backward, or forward alone for the teacher; medians over rounds. The rows `linear` show
what the convolution would give, the others what is chosen for this processor.
"""

from __future__ import annotations

import argparse
import copy
import ctypes
import os
import statistics
import time
from collections.abc import Callable

import torch
import torch.nn.functional as F
from timm.layers import Attention
from torch import Tensor, nn

from trainer.config import DEVICE_VARIABLE, ModelSettings, Precision
from trainer.devices import Device, choose_device
from trainer.devices.device import keep_freed_memory
from trainer.models import networks
from trainer.objectives.distillation.frozen_teacher import FrozenTeacher
from trainer.training.cpu_kernels import ConvolvedLinear, use_fast_kernels

LABELS = tuple(str(number) for number in range(100))
TOKENS = 197

Work = Callable[[], object]


def in_turns(plain: Work, fast: Work, rounds: int, clock: Callable[[], float]) -> tuple[float, float, float]:
    """Median seconds of both, and the median of the ratios within a round, which a machine that slows down for a while changes little."""
    times: tuple[list[float], list[float]] = ([], [])
    for _ in range(rounds + 1):
        for work, seconds in zip((plain, fast), times, strict=True):
            start = clock()
            work()
            seconds.append(clock() - start)
    first, second = times[0][1:], times[1][1:]  # the first round fills caches
    ratio = statistics.median(one / other for one, other in zip(first, second, strict=True))
    return statistics.median(first), statistics.median(second), ratio


def trained(module: nn.Module, inputs: Tensor, precision: Precision, device: Device) -> Work:
    """A forward and a backward pass."""

    def work() -> None:
        with device.autocast(precision):
            output = module(inputs)
        output.float().sum().backward()

    return work


def attention(width: int, heads: int, batch: int, device: Device) -> tuple[Work, Work]:
    """One attention layer in bf16, fused by torch and explicit."""
    fused = Attention(width, num_heads=heads, qkv_bias=True)
    explicit = copy.deepcopy(fused)
    use_fast_kernels(explicit, device, "bf16")
    tokens = torch.randn(batch, TOKENS, width)
    return trained(fused, tokens, "bf16", device), trained(explicit, tokens, "bf16", device)


def linear(inputs: int, outputs: int, batch: int, device: Device) -> tuple[Work, Work]:
    """One linear layer in float32, as a matrix product and as a convolution."""
    plain = nn.Linear(inputs, outputs)
    rows = torch.randn(batch * TOKENS, inputs)
    return trained(plain, rows, "fp32", device), trained(ConvolvedLinear(plain), rows, "fp32", device)


def student(architecture: str, precision: Precision, batch: int, device: Device) -> tuple[Work, Work]:
    """A student's forward and backward pass, as timm makes it and with the faster kernels."""
    plain = networks.create(ModelSettings(architecture=architecture), LABELS)
    fast = copy.deepcopy(plain)
    use_fast_kernels(fast, device, precision)
    images = torch.randint(0, 256, (batch, 3, 224, 224), dtype=torch.uint8)
    return trained(plain, images, precision, device), trained(fast, images, precision, device)


def memory(architecture: str, batch: int, device: Device) -> tuple[Work, Work]:
    """A student's forward and backward pass, with freed memory returned as glibc does by itself in the end, and kept."""
    model = networks.create(ModelSettings(architecture=architecture), LABELS)
    use_fast_kernels(model, device, "fp32")
    work = trained(model, torch.randint(0, 256, (batch, 3, 224, 224), dtype=torch.uint8), "fp32", device)
    library = ctypes.CDLL(None)

    def returned() -> None:
        # What glibc raises its thresholds to when a program frees large pieces: 32 and 64 MiB (malloc.c, DEFAULT_MMAP_THRESHOLD_MAX).
        for parameter, value in ((-4, 65536), (-3, 32 << 20), (-1, 64 << 20)):
            library.mallopt(parameter, value)
        work()

    def kept() -> None:
        keep_freed_memory()
        work()

    return returned, kept


def teacher(architecture: str, precision: Precision, batch: int, device: Device) -> tuple[Work, Work]:
    """A network's forward pass under autocast, and as a frozen teacher."""
    plain = networks.create(ModelSettings(architecture=architecture), LABELS).eval().requires_grad_(False)
    frozen = FrozenTeacher(copy.deepcopy(plain), device, precision=precision)
    images = torch.randint(0, 256, (batch, 3, 224, 224), dtype=torch.uint8)

    def ask() -> Tensor:
        with torch.no_grad(), device.autocast(precision):
            return F.softmax(plain(images).float(), dim=1)

    return ask, lambda: frozen(images)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--rounds", type=int, default=5, help="default: %(default)s")
    parser.add_argument("--teacher", default="vit_base_patch16_224", help="default: %(default)s")
    parser.add_argument("--batch-size", type=int, default=16, help="default: %(default)s")
    parser.add_argument(
        "--cpu-time",
        action="store_true",
        help="this process's time on a core, for a busy machine, with OMP_NUM_THREADS=1",
    )
    parser.add_argument("--only", default="", metavar="TEXT", help="the rows with this in their name (default: all)")
    options = parser.parse_args()
    os.environ[DEVICE_VARIABLE] = "cpu"
    device, batch = choose_device(), options.batch_size
    pairs: dict[str, Callable[[], tuple[Work, Work]]] = {
        "attention of ViT-Ti, bf16": lambda: attention(192, 3, batch, device),
        "attention of ViT-B, bf16": lambda: attention(768, 12, batch, device),
        "linear 192 -> 768, fp32": lambda: linear(192, 768, batch, device),
        "linear 768 -> 3072, fp32": lambda: linear(768, 3072, batch, device),
        "ViT-Ti, bf16": lambda: student("vit_tiny_patch16_224", "bf16", batch, device),
        "ViT-Ti, fp32": lambda: student("vit_tiny_patch16_224", "fp32", batch, device),
        "EfficientNet-Lite0, fp32": lambda: student("tf_efficientnet_lite0", "fp32", batch, device),
        "the same, memory kept": lambda: memory("tf_efficientnet_lite0", batch, device),
        "EfficientNet-Lite0, bf16": lambda: student("tf_efficientnet_lite0", "bf16", batch, device),
        "teacher, bf16": lambda: teacher(options.teacher, "bf16", batch, device),
        "teacher, fp32": lambda: teacher(options.teacher, "fp32", batch, device),
    }
    print(f"{'':28}{'plain ms':>12}{'fast ms':>12}{'ratio':>8}")
    clock = time.process_time if options.cpu_time else time.perf_counter
    for name, pair in ((name, pair) for name, pair in pairs.items() if options.only in name):
        plain, fast, ratio = in_turns(*pair(), options.rounds, clock)
        print(f"{name:28}{1e3 * plain:12.1f}{1e3 * fast:12.1f}{ratio:8.2f}", flush=True)


if __name__ == "__main__":
    main()
