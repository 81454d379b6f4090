"""Tables in text files, as people and spreadsheets write them: lists of images, attributes and hierarchies of classes.

A table has a line of headings, and commas, semicolons or tabs between its columns. Whatever could be read in two ways is refused with its
line: a quote that swallows lines, a heading that stands twice, text in another encoding than UTF-8.
"""

from __future__ import annotations

import csv
import re
import unicodedata
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from trainer.data.sources.source import read_file
from trainer.io import limits
from trainer.io.errors import DataError, ObjectTooLargeError, StorageError
from trainer.io.local_files import located

_SEPARATORS = {",": "commas", ";": "semicolons", "\t": "tabs"}
_LINE = re.compile(r"[^\r\n]*(?:\r\n|\r|\n)|[^\r\n]+")
_HEAD = 100_000  # characters in which the headings are
_AS_UTF_8 = "save it as UTF-8 text (in a spreadsheet: CSV UTF-8)"
_OTHER_FILES = {
    b"PK\x03\x04": "an Excel workbook or another zip archive",
    b"\xd0\xcf\x11\xe0": "an old Excel workbook",
    b"\x1f\x8b": "a gzip archive",
    b"PAR1": "a Parquet file",
}  # first bytes -> what a file is instead of text


@dataclass(frozen=True, slots=True)
class TableRow:
    """A line of a table."""

    line: int  # number of the row's first line in the file
    cells: Sequence[str]


class TableFile:
    """A table's text, parsed line by line, since a list may have millions."""

    head_is = "its first line must be"

    def __init__(self, name: str, text: str) -> None:
        """`name` begins each message: the setting, or the kind of file, and the file."""
        self.name, self._text = name, text

    @classmethod
    def read(cls, name: str, location: str, limit: int) -> TableFile:
        """Read a file or URI of at most `limit` bytes, without a byte-order mark; a `DataError` if missing, too large, or not UTF-8."""
        return cls(name, _decoded(name, read_table(name, location, limit)))

    @property
    def text(self) -> str:
        """The whole text."""
        return self._text

    @property
    def version(self) -> str:
        """What changes with the content."""
        return self._text

    def where(self, line: int) -> str:
        """Name a line."""
        return f"{self.name}, line {line}"

    @property
    def unread(self) -> Mapping[str, str]:
        """The columns that are not read, since they hold no text: heading -> type."""
        return {}

    @cached_property
    def separator(self) -> str:
        """What separates the columns: a comma, or a semicolon or a tab where the headings have no comma."""
        first = next(iter(self._text[:_HEAD].lstrip().splitlines()), "")
        unquoted = re.sub('"[^"]*"', "", first)
        return next((one for one in _SEPARATORS if one in unquoted), ",")

    @cached_property
    def headings(self) -> Sequence[str]:
        """The names of the columns, without what spreadsheets leave around them; none for an empty file, a `DataError` for equal ones."""
        first = next(self._lines(), TableRow(0, ()))
        return checked_headings(self.name, first.cells)

    def rows(self) -> Iterator[TableRow]:
        """Yield the lines below the headings that are not empty, with stripped cells; a `DataError` for too many cells or odd quotes."""
        lines, width = self._lines(), len(self.headings)
        next(lines, None)
        for row in lines:
            if len(row.cells) > width:
                raise DataError(
                    f"{self.name}, line {row.line}: has {len(row.cells)} values, but there are {width} columns; quote a value that has "
                    f"{_SEPARATORS[self.separator]}, and see whether a quote is missing"
                )
            yield row

    def _lines(self) -> Iterator[TableRow]:
        # Not a StringIO, which takes four bytes a character.
        lines = (match[0] for match in _LINE.finditer(self._text))
        reader = csv.reader(lines, delimiter=self.separator, skipinitialspace=True, strict=True)
        line, width = 1, 0
        try:
            for raw in reader:
                cells = [cell.strip() for cell in raw]
                if any(cells):
                    width = width or len(cells)
                    further = [part for cell in raw for part in cell.splitlines()[1:]]  # of quoted values
                    if any(part.count(self.separator) >= max(width - 1, 1) for part in further):
                        raise DataError(
                            f"{self.name}, line {line}: a quoted value goes on to line {reader.line_num} and holds what look like lines of "
                            "the table, which would be lost; see whether a quote is missing or too many, or write the value in one line"
                        )
                    yield TableRow(line, cells)
                line = reader.line_num + 1
        except csv.Error as error:
            said = "a quote is opened that nothing closes" if "unexpected end" in str(error) else str(error)
            raise DataError(f"{self.name}, line {line}: {said}; mend its quotes, or write the line anew") from error


def read_table(name: str, location: str, limit: int) -> bytes:
    """Read a table's file or URI; a `DataError`, which begins with `name`, if it is missing or has more than `limit` bytes."""
    try:
        return read_file(location, limit)
    except FileNotFoundError as error:
        shown = f"{name.removesuffix(location)}{located(location)}"
        raise DataError(f"{shown}: does not exist; check the path") from error
    except ObjectTooLargeError as error:
        raise DataError(f"{name}: has more than {limit:,} bytes; check the path, or give a part of it") from error
    except (OSError, StorageError) as error:
        raise DataError(f"{name}: cannot be read ({error}); check the path and the right to read it") from error


def checked_headings(name: str, cells: Sequence[str]) -> list[str]:
    """Return the names of columns, without what spreadsheets leave around them; a `DataError` for equal ones."""
    headings = [cell.strip("\ufeff\u200b ") for cell in cells]
    seen: dict[str, str] = {}
    for heading in filter(None, headings):
        if (other := seen.setdefault(folded(heading), heading)) is not heading or headings.count(heading) > 1:
            both = f"are named {heading!r}" if heading == other else f"are named {other!r} and {heading!r}"
            raise DataError(f"{name}: two columns {both}; rename or remove one of them")
    return headings


def folded(heading: str) -> str:
    """Return a heading as headings are compared: without case, compatibility forms, and quotes or spaces around it."""
    return unicodedata.normalize("NFKC", heading).strip(" \t'\"\ufeff\u200b").casefold()


def _decoded(name: str, content: bytes) -> str:
    for first, what in _OTHER_FILES.items():
        if content.startswith(first):
            way = "name it FILE.parquet" if first == b"PAR1" else "export it as CSV in UTF-8"
            raise DataError(f"{name}: is {what}, not text; {way}")
    if content[:2] in (b"\xff\xfe", b"\xfe\xff") or b"\0" in content[:1000]:
        raise DataError(f"{name}: is not UTF-8 but looks like UTF-16; {_AS_UTF_8}")
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line, byte = content.count(b"\n", 0, error.start) + 1, content[error.start]
        raise DataError(
            f"{name}, line {line}: is not UTF-8 (byte 0x{byte:02x}), but probably Latin-1 or Windows-1252; {_AS_UTF_8}, or convert it: "
            "iconv -f WINDOWS-1252 -t UTF-8"
        ) from error


def class_name(where: str, text: str) -> str:
    """Read a class's name as people read it; a `DataError`, which begins with `where`, if it has characters that nobody sees."""
    try:
        return limits.class_name(text)
    except ValueError as error:
        raise DataError(f"{where}: {error}") from error
