"""What settings, and what is written as JSON and read again, are made of: pydantic's models with our rules, and common types of fields."""

from __future__ import annotations

import ast
import difflib
import functools
import inspect
import re
import textwrap
from collections.abc import Callable, Iterable, Iterator, Mapping
from datetime import date
from itertools import pairwise
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator
from pydantic_core import ErrorDetails

Positive = Annotated[int, Field(ge=1)]
NonNegative = Annotated[int, Field(ge=0)]
Fraction = Annotated[float, Field(ge=0, le=1)]
NonNegativeFloat = Annotated[float, Field(ge=0)]
Percent = Annotated[float, Field(ge=0, le=100)]


_SECRET = re.compile(
    r"://[^/?#\s]+@|[?&][^=&#\s]*(token|secret|passw|signature|credential|key|sig)[^=&#\s]*=[^&#\s]", re.IGNORECASE
)


def holds_secret(text: str) -> bool:
    """Return whether a text has a URI with credentials before its host, or with a token among its parameters."""
    return bool(_SECRET.search(text))


def texts(value: object, name: str) -> Iterator[tuple[str, str]]:
    """Find each text in a setting, with the full name of where it is."""
    if isinstance(value, str):
        yield name, value
    elif isinstance(value, Mapping):
        for member, one in value.items():
            yield from texts(one, f"{name}.{member}" if name else str(member))
    elif isinstance(value, (list, tuple)):
        for one in value:
            yield from texts(one, name)


class StrictModel(BaseModel):
    """Checks its fields when it is made, refuses others, and does not change then. The text below a field is its meaning."""

    model_config = ConfigDict(frozen=True, extra="forbid")


@functools.cache
def meanings(model: type[StrictModel]) -> Mapping[str, str]:
    """Return the text below each field of a model.

    pydantic's `use_attribute_docstrings` reads all sources when classes are made: a third of the time in which settings are imported.
    """
    found: dict[str, str] = {}
    for cls in reversed(model.__mro__):
        if not issubclass(cls, StrictModel):
            continue
        (definition,) = ast.parse(textwrap.dedent(inspect.getsource(cls))).body
        assert isinstance(definition, ast.ClassDef)
        for field, below in pairwise(definition.body):
            match field, below:
                case ast.AnnAssign(target=ast.Name(id=name)), ast.Expr(value=ast.Constant(value=str(text))):
                    found[name] = inspect.cleandoc(text)
    return found


class Section(StrictModel):
    """A frozen group of settings; the text below a field is its meaning, shown by `python -m trainer config`."""

    model_config = ConfigDict(validate_default=True, allow_inf_nan=False)

    @field_validator("*")
    @classmethod
    def _holds_no_secret(cls, value: object) -> object:
        if any(holds_secret(text) for _, text in texts(value, "")):
            raise ValueError(
                "holds a password or a token, and settings are kept in manifests, logs and MLflow; leave it out of the address and give it "
                "in the environment, such as AWS_SECRET_ACCESS_KEY, MLFLOW_TRACKING_PASSWORD or HF_TOKEN"
            )
        return value


_MOST_EXPLAINED = 30  # wrong fields that a message explains
_MOST_SHOWN = 500  # characters of a wrong value in a message
_ALTERNATIVE = re.compile(r"(constrained-)?(int|float|str|bool)|literal\[.*\]")
"""What pydantic adds to the location of an error in a field that has alternatives, such as a whole number or auto."""
_COMPARISONS = {"gt": ">", "ge": ">=", "lt": "<", "le": "<="}
_TYPE_NAMES = {
    **dict.fromkeys(("int_parsing", "int_from_float", "int_type"), "a whole number"),
    **dict.fromkeys(("float_parsing", "float_type"), "a number"),
    **dict.fromkeys(("bool_parsing", "bool_type"), "true or false"),
    "finite_number": "a finite number",
    "string_type": "text",
    "tuple_type": "a list",
    "too_short": "a list that is not empty",
    "dict_type": "a group, such as {NAME=VALUE}",
}


def explain(
    error: ValidationError,
    prefix: str = "",
    *,
    noun: str = "setting",
    known: Iterable[str] = (),
    listed: str = "",
    missing: str = "",
) -> list[str]:
    """Explain every wrong field with its full name, its value and what is allowed.

    Args:
        error: what pydantic raised.
        prefix: the section that was validated.
        noun: what the fields are to their user.
        known: the full names of all fields, of which the nearest ones are suggested for an unknown name.
        listed: where the user finds all names.
        missing: advice for a missing field.
    """
    # a field has one error for each alternative of its type
    wrong: dict[tuple[int | str, ...], list[ErrorDetails]] = {}
    for details in error.errors():
        location = details["loc"]
        if len(location) > 1 and _ALTERNATIVE.fullmatch(str(location[-1])):
            location = location[:-1]
        wrong.setdefault(location, []).append(details)
    messages, names = [], list(known)
    for location, alternatives in list(wrong.items())[:_MOST_EXPLAINED]:
        name = ".".join([*([prefix] if prefix else []), *map(str, location)])
        kind, value = alternatives[0]["type"], alternatives[0].get("input")
        shown = repr(value) if len(repr(value)) <= _MOST_SHOWN else f"{repr(value)[:_MOST_SHOWN]}..."
        allowed = list(filter(None, map(_allowed, alternatives)))
        if kind == "extra_forbidden":
            # of an unknown group its first member, whose nearest names show what the group is called; a map has a name of its own
            if isinstance(value, Mapping) and not difflib.get_close_matches(name, names, n=1, cutoff=0.8):
                name = next(iter(flatten(value, name)), name)
            messages.append(f"unknown {noun} {name}{nearest(name, names)}{f'; {listed}' if listed else ''}")
        elif kind == "missing":
            messages.append(f"{name} is missing{missing}")
        elif kind == "string_type" and isinstance(value, (int, float, date)):
            messages.append(f'{name} must be text, got {value}; quote it: "{value}"')
        elif allowed:
            messages.append(f"{name} must be {' or '.join(allowed)}, got {shown}")
        elif kind == "union_tag_invalid":
            tag = alternatives[0]["ctx"]
            of_all = " or ".join(tag["expected_tags"].rsplit(", ", 1))
            messages.append(f"{name}.{tag['discriminator'].strip(chr(39))} must be {of_all}, got {tag['tag']!r}")
        elif kind in ("model_type", "model_attributes_type"):
            group = f"is a group of {noun}s and cannot be {shown}; set one of its members, such as {name}.NAME=VALUE"
            messages.append(f"{name} {group}")
        elif kind == "value_error":
            messages.append(f"{name}: {alternatives[0]['ctx']['error']}".removeprefix(": "))
        else:
            messages.append(f"{name}: {alternatives[0]['msg']}, got {shown}".removeprefix(": "))
    return messages + ([f"and {len(wrong) - _MOST_EXPLAINED} more"] if len(wrong) > _MOST_EXPLAINED else [])


def _allowed(details: ErrorDetails) -> str:
    """Return what a value must be; empty where that is not what the error is about."""
    kind, context = details["type"], details.get("ctx", {})
    for name, sign in _COMPARISONS.items():
        if name in context:
            return f"{sign} {context[name]}"
    if kind == "literal_error":
        expected: str = context["expected"]
        return expected.strip("'") if expected.count("'") == 2 else expected  # a single one is quoted for no reason
    return _TYPE_NAMES.get(kind, "")


def what_is_wrong(error: Exception) -> str:
    """Explain the first fault of a content that was refused."""
    return explain(error, noun="field")[0] if isinstance(error, ValidationError) else str(error)


def _upper(_key: str, _lower: object, value: object) -> object:
    return value


def merge(
    below: Mapping[str, Any], above: Mapping[str, Any], join: Callable[[str, Any, Any], Any] = _upper
) -> dict[str, Any]:
    """Merge two layers of nested groups; where a value is no group in both, `join` of key, lower and upper value chooses: the upper one."""
    merged = dict(below)
    for key, value in above.items():
        lower = below.get(key)
        if isinstance(lower, Mapping) and isinstance(value, Mapping):
            merged[key] = merge(lower, value, join)
        else:
            merged[key] = join(key, lower, value)
    return merged


def flatten(
    values: Mapping[str, Any],
    prefix: str = "",
    *,
    separator: str = ".",
    keep: Callable[[Mapping[str, Any]], bool] = lambda _group: False,
) -> dict[str, Any]:
    """Flatten nested groups, `{"mae": {"epochs": 4}}` to `{"mae.epochs": 4}`; a group that `keep` selects stays one value."""
    flat: dict[str, Any] = {}
    for name, value in values.items():
        full = f"{prefix}{separator}{name}" if prefix else str(name)
        is_group = isinstance(value, Mapping) and not keep(value)
        flat |= flatten(value, full, separator=separator, keep=keep) if is_group else {full: value}
    return flat


def nearest(name: str, known: Iterable[str]) -> str:
    """Ask whether the nearest names were meant, `; did you mean A or B?`; empty where none is near."""
    candidates = [*dict.fromkeys(known)]
    close = difflib.get_close_matches(name, candidates, n=3, cutoff=0.6)
    if not close:  # the right name in the wrong section
        last = name.rsplit(".", 1)[-1]
        close = [candidate for candidate in candidates if candidate.rsplit(".", 1)[-1] == last][:3]
    return f"; did you mean {' or '.join(close)}?" if close else ""
