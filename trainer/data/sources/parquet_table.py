"""Lists of images in Parquet files, with the same columns as those in text files; read a few thousand rows at a time."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from trainer.data.sources.table_file import TableFile, TableRow, checked_headings, read_table
from trainer.io import limits
from trainer.io.errors import DataError

ENDINGS = (".parquet", ".pq")
_TOGETHER = 4096  # rows
_GROUP_BYTES = 2**30  # of a row group, unpacked
_DAMAGED = (pa.ArrowException, OSError, UnicodeDecodeError)  # what pyarrow raises
_CELL_CHARACTERS = 131_072  # as in a CSV file


class ParquetTable(TableFile):
    """A Parquet file's columns of text and of whole numbers; the others, such as embeddings, are not read."""

    head_is = "its columns must be"

    def __init__(self, name: str, content: bytes) -> None:
        """`name` begins each message."""
        super().__init__(name, "")
        self._content = content
        try:
            self._file = pq.ParquetFile(pa.BufferReader(content))
            self._schema = self._file.schema_arrow
            self._names: list[str] = self._schema.names
        except _DAMAGED as error:
            raise DataError(f"{name}: is no whole Parquet file ({_first(error)}); write or copy it again") from error

    @classmethod
    def read(cls, name: str, location: str, limit: int) -> ParquetTable:
        """Read a file or URI of at most `limit` bytes; a `DataError` if missing, too large, or no Parquet file."""
        return cls(name, read_table(name, location, limit))

    @property
    def version(self) -> str:
        """What changes with the content."""
        return hashlib.sha256(self._content).hexdigest()

    def where(self, line: int) -> str:
        """Name a row, the first of which is 1."""
        return f"{self.name}, row {line}"

    @cached_property
    def headings(self) -> Sequence[str]:
        """The names of the columns; a `DataError` for equal ones."""
        return checked_headings(self.name, self._names)

    def rows(self) -> Iterator[TableRow]:
        """Yield the rows, with stripped cells; empty for null, and for what is neither text nor a whole number."""
        texts = [place for place, field in enumerate(self._schema) if _is_read(field.type)]
        self._check_sizes()
        names, width, number = [self._names[place] for place in texts], len(self.headings), 0
        try:
            for batch in self._file.iter_batches(_TOGETHER, columns=names):
                columns = [self._cells(batch.column(name), name, number) for name in names]
                for cells in zip(*columns, strict=True):
                    number += 1
                    row = [""] * width
                    for place, cell in zip(texts, cells, strict=True):
                        row[place] = cell
                    yield TableRow(number, row)
        except (pa.ArrowException, OSError) as error:
            raise DataError(
                f"{self.where(number + 1)}: cannot be read ({_first(error)}); write the file again"
            ) from error

    @property
    def unread(self) -> Mapping[str, str]:
        """The columns that hold neither text nor whole numbers: heading -> type."""
        kinds = zip(self.headings, self._schema.types, strict=True)
        return {heading: str(kind) for heading, kind in kinds if not _is_read(kind)}

    def _check_sizes(self) -> None:
        # Not column by column: pyarrow ends the process at some damaged ones.
        for group in range(self._file.metadata.num_row_groups):
            size = self._file.metadata.row_group(group).total_byte_size
            if size > _GROUP_BYTES:
                raise DataError(
                    f"{self.name}: has a row group of {size:,} bytes, more than {_GROUP_BYTES:,}; write it with smaller row groups"
                )

    def _cells(self, column: Any, name: str, before: int) -> list[str]:
        if pa.types.is_dictionary(column.type):
            column = column.cast(column.type.value_type)
        if pa.types.is_null(column.type):
            return [""] * len(column)
        if pa.types.is_string_view(column.type):
            column = column.cast(pa.large_string())
        if not pa.types.is_integer(column.type) and len(column):
            longest = pc.max(pc.binary_length(column)).as_py() or 0
            if longest > _CELL_CHARACTERS:
                raise DataError(
                    f"{self.where(before + 1)} or one of the {_TOGETHER:,} from there: column {limits.cut(name, 100)!r} has a value of "
                    f"{longest:,} bytes, more than {_CELL_CHARACTERS:,}; shorten it"
                )
        return ["" if value is None else str(value).strip() for value in column.to_pylist()]


def _is_read(kind: Any) -> bool:
    inner = kind.value_type if pa.types.is_dictionary(kind) else kind
    is_text = pa.types.is_string(inner) or pa.types.is_large_string(inner) or pa.types.is_string_view(inner)
    return bool(is_text or pa.types.is_integer(inner) or pa.types.is_null(inner))


def _first(error: BaseException) -> str:
    return limits.cut(limits.printable_name(str(error).splitlines()[0] if str(error) else type(error).__name__), 200)
