"""A model with its preprocessing: from photos to a probability for each label, and what these mean.

A photo is processed like the images that the model was measured on: upright 8-bit RGB, a square as `prepare` stores it, then the input.
One difference: `prepare` stores squares as JPEG files unless `data.encoding` is png, and that loss is absent here. The network is an ONNX
file if the student was exported; torch is imported only if it was not.

Shapes: B images, H x W pixels of any size, C channels, S the edge of the square, K labels.
"""

from __future__ import annotations

import base64
import binascii
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
import numpy.typing as npt

from .class_tags import ANSWER, CONFIDENCE, NAMED, TAGS, TOP_LABELS, TOP_PROBABILITIES, ClassTags, Floats, Value
from .preprocessing import BadImageError, Square, from_array, to_pixels, to_square, with_present_names

if TYPE_CHECKING:
    import pandas as pd

    from .onnx_network import Network

Photo: TypeAlias = npt.NDArray[np.generic] | bytes | str | os.PathLike[str]
"""An array [H, W] or [H, W, C] (`preprocessing.from_array`), an image file's bytes, base64 of these, or its path."""
Pixels: TypeAlias = npt.NDArray[np.uint8]

EXPORT_CARD = "card.json"  # in an export: how the ONNX file beside it is fed
TOP_K = "top_k"
"""MLflow's parameter of a prediction: how many of the most probable labels it names, 0 for a column of each."""

_BATCH_SIZE = 128


class BadParameterError(ValueError):
    """An unusable parameter of a prediction; the text has its name, its value and the allowed values."""


@dataclass(frozen=True, kw_only=True)
class Prediction:
    """A model's answer to a photo."""

    labels: Mapping[str, float]  # class -> probability, the most probable first
    answer: str | None = None
    """A class, or a group of the hierarchy; None without tags, or if not even a topmost group is sure enough."""
    confidence: float | None = None  # probability of the answer; None without tags
    attributes: Mapping[str, Value | Sequence[Value]] | None = None
    """Attributes of the answer, or of each named class in their order; None without tags."""
    named: Sequence[str] | None = None
    """Classes with a probability above the threshold, if a photo may have several labels; else None."""


class Predictor:
    """A model on the CPU, in ONNX Runtime, OpenVINO or torch. Methods may be called from several threads."""

    def __init__(self, directory: Path, *, threads: int = 0) -> None:
        """Load an export, or else a model directory; `threads` compute an answer of an ONNX file, 0: one for each core."""
        exported = (directory / EXPORT_CARD).exists()
        card = json.loads((directory / (EXPORT_CARD if exported else "config.json")).read_text(encoding="utf-8"))
        self.labels: tuple[str, ...] = tuple(card["labels"])
        """Name of each class, in the order of the network's outputs."""
        tags = directory / TAGS
        self.tags = ClassTags.of(json.loads(tags.read_text(encoding="utf-8"))) if tags.exists() else None
        """Attributes and hierarchy of the labels, if there are any."""
        self.temperature: float = card.get("temperature") or 1.0  # divisor of the logits; 1 if none was fitted
        self.threshold: float | None = card.get("threshold")
        """Probability above which a label is named, if a photo may have several labels; else None."""
        self.architecture: str = card["architecture"]
        self.variant, self.runtime = card.get("variant", "torch"), "torch"
        self._square = Square(**with_present_names(card["square"]))
        self._network: Network
        if exported:
            from .onnx_network import RUNTIMES, runtime_of  # each backend needs packages that the other does without

            self.runtime = runtime_of(card)
            self._network = RUNTIMES[self.runtime](directory / card["file"], threads=threads)
        else:
            from .torch_network import load_network

            self._network = load_network(directory, card)

    @property
    def size(self) -> int:
        """Edge S of the square that a photo becomes."""
        return self._square.size

    def square(self, content: bytes) -> Pixels:
        """Decode an image file's bytes to a square, uint8 [S, S, 3]; raises a `BadImageError` if it is no image."""
        return to_pixels(content, self._square)

    def of_squares(self, squares: Pixels) -> npt.NDArray[np.float64]:
        """Compute the probability of each label from squares, uint8 [B, S, S, 3] -> [B, K]."""
        return to_probabilities(self._network(squares) / self.temperature, by_class=self.threshold is not None)

    def of_photos(self, images: Photo | Sequence[Photo]) -> npt.NDArray[np.float64]:
        """Compute the probability of each label from photos, [B, K]; takes and raises the same as `table`."""
        photos = _each(images)
        batches = [np.empty((0, len(self.labels)))]
        for start in range(0, len(photos), _BATCH_SIZE):
            batch = enumerate(photos[start : start + _BATCH_SIZE], start)
            batches.append(self.of_squares(np.stack([self._read(index, photo) for index, photo in batch])))
        return np.concatenate(batches)

    def answers(self, found: Floats, *, top: int) -> list[Prediction]:
        """Interpret probabilities [B, K]: the `top` most probable classes, the named classes or the answer, and their attributes."""
        known, order = self._known(found), _best(found, top)
        known = {name: values.tolist() if isinstance(values, np.ndarray) else values for name, values in known.items()}
        fields = (ANSWER, CONFIDENCE) if self.threshold is None else (NAMED,)
        return [
            Prediction(
                labels={self.labels[index]: float(row[index]) for index in best},
                attributes={name: values[image] for name, values in known.items() if name not in fields}
                if self.tags is not None
                else None,
                **{name: known[name][image] for name in fields if name in known},
            )
            for image, (row, best) in enumerate(zip(found, order.tolist(), strict=True))
        ]

    def table(self, images: Photo | Sequence[Photo], *, top_k: int = 0) -> pd.DataFrame:
        """Classify photos of any size.

        Args:
            images: one photo; several in an array [B, H, W, C]; or several of any sizes and kinds in a list or an array of objects [B].
            top_k: how many labels are wanted; 0 for a column of each.

        Returns:
            The probability of each label: B rows, K columns named by the labels; or with `top_k` two columns of lists, `top_labels` and
            `top_probabilities`. With tags, further columns follow: `answer`, `confidence`, and each attribute (`ClassTags.columns`). If a
            photo may have several labels, these are columns of lists: `named`, and each attribute of the named labels.

        Raises:
            BadImageError: one of them is not an image, or cannot be used; it is named, and none is classified.
            BadParameterError: `top_k` is below 0.
        """
        import pandas as pd  # here, because it takes long to import, and a server has no use for it

        if top_k < 0:
            raise BadParameterError(f"{TOP_K}: {top_k}; give how many labels are wanted, or 0 for a column of each")
        found = self.of_photos(images)
        table = pd.DataFrame(found, columns=list(self.labels))
        if top_k:
            order = _best(found, top_k)
            names = [[self.labels[index] for index in row] for row in order.tolist()]
            values = np.take_along_axis(found, order, axis=1).tolist()
            table = pd.DataFrame({TOP_LABELS: names, TOP_PROBABILITIES: values})
        for name, values in self._known(found).items():
            # An array keeps its type; otherwise pandas turns None into NaN, which JSON does not have.
            table[name] = pd.Series(values, dtype=values.dtype) if isinstance(values, np.ndarray) else values
        return table

    def _known(self, found: Floats) -> dict[str, Any]:
        """Look up the meaning of probabilities [B, K]: column -> a value for each image."""
        if self.threshold is None:
            return self.tags.columns(found) if self.tags is not None else {}
        members = [np.flatnonzero(row > self.threshold).tolist() for row in found]
        known = {NAMED: self.labels} | (dict(self.tags.attributes) if self.tags is not None else {})
        return {name: [[values[index] for index in of_image] for of_image in members] for name, values in known.items()}

    def _read(self, index: int, photo: Any) -> Pixels:
        """Make a photo's square, uint8 [S, S, 3]."""
        name = f" ({photo})" if isinstance(photo, os.PathLike) else ""
        try:
            if isinstance(photo, os.PathLike):
                photo = Path(photo).read_bytes()
            elif isinstance(photo, str):
                photo = _from_base64(photo)
            if isinstance(photo, bytes):
                return self.square(photo)
            if isinstance(photo, np.ndarray):
                return np.asarray(to_square(from_array(photo, gray_bits=self._square.gray_bits), self._square))
            kind = type(photo).__name__
            raise BadImageError(f"no image: give an array, the bytes of an image file, or a pathlib.Path, not {kind}")
        except (BadImageError, OSError) as error:
            why = error.strerror if isinstance(error, OSError) else error
            raise BadImageError(f"image {index}{name}: {why}") from error


def _from_base64(text: str) -> bytes:
    """Decode what JSON can hold of a file. Text is never a path: a request over the network could then name any file of the server."""
    try:
        return base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError) as error:
        raise BadImageError(
            f"no image: text must be an image file in base64 ({error}); give the name of a file as a pathlib.Path"
        ) from error


def _each(images: Any) -> Sequence[Any]:
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


def _best(found: Floats, top: int) -> npt.NDArray[np.intp]:
    """Return the indices of the largest probabilities, [B, top]; of equal ones the lower class comes first."""
    return np.argsort(-found, axis=1, kind="stable")[:, :top]


def to_probabilities(logits: npt.NDArray[np.floating], *, by_class: bool = False) -> npt.NDArray[np.float64]:
    """Turn logits into probabilities in double precision, [B, K]: their softmax, or the sigmoid of each if classes are independent."""
    if by_class:
        each: npt.NDArray[np.float64] = (1 + np.tanh(logits.astype(np.float64) / 2)) / 2
        return each
    powers = np.exp(logits.astype(np.float64) - logits.max(axis=1, keepdims=True))
    shares: npt.NDArray[np.float64] = powers / powers.sum(axis=1, keepdims=True)
    return shares
