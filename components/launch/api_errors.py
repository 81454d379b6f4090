"""What is asked of the Kubernetes API server, the errors that its answers mean, and retries while it does not answer.

Every error is a `ClusterError` that names the request, the server's own words and the next move. Nothing here needs the Kubernetes client.
"""

from __future__ import annotations

import logging
import re
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TypeVar

from trainer.errors import LaunchError
from trainer.retry import Retry

logger = logging.getLogger(__name__)

BACKOFF = Retry(first_s=0.2, longest_s=10.0)
SETTLE_S = 10.0
"""Time after the API server's return until its watches have delivered everything that was missed."""

_RETRYABLE = {408, 429, 500, 502, 503, 504}

Result = TypeVar("Result")


@dataclass(frozen=True)
class Resource:
    """A kind of object, as the API addresses it."""

    plural: str
    group: str = ""
    version: str = "v1"

    def __str__(self) -> str:
        return f"{self.plural}.{self.group}" if self.group else self.plural

    def path(self, namespace: str, *names: str) -> str:
        """Return the path of the collection, of an object in it, or of a subresource of the object."""
        root = f"/apis/{self.group}" if self.group else "/api"
        return "/".join((root, self.version, "namespaces", namespace, self.plural, *names))


PODS = Resource("pods")
WORKFLOWS = Resource("workflows", "argoproj.io", "v1alpha1")
EVENTS = Resource("events")

JOB_VERBS = ("create", "delete", "get", "list", "patch", "watch")
VERBS: Mapping[str, tuple[str, ...]] = {
    "pods": ("get", "list", "watch"),
    "pods/log": ("get",),
    "events": ("list", "watch"),
}
"""The verbs that a launcher needs on each kind of object; on the jobs of either backend it needs `JOB_VERBS`."""


def role_rule(group: str, kind: str) -> str:
    """Return the rule of a Role that allows what a launcher does with a kind of object, as one line of YAML."""
    verbs = ", ".join(VERBS.get(kind, JOB_VERBS))
    return f'{{apiGroups: ["{group}"], resources: [{kind}], verbs: [{verbs}]}}'


@dataclass(frozen=True)
class ServerRequest:
    """A request to the API server."""

    host: str
    namespace: str
    verb: str
    resource: Resource
    names: tuple[str, ...] = ()
    """Name of an object, and of its subresource."""

    def __str__(self) -> str:
        return f"{self.verb} {' '.join((str(self.resource), *self.names))} in namespace {self.namespace}"

    @property
    def path(self) -> str:
        return self.resource.path(self.namespace, *self.names)

    @property
    def kind(self) -> str:
        """The kind of object as a Role names it, such as `pods/log`."""
        return "/".join((self.resource.plural, *self.names[1:]))


class ClusterError(LaunchError):
    """The API server refuses a request, or cannot be asked."""


class ApiUnavailableError(ClusterError):
    """The API server does not answer now, or a stream broke; a retry may succeed."""

    passing = True


class UnauthorizedError(ApiUnavailableError):
    """401: the API server does not accept the credentials; if it did before, a token is being renewed or has expired."""

    passing = False


class ForbiddenError(ClusterError):
    """403: the account has no right to do this."""


class KindNotInstalledError(ClusterError):
    """The cluster has no such kind of object, or an older version of it."""


class NotFoundError(ClusterError):
    """404: there is no such object, or no such namespace."""


class ConflictError(ClusterError):
    """409: an object of this name exists already, or it is not the one that was meant."""


class ExpiredError(ClusterError):
    """410: the resource version is too old to watch from."""


class LogNotReadyError(ClusterError):
    """400 for a log: the container has not started."""


def response_error(status: int, message: str, request: ServerRequest) -> ClusterError:
    """Return the error for an answer that is no success.

    Args:
        status: the HTTP status; 0: the connection is not trusted.
        message: the server's own words.
        request: what was asked.
    """
    host, resource = request.host, request.resource
    if status in _RETRYABLE:
        return ApiUnavailableError(f"the API server {host} cannot {request} now ({status}): {message}")
    if status == 0:
        return ClusterError(
            f"no trusted connection to the API server {host}: {message}; check certificate-authority and server in the kubeconfig"
        )
    if status == 401:
        return UnauthorizedError(
            f"the API server {host} does not know who you are (401, could not {request}): log in again, until `kubectl get pods` works"
        )
    if status == 404:
        return _not_found(request, message)
    if status == 403 and re.search(
        r'User ".*" cannot ', message
    ):  # 403 also stands for a quota or an admission webhook
        return ForbiddenError(
            f"no right to {request}: {message}; a Role bound to that account in this namespace needs the rule "
            f"{role_rule(resource.group, request.kind)} (manifests/base has Role and RoleBinding: kubectl apply -k manifests/base)"
        )
    if unknown := re.findall(r'unknown field "([^"]+)"', message):
        return KindNotInstalledError(
            f"on this cluster {resource} (version {resource.version}) have no field {', '.join(unknown)}: install a newer "
            "version of the operator that runs them (a TrainJob needs Trainer 2.3 or later), or choose a pool "
            "with the other backend (pytorchjob or trainjob)"
        )
    kinds = {409: ConflictError, 410: ExpiredError} | ({400: LogNotReadyError} if request.kind == "pods/log" else {})
    return kinds.get(status, ClusterError)(f"cannot {request}: the API server {host} answered {status}: {message}")


def _not_found(request: ServerRequest, message: str) -> ClusterError:
    if "page not found" in message or "could not find the requested resource" in message:
        return KindNotInstalledError(
            f"this cluster has no {request.resource} (version {request.resource.version}): install the operator that runs them "
            "(manifests/README.md says how), or choose a pool with the other backend (pytorchjob or trainjob)"
        )
    if f'namespaces "{request.namespace}" not found' in message:
        return NotFoundError(
            f"there is no namespace {request.namespace}: create it (kubectl create namespace {request.namespace}), or name another"
        )
    return NotFoundError(f"cannot {request}: {message}")


def unavailable(error: Exception, host: str) -> ApiUnavailableError:
    """Return the error for a request without an answer."""
    return ApiUnavailableError(
        f"the API server {host} does not answer: {cause(error)}; check that the cluster runs and that this machine reaches it "
        "(kubectl get --raw /readyz)"
    )


def cause(error: Exception) -> str:
    """Return what went wrong, without the names of urllib3's objects before it."""
    return str(error).rpartition("): ")[2] or type(error).__name__


class RetryStopped(Exception):  # noqa: N818  # not an error: the caller was asked to end
    """`ApiRetry.stop` ended a wait."""


class ApiRetry:
    """Repeats a request with exponential back-off while the API server is unavailable.

    All threads that follow a job share one, so the loss and the return of the server are logged once, and the timeout counts from the loss.
    """

    def __init__(self, timeout_s: float) -> None:
        self._timeout_s, self._stop, self._lock = timeout_s, threading.Event(), threading.Lock()
        self._failures, self._lost_at, self._back_at = 0, 0.0, -SETTLE_S
        self._authorized = False
        """Whether the server has accepted the credentials before."""

    def stop(self) -> None:
        """End all waits."""
        self._stop.set()

    @property
    def settled(self) -> bool:
        """Whether the API server has answered for a while: what its watches have not delivered did not happen."""
        with self._lock:
            return self._failures < 2 and time.monotonic() - self._back_at >= SETTLE_S

    def wait(self, seconds: float) -> None:
        """Wait; 0 only checks whether to stop.

        Raises:
            RetryStopped: `stop` was called.
        """
        if self._stop.wait(seconds):
            raise RetryStopped

    def __call__(self, request: Callable[[], Result]) -> Result:
        """Repeat a request until the API server answers.

        Raises:
            ApiUnavailableError: it did not answer within the timeout, or has never accepted the credentials.
            RetryStopped: `stop` was called.
        """

        def attempt() -> Result:
            self.wait(0)
            return request()

        result = BACKOFF(attempt, failed=self._count_failure, sleep=self.wait)
        with self._lock:
            if self._failures > 1:
                self._back_at = time.monotonic()
                logger.warning("the API server answers again after %s", format_duration(self._back_at - self._lost_at))
            self._failures, self._authorized = 0, True
        return result

    def _count_failure(self, error: Exception, _attempt: int) -> None:
        if not isinstance(error, ApiUnavailableError):
            raise error
        with self._lock:
            if isinstance(error, UnauthorizedError) and not self._authorized:
                raise error
            self._failures += 1
            # A single failure is often a kept-alive connection that the server has closed; the next request opens another one.
            if self._failures == 1:
                self._lost_at = time.monotonic()
            elif self._failures == 2:
                logger.warning("%s; retrying for at most %s", error, format_duration(self._timeout_s))
            if time.monotonic() - self._lost_at >= self._timeout_s:
                raise error


def format_duration(seconds: float) -> str:
    """Return a time to read: `5 s`, `3 min`, `2.5 h`."""
    for unit, size in (("h", 3600), ("min", 60)):
        if seconds >= 2 * size:
            return f"{round(seconds / size, 1):g} {unit}"
    return f"{seconds:.3g} s"
