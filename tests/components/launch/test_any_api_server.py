"""The launcher on an API server without operator and kubelet, whose part the test plays: the stand-in, and a real kube-apiserver where
its binaries are at hand (`KUBEBUILDER_ASSETS`)."""

from __future__ import annotations

import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace

import pytest
from kubernetes import client, config

from components.launch import reaper
from components.launch.client import ApiRetry
from components.launch.job import TaskJob
from components.launch.job_manifest import BACKENDS, HASH_ANNOTATION
from components.launch.launcher import ClusterLauncher
from tests.stand_ins.kubernetes.real_api_server import RealApiServer, why_missing
from tests.stand_ins.kubernetes.stand_in import KubernetesStandIn
from trainer.io.errors import LaunchError

KINDS = {
    "pytorchjob": ("kubeflow.org", "v1", "pytorchjobs"),
    "trainjob": ("trainer.kubeflow.org", "v1alpha1", "trainjobs"),
}
SUCCEEDED = {"pytorchjob": "Succeeded", "trainjob": "Complete"}
SERVERS = [
    "stand-in",
    pytest.param("real", marks=pytest.mark.skipif(bool(why_missing()), reason=f"no real API server: {why_missing()}")),
]


@pytest.fixture(params=SERVERS)
def kubernetes(request, tmp_path, monkeypatch):
    server = {
        "stand-in": lambda: KubernetesStandIn(tmp_path, operator=False, kubelet=False),
        "real": lambda: RealApiServer(tmp_path),
    }[request.param]()
    with server:
        monkeypatch.setenv("KUBECONFIG", str(server.kubeconfig))
        yield server


@pytest.fixture(params=KINDS)
def backend(request):
    return request.param


class Jobs:
    """What operator and kubelet would do, by the API."""

    def __init__(self, connection, backend, namespace):
        self._api, self._core = client.CustomObjectsApi(connection), client.CoreV1Api(connection)
        group, version, plural = KINDS[backend]
        self._kind, self._backend = (group, version, namespace, plural), BACKENDS[backend]
        self._namespace = namespace

    def names(self):
        listed = self._api.list_namespaced_custom_object(*self._kind)["items"]
        return [job["metadata"]["name"] for job in listed if "deletionTimestamp" not in job["metadata"]]

    def get(self, name):
        return self._api.get_namespaced_custom_object(*self._kind, name)

    def wait(self):
        """The name of the one job, as soon as it is there."""
        deadline = time.monotonic() + 20
        while not (names := self.names()):
            assert time.monotonic() < deadline
            time.sleep(0.02)
        (name,) = names
        return name

    def set_condition(self, name, kind, message=""):
        now = "2026-01-01T00:00:00Z"
        condition = {
            "type": kind,
            "status": "True",
            "reason": f"Job{kind}",
            "message": message,
            "lastTransitionTime": now,
        }
        self._api.patch_namespaced_custom_object_status(*self._kind, name, {"status": {"conditions": [condition]}})

    def label(self, name, value):
        """Change something that the launcher does not care about, so that its watch has something to tell."""
        self._api.patch_namespaced_custom_object(*self._kind, name, {"metadata": {"labels": {"else": value}}})


@pytest.fixture
def jobs(kubernetes, backend):
    with config.new_client_from_config(str(kubernetes.kubeconfig)) as connection:
        yield Jobs(connection, backend, kubernetes.namespace)
        connection.rest_client.pool_manager.clear()


@pytest.fixture
def launch(pool, identity, spec, backend):
    """Starts the launcher in a thread, and gives what becomes of it."""
    chosen = pool.model_copy(update={"backend": backend, "runtime": "torch-distributed"})

    @contextmanager
    def launched():
        with ThreadPoolExecutor(1) as executor:
            yield executor.submit(ClusterLauncher(chosen, identity, attempts=1).run, spec)

    return launched


def test_a_job_is_made_followed_and_succeeds(jobs, launch, backend, logged):
    with launch() as ended:
        name = jobs.wait()
        assert jobs.get(name)["metadata"]["annotations"][HASH_ANNOTATION]
        for value in ("a", "b"):
            jobs.label(name, value)
        jobs.set_condition(name, SUCCEEDED[backend])
        assert ended.result(timeout=20) is None
    assert any("succeeded" in line for line in logged())


def test_field_that_cluster_does_not_know_is_refused(jobs, cluster, pool, identity, spec, backend):
    """As `runtimePatches` by Trainer 2.1, whose pods would have run without it."""

    def renderer(*arguments):
        manifest = BACKENDS[backend].renderer(*arguments)
        return manifest | {"spec": manifest["spec"] | {"ofNextYear": True}}

    newer = replace(BACKENDS[backend], renderer=renderer)
    chosen = pool.model_copy(update={"backend": backend, "runtime": "torch-distributed"})
    with pytest.raises(LaunchError, match=r"have no field spec\.ofNextYear: install a newer version"):
        TaskJob(cluster, newer, spec, chosen, identity).submit(ApiRetry(5))
    assert jobs.names() == []


def test_pools_own_part_of_pods_is_accepted(jobs, cluster, pool, identity, spec, backend):
    own = {
        "metadata": {"labels": {"team": "vision"}},
        "spec": {
            "imagePullSecrets": [{"name": "registry"}],
            "volumes": [{"name": "photos", "persistentVolumeClaim": {"claimName": "fsx"}}],
            "containers": [{"volumeMounts": [{"name": "photos", "mountPath": "/photos"}]}],
        },
    }
    chosen = pool.model_copy(update={"backend": backend, "runtime": "torch-distributed", "pod": own})
    job = TaskJob(cluster, BACKENDS[backend], spec, chosen, identity)
    assert job.submit(ApiRetry(5))
    assert "claimName': 'fsx'" in str(jobs.get(job.name)["spec"])


def test_a_job_that_fails_is_an_error(jobs, launch):
    with launch() as ended:
        jobs.set_condition(jobs.wait(), "Failed", "the replicas were not to be had")
        with pytest.raises(LaunchError, match=r"JobFailed.*the replicas were not to be had"):
            ended.result(timeout=20)


def test_the_same_job_is_adopted_and_another_refused(jobs, cluster, pool, identity, spec, backend):
    chosen = pool.model_copy(update={"backend": backend, "runtime": "torch-distributed"})
    assert TaskJob(cluster, BACKENDS[backend], spec, chosen, identity).submit(ApiRetry(5))
    assert not TaskJob(cluster, BACKENDS[backend], spec, chosen, identity).submit(ApiRetry(5))
    another = replace(spec, settings={"epochs": 2})
    with pytest.raises(LaunchError, match=r"exists already with another specification: .*epochs"):
        TaskJob(cluster, BACKENDS[backend], another, chosen, identity).submit(ApiRetry(5))
    assert reaper.delete_jobs(cluster, identity.run) == [
        TaskJob(cluster, BACKENDS[backend], spec, chosen, identity).name
    ]
    assert jobs.names() == []


def test_job_that_another_client_deletes_is_error(jobs, launch, cluster, identity):
    with launch() as ended:
        jobs.wait()
        threading.Event().wait(0.2)
        reaper.delete_jobs(cluster, identity.run)
        with pytest.raises(LaunchError, match="deleted"):
            ended.result(timeout=20)
