"""The trace of a window of torch.profiler: kept as a file that Perfetto opens, and read for what limits each operator.

It is JSON in the trace event format of Chromium, compressed by gzip.
"""

from __future__ import annotations

import gzip
import json
import math
import re
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from torch.profiler import profile

LARGEST_TRACE = 32 * 2**20
"""Bytes of JSON above which a trace is not kept."""
_BYTES = {"float": 4, "c10::BFloat16": 2, "c10::Half": 2}
_FACTORS = {"aten::mm": 0, "aten::addmm": 1, "aten::bmm": 0, "aten::baddbmm": 1}  # which input is the first factor
_ATTENTION = ("aten::_scaled_dot_product_flash_attention", "aten::_scaled_dot_product_efficient_attention")
_BY_ELEMENT = {
    "add",
    "add_",
    "mul",
    "mul_",
    "div",
    "div_",
    "copy_",
    "gelu",
    "gelu_backward",
    "relu",
    "silu",
    "_softmax",
}
_BY_ELEMENT |= {"native_layer_norm", "native_layer_norm_backward", "native_batch_norm", "native_batch_norm_backward"}
_OF_AN_ELEMENT = 8  # operations on each element, at most about so many
_RIDGES: Mapping[str, tuple[float, float]] = {
    "H200": (206, 14),
    "H100": (295, 20),
    "A100": (153, 9.6),
    "L40S": (419, 106),
    "A10G": (117, 52),
    "L4": (403, 101),
    "T4": (203, 25),
}
"""Word of a GPU's name -> operations for each byte of its memory, at 16 and 32 bits, by data sheets (neither sparse nor TF32)."""
_CPU_RIDGE = 10.0  # of the usual order: a core computes some 50 to 100 GFLOP/s and reads 5 to 10 GB/s
_APART = 2.0  # factor from the ridge on which a word is sure


class Work(NamedTuple):
    """What the calls of an operator compute and move."""

    flops: float = 0.0
    bytes: float = 0.0
    bits: int = 0  # of a number

    def __add__(self, other: object) -> Work:
        """Sum two of one operator."""
        if not isinstance(other, Work):
            return NotImplemented
        return Work(self.flops + other.flops, self.bytes + other.bytes, max(self.bits, other.bits))


def exported(profiled: profile) -> bytes:
    """Return the trace as JSON."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        profiled.export_chrome_trace(str(path))
        return path.read_bytes()


def compressed(trace: bytes) -> bytes:
    """Compress a trace, with bytes that do not depend on the time."""
    return gzip.compress(trace, compresslevel=3, mtime=0)


def work_by_operator(trace: bytes) -> dict[str, Work]:
    """Sum what each operator's calls compute and move, by the shapes of their inputs; the known ones only."""
    works: dict[str, Work] = {}
    for event in json.loads(trace)["traceEvents"]:
        details = event.get("args", {})
        if event.get("cat") == "cpu_op" and "Input Dims" in details:
            work = _work(str(event["name"]), details["Input Dims"], details["Input type"])
            if work is not None:
                works[event["name"]] = works.get(event["name"], Work()) + work
    return works


def _work(name: str, shapes: Sequence[Any], types: Sequence[str]) -> Work | None:
    known = [(shape, _BYTES[kind]) for shape, kind in zip(shapes, types, strict=True) if shape and kind in _BYTES]
    sizes = [math.prod(shape) for shape, _ in known]
    first = _FACTORS.get(name)
    if first is not None and len(known) >= first + 2:
        shape, each = known[first]
        inner = shape[-1]
        columns = known[first + 1][0][-1]
        outputs = sizes[first] // max(1, inner) * columns
        return Work(2.0 * outputs * inner, each * float(sizes[first] + sizes[first + 1] + outputs), 8 * each)
    if name.startswith(_ATTENTION) and "backward" not in name and len(known) >= 3:
        tokens = known[1][0][-2]
        return Work(4.0 * sizes[0] * tokens, known[0][1] * float(sum(sizes[:3]) + sizes[0]), 8 * known[0][1])
    if name.removeprefix("aten::") in _BY_ELEMENT and known:
        largest, each = max(sizes), known[0][1]
        return Work(_OF_AN_ELEMENT * float(largest), each * float(sum(sizes) + largest), 8 * each)
    return None


def bound(flops: float, moved: float, bits: int, device: str) -> str:
    """Name what limits an operator by the roofline of a device: computing or memory; empty where it is not known."""
    words = re.split(r"[ ()-]", device)  # such as `cuda:0 (NVIDIA A100-SXM4-40GB)`; an L40 is no L4
    ridges = next((ridges for name, ridges in _RIDGES.items() if name in words), None)
    if not moved or (ridges is None and device.startswith("cuda")):
        return ""
    ridge = _CPU_RIDGE if ridges is None else ridges[0 if bits == 16 else 1]
    intensity = flops / moved
    if intensity > _APART * ridge:
        return "compute-bound"
    return "memory-bound" if intensity < ridge / _APART else "between"
