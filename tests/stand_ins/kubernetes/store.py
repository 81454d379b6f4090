"""The objects, their versions and their history."""

from __future__ import annotations

import copy
import random
import threading
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any

from tests.stand_ins.kubernetes import statuses
from tests.stand_ins.kubernetes.resources import EVENTS, PODS, Resource

FOREGROUND = "foregroundDeletion"
_SUFFIX_LETTERS = "bcdfghjklmnpqrstvwxz2456789"  # those of the real server: no vowels, so no words
_FIRST_VERSION = 1000

Object = dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class Change:
    """One step of the history."""

    version: int
    type: str
    """ADDED, MODIFIED or DELETED."""
    resource: Resource
    object: Object
    before: Object | None
    """The object one step earlier; a watch with a selector needs it to see objects leave."""


def now() -> str:
    """The time as objects carry it: whole seconds."""
    return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def age_s(moment: str) -> float:
    """How long ago a moment was that an object carries."""
    return (datetime.now(UTC) - datetime.fromisoformat(moment)).total_seconds()


def merge(target: Object, patch: Mapping[str, Any]) -> Object:
    """JSON merge patch (RFC 7386)."""
    merged = dict(target)
    for key, value in patch.items():
        if value is None:
            merged.pop(key, None)
        elif isinstance(value, Mapping):
            before = merged.get(key)
            merged[key] = merge(before if isinstance(before, dict) else {}, value)
        else:
            merged[key] = value
    return merged


class Store:
    """What etcd and the registry behind the API server do. Objects are copied on their way in and out."""

    def __init__(self, namespaces: Sequence[str]) -> None:
        self.namespaces = tuple(namespaces)
        self.version = _FIRST_VERSION
        self.oldest = _FIRST_VERSION
        """Changes at or before this version are forgotten."""
        self._objects: dict[tuple[str, str, str], Object] = {}
        self._resources: dict[str, Resource] = {}
        self._history: list[Change] = []
        self._changed = threading.Condition(threading.RLock())

    def create(self, resource: Resource, namespace: str, manifest: Mapping[str, Any]) -> Object:
        """Add an object.

        Raises:
            ApiError: 404 for the namespace, 409 for a name that is taken.
        """
        with self._changed:
            if namespace not in self.namespaces:
                raise statuses.namespace_not_found(namespace)
            added = copy.deepcopy(dict(manifest))
            metadata = added.setdefault("metadata", {})
            if not metadata.get("name"):
                metadata["name"] = metadata.get("generateName", "") + "".join(random.choices(_SUFFIX_LETTERS, k=5))
            name = metadata["name"]
            if (resource.plural, namespace, name) in self._objects:
                raise statuses.already_exists(resource, name)
            metadata |= {"namespace": namespace, "uid": str(uuid.uuid4()), "creationTimestamp": now()}
            if resource.has_status:
                metadata["generation"] = 1
            if resource == PODS:
                added["status"] = {"phase": "Pending"}
            return self._put("ADDED", resource, added, None)

    def get(self, resource: Resource, namespace: str, name: str) -> Object:
        """A copy of an object.

        Raises:
            ApiError: 404.
        """
        with self._changed:
            try:
                return copy.deepcopy(self._objects[resource.plural, namespace, name])
            except KeyError:
                raise statuses.not_found(resource, name) from None

    def list(self, resource: Resource, namespace: str | None = None) -> list[Object]:
        """Copies of all objects of a kind, by name; in all namespaces if none is given."""
        with self._changed:
            return [
                copy.deepcopy(self._objects[key])
                for key in sorted(self._objects)
                if key[0] == resource.plural and namespace in {None, key[1]}
            ]

    def snapshot(self, resource: Resource, namespace: str | None) -> tuple[Sequence[Object], int]:
        """All objects of a kind, and the version at that moment."""
        with self._changed:
            return self.list(resource, namespace), self.version

    @contextmanager
    def changing(self, resource: Resource, namespace: str, name: str) -> Iterator[Object]:
        """Change an object in the block, at once and alone. Nothing happens if it is left as it was.

        Raises:
            ApiError: 404.
        """
        with self._changed:
            before = self.get(resource, namespace, name)
            after = copy.deepcopy(before)
            yield after
            if after == before:
                return
            if after.get("spec") != before.get("spec") and "generation" in before["metadata"]:
                after["metadata"]["generation"] += 1
            self._put("MODIFIED", resource, after, before)

    def delete(
        self,
        resource: Resource,
        namespace: str,
        name: str,
        *,
        propagation: str = "Background",
        grace_s: int | None = None,
        preconditions: Mapping[str, str] | None = None,
    ) -> Object | None:
        """Begin or complete the deletion of an object.

        A pod that has a node stays until its kubelet has ended it; with `Foreground` an object stays until its dependents are gone.

        Returns:
            The object if it is still there, being deleted.

        Raises:
            ApiError: 404, or 409 if the object has another `uid` or `resourceVersion` than the preconditions name.
        """
        with self._changed:
            target = self.get(resource, namespace, name)
            for field, called in (("uid", "UID"), ("resourceVersion", "ResourceVersion")):
                wanted, has = (preconditions or {}).get(field), target["metadata"][field]
                if wanted and wanted != has:
                    cause = f"Precondition failed: {called} in precondition: {wanted}, {called} in object meta: {has}"
                    raise statuses.conflict(resource, name, cause)
            if propagation == "Orphan":
                self._orphan(target["metadata"]["uid"])
            grace_s = _grace_s(resource, target, grace_s)
            if propagation != "Foreground" and grace_s == 0:
                self.remove(resource, namespace, name)
                return None
            with self.changing(resource, namespace, name) as changed:
                metadata = changed["metadata"]
                end = datetime.now(UTC) + timedelta(seconds=grace_s)
                metadata.setdefault("deletionTimestamp", end.strftime("%Y-%m-%dT%H:%M:%SZ"))
                metadata.setdefault("deletionGracePeriodSeconds", grace_s)
                if propagation == "Foreground" and FOREGROUND not in metadata.setdefault("finalizers", []):
                    metadata["finalizers"].append(FOREGROUND)
            return self.get(resource, namespace, name)

    def remove(self, resource: Resource, namespace: str, name: str) -> None:
        """Take an object out, whatever it waits for; nothing happens if it is gone."""
        with self._changed:
            before = self._objects.get((resource.plural, namespace, name))
            if before is not None:
                self._put("DELETED", resource, copy.deepcopy(before), before)

    def collect_garbage(self) -> None:
        """Delete what has lost all of its owners, and what waited for its dependents only."""
        with self._changed:
            owners = {item["metadata"]["uid"]: item["metadata"] for item in self._objects.values()}
            for key, item in list(self._objects.items()):
                metadata, resource = item["metadata"], self._resources[key[0]]
                references = metadata.get("ownerReferences") or []
                alive = [owners[reference["uid"]] for reference in references if reference["uid"] in owners]
                going = [owner for owner in alive if FOREGROUND in owner.get("finalizers", [])]
                if references and len(alive) == len(going) and "deletionTimestamp" not in metadata:
                    self.delete(resource, key[1], key[2])
                if FOREGROUND in metadata.get("finalizers", []) and not self._dependents(metadata["uid"]):
                    self.remove(resource, key[1], key[2])

    def record_event(self, target: Mapping[str, Any], type_: str, reason: str, message: str, component: str) -> None:
        """Record an event about an object; the same one again is counted."""
        metadata, namespace = target["metadata"], target["metadata"]["namespace"]
        with self._changed:
            for event in self.list(EVENTS, namespace):
                if (event["involvedObject"]["uid"], event["reason"], event["message"]) == (
                    metadata["uid"],
                    reason,
                    message,
                ):
                    with self.changing(EVENTS, namespace, event["metadata"]["name"]) as counted:
                        counted["count"] += 1
                        counted["lastTimestamp"] = now()
                    return
            self.create(EVENTS, namespace, _event(target, type_, reason, message, component))

    def changes_after(self, version: int) -> Sequence[Change]:
        """The history after a version.

        Raises:
            ApiError: 410, a part of it is forgotten.
        """
        with self._changed:
            if version < self.oldest:
                raise statuses.expired(version, self.oldest)
            return [change for change in self._history if change.version > version]

    def compact(self) -> None:
        with self._changed:
            # Without a step of its own the current version would count as forgotten or not by chance.
            self.version += 1
            self.oldest = self.version
            self._history.clear()

    def wait(self, version: int, timeout_s: float) -> bool:
        """Wait until there is something newer than a version; whether there is."""
        with self._changed:
            return self._changed.wait_for(lambda: self.version > version, timeout_s)

    def _put(self, type_: str, resource: Resource, target: Object, before: Object | None) -> Object:
        self.version += 1
        metadata = target["metadata"]
        metadata["resourceVersion"] = str(self.version)
        target |= {"apiVersion": resource.api_version, "kind": resource.kind}
        key = (resource.plural, metadata["namespace"], metadata["name"])
        if type_ == "DELETED":
            del self._objects[key]
        else:
            self._objects[key] = target
            self._resources[resource.plural] = resource
        kept = copy.deepcopy(target)
        self._history.append(Change(version=self.version, type=type_, resource=resource, object=kept, before=before))
        self._changed.notify_all()
        return copy.deepcopy(target)

    def _dependents(self, uid: str) -> Sequence[tuple[str, str, str]]:
        return [
            key
            for key, item in self._objects.items()
            if any(reference["uid"] == uid for reference in item["metadata"].get("ownerReferences") or [])
        ]

    def _orphan(self, uid: str) -> None:
        for plural, namespace, name in self._dependents(uid):
            with self.changing(self._resources[plural], namespace, name) as dependent:
                metadata = dependent["metadata"]
                metadata["ownerReferences"] = [item for item in metadata["ownerReferences"] if item["uid"] != uid]


def _grace_s(resource: Resource, target: Mapping[str, Any], asked: int | None) -> int:
    """Only a pod that may be running is given time to end."""
    if resource != PODS:
        return 0
    ended = target.get("status", {}).get("phase") in {"Succeeded", "Failed"}
    if ended or not target["spec"].get("nodeName"):
        return 0
    return asked if asked is not None else target["spec"].get("terminationGracePeriodSeconds", 30)


def _event(target: Mapping[str, Any], type_: str, reason: str, message: str, component: str) -> Object:
    metadata = target["metadata"]
    return {
        "metadata": {"name": f"{metadata['name']}.{time.time_ns():x}"},
        "involvedObject": {
            "apiVersion": target["apiVersion"],
            "kind": target["kind"],
            "namespace": metadata["namespace"],
            "name": metadata["name"],
            "uid": metadata["uid"],
        },
        "type": type_,
        "reason": reason,
        "message": message,
        "count": 1,
        "firstTimestamp": now(),
        "lastTimestamp": now(),
        "source": {"component": component},
        "reportingComponent": component,
    }
