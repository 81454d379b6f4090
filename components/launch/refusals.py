"""What the API server's refusals mean: for each an error that names what was asked for, what the server said and the next move."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass

from kubernetes.client import ApiException

from components.launch.resources import Resource, rule
from trainer.errors import LaunchError

_PASSING = {408, 429, 500, 502, 503, 504}


class ClusterError(LaunchError):
    """The API server refused, or cannot be asked."""


class AwayError(ClusterError):
    """The API server does not answer now, or a stream broke; it may answer again."""

    passing = True


class LoginError(AwayError):
    """The API server does not know who is asking; if it did before, a token is being renewed or has run out."""

    passing = False


class DeniedError(ClusterError):
    """Who is asking has no right to do it."""


class NotInstalledError(ClusterError):
    """The cluster has no such kind of object, or an older version of it."""


class NotFoundError(ClusterError):
    """There is no such object, or no such namespace."""


class ConflictError(ClusterError):
    """An object of this name is there already, or it is not the one that was meant."""


class ExpiredError(ClusterError):
    """The resource version is too old to watch from."""


class NotReadyError(ClusterError):
    """A container has no log yet."""


@dataclass(frozen=True)
class ServerRequest:
    """What the server is asked for."""

    host: str
    namespace: str
    verb: str
    resource: Resource
    names: tuple[str, ...] = ()
    """An object, and a part of it."""

    def __str__(self) -> str:
        return f"{self.verb} {' '.join((str(self.resource), *self.names))} in namespace {self.namespace}"

    @property
    def path(self) -> str:
        return self.resource.path(self.namespace, *self.names)

    @property
    def kind(self) -> str:
        """As a Role names it: `pods/log`."""
        return "/".join((self.resource.plural, *self.names[1:]))


def refusal(error: ApiException, request: ServerRequest) -> ClusterError:
    """The error for an answer that is no success."""
    status, message = error.status or 0, _message(error)
    if status in _PASSING:
        return AwayError(f"the API server {request.host} cannot {request} now ({status}): {message}")
    if status == 0:
        return ClusterError(
            f"no trusted connection to the API server {request.host}: {message}; check certificate-authority and server in the kubeconfig"
        )
    if status == 401:
        return LoginError(
            f"the API server {request.host} does not know who you are (401, could not {request}): "
            "log in again, until `kubectl get pods` works"
        )
    if status == 404:
        return _missing(request, message)
    if status == 403 and re.search(r'User ".*" cannot ', message):  # and neither a quota nor an admission webhook
        return _denied(request, message)
    if unknown := re.findall(r'unknown field "([^"]+)"', message):
        return NotInstalledError(
            f"on this cluster {request.resource} (version {request.resource.version}) have no field {', '.join(unknown)}: install a newer "
            "version of the operator that runs them (a TrainJob needs Trainer 2.3 or later), or choose a pool "
            "with the other backend (pytorchjob or trainjob)"
        )
    return _plain(status, request)(f"cannot {request}: the API server {request.host} answered {status}: {message}")


def away(error: Exception, host: str) -> AwayError:
    """The error for a request without an answer."""
    return AwayError(
        f"the API server {host} does not answer: {reason(error)}; see whether the cluster runs and this machine reaches it "
        "(kubectl get --raw /readyz)"
    )


def reason(error: Exception) -> str:
    """What went wrong, without the names of urllib3's objects before it."""
    return str(error).rpartition("): ")[2] or type(error).__name__


def _plain(status: int, request: ServerRequest) -> type[ClusterError]:
    if status == 400 and request.kind == "pods/log":
        return NotReadyError
    return {409: ConflictError, 410: ExpiredError}.get(status, ClusterError)


def _missing(request: ServerRequest, message: str) -> ClusterError:
    if "page not found" in message or "could not find the requested resource" in message:
        return NotInstalledError(
            f"this cluster has no {request.resource} (version {request.resource.version}): install the operator that runs them "
            "(manifests/README.md says how), or choose a pool with the other backend (pytorchjob or trainjob)"
        )
    if f'namespaces "{request.namespace}" not found' in message:
        return NotFoundError(
            f"there is no namespace {request.namespace}: create it (kubectl create namespace {request.namespace}), or name another"
        )
    return NotFoundError(f"cannot {request}: {message}")


def _denied(request: ServerRequest, message: str) -> DeniedError:
    return DeniedError(
        f"no right to {request}: {message}; a Role bound to that account in this namespace needs the rule "
        f"{rule(request.resource.group, request.kind)} (manifests/base has Role and RoleBinding: kubectl apply -k manifests/base)"
    )


def _message(error: ApiException) -> str:
    body = error.body.decode(errors="replace") if isinstance(error.body, bytes) else error.body or ""
    try:
        return str(json.loads(body)["message"])
    except (ValueError, KeyError, TypeError):  # no Status object: plain text of the server's or of a proxy's
        return body.strip() or str(error.reason).replace("\n", ": ")
