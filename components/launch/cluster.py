"""The API server, as a launcher uses it: one request each way.

Objects are the plain dicts of the API. Every failure is a `refusals.ClusterError`; nothing is tried twice here, see `patience`.
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

from components.launch.identity import default_namespace
from components.launch.refusals import AwayError, ClusterError, ExpiredError, ServerRequest, away, reason, refusal
from components.launch.resources import PODS, Resource
from trainer import __version__

CONNECT_TIMEOUT_S = 5
ANSWER_TIMEOUT_S = 20
WATCH_S = 60
"""The server ends a watch after this time. A connection that died without a word is therefore noticed soon after it."""
LOG_SILENCE_S = 60
"""A log that is silent for so long is asked for again, since its connection may be dead."""
STREAMS = 128
"""Connections kept for later requests: one for each replica's log, and some more."""

_METHODS: Mapping[str, str] = {"create": "POST", "patch": "PATCH", "delete": "DELETE"}


@dataclass(frozen=True)
class ObjectList:
    """Objects, and the resource version to watch from."""

    items: list[dict[str, Any]]
    version: str


class Stream:
    """Lines of an answer that goes on, which another thread can end. A context manager."""

    def __init__(self, response: urllib3.BaseHTTPResponse, host: str) -> None:
        self._response, self._host = response, host

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._response.close()

    def __iter__(self) -> Iterator[str]:
        """Lines as they come, until the server ends the answer.

        Raises:
            AwayError: the connection broke, or was ended by `end`.
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
            raise AwayError(f"a stream of the API server {self._host} broke: {reason(error)}") from error

    def end(self) -> None:
        """Let the thread that reads go on at once."""
        with suppress(RuntimeError, ValueError, OSError):  # it has ended already
            self._response.shutdown()


class Cluster:
    """A namespace of a cluster. A context manager, which closes the connections."""

    def __init__(self, configuration: client.Configuration, namespace: str) -> None:
        self.namespace = namespace
        self.host: str = configuration.host
        configuration.retries = False  # `Patience` tries again, and says so
        configuration.connection_pool_maxsize = STREAMS
        self._client = client.ApiClient(configuration)
        self._client.user_agent = f"vit-distillation/{__version__}"

    @classmethod
    def connect(cls, namespace: str = "") -> Self:
        """Find the cluster: `KUBECONFIG`, else the pod's own service account, else `~/.kube/config`.

        Args:
            namespace: where jobs run; empty: as `identity.default_namespace` says.

        Raises:
            ClusterError: there is none of these, or it is not usable.
        """
        configuration = client.Configuration()
        if not os.environ.get("KUBECONFIG") and os.environ.get("KUBERNETES_SERVICE_HOST"):
            _load_service_account(configuration)
        else:
            _load_kubeconfig(configuration)
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
        """Create an object and give it as the server made it.

        Raises:
            NotInstalledError: this cluster's version of the kind lacks fields; by default the server drops them with a warning.
        """
        return self._answer(self._request("create", resource), query={"fieldValidation": "Strict"}, body=manifest)

    def get(self, resource: Resource, name: str) -> dict[str, Any]:
        return self._answer(self._request("get", resource, name))

    def list(self, resource: Resource, *, labels: str = "", fields: str = "") -> ObjectList:
        """All objects that the selectors take; an empty list where the namespace does not exist."""
        found = self._answer(self._request("list", resource), query=_selectors(labels, fields))
        return ObjectList(found["items"], found["metadata"]["resourceVersion"])

    def patch(self, resource: Resource, name: str, change: Mapping[str, Any]) -> dict[str, Any]:
        """Change an object by a JSON merge patch."""
        return self._answer(self._request("patch", resource, name), body=change)

    def delete(self, resource: Resource, name: str, *, uid: str, version: str = "") -> None:
        """Delete an object, only if it is the one with this uid. It stays visible until all that it owns is gone.

        Args:
            resource: its kind.
            name: its name.
            uid: what tells it from an earlier or a later one of this name.
            version: the resource version that it must still have; empty: any.

        Raises:
            ConflictError: it is another one, or has changed.
        """
        preconditions = {"uid": uid} | ({"resourceVersion": version} if version else {})
        options = {"propagationPolicy": "Foreground", "preconditions": preconditions}
        self._answer(self._request("delete", resource, name), body=options)

    def watch(self, resource: Resource, version: str, *, labels: str = "", fields: str = "") -> Stream:
        """Changes since a resource version, one JSON object a line; see `changes`."""
        query = {"watch": "true", "resourceVersion": version, "timeoutSeconds": WATCH_S, "allowWatchBookmarks": "true"}
        response = self._open(
            self._request("watch", resource), query=query | _selectors(labels, fields), silence_s=WATCH_S + 10
        )
        return Stream(response, self.host)

    def log(self, pod: str, *, container: str, since: str = "", previous: bool = False) -> Stream:
        """The lines of a container, each after its time, those that come included.

        Args:
            pod: its name.
            container: its name.
            since: RFC 3339 time of the first line wanted; the server may begin up to a second earlier.
            previous: that of the container before its last restart.

        Raises:
            NotReadyError: the container has not started.
        """
        query: dict[str, Any] = {"container": container, "timestamps": "true"}
        query |= {"previous": "true"} if previous else {"follow": "true"}
        query |= {"sinceTime": since} if since else {}
        response = self._open(self._request("get", PODS, pod, "log"), query=query, silence_s=LOG_SILENCE_S)
        return Stream(response, self.host)

    def _request(self, verb: str, resource: Resource, *names: str) -> ServerRequest:
        return ServerRequest(self.host, self.namespace, verb, resource, names)

    def _answer(
        self, request: ServerRequest, *, query: Mapping[str, Any] | None = None, body: object = None
    ) -> dict[str, Any]:
        response = self._open(request, query=query or {}, body=body, silence_s=ANSWER_TIMEOUT_S)
        try:
            content: dict[str, Any] = json.loads(response.data)
        except (urllib3.exceptions.HTTPError, OSError) as error:
            raise away(error, self.host) from error
        except ValueError as error:
            raise ClusterError(
                f"{self.host} did not answer with JSON, so it is no API server; check the server in the kubeconfig"
            ) from error
        return content

    def _open(
        self, request: ServerRequest, *, query: Mapping[str, Any], silence_s: float, body: object = None
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
                _request_timeout=(CONNECT_TIMEOUT_S, silence_s),
            )
        except client.ApiException as error:
            raise refusal(error, request) from error
        except (urllib3.exceptions.HTTPError, OSError) as error:
            raise away(error, self.host) from error
        return response


def changes(stream: Stream) -> Iterator[tuple[str, dict[str, Any]]]:
    """The events of a watch: ADDED, MODIFIED, DELETED or BOOKMARK, and the object.

    Raises:
        ExpiredError: the resource version is too old.
        AwayError: the stream broke, or the server reports an error in it.
    """
    for line in stream:
        try:
            event = json.loads(line)
        except ValueError as error:
            raise AwayError(f"a watch broke within a line: {line[:80]!r}") from error
        if event["type"] != "ERROR":
            yield event["type"], event["object"]
            continue
        message = event["object"].get("message", "")
        raise (ExpiredError if event["object"].get("code") == 410 else AwayError)(f"a watch ended: {message}")


def _selectors(labels: str, fields: str) -> dict[str, str]:
    return {name: text for name, text in (("labelSelector", labels), ("fieldSelector", fields)) if text}


def _load_service_account(configuration: client.Configuration) -> None:
    try:
        config.load_incluster_config(client_configuration=configuration)
    except (ConfigException, OSError) as error:
        raise ClusterError(
            f"in a pod without a usable service account ({error}): set automountServiceAccountToken and serviceAccountName, or KUBECONFIG"
        ) from error


def _load_kubeconfig(configuration: client.Configuration) -> None:
    files = os.environ.get("KUBECONFIG") or "~/.kube/config"
    try:
        config.load_kube_config(config_file=files, client_configuration=configuration, persist_config=False)
    except (ConfigException, OSError, yaml.YAMLError) as error:
        raise ClusterError(
            f"no cluster to launch on: not in a pod, and kubeconfig {files} is not usable ({error}); set KUBECONFIG; "
            "a training needs no cluster if its pool is left empty"
        ) from error
