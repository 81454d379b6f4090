"""The Kubeflow Pipelines API, found, asked and understood; each refusal is one message with the next move.

It is looked for where people have it, in this order: `--host` or KFP_HOST (or KFP_ENDPOINT, or kfp's own KF_PIPELINES_ENDPOINT);
the service in this cluster, if this is a pod; the API server of kubeconfig, which passes requests on to the service.

The generated client is used and not `kfp.Client` on top of it, which repeats and prints of its own accord, writes into the home
directory, and loses its way through the API server as soon as kubeconfig's user has a token.
"""

from __future__ import annotations

import argparse
import json
import os
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import kfp_server_api
import urllib3
from urllib3 import exceptions as transport

from components.launch.client import ClusterError, cause, proxy_to_service
from components.launch.job_manifest import DEFAULT_NAMESPACE, POD_FILES, own_namespace
from components.sections import KUBEFLOW_UI
from trainer.io.errors import DeployError

HOST_VARIABLES = ("KFP_HOST", "KFP_ENDPOINT", "KF_PIPELINES_ENDPOINT")
TOKEN_VARIABLE = "KFP_TOKEN"  # a name
COOKIES_VARIABLE = "KFP_COOKIES"
AUTHORITY_VARIABLE = "KFP_CA_FILE"
TOKEN_FILE_VARIABLE = "KF_PIPELINES_SA_TOKEN_PATH"  # kfp's name
TOKEN_FILE = "/var/run/secrets/kubeflow/pipelines/token"  # where kfp looks
SERVICE = "ml-pipeline"
LOCAL_UI = "http://localhost:8080"
TIMEOUT_S = (10, 60)  # to connect, and to answer
BAD_REQUEST, NOT_FOUND, CONFLICT = 400, 404, 409


class RefusedError(DeployError):
    """The API refused a request."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


class UnansweredError(DeployError):
    """The API did not answer, so a request may have been carried out or not."""


@dataclass(frozen=True, kw_only=True)
class Location:
    """Where the API is."""

    configuration: kfp_server_api.Configuration
    address: str  # as the user knows it
    found: str  # what named it
    namespace: str  # where Kubeflow Pipelines runs
    ui: str = ""  # where a browser finds the UI; empty where a port has to be forwarded to it first
    credentials: str  # as whom we ask, in words
    cookies: str | None = None
    proxied: bool = False  # whether kubeconfig's API server stands in between


def port_forward(namespace: str) -> str:
    """Return the command that brings the UI to `LOCAL_UI`."""
    return f"kubectl port-forward --namespace {namespace} service/ml-pipeline-ui 8080:80"


def find(host: str, namespace: str, environment: Mapping[str, str]) -> Location:
    """Find the API; a `DeployError` if there is none, or its configuration is wrong."""
    namespace, ui = namespace or DEFAULT_NAMESPACE, environment.get(KUBEFLOW_UI, "")
    configuration = kfp_server_api.Configuration(host="")
    # What may have arrived is not sent again, except for reading; a redirection leads to a login page, which we must see as such.
    configuration.retries = urllib3.Retry(
        connect=2, read=2, other=0, status=0, redirect=False, backoff_factor=0.2, allowed_methods=["GET"]
    )
    given = {"--host": host} | {name: environment.get(name, "") for name in HOST_VARIABLES}
    if name := next((name for name, value in given.items() if value), ""):
        configuration.host = given[name].split("#")[0].rstrip("/")
        if not re.match(r"https?://[^/]", configuration.host):
            raise DeployError(f"{name} must start with http:// or https://, got {given[name]!r}")
        if authority := environment.get(AUTHORITY_VARIABLE):
            if not Path(authority).is_file():
                raise DeployError(
                    f"{AUTHORITY_VARIABLE}={authority} is no file; name the certificate authority's PEM file"
                )
            configuration.ssl_ca_cert = authority
        found, ui = f"from {name}", ui or configuration.host
    elif environment.get("KUBERNETES_SERVICE_HOST") and POD_FILES.is_dir():
        configuration.host = f"http://{SERVICE}.{namespace}.svc.cluster.local:8888"
        found = "the service in this cluster"
    else:
        return _through_kubeconfig(configuration, namespace, environment, ui)
    token = environment.get(TOKEN_VARIABLE, "").strip()
    file = environment.get(TOKEN_FILE_VARIABLE) or TOKEN_FILE
    used = []
    if token:
        configuration.api_key["authorization"] = token
        used.append(f"the token of {TOKEN_VARIABLE}")
    elif Path(file).is_file():

        def read_token(changed: kfp_server_api.Configuration) -> None:
            changed.api_key["authorization"] = Path(file).read_text(encoding="utf-8").strip()

        read_token(configuration)
        # Before each request: the kubelet renews it while we wait for a run.
        configuration.refresh_api_key_hook = read_token
        used.append(f"the token in {file}")
    configuration.api_key_prefix["authorization"] = "Bearer"
    if environment.get(COOKIES_VARIABLE):
        used.append(f"the cookies of {COOKIES_VARIABLE}")
    return Location(
        configuration=configuration,
        address=configuration.host,
        found=found,
        namespace=namespace,
        ui=ui,
        credentials=f"with {' and '.join(used)}" if used else "without token or cookies",
        cookies=environment.get(COOKIES_VARIABLE) or None,
    )


def _through_kubeconfig(
    configuration: kfp_server_api.Configuration, namespace: str, environment: Mapping[str, str], ui: str
) -> Location:
    try:
        context = proxy_to_service(
            configuration,
            kubeconfig=environment.get("KUBECONFIG") or None,
            namespace=namespace,
            service=SERVICE,
            port="http",
        )
    except ClusterError as error:
        raise DeployError(
            f"no Kubeflow Pipelines to be found: {HOST_VARIABLES[0]} is not set, this is no pod of a cluster, and {error}; "
            f"set {HOST_VARIABLES[0]} to the address of its UI or API, such as {LOCAL_UI} after: {port_forward(namespace)}"
        ) from error
    return Location(
        configuration=configuration,
        address=f"service {namespace}/{SERVICE}",
        found=f"through kubeconfig's context {context}",
        namespace=namespace,
        ui=ui,
        credentials="as kubeconfig's user",
        proxied=True,
    )


class Api(kfp_server_api.ApiClient):  # type: ignore[misc]  # it has no types
    """The generated client; each of its requests has a time limit, and each refusal is a `DeployError`. A context manager."""

    def __init__(self, place: Location) -> None:
        super().__init__(place.configuration, cookie=place.cookies)
        self.place = place
        self.user_namespace: str | None = None
        """The user's namespace; None where Kubeflow Pipelines serves one user and runs everything in its own."""
        self.health = kfp_server_api.HealthzServiceApi(self)
        self.pipelines = kfp_server_api.PipelineServiceApi(self)
        self.uploads = kfp_server_api.PipelineUploadServiceApi(self)
        self.experiments = kfp_server_api.ExperimentServiceApi(self)
        self.runs = kfp_server_api.RunServiceApi(self)
        self.schedules = kfp_server_api.RecurringRunServiceApi(self)

    @property
    def in_namespace(self) -> dict[str, str]:
        """Return the namespace's part of a request."""
        return {"namespace": self.user_namespace} if self.user_namespace else {}

    @property
    def pods_namespace(self) -> str:
        """Return where runs have their pods."""
        return self.user_namespace or self.place.namespace

    def call_api(self, *arguments: Any, **named: Any) -> Any:
        named["_request_timeout"] = TIMEOUT_S
        try:
            return super().call_api(*arguments, **named)
        except kfp_server_api.ApiException as error:
            raise _refused(self.place, self.user_namespace, error) from error
        except transport.HTTPError as error:
            raise _unanswered(self.place, error) from error

    def request(self, *arguments: Any, **named: Any) -> Any:
        response = super().request(*arguments, **named)
        if "json" not in response.urllib3_response.headers.get("content-type", ""):
            raise DeployError(
                f"{self.place.address} ({self.place.found}) answers with a page instead of the Kubeflow Pipelines API, most likely to "
                f"log in; {_login_advice(self.place)}"
            )
        return response

    def link(self, path: str) -> str:
        """Return what to open in a browser for `runs/details/ID`, with what has to be done before."""
        if self.place.ui:
            return f"{self.place.ui.rstrip('/')}/#/{path}"
        return f"{LOCAL_UI}/#/{path}  (after: {port_forward(self.place.namespace)})"

    def close(self) -> None:
        super().close()
        self.rest_client.pool_manager.clear()


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options that locate the API."""
    group = parser.add_argument_group(
        "where Kubeflow Pipelines is",
        f"""Without --host: the service in this cluster, if this is a pod, or else through kubeconfig's API server.
  {TOKEN_VARIABLE}, {COOKIES_VARIABLE}      a token, or the cookies of a browser that is logged in
  {TOKEN_FILE_VARIABLE}  a file with a token (default: {TOKEN_FILE})
  {AUTHORITY_VARIABLE}                 PEM file of a certificate authority of your own
  {KUBEFLOW_UI}    address of the UI for links, if it is another""",
    )
    group.add_argument(
        "--host", default="", metavar="URL", help=f"of its UI or its API (default: {', '.join(HOST_VARIABLES)})"
    )
    group.add_argument("--namespace", default="", help=f"where the runs go (default: NAMESPACE, {DEFAULT_NAMESPACE})")
    group.add_argument(
        "--kfp-namespace",
        default="",
        metavar="NAMESPACE",
        help="where Kubeflow Pipelines itself runs, if elsewhere, as with several users (default: KFP_NAMESPACE, --namespace)",
    )


def connect(options: argparse.Namespace, environment: Mapping[str, str] = os.environ) -> Api:
    """Find the API, say where and as whom it is asked, and see that it is the API; a `DeployError` if it is not."""
    namespace = options.namespace or environment.get("NAMESPACE", "")
    home = options.kfp_namespace or environment.get("KFP_NAMESPACE") or namespace
    place = find(options.host, home, environment)
    print(f"Kubeflow Pipelines: {place.address}, {place.found}, {place.credentials}", flush=True)
    api = Api(place)
    try:
        api.user_namespace = _user_namespace(api, namespace)
    except DeployError:
        api.close()
        raise
    return api


def _user_namespace(api: Api, namespace: str) -> str | None:
    try:
        multi_user = api.health.healthz_service_get_healthz().multi_user
    except RefusedError as error:
        if error.status != NOT_FOUND:
            raise
        place = api.place
        if place.proxied:
            raise DeployError(
                f"the cluster of {place.found.removeprefix('through ')} has no {place.address}: no such namespace, or another one is "
                f"meant; name the one that Kubeflow Pipelines runs in, KFP_NAMESPACE=..., or its address, {HOST_VARIABLES[0]}=..."
            ) from error
        raise DeployError(
            f"{place.address} ({place.found}) answers, but not as the Kubeflow Pipelines API (404 for /apis/v2beta1/healthz); "
            "give the address that the UI has before the #, such as http://localhost:8080 or https://HOST/pipeline"
        ) from error
    if not multi_user:
        if namespace and namespace != api.place.namespace:
            print(f"note: it serves one user and runs everything in its own namespace; {namespace} is not used")
        return None
    namespace = namespace or own_namespace()
    if not namespace:
        raise DeployError(f"Kubeflow Pipelines at {api.place.address} serves several users; name yours: NAMESPACE=...")
    return namespace


def every(method: Callable[..., Any], field: str, **arguments: Any) -> Iterator[Any]:
    """Yield all entries of a paged list: `method` returns a page for its arguments, whose `field` holds the entries."""
    token = ""
    while True:
        page = method(page_size=100, page_token=token, **arguments)
        yield from getattr(page, field) or []
        token = page.next_page_token or ""
        if not token:
            return


def named(name: str) -> str:
    """Return the filter of a list for what is shown under this name."""
    return json.dumps({"predicates": [{"key": "display_name", "operation": "EQUALS", "string_value": name}]})


def _refused(place: Location, namespace: str | None, error: kfp_server_api.ApiException) -> DeployError:
    """Make the message of an answer other than 2xx; `namespace` is the user's, where there are several users."""
    try:
        content = json.loads(error.body or "")
    except ValueError:  # a page says nothing
        content = {} if (error.body or "").lstrip().startswith("<") else {"message": error.body}
    keys = ("message", "error_message", "error")  # of KFP, its upload, Kubernetes
    text = next((content[key] for key in keys if content.get(key)), "") if isinstance(content, dict) else ""
    line = " ".join(str(text).split())
    status, who = int(error.status), f"{place.address} ({place.found})"
    answer = f"{status}: {line[:400]}" if line else str(status)
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


def _unanswered(place: Location, error: transport.HTTPError) -> DeployError:
    reason = getattr(error, "reason", None) or error
    where = f"{place.address} ({place.found})"
    if isinstance(reason, transport.SSLError):
        if "certificate" in str(reason).lower():
            advice = f"set {AUTHORITY_VARIABLE} to the PEM file of its authority"
            return DeployError(f"{where}: its certificate is not trusted ({reason}); {advice}")
        return DeployError(f"{where}: it does not speak TLS ({reason}); give http:// instead of https://")
    if isinstance(reason, transport.NameResolutionError):
        return UnansweredError(f"{where}: no such host; check the name, and the network or VPN that knows it")
    text = cause(reason)
    if isinstance(reason, transport.NewConnectionError) and not isinstance(reason.__cause__, ConnectionRefusedError):
        return UnansweredError(f"{where}: cannot be reached ({text}); check the address, the network and the VPN")
    if isinstance(reason, transport.NewConnectionError):
        return UnansweredError(
            f"{where}: connection refused; if a port is forwarded there, start that again: {port_forward(place.namespace)}"
        )
    if isinstance(reason, transport.TimeoutError):
        return UnansweredError(
            f"{where}: no answer in time ({text}); check the address, the network and the service {SERVICE}"
        )
    return UnansweredError(f"{where}: the connection broke before the answer ({text}); http or https?")
