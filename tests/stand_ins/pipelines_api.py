"""A stand-in for the Kubeflow Pipelines API: an HTTP server for the v2beta1 requests that deploying makes, and the
v1beta1 one for a run's Workflow.

Bodies are checked strictly against the models of kfp-server-api, answers are built from them; an uploaded pipeline is read by kfp's
own loader, and a run's parameters are checked against it as the backend does. What runs do is scripted, and faults are ordered:

    with PipelinesApi() as api:
        api.script = [state("RUNNING", prepare="RUNNING"), state("FAILED", prepare="FAILED")]
        api.fail("POST", "/runs", lost=True)
"""

from __future__ import annotations

import datetime
import email
import json
import re
import ssl
import sys
import threading
import time
import uuid
from collections.abc import Mapping
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl, unquote, urlsplit

import kfp_server_api as models
import yaml
from google.protobuf import json_format

from tests.stand_ins.pipelines_models import RefusedError, check_parameters, checked, load, read, written

PREFIX = "/apis/v2beta1"
KUBERNETES_TOKEN = "of-kubernetes"
PROXY = re.compile(r"/api/v1/namespaces/([^/]+)/services/ml-pipeline:http/proxy(/.*)")
LOGIN = "/login"
LOGIN_PAGE = b"<!doctype html><title>Sign in</title><form>...</form>"
GRPC_CODES = {400: 3, 401: 16, 403: 7, 404: 5, 409: 6, 500: 13}


@dataclass
class Fault:
    """What goes wrong with the next requests of a method to paths that end so."""

    method: str
    path: str
    times: int = 1
    status: int = 0
    """Answer this, without doing anything."""
    message: str = ""
    """What that answer says."""
    page: bool = False
    """Answer a page to log in."""
    lost: bool = False
    """Do what is asked, and break the connection instead of answering."""
    twice: bool = False
    """Do it twice, as if somebody else had been faster."""
    seconds: float = 0.0
    """Answer so much later."""


@dataclass
class Store:
    pipelines: dict[str, Any] = field(default_factory=dict)
    versions: dict[str, Any] = field(default_factory=dict)
    experiments: dict[str, Any] = field(default_factory=dict)
    runs: dict[str, Any] = field(default_factory=dict)
    schedules: dict[str, Any] = field(default_factory=dict)
    steps: dict[str, list[Any]] = field(default_factory=dict)


def state(run: str, message: str = "", **tasks: str) -> dict[str, Any]:
    """One step of a run: its state, and the states of its tasks, of which KFP says no more."""
    details = [
        models.V2beta1PipelineTaskDetail(display_name=name.replace("_", "-"), state=text)
        for name, text in {"root-driver": "SUCCEEDED", **tasks, "executor": "RUNNING"}.items()
    ]
    return {"state": run, "error": _error(message), "run_details": models.V2beta1RunDetails(task_details=details)}


def _error(message: str) -> Any:
    return models.GoogleRpcStatus(code=13, message=message) if message else None


class _Server(ThreadingHTTPServer):
    daemon_threads = True

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that goes away, or does not trust our certificate, is no error; all else is shown, by the base class."""
        if not isinstance(sys.exception(), ConnectionError | ssl.SSLError):
            super().handle_error(request, client_address)


class PipelinesApi:
    """The server; a context manager.

    Args:
        token: what must come as a bearer token; empty for anybody.
        cookie: what must come as a cookie, if not empty.
        namespaces: of the users, with several of them; None for one user.
        certificate: of a TLS server: certificate and key in one PEM file.
    """

    def __init__(
        self, *, token: str = "", cookie: str = "", namespaces: set[str] | None = None, certificate: Path | None = None
    ) -> None:
        self.token, self.cookie, self.namespaces = token, cookie, namespaces
        self.store = Store()
        self.script = [
            state("PENDING"),
            state("RUNNING", configure="RUNNING"),
            state("SUCCEEDED", configure="SUCCEEDED"),
        ]
        self.workflow: dict[str, Any] = {}
        """The Workflow of every run, as KFP keeps it."""
        self.page_limit = 2
        self.requests: list[str] = []
        self._faults: list[Fault] = []
        self._lock = threading.Lock()
        self._server = _Server(("127.0.0.1", 0), type("Handler", (_Handler,), {"api": self}))
        self._scheme = "http"
        if certificate:
            context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
            context.load_cert_chain(certificate)
            self._server.socket = context.wrap_socket(self._server.socket, server_side=True)
            self._scheme = "https"
        self._thread = threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)

    def __enter__(self) -> PipelinesApi:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()

    @property
    def port(self) -> int:
        return self._server.server_address[1]

    @property
    def host(self) -> str:
        return f"{self._scheme}://127.0.0.1:{self.port}"

    def fail(self, method: str, path: str, **fault: Any) -> None:
        """Order a fault, of which `Fault` tells the kinds."""
        self._faults.append(Fault(method, path, **fault))

    def kubeconfig(self, path: Path, *, token: str = KUBERNETES_TOKEN) -> Path:
        """Write a kubeconfig whose API server is this server, which passes requests on to the service."""
        config = {
            "apiVersion": "v1",
            "kind": "Config",
            "current-context": "stand-in",
            "clusters": [{"name": "c", "cluster": {"server": self.host}}],
            "users": [{"name": "u", "user": {"token": token}}],
            "contexts": [{"name": "stand-in", "context": {"cluster": "c", "user": "u"}}],
        }
        path.write_text(yaml.safe_dump(config), encoding="utf-8")
        return path

    def count(self, method: str, path: str) -> int:
        """How many requests of a method to a path came."""
        return self.requests.count(f"{method} {path}")

    def fault(self, method: str, path: str) -> Fault | None:
        with self._lock:
            for fault in self._faults:
                if fault.times and fault.method == method and path.endswith(fault.path):
                    fault.times -= 1
                    return fault
        return None


class _Handler(BaseHTTPRequestHandler):
    api: PipelinesApi
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True  # else every answer waits 40 ms for the client

    def log_message(self, *_: object) -> None:
        pass

    def do_GET(self) -> None:
        self._handle()

    def do_POST(self) -> None:
        self._handle()

    def do_DELETE(self) -> None:
        self._handle()

    def _handle(self) -> None:
        body = self.rfile.read(int(self.headers.get("content-length") or 0))
        url = urlsplit(re.sub("^/+", "/", self.path))
        path, query = re.sub("//+", "/", url.path), dict(parse_qsl(url.query))
        fault = self.api.fault(self.command, path)
        if fault and fault.seconds:
            time.sleep(fault.seconds)
        if (fault and fault.page) or path == LOGIN:
            return self._send(200, LOGIN_PAGE, "text/html")
        try:
            if fault and fault.status:
                raise RefusedError(fault.status, fault.message)
            with self.api._lock:
                for _ in range(2 if fault and fault.twice else 1):
                    content = self._dispatch(path, query, body)
        except RefusedError as refusal:
            error = {
                "error": refusal.message,
                "code": GRPC_CODES.get(refusal.status, 2),
                "message": refusal.message,
                "details": [],
            }
            if "/upload" in path:
                error = {"error_message": refusal.message, "error_details": refusal.message}
            return self._send(refusal.status, json.dumps(error).encode())
        if fault and fault.lost:
            self.close_connection = True
            return None
        return self._send(200, json.dumps(content).encode())

    def _send(self, status: int, content: bytes, kind: str = "application/json") -> None:
        self.send_response(status)
        self.send_header("content-type", kind)
        if 300 <= status < 400:
            self.send_header("location", LOGIN)
        self.send_header("content-length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def _dispatch(self, path: str, query: dict[str, str], body: bytes) -> Any:
        proxied = PROXY.fullmatch(path)
        if proxied:
            if self.headers.get("authorization") != f"Bearer {KUBERNETES_TOKEN}":
                raise RefusedError(401, "Unauthorized")
            if proxied[1] != "kubeflow":
                raise RefusedError(404, 'services "ml-pipeline" not found')
            path = proxied[2]
        else:
            self._authorize()
        if run := re.fullmatch(r"/apis/v1beta1/runs/([^/]+)", path):
            _get(self.api.store.runs, run[1])
            return {"run": {"id": run[1]}, "pipeline_runtime": {"workflow_manifest": json.dumps(self.api.workflow)}}
        if not path.startswith(PREFIX):
            raise RefusedError(404, "Not Found")
        path = path.removeprefix(PREFIX)
        self.api.requests.append(f"{self.command} {path}")
        for method, pattern, answer in ROUTES:
            match = re.fullmatch(pattern, path)
            if method == self.command and match:
                content = answer(self.api, query, body, self.headers, *map(unquote, match.groups()))
                return written(content)
        raise RefusedError(404, "Not Found")

    def _authorize(self) -> None:
        if self.headers.get("authorization") == f"Bearer {KUBERNETES_TOKEN}":
            raise RefusedError(
                404, "the server could not find the requested resource"
            )  # it is the API server's own path
        if self.api.token and self.headers.get("authorization") != f"Bearer {self.api.token}":
            raise RefusedError(401, "Unauthenticated: there is no user identity header")
        if self.api.cookie and self.headers.get("cookie") != self.api.cookie:
            raise RefusedError(401, "Unauthenticated: there is no user identity header")


def _namespace(api: PipelinesApi, namespace: str | None) -> str | None:
    if api.namespaces is None:
        return None
    if not namespace:
        raise RefusedError(400, "A namespace cannot be empty in multi-user mode")
    if namespace not in api.namespaces:
        raise RefusedError(
            403, f"User 'user@example.com' is not authorized with reason: (request: namespace {namespace})"
        )
    return namespace


def _get(collection: Mapping[str, Any], identifier: str) -> Any:
    if identifier not in collection:
        raise RefusedError(404, f"ResourceNotFoundError: {identifier} not found")
    return collection[identifier]


def _page(api: PipelinesApi, query: dict[str, str], entries: list[Any]) -> tuple[list[Any], dict[str, Any]]:
    """The entries that the filter and the page ask for, and what the answer says of further ones."""
    if "filter" in query:
        content = json.loads(query["filter"].replace('"stringValue"', '"string_value"'))
        checked("V2beta1Filter", content)
        for predicate in content["predicates"]:
            assert predicate["operation"] in ("EQUALS", 1)
            entries = [entry for entry in entries if getattr(entry, predicate["key"]) == predicate["string_value"]]
    start = int(query.get("page_token") or 0)
    end = start + min(api.page_limit, int(query.get("page_size") or 10))
    return entries[start:end], {"total_size": len(entries), "next_page_token": str(end) if end < len(entries) else None}


def _healthz(api: PipelinesApi, *_: Any) -> Any:
    return models.V2beta1GetHealthzResponse(multi_user=api.namespaces is not None, pipeline_store="database")


def _pipeline_by_name(api: PipelinesApi, query: dict[str, str], _body: bytes, _headers: Any, name: str) -> Any:
    namespace = _namespace(api, query.get("namespace"))
    for pipeline in api.store.pipelines.values():
        if (pipeline.name, pipeline.namespace) == (name, namespace):
            return pipeline
    raise RefusedError(404, f"Failed to get a pipeline with name {name} and namespace {namespace}")


def _list_pipelines(api: PipelinesApi, query: dict[str, str], *_: Any) -> Any:
    namespace = _namespace(api, query.get("namespace"))
    entries = [entry for entry in api.store.pipelines.values() if entry.namespace == namespace]
    page, further = _page(api, query, entries)
    return models.V2beta1ListPipelinesResponse(pipelines=page or None, **further)


def _create_pipeline(api: PipelinesApi, _query: dict[str, str], body: bytes, *_: Any) -> Any:
    pipeline = read("V2beta1Pipeline", body)
    pipeline.namespace = _namespace(api, pipeline.namespace)
    if any(
        (known.name, known.namespace) == (pipeline.name, pipeline.namespace) for known in api.store.pipelines.values()
    ):
        raise RefusedError(409, f"Failed to create a new pipeline. The name {pipeline.name} already exists")
    pipeline.pipeline_id = str(uuid.uuid4())
    pipeline.created_at = datetime.datetime.now(datetime.UTC)
    api.store.pipelines[pipeline.pipeline_id] = pipeline
    return pipeline


def _delete_pipeline(api: PipelinesApi, query: dict[str, str], _body: bytes, _headers: Any, identifier: str) -> Any:
    _get(api.store.pipelines, identifier)
    if any(version.pipeline_id == identifier for version in api.store.versions.values()):
        raise RefusedError(400, f"Failed to delete pipeline with id {identifier} as it has existing pipeline versions")
    del api.store.pipelines[identifier]
    return {}


def _upload_version(api: PipelinesApi, query: dict[str, str], body: bytes, headers: Any) -> Any:
    unknown = set(query) - {"name", "display_name", "pipelineid", "description", "tags"}
    assert not unknown, unknown
    _get(api.store.pipelines, query["pipelineid"])
    form = email.message_from_bytes(b"content-type: " + headers["content-type"].encode() + b"\r\n\r\n" + body)
    (part,) = form.get_payload()
    assert part.get_param("name", header="content-disposition") == "uploadfile"
    text = part.get_payload(decode=True).decode()
    try:
        load(text)
    except (ValueError, KeyError, TypeError, yaml.YAMLError, json_format.ParseError) as error:
        raise RefusedError(400, f"Failed to read a pipeline spec file: {error}") from error
    same = (query["pipelineid"], query["name"])
    if any((version.pipeline_id, version.name) == same for version in api.store.versions.values()):
        raise RefusedError(409, "Failed to create a pipeline version")
    identifier = str(uuid.uuid4())
    api.store.versions[identifier] = models.V2beta1PipelineVersion(
        pipeline_id=query["pipelineid"],
        pipeline_version_id=identifier,
        name=query["name"],
        display_name=query.get("display_name") or query["name"],
        description=query.get("description"),
        created_at=datetime.datetime.now(datetime.UTC),
        pipeline_spec={"text": text},
    )
    return api.store.versions[identifier]


def _list_versions(api: PipelinesApi, query: dict[str, str], _body: bytes, _headers: Any, pipeline: str) -> Any:
    _get(api.store.pipelines, pipeline)
    entries = [version for version in api.store.versions.values() if version.pipeline_id == pipeline]
    page, further = _page(api, query, entries)
    return models.V2beta1ListPipelineVersionsResponse(pipeline_versions=page or None, **further)


def _delete_version(api: PipelinesApi, _query: Any, _body: bytes, _headers: Any, pipeline: str, identifier: str) -> Any:
    assert _get(api.store.versions, identifier).pipeline_id == pipeline
    del api.store.versions[identifier]
    return {}


def _list_experiments(api: PipelinesApi, query: dict[str, str], *_: Any) -> Any:
    namespace = _namespace(api, query.get("namespace"))
    entries = [entry for entry in api.store.experiments.values() if entry.namespace == namespace]
    page, further = _page(api, query, entries)
    return models.V2beta1ListExperimentsResponse(experiments=page or None, **further)


def _create_experiment(api: PipelinesApi, _query: dict[str, str], body: bytes, *_: Any) -> Any:
    experiment = read("V2beta1Experiment", body)
    experiment.namespace = _namespace(api, experiment.namespace)
    if any(known.display_name == experiment.display_name for known in api.store.experiments.values()):
        raise RefusedError(409, f"Failed to create a new experiment. The name {experiment.display_name} already exists")
    experiment.experiment_id = str(uuid.uuid4())
    api.store.experiments[experiment.experiment_id] = experiment
    return experiment


def _check_start(api: PipelinesApi, wanted: Any) -> None:
    """Refuse a run or schedule as the backend does: no name, experiment or version, or parameters that do not fit."""
    if not wanted.display_name:
        raise RefusedError(400, "The run name is empty. Please specify a valid name")
    _get(api.store.experiments, wanted.experiment_id)
    if getattr(wanted, "pipeline_spec", None):  # the run's own, not that of a version
        text = json.dumps(wanted.pipeline_spec["pipeline_spec"])
    else:
        text = _get(api.store.versions, wanted.pipeline_version_reference.pipeline_version_id).pipeline_spec["text"]
    spec = load(text).pipeline_spec
    check_parameters(spec, (wanted.runtime_config and wanted.runtime_config.parameters) or {})


def _create_run(api: PipelinesApi, _query: dict[str, str], body: bytes, *_: Any) -> Any:
    run = read("V2beta1Run", body)
    _check_start(api, run)
    run.run_id, run.state = str(uuid.uuid4()), "PENDING"
    run.created_at = datetime.datetime.now(datetime.UTC)
    api.store.runs[run.run_id] = run
    api.store.steps[run.run_id] = list(api.script)
    return run


def _get_run(api: PipelinesApi, _query: dict[str, str], _body: bytes, _headers: Any, identifier: str) -> Any:
    """Every look at a run is a step on."""
    run, steps = _get(api.store.runs, identifier), api.store.steps.get(identifier)
    if steps:
        for name, value in steps.pop(0).items():
            setattr(run, name, value)
    return run


def _list_runs(api: PipelinesApi, query: dict[str, str], *_: Any) -> Any:
    entries = [run for run in api.store.runs.values() if query.get("experiment_id") in (None, run.experiment_id)]
    page, further = _page(api, query, entries)
    return models.V2beta1ListRunsResponse(runs=page or None, **further)


def _terminate_run(api: PipelinesApi, _query: dict[str, str], _body: bytes, _headers: Any, identifier: str) -> Any:
    run = _get(api.store.runs, identifier)
    if run.state not in (None, "PAUSED", "PENDING", "RUNNING"):  # backend/src/apiserver/storage/run_store.go, KFP 2.17
        raise RefusedError(400, f"Failed to terminate a run: Failed to terminate a run {identifier}. Row not found")
    run.state, api.store.steps[identifier] = "CANCELING", [state("CANCELED")]
    return {}


def _create_schedule(api: PipelinesApi, _query: dict[str, str], body: bytes, *_: Any) -> Any:
    schedule = read("V2beta1RecurringRun", body)
    _check_start(api, schedule)
    if len(schedule.trigger.cron_schedule.cron.split()) not in (5, 6):
        raise RefusedError(400, "Schedule cron is not a supported format")
    schedule.recurring_run_id = str(uuid.uuid4())
    schedule.status = {"ENABLE": "ENABLED", "DISABLE": "DISABLED"}[schedule.mode]
    schedule.mode = None
    schedule.namespace = api.store.experiments[schedule.experiment_id].namespace
    api.store.schedules[schedule.recurring_run_id] = schedule
    return schedule


def _list_schedules(api: PipelinesApi, query: dict[str, str], *_: Any) -> Any:
    namespace = _namespace(api, query.get("namespace"))
    page, further = _page(api, query, [entry for entry in api.store.schedules.values() if entry.namespace == namespace])
    return models.V2beta1ListRecurringRunsResponse(recurring_runs=page or None, **further)


def _delete_schedule(api: PipelinesApi, _query: Any, _body: bytes, _headers: Any, identifier: str) -> Any:
    _get(api.store.schedules, identifier)
    del api.store.schedules[identifier]
    return {}


ROUTES = [
    ("GET", "/healthz", _healthz),
    ("GET", "/pipelines/names/([^/]+)", _pipeline_by_name),
    ("GET", "/pipelines", _list_pipelines),
    ("POST", "/pipelines", _create_pipeline),
    ("DELETE", "/pipelines/([^/]+)", _delete_pipeline),
    ("POST", "/pipelines/upload_version", _upload_version),
    ("GET", "/pipelines/([^/]+)/versions", _list_versions),
    ("DELETE", "/pipelines/([^/]+)/versions/([^/]+)", _delete_version),
    ("GET", "/experiments", _list_experiments),
    ("POST", "/experiments", _create_experiment),
    ("POST", "/runs", _create_run),
    ("GET", "/runs", _list_runs),
    ("GET", "/runs/([^/:]+)", _get_run),
    ("POST", "/runs/([^/:]+):terminate", _terminate_run),
    ("POST", "/recurringruns", _create_schedule),
    ("GET", "/recurringruns", _list_schedules),
    ("DELETE", "/recurringruns/([^/]+)", _delete_schedule),
]
