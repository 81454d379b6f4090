"""A student with its preprocessing: photos to a probability for each label.

A photo is processed like those that the student was measured on: upright 8-bit RGB, a square as `prepare` stores it, the network's input.
One thing differs: `prepare` stores squares as JPEG files unless `data.encoding` is png, and that loss is absent here. The network is an
ONNX file if the student was exported; torch is imported only if it was not.

Shapes: B images, H x W pixels of any size, C channels, S the edge of the square, K labels.
"""

from __future__ import annotations

import base64
import binascii
import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
import numpy.typing as npt

from .class_tags import NAMED, TAGS, TOP_LABELS, TOP_PROBABILITIES, ClassTags
from .preprocessing import BadImageError, Square, from_array, to_pixels, to_square, with_present_names

if TYPE_CHECKING:
    import pandas as pd

    from .onnx_network import OnnxNetwork
    from .torch_network import TorchNetwork

Photo: TypeAlias = npt.NDArray[np.generic] | bytes | str | os.PathLike[str]
"""An array [H, W] or [H, W, C] (`preprocessing.from_array`), an image file's bytes, those in base64, or its path."""

EXPORT_CARD = "card.json"
"""In what `export` has made: how the ONNX file beside it is fed."""
TOP_K = "top_k"
"""MLflow's parameter of a prediction: how many of the most probable labels it names, 0 for a column of each."""

_BATCH_SIZE = 128


class BadParameterError(ValueError):
    """A parameter of a prediction that cannot be used; its text names the parameter, its value and what it may be."""


class ServedStudent:
    """A student with its preprocessing."""

    def __init__(self, directory: Path) -> None:
        """Load what `export` has made, or else a model directory."""
        exported = (directory / EXPORT_CARD).exists()
        card = json.loads((directory / (EXPORT_CARD if exported else "config.json")).read_text(encoding="utf-8"))
        self.labels: list[str] = card["labels"]
        tags = directory / TAGS
        self.tags = ClassTags.of(json.loads(tags.read_text(encoding="utf-8"))) if tags.exists() else None
        """Attributes and hierarchy of the labels, if the registered model has any."""
        self.temperature: float = card.get("temperature") or 1.0
        """By which the logits are divided for probabilities; 1 where none was fitted."""
        self.threshold: float | None = card.get("threshold")
        """Probability above which a label is named, where a photo may have several; None where it has one."""
        self._square = Square(**with_present_names(card["square"]))
        self._network: OnnxNetwork | TorchNetwork
        if exported:
            from .onnx_network import RUNTIMES, runtime_of  # either needs packages that the other one does without

            self._network = RUNTIMES[runtime_of(card)](directory / card["file"])
        else:
            from .torch_network import TorchNetwork

            self._network = TorchNetwork(directory, card)

    def get_raw_model(self) -> ServedStudent:
        """Return the student without MLflow's checks, for `mlflow.pyfunc.PyFuncModel.get_raw_model`: its `predict` takes lists too."""
        return self

    def predict(self, images: Photo | Sequence[Photo], params: Mapping[str, Any] | None = None) -> pd.DataFrame:
        """Classify photos of any size.

        Args:
            images: one photo; several in an array [B, H, W, C]; or several of any sizes and kinds in a list or an array of objects [B].
            params: `top_k`, if not every label is wanted.

        Returns:
            The probability of each label: B rows, K columns named by the labels; or with `top_k` two columns of lists, `top_labels` and
            `top_probabilities`. Where the model has tags, further columns follow: `answer`, `confidence`, and each attribute
            (`ClassTags.columns`). Where a photo may have several labels these are columns of lists: `named`, and each attribute of those
            labels.

        Raises:
            BadImageError: one of them is not an image, or cannot be used; it is named, and none is classified.
            BadParameterError: `top_k` is below 0.
        """
        import pandas as pd  # here, because it takes long to import, and not every user of this module predicts

        top_k = int((params or {}).get(TOP_K, 0))
        if top_k < 0:
            raise BadParameterError(f"{TOP_K}: {top_k}; give how many labels are wanted, or 0 for a column of each")
        table = self.probabilities(images)
        known: Mapping[str, Any] = {}
        if self.threshold is not None:
            members = [np.flatnonzero(row > self.threshold).tolist() for row in table.to_numpy()]
            known = {NAMED: [[self.labels[index] for index in of_image] for of_image in members]}
            known |= self.tags.of_classes(members) if self.tags is not None else {}
        elif self.tags is not None:
            # With the type of their own; else None would become NaN, which JSON does not have.
            columns = self.tags.columns(table.to_numpy())
            known = {name: pd.Series(values, dtype=values.dtype) for name, values in columns.items()}
        if top_k:
            best = np.argsort(-table.to_numpy(), axis=1, kind="stable")[:, :top_k]
            values = np.take_along_axis(table.to_numpy(), best, axis=1)
            names = [[self.labels[index] for index in row] for row in best.tolist()]
            table = pd.DataFrame({TOP_LABELS: names, TOP_PROBABILITIES: values.tolist()})
        for name, values in known.items():
            table[name] = values
        return table

    def probabilities(self, images: Photo | Sequence[Photo]) -> pd.DataFrame:
        """Compute the probability of each label alone; takes and raises the same as `predict`."""
        import pandas as pd  # likewise

        photos = _each(images)
        batches = [np.empty((0, len(self.labels)))]
        for start in range(0, len(photos), _BATCH_SIZE):
            batch = enumerate(photos[start : start + _BATCH_SIZE], start)
            squares = np.stack([self._read(index, photo) for index, photo in batch])
            logits = self._network.logits(squares) / self.temperature
            batches.append(probabilities(logits, by_class=self.threshold is not None))
        return pd.DataFrame(np.concatenate(batches), columns=self.labels)

    def square(self, content: bytes) -> npt.NDArray[np.uint8]:
        """Make a photo's square of an image file's bytes: uint8 [S, S, 3]; raises a `BadImageError` where it is no image."""
        return to_pixels(content, self._square)

    def _read(self, index: int, photo: Any) -> npt.NDArray[np.uint8]:
        """Make a photo's square, uint8 [S, S, 3]."""
        name = f" ({photo})" if isinstance(photo, os.PathLike) else ""
        try:
            if isinstance(photo, os.PathLike):
                photo = Path(photo).read_bytes()
            elif isinstance(photo, str):
                photo = _from_base64(photo)
            if isinstance(photo, bytes):
                return to_pixels(photo, self._square)
            if isinstance(photo, np.ndarray):
                return np.asarray(to_square(from_array(photo, gray_bits=self._square.gray_bits), self._square))
            kind = type(photo).__name__
            raise BadImageError(f"no image: give an array, the bytes of an image file, or a pathlib.Path, not {kind}")
        except (BadImageError, OSError) as error:
            said = error.strerror if isinstance(error, OSError) else error
            raise BadImageError(f"image {index}{name}: {said}") from error


def _from_base64(text: str) -> bytes:
    """Decode what JSON can hold of a file. Text is never a path: a request over the network could then name any file of the server."""
    try:
        return base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError) as error:
        raise BadImageError(
            f"no image: text must be an image file in base64 ({error}); give the name of a file as a pathlib.Path"
        ) from error


def _each(images: Any) -> Sequence[Any]:
    """Separate the photos."""
    if isinstance(images, list | tuple):
        return images
    if not isinstance(images, np.ndarray):
        return [images]
    if images.dtype.kind in "OSU" and images.ndim == 1:
        return [one.item() if isinstance(one, np.generic) else one for one in images]
    if images.dtype == object:  # from MLflow's server for numbers in JSON
        try:
            images = np.array(images.tolist())
        except ValueError as error:
            raise BadImageError(
                "images of different shapes in one array: give a list, or an array of objects [B]"
            ) from error
    if images.ndim == 4:
        return list(images)
    if images.ndim in (2, 3):
        return [images]
    raise BadImageError(
        f"an array of the shape {images.shape} and type {images.dtype} holds no images: give one image as [H, W] or [H, W, C], several "
        "as [B, H, W, C], or several of different shapes as a list or an array of objects"
    )


def probabilities(logits: npt.NDArray[np.floating], *, by_class: bool = False) -> npt.NDArray[np.float64]:
    """Turn logits into probabilities, [B, K]: their softmax, or the sigmoid of each where a class says nothing of the others."""
    if by_class:
        each: npt.NDArray[np.float64] = (1 + np.tanh(logits.astype(np.float64) / 2)) / 2
        return each
    powers = np.exp(logits.astype(np.float64) - logits.max(axis=1, keepdims=True))
    shares: npt.NDArray[np.float64] = powers / powers.sum(axis=1, keepdims=True)
    return shares
