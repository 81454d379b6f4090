"""The kinds of objects that a launcher uses, and what it asks for in its namespace."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class Resource:
    """A kind of object, as the API addresses it."""

    plural: str
    group: str = ""
    version: str = "v1"

    def __str__(self) -> str:
        return f"{self.plural}.{self.group}" if self.group else self.plural

    def path(self, namespace: str, *names: str) -> str:
        """The path of the collection, of one object in it, or of a part of the object."""
        root = f"/apis/{self.group}" if self.group else "/api"
        return "/".join((root, self.version, "namespaces", namespace, self.plural, *names))


PODS = Resource("pods")
EVENTS = Resource("events")

JOB_VERBS = ("create", "delete", "get", "list", "patch", "watch")
VERBS: Mapping[str, tuple[str, ...]] = {
    "pods": ("get", "list", "watch"),
    "pods/log": ("get",),
    "events": ("list", "watch"),
}
"""The verbs that a launcher needs on each kind; on jobs of either backend it needs `JOB_VERBS`."""


def rule(group: str, kind: str) -> str:
    """The rule of a Role that allows what a launcher does with a kind, in one line of YAML."""
    verbs = ", ".join(VERBS.get(kind, JOB_VERBS))
    return f'{{apiGroups: ["{group}"], resources: [{kind}], verbs: [{verbs}]}}'
