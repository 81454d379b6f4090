"""What a training's operators and kernels take: torch.profiler around some of its steps."""

from __future__ import annotations

import gc
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Literal

import torch
from torch.profiler import ProfilerActivity, profile

from trainer.profiling import operator_trace
from trainer.profiling.evidence import ANNOTATION, READ, Category, Operator, OperatorTable
from trainer.profiling.operator_trace import Work

_OUTLINE = re.compile(rf"^ProfilerStep|^\[pytorch\|profiler\]|^\[memory\]|^{ANNOTATION}")

_CATEGORIES: Mapping[Category, str] = {
    "communication": r"c10d|gloo|nccl|all_?reduce|all_?gather|reduce_scatter|broadcast_|DistributedDataParallel",
    "optimizer": r"^Optimizer\.|^aten::_foreach_|^aten::_fused_(adam|sgd)|multi_tensor_apply",
    "attention": r"attention|flash_(fwd|bwd)|fmha|sdpa|cudnn::fusion::(compute_dot_do_o|convert_dq)",
    "convolution": r"conv(olution|olve|\d|_|$)|(fprop|dgrad|wgrad)",
    "normalization": r"(layer|batch|group|rms|instance)_?norm|GammaBetaBackward",
    "matrix product": r"^aten::((add|b|baddb)?mm|linear|matmul|dot|mv|addmv|einsum)(_|$)|gemm|mkldnn_linear|cutlass|nvjet|splitKreduce",
    "copy": r"copy|clone|contiguous|memcpy|memset|^aten::(cat|stack|to|fill_|zero_|pad|index_select)$|CatArray",
}  # the first pattern that fits, in letters of any case, decides: NCCL's kernels are communication although they copy


@contextmanager
def _without_collections() -> Iterator[None]:
    """Keep the garbage collector away from what makes very many objects: it would go through all of the process's again and again."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


class OperatorWindows:
    """torch.profiler around some steps, `length` of them from each of `starts` on; it never raises into the training.

    `table` holds the operators of all windows that were closed, or `missing` says why there are none.
    """

    def __init__(self, starts: Sequence[int], length: int, device: torch.device) -> None:
        self.steps = frozenset(step for start in starts for step in range(start, start + length))
        """Counted from the start of the recording."""
        self.active = False  # whether steps are slowed by it now
        self.missing = "" if self.steps else "turned off (operators_steps is 0, or operators_at empty)"
        self.trace = b""
        """Trace of the first window, compressed; empty before, and where `no_trace` says why."""
        self.no_trace = ""
        self._device = device
        self._profile: profile | None = None
        self._opened = self._seen = 0
        self._operators: dict[tuple[str, str], Operator] = {}

    @property
    def table(self) -> OperatorTable | None:
        """By time, the longest first; none before a window was closed."""
        if not self._seen:
            return None
        rows = sorted(self._operators.values(), key=lambda row: (-row.self_device_ms, -row.self_cpu_ms, row.name))
        return OperatorTable(steps=self._seen, operators=tuple(rows))

    def open(self, step: int) -> None:
        """Start the profiler before a step."""
        activities = [ProfilerActivity.CPU]
        if self._device.type == "cuda":
            activities.append(ProfilerActivity.CUDA)
        os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # else its tracer reports to the terminal that there is no GPU
        try:
            self._profile = profile(activities=activities, record_shapes=not self._seen)
            self._profile.start()
        except RuntimeError as error:  # the device's tracing is not permitted, say
            self._profile = None
            self.missing = f"torch.profiler did not start: {error}"
            return
        self.active, self._opened = True, step

    @_without_collections()
    def close(self, step: int) -> None:
        """Stop the profiler after a step and add what it saw."""
        profiled = self._stop()
        if profiled is None:
            return
        works = {} if self._seen else self._keep_trace(profiled)
        self._seen += step + 1 - self._opened
        for row in profiled.key_averages():
            name = str(row.key)
            kind: Literal["operator", "kernel"] = "operator" if row.device_type.name == "CPU" else "kernel"
            cpu_ms, device_ms = float(row.self_cpu_time_total) / 1000, float(row.self_device_time_total) / 1000
            if not (cpu_ms or device_ms) or _OUTLINE.search(name):
                continue
            if kind == "kernel" and row.is_user_annotation:
                continue  # the span of an operator's kernels on the device, which are there themselves
            calls = int(row.count)
            if name == READ:
                calls -= sum(_is_of_a_batch(event) for event in profiled.events() or () if event.name == READ)
            known = self._operators.get((kind, name))
            work = works.get(name, Work()) if kind == "operator" else Work()
            self._operators[kind, name] = Operator(
                name=name,
                kind=kind,
                category=category_of(name),
                calls=calls + (known.calls if known else 0),
                self_cpu_ms=cpu_ms + (known.self_cpu_ms if known else 0.0),
                self_device_ms=device_ms + (known.self_device_ms if known else 0.0),
                flops=work.flops or (known.flops if known else 0.0),
                moved_bytes=work.bytes or (known.moved_bytes if known else 0.0),
                bits=work.bits or (known.bits if known else 0),
            )

    def _keep_trace(self, profiled: profile) -> dict[str, Work]:
        """Keep the trace of a window, and return what its operators compute."""
        try:
            trace = operator_trace.exported(profiled)
            if len(trace) > operator_trace.LARGEST_TRACE:
                self.no_trace = (
                    f"it would have {len(trace) / 2**20:.0f} MiB; fewer steps make it smaller (operators_steps)"
                )
                return {}
            works = operator_trace.work_by_operator(trace)
            self.trace = operator_trace.compressed(trace)
        except (RuntimeError, OSError, ValueError) as error:  # no room for the file, or no JSON
            self.no_trace = f"torch.profiler gave no trace: {error}"
            return {}
        return works

    def finish(self, steps_seen: int) -> None:
        """Drop an unfinished window after the last step, and record why there is no table if there is none."""
        cut = self._stop() is not None
        if self._seen or self.missing:
            return
        first = f"the first window would have begun after {min(self.steps)}"
        self.missing = f"the training ended after {steps_seen} steps, " + (
            f"within the window from step {self._opened + 1}" if cut else f"and {first}"
        )

    def _stop(self) -> profile | None:
        profiled, self._profile, self.active = self._profile, None, False
        try:
            if profiled is not None:
                profiled.stop()
        except RuntimeError as error:  # as in `open`
            self.missing = f"torch.profiler gave no result: {error}"
            return None
        return profiled


def _is_of_a_batch(event: Any) -> bool:
    """Return whether something was called while a batch was loaded, from the host's memory and files."""
    while event is not None and event.name != f"{ANNOTATION}data":
        event = event.cpu_parent
    return event is not None


def category_of(name: str) -> Category:
    """Return the kind of work of an operator or kernel by its name."""
    return next((category for category, pattern in _CATEGORIES.items() if re.search(pattern, name, re.I)), "other")
