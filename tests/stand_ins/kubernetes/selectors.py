"""Label and field selectors, as the query of a list or a watch gives them."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

from tests.stand_ins.kubernetes.statuses import bad_request

Selector = Callable[[Mapping[str, Any]], bool]

_SET = re.compile(r"(?P<key>\S+)\s+(?P<operator>in|notin)\s+\((?P<values>[^)]*)\)")
_EQUAL = re.compile(r"(?P<key>[^\s=!]+)\s*(?P<operator>==|=|!=)\s*(?P<value>[^\s=!]*)")
_EXISTS = re.compile(r"(?P<negated>!?)\s*(?P<key>[A-Za-z0-9._/-]+)")
_FIELDS = {
    "metadata.name",
    "metadata.namespace",
    "spec.nodeName",
    "status.phase",
    "involvedObject.kind",
    "involvedObject.name",
    "involvedObject.namespace",
    "involvedObject.uid",
    "reason",
    "type",
}


def selector(labels: str, fields: str) -> Selector:
    """Whether an object fits both selectors; empty text fits all.

    Raises:
        ApiError: 400, a selector cannot be read.
    """
    tests = [_label_test(term) for term in _terms(labels)] + [_field_test(term) for term in _terms(fields)]
    return lambda target: all(test(target) for test in tests)


def field(target: Mapping[str, Any], path: str) -> str:
    """The text at a dotted path of an object, empty if there is none."""
    value: Any = target
    for key in path.split("."):
        value = value.get(key, {}) if isinstance(value, Mapping) else {}
    return "" if isinstance(value, Mapping) else str(value)


def _terms(text: str) -> list[str]:
    """Split at the commas outside of parentheses."""
    return [term.strip() for term in re.split(r",(?![^(]*\))", text) if term.strip()]


def _label_test(term: str) -> Selector:
    if match := _SET.fullmatch(term):
        key, values = match["key"], {value.strip() for value in match["values"].split(",")}
        wanted = match["operator"] == "in"
        return lambda target: (_labels(target).get(key) in values) is wanted
    if match := _EQUAL.fullmatch(term):
        key, value, wanted = match["key"], match["value"], match["operator"] != "!="
        return lambda target: (_labels(target).get(key) == value) is wanted
    if match := _EXISTS.fullmatch(term):
        key, wanted = match["key"], not match["negated"]
        return lambda target: (key in _labels(target)) is wanted
    raise bad_request(f'unable to parse requirement: found "{term}", expected: an identifier')


def _field_test(term: str) -> Selector:
    match = _EQUAL.fullmatch(term)
    if not match or match["key"] not in _FIELDS:
        raise bad_request(f"field label not supported: {match['key'] if match else term}")
    key, value, wanted = match["key"], match["value"], match["operator"] != "!="
    return lambda target: (field(target, key) == value) is wanted


def _labels(target: Mapping[str, Any]) -> Mapping[str, str]:
    return target["metadata"].get("labels") or {}
