"""Names, labels and annotations, by the rules of the API server."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

_LABEL = r"[a-z0-9]([-a-z0-9]*[a-z0-9])?"
_SUBDOMAIN = rf"{_LABEL}(\.{_LABEL})*"
_VALUE = r"(([A-Za-z0-9][-A-Za-z0-9_.]*)?[A-Za-z0-9])?"
_KEY = r"([A-Za-z0-9][-A-Za-z0-9_.]*)?[A-Za-z0-9]"
_ANNOTATIONS_BYTES = 256 * 1024

_SUBDOMAIN_RULE = (
    "a lowercase RFC 1123 subdomain must consist of lower case alphanumeric characters, '-' or '.', and must start and end "
    "with an alphanumeric character (e.g. 'example.com', regex used for validation is "
    r"'[a-z0-9]([-a-z0-9]*[a-z0-9])?(\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*')"
)
_1123_LABEL_RULE = (
    "a lowercase RFC 1123 label must consist of lower case alphanumeric characters or '-', and must start and end with an "
    "alphanumeric character (e.g. 'my-name',  or '123-abc', regex used for validation is '[a-z0-9]([-a-z0-9]*[a-z0-9])?')"
)
_1035_LABEL_RULE = (
    "a DNS-1035 label must consist of lower case alphanumeric characters or '-', start with an alphabetic character, and end "
    "with an alphanumeric character (e.g. 'my-name',  or 'abc-123', regex used for validation is '[a-z]([-a-z0-9]*[a-z0-9])?')"
)
_VALUE_RULE = (
    "a valid label must be an empty string or consist of alphanumeric characters, '-', '_' or '.', and must start and end with "
    "an alphanumeric character (e.g. 'MyValue',  or 'my_value',  or '12345', regex used for validation is "
    "'(([A-Za-z0-9][-A-Za-z0-9_.]*)?[A-Za-z0-9])?')"
)


def is_dns_1035_label(name: str) -> bool:
    """Whether a name can be that of a service."""
    return len(name) <= 63 and bool(re.fullmatch(r"[a-z]([-a-z0-9]*[a-z0-9])?", name))


def dns_1035_problem(name: str) -> str:
    """What is wrong with the name of a service, or nothing."""
    if len(name) > 63:
        return "must be no more than 63 characters"
    return "" if is_dns_1035_label(name) else _1035_LABEL_RULE


def is_domain_prefixed_path(text: str) -> bool:
    """Whether a text can say who manages something: `acme.io/foo`."""
    domain, _, path = text.partition("/")
    return bool(path and re.fullmatch(_SUBDOMAIN, domain))


def metadata_problems(metadata: Mapping[str, Any], path: str = "metadata") -> Iterator[str]:
    """Causes for a refusal: the object's name, its labels and its annotations."""
    name = metadata.get("name") or metadata.get("generateName", "") + "xxxxx"
    if not metadata.get("name") and not metadata.get("generateName"):
        yield f"{path}.name: Required value: name or generateName is required"
    elif len(name) > 253:
        yield f'{path}.name: Invalid value: "{name}": must be no more than 253 characters'
    elif not re.fullmatch(_SUBDOMAIN, name):
        yield f'{path}.name: Invalid value: "{name}": {_SUBDOMAIN_RULE}'
    yield from label_problems(metadata.get("labels") or {}, f"{path}.labels")
    annotations = metadata.get("annotations") or {}
    for key in annotations:
        yield from _key_problems(key.lower(), f"{path}.annotations")
    if sum(len(key) + len(value) for key, value in annotations.items()) > _ANNOTATIONS_BYTES:
        yield f"{path}.annotations: Too long: may not be more than {_ANNOTATIONS_BYTES} bytes"


def label_problems(labels: Mapping[str, str], path: str) -> Iterator[str]:
    """Causes for a refusal in labels or a selector of nodes."""
    for key, value in labels.items():
        yield from _key_problems(key, path)
        if len(value) > 63:
            yield f'{path}: Invalid value: "{value}": must be no more than 63 characters'
        elif not re.fullmatch(_VALUE, value):
            yield f'{path}: Invalid value: "{value}": {_VALUE_RULE}'


def container_name_problem(name: str) -> str:
    """What is wrong with the name of a container or volume, or nothing."""
    if len(name) > 63:
        return "must be no more than 63 characters"
    return "" if re.fullmatch(_LABEL, name) else _1123_LABEL_RULE


def _key_problems(key: str, path: str) -> Iterator[str]:
    prefix, slash, name = key.rpartition("/")
    if slash and not (len(prefix) <= 253 and re.fullmatch(_SUBDOMAIN, prefix)):
        yield f'{path}: Invalid value: "{key}": prefix part {_SUBDOMAIN_RULE}'
    if not name or len(name) > 63:
        yield f'{path}: Invalid value: "{key}": name part must be non-empty and no more than 63 characters'
    elif not re.fullmatch(_KEY, name):
        yield (
            f"{path}: Invalid value: \"{key}\": name part must consist of alphanumeric characters, '-', '_' or '.', and must "
            "start and end with an alphanumeric character"
        )
