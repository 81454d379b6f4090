"""Limits on files from elsewhere: how large they may be, and what may be in them.

A file that is larger is refused before it is read, and what is parsed here takes at most about thirty times its bytes. What exceeds a
limit is a `ValueError` here, and a `TrainerError` that names the file where it is read. docs/reliability.md lists the limits.
"""

from __future__ import annotations

import json
import logging
import math
import re
import tomllib
import unicodedata
from collections.abc import Iterable, Mapping
from typing import Any, NoReturn

JSON_BYTES = 32 * 2**20  # a JSON file, such as a model's description
TOML_BYTES = 256 * 2**10  # a recipe, or a file of node pools
CSV_BYTES = 2**30  # a list of images
TABLE_BYTES = 8 * 2**20  # a table of classes: `data.attributes` or `data.hierarchy`
IMAGE_BYTES = 256 * 2**20  # an image file; `data.max_pixels` limits what is in it
WEIGHTS_HEADER_BYTES = 8 * 2**20  # the header of a safetensors file, which says what tensors there are

NESTING = 32  # depth of nested lists and groups in JSON, in TOML and in the name of a setting
DOTS_IN_A_LINE = 1000  # of a TOML file: the time of Python's parser grows with the square of the parts of a name
SOURCE_IMAGES = 20_000_000  # images of `data.source`; docs/scale.md says what `prepare` needs for each
FOLDER_DEPTH = 32  # depth of folders below `data.source`
FOLDERS = 1_000_000  # folders below `data.source`; one that several links lead to counts for each
LABEL_SETS = 100_000  # different sets of labels in a data set whose images may have several
LABEL_CELLS = 2**28  # these sets times the classes: a byte each, in every process
NAME_CHARACTERS = 200  # the name of a class
TABLE_COLUMNS = 100  # attributes of a class
CELL_CHARACTERS = 1000  # a value in a table of classes
MODEL_ARGUMENT = 16_384  # a number among the arguments of a model, such as its width
MESSAGE_CHARACTERS = 10_000  # a message to a user; one that quotes a long file is cut

_UNPRINTABLE = r"\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff"
"""Control characters, which a terminal obeys, marks that reverse the direction of text, and surrogates."""
_UNSEEN = re.compile(
    r"[\xad\u034f\u061c\u115f\u1160\u17b4\u17b5\u180b-\u180f\u200b-\u200f\u202a-\u202e\u2060-\u206f\u2800\u3164\ufe00-\ufe0f"
    r"\ufeff\uffa0\ufff0-\ufffd\U0001bca0-\U0001bca3\U0001d173-\U0001d17a\U000e0000-\U000e0fff]"
)
"""Characters without a look: Unicode's Default_Ignorable_Code_Point and the blank Braille pattern; and those that stand for a lost one."""
_JOINERS = "\u200c\u200d\ufe0e\ufe0f"
"""Zero-width (non-)joiners and emoji's variation selectors: what they follow may look different with them."""
_TOO_DEEP = f"it is nested deeper than {NESTING} levels"


def printable(text: str) -> str:
    """Escape characters that are not text, such as terminal control codes; line breaks stay."""
    return re.sub(f"[{_UNPRINTABLE}]", _escape, text)


def printable_name(text: str) -> str:
    """Escape like `printable`, and line breaks too."""
    return re.sub(f"[{_UNPRINTABLE}\t\n]", _escape, text)


def _escape(match: re.Match[str]) -> str:
    return match[0].encode("unicode_escape").decode()


def class_name(text: str) -> str:
    """Write the name of a class as people read it, printable, so that names that look alike are equal.

    Names come in both of Unicode's normal forms (macOS and its zip files decompose letters), with trailing spaces, and with characters
    of web pages and spreadsheets. A `ValueError` for a character that cannot be seen or stands for a lost one.
    """
    name = reading(text)
    for match in _UNSEEN.finditer(name):
        before, character = name[: match.start()][-1:], match[0]
        if not (character in _JOINERS and _is_shaped(before)):
            code = f"U+{ord(character):04X} {unicodedata.name(character, '')}".rstrip()
            why = "stands for one that was lost" if "\ufffa" <= character <= "\ufffd" else "cannot be seen"
            shown = cut(printable_name(_UNSEEN.sub(_escape, name)), NAME_CHARACTERS)
            raise ValueError(f"the name of a class has the character {code}, which {why}: '{shown}'; rename it")
    return printable_name(name)


def reading(text: str) -> str:
    """Return a text as people read it: composed (NFC), each white space one space, none around it."""
    return " ".join(unicodedata.normalize("NFC", text).split())


def _is_shaped(before: str) -> bool:
    """Whether a joiner after this character shows: an Arabic letter, a virama of an Indic script, or a symbol such as an emoji."""
    return bool(before) and (
        unicodedata.bidirectional(before) == "AL"
        or unicodedata.combining(before) == 9
        or unicodedata.category(before) in ("So", "Sk", "Sm")
        or before == "\ufe0f"
    )


def look_alikes(names: Iterable[str]) -> list[list[str]]:
    """Group names of classes that differ by case, compatibility forms (full width, ligatures) or joiners alone; both in the given order."""
    groups: dict[str, list[str]] = {}
    for name in names:
        folded = unicodedata.normalize("NFKC", unicodedata.normalize("NFKC", name).casefold())
        groups.setdefault(reading(_UNSEEN.sub("", folded)), []).append(name)
    return [group for group in groups.values() if len(group) > 1]


class PrintableFormatter(logging.Formatter):
    """Formats log lines in which names from elsewhere cannot control a terminal."""

    def format(self, record: logging.LogRecord) -> str:
        return printable(super().format(record))


def cut(text: str, length: int) -> str:
    """Cut a text to `length` characters, with the number of those cut off."""
    return text if len(text) <= length else f"{text[:length]}... ({len(text) - length:,} more characters)"


def parse_json(content: bytes | str) -> Any:
    """Parse a JSON text; a `ValueError` if it is not JSON, nested too deep, or has a number that is infinite or of more than 64 bits."""
    try:
        return _checked(json.loads(content, parse_constant=_refuse_constant, parse_float=_finite))
    except RecursionError as error:
        raise ValueError(_TOO_DEEP) from error


def _finite(text: str) -> float:
    number = float(text)
    if not math.isfinite(number):
        raise ValueError(f"the number {cut(text, 40)} is not finite")
    return number


def parse_toml(text: str) -> dict[str, Any]:
    """Parse a TOML text; a `ValueError` if it is not TOML, nested too deep, or has a whole number of more than 64 bits."""
    if any(line.count(".") > DOTS_IN_A_LINE for line in text.splitlines()):
        raise ValueError(f"a line has more than {DOTS_IN_A_LINE} dots")
    try:
        value: dict[str, Any] = _checked(tomllib.loads(text))
    except RecursionError as error:
        raise ValueError(_TOO_DEEP) from error
    return value


def toml_value(value: object) -> str:
    """Write a value as TOML has it, a group in braces."""
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{json.dumps(str(key))} = {toml_value(one)}" for key, one in value.items()) + "}"
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(toml_value, value))}]"
    return json.dumps(value, ensure_ascii=False)


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not a JSON number")


def _checked(value: Any) -> Any:
    """Return a value after a check of all its members, level by level rather than by recursion, since there may be millions."""
    level = [value]
    for _ in range(NESTING + 1):
        groups = [one for one in level if isinstance(one, dict)]
        "\n".join(one for one in level if isinstance(one, str)).encode()  # raises a ValueError for a surrogate
        numbers = [one for one in level if isinstance(one, int)]
        if numbers and not -(2**63) <= min(numbers) <= max(numbers) < 2**64:
            raise ValueError("a whole number needs more than 64 bits")
        level = [member for one in level if isinstance(one, list) for member in one]
        for group in groups:
            level += [*group.keys(), *group.values()]
        if not level:
            return value
    raise ValueError(_TOO_DEEP)
