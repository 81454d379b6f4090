"""The prepared data set, as trainings and evaluations read it (`schema` says what is in it).

A small split is decoded once into one tensor, so that a read is an index; a large one is memory-mapped and decoded at each read.
Pillow decodes, as it did in the preparation; torchvision's decoders are deprecated.

Shapes: N images in a split, B images in a batch, S pixels along an edge.
"""

from __future__ import annotations

import io
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import datasets  # type: ignore[import-untyped]  # the package ships no types
import numpy as np
import numpy.typing as npt
import torch
from PIL import Image
from torch import Tensor

from trainer import artifacts
from trainer.data.schema import DESCRIPTION, Description, SplitName
from trainer.errors import ArtifactError, DataError

IN_MEMORY_BYTES = 512 * 1024**2
"""A split whose decoded images take at most this is kept decoded, in each process that reads it."""


class Split:
    """The images of one split, read by index.

    It is cheap to send to a loader process: decoded images are left behind. Processes that are forked after `load` share them.
    """

    def __init__(self, directory: Path, name: SplitName, image_size: int) -> None:
        self.name = name
        self.image_size = image_size
        self._table = datasets.load_from_disk(str(directory / name)).cast_column("image", datasets.Image(decode=False))
        self._images = self._table.select_columns("image")
        self._decoded: Tensor | None = None
        columns = self._table.data
        self.labels: npt.NDArray[np.int64] = columns.column("label").to_numpy()
        """Index of each image's class, or -1 where it has none, [N]."""
        keys = (int(key[:16], 16) for key in columns.column("key").to_pylist())
        self.keys: npt.NDArray[np.uint64] = np.fromiter(keys, dtype=np.uint64, count=len(self))
        """The first 8 bytes of each image's content key, [N]."""

    def __len__(self) -> int:
        return len(self._table)

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_decoded": None}

    @property
    def names(self) -> Sequence[str]:
        """The content key of each image, SHA-256 as hexadecimal text; read on demand, [N]."""
        names: Sequence[str] = self._table["key"]
        return names

    @property
    def sources(self) -> Sequence[str]:
        """The name that each image had in its source; read on demand, [N]."""
        sources: Sequence[str] = self._table["source"]
        return sources

    @property
    def in_memory(self) -> bool:
        """Whether the split is small enough to be kept decoded."""
        return len(self) * 3 * self.image_size**2 <= IN_MEMORY_BYTES

    def load(self) -> None:
        """Decode a small split now instead of at the first read; a large one stays on the disk."""
        if self.in_memory and self._decoded is None:
            self._decoded = self._decode(range(len(self)))

    def read(self, indices: Sequence[int]) -> Tensor:
        """The images at `indices` (0 <= index < N): uint8 [B, 3, S, S].

        Raises:
            DataError: an image can not be decoded.
        """
        self.load()
        if self._decoded is not None:
            return self._decoded[torch.as_tensor(indices, dtype=torch.int64)]
        return self._decode(indices)

    def _decode(self, indices: Sequence[int]) -> Tensor:
        images = torch.empty((len(indices), 3, self.image_size, self.image_size), dtype=torch.uint8)
        if len(indices) == 0:
            return images
        for position, image in enumerate(self._images[[int(index) for index in indices]]["image"]):
            try:
                images[position] = _pixels(image["bytes"])
            except (OSError, RuntimeError) as error:
                name = self.names[int(indices[position])]
                raise DataError(f"image {name} of split {self.name}: {error}; prepare the data set again") from error
        return images


def _pixels(encoded: bytes) -> Tensor:
    """Decode one image: uint8 [3, H, W]."""
    with Image.open(io.BytesIO(encoded)) as image:
        return torch.from_numpy(np.array(image.convert("RGB"))).permute(2, 0, 1)


class PreparedDataset:
    """A prepared data set: four splits and what they have in common."""

    def __init__(self, directory: Path, fingerprint: str, description: Description) -> None:
        self.fingerprint = fingerprint
        self.classes = description.classes
        self.image_size = description.image_size
        self._directory = directory
        self._images = description.images

    def split(self, name: SplitName) -> Split:
        """The images of one split.

        Raises:
            ArtifactError: the split can not be opened, or has not as many images as `dataset.json` says.
        """
        try:
            split = Split(self._directory, name, self.image_size)
        except (OSError, ValueError, KeyError) as error:
            raise ArtifactError(
                f"dataset {self._directory}: split {name} can not be opened ({error}); prepare it again"
            ) from error
        if len(split) != self._images.get(name):
            raise ArtifactError(
                f"dataset {self._directory}: split {name} has {len(split)} images, but {DESCRIPTION} says "
                f"{self._images.get(name)}; prepare it again"
            )
        return split


def open_dataset(uri: str | Path) -> PreparedDataset:
    """Open and check a prepared data set.

    Raises:
        ArtifactError: it is missing, damaged, of another kind or of another schema version.
    """
    artifact = artifacts.read(uri, "dataset")
    return PreparedDataset(artifact.path, artifact.fingerprint, Description.read(artifact.path))
