"""A student as an ONNX file in ONNX Runtime or in OpenVINO, on the CPU. Needs neither torch nor timm, and of the runtimes the one it uses.

Shapes: B images, S the edge of the square, K classes.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

INPUT, OUTPUT = "images", "logits"  # names of the graph's


Network: TypeAlias = Callable[[npt.NDArray[np.uint8]], npt.NDArray[np.float32]]
"""Computes the logits [B, K] of squares, uint8 [B, S, S, 3]; may be called from several threads."""


def _onnx_runtime(file: Path, *, threads: int) -> Network:
    import onnxruntime

    logging.getLogger("onnxruntime").setLevel(logging.ERROR)
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads, options.inter_op_num_threads = threads, 1
    options.log_severity_level = 3
    # Threads that spin between answers keep the cores from decoding photos.
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")
    # Without VNNI the default int8 kernels add two products in 16 bits and saturate; with VNNI this changes nothing.
    options.add_session_config_entry("session.x64quantprecision", "1")
    session = onnxruntime.InferenceSession(file, options, providers=["CPUExecutionProvider"])
    return lambda images: session.run([OUTPUT], {INPUT: images})[0]


def _openvino(file: Path, *, threads: int) -> Network:
    import openvino

    # By default it computes in bf16 if the processor can, which gives other logits.
    options = {"INFERENCE_PRECISION_HINT": "f32", "PERFORMANCE_HINT": "LATENCY", "INFERENCE_NUM_THREADS": threads}
    request = openvino.Core().compile_model(str(file), "CPU", options).create_infer_request()
    lock = threading.Lock()

    def logits(images: npt.NDArray[np.uint8]) -> npt.NDArray[np.float32]:
        with lock:  # a request holds one answer
            computed: npt.NDArray[np.float32] = request.infer({INPUT: images})[OUTPUT]
        return computed

    return logits


ONNX_RUNTIME, OPENVINO = "onnxruntime", "openvino"  # names of the runtimes, which are those of their packages
RUNTIMES: Mapping[str, Callable[..., Network]] = {ONNX_RUNTIME: _onnx_runtime, OPENVINO: _openvino}
"""Loads a file; `threads` compute an answer, 0: one for each core. Raises the runtime's own errors."""


def runtime_of(card: Mapping[str, Any]) -> str:
    """Return which runtime an exported student's card names; older cards name none. Raises a `ValueError` if there is none such."""
    runtime = str(card.get("runtime", ONNX_RUNTIME))
    if runtime not in RUNTIMES:
        raise ValueError(f"no runtime {runtime!r}")
    return runtime
