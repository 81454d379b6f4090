"""Finding the cluster, requests, streams, and the way to a service."""

from __future__ import annotations

import queue
import socket
import threading
import time

import kfp_server_api
import pytest
import yaml

from components.launch.client import (
    ApiRetry,
    ApiUnavailableError,
    Cluster,
    ClusterError,
    ConflictError,
    ForbiddenError,
    LogNotReadyError,
    NotFoundError,
    RetryStopped,
    ServerRequest,
    UnauthorizedError,
    proxy_to_service,
    response_error,
)
from components.launch.job_manifest import PODS
from tests.stand_ins.kubernetes import resources as kinds
from tests.stand_ins.kubernetes.stand_in import Script

POD = {"metadata": {"name": "p", "labels": {"a": "1"}}, "spec": {"containers": [{"name": "main", "image": "task:1"}]}}


@pytest.fixture
def closed_port():
    """The address of a server that is not there."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = listener.getsockname()[1]
    return f"http://127.0.0.1:{port}"


def kubeconfig(path, server, user=None):
    context = {"cluster": "c", "user": "u"}
    content = {
        "current-context": "here",
        "clusters": [{"name": "c", "cluster": {"server": server}}],
        "users": [{"name": "u", "user": user or {}}],
        "contexts": [{"name": "here", "context": context}],
    }
    path.write_text(yaml.safe_dump(content))
    return str(path)


def test_objects_are_made_listed_changed_and_deleted(kubernetes, cluster):
    kubernetes.script("*", Script(hang=True))
    made = cluster.create(PODS, POD)
    assert cluster.get(PODS, "p")["metadata"]["uid"] == made["metadata"]["uid"]
    assert [item["metadata"]["name"] for item in cluster.list(PODS, labels="a=1")["items"]] == ["p"]
    assert cluster.list(PODS, fields="metadata.name=q")["items"] == []
    assert cluster.patch(PODS, "p", {"metadata": {"labels": {"a": "2"}}})["metadata"]["labels"] == {"a": "2"}
    with pytest.raises(ConflictError):
        cluster.create(PODS, POD)
    with pytest.raises(ConflictError):
        cluster.delete(PODS, "p", uid="another")
    cluster.delete(PODS, "p", uid=made["metadata"]["uid"])
    kubernetes.wait_for(lambda: kubernetes.list(kinds.PODS) == [])
    with pytest.raises(NotFoundError, match='cannot get pods p in namespace kubeflow: pods "p" not found'):
        cluster.get(PODS, "p")


def test_without_any_cluster_message_says_what_to_set(monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", str(tmp_path))
    with pytest.raises(
        ClusterError, match=r"not in a pod, and kubeconfig ~/.kube/config is not usable .* set KUBECONFIG"
    ):
        Cluster.connect()


@pytest.mark.parametrize("content", ["", "a: [", "kind: Config"])
def test_a_kubeconfig_that_is_none_is_named(monkeypatch, tmp_path, content):
    (tmp_path / "config").write_text(content)
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "config"))
    with pytest.raises(ClusterError, match=f"kubeconfig {tmp_path}/config is not usable"):
        Cluster.connect()


def test_a_pod_without_a_token_gets_a_message(monkeypatch):
    monkeypatch.setenv("KUBERNETES_SERVICE_HOST", "10.0.0.1")
    monkeypatch.setenv("KUBERNETES_SERVICE_PORT", "443")
    with pytest.raises(ClusterError, match="in a pod without a usable service account"):
        Cluster.connect()


def test_namespace_is_given_one_or_usual_one(kubernetes, monkeypatch):
    with Cluster.connect("given") as given, Cluster.connect() as usual:
        assert (given.namespace, usual.namespace) == ("given", "kubeflow")
    monkeypatch.setenv("TRAINER_NAMESPACE", "team")
    with Cluster.connect() as named:
        assert named.namespace == "team"


def test_a_server_that_does_not_exist_is_unavailable(monkeypatch, tmp_path, closed_port):
    monkeypatch.setenv("KUBECONFIG", kubeconfig(tmp_path / "config", closed_port))
    with Cluster.connect() as cluster, pytest.raises(ApiUnavailableError) as away:
        cluster.list(PODS)
    assert str(away.value).startswith(
        f"the API server {closed_port} does not answer: Failed to establish a new connection"
    )


def test_server_that_is_not_trusted_is_not_retried(monkeypatch, tmp_path, kubernetes):
    monkeypatch.setenv("KUBECONFIG", kubeconfig(tmp_path / "config", kubernetes.url.replace("http:", "https:")))
    with Cluster.connect() as cluster, pytest.raises(ClusterError) as refused:
        cluster.list(PODS)
    assert not isinstance(refused.value, ApiUnavailableError)
    assert "no trusted connection to the API server https://" in str(refused.value)


def test_refusals_are_named(kubernetes, cluster):
    kubernetes.faults.fail(401)
    with pytest.raises(UnauthorizedError, match=r"does not know who you are \(401, could not list pods .*log in again"):
        cluster.list(PODS)
    # A missing namespace is named.
    cluster.namespace = "nowhere"
    with pytest.raises(NotFoundError, match="there is no namespace nowhere: create it"):
        cluster.create(PODS, POD)


def test_watch_gives_changes_until_it_is_ended_from_another_thread(kubernetes, cluster):
    kubernetes.script("*", Script(hang=True))
    version, streams, ended = cluster.list(PODS)["metadata"]["resourceVersion"], [], []
    seen = queue.SimpleQueue()

    def read():
        try:
            for kind, item in cluster.watch(PODS, version, streams.append):
                seen.put((kind, item["metadata"]["name"]))
        except ApiUnavailableError as error:
            ended.append(error)

    thread = threading.Thread(target=read)
    thread.start()
    kubernetes.add_pod("p")
    assert seen.get(timeout=60) == ("ADDED", "p")
    time.sleep(0.3)  # the thread waits for more
    streams[0].shutdown()
    thread.join(60)
    assert not thread.is_alive(), "the server would have it wait for ever"
    assert len(ended) == 1


def test_watch_from_an_expired_version_says_so(kubernetes, cluster):
    version = cluster.list(PODS)["metadata"]["resourceVersion"]
    kubernetes.add_pod("p")
    kubernetes.compact()
    with pytest.raises(ClusterError, match="410"):
        list(cluster.watch(PODS, version, lambda stream: None))


def test_log_that_has_not_begun_is_not_ready(kubernetes, cluster):
    kubernetes.script("p", Script(pull_error_s=5))
    uid = cluster.create(PODS, POD)["metadata"]["uid"]
    kubernetes.wait_for(lambda: any(reason == "Failed" for _, reason, _ in kubernetes.events("p")))
    with pytest.raises(LogNotReadyError, match="waiting to start"):
        list(cluster.log("p", lambda stream: None, uid=uid, container="main"))


def test_page_of_proxy_is_no_api_server(monkeypatch, tmp_path):
    def serve(listener):
        connection, _ = listener.accept()
        with connection:
            connection.recv(65536)
            connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Type: text/html\r\nContent-Length: 13\r\n\r\n<html></html>")

    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=serve, args=(listener,))
        thread.start()
        server = f"http://127.0.0.1:{listener.getsockname()[1]}"
        monkeypatch.setenv("KUBECONFIG", kubeconfig(tmp_path / "config", server))
        with Cluster.connect() as cluster, pytest.raises(ClusterError, match="did not answer with JSON"):
            cluster.list(PODS)
        thread.join()


PROXY = "https://cluster.example:6443/api/v1/namespaces/kubeflow/services/ml-pipeline:http/proxy"


def proxied(directory, user):
    file = kubeconfig(directory / "config", "https://cluster.example:6443", user)
    configuration = kfp_server_api.Configuration()
    context = proxy_to_service(configuration, kubeconfig=file, namespace="kubeflow", service="ml-pipeline", port="http")
    assert context == "here"
    return configuration


@pytest.mark.parametrize("user", [{"token": "secret"}, {}])
def test_the_address_is_the_services_for_every_request(tmp_path, user):
    configuration = proxied(tmp_path, user)
    for _ in range(3):
        credentials = configuration.auth_settings()
        assert configuration.host == PROXY
        assert bool(credentials) == bool(user)


@pytest.mark.parametrize("message", ["exceeded quota: gpus", 'admission webhook "w" denied the request: you cannot'])
def test_403_is_not_always_a_matter_of_rights(message):
    error = response_error(403, message, ServerRequest("https://c", "kubeflow", "create", PODS))
    assert not isinstance(error, ForbiddenError)
    assert str(error) == f"cannot create pods in namespace kubeflow: the API server https://c answered 403: {message}"


@pytest.mark.parametrize(
    "error",
    [
        (0, "[SSL: UNEXPECTED_EOF_WHILE_READING] EOF occurred in violation of protocol", ("list", PODS)),
        (404, "the server could not find the requested resource ( pods/log p)", ("get", PODS, ("p", "log"))),
    ],
    ids=["handshake that is cut", "kubelet that has just restarted"],
)
def test_what_passes_by_itself_is_retried(error):
    status, message, asked = error
    assert isinstance(
        response_error(status, message, ServerRequest("https://c", "kubeflow", *asked)), ApiUnavailableError
    )


def failing(times, error):
    """An action that fails so often before it succeeds."""
    left = [error] * times

    def action():
        if left:
            raise left.pop()
        return "done"

    return action


def test_retries(logged):
    assert ApiRetry(10)(failing(3, ApiUnavailableError("the server is away"))) == "done"
    assert logged()[0] == "the server is away; retrying for at most 10 s"
    assert logged()[1].startswith("the API server answers again after ")
    assert len(logged()) == 2
    # Other errors are not retried.
    left = failing(2, ForbiddenError("no right"))
    with pytest.raises(ForbiddenError):
        ApiRetry(10)(left)
    with pytest.raises(ForbiddenError):
        left()
    assert left() == "done"
    # The timeout counts from the loss.
    retry, start = ApiRetry(0.3), time.monotonic()
    with pytest.raises(ApiUnavailableError):
        retry(failing(1000, ApiUnavailableError("away")))
    assert 0.3 <= time.monotonic() - start < 30


def test_a_stop_ends_all_waiting():
    retry, ended = ApiRetry(1000), threading.Event()

    def wait():
        with pytest.raises(RetryStopped):
            retry(failing(1000, ApiUnavailableError("away")))
        ended.set()

    thread = threading.Thread(target=wait)
    thread.start()
    time.sleep(0.1)
    retry.stop()
    assert ended.wait(30)
    thread.join()
    with pytest.raises(RetryStopped):
        retry(failing(0, None))
