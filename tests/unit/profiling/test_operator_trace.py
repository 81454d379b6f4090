"""The trace that is kept, by the schema of the trace event format, and what limits operators."""

from __future__ import annotations

import gzip
import json
from typing import Any

import jsonschema
import pytest
import torch
from torch import nn

from trainer.profiling import operator_trace
from trainer.profiling.operator_trace import Work, bound, work_by_operator
from trainer.profiling.operator_windows import OperatorWindows

TIMES = {"ts": {"type": "number", "minimum": 0}}
IDS = {"pid": {"type": ["integer", "string"]}, "tid": {"type": ["integer", "string"]}}
SCHEMA: dict[str, Any] = {
    "type": "object",
    "required": ["traceEvents"],
    "properties": {
        "displayTimeUnit": {"enum": ["ms", "ns"]},
        "traceEvents": {
            "type": "array",
            "minItems": 1,
            "items": {
                "type": "object",
                "required": ["ph", "name", "pid"],
                "properties": {"name": {"type": "string"}, "args": {"type": "object"}, **IDS},
                "oneOf": [
                    {
                        "properties": {"ph": {"const": "X"}, "dur": {"type": "number", "minimum": 0}, **TIMES},
                        "required": ["ts", "dur", "tid"],
                    },
                    {"properties": {"ph": {"enum": ["s", "t", "f"]}, **TIMES}, "required": ["ts", "id", "cat", "tid"]},
                    {
                        "properties": {"ph": {"enum": ["i", "I"]}, "s": {"enum": ["g", "p", "t"]}, **TIMES},
                        "required": ["ts"],
                    },
                    {"properties": {"ph": {"const": "C"}, **TIMES}, "required": ["ts", "args"]},
                    {
                        "properties": {
                            "ph": {"const": "M"},
                            "name": {
                                "enum": [
                                    "process_name",
                                    "process_labels",
                                    "process_sort_index",
                                    "thread_name",
                                    "thread_sort_index",
                                ]
                            },
                        },
                        "required": ["args"],
                    },
                ],
            },
        },
    },
}
"""Of Chromium's trace event format, which Perfetto reads: complete, flow, instant, counter and metadata events."""


def window_of(model: nn.Module, inputs: torch.Tensor) -> OperatorWindows:
    windows = OperatorWindows((0, 3), 1, torch.device("cpu"))
    for step in range(4):
        if step in windows.steps:
            windows.open(step)
        model(inputs).sum().backward()
        if step in windows.steps:
            windows.close(step)
    return windows


@pytest.fixture(scope="module")
def windows() -> OperatorWindows:
    return window_of(nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 8)), torch.ones(16, 32))


def test_the_trace_of_the_first_window_is_in_the_format_of_perfetto(windows: OperatorWindows) -> None:
    assert windows.no_trace == ""
    trace = json.loads(gzip.decompress(windows.trace))
    jsonschema.validate(trace, SCHEMA)
    names = [event["name"] for event in trace["traceEvents"] if event["ph"] == "X"]
    assert names.count("aten::addmm") == 2, "one step of two layers"
    broken = dict(trace, traceEvents=[{key: value for key, value in trace["traceEvents"][0].items() if key != "ph"}])
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(broken, SCHEMA)


def test_a_trace_that_is_too_large_is_not_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(operator_trace, "LARGEST_TRACE", 1000)
    windows = window_of(nn.Linear(4, 4), torch.ones(2, 4))
    assert windows.trace == b""
    assert "fewer steps make it smaller" in windows.no_trace
    assert windows.table is not None


def test_work_follows_from_shapes(windows: OperatorWindows) -> None:
    works = work_by_operator(gzip.decompress(windows.trace))
    flops = 2 * 16 * 32 * 64 + 2 * 16 * 64 * 8
    moved = 4 * ((16 * 32 + 32 * 64 + 16 * 64) + (16 * 64 + 64 * 8 + 16 * 8))
    assert works["aten::addmm"] == Work(flops, moved, 32)
    assert works["aten::gelu"] == Work(8 * 16 * 64, 4 * 2 * 16 * 64, 32)
    assert windows.table is not None
    rows = {row.name: row for row in windows.table.operators}
    assert (rows["aten::addmm"].flops, rows["aten::addmm"].calls) == (flops, 4)
    assert rows["aten::addmm"].moved_bytes == moved
    assert "aten::t" not in works


@pytest.mark.parametrize(
    ("intensity", "bits", "device", "expected"),
    [
        (1, 16, "cuda:0 (NVIDIA H200)", "memory-bound"),
        (206, 16, "cuda:0 (NVIDIA H200)", "between"),
        (500, 16, "cuda:0 (NVIDIA H200)", "compute-bound"),
        (40, 32, "cuda:0 (NVIDIA A100-SXM4-40GB)", "compute-bound"),
        (4, 32, "cpu", "memory-bound"),
        (25, 32, "cpu", "compute-bound"),
        (500, 16, "cuda:0 (a GPU that nobody knows)", ""),
        (0, 0, "cpu", "memory-bound"),
    ],
)
def test_words_of_the_roofline(intensity: float, bits: int, device: str, expected: str) -> None:
    assert bound(intensity * 1e6, 1e6, bits, device) == expected


def test_without_bytes_there_is_no_word() -> None:
    assert bound(1e9, 0, 32, "cpu") == ""
    assert bound(1e9, 1e6, 16, "cuda:0 (NVIDIA L40)") == "", "an L40 is no L4"
