"""Tables of classes beside the images: `data.attributes` and `data.hierarchy` become `ClassTags`, each mistake in them a message.

    data.attributes=FILE.csv     the first column names the class, each other one is an attribute: numbers, or texts
    data.hierarchy=FILE.csv      columns class,parent: a line for each class, and for each group that lies in another one
    data.hierarchy=folders       the folders above those of the classes, in an image folder

A file is a path, a URI, or `bundled:NAME.csv`, which a recipe of this package brings. They are small, and checked before the first image is
decoded.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from decimal import Decimal

from trainer.config import BUNDLED, FOLDERS, RECIPES, DataSettings
from trainer.data import sources
from trainer.data.sources import SourceListing, SourceState
from trainer.data.sources.table_file import TableFile, TableRow, class_name, folded
from trainer.io import limits
from trainer.io.artifacts import digest
from trainer.io.base_models import nearest
from trainer.io.errors import DataError
from trainer.io.local_files import with_home
from trainer.models.served_student.class_tags import (
    ANSWER,
    CONFIDENCE,
    LEVELS,
    ClassTags,
    Value,
    columns_of_predictions,
)

logger = logging.getLogger(__name__)

_NUMBER = re.compile(r"-?((0|[1-9][0-9]*)(\.[0-9]+)?|\.[0-9]+)([eE][+-][0-9]{1,3})?")
"""How numbers are written: without zeros or a plus sign in front, or an exponent without a sign, as codes may have them (`0401`, `1E5`)."""
_DIGITS = 15  # a whole number with more is not exact in every program
_LONG = re.compile("[0-9]{8,}")
"""Whole numbers that are codes where all values of a column are: EAN, UPC, telephone numbers, dates."""
_UNKNOWN = frozenset({"nan", "n/a", "na", "none", "null", "nil", "-", "--", "?", "unknown", "inf", "#n/a"})
"""What stands in a cell for a number that is not known."""
_SHOWN = 5  # most names in a message


def read_tags(settings: DataSettings, listing: SourceListing | None) -> ClassTags | None:
    """Read the tables of the source's classes that the settings name; None without tables, and where the classes are not known yet.

    Then (`listing` is None) the tables alone are checked. A `DataError` if one cannot be read, contradicts itself, or has other classes.
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


def source_version(settings: DataSettings) -> str:
    """Return the version in `source_state`."""
    return source_state(settings).version


def source_state(settings: DataSettings) -> SourceState:
    """Return what `data.source` holds; its version changes with these tables too, and is empty where the images' version is unknown."""
    state = sources.source_state(settings.source, outside=settings.outside)
    named = {"attributes": settings.attributes, "hierarchy": settings.hierarchy}
    contents = {name: _table(f"data.{name}", file).text for name, file in named.items() if file and file != FOLDERS}
    return state._replace(version=f"{state.version} {digest(contents)}") if state.version and contents else state


# ---- Files


def _table(setting: str, file: str) -> TableFile:
    name, location = f"{setting}={file}", with_home(file)
    if file.startswith(BUNDLED):
        known = sorted(path.name for path in RECIPES.glob("*.csv"))
        bundled = file.removeprefix(BUNDLED)
        if bundled not in known:
            raise DataError(
                f"{name}: this package brings no such table{nearest(bundled, known)}; it has {', '.join(known)}"
            )
        location = str(RECIPES / bundled)
    return TableFile.read(name, location, limits.TABLE_BYTES)


def _lines(table: TableFile) -> Iterator[TableRow]:
    """Yield the lines below the headings, each with as many cells as headings."""
    width = len(table.headings)
    if not width:
        raise DataError(f"{table.name}: is empty; give a table with a line of headings and a line for each class")
    for row in table.rows():
        where = f"{table.name}, line {row.line}"
        cells = row.cells
        if len(cells) != width:
            raise DataError(f"{where}: has {len(cells)} values, but there are {width} columns; add what is missing")
        longest = max(cells, key=len)
        if len(longest) > limits.CELL_CHARACTERS:
            raise DataError(
                f"{where}: {limits.cut(longest, 40)!r} has more than {limits.CELL_CHARACTERS:,} characters; shorten it"
            )
        yield row


def _some(names: Sequence[str]) -> str:
    more = f" and {len(names) - _SHOWN:,} more" if len(names) > _SHOWN else ""
    return ", ".join(map(repr, names[:_SHOWN])) + more


def _by_name(table: str, lines: Iterable[TableRow], column: int) -> dict[str, TableRow]:
    """Return the lines below the headings by their unique name in a column."""
    by_name: dict[str, TableRow] = {}
    for line in lines:
        where = f"{table}, line {line.line}"
        key = class_name(where, line.cells[column])
        if not key:
            raise DataError(f"{where}: has no class; write its name, or remove the line")
        if first := by_name.get(key):
            raise DataError(f"{where}: {key!r} has a line already, line {first.line}; remove one of them")
        by_name[key] = line
    return by_name


def _check_names(table: str, lines: Mapping[str, TableRow], names: Sequence[str], classes: Sequence[str]) -> None:
    """Make sure that the names of these lines are those of the classes."""
    without = f"{table.partition('=')[0]}="  # a recipe may name a table that is not of the user's images
    known = set(classes)
    unknown = [name for name in names if name not in known]
    if unknown:
        more = f"; nor are {_some(unknown[1:])}" if len(unknown) > 1 else ""
        raise DataError(
            f"{table}, line {lines[unknown[0]].line}: {unknown[0]!r} is no class of the images{nearest(unknown[0], classes)}{more}; "
            f"correct the name, remove the line, or leave the table out ({without})"
        )
    missing = [name for name in classes if name not in lines]
    if missing:
        raise DataError(
            f"{table}: has no line for the class {_some(missing)}; add one for each class, or leave the table out ({without})"
        )


# ---- Attributes


def _attributes(settings: DataSettings, classes: Sequence[str] | None) -> dict[str, tuple[Value, ...]]:
    """Read `data.attributes`: attribute -> its values in the order of the classes, which the first column names.

    Where the classes are not known yet (None), the table alone is checked, and nothing comes back.
    """
    file = _table("data.attributes", settings.attributes)
    table, lines = file.name, list(_lines(file))
    headings = [limits.printable_name(heading) for heading in file.headings[1:]]
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
    by_name = _by_name(table, lines, 0)
    if not lines:
        raise DataError(f"{table}: has no line below its headings; add one for each class")
    columns = {heading: _column(table, heading, column, by_name) for column, heading in enumerate(headings, start=1)}
    if classes is None:
        return {}
    _check_names(table, by_name, [*by_name], classes)
    for heading in headings:
        if heading in classes:
            raise DataError(f"{table}: an attribute is named {heading!r}, as a class is; rename the column")
    return {heading: tuple(values[name] for name in classes) for heading, values in columns.items()}


def _column(table: str, heading: str, column: int, by_name: Mapping[str, TableRow]) -> dict[str, Value]:
    """Read an attribute's value of each class: numbers where all are written as numbers are, else texts."""
    given = {name: row for name, row in by_name.items() if row.cells[column]}
    values = {name: limits.printable_name(row.cells[column]) for name, row in given.items()}
    if not values:
        raise DataError(f"{table}: the column {heading!r} is empty; fill it, or remove it")
    read: dict[str, Value] = dict.fromkeys(by_name)
    others = [name for name, value in values.items() if not _is_number(value)]
    if not others and not all(_LONG.fullmatch(value) for value in values.values()):
        return read | {name: float(value) for name, value in values.items()}
    if len(others) < len(values):  # some look like numbers
        name = next(iter(others or values))
        value, where = limits.cut(values[name], 40), f"{table}, line {given[name].line}"
        if {values[other].casefold() for other in others} <= _UNKNOWN and others:
            raise DataError(
                f"{where}: the column {heading!r} has numbers, but {value!r} here; leave a cell empty where it is not known"
            )
        why = "is not written as a number is" if others else "is a code rather than a number, as are the others"
        logger.warning("%s: %r %s, so the column %r is text", where, value, why, heading)
    return read | values


def _is_number(text: str) -> bool:
    """Whether a text is a number, which is the same text again but for zeros at its end: `1.50`, and neither `0401` nor `1E5`."""
    digits = text.lstrip("-").partition(".")[0]
    return bool(_NUMBER.fullmatch(text)) and len(digits) <= _DIGITS and Decimal(text) == Decimal(repr(float(text)))


# ---- Hierarchy


def _parents(file: str, classes: Sequence[str] | None) -> dict[str, str]:
    """Read `data.hierarchy` as a file: class or group -> the group above it. Classes, unless unknown (None), are the lowest names."""
    given = _table("data.hierarchy", file)
    table, lines = given.name, list(_lines(given))
    headings = [folded(heading) for heading in given.headings]
    if sorted(headings) != ["class", "parent"]:
        raise DataError(
            f"{table}: its first line must be class,parent, but is {limits.cut(','.join(given.headings), 200)!r}"
        )
    child, parent = headings.index("class"), headings.index("parent")
    by_name = _by_name(table, lines, child)
    for line in lines:
        if not line.cells[parent]:
            raise DataError(
                f"{table}, line {line.line}: {line.cells[child]!r} has no parent; write the group above it, or remove the line "
                "of a topmost group"
            )
    parents = {name: class_name(f"{table}, line {line.line}", line.cells[parent]) for name, line in by_name.items()}
    for name, line in by_name.items():
        path = [name]
        while path[-1] in parents and len(path) <= LEVELS:
            above = parents[path[-1]]
            if above in path:
                circle = [*path[path.index(above) :], above]
                raise DataError(
                    f"{table}, line {by_name[above].line}: {' lies in '.join(map(repr, circle[: _SHOWN + 1]))}, which "
                    "is a circle; each name stands for one class or group, so give the group another name"
                )
            path.append(above)
        if len(path) > LEVELS:
            raise DataError(
                f"{table}, line {line.line}: {name!r} lies below more than {LEVELS - 1} groups; leave some out"
            )
    if classes is None:
        return parents
    below = {group: name for name, group in reversed(parents.items())}  # the first of each
    for name in classes:
        if name in below:
            raise DataError(
                f"{table}, line {by_name[below[name]].line}: {below[name]!r} lies in {name!r}, which is a class itself; a name "
                "stands for one level only, so give the group another name"
            )
    _check_names(table, by_name, [name for name in parents if name not in below], classes)
    return parents


def _parents_by_folders(source: str, listing: SourceListing) -> dict[str, str]:
    """Return class or group -> the group above it, from the folders above the classes' folders."""
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
