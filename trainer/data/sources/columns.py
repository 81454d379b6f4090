"""The files and images of a source in columns, so that millions fit into memory: some 15 bytes each beside the letters of the name."""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import fields
from itertools import chain
from pathlib import Path
from typing import Any, Generic, TypeVar, cast, overload

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from trainer.data.dataset_schema import SPLITS
from trainer.io.errors import writing_to

T = TypeVar("T")
S = TypeVar("S")

_TYPES: dict[str, Any] = {
    "name": pa.large_string(),
    "location": pa.large_binary(),
    "state": pa.large_string(),
    "label": pa.int32(),
    "split": pa.int8(),
}
_TEXTS = ("name", "location", "state")
_TOGETHER = 4096  # rows that are read at a time
_IS_NAME = b"\0"  # in place of a location that is the name


class Columns(Sequence[T], Generic[T]):
    """A sequence of `SourceFile` or `Item`, each made when it is read; pickled, it is a list.

    A location is empty where it is `base` and the name, and a NUL where it is the name alone. A column of empty texts takes no memory.
    """

    def __init__(self, kind: Callable[..., T], table: pa.Table, base: str) -> None:
        self.kind, self.table, self.base = kind, table, base

    @classmethod
    def of(cls, kind: Callable[..., T], rows: Iterable[T], base: str = "") -> Columns[T]:
        """Put rows into columns, one by one; `base` is what most locations have before the name."""
        # Each column in a block that grows in place, since many small ones would take twice the memory.
        letters = {name: (bytearray(), array("q", [0])) for name in _TEXTS}
        label, split = array("i"), array("b")
        has_label, count = any(field.name == "label" for field in fields(cast("Any", kind))), 0
        for row in rows:
            count += 1
            for name, (text, ends) in letters.items():
                text.extend(_encoded(row, name, base))
                ends.append(len(text))
            if has_label:
                label.append(cast("Any", row).label)
                split.append(SPLITS.index(cast("Any", row).split))
        columns = {
            name: pa.Array.from_buffers(_TYPES[name], count, [None, pa.py_buffer(ends), pa.py_buffer(text)])
            if text
            else pa.nulls(count)
            for name, (text, ends) in letters.items()
        }
        if has_label:
            columns |= {"label": pa.array(np.asarray(label)), "split": pa.array(np.asarray(split))}
        return cls(kind, pa.table(columns), base)

    def in_order(self) -> Columns[T]:
        """Sort by name; rows of equal names stay in their order."""
        order = pc.sort_indices(self.table["name"]).to_numpy()
        if np.array_equal(order, np.arange(len(order))):
            return self
        return Columns(self.kind, self.table.take(order), self.base)

    def hash_order(self) -> npt.NDArray[np.int64]:
        """Return the rows by a hash of their names, [N], so that neighbors have nothing to do with one another."""
        hashes, start = np.empty(len(self), dtype=np.uint64), 0
        for batch in self.table.select(["name"]).to_batches(max_chunksize=_TOGETHER):
            names = batch.column("name").to_pylist()
            hashes[start : start + len(batch)] = [name_hash(name) for name in names]
            start += len(batch)
        return np.argsort(hashes, kind="stable")

    def where(self, chosen: npt.NDArray[np.bool_]) -> Columns[T]:
        """Return the rows that are chosen, [N]."""
        return Columns(self.kind, self.table.filter(pa.array(chosen)), self.base)

    def column(self, name: str) -> npt.NDArray[Any]:
        """Return a column of numbers, [N]; a split is its number in `SPLITS`."""
        values: npt.NDArray[Any] = self.table[name].to_numpy()
        return values

    def with_columns(self, kind: Callable[..., S], **columns: npt.NDArray[Any]) -> Columns[S]:
        """Return rows of a kind that has these columns of numbers too, [N] each, or other values in them."""
        kept = self.table.drop_columns([name for name in columns if name in self.table.column_names])
        for name, values in columns.items():
            kept = kept.append_column(name, pa.array(values, type=_TYPES[name]))
        return Columns(kind, kept, self.base)

    def mapped(self, file: Path, order: npt.NDArray[np.int64] | None = None) -> Columns[T]:
        """Write the columns, or their rows in an order, to a new file, and map that into memory in their place."""
        with writing_to(file), pa.OSFile(str(file), "wb") as sink, pa.ipc.new_file(sink, self.table.schema) as writer:
            if order is None:
                writer.write_table(self.table)
            else:
                for start in range(0, len(order), _TOGETHER):
                    writer.write_table(self.table.take(order[start : start + _TOGETHER]))
        with pa.memory_map(str(file)) as source, pa.ipc.open_file(source) as reader:
            return Columns(self.kind, reader.read_all(), self.base)

    def __len__(self) -> int:
        return len(self.table)

    def __iter__(self) -> Iterator[T]:
        return chain.from_iterable(map(self._made, self.table.to_batches(max_chunksize=_TOGETHER)))

    @overload
    def __getitem__(self, place: int) -> T: ...
    @overload
    def __getitem__(self, place: slice) -> Columns[T]: ...
    def __getitem__(self, place: int | slice) -> T | Columns[T]:
        if isinstance(place, slice):
            start, stop, step = place.indices(len(self))
            if step != 1:
                raise ValueError(f"columns are cut in steps of 1, not {step}")
            return Columns(self.kind, self.table.slice(start, max(0, stop - start)), self.base)
        (found,) = self._made(self.table.slice(range(len(self))[place], 1))
        return found

    def __reduce__(self) -> tuple[Any, ...]:
        return list, ([*self],)  # since a slice of Arrow's would bring the whole columns along

    def _made(self, rows: Any) -> Iterator[T]:
        values = {name: rows.column(name).to_pylist() for name in rows.schema.names}
        for row in zip(*values.values(), strict=True):
            read = dict(zip(values, row, strict=True))
            name, location = read["name"] or "", read["location"]
            if not location or location == _IS_NAME:
                read["location"] = name if location else self.base + name
            else:
                read["location"] = location.decode("utf-8", "surrogateescape")
            read |= {"name": name, "state": read["state"] or ""}
            if "split" in read:
                read["split"] = SPLITS[read["split"]]
            yield self.kind(**read)


def name_hash(name: str) -> int:
    """Return 64 bits of a hash of a name."""
    return int.from_bytes(hashlib.blake2b(name.encode(), digest_size=8).digest(), "big")


def _encoded(row: Any, name: str, base: str) -> bytes:
    text: str = getattr(row, name)
    if name != "location":
        return text.encode()
    if text == base + row.name:
        return b""
    return _IS_NAME if text == row.name else text.encode("utf-8", "surrogateescape")
