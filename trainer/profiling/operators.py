"""Operators and kernels, and the kinds of work that they do."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

Category = Literal[
    "matrix product",
    "attention",
    "convolution",
    "normalisation",
    "copy",
    "communication",
    "optimiser",
    "other",
]

_CATEGORIES: Mapping[Category, re.Pattern[str]] = {
    "communication": re.compile(
        r"c10d|gloo|nccl|all_?reduce|all_?gather|reduce_scatter|broadcast_|DistributedDataParallel", re.I
    ),
    "optimiser": re.compile(r"^Optimizer\.|^aten::_foreach_|^aten::_fused_(adam|sgd)|multi_tensor_apply", re.I),
    "attention": re.compile(r"attention|flash_(fwd|bwd)|fmha", re.I),
    "convolution": re.compile(r"conv(olution|\d|_|$)|(fprop|dgrad|wgrad)", re.I),
    "normalisation": re.compile(r"(layer|batch|group|rms|instance)_?norm", re.I),
    "matrix product": re.compile(
        r"^aten::((add|b|baddb)?mm|linear|matmul|dot|mv|addmv|einsum)(_|$)|gemm|mkldnn_linear|cutlass", re.I
    ),
    "copy": re.compile(
        r"copy|clone|contiguous|memcpy|memset|^aten::(cat|stack|to|fill_|zero_|pad|index_select)$|CatArray", re.I
    ),
}
"""The first pattern that fits decides: NCCL's kernels are communication although they copy."""


@dataclass(frozen=True, kw_only=True)
class Operator:
    """All calls of one operator or kernel within the window."""

    name: str
    kind: Literal["operator", "kernel"]
    """`operator`: called on the host; `kernel`: what ran on the device (its time is also counted with the operator that called it)."""
    category: Category
    calls: int
    self_cpu_ms: float
    """Time on the host, without the operators that it calls."""
    self_device_ms: float
    """Time on the device of the kernels that it started itself."""


@dataclass(frozen=True, kw_only=True)
class OperatorTable:
    """What torch.profiler saw."""

    steps: int
    """Steps in the window."""
    operators: tuple[Operator, ...]
    """By time, the longest first."""


def category_of(name: str) -> Category:
    """The kind of work that an operator or kernel does, by its name."""
    return next((category for category, pattern in _CATEGORIES.items() if pattern.search(name)), "other")
