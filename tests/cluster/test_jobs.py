"""Training jobs that cannot run, followed by the real launcher on the real operator, without a pipeline around them."""

import json
import secrets
import threading

import pytest

from components.launch import pools
from components.launch.job_manifest import Identity
from components.launch.launcher import ClusterLauncher
from components.launch.pools import SecretKey
from tests.cluster.conftest import eventually, kubectl, objects
from trainer.graph import JobSpec
from trainer.io.errors import LaunchError

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(300, func_only=True)]


@pytest.fixture
def namespace():
    name = f"vit-distillation-{secrets.token_hex(4)}"
    kubectl("create", "namespace", name)
    yield name
    kubectl("delete", "namespace", name, "--wait=false")


@pytest.fixture
def fails(namespace, monkeypatch):
    """The message with which a job on pool `cpu` fails; changes of the pool by keyword."""
    monkeypatch.setattr("components.launch.job_progress.STUCK_S", 15.0)
    monkeypatch.setattr("components.launch.launcher.MINUTE_S", 0.5)
    spec = JobSpec(
        stage="pretrain",
        settings={},
        inputs={"dataset": "s3://bucket/dataset"},
        outputs={"teacher": "s3://bucket/teacher", "evidence": "s3://bucket/evidence"},
        nodes=2,
        processes_per_node=1,
    )

    def fails(**changes):
        little = {"cpu": "100m", "memory": "128Mi", "ephemeral-storage": "64Mi"}
        own = {"pod": {}, "retries": 0, "resources": little}
        pool = pools.get("cpu").model_copy(update={**own, **changes})
        job = Identity(run=f"test-{secrets.token_hex(4)}", task="pretrain", namespace=namespace)
        with pytest.raises(LaunchError) as failed:
            ClusterLauncher(pool, job, attempts=1).run(spec)
        return str(failed.value)

    return fails


def test_a_quota_that_is_too_small_is_named(fails, namespace):
    body = {
        "apiVersion": "v1",
        "kind": "ResourceQuota",
        "metadata": {"name": "small", "namespace": namespace},
        "spec": {"hard": {"requests.cpu": "50m"}},
    }
    kubectl("create", "--namespace", namespace, "--filename=-", text=json.dumps(body))
    message = fails(queued_minutes=40)
    assert "was not running after 20 s" in message
    assert "exceeded quota: small" in message
    assert kubectl("get", "pytorchjobs", "--namespace", namespace, "--output", "name") == ""


def test_a_secret_that_is_missing_is_named(fails):
    message = fails(secrets={"PASSWORD": SecretKey(name="no-such-secret", key="password")})
    assert "could not start for 15 s; last problem: " in message
    assert 'secret "no-such-secret" not found' in message


def test_an_image_that_is_not_there_is_named(fails):
    message = fails(image="localhost:1/no-such-image:1")
    assert "could not start for 15 s; last problem: " in message
    assert "localhost:1/no-such-image:1" in message


def test_worker_that_is_deleted_before_it_ran_is_named(fails, namespace, monkeypatch):
    """Kubernetes tells no reason, and the operator only that its limit was reached."""

    monkeypatch.setattr("components.launch.job_progress.STUCK_S", 120.0)

    def strike():
        selector = "training.kubeflow.org/replica-type=worker"
        waiting = eventually(
            lambda: objects("pods", selector, namespace=namespace), seconds=60, what="the worker's pod"
        )
        kubectl("delete", "pod", "--namespace", namespace, "--grace-period=1", waiting[0]["metadata"]["name"])

    thread = threading.Thread(target=strike)
    thread.start()
    try:
        message = fails(secrets={"PASSWORD": SecretKey(name="no-such-secret", key="password")})
    finally:
        thread.join()
    assert "worker-0 was deleted before it had started" in message
