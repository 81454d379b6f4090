"""Network policies where they are enforced: who reaches the pods of a training, and what these reach."""

import json
import secrets

import pytest

from tests.cluster.conftest import SERVING, eventually, kubectl

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(600, func_only=True)]
PORT = 9999
REACH = """
import json, socket, sys
found = {}
for address in sys.argv[1:]:
    host, _, port = address.rpartition(":")
    try:
        socket.create_connection((host, int(port)), 5).close()
    except OSError:
        found[address] = False
    else:
        found[address] = True
print(json.dumps(found))
"""


@pytest.fixture(scope="module")
def pods():
    """Name -> address of a server: two like those of a training, one like any other, and one that a policy of its own closes."""
    suffix = secrets.token_hex(4)
    labels = {
        "first": {"vit-distillation/stage": "test"},
        "second": {"vit-distillation/stage": "test"},
        "other": {"test": f"other-{suffix}"},
        "closed": {"test": f"closed-{suffix}"},
    }
    secure = {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}}
    documents = [
        {
            "apiVersion": "v1",
            "kind": "Pod",
            "metadata": {"name": f"test-{name}-{suffix}", "labels": own},
            "spec": {
                "securityContext": {
                    "runAsNonRoot": True,
                    "runAsUser": 1000,
                    "seccompProfile": {"type": "RuntimeDefault"},
                },
                "terminationGracePeriodSeconds": 0,
                "containers": [
                    {
                        "name": "server",
                        "image": SERVING,
                        "command": ["python", "-m", "http.server", str(PORT)],
                        "readinessProbe": {
                            "exec": {
                                "command": [
                                    "python",
                                    "-c",
                                    f"import socket; socket.create_connection(('127.0.0.1', {PORT}))",
                                ]
                            }
                        },
                        "securityContext": secure,
                    }
                ],
            },
        }
        for name, own in labels.items()
    ]
    policy = {"podSelector": {"matchLabels": labels["closed"]}, "policyTypes": ["Ingress"]}
    documents.append(
        {
            "apiVersion": "networking.k8s.io/v1",
            "kind": "NetworkPolicy",
            "metadata": {"name": f"test-{suffix}"},
            "spec": policy,
        }
    )
    names = {name: f"test-{name}-{suffix}" for name in labels}
    kubectl("apply", "--filename", "-", text=json.dumps({"apiVersion": "v1", "kind": "List", "items": documents}))
    try:
        kubectl("wait", "--for=condition=Ready", "--timeout=180s", *(f"pod/{name}" for name in names.values()))
        found = {
            name: kubectl("get", "pod", pod, "--output", "jsonpath={.status.podIP}") for name, pod in names.items()
        }
        yield names, {name: f"{address}:{PORT}" for name, address in found.items()}
    finally:
        kubectl("delete", "--wait=false", f"networkpolicy/test-{suffix}", *(f"pod/{name}" for name in names.values()))


def reached(pod, *addresses):
    """Which of these a pod can connect to."""
    answers = json.loads(kubectl("exec", pod, "--", "python", "-c", REACH, *addresses))
    return {address for address, is_open in answers.items() if is_open}


def test_pods_of_training_reach_only_what_they_need(pods):
    names, at = pods
    mlflow, store, pipelines = "mlflow:5000", "seaweedfs:8333", "ml-pipeline:8888"
    if at["closed"] in reached(names["other"], at["closed"]):
        pytest.skip("nothing enforces network policies here")
    allowed = {at["second"], mlflow, store}
    # a pod's rules may come a moment after it
    eventually(
        lambda: reached(names["first"], at["second"], at["other"], mlflow, store, pipelines) == allowed,
        seconds=60,
        what=f"a training's pod reaches {allowed} and nothing else",
    )
    assert reached(names["other"], at["first"], at["second"], mlflow, pipelines) == {mlflow, pipelines}
