"""What the API server does with a request, apart from HTTP."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tests.stand_ins.kubernetes import admission, schemas, statuses
from tests.stand_ins.kubernetes.faults import Faults
from tests.stand_ins.kubernetes.kubelet import Kubelet
from tests.stand_ins.kubernetes.logs import log_query
from tests.stand_ins.kubernetes.requests import Request
from tests.stand_ins.kubernetes.resources import Resource
from tests.stand_ins.kubernetes.selectors import Selector, selector
from tests.stand_ins.kubernetes.store import Change, Object, Store, merge

HEARTBEAT_S = 0.1
"""How often a stream without news looks whether it should end."""
_LONGEST_WATCH_S = 3600.0
_FIXED = ("name", "namespace", "uid", "creationTimestamp", "generation", "deletionTimestamp")
_PATCH_TYPES = ("application/merge-patch+json", "application/strategic-merge-patch+json")


@dataclass(frozen=True, kw_only=True)
class Answer:
    """A complete answer: an object, or the text of a log."""

    body: Object | str
    code: int = 200


Stream = Iterator[bytes]
"""Pieces of an answer without end; an empty piece means: nothing new, look whether the client is still there."""


class Api:
    """Answers requests from the store."""

    def __init__(self, store: Store, kubelet: Kubelet, faults: Faults, *, kueue: bool = False) -> None:
        self.store, self.kubelet, self.faults, self.kueue = store, kubelet, faults, kueue
        self.expiries = 0
        """How often the open watches were ended with 410, `too old resource version`."""
        self._verbs: dict[str, Callable[[Request], Answer | Stream]] = {
            "create": self._create,
            "get": self._get,
            "list": self._list,
            "watch": self._watch,
            "update": self._update,
            "patch": self._patch,
            "delete": self._delete,
        }

    def answer(self, request: Request) -> Answer | Stream:
        """Do what is asked.

        Raises:
            ApiError: it cannot be done.
        """
        if request.subresource == "log":
            return self._log(request)
        if request.verb not in self._verbs:
            raise statuses.method_not_allowed()
        return self._verbs[request.verb](request)

    def _create(self, request: Request) -> Answer:
        resource, manifest = request.resource, dict(request.body or {})
        manifest = {"apiVersion": resource.api_version, "kind": resource.kind} | manifest
        _check_kind(resource, manifest)
        schemas.admit(manifest)
        if self.kueue and admission.QUEUE_LABEL in (manifest["metadata"].get("labels") or {}):
            manifest["spec"] = admission.suspended(manifest, resource)
        if resource.has_status:
            manifest.pop("status", None)
        if not request.namespace:
            raise statuses.method_not_allowed()
        claimed = manifest.get("metadata", {}).get("namespace", request.namespace)
        if claimed != request.namespace:
            raise statuses.bad_request(
                "the namespace of the provided object does not match the namespace sent on the request"
            )
        return Answer(body=self.store.create(resource, request.namespace, manifest), code=201)

    def _get(self, request: Request) -> Answer:
        return Answer(body=self.store.get(request.resource, request.namespace or "", request.name))

    def _list(self, request: Request) -> Answer:
        items, version = self._listing(request, _selector(request))
        kind = {"apiVersion": request.resource.api_version, "kind": f"{request.resource.kind}List"}
        return Answer(body={**kind, "metadata": {"resourceVersion": str(version)}, "items": items})

    def _listing(self, request: Request, fits: Selector) -> tuple[Sequence[Object], int]:
        """The objects that fit, and the version that they are of."""
        items, version = self.store.snapshot(request.resource, request.namespace)
        return [item for item in items if fits(item)], version

    def _update(self, request: Request) -> Answer:
        return self._change(request, lambda before: dict(request.body or {}))

    def _patch(self, request: Request) -> Answer:
        if request.content_type not in (_PATCH_TYPES if not request.resource.group else _PATCH_TYPES[:1]):
            raise statuses.unsupported_patch(_PATCH_TYPES[0])
        return self._change(request, lambda before: merge(before, request.body or {}))

    def _change(self, request: Request, change: Callable[[Object], Object]) -> Answer:
        """Write an object anew: its status only at `.../status`, all but its status elsewhere."""
        resource, namespace, name = request.resource, request.namespace or "", request.name
        with self.store.changing(resource, namespace, name) as target:
            wanted = change(target)
            if wanted["metadata"].get("resourceVersion", "") not in {"", target["metadata"]["resourceVersion"]}:
                raise statuses.modified(resource, name)
            schemas.admit(wanted)
            after = _written(target, wanted, request)
            target.clear()
            target.update(after)
        return Answer(body=self.store.get(resource, namespace, name))

    def _delete(self, request: Request) -> Answer:
        options = dict(request.body or {})
        grace = request.query.get("gracePeriodSeconds", options.get("gracePeriodSeconds"))
        resource, namespace, name = request.resource, request.namespace or "", request.name
        uid = self.store.get(resource, namespace, name)["metadata"]["uid"]
        left = self.store.delete(
            resource,
            namespace,
            name,
            propagation=request.query.get("propagationPolicy") or options.get("propagationPolicy") or "Background",
            grace_s=None if grace is None else int(grace),
            preconditions=options.get("preconditions"),
        )
        details = {"name": name, "group": resource.group, "kind": resource.plural, "uid": uid}
        gone = {"kind": "Status", "apiVersion": "v1", "metadata": {}, "status": "Success", "details": details}
        return Answer(body=left or gone)

    def _watch(self, request: Request) -> Stream:
        fits, text = _selector(request), request.query.get("resourceVersion", "")
        if not text.isdecimal() and text:
            raise statuses.bad_request(f"invalid resource version: {text}")
        start = int(text or 0)
        if start:
            self.store.changes_after(start)
        return self._watching(request, fits, start)

    def _watching(self, request: Request, fits: Selector, version: int) -> Stream:
        ends = time.monotonic() + float(request.query.get("timeoutSeconds") or _LONGEST_WATCH_S)
        expiries = self.expiries
        if not version:
            items, version = self._listing(request, fits)
            yield b"".join(_line("ADDED", item) for item in items)
        while time.monotonic() < ends:
            if self.expiries > expiries:
                yield _line("ERROR", statuses.expired(version, self.store.version).body())
                return
            changes = self.store.changes_after(version) if self.store.wait(version, HEARTBEAT_S) else []
            version = changes[-1].version if changes else version
            yield b"".join(_seen(change, fits) for change in changes if _concerns(request, change))

    def _log(self, request: Request) -> Answer | Stream:
        pod = self.store.get(request.resource, request.namespace or "", request.name)
        query = log_query(request.query)
        lines = self.kubelet.log(pod, query)
        return lines if query.follow else Answer(body=b"".join(lines).decode())


def _selector(request: Request) -> Selector:
    return selector(request.query.get("labelSelector", ""), request.query.get("fieldSelector", ""))


def _written(before: Object, wanted: Object, request: Request) -> Object:
    """An object after a write: its status changes at `.../status` only, all else only elsewhere, its identity never."""
    if request.subresource == "status":
        return before | {"status": wanted.get("status", {})}
    fixed = {key: before["metadata"][key] for key in _FIXED if key in before["metadata"]}
    after = wanted | {"metadata": wanted["metadata"] | fixed}
    if request.resource.has_status:
        after.pop("status", None)
        after |= {"status": before["status"]} if "status" in before else {}
    return after


def _check_kind(resource: Resource, manifest: Mapping[str, Any]) -> None:
    given = (manifest["apiVersion"], manifest["kind"])
    if given != (resource.api_version, resource.kind):
        raise statuses.bad_request(
            f"{given[1]} in version {given[0]!r} cannot be handled as a {resource.kind}: expected {resource.api_version}"
        )


def _concerns(request: Request, change: Change) -> bool:
    return change.resource == request.resource and request.namespace in {None, change.object["metadata"]["namespace"]}


def _seen(change: Change, fits: Selector) -> bytes:
    """A change as a watch with a selector sees it: an object that begins to fit is added, one that ceases to is deleted."""
    before = change.before is not None and fits(change.before)
    after = change.type != "DELETED" and fits(change.object)
    if before and after:
        return _line("MODIFIED", change.object)
    if after:
        return _line("ADDED", change.object)
    return _line("DELETED", change.object) if before else b""


def _line(type_: str, target: Mapping[str, Any]) -> bytes:
    return json.dumps({"type": type_, "object": target}).encode() + b"\n"
