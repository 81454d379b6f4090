"""The prepared data set, as trainings and evaluations read it (`dataset_schema` describes its files).

The files of a split are fetched and checked when it is opened, so that a stage which reads little of a large data set fetches little; of
a large split to learn from each is when one of its images is read (`split_rows`).

A small split is decoded once into one tensor, so that a read is an index; a large one is memory-mapped and decoded at each read,
from the map's pages straight into the batch: JPEG by simplejpeg (libjpeg-turbo, and at a half, quarter or eighth of its size where that
is enough), others by Pillow. Images that are stored as their pixels are copied from the map.

Shapes: N images in a split, B images in a batch, S pixels along an edge.
"""

from __future__ import annotations

import copy
import io
import math
import os
import sys
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.context import get_spawning_popen
from pathlib import Path
from typing import Any

import datasets  # type: ignore[import-untyped]  # the package ships no types
import numpy as np
import numpy.typing as npt
import PIL
import simplejpeg
import torch
from PIL import Image
from torch import Tensor
from torch.utils.data import get_worker_info

from trainer.data.batch_memory import SharedBytes, empty_images
from trainer.data.dataset_schema import (
    DESCRIPTION,
    EXAMPLES,
    SPLITS,
    TEST_EDGES,
    DatasetDescription,
    SplitName,
    index_file,
)
from trainer.data.sampler import SHARD
from trainer.data.split_rows import FetchedRows, Rows, TableRows
from trainer.io import artifacts, limits, storage
from trainer.io.artifacts import Artifact
from trainer.io.errors import ArtifactError, DataError, StorageError
from trainer.io.host import usable_cores, usable_memory
from trainer.models.served_student.class_tags import TAGS, ClassTags, columns_of_predictions
from trainer.models.served_student.preprocessing import DEEPEST, BadImageError, Square, is_jpeg, reason

Pixels = npt.NDArray[np.uint8]
Targets = npt.NDArray[np.uint8]

_ALONE = 512
"""Images up to which one thread decodes them."""
SAMPLED_FILES = 8
"""Files of a split that `PreparedDataset.sample` reads, at most; prepare writes about 500 MB into each."""
IN_MEMORY_BYTES = 512 * 1024**2  # a split is kept decoded up to this size, in each process that reads it
_MEMORY_SHARE = 1 / 8
"""Of the container's memory that decoded images of its training processes take, where a device makes the views. On a CPU the size above
decides alone: views of images that are decoded at each read have other bits."""


class Split:
    """The images of one split, read by index.

    It is cheap to send to a loader process. One that is started after `load` shares the decoded images on Linux; else they are left behind.
    """

    def __init__(self, rows: Rows, name: SplitName, image_size: int, *, raw: bool = False, run: int = 1) -> None:
        self.name = name
        self.run = run  # neighbors that a sample of the images may take together, as `evenly_spaced` does
        self.image_size = image_size
        self.raw = raw  # whether images are stored as their pixels
        self.rows = rows
        self._memory: SharedBytes | None = None
        self._decoded: Tensor | None = None  # uint8 [N, S, S, 3]; in that memory, where there is such
        self.targets: Targets | None = None  # from `PreparedDataset.targets`

    def __len__(self) -> int:
        return len(self.labels)

    @property
    def labels(self) -> npt.NDArray[np.int64]:
        """Of each image: index of its class, or of its set of classes; -1 where it has none, [N]."""
        return self.rows.labels

    @property
    def keys(self) -> npt.NDArray[np.uint64]:
        """The first 8 bytes of each image's content key, [N]."""
        return self.rows.keys

    def __getstate__(self) -> dict[str, Any]:
        memory = self._memory if get_spawning_popen() is not None else None  # shared memory cannot be sent later
        return self.__dict__ | {"_memory": memory, "_decoded": None, "targets": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__ |= state
        if self._memory is not None:
            self._decoded = self._memory.tensor.view(len(self), self.image_size, self.image_size, 3)

    def first(self, count: int) -> Split:
        """Return a split of the first `count` images, or of all where there are no more."""
        part = copy.copy(self)
        part.rows = self.rows.first(min(count, len(self)))
        part._memory, part._decoded = None, None
        part.targets = self.targets  # which a copy leaves behind, as `__getstate__` says
        return part

    @property
    def names(self) -> Sequence[str]:
        """The content key of each image, SHA-256 as hexadecimal text; read on demand, [N]."""
        return self.rows.texts("key")

    @property
    def sources(self) -> Sequence[str]:
        """The name that each image had in its source; read on demand, [N]."""
        return self.rows.texts("source")

    @property
    def wanted(self) -> Targets:
        """Whether each image is of each class, 1 or 0, where images may have several labels; of any set where one has none, [N, K]."""
        assert self.targets is not None, "an image of this data set has one label"
        wanted: Targets = self.targets[self.labels.clip(min=0)]
        return wanted

    @property
    def in_memory(self) -> bool:
        """Whether the split is small enough to be kept decoded, or to stay in the system's page cache where it is stored so."""
        return self._bytes <= IN_MEMORY_BYTES

    @property
    def decoded(self) -> bool:
        """Whether a read decodes nothing."""
        return self.raw or self.in_memory

    @property
    def loaded(self) -> bool:
        """Whether its images lie decoded in memory now."""
        return self._decoded is not None

    @property
    def _bytes(self) -> int:
        return len(self) * 3 * self.image_size**2

    def load(self, limit: int = 0) -> None:
        """Decode a split of up to `limit` bytes, or a small one, now instead of at the first read; a larger one stays on the disk."""
        if self._decoded is None and not self.raw and (self.in_memory or self._bytes <= limit):
            shape = (len(self), self.image_size, self.image_size, 3)
            if sys.platform == "linux" and len(self):
                memory = SharedBytes(math.prod(shape))
                self._decoded = self._decode_into(memory.tensor.view(shape), range(len(self)))
                self._memory = memory
            else:
                self._decoded = self._decode_into(torch.empty(shape, dtype=torch.uint8), range(len(self)))

    def read(self, indices: Sequence[int]) -> Tensor:
        """Read the images at `indices`: uint8 [B, 3, S, S], the channels innermost in memory; a `DataError` if one cannot be decoded."""
        self.load()
        images = empty_images(len(indices), self.image_size)
        if self._decoded is None:
            return self._decode_into(images, indices).permute(0, 3, 1, 2)
        torch.index_select(self._decoded, 0, torch.as_tensor(indices, dtype=torch.int64), out=images)
        return images.permute(0, 3, 1, 2)

    def picture(self, index: int, *, shrink: int = 1) -> Tensor:
        """Read the image at `index`, which must not be changed: uint8 [3, E, E], the channels innermost in memory.

        E is S, or `S / shrink` rounded up where a JPEG is decoded smaller (`decode_square`). A `DataError` if it cannot be decoded.
        """
        self.load()
        pixels = torch.from_numpy(self._decode(index, shrink=shrink)) if self._decoded is None else self._decoded[index]
        return pixels.permute(2, 0, 1)

    def encoded(self, index: int) -> memoryview:
        """Return the encoded file of the image at `index` (0 <= index < N), a view of the memory-mapped data set."""
        return memoryview(self.rows.encoded(index)).cast("B")

    def _decode_into(self, images: Tensor, indices: Sequence[int]) -> Tensor:
        """Decode the images at `indices` into `images`, uint8 [B, S, S, 3]."""
        rows = images.numpy()
        if len(indices) <= _ALONE or get_worker_info() is not None:
            for row, index in zip(rows, indices, strict=True):
                self._decode(int(index), out=row)
        else:  # decoders release the interpreter's lock
            with ThreadPoolExecutor(usable_cores()) as threads:
                for _ in threads.map(lambda row, index: self._decode(int(index), out=row), rows, indices):
                    pass
        return images

    def _decode(self, index: int, *, out: Pixels | None = None, shrink: int = 1) -> Pixels:
        try:
            if self.raw:
                return _copy_square(self.encoded(index), self.image_size, out)
            return decode_square(self.encoded(index), self.image_size, out=out, shrink=shrink)
        except BadImageError as error:
            raise DataError(
                f"image {self.names[index]} of split {self.name}: {error}; prepare the data set again"
            ) from error


def memory_share() -> int:
    """Return the bytes of decoded images that this training process may keep, beside the others of its machine."""
    return int(_MEMORY_SHARE * usable_memory()) // int(os.environ.get("LOCAL_WORLD_SIZE", "1"))


def _copy_square(stored: memoryview, size: int, out: Pixels | None) -> Pixels:
    """Copy pixels as they are stored into `out`, or into a new array: RGB uint8 [S, S, 3]; a `BadImageError` if there are not so many."""
    if len(stored) != 3 * size**2:
        raise BadImageError(f"{len(stored)} bytes instead of {size} x {size} pixels")
    pixels = np.frombuffer(stored, dtype=np.uint8).reshape(size, size, 3)
    if out is None:
        return pixels.copy()
    out[:] = pixels
    return out


def decode_square(encoded: bytes | memoryview, size: int, *, out: Pixels | None = None, shrink: int = 1) -> Pixels:
    """Decode a stored square into `out`, or into a new array: RGB uint8 [E, E, 3].

    A JPEG is decoded at 1/`shrink` (1, 2, 4 or 8) of its size, from its DCT's lower frequencies: E is `size / shrink` rounded up; others
    keep E = `size`. With color at half the resolution (`fast-jpeg`) it is decoded by the fast approximations. A `BadImageError` if it
    cannot be decoded, or is not a square of this size.
    """
    jpeg = is_jpeg(encoded)
    edge = -(-size // shrink) if jpeg else size
    try:
        if jpeg:  # at the smallest scale that has at least `edge` pixels
            height, width, _, sampling = simplejpeg.decode_jpeg_header(encoded)
            if out is None:  # where it is given, it bounds the decoded size
                _check_square(width, height, size)
            fast = sampling == "420"
            pixels: Pixels = simplejpeg.decode_jpeg(
                encoded, fastdct=fast, fastupsample=fast, min_height=edge, min_width=edge, buffer=out
            )
        else:
            with Image.open(io.BytesIO(encoded), formats=["PNG"]) as image:
                _check_square(*image.size, size)
                pixels = np.array(image.convert("RGB"))
    except BadImageError:
        raise
    except Exception as error:  # decoders raise nearly anything for a damaged file
        raise BadImageError(reason(error)) from error
    if pixels.shape != (edge, edge, 3):
        raise BadImageError(f"{pixels.shape[1]} x {pixels.shape[0]} pixels instead of {edge} x {edge}")
    if out is None:
        return pixels
    if not jpeg:
        out[:] = pixels
    return out


def _check_square(width: int, height: int, size: int) -> None:
    if (width, height) != (size, size):
        raise BadImageError(f"{width} x {height} pixels instead of {size} x {size}")


class PreparedDataset:
    """A prepared data set: four splits and what they have in common."""

    def __init__(
        self, uri: str | Path, artifact: Artifact, description: DatasetDescription, tags: ClassTags | None = None
    ) -> None:
        self.fingerprint = artifact.fingerprint
        self.classes = description.classes
        self.targets: Targets | None = None
        """Where an image may have several labels: whether each class is one of each set of labels, 1 or 0, [sets, K]; an image's label is
        then the index of its set. None where the label is that of its class."""
        if description.label_sets is not None:
            self.targets = np.zeros((len(description.label_sets), len(description.classes)), dtype=np.uint8)
            for row, members in zip(self.targets, description.label_sets, strict=True):
                row[list(members)] = 1
        self.image_size = description.image_size
        self.tags = tags  # attributes and hierarchy of the classes; None where `prepare` was given neither
        self._uri, self._artifact, self._images, self._raw = uri, artifact, description.images, description.raw
        self._directories: dict[
            SplitName, Path
        ] = {}  # split -> the directory that holds its folder, once it is checked
        self._most: int | None = None

    def first(self, count: int) -> PreparedDataset:
        """Return the data set with the first `count` images of each split only."""
        part = copy.copy(self)
        part._most = count
        return part

    @property
    def hierarchy(self) -> ClassTags | None:
        """The tags, if the classes have a hierarchy."""
        return self.tags if self.tags is not None and self.tags.parents else None

    @property
    def square(self) -> Square:
        """How an original became a stored image; an `ArtifactError` if the settings that made the data set lack it."""
        try:
            settings = self._artifact.settings
            # Not recorded where it is auto, which takes them all.
            bits = settings.get("gray_bits", settings.get("grey_bits", DEEPEST))
            return Square(fit=settings["fit"], size=self.image_size, max_pixels=settings["max_pixels"], gray_bits=bits)
        except (KeyError, ValueError) as error:
            raise ArtifactError(
                f"dataset {self._artifact.path}: its manifest does not say how images became squares ({error!r}); prepare it again"
            ) from error

    def decoder_name(self) -> str:
        """Name the decoder of the stored images, such as `simplejpeg 1.9.0`: another one may give slightly different pixels."""
        first = next((split for split in map(self.split, SPLITS) if len(split)), None)
        if first is None:
            return "none"
        if first.raw:
            return "stored pixels"
        return f"simplejpeg {simplejpeg.__version__}" if is_jpeg(first.encoded(0)) else f"pillow {PIL.__version__}"

    def training_splits(self, *, unlabeled: bool) -> list[Split]:
        """Return the labeled images to learn from, followed by those without labels if `unlabeled`; raises as `split`."""
        return [self.split("train"), *([self.split("unlabeled")] if unlabeled else [])]

    def example(self) -> Tensor:
        """Read the first test image, uint8 [1, 3, S, S], from a file of its own where `prepare` has written one; raises as `split`."""
        name = next((file for file in EXAMPLES if file in self._artifact.files), None)
        if name is None:  # an earlier version prepared it
            return self.split("test").read([0])
        file = artifacts.checked_files(self._uri, self._artifact, [name]) / name
        try:
            pixels = decode_square(storage.read_limited(file, limits.IMAGE_BYTES), self.image_size)
        except (BadImageError, StorageError) as error:
            raise ArtifactError(f"dataset {file.parent}: {name} cannot be read ({error}); prepare it again") from error
        return torch.from_numpy(pixels).permute(2, 0, 1)[None]

    def test_edges(self) -> npt.NDArray[np.int64] | None:
        """Read the shorter edge of each test image's original in pixels, [N]; None where an earlier version prepared them."""
        if TEST_EDGES not in self._artifact.files:
            return None
        file = artifacts.checked_files(self._uri, self._artifact, [TEST_EDGES]) / TEST_EDGES
        return np.array(storage.read_json(file)[: self._most], dtype=np.int64)

    def fetch(self, *splits: SplitName) -> None:
        """Fetch and check these splits now, of a large one its index; others are when they are opened."""
        for name in splits:
            if name not in self._directories:
                files = [file for file in self._artifact.files if file.startswith(f"{name}/")]
                if self._is_fetched_in_parts(name):
                    files = [index_file(name)]
                self._directories[name] = artifacts.checked_files(self._uri, self._artifact, files)

    def _is_fetched_in_parts(self, name: SplitName) -> bool:
        return index_file(name) in self._artifact.files and storage.is_remote(self._uri)

    def split(self, name: SplitName) -> Split:
        """Open one split; an `ArtifactError` if a file is missing or damaged, or labels or number of images do not fit `dataset.json`."""
        self.fetch(name)
        directory = self._directories[name]
        split = self._opened(name, directory, lambda: self._rows(name, directory))
        if len(split) != self._images.get(name):
            raise ArtifactError(
                f"dataset {directory}: split {name} has {len(split)} images, but {DESCRIPTION} says "
                f"{self._images.get(name)}; prepare it again"
            )
        return split if self._most is None else split.first(self._most)

    def sample(self, name: SplitName) -> Split:
        """Open images from all over a split for a reader that needs few: those of `SAMPLED_FILES` of its files, all of a small split."""
        files = sorted(file for file in self._artifact.files if file.startswith(f"{name}/") and file.endswith(".arrow"))
        if len(files) <= SAMPLED_FILES:
            return self.split(name)
        chosen = [files[index] for index in np.linspace(0, len(files) - 1, SAMPLED_FILES).round().astype(int)]
        directory = artifacts.checked_files(self._uri, self._artifact, chosen)
        split = self._opened(
            name,
            directory,
            lambda: TableRows(
                datasets.concatenate_datasets([datasets.Dataset.from_file(str(directory / file)) for file in chosen])
            ),
        )
        return split if self._most is None else split.first(self._most)

    def _rows(self, name: SplitName, directory: Path) -> Rows:
        if self._is_fetched_in_parts(name):
            return FetchedRows(str(self._uri), self._artifact, name, directory / index_file(name))
        return TableRows(datasets.load_from_disk(str(directory / name)))

    def _opened(self, name: SplitName, directory: Path, load: Callable[[], Rows]) -> Split:
        try:
            # A split with an index is in the order of a hash, and a sample of it need not touch all of its files.
            run = SHARD if index_file(name) in self._artifact.files else 1
            split = Split(load(), name, self.image_size, raw=self._raw, run=run)
        except Exception as error:  # the readers of `datasets` and of Arrow raise nearly anything for a damaged file
            raise ArtifactError(
                f"dataset {directory}: split {name} cannot be opened ({limits.cut(str(error), 500)}); prepare it again"
            ) from error
        split.targets = self.targets
        return split


def open_dataset(uri: str | Path, splits: Collection[SplitName] = ()) -> PreparedDataset:
    """Open a prepared data set; these splits are fetched and checked now, others when they are opened."""
    artifact = artifacts.read(uri, "dataset", only=(DESCRIPTION, TAGS))
    description = DatasetDescription.read(artifact.path)
    tags = None
    if TAGS in artifact.files:
        try:
            tags = ClassTags.of(storage.read_json(artifact.path / TAGS))
            if tags.labels != description.classes:
                raise ValueError("it has other classes")
            taken = columns_of_predictions(several=description.label_sets is not None) & tags.attributes.keys()
            if taken:  # as prepare refuses it; an earlier version did not
                raise ValueError(f"an attribute is named {min(taken)!r}, as another column of the predictions is")
        except (StorageError, ValueError) as error:
            raise ArtifactError(
                f"dataset {artifact.path}: {TAGS} does not describe its classes ({limits.cut(str(error), 500)}); prepare it again"
            ) from error
    data = PreparedDataset(uri, artifact, description, tags)
    data.fetch(*splits)
    return data
