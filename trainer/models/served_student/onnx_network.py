"""A student as an ONNX file in ONNX Runtime or in OpenVINO, on the CPU. Needs neither torch nor timm, and of the runtimes the one it uses.

Shapes: B images, S the edge of the square, K classes.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

INPUT, OUTPUT = "images", "logits"
"""Names of the graph's."""


class OnnxNetwork(Protocol):
    """An ONNX file, loaded."""

    def logits(self, images: npt.NDArray[np.uint8]) -> npt.NDArray[np.float32]:
        """Compute the logits [B, K] of squares, uint8 [B, S, S, 3]; from several threads, if so wanted."""
        ...


class OnnxRuntimeNetwork:
    """A session of ONNX Runtime."""

    def __init__(self, file: Path, *, threads: int = 0) -> None:
        """Load a file; `threads` compute an answer, 0: as many as there are cores. Raises what ONNX Runtime raises."""
        import onnxruntime

        logging.getLogger("onnxruntime").setLevel(logging.ERROR)
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads, options.inter_op_num_threads = threads, 1
        options.log_severity_level = 3
        # Threads that spin between answers keep the cores from those that decode photos.
        options.add_session_config_entry("session.intra_op.allow_spinning", "0")
        # Without VNNI the default int8 kernels add two products in 16 bits and cut off what is too large; with VNNI this changes nothing.
        options.add_session_config_entry("session.x64quantprecision", "1")
        self._session = onnxruntime.InferenceSession(file, options, providers=["CPUExecutionProvider"])

    def logits(self, images: npt.NDArray[np.uint8]) -> npt.NDArray[np.float32]:
        """Compute the logits [B, K] of squares, uint8 [B, S, S, 3]."""
        logits: npt.NDArray[np.float32]
        (logits,) = self._session.run([OUTPUT], {INPUT: images})
        return logits


class OpenVinoNetwork:
    """A model that OpenVINO has compiled."""

    def __init__(self, file: Path, *, threads: int = 0) -> None:
        """Load a file; `threads` compute an answer, 0: as many as there are cores. Raises what OpenVINO raises."""
        import openvino

        # By itself it computes in bf16 where the processor can, which gives other logits.
        options = {"INFERENCE_PRECISION_HINT": "f32", "PERFORMANCE_HINT": "LATENCY", "INFERENCE_NUM_THREADS": threads}
        self._request = openvino.Core().compile_model(str(file), "CPU", options).create_infer_request()
        self._lock = threading.Lock()

    def logits(self, images: npt.NDArray[np.uint8]) -> npt.NDArray[np.float32]:
        """Compute the logits [B, K] of squares, uint8 [B, S, S, 3]."""
        with self._lock:  # a request holds one answer
            logits: npt.NDArray[np.float32] = self._request.infer({INPUT: images})[OUTPUT]
        return logits


ONNX_RUNTIME, OPENVINO = "onnxruntime", "openvino"
"""Names of the runtimes, which are those of their packages."""
RUNTIMES: Mapping[str, Callable[..., OnnxNetwork]] = {ONNX_RUNTIME: OnnxRuntimeNetwork, OPENVINO: OpenVinoNetwork}
"""What each runtime makes of a file and `threads`."""


def runtime_of(card: Mapping[str, Any]) -> str:
    """Return which runtime an exported student's card names; older cards name none. Raises a `ValueError` if there is none such."""
    runtime = str(card.get("runtime", ONNX_RUNTIME))
    if runtime not in RUNTIMES:
        raise ValueError(f"no runtime {runtime!r}")
    return runtime
