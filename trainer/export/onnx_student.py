"""An exported student in ONNX Runtime. Imports neither torch nor timm, for a server needs none of them.

Shapes: B images, S the edge of the square, K classes.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import numpy.typing as npt

from trainer import limits
from trainer.errors import ModelError
from trainer.host import usable_cores
from trainer.served_student.onnx_network import OnnxNetwork

Pixels = npt.NDArray[np.uint8]
Logits = npt.NDArray[np.float32]


class OnnxStudent:
    """An ONNX file of a student in ONNX Runtime, on the CPU."""

    def __init__(self, file: Path, *, threads: int = 0) -> None:
        """Load a file; `threads` compute an answer, 0: one for each core that this process may use.

        Raises:
            ModelError: ONNX Runtime does not take it.
        """
        self.file = file
        try:
            self._network = OnnxNetwork(
                file, threads=threads or usable_cores()
            )  # which ONNX Runtime would not ask a container for
        except Exception as error:  # of several classes of its own, which have no public names
            raise ModelError(
                f"{file.name}: ONNX Runtime does not take it ({limits.cut(' '.join(str(error).split()), 300)}); choose another student"
            ) from error

    def logits(self, images: Pixels) -> Logits:
        """Compute the logits [B, K] of squares, uint8 [B, S, S, 3].

        Raises:
            ModelError: ONNX Runtime cannot, or they are not finite.
        """
        try:
            logits = self._network.logits(images)
        except Exception as error:
            raise ModelError(
                f"{self.file.name}: ONNX Runtime cannot compute it ({limits.cut(' '.join(str(error).split()), 300)}); choose "
                "another variant"
            ) from error
        if not np.isfinite(logits).all():
            raise ModelError(f"{self.file.name}: gives logits that are not finite; choose another variant")
        return logits
