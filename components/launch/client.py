"""The Kubernetes client: requests, the errors that its answers mean, and retries. The only module that imports `kubernetes`.

Objects are the plain dicts of the API. Every failure is a `ClusterError` that names the request, the server's own words and the next
move. `Cluster` sends each request once; `ApiRetry` repeats it while the server does not answer.
"""

from __future__ import annotations

import json
import logging
import os
import re
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from typing import Any, Self, TypeVar

import urllib3
import yaml
from kubernetes import client, config, watch
from kubernetes.config.config_exception import ConfigException

from components.launch.job_manifest import PODS, Resource, default_namespace
from trainer import __version__
from trainer.io.errors import LaunchError
from trainer.io.formatting import duration
from trainer.io.retry import Outage, Retry

logger = logging.getLogger(__name__)

CONNECT_TIMEOUT_S = 5
RESPONSE_TIMEOUT_S = 20
WATCH_TIMEOUT_S = 60
"""The server ends a watch after this time, so a connection that died silently is noticed soon after it."""
LOG_TIMEOUT_S = 60  # a log that is silent for so long is requested again, since its connection may be dead
POOL_SIZE = 128  # connections kept for later requests: one for each replica's log, and some more
BACKOFF = Retry(first_s=0.2, longest_s=10.0)
SETTLE_S = 10.0  # time after the API server's return until its watches have delivered everything that was missed

_RETRYABLE = {408, 429, 500, 502, 503, 504}

JOB_VERBS = ("create", "delete", "get", "list", "patch", "watch")
VERBS: Mapping[str, tuple[str, ...]] = {
    "pods": ("get", "list", "watch"),
    "pods/log": ("get",),
    "events": ("list",),
}  # the verbs that a launcher needs on each kind of object; on the jobs of either backend it needs `JOB_VERBS`

Result = TypeVar("Result")
Opened = Callable[[urllib3.BaseHTTPResponse], None]
"""Takes a stream that was opened, for another thread to end it."""


@dataclass(frozen=True)
class ServerRequest:
    """A request to the API server."""

    host: str
    namespace: str
    verb: str
    resource: Resource
    names: tuple[str, ...] = ()  # name of an object, and of its subresource

    def __str__(self) -> str:
        return f"{self.verb} {' '.join((str(self.resource), *self.names))} in namespace {self.namespace}"

    @property
    def kind(self) -> str:
        """The kind of object as a Role names it, such as `pods/log`."""
        return "/".join((self.resource.plural, *self.names[1:]))


class ClusterError(LaunchError):
    """The API server refuses a request, or cannot be asked."""


class ApiUnavailableError(ClusterError):
    """The API server does not answer now, or a stream broke; a retry may succeed."""

    is_transient = True


class UnauthorizedError(ApiUnavailableError):
    """401: the API server does not accept the credentials; if it did before, a token is being renewed or has expired."""

    is_transient = False


class ForbiddenError(ClusterError):
    """403: the account has no right to do this."""


class KindNotInstalledError(ClusterError):
    """The cluster lacks this kind of object, or has an older version of it."""


class NotFoundError(ClusterError):
    """404: the object, or the namespace, is missing."""


class ConflictError(ClusterError):
    """409: an object of this name exists already, or it is not the one that was meant."""


class LogNotReadyError(ClusterError):
    """400 for a log: the container has not started."""


def response_error(status: int, message: str, request: ServerRequest) -> ClusterError:
    """Return the error for an HTTP status that is no success (0: TLS failed), with the server's own words."""
    host, resource = request.host, request.resource
    # A load balancer or a tunnel in front of a server that restarts closes connections amid the handshake.
    is_cut = status == 0 and re.search(r"EOF|reset|timed out|closed", message)
    if status in _RETRYABLE or is_cut:
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
    # 403 also stands for a quota or an admission webhook.
    if status == 403 and re.search(r'User ".*" cannot ', message):
        verbs = ", ".join(VERBS.get(request.kind, JOB_VERBS))
        rule = f'{{apiGroups: ["{resource.group}"], resources: [{request.kind}], verbs: [{verbs}]}}'
        return ForbiddenError(
            f"no right to {request}: {message}; a Role bound to that account in this namespace needs the rule "
            f"{rule}: apply the overlay that set up this namespace again (manifests/base/role.yaml has all rules)"
        )
    if unknown := re.findall(r'unknown field "([^"]+)"', message):
        return KindNotInstalledError(
            f"on this cluster {resource} (version {resource.version}) have no field {', '.join(unknown)}: install a newer "
            "version of the operator that runs them (a TrainJob needs Trainer 2.3 or later), or choose a pool "
            "with the other backend (pytorchjob or trainjob); or take them out of the pool's table pod"
        )
    kinds = {409: ConflictError} | ({400: LogNotReadyError} if request.kind == "pods/log" else {})
    return kinds.get(status, ClusterError)(f"cannot {request}: the API server {host} answered {status}: {message}")


def _not_found(request: ServerRequest, message: str) -> ClusterError:
    if request.kind == "pods/log" and "could not find the requested resource" in message:
        # So the API server words the 404 of a kubelet that has just restarted and does not know its pods yet.
        return ApiUnavailableError(f"the node cannot {request} now: {message}")
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
    """Return the cause of an error, without the names of urllib3's objects before it."""
    return str(error).rpartition("): ")[2] or type(error).__name__


class Cluster:
    """A namespace of a cluster. A context manager, which closes the connections."""

    def __init__(self, configuration: client.Configuration, namespace: str) -> None:
        self.namespace = namespace
        self.host: str = configuration.host
        configuration.retries = False  # `ApiRetry` repeats requests, and logs it
        configuration.connection_pool_maxsize = POOL_SIZE
        self._client = client.ApiClient(configuration)
        self._client.user_agent = f"vit-distillation/{__version__}"
        self._core, self._custom = client.CoreV1Api(self._client), client.CustomObjectsApi(self._client)

    @classmethod
    def connect(cls, namespace: str = "") -> Self:
        """Find the cluster: `KUBECONFIG`, else the pod's own service account, else `~/.kube/config`; a `ClusterError` if there is none."""
        configuration, files = client.Configuration(), os.environ.get("KUBECONFIG")
        in_pod = not files and os.environ.get("KUBERNETES_SERVICE_HOST")
        files = files or "~/.kube/config"
        try:
            if in_pod:
                config.load_incluster_config(client_configuration=configuration)
            else:
                config.load_kube_config(config_file=files, client_configuration=configuration, persist_config=False)
        except (ConfigException, OSError, yaml.YAMLError) as error:
            raise ClusterError(
                f"in a pod without a usable service account ({error}): set automountServiceAccountToken and serviceAccountName, "
                "or KUBECONFIG"
                if in_pod
                else f"no cluster to launch on: not in a pod, and kubeconfig {files} is not usable ({error}); set KUBECONFIG; "
                "a training needs no cluster if its pool is left empty"
            ) from error
        return cls(configuration, namespace or default_namespace())

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._client.rest_client.pool_manager.clear()
        self._client.close()

    def create(self, resource: Resource, manifest: Mapping[str, Any]) -> dict[str, Any]:
        """Create an object, and return it as the server made it."""
        # Strict: by default the server drops unknown fields with a warning, and the job would run without them.
        return self._json("create", resource, body=manifest, field_validation="Strict")

    def get(self, resource: Resource, name: str) -> dict[str, Any]:
        return self._json("get", resource, name)

    def list(self, resource: Resource, *, labels: str = "", fields: str = "") -> dict[str, Any]:
        """Return the list of all objects that the selectors match; it is empty where the namespace does not exist."""
        return self._json("list", resource, **_selectors(labels, fields))

    def patch(self, resource: Resource, name: str, change: Mapping[str, Any]) -> dict[str, Any]:
        """Change an object by a JSON merge patch."""
        return self._json("patch", resource, name, body=change)

    def delete(self, resource: Resource, name: str, *, uid: str, version: str = "") -> None:
        """Delete an object if it is the one with this uid, and has still this resource version (empty: any); else a `ConflictError`."""
        preconditions = {"uid": uid} | ({"resourceVersion": version} if version else {})
        # Foreground: the job stays visible until its pods are gone, so a caller can wait for them.
        options = {"propagationPolicy": "Foreground", "preconditions": preconditions}
        self._json("delete", resource, name, body=options)

    def watch(
        self, resource: Resource, version: str, opened: Opened, *, labels: str = "", fields: str = ""
    ) -> Iterator[tuple[str, dict[str, Any]]]:
        """Yield the changes since a resource version, ADDED, MODIFIED or DELETED and the object, until the server ends the watch.

        A `ClusterError` if the version is too old, or the stream broke or reports an error.
        """
        list_objects = self._method("list", resource)

        def open_watch(**arguments: Any) -> urllib3.BaseHTTPResponse:
            response: urllib3.BaseHTTPResponse = list_objects(**arguments)
            opened(response)
            return response

        events = watch.Watch(return_type="object").stream(
            open_watch,
            resource_version=version,
            timeout_seconds=WATCH_TIMEOUT_S,
            _request_timeout=(CONNECT_TIMEOUT_S, WATCH_TIMEOUT_S + 10),
            **_selectors(labels, fields),
        )
        with self._explained("watch", resource):
            try:
                for event in events:
                    yield event["type"], event["object"]
            except (ValueError, KeyError) as error:  # it broke within a line; or TLS was shut down
                raise unavailable(error, self.host) from error

    def log(
        self,
        pod: str,
        opened: Opened,
        *,
        uid: str,
        container: str,
        since_s: int | None = None,
        follow: bool = False,
        previous: bool = False,
        timeout_s: float = LOG_TIMEOUT_S,
    ) -> Iterator[str]:
        """Yield the lines of a container, each after its time; with `follow` those that are still to come, too.

        `since_s` leaves out lines that were written more seconds ago. `previous` reads the container before its last restart.
        A `LogNotReadyError` if the container has not started; a `NotFoundError` if the pod of this name has another uid.
        """
        # The server and the client take no null for what is not asked for.
        since = {} if since_s is None else {"since_seconds": since_s}
        later = False
        with self._explained("get", PODS, pod, "log"):
            response = self._core.read_namespaced_pod_log(
                name=pod,
                namespace=self.namespace,
                container=container,
                timestamps=True,
                follow=follow,
                previous=previous,
                _preload_content=False,
                _request_timeout=(CONNECT_TIMEOUT_S, timeout_s),
                **since,
            )
            with closing(response):
                opened(response)
                # A log is requested by the pod's name; only now is it certain that the request did not reach a later pod.
                with suppress(NotFoundError):
                    later = self.get(PODS, pod)["metadata"]["uid"] != uid
                if later:
                    raise NotFoundError(f"pod {pod} of uid {uid} does not exist")
                try:
                    for line in response:
                        yield line.decode(errors="replace").rstrip("\r\n")
                except ValueError as error:  # TLS was shut down
                    raise unavailable(error, self.host) from error

    def _json(self, verb: str, resource: Resource, *names: str, **arguments: Any) -> dict[str, Any]:
        with self._explained(verb, resource, *names):
            response = self._method(verb, resource)(
                **({"name": names[0]} if names else {}),
                **arguments,
                _preload_content=False,
                _request_timeout=(CONNECT_TIMEOUT_S, RESPONSE_TIMEOUT_S),
            )
            try:
                content: dict[str, Any] = json.loads(response.data)
            except ValueError as error:
                raise ClusterError(
                    f"{self.host} did not answer with JSON, so it is no API server; check the server in the kubeconfig"
                ) from error
        return content

    def _method(self, verb: str, resource: Resource) -> Callable[..., Any]:
        """Return the typed client's method for a kind of object in our namespace."""
        if not resource.group:
            name = f"{'read' if verb == 'get' else verb}_namespaced_{resource.plural.removesuffix('s')}"
            return partial(getattr(self._core, name), namespace=self.namespace)
        method = getattr(self._custom, f"{verb}_namespaced_custom_object")
        where = {"group": resource.group, "version": resource.version, "plural": resource.plural}
        return partial(method, namespace=self.namespace, **where)

    @contextmanager
    def _explained(self, verb: str, resource: Resource, *names: str) -> Iterator[None]:
        """Raise the errors of a request as `ClusterError`s."""
        try:
            yield
        except client.ApiException as error:
            request = ServerRequest(self.host, self.namespace, verb, resource, names)
            raise response_error(error.status or 0, _message(error), request) from error
        except (urllib3.exceptions.HTTPError, OSError) as error:
            raise unavailable(error, self.host) from error


def _selectors(labels: str, fields: str) -> dict[str, str]:
    return {name: text for name, text in (("label_selector", labels), ("field_selector", fields)) if text}


def _message(error: client.ApiException) -> str:
    body = error.body.decode(errors="replace") if isinstance(error.body, bytes) else error.body or ""
    try:
        return str(json.loads(body)["message"])
    except (ValueError, KeyError, TypeError):  # not a Status object, but plain text of the server or of a proxy
        return body.strip() or str(error.reason).replace("\n", ": ")


class RetryStopped(Exception):  # noqa: N818  # not an error: the caller was asked to end
    """`ApiRetry.stop` ended a wait."""


class ApiRetry:
    """Repeats a request with exponential back-off while the API server is unavailable.

    All threads that follow a job share one: loss and return of the server are logged once, and the timeout counts from the loss.
    """

    def __init__(self, timeout_s: float) -> None:
        self._timeout_s, self._stop = timeout_s, threading.Event()
        # A single failure is often a kept-alive connection that the server has closed; the next request opens another one.
        self._outage = Outage("the API server", logger, tolerated=1)
        self._authorized = False  # whether the server has accepted the credentials before

    def stop(self) -> None:
        """End all waits."""
        self._stop.set()

    @property
    def settled(self) -> bool:
        """Whether the API server has answered for a while: what its watches have not delivered did not happen."""
        return not self._outage.is_away and self._outage.back_for_s >= SETTLE_S

    def wait(self, seconds: float) -> None:
        """Wait; 0 only checks whether to stop, which raises `RetryStopped`."""
        if self._stop.wait(seconds):
            raise RetryStopped

    def __call__(self, request: Callable[[], Result]) -> Result:
        """Repeat a request until the API server answers; an `ApiUnavailableError` at the timeout, or if it never took the credentials."""

        def attempt() -> Result:
            self.wait(0)
            return request()

        result = BACKOFF(attempt, failed=self._count_failure, sleep=self.wait)
        self._outage.ended()
        self._authorized = True
        return result

    def _count_failure(self, error: Exception, _attempt: int) -> None:
        if not isinstance(error, ApiUnavailableError):
            raise error
        if isinstance(error, UnauthorizedError) and not self._authorized:
            raise error
        if self._outage.failed(f"{error}; retrying for at most {duration(self._timeout_s)}") >= self._timeout_s:
            raise error


def proxy_to_service(configuration: Any, *, kubeconfig: str | None, namespace: str, service: str, port: str) -> str:
    """Send a generated client's requests to a service through the API server, as kubeconfig's user; return kubeconfig's context.

    Changes `configuration`, which has the fields of `kubernetes.client.Configuration`. `kubeconfig` may be several files, as in KUBECONFIG;
    None is the usual place. A `ClusterError` if there is none, or it cannot be read.
    """
    try:
        _, context = config.list_kube_config_contexts(kubeconfig)
        config.load_kube_config(kubeconfig, client_configuration=configuration)
    except (ConfigException, OSError, yaml.YAMLError, TypeError) as error:  # TypeError: YAML of another form
        raise ClusterError(f"kubeconfig cannot be used ({' '.join(str(error).split())})") from error
    address = f"{configuration.host}/api/v1/namespaces/{namespace}/services/{service}:{port}/proxy"
    refresh = configuration.refresh_api_key_hook

    def refresh_token(changed: Any) -> None:
        # Renewing the token, before each request, puts the API server's own address and hook back.
        if refresh:
            refresh(changed)
        changed.host, changed.refresh_api_key_hook = address, refresh_token

    configuration.host, configuration.refresh_api_key_hook = address, refresh_token
    return str(context["name"])
