"""Groups of settings, whichever they are: their values checked, with messages that name each wrong one, and all of them listed."""

from __future__ import annotations

import difflib
import functools
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from trainer import limits
from trainer.base_models import Section
from trainer.errors import SettingsError

AnySection = TypeVar("AnySection", bound=Section)

_MOST_EXPLAINED = 30
"""Wrong settings that a message explains."""


def validate(section: type[AnySection], values: Mapping[str, Any], *, prefix: str = "") -> AnySection:
    """Check the values of a section.

    Raises:
        SettingsError: every wrong value with its full name, itself, and what is allowed.
    """
    unprintable = [
        f"{name} has characters that cannot be shown: {text!r}" for name, text in _unprintable(values, prefix)
    ]
    if unprintable:
        raise SettingsError("\n".join(unprintable))
    try:
        return section.model_validate(dict(values))
    except ValidationError as error:
        wrong = _by_setting(error.errors())
        messages = [_explain(section, alternatives, prefix) for alternatives in wrong[:_MOST_EXPLAINED]]
        more = [f"and {len(wrong) - _MOST_EXPLAINED} more"] if len(wrong) > _MOST_EXPLAINED else []
        raise SettingsError("\n".join(messages + more)) from error


def _unprintable(value: object, name: str) -> Iterator[tuple[str, str]]:
    """Find each setting that a terminal or a page would not show as it is: full name and text."""
    if isinstance(value, str) and limits.printable_name(value) != value:
        yield name, value
    elif isinstance(value, Mapping):
        for member, one in value.items():
            yield from _unprintable(one, f"{name}.{member}" if name else str(member))
    elif isinstance(value, (list, tuple)):
        for one in value:
            yield from _unprintable(one, name)


_ALTERNATIVE = re.compile(r"(constrained-)?(int|float|str|bool)|literal\[.*\]")
"""What pydantic adds to the location of an error in a setting that has alternatives, such as a whole number or auto."""


def _by_setting(errors: Iterable[ErrorDetails]) -> list[list[ErrorDetails]]:
    """Group the errors by setting; several where it has alternatives, of which none is met."""
    groups: dict[tuple[int | str, ...], list[ErrorDetails]] = {}
    for details in errors:
        location = details["loc"]
        is_alternative = len(location) > 1 and _ALTERNATIVE.fullmatch(str(location[-1]))
        details["loc"] = location[:-1] if is_alternative else location
        groups.setdefault(details["loc"], []).append(details)
    return list(groups.values())


_COMPARISONS = {"greater_than": ">", "greater_than_equal": ">=", "less_than": "<", "less_than_equal": "<="}
_LIMITS = {"greater_than": "gt", "greater_than_equal": "ge", "less_than": "lt", "less_than_equal": "le"}
_TYPE_NAMES = {
    "int_parsing": "a whole number",
    "int_from_float": "a whole number",
    "int_type": "a whole number",
    "float_parsing": "a number",
    "float_type": "a number",
    "finite_number": "a finite number",
    "bool_parsing": "true or false",
    "bool_type": "true or false",
    "string_type": "text",
    "tuple_type": "a list",
}


def _explain(section: type[Section], alternatives: Sequence[ErrorDetails], prefix: str) -> str:
    """Make the message for a setting; of the errors there is one for each alternative that it has."""
    details = alternatives[0]
    name = ".".join(([prefix] if prefix else []) + [str(part) for part in details["loc"]])
    kind, value = details["type"], details.get("input")
    if kind == "extra_forbidden":
        known = _names(section, prefix)
        return f"unknown setting {name}{nearest(name, known)}; `python -m trainer config RECIPE` lists all"
    allowed = [text for one in alternatives if (text := _allowed(one))]
    if allowed:
        return f"{name} must be {' or '.join(allowed)}, got {value!r}"
    if kind == "model_type":
        return (
            f"{name} is a group of settings and cannot be {value!r}; set one of its members, such as {name}.NAME=VALUE"
        )
    if kind == "value_error":
        return f"{name}: {details['ctx']['error']}"
    return f"{name}: {details['msg']}, got {value!r}"


def _allowed(details: ErrorDetails) -> str:
    """Return what a value must be; empty where that is not what the error is about."""
    kind, context = details["type"], details.get("ctx", {})
    if kind in _COMPARISONS:
        return f"{_COMPARISONS[kind]} {context[_LIMITS[kind]]}"
    if kind == "literal_error":
        expected: str = context["expected"]
        return expected.strip("'") if expected.count("'") == 2 else expected  # a single one is quoted for no reason
    return _TYPE_NAMES.get(kind, "")


def nearest(name: str, known: Iterable[str]) -> str:
    """Ask whether the nearest names were meant, `; did you mean A or B?`; empty where none is near."""
    candidates = list(known)
    close = difflib.get_close_matches(name, candidates, n=3, cutoff=0.6)
    if not close:  # the right name in the wrong section
        last = name.rsplit(".", 1)[-1]
        close = [candidate for candidate in candidates if candidate.rsplit(".", 1)[-1] == last][:3]
    return f"; did you mean {' or '.join(close)}?" if close else ""


@functools.cache
def _names(section: type[Section], prefix: str) -> tuple[str, ...]:
    """List the full name of every setting below a section."""
    return tuple(f"{prefix}.{name}" if prefix else name for name, *_ in walk(section))


def walk(section: type[Section] | Section, prefix: str = "") -> Iterator[tuple[str, Any, str, str]]:
    """Walk through every setting below a section: (full name, value or default, type and limits as text, meaning)."""
    model = section if isinstance(section, type) else type(section)
    for name, field in model.model_fields.items():
        full = f"{prefix}.{name}" if prefix else name
        value = field.get_default(call_default_factory=True) if isinstance(section, type) else getattr(section, name)
        annotation = field.annotation
        if isinstance(value, Section):
            yield from walk(value, full)
        elif isinstance(annotation, type) and issubclass(annotation, Section):
            yield from walk(annotation, full)
        else:
            yield full, value, _type_text(model, name), field.description or ""


def _type_text(model: type[Section], name: str) -> str:
    return _schema_text(_properties(model)[name])


@functools.cache
def _properties(model: type[Section]) -> Mapping[str, Any]:
    """Return the JSON schema of each setting of a group."""
    properties: Mapping[str, Any] = model.model_json_schema()["properties"]
    return properties


def _schema_text(schema: Mapping[str, Any]) -> str:
    """Describe a property of a JSON schema: `whole number, >= 1`."""
    if "anyOf" in schema:
        return " or ".join(text for option in schema["anyOf"] if (text := _schema_text(option)) != "null")
    if "const" in schema:
        return f"`{schema['const']}`"
    if "enum" in schema:
        return ", ".join(f"`{value}`" for value in schema["enum"])
    if "$ref" in schema:
        return "group"
    names = {
        "integer": "whole number",
        "number": "number",
        "string": "text",
        "boolean": "true or false",
        "array": "list",
    }
    text = names.get(schema.get("type", ""), "group" if schema.get("type") == "object" else schema.get("type", ""))
    signs = {"minimum": ">=", "exclusiveMinimum": ">", "maximum": "<=", "exclusiveMaximum": "<"}
    limits = [f"{sign} {schema[key]:g}" for key, sign in signs.items() if key in schema]
    return ", ".join([text, *limits])
