"""A student as an ONNX file in ONNX Runtime, on the CPU. Needs neither torch nor timm.

Shapes: B images, S the edge of the square, K classes.
"""

from __future__ import annotations

import logging
from pathlib import Path

import numpy as np
import numpy.typing as npt

INPUT, OUTPUT = "images", "logits"
"""Names of the graph's."""


class OnnxNetwork:
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
        self._session = onnxruntime.InferenceSession(file, options, providers=["CPUExecutionProvider"])

    def logits(self, images: npt.NDArray[np.uint8]) -> npt.NDArray[np.float32]:
        """Compute the logits [B, K] of squares, uint8 [B, S, S, 3]."""
        logits: npt.NDArray[np.float32]
        (logits,) = self._session.run([OUTPUT], {INPUT: images})
        return logits
