"""An exported student that is asked about photos: its graph in ONNX Runtime or OpenVINO, its card, its preprocessing.

Imports neither torch nor timm, for a server needs none of them.

Shapes: B images, S the edge of the square, K classes.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt

from trainer.io import artifacts, limits, storage
from trainer.io.errors import ArtifactError, ModelError, SettingsError
from trainer.io.host import usable_cores
from trainer.models import prediction
from trainer.models.prediction import Prediction
from trainer.models.served_student.class_tags import ClassTags
from trainer.models.served_student.onnx_network import ONNX_RUNTIME, OPENVINO, RUNTIMES, runtime_of
from trainer.models.served_student.preprocessing import Square, to_pixels
from trainer.models.served_student.student import EXPORT_CARD, probabilities

Pixels = npt.NDArray[np.uint8]
Logits = npt.NDArray[np.float32]

_NAMES = {ONNX_RUNTIME: "ONNX Runtime", OPENVINO: "OpenVINO"}  # in messages


class OnnxStudent:
    """An ONNX file of a student in a runtime, on the CPU."""

    def __init__(self, file: Path, *, threads: int = 0, runtime: str = ONNX_RUNTIME) -> None:
        """Load a file; `threads` compute an answer, 0: one for each core that this process may use.

        Raises:
            ModelError: the runtime does not take it.
            SettingsError: the runtime is not installed.
        """
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
        """Compute the logits [B, K] of squares, uint8 [B, S, S, 3].

        Raises:
            ModelError: the runtime cannot, or they are not finite.
        """
        try:
            logits = self._network.logits(images)
        except Exception as error:
            raise ModelError(
                f"{self.file.name}: {self._called} cannot compute it ({limits.cut(' '.join(str(error).split()), 300)}); choose "
                "another variant"
            ) from error
        if not np.isfinite(logits).all():
            raise ModelError(f"{self.file.name}: gives logits that are not finite; choose another variant")
        return logits


class ExportedClassifier:
    """What `vit-distill export` wrote, loaded. Methods may be called from several threads."""

    def __init__(self, place: str | Path, *, threads: int = 0, force: bool = False) -> None:
        """Read an export.

        Args:
            place: its directory, here or in a store.
            threads: how many compute an answer; 0: as many as there are cores.
            force: take one that did not pass its gate, too.

        Raises:
            ArtifactError: there is no export, or it is damaged.
            ModelError: its file passed no gate, or the runtime that it was chosen for does not take it.
            SettingsError: that runtime is not installed.
        """
        export = artifacts.read(place, "export")
        if EXPORT_CARD not in export.files:
            raise ModelError(
                f"export {place}: has no ONNX file ({'; '.join(export.figures['reasons'])}); serve that of another student"
            )
        try:
            card = storage.read_json(export.path / EXPORT_CARD)
            self.square = Square(**card["square"])
            self.labels: Sequence[str] = tuple(card["labels"])
            tags = card["tags"] and storage.read_json(export.path / card["tags"])
            self.tags = ClassTags.of(tags) if tags else None
            self._temperature = float(card.get("temperature", 1))
            threshold = card.get("threshold")
            self.threshold = None if threshold is None else float(threshold)
            self.architecture, self.variant = str(card["architecture"]), str(card["variant"])
            self.runtime = runtime_of(card)
            reasons: list[str] = card["measured"]["reasons"]
        except (KeyError, TypeError, ValueError) as error:
            raise ArtifactError(
                f"export {place}: its card is not readable ({error}); export the student again"
            ) from error
        if reasons and not force:
            raise ModelError(
                f"export {place}: did not pass its gate ({'; '.join(reasons)}); serve another one, or this one all the same (--force)"
            )
        self.version = export.fingerprint[:12]
        """Changes with every file of the export."""
        self.student = export.parents.get("student", "")
        """Fingerprint of the student that was exported."""
        self.created = export.created
        """When the export was completed."""
        self._student = OnnxStudent(export.path / card["file"], threads=threads, runtime=self.runtime)
        # So that the first request is no slower.
        self.probabilities(np.zeros((1, self.square.size, self.square.size, 3), dtype=np.uint8))

    def read(self, content: bytes) -> Pixels:
        """Make a photo's square of an image file's bytes, uint8 [S, S, 3].

        Raises:
            BadImageError: it is no image, or cannot be used.
        """
        return to_pixels(content, self.square)

    def probabilities(self, squares: Pixels) -> npt.NDArray[np.float64]:
        """Compute the probability of each class, [B, S, S, 3] -> [B, K]."""
        logits = self._student.logits(squares) / self._temperature
        return probabilities(logits, by_class=self.threshold is not None)

    def predictions(self, found: npt.NDArray[np.float64], *, top: int) -> list[Prediction]:
        """Say what probabilities [B, K] mean: the `top` most probable classes, and where there are tags the answer."""
        return prediction.predictions(found, self.labels, self.tags, top=top, threshold=self.threshold)
