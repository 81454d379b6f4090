"""A request to the API server, taken apart."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from tests.stand_ins.kubernetes.resources import RESOURCES, Resource

_PATH = re.compile(
    r"/(?:api|apis/(?P<group>[^/]+))/(?P<version>[^/]+)(?:/namespaces/(?P<namespace>[^/]+))?"
    r"/(?P<plural>[^/]+)(?:/(?P<name>[^/]+)(?:/(?P<subresource>[^/]+))?)?/?"
)
_VERBS = {"POST": "create", "PUT": "update", "PATCH": "patch", "DELETE": "delete"}
_SUBRESOURCES = {"log", "status"}


@dataclass(frozen=True, kw_only=True)
class Request:
    """What is asked of which object or kind."""

    verb: str
    """Kubernetes' own: create, get, list, watch, update, patch, delete, deletecollection."""
    resource: Resource
    namespace: str | None
    name: str = ""
    subresource: str = ""
    query: Mapping[str, str] = field(default_factory=dict)
    content_type: str = ""
    body: Mapping[str, Any] | None = None

    @property
    def target(self) -> str:
        """As roles name it: `pods`, `pods/log`."""
        return f"{self.resource.plural}/{self.subresource}" if self.subresource else self.resource.plural


def parse(
    method: str, path: str, query: Mapping[str, str], content_type: str, body: Mapping[str, Any] | None
) -> Request | None:
    """The request, or nothing if no server of this kind answers such a path."""
    match = _PATH.fullmatch(path)
    resource = RESOURCES.get(match["plural"]) if match else None
    if not match or not resource:
        return None
    if (match["group"] or "", match["version"]) != (resource.group, resource.version):
        return None
    if (match["subresource"] or "status") not in _SUBRESOURCES:
        return None
    return Request(
        verb=_verb(method, match["name"], query),
        resource=resource,
        namespace=match["namespace"],
        name=match["name"] or "",
        subresource=match["subresource"] or "",
        query=query,
        content_type=content_type,
        body=body,
    )


def _verb(method: str, name: str | None, query: Mapping[str, str]) -> str:
    if method == "GET" and not name:
        return "watch" if query.get("watch", "").lower() in {"true", "1"} else "list"
    if method == "DELETE" and not name:
        return "deletecollection"
    return _VERBS.get(method, "get")
