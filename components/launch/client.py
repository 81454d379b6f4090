"""The Kubernetes client: one request each way. The only module that imports `kubernetes`.

Objects are the plain dicts of the API. Every failure is a `ClusterError`; nothing is repeated here, `ApiRetry` does that.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Self

import urllib3
import yaml
from kubernetes import client, config
from kubernetes.config.config_exception import ConfigException

from components.launch.api_errors import (
    PODS,
    ApiUnavailableError,
    ClusterError,
    ExpiredError,
    Resource,
    ServerRequest,
    cause,
    response_error,
    unavailable,
)
from components.launch.identity import default_namespace
from trainer import __version__

CONNECT_TIMEOUT_S = 5
RESPONSE_TIMEOUT_S = 20
WATCH_TIMEOUT_S = 60
"""The server ends a watch after this time, so a connection that died silently is noticed soon after it."""
LOG_TIMEOUT_S = 60
"""A log that is silent for so long is requested again, since its connection may be dead."""
POOL_SIZE = 128
"""Connections kept for later requests: one for each replica's log, and some more."""

_METHODS: Mapping[str, str] = {"create": "POST", "patch": "PATCH", "delete": "DELETE"}


@dataclass(frozen=True)
class ObjectList:
    """Objects, and the resource version to watch from."""

    items: list[dict[str, Any]]
    version: str


class Stream:
    """Lines of an open-ended response, which another thread can end. A context manager."""

    def __init__(self, response: urllib3.BaseHTTPResponse, host: str) -> None:
        self._response, self._host = response, host

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._response.close()

    def __iter__(self) -> Iterator[str]:
        """Yield lines as they come, until the server ends the response.

        Raises:
            ApiUnavailableError: the connection broke, or `end` was called.
        """
        rest = b""
        while data := self._read():
            *lines, rest = (rest + data).split(b"\n")
            for line in lines:
                yield line.decode(errors="replace")
        if rest:
            yield rest.decode(errors="replace")

    def _read(self) -> bytes:
        try:
            return self._response.read1(65536)
        except (urllib3.exceptions.HTTPError, OSError, ValueError) as error:  # ValueError: TLS, shut down
            raise ApiUnavailableError(f"a stream of the API server {self._host} broke: {cause(error)}") from error

    def end(self) -> None:
        """Wake the thread that reads at once."""
        with suppress(RuntimeError, ValueError, OSError):  # it has ended already
            self._response.shutdown()


class Cluster:
    """A namespace of a cluster. A context manager, which closes the connections."""

    def __init__(self, configuration: client.Configuration, namespace: str) -> None:
        self.namespace = namespace
        self.host: str = configuration.host
        configuration.retries = False  # `ApiRetry` repeats requests, and logs it
        configuration.connection_pool_maxsize = POOL_SIZE
        self._client = client.ApiClient(configuration)
        self._client.user_agent = f"vit-distillation/{__version__}"

    @classmethod
    def connect(cls, namespace: str = "") -> Self:
        """Find the cluster: `KUBECONFIG`, else the pod's own service account, else `~/.kube/config`.

        Args:
            namespace: where jobs run; empty: `identity.default_namespace`.

        Raises:
            ClusterError: there is none of these, or it is not usable.
        """
        configuration = client.Configuration()
        if not os.environ.get("KUBECONFIG") and os.environ.get("KUBERNETES_SERVICE_HOST"):
            try:
                config.load_incluster_config(client_configuration=configuration)
            except (ConfigException, OSError) as error:
                raise ClusterError(
                    f"in a pod without a usable service account ({error}): set automountServiceAccountToken and serviceAccountName, "
                    "or KUBECONFIG"
                ) from error
        else:
            files = os.environ.get("KUBECONFIG") or "~/.kube/config"
            try:
                config.load_kube_config(config_file=files, client_configuration=configuration, persist_config=False)
            except (ConfigException, OSError, yaml.YAMLError) as error:
                raise ClusterError(
                    f"no cluster to launch on: not in a pod, and kubeconfig {files} is not usable ({error}); set KUBECONFIG; "
                    "a training needs no cluster if its pool is left empty"
                ) from error
        return cls(configuration, namespace or default_namespace())

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the connections."""
        self._client.rest_client.pool_manager.clear()
        self._client.close()

    def create(self, resource: Resource, manifest: Mapping[str, Any]) -> dict[str, Any]:
        """Create an object, and return it as the server made it.

        Raises:
            KindNotInstalledError: this cluster's version of the kind lacks fields.
        """
        # Strict: by default the server drops unknown fields with a warning, and the job would run without them.
        return self._json(self._request("create", resource), query={"fieldValidation": "Strict"}, body=manifest)

    def get(self, resource: Resource, name: str) -> dict[str, Any]:
        return self._json(self._request("get", resource, name))

    def list(self, resource: Resource, *, labels: str = "", fields: str = "") -> ObjectList:
        """Return all objects that the selectors match; an empty list where the namespace does not exist."""
        listed = self._json(self._request("list", resource), query=_selectors(labels, fields))
        return ObjectList(listed["items"], listed["metadata"]["resourceVersion"])

    def patch(self, resource: Resource, name: str, change: Mapping[str, Any]) -> dict[str, Any]:
        """Change an object by a JSON merge patch."""
        return self._json(self._request("patch", resource, name), body=change)

    def delete(self, resource: Resource, name: str, *, uid: str, version: str = "") -> None:
        """Delete an object if it is the one with this uid. It stays visible until everything that it owns is gone.

        Args:
            resource: its kind.
            name: its name.
            uid: distinguishes it from an earlier or a later one of this name.
            version: the resource version that it must still have; empty: any.

        Raises:
            ConflictError: it is another one, or has changed.
        """
        preconditions = {"uid": uid} | ({"resourceVersion": version} if version else {})
        # Foreground: the job stays visible until its pods are gone, so a caller can wait for them.
        options = {"propagationPolicy": "Foreground", "preconditions": preconditions}
        self._json(self._request("delete", resource, name), body=options)

    def watch(self, resource: Resource, version: str, *, labels: str = "", fields: str = "") -> Stream:
        """Stream the changes since a resource version, one JSON object a line; see `watch_events`."""
        query = {
            "watch": "true",
            "resourceVersion": version,
            "timeoutSeconds": WATCH_TIMEOUT_S,
            "allowWatchBookmarks": "true",
        }
        response = self._open(
            self._request("watch", resource), query=query | _selectors(labels, fields), timeout_s=WATCH_TIMEOUT_S + 10
        )
        return Stream(response, self.host)

    def log(self, pod: str, *, container: str, since: str = "", previous: bool = False) -> Stream:
        """Stream the lines of a container, each after its time, with those that are still to come.

        Args:
            pod: its name.
            container: its name.
            since: RFC 3339 time of the first line wanted; the server may begin up to a second earlier.
            previous: read the container before its last restart.

        Raises:
            LogNotReadyError: the container has not started.
        """
        query: dict[str, Any] = {"container": container, "timestamps": "true"}
        query |= {"previous": "true"} if previous else {"follow": "true"}
        query |= {"sinceTime": since} if since else {}
        response = self._open(self._request("get", PODS, pod, "log"), query=query, timeout_s=LOG_TIMEOUT_S)
        return Stream(response, self.host)

    def _request(self, verb: str, resource: Resource, *names: str) -> ServerRequest:
        return ServerRequest(self.host, self.namespace, verb, resource, names)

    def _json(
        self, request: ServerRequest, *, query: Mapping[str, Any] | None = None, body: object = None
    ) -> dict[str, Any]:
        response = self._open(request, query=query or {}, body=body, timeout_s=RESPONSE_TIMEOUT_S)
        try:
            content: dict[str, Any] = json.loads(response.data)
        except (urllib3.exceptions.HTTPError, OSError) as error:
            raise unavailable(error, self.host) from error
        except ValueError as error:
            raise ClusterError(
                f"{self.host} did not answer with JSON, so it is no API server; check the server in the kubeconfig"
            ) from error
        return content

    def _open(
        self, request: ServerRequest, *, query: Mapping[str, Any], timeout_s: float, body: object = None
    ) -> urllib3.BaseHTTPResponse:
        content = "application/merge-patch+json" if request.verb == "patch" else "application/json"
        try:
            response: urllib3.BaseHTTPResponse = self._client.call_api(
                request.path,
                _METHODS.get(request.verb, "GET"),
                query_params=[*query.items()],
                header_params={"Accept": "application/json", "Content-Type": content},
                body=body,
                auth_settings=["BearerToken"],
                _preload_content=False,
                _return_http_data_only=True,
                _request_timeout=(CONNECT_TIMEOUT_S, timeout_s),
            )
        except client.ApiException as error:
            raise response_error(error.status or 0, _message(error), request) from error
        except (urllib3.exceptions.HTTPError, OSError) as error:
            raise unavailable(error, self.host) from error
        return response


def watch_events(stream: Stream) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the events of a watch: ADDED, MODIFIED, DELETED or BOOKMARK, and the object.

    Raises:
        ExpiredError: the resource version is too old.
        ApiUnavailableError: the stream broke, or the server reports an error in it.
    """
    for line in stream:
        try:
            event = json.loads(line)
        except ValueError as error:
            raise ApiUnavailableError(f"a watch broke within a line: {line[:80]!r}") from error
        if event["type"] != "ERROR":
            yield event["type"], event["object"]
            continue
        message = event["object"].get("message", "")
        raise (ExpiredError if event["object"].get("code") == 410 else ApiUnavailableError)(f"a watch ended: {message}")


def _selectors(labels: str, fields: str) -> dict[str, str]:
    return {name: text for name, text in (("labelSelector", labels), ("fieldSelector", fields)) if text}


def _message(error: client.ApiException) -> str:
    body = error.body.decode(errors="replace") if isinstance(error.body, bytes) else error.body or ""
    try:
        return str(json.loads(body)["message"])
    except (ValueError, KeyError, TypeError):  # not a Status object, but plain text of the server or of a proxy
        return body.strip() or str(error.reason).replace("\n", ": ")


class NoKubeconfigError(Exception):
    """There is no usable kubeconfig; the text says why."""


def proxy_to_service(configuration: Any, *, kubeconfig: str | None, namespace: str, service: str, port: str) -> str:
    """Send a generated client's requests to a service through the API server, as kubeconfig's user.

    Args:
        configuration: the client's, with the fields of `kubernetes.client.Configuration`; changed.
        kubeconfig: its file, or several as in KUBECONFIG; None for the usual place.
        namespace: where the service is.
        service: its name.
        port: name of its port.

    Returns:
        The name of kubeconfig's context.

    Raises:
        NoKubeconfigError: there is none, or it cannot be read.
    """
    try:
        _, context = config.list_kube_config_contexts(kubeconfig)
        config.load_kube_config(kubeconfig, client_configuration=configuration)
    except (ConfigException, OSError, yaml.YAMLError, TypeError) as error:  # TypeError: YAML of another form
        raise NoKubeconfigError(f"kubeconfig cannot be used ({' '.join(str(error).split())})") from error
    address = f"{configuration.host}/api/v1/namespaces/{namespace}/services/{service}:{port}/proxy"
    refresh = configuration.refresh_api_key_hook

    def refresh_token(changed: Any) -> None:
        # Renewing the token, before each request, puts the API server's own address and hook back.
        if refresh:
            refresh(changed)
        changed.host, changed.refresh_api_key_hook = address, refresh_token

    configuration.host, configuration.refresh_api_key_hook = address, refresh_token
    return str(context["name"])
