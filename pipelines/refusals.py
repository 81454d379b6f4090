"""What it means when the Kubeflow Pipelines API refuses or does not answer: for each one message with the next move."""

from __future__ import annotations

import json

import kfp_server_api
from urllib3 import exceptions as transport

from pipelines.places import AUTHORITY_VARIABLE, COOKIES_VARIABLE, HOST_VARIABLES, SERVICE, TOKEN_VARIABLE, Location
from trainer.errors import DeployError

BAD_REQUEST, NOT_FOUND, CONFLICT = 400, 404, 409


class RefusedError(DeployError):
    """The API answered, and not with what was asked for."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


class UnansweredError(DeployError):
    """No answer: what was asked for may have been done or not."""


def refused(place: Location, namespace: str | None, error: kfp_server_api.ApiException) -> DeployError:
    """What an answer other than 2xx means.

    Args:
        place: who answered.
        namespace: the user's, where there are several users.
        error: the answer.
    """
    status, who = int(error.status), f"{place.address} ({place.found})"
    answer = f"{status}{_said(error.body)}"
    if status == 401 or 300 <= status < 400:
        return RefusedError(status, f"{who} wants a login ({answer}); {_login_advice(place)}")
    if status == 403:
        advice = (
            f"is namespace {namespace} there, and yours? NAMESPACE=... names another"
            if namespace
            else "ask for the right"
        )
        return RefusedError(status, f"{who} forbids it ({answer}), asked {place.credentials}; {advice}")
    if status >= 500:
        return UnansweredError(
            f"{who} failed ({answer}); try again, or read: kubectl logs --namespace {place.namespace} deployment/{SERVICE}"
        )
    return RefusedError(status, f"{who} refuses ({answer})")


def login_page(place: Location) -> DeployError:
    """What a page means that comes instead of an answer."""
    return DeployError(
        f"{place.address} ({place.found}) answers with a page instead of the Kubeflow Pipelines API, most likely to log in; "
        + _login_advice(place)
    )


def not_there(place: Location) -> DeployError:
    """What it means that there is no API at an address that answers."""
    if place.proxied:
        return DeployError(
            f"the cluster of {place.found.removeprefix('through ')} has no {place.address}: no such namespace, or another one is meant; "
            f"name the one that Kubeflow Pipelines runs in, KFP_NAMESPACE=..., or its address, {HOST_VARIABLES[0]}=..."
        )
    return DeployError(
        f"{place.address} ({place.found}) answers, but not as the Kubeflow Pipelines API (404 for /apis/v2beta1/healthz); "
        "give the address that the UI has before the #, such as http://localhost:8080 or https://HOST/pipeline"
    )


def unanswered(place: Location, error: transport.HTTPError) -> DeployError:
    """What a connection's failure means."""
    reason = getattr(error, "reason", None) or error
    where = f"{place.address} ({place.found})"
    if isinstance(reason, transport.SSLError):
        return _wrong_tls(where, str(reason))
    if isinstance(reason, transport.NameResolutionError):
        return UnansweredError(f"{where}: no such host; check the name, and the network or VPN that knows it")
    if isinstance(reason, transport.NewConnectionError):
        return UnansweredError(
            f"{where}: connection refused; if a port is forwarded there, start that again: {place.port_forward}"
        )
    if isinstance(reason, transport.TimeoutError):
        return UnansweredError(
            f"{where}: no answer in time ({_without_object(reason)}); check the address, the network and the service {SERVICE}"
        )
    return UnansweredError(
        f"{where}: the connection broke before the answer ({_without_object(reason)}); http or https?"
    )


def _wrong_tls(where: str, reason: str) -> DeployError:
    if "certificate" in reason.lower():
        advice = f"set {AUTHORITY_VARIABLE} to the PEM file of its authority"
        return DeployError(f"{where}: its certificate is not trusted ({reason}); {advice}")
    return DeployError(f"{where}: it does not speak TLS ({reason}); give http:// instead of https://")


def _without_object(reason: BaseException) -> str:
    """The reason's text without urllib3's `<Connection object at 0x...>: `."""
    return str(reason).rsplit(">: ", maxsplit=1)[-1]


def _said(body: str | None) -> str:
    """What an answer's body says, `: text`. KFP, its upload and Kubernetes have each a form of their own; a page says nothing."""
    try:
        content = json.loads(body or "")
    except ValueError:
        content = {} if (body or "").lstrip().startswith("<") else {"message": body}
    keys = ("message", "error_message", "error")
    text = next((content[key] for key in keys if content.get(key)), "") if isinstance(content, dict) else ""
    line = " ".join(str(text).split())
    return f": {line[:400]}" if line else ""


def _login_advice(place: Location) -> str:
    if place.proxied:
        return (
            f"the API server does not hand on who asks; set {HOST_VARIABLES[0]} to its own address, "
            f"with {TOKEN_VARIABLE} or {COOKIES_VARIABLE}"
        )
    return (
        f"asked {place.credentials}; set {TOKEN_VARIABLE} to a valid token, or {COOKIES_VARIABLE} to those of a browser "
        "that is logged in"
    )
