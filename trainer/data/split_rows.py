"""The rows of a split: of one that is here whole, or of a large one in a store, whose files are fetched when one of their images is read.

Such a split has as many rows in each file as the sampler has samples in a shard, so that a window of a training is some of its files, and
an index of its labels and keys (`dataset_schema.index_file`), which is all that a training needs of it before its first step.

Shapes: N images in a split.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol, overload

import datasets  # type: ignore[import-untyped]  # the package ships no types
import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute

from trainer.data.dataset_schema import ROWS_IN_FILE, SplitName
from trainer.data.sampler import WINDOW
from trainer.io import artifacts
from trainer.io.artifacts import Artifact
from trainer.io.errors import ArtifactError
from trainer.io.storage import cache

Labels = npt.NDArray[np.int64]
Keys = npt.NDArray[np.uint64]

OPEN_FILES = 3 * WINDOW
"""Files that a process keeps mapped: those of a window, which may begin and end within one, of labeled and of unlabeled images."""
_KEYS_TOGETHER = 2**16  # keys that are converted at a time


class Rows(Protocol):
    """The rows of a split."""

    labels: Labels
    """Of each image: index of its class, or of its set of classes; -1 where it has none, [N]."""
    keys: Keys
    """The first 8 bytes of each image's content key, [N]."""

    def encoded(self, index: int) -> pa.Buffer:
        """Return the encoded file of an image."""

    def texts(self, column: str) -> Sequence[str]:
        """Return a column of texts, which is read on demand, [N]."""

    def first(self, count: int) -> Rows:
        """Return the first `count` rows."""


class TableRows:
    """The rows of a table that is mapped into memory whole."""

    def __init__(self, table: datasets.Dataset) -> None:
        table.data.table.validate(full=True)  # an offset in a damaged file could lead to any memory
        self._table = table
        self._files = _images(table.data)
        self.labels: Labels = table.data.column("label").to_numpy()
        self.keys = _first_bytes(table.data.column("key"))

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_files": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__ |= state
        self._files = _images(self._table.data)

    def encoded(self, index: int) -> pa.Buffer:
        return self._files[index].as_buffer()

    def texts(self, column: str) -> Sequence[str]:
        texts: Sequence[str] = self._table[column]
        return texts

    def first(self, count: int) -> TableRows:
        return TableRows(self._table.select(range(count)))


class FetchedRows:
    """The rows of a large split in a store.

    A process that reads an image whose file is not on this machine fetches the file, checks it, and keeps it mapped until it has read from
    `OPEN_FILES` others. Reading raises an `ArtifactError` where a file is missing or not as it was made, and what `artifacts.read` raises.
    """

    def __init__(self, uri: str, dataset: Artifact, split: SplitName, index: Path, *, most: int | None = None) -> None:
        """Open the index, a local file that was checked; a `ValueError` if it does not fit the data set's files.

        `most`: the first rows alone.
        """
        self._uri, self._dataset, self._split, self._index, self._most = uri, dataset, split, index, most
        self._names = sorted(name for name in dataset.files if name.startswith(f"{split}/") and name.endswith(".arrow"))
        count = self._read_index()
        if len(self._names) != -(-count // self._rows):
            raise ValueError(f"{len(self._names)} files, but an index of {count} rows, {self._rows} in a file")

    def _read_index(self) -> int:
        """Map the labels and keys, and return how many rows the split has."""
        with pa.memory_map(str(self._index)) as source, pa.ipc.open_file(source) as reader:
            table = reader.read_all()
        self._rows = int(table.schema.metadata[ROWS_IN_FILE])
        # Of one chunk, so processes share the pages of the map.
        self.labels: Labels = table["label"].chunk(0).to_numpy()[: self._most]
        self.keys: Keys = table["key"].chunk(0).to_numpy()[: self._most]
        self._open: OrderedDict[int, tuple[Path, pa.Table, pa.ChunkedArray]] = OrderedDict()
        self._lock = threading.RLock()
        return len(table)

    def __getstate__(self) -> dict[str, Any]:
        made_here = ("_rows", "labels", "keys", "_open", "_lock")
        return {name: value for name, value in self.__dict__.items() if name not in made_here}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__ |= state
        self._read_index()

    def encoded(self, index: int) -> pa.Buffer:
        number, row = divmod(index, self._rows)
        return self._opened(number)[2][row].as_buffer()

    def texts(self, column: str) -> Sequence[str]:
        return _Texts(self, column, len(self.labels))

    def text(self, column: str, index: int) -> str:
        number, row = divmod(index, self._rows)
        text: str = self._opened(number)[1][column][row].as_py()
        return text

    def first(self, count: int) -> FetchedRows:
        return FetchedRows(self._uri, self._dataset, self._split, self._index, most=count)

    def numbers(self, rows: range) -> range:
        """Return the numbers of the files that hold these rows."""
        return range(rows.start // self._rows, -(-rows.stop // self._rows))

    def size(self, number: int) -> int:
        """Return the bytes of a file."""
        return self._dataset.files[self._names[number]]["size"]

    def fetch(self, number: int) -> None:
        """Fetch a file, unless it is on this machine."""
        folder = self._folder(number)
        with self._lock:
            self._release(folder)

    def _folder(self, number: int) -> Path:
        return artifacts.checked_files(self._uri, self._dataset, [self._names[number]], is_one_of_many=True)

    def _release(self, folder: Path) -> None:
        if all(folder != used for used, *_ in self._open.values()):
            cache.release(folder)

    def _opened(self, number: int) -> tuple[Path, pa.Table, pa.ChunkedArray]:
        with self._lock:
            if number in self._open:
                self._open.move_to_end(number)
                return self._open[number]
            folder, name = self._folder(number), self._names[number]
            try:
                with pa.memory_map(str(folder / name)) as source, pa.ipc.open_stream(source) as reader:
                    table = reader.read_all()
                table.validate(full=True)  # as in `TableRows`
                images = _images(table)
            except Exception as error:  # Arrow's readers raise nearly anything for a damaged file
                raise ArtifactError(
                    f"dataset {self._uri}: {name} cannot be opened ({error}); prepare it again"
                ) from error
            expected = min(self._rows, len(self.labels) - number * self._rows)
            if len(table) < expected:  # of the first images of a split there may be more
                raise ArtifactError(
                    f"dataset {self._uri}: {name} has {len(table)} rows instead of {expected}; prepare it again"
                )
            self._open[number] = folder, table, images
            while len(self._open) > OPEN_FILES:
                _, (unused, *_) = self._open.popitem(last=False)
                self._release(unused)
            return self._open[number]


class _Texts(Sequence[str]):
    """A column of texts of `FetchedRows`."""

    def __init__(self, rows: FetchedRows, column: str, count: int) -> None:
        self._rows, self._column, self._count = rows, column, count

    def __len__(self) -> int:
        return self._count

    @overload
    def __getitem__(self, place: int) -> str: ...
    @overload
    def __getitem__(self, place: slice) -> Sequence[str]: ...
    def __getitem__(self, place: int | slice) -> str | Sequence[str]:
        if isinstance(place, slice):
            return [self._rows.text(self._column, index) for index in range(*place.indices(self._count))]
        return self._rows.text(self._column, range(self._count)[place])


def _images(table: pa.Table) -> pa.ChunkedArray:
    """Return the image files of a split's table, without a copy."""
    return pyarrow.compute.struct_field(table.column("image"), "bytes")


def _first_bytes(keys: pa.ChunkedArray) -> Keys:
    """Return the first 8 bytes of keys in hexadecimal, [N], in memory that grows with the result alone."""
    result = np.empty(len(keys), dtype=np.uint64)
    first = 0
    for chunk in keys.chunks:
        for start in range(0, len(chunk), _KEYS_TOGETHER):
            part = chunk.slice(start, _KEYS_TOGETHER)
            text = "".join(pyarrow.compute.utf8_slice_codeunits(part, 0, 16).to_pylist())
            if len(text) != 16 * len(part):
                raise ValueError("a content key is shorter than 16 digits")
            result[first : first + len(part)] = np.frombuffer(bytes.fromhex(text), dtype=">u8")
            first += len(part)
    return result
