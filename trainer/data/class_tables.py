"""Tables of classes beside the images: `data.attributes` and `data.hierarchy` become `ClassTags`, each mistake in them a message.

    data.attributes=FILE.csv     the first column names the class, each other one is an attribute: numbers, or texts
    data.hierarchy=FILE.csv      columns class,parent: a line for each class, and for each group that lies in another one
    data.hierarchy=folders       the folders above those of the classes, in an image folder

A file is a path, a URI, or `bundled:NAME.csv`, which a recipe of this package brings. They are small, and checked before the first image is
decoded.
"""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from trainer import limits
from trainer.artifacts import digest
from trainer.base_models import nearest
from trainer.config import BUNDLED, FOLDERS, RECIPES, DataSettings
from trainer.data.sources import SourceListing, expand_home, read_file
from trainer.errors import DataError, ObjectTooLargeError, StorageError
from trainer.served_student.class_tags import (
    ANSWER,
    CONFIDENCE,
    LEVELS,
    ClassTags,
    Value,
    columns_of_predictions,
)

_NUMBER = re.compile(r"[+-]?([0-9]{1,20}(\.[0-9]{0,20})?|\.[0-9]{1,20})([eE][+-]?[0-9]{1,2})?")
"""What is read as a number: never one that is infinite or none."""
_SHOWN = 5  # most names in a message


def read_tags(settings: DataSettings, listing: SourceListing | None) -> ClassTags | None:
    """Read what the settings say of the source's classes; None where they say nothing.

    Where the classes are not known yet (`listing` is None), the tables alone are checked, and nothing comes back.

    Raises:
        DataError: a table cannot be read, contradicts itself, or is not of these classes.
    """
    if not (settings.attributes or settings.hierarchy):
        return None
    classes = listing.classes if listing else None
    for name in {ANSWER, CONFIDENCE} & set(classes or ()):
        raise DataError(
            f"data.source={settings.source}: a class is named {name!r}, as a column of the predictions is where data.attributes or "
            "data.hierarchy is set; rename the class"
        )
    attributes = _attributes(settings, classes) if settings.attributes else {}
    parents: Mapping[str, str] = {}
    if settings.hierarchy and settings.hierarchy != FOLDERS:
        parents = _parents(settings.hierarchy, classes)
    elif settings.hierarchy and listing:
        parents = _parents_by_folders(settings.source, listing)
    return ClassTags(labels=listing.classes, attributes=attributes, parents=parents) if listing else None


def tables_version(settings: DataSettings) -> str:
    """Return a text that changes when the content of a table changes; empty where there is none.

    Raises:
        DataError: a table cannot be read.
    """
    named = {"attributes": settings.attributes, "hierarchy": settings.hierarchy}
    contents = {name: _text(f"data.{name}", file) for name, file in named.items() if file and file != FOLDERS}
    return digest(contents) if contents else ""


# ---------------------------------------------------------------------------------------------------------------------
# Files


def _text(setting: str, file: str) -> str:
    """Read a table; a byte-order mark, as spreadsheets write it, is dropped."""
    name, location = f"{setting}={file}", expand_home(file)
    if file.startswith(BUNDLED):
        known = sorted(path.name for path in RECIPES.glob("*.csv"))
        bundled = file.removeprefix(BUNDLED)
        if bundled not in known:
            raise DataError(
                f"{name}: this package brings no such table{nearest(bundled, known)}; it has {', '.join(known)}"
            )
        location = str(RECIPES / bundled)
    try:
        return read_file(location, limits.TABLE_BYTES).decode("utf-8-sig")
    except FileNotFoundError as error:
        raise DataError(f"{name}: there is no such file; check the path") from error
    except UnicodeDecodeError as error:
        raise DataError(f"{name}: is not UTF-8 ({error}); save it as UTF-8 text") from error
    except ObjectTooLargeError as error:
        raise DataError(
            f"{name}: has more than {limits.TABLE_BYTES:,} bytes, so it is no table of classes; check the path"
        ) from error
    except (OSError, StorageError) as error:
        raise DataError(f"{name}: cannot be read ({error}); check the path and the right to read it") from error


@dataclass(frozen=True, kw_only=True)
class _Line:
    """A line of a table."""

    number: int
    cells: Sequence[str]


def _lines(setting: str, file: str) -> Iterator[_Line]:
    """Yield the lines that are not empty, the headings first, each with as many cells as there are headings."""
    reader = csv.reader(io.StringIO(_text(setting, file), newline=""), strict=True)
    width = 0
    try:
        for row in reader:
            cells = [limits.printable_name(cell.strip()) for cell in row]
            where = f"{setting}={file}, line {reader.line_num}"
            if not any(cells):
                continue
            if not width and len(cells) == 1 and {";", "\t"} & set(row[0]):
                raise DataError(
                    f"{where}: has no comma, and is {limits.cut(cells[0], 200)!r}; save the table with commas between its columns"
                )
            width = width or len(cells)
            if len(cells) != width:
                raise DataError(
                    f"{where}: has {len(cells)} values, but there are {width} columns; quote a value that has commas"
                )
            longest = max(cells, key=len)
            if len(longest) > limits.CELL_CHARACTERS:
                raise DataError(
                    f"{where}: {limits.cut(longest, 40)!r} has more than {limits.CELL_CHARACTERS:,} characters; shorten it"
                )
            yield _Line(number=reader.line_num, cells=cells)
    except csv.Error as error:
        raise DataError(f"{setting}={file}, line {reader.line_num}: {error}; mend the line") from error
    if not width:
        raise DataError(f"{setting}={file}: is empty; give a table with a line of headings and a line for each class")


def _some(names: Sequence[str]) -> str:
    more = f" and {len(names) - _SHOWN:,} more" if len(names) > _SHOWN else ""
    return ", ".join(map(repr, names[:_SHOWN])) + more


def _by_name(table: str, lines: Iterable[_Line], column: int) -> dict[str, _Line]:
    """Return the lines of a table below its headings by the name in one of their columns, which each has once."""
    by_name: dict[str, _Line] = {}
    for line in lines:
        key = line.cells[column]
        if not key:
            raise DataError(f"{table}, line {line.number}: has no class; write its name, or remove the line")
        if first := by_name.get(key):
            raise DataError(
                f"{table}, line {line.number}: {key!r} has a line already, line {first.number}; remove one of them"
            )
        by_name[key] = line
    return by_name


def _check_names(table: str, lines: Mapping[str, _Line], names: Sequence[str], classes: Sequence[str]) -> None:
    """Make sure that these names, of lines, are those of the classes."""
    without = f"{table.partition('=')[0]}="  # a recipe may name a table that is not of the user's images
    known = set(classes)
    unknown = [name for name in names if name not in known]
    if unknown:
        more = f"; nor are {_some(unknown[1:])}" if len(unknown) > 1 else ""
        raise DataError(
            f"{table}, line {lines[unknown[0]].number}: {unknown[0]!r} is no class of the images{nearest(unknown[0], classes)}{more}; "
            f"correct the name, remove the line, or leave the table out ({without})"
        )
    missing = [name for name in classes if name not in lines]
    if missing:
        raise DataError(
            f"{table}: has no line for the class {_some(missing)}; add one for each class, or leave the table out ({without})"
        )


# ---------------------------------------------------------------------------------------------------------------------
# Attributes


def _attributes(settings: DataSettings, classes: Sequence[str] | None) -> dict[str, tuple[Value, ...]]:
    """Read `data.attributes`, whose first column names the class; each other one is an attribute: its values in the order of the classes.

    These have to be those of the table. Where they are not known yet (None), the table alone is checked, and nothing comes back.
    """
    table = f"data.attributes={settings.attributes}"
    first, *lines = _lines("data.attributes", settings.attributes)
    headings = first.cells[1:]
    taken = columns_of_predictions(several=settings.multi_label)
    if not headings:
        raise DataError(
            f"{table}: has one column only; the first one names the class, so add a column for each attribute"
        )
    if len(headings) > limits.TABLE_COLUMNS:
        raise DataError(f"{table}: has {len(headings):,} attributes, more than {limits.TABLE_COLUMNS}; remove some")
    for position, heading in enumerate(headings, start=2):
        if not heading:
            raise DataError(f"{table}: column {position} has no heading; name the attribute")
        if heading in taken:
            raise DataError(
                f"{table}: an attribute is named {heading!r}, as another column of the predictions is; rename it"
            )
        if heading in headings[: position - 2]:
            raise DataError(f"{table}: two columns are named {heading!r}; rename or remove one of them")
    by_name = _by_name(table, lines, 0)
    if not lines:
        raise DataError(f"{table}: has no line below its headings; add one for each class")
    columns = {heading: _column(table, heading, column, lines) for column, heading in enumerate(headings, start=1)}
    if classes is None:
        return {}
    _check_names(table, by_name, [*by_name], classes)
    for heading in headings:
        if heading in classes:
            raise DataError(f"{table}: an attribute is named {heading!r}, as a class is; rename the column")
    return {heading: tuple(values[name] for name in classes) for heading, values in columns.items()}


def _column(table: str, heading: str, column: int, lines: Sequence[_Line]) -> dict[str, Value]:
    """Read an attribute's value of each class."""
    given = [line for line in lines if line.cells[column]]
    numbers = [line for line in given if _NUMBER.fullmatch(line.cells[column])]
    if not given:
        raise DataError(f"{table}: the column {heading!r} is empty; fill it, or remove it")
    if numbers and len(numbers) < len(given):
        text = next(line for line in given if not _NUMBER.fullmatch(line.cells[column]))
        raise DataError(
            f"{table}: the column {heading!r} has numbers, such as {numbers[0].cells[column]!r} in line {numbers[0].number}, and "
            f"texts, such as {limits.cut(text.cells[column], 40)!r} in line {text.number}; write numbers like 1.5 in all lines, or "
            "texts in all, and leave what is not known empty"
        )
    read: dict[str, Value] = {line.cells[0]: None for line in lines}
    return read | {line.cells[0]: float(line.cells[column]) if numbers else line.cells[column] for line in given}


# ---------------------------------------------------------------------------------------------------------------------
# Hierarchy


def _parents(file: str, classes: Sequence[str] | None) -> dict[str, str]:
    """Read `data.hierarchy` as a file: class or group -> the group above it.

    The lowest names have to be the classes; where these are not known yet (None), the table alone is checked.
    """
    table = f"data.hierarchy={file}"
    headings, *lines = _lines("data.hierarchy", file)
    if sorted(headings.cells) != ["class", "parent"]:
        raise DataError(
            f"{table}: its first line must be class,parent, but is {limits.cut(','.join(headings.cells), 200)!r}"
        )
    child, parent = headings.cells.index("class"), headings.cells.index("parent")
    by_name = _by_name(table, lines, child)
    for line in lines:
        if not line.cells[parent]:
            raise DataError(
                f"{table}, line {line.number}: {line.cells[child]!r} has no parent; write the group above it, or remove the line "
                "of a topmost group"
            )
    parents = {name: line.cells[parent] for name, line in by_name.items()}
    for name, line in by_name.items():
        path = [name]
        while path[-1] in parents and len(path) <= LEVELS:
            above = parents[path[-1]]
            if above in path:
                circle = [*path[path.index(above) :], above]
                raise DataError(
                    f"{table}, line {by_name[above].number}: {' lies in '.join(map(repr, circle[: _SHOWN + 1]))}, which "
                    "is a circle; each name stands for one class or group, so give the group another name"
                )
            path.append(above)
        if len(path) > LEVELS:
            raise DataError(
                f"{table}, line {line.number}: {name!r} lies below more than {LEVELS - 1} groups; leave some out"
            )
    if classes is None:
        return parents
    below = {group: name for name, group in reversed(parents.items())}  # the first of each
    for name in classes:
        if name in below:
            raise DataError(
                f"{table}, line {by_name[below[name]].number}: {below[name]!r} lies in {name!r}, which is a class itself; a name "
                "stands for one level only, so give the group another name"
            )
    _check_names(table, by_name, [name for name in parents if name not in below], classes)
    return parents


def _parents_by_folders(source: str, listing: SourceListing) -> dict[str, str]:
    """Return class or group -> the group above it, of the folders above those of the classes."""
    name = f"data.hierarchy={FOLDERS}, data.source={source}"
    parents: dict[str, str] = {}
    folders: dict[str, str] = {}  # name of a group -> its folder
    for label, above in zip(listing.classes, listing.groups, strict=True):
        if not above:
            raise DataError(
                f"{name}: the folder of the class {label!r} lies in no group's; put it into one, or give a table (data.hierarchy=FILE.csv)"
            )
        parts = above.split("/")
        for depth, part in enumerate(parts, start=1):
            folder = "/".join(parts[:depth])
            if part in listing.classes:
                raise DataError(
                    f"{name}: {part!r} is a class and, with {label!r} in it, a group; a name stands for one level only, so rename the "
                    f"folder {folder}, or move its own images into one of their own"
                )
            if folders.setdefault(part, folder) != folder:
                raise DataError(
                    f"{name}: two groups are named {part!r}, {folders[part]} and {folder}; rename one of the folders"
                )
        parents |= dict(zip([*parts[1:], label], parts, strict=True))
    return parents
