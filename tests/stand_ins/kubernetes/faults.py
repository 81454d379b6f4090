"""What can go wrong between a client and the API server, on demand."""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tests.stand_ins.kubernetes import statuses
from tests.stand_ins.kubernetes.requests import Request

USER = "system:serviceaccount:kubeflow:vit-distillation"


class AwayError(Exception):
    """The connection is closed without an answer."""


@dataclass
class _Failure:
    code: int
    times: int
    verb: str
    resource: str
    retry_after_s: int | None

    def matches(self, request: Request) -> bool:
        return self.times > 0 and self.verb in {"*", request.verb} and self.resource in {"*", request.target}


class Faults:
    """Switches for a test. `verb` is Kubernetes' own (`create`, `get`, `list`, `watch`, `patch`, `delete`), `resource` a plural or
    `pods/log`; `*` stands for any."""

    def __init__(self) -> None:
        self._denied: set[tuple[str, str]] = set()
        self._rules: Sequence[Mapping[str, Any]] | None = None
        self._failures: list[_Failure] = []
        self._lost: list[tuple[str, str]] = []
        self._away_until = 0.0
        self._latency_s = 0.0
        self._cuts: dict[str, int] = {}
        self._lock = threading.Lock()

    def deny(self, verb: str, resource: str) -> None:
        """Answer 403 from now on."""
        self._denied.add((verb, resource))

    def allow(self, verb: str, resource: str) -> None:
        """Take a `deny` back."""
        self._denied.discard((verb, resource))

    def allow_only(self, rules: Sequence[Mapping[str, Any]] | None) -> None:
        """Answer 403 to whatever these rules of a Role (`apiGroups`, `resources`, `verbs`) do not grant; `None` grants all."""
        self._rules = rules

    def fail(
        self, code: int, *, times: int = 1, verb: str = "*", resource: str = "*", retry_after_s: int | None = None
    ) -> None:
        """Answer the next requests with 401, 429, 500, 503 or 504."""
        statuses.failure(code)
        with self._lock:
            self._failures.append(_Failure(code, times, verb, resource, retry_after_s))

    def clear(self) -> None:
        """Fail no more requests."""
        with self._lock:
            self._failures.clear()

    def away(self, seconds: float) -> None:
        """Break off all streams, and close every connection without an answer, for a while or until `away(0)`."""
        self._away_until = time.monotonic() + seconds
        self.cut()

    def lose_answer(self, verb: str, resource: str) -> None:
        """Do what the next such request asks for, but close the connection in the place of an answer."""
        with self._lock:
            self._lost.append((verb, resource))

    def slow(self, seconds: float) -> None:
        """Take this long before every answer, from now on."""
        self._latency_s = seconds

    def cut(self, target: str = "*") -> None:
        """Break off the open streams in the middle: a watch of a plural, or `pods/log`."""
        with self._lock:
            self._cuts[target] = self._cuts.get(target, 0) + 1

    def cuts(self, target: str) -> int:
        """How often streams of this target have been cut; a stream ends when the number rises."""
        with self._lock:
            return self._cuts.get(target, 0) + self._cuts.get("*", 0)

    def permitted(self, verb: str, resource: str, group: str) -> bool:
        """What authorization says; `resource` with its subresource, as `pods/log`."""
        if any(one in {"*", verb} and other in {"*", resource} for one, other in self._denied):
            return False
        return self._rules is None or any(_grants(rule, verb, resource, group) for rule in self._rules)

    def check(self, request: Request) -> None:
        """Let a request through, or not.

        Raises:
            AwayError: the connection is to be closed.
            ApiError: the answer.
        """
        if time.monotonic() < self._away_until:
            raise AwayError
        time.sleep(self._latency_s)
        with self._lock:
            failure = next((one for one in self._failures if one.matches(request)), None)
            if failure:
                failure.times -= 1
                raise statuses.failure(failure.code, failure.retry_after_s)
        if not self.permitted(request.verb, request.target, request.resource.group):
            raise statuses.forbidden(
                USER, request.verb, request.resource, request.subresource, request.namespace, request.name
            )

    def check_answer(self, request: Request) -> None:
        """Let an answer through, or not.

        Raises:
            AwayError: the connection is to be closed.
        """
        with self._lock:
            if (request.verb, request.target) in self._lost:
                self._lost.remove((request.verb, request.target))
                raise AwayError


def _grants(rule: Mapping[str, Any], verb: str, resource: str, group: str) -> bool:
    granted = ((verb, rule["verbs"]), (resource, rule["resources"]), (group, rule["apiGroups"]))
    return all(value in values or "*" in values for value, values in granted)
