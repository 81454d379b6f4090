"""A student's ONNX file in ONNX Runtime or OpenVINO, as `export` measures it.

Shapes: B images, S the edge of the square, K classes.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import numpy.typing as npt

from trainer.io import limits
from trainer.io.errors import ModelError, SettingsError
from trainer.io.host import usable_cores
from trainer.models.served_student.onnx_network import ONNX_RUNTIME, OPENVINO, RUNTIMES

Pixels = npt.NDArray[np.uint8]
Logits = npt.NDArray[np.float32]

_NAMES = {ONNX_RUNTIME: "ONNX Runtime", OPENVINO: "OpenVINO"}  # in messages


class OnnxStudent:
    """An ONNX file of a student in a runtime, on the CPU."""

    def __init__(self, file: Path, *, threads: int = 0, runtime: str = ONNX_RUNTIME) -> None:
        """Load a file for `threads` threads, 0 being one for each usable core; a `ModelError` if the runtime refuses it."""
        self.file, self.runtime, self._called = file, runtime, _NAMES[runtime]
        try:
            # No runtime would ask a container how many cores it may use.
            self._network = RUNTIMES[runtime](file, threads=threads or usable_cores())
        except ModuleNotFoundError as error:
            raise SettingsError(
                f"{file.name} is for {self._called}, which needs the package {error.name}; pip install {runtime}, or choose another "
                "variant"
            ) from error
        except Exception as error:  # of several classes of its own, which have no public names
            raise ModelError(
                f"{file.name}: {self._called} does not take it ({limits.cut(' '.join(str(error).split()), 300)}); choose another student"
            ) from error

    def logits(self, images: Pixels) -> Logits:
        """Compute the logits [B, K] of squares, uint8 [B, S, S, 3]; a `ModelError` if the runtime cannot, or they are not finite."""
        try:
            logits = self._network(images)
        except Exception as error:
            raise ModelError(
                f"{self.file.name}: {self._called} cannot compute it ({limits.cut(' '.join(str(error).split()), 300)}); choose "
                "another variant"
            ) from error
        if not np.isfinite(logits).all():
            raise ModelError(f"{self.file.name}: gives logits that are not finite; choose another variant")
        return logits
