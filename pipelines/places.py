"""Where the Kubeflow Pipelines API is, and as whom it is asked.

It is looked for where people have it, in this order: `--host` or KFP_HOST (or KFP_ENDPOINT, or kfp's own KF_PIPELINES_ENDPOINT);
the service in this cluster, if this is a pod; the API server of kubeconfig, which passes requests on to the service.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import kfp_server_api
import urllib3

from components.launch.client import NoKubeconfigError, proxy_to_service
from components.sections import KUBEFLOW_UI
from trainer.errors import DeployError

HOST_VARIABLES = ("KFP_HOST", "KFP_ENDPOINT", "KF_PIPELINES_ENDPOINT")
UI_VARIABLE = KUBEFLOW_UI
TOKEN_VARIABLE = "KFP_TOKEN"  # a name
COOKIES_VARIABLE = "KFP_COOKIES"
AUTHORITY_VARIABLE = "KFP_CA_FILE"
TOKEN_FILE_VARIABLE = "KF_PIPELINES_SA_TOKEN_PATH"  # kfp's name
TOKEN_FILE = "/var/run/secrets/kubeflow/pipelines/token"  # where kfp looks
POD_FILES = Path("/var/run/secrets/kubernetes.io/serviceaccount")
DEFAULT_NAMESPACE = "kubeflow"
SERVICE = "ml-pipeline"
LOCAL_UI = "http://localhost:8080"


@dataclass(frozen=True, kw_only=True)
class Location:
    """Where the API is."""

    configuration: kfp_server_api.Configuration
    address: str
    """As the user knows it."""
    found: str
    """What named it."""
    namespace: str
    """Where Kubeflow Pipelines runs."""
    ui: str = ""
    """Where a browser finds the UI; empty where a port has to be forwarded to it first."""
    credentials: str
    """As whom we ask, in words."""
    cookies: str | None = None
    proxied: bool = False
    """Whether kubeconfig's API server stands in between."""

    @property
    def port_forward(self) -> str:
        """Return the command that brings the UI to `LOCAL_UI`."""
        return _port_forward(self.namespace)


def _port_forward(namespace: str) -> str:
    return f"kubectl port-forward --namespace {namespace} service/ml-pipeline-ui 8080:80"


def find(host: str, namespace: str, environment: Mapping[str, str]) -> Location:
    """Find where the API is.

    Args:
        host: as given on the command line, or empty.
        namespace: where Kubeflow Pipelines runs; empty for the usual one.
        environment: the environment variables.

    Raises:
        DeployError: nowhere, or what names it is wrong.
    """
    namespace, ui = namespace or DEFAULT_NAMESPACE, environment.get(UI_VARIABLE, "")
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
    return Location(
        configuration=configuration,
        address=configuration.host,
        found=found,
        namespace=namespace,
        ui=ui,
        credentials=_authenticate(configuration, environment),
        cookies=environment.get(COOKIES_VARIABLE) or None,
    )


def _through_kubeconfig(
    configuration: kfp_server_api.Configuration, namespace: str, environment: Mapping[str, str], ui: str
) -> Location:
    kubeconfig = environment.get("KUBECONFIG") or None
    try:
        context = proxy_to_service(
            configuration, kubeconfig=kubeconfig, namespace=namespace, service=SERVICE, port="http"
        )
    except NoKubeconfigError as error:
        raise DeployError(
            f"no Kubeflow Pipelines to be found: {HOST_VARIABLES[0]} is not set, this is no pod of a cluster, and {error}; "
            f"set {HOST_VARIABLES[0]} to the address of its UI or API, such as {LOCAL_UI} after: {_port_forward(namespace)}"
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


def _authenticate(configuration: kfp_server_api.Configuration, environment: Mapping[str, str]) -> str:
    """Set the token; gives in words as whom we ask."""
    token = environment.get(TOKEN_VARIABLE, "").strip()
    file = environment.get(TOKEN_FILE_VARIABLE) or TOKEN_FILE
    used = []
    if token:
        configuration.api_key["authorization"] = token
        used.append(f"the token of {TOKEN_VARIABLE}")
    elif Path(file).is_file():

        def read_token(changed: kfp_server_api.Configuration) -> None:
            changed.api_key["authorization"] = Path(file).read_text().strip()

        read_token(configuration)
        # Before each request: the kubelet renews it while we wait for a run.
        configuration.refresh_api_key_hook = read_token
        used.append(f"the token in {file}")
    configuration.api_key_prefix["authorization"] = "Bearer"
    if environment.get(COOKIES_VARIABLE):
        used.append(f"the cookies of {COOKIES_VARIABLE}")
    return f"with {' and '.join(used)}" if used else "without token or cookies"
