"""The Kubeflow Pipelines API, found, asked and understood.

The generated client is used and not `kfp.Client` on top of it, which repeats and prints of its own accord, writes into the home
directory, and loses its way through the API server as soon as kubeconfig's user has a token.
"""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import kfp_server_api
from urllib3 import exceptions as transport

from pipelines import places, refusals
from pipelines.refusals import NOT_FOUND, RefusedError
from trainer.errors import DeployError

TIMEOUT_S = (10, 60)
"""To connect, and to answer."""


class Api(kfp_server_api.ApiClient):  # type: ignore[misc]  # it has no types
    """The generated client; each of its requests has a time limit, and each refusal is a `DeployError`. A context manager."""

    def __init__(self, place: places.Location) -> None:
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
        """What a request says of the namespace."""
        return {"namespace": self.user_namespace} if self.user_namespace else {}

    @property
    def pods_namespace(self) -> str:
        """Where runs have their pods."""
        return self.user_namespace or self.place.namespace

    def call_api(self, *arguments: Any, **named: Any) -> Any:
        named["_request_timeout"] = TIMEOUT_S
        try:
            return super().call_api(*arguments, **named)
        except kfp_server_api.ApiException as error:
            raise refusals.refused(self.place, self.user_namespace, error) from error
        except transport.HTTPError as error:
            raise refusals.unanswered(self.place, error) from error

    def request(self, *arguments: Any, **named: Any) -> Any:
        response = super().request(*arguments, **named)
        if "json" not in response.urllib3_response.headers.get("content-type", ""):
            raise refusals.login_page(self.place)
        return response

    def link(self, path: str) -> str:
        """What to open in a browser for `runs/details/ID`, with what has to be done before."""
        if self.place.ui:
            return f"{self.place.ui.rstrip('/')}/#/{path}"
        return f"{places.LOCAL_UI}/#/{path}  (after: {self.place.port_forward})"

    def close(self) -> None:
        super().close()
        self.rest_client.pool_manager.clear()


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options that say where the API is."""
    group = parser.add_argument_group(
        "where Kubeflow Pipelines is",
        f"""Without --host: the service in this cluster, if this is a pod, or else through kubeconfig's API server.
  {places.TOKEN_VARIABLE}, {places.COOKIES_VARIABLE}      a token, or the cookies of a browser that is logged in
  {places.TOKEN_FILE_VARIABLE}  a file with a token (default: {places.TOKEN_FILE})
  {places.AUTHORITY_VARIABLE}                 PEM file of a certificate authority of your own
  {places.UI_VARIABLE}    address of the UI for links, if it is another""",
    )
    hosts = ", ".join(places.HOST_VARIABLES)
    group.add_argument("--host", default="", metavar="URL", help=f"of its UI or its API (default: {hosts})")
    group.add_argument(
        "--namespace", default="", help=f"where the runs go (default: NAMESPACE, {places.DEFAULT_NAMESPACE})"
    )
    group.add_argument(
        "--kfp-namespace",
        default="",
        metavar="NAMESPACE",
        help="where Kubeflow Pipelines itself runs, if elsewhere, as with several users (default: KFP_NAMESPACE, --namespace)",
    )


def connect(options: argparse.Namespace, environment: Mapping[str, str] = os.environ) -> Api:
    """Find the API, say where and as whom it is asked, and see that it is the API.

    Args:
        options: what `add_arguments` added.
        environment: the environment variables.

    Raises:
        DeployError: it is nowhere to be found, does not answer, refuses, or is something else.
    """
    namespace = options.namespace or environment.get("NAMESPACE", "")
    home = options.kfp_namespace or environment.get("KFP_NAMESPACE") or namespace
    place = places.find(options.host, home, environment)
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
        if error.status == NOT_FOUND:
            raise refusals.not_there(api.place) from error
        raise
    if not multi_user:
        if namespace and namespace != api.place.namespace:
            print(f"note: it serves one user and runs everything in its own namespace; {namespace} is not used")
        return None
    own = places.POD_FILES / "namespace"
    namespace = namespace or (own.read_text().strip() if own.is_file() else "")
    if not namespace:
        raise DeployError(f"Kubeflow Pipelines at {api.place.address} serves several users; name yours: NAMESPACE=...")
    return namespace


def every(method: Callable[..., Any], field: str, **arguments: Any) -> Iterator[Any]:
    """All entries of a list that comes in pages.

    Args:
        method: lists them.
        field: of the answer, that holds them.
        arguments: of the method.
    """
    token = ""
    while True:
        page = method(page_size=100, page_token=token, **arguments)
        yield from getattr(page, field) or []
        token = page.next_page_token or ""
        if not token:
            return


def named(name: str) -> str:
    """The filter of a list for what is shown under this name."""
    return json.dumps({"predicates": [{"key": "display_name", "operation": "EQUALS", "string_value": name}]})
