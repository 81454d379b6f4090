from __future__ import annotations

import logging
import threading

import pytest

from components.launch import pools
from components.launch.client import Cluster
from components.launch.job_manifest import Identity
from tests.stand_ins.kubernetes.stand_in import KubernetesStandIn
from trainer.graph import JobSpec


@pytest.fixture(autouse=True)
def environment(monkeypatch):
    """Nothing of this machine's own Kubernetes or pipeline, and short pauses."""
    monkeypatch.setattr("components.launch.launcher.EVENTS_S", 0.1)
    monkeypatch.setattr("components.launch.readers.RELIST_S", 0.05)
    monkeypatch.setattr("components.launch.readers.RECONNECT_S", 0.05)
    for name in ("KUBECONFIG", "KUBERNETES_SERVICE_HOST", "TRAINER_NAMESPACE", "TRAINER_POOLS", "TRAINER_IMAGE"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def kubernetes(tmp_path, monkeypatch):
    with KubernetesStandIn(tmp_path / "kubernetes") as stand_in:
        monkeypatch.setenv("KUBECONFIG", str(stand_in.kubeconfig))
        yield stand_in


@pytest.fixture
def still_kubernetes(tmp_path, monkeypatch):
    """A cluster in which nothing happens but what a test says."""
    with KubernetesStandIn(tmp_path, operator=False, kubelet=False) as stand_in:
        monkeypatch.setenv("KUBECONFIG", str(stand_in.kubeconfig))
        yield stand_in


@pytest.fixture
def cluster(kubernetes):
    with Cluster.connect() as connected:
        yield connected


@pytest.fixture
def threads_end():
    """No thread of ours outlives the test."""
    before = set(threading.enumerate())
    yield
    left = [thread.name for thread in set(threading.enumerate()) - before if "process_request" not in thread.name]
    assert left == []


@pytest.fixture
def logged(caplog):
    """All lines that the launcher logs."""
    caplog.set_level(logging.INFO, logger="components")
    return lambda: [record.getMessage() for record in caplog.records if record.name.startswith("components")]


@pytest.fixture
def pool():
    return pools.get("cpu").model_copy(update={"retries": 0})


@pytest.fixture
def identity():
    return Identity(run="20261121-digits", task="distill")


@pytest.fixture
def spec():
    return JobSpec(
        stage="distill",
        settings={"epochs": 1},
        inputs={"dataset": "s3://bucket/dataset", "teacher": "s3://bucket/teacher"},
        outputs={"student": "s3://bucket/student", "evidence": "s3://bucket/evidence"},
        nodes=2,
        processes_per_node=1,
    )
