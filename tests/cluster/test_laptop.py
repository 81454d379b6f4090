"""`make run POOL=cpu NODES=2`: the pipeline's tasks on this machine, its trainings on the cluster."""

import base64
import json
import os
import secrets
import socket
import subprocess
import sys

import pytest

from tests.cluster.conftest import NAMESPACE, SHORT, kubectl, objects

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(2400, func_only=True)]


@pytest.fixture
def store():
    """Variables by which both this machine and the cluster's pods reach the object store."""
    address = kubectl("get", "service", "seaweedfs", "--output", "jsonpath={.spec.clusterIP}")
    try:
        socket.create_connection((address, 9000), timeout=5).close()
    except OSError as error:
        pytest.skip(f"the store's address in the cluster, {address}:9000, is not reached from this machine: {error}")
    keys = json.loads(kubectl("get", "secret", "vit-distillation-store", "--output", "jsonpath={.data}"))
    return {
        "AWS_ENDPOINT_URL_S3": f"http://{address}:9000",
        "AWS_DEFAULT_REGION": "us-east-1",
        "TRAINER_ARTIFACTS": f"s3://mlpipeline/vit-distillation/laptop-{secrets.token_hex(4)}",
        **{name: base64.b64decode(value).decode() for name, value in keys.items()},
    }


def test_a_laptop_drives_a_pool(store, tmp_path):
    run = f"laptop-{secrets.token_hex(4)}"
    uncached = f"{SHORT} run.seed={secrets.randbelow(2**31)}"
    command = [
        sys.executable,
        "-m",
        "components.pool_run",
        "digits",
        "--overrides",
        uncached,
        "--output",
        str(tmp_path / run),
    ]
    command += ["--pool", "cpu", "--nodes", "2", "--processes", "1"]
    environment = os.environ | store | {"TRAINER_NAMESPACE": NAMESPACE}
    result = subprocess.run(command, capture_output=True, text=True, check=False, env=environment, timeout=2300)
    assert result.returncode == 0, result.stdout + result.stderr
    jobs = [
        job for job in objects("pytorchjobs", "vit-distillation/run") if run in json.dumps(job["metadata"]["labels"])
    ]
    assert {job["metadata"]["labels"]["vit-distillation/stage"] for job in jobs} == {"pretrain", "distill", "evaluate"}
    assert not any("ownerReferences" in job["metadata"] for job in jobs), "the reaper would take them"
    for job in jobs:
        kubectl("delete", "pytorchjob", job["metadata"]["name"])
