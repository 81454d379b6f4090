"""Jobs for GPUs and Neuron devices are scheduled where these are, by nodes that only claim to have them."""

import datetime
import json
import secrets
import threading

import pytest

from components.launch import pools
from tests.cluster.conftest import eventually, kubectl, objects
from tests.manifests.jobs import job

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(600, func_only=True)]
INSTANCE = "node.kubernetes.io/instance-type"
HEARTBEAT_S = 10.0
"""How often a node that has no kubelet is said to be well; Kubernetes gives up after 40 s."""


def accelerators(name):
    """Of a pool's pods."""
    return {key: text for key, text in pools.get(name).resources.items() if "/" in key}


def status(name):
    """Of a node with what one of the pool's has."""
    now = datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    amounts = {"cpu": "96", "memory": "512Gi", "ephemeral-storage": "900Gi", "pods": "10", **accelerators(name)}
    ready = {
        "type": "Ready",
        "status": "True",
        "reason": "Pretended",
        "lastHeartbeatTime": now,
        "lastTransitionTime": now,
    }
    return {"status": {"capacity": amounts, "allocatable": amounts, "conditions": [ready]}}


@pytest.fixture
def node():
    """Add a node for a pool, for as long as the test takes. Nothing runs on it: a pod gets so far that it is placed there."""
    made, over, threads = [], threading.Event(), []

    def beat(called, pool):
        while True:
            change = json.dumps(status(pool))
            kubectl("patch", "node", called, "--subresource=status", "--type=merge", "--patch", change, check=False)
            if over.wait(HEARTBEAT_S):
                return

    def add(pool):
        called = f"pretended-{secrets.token_hex(4)}"
        selector = pools.get(pool).pod["spec"]["nodeSelector"]
        taint = pools.get(pool).pod["spec"]["tolerations"][0]
        taints = [{"key": taint["key"], "value": "true", "effect": "NoSchedule"}]
        body = {
            "apiVersion": "v1",
            "kind": "Node",
            "metadata": {"name": called, "labels": selector},
            "spec": {"taints": taints},
        }
        kubectl("create", "--filename=-", text=json.dumps(body))
        made.append(called)
        threads.append(threading.Thread(target=beat, args=(called, pool)))
        threads[-1].start()
        return called

    yield add
    over.set()
    for thread in threads:
        thread.join()
    for called in made:
        kubectl("delete", "node", called)


@pytest.fixture
def submit(node):
    """Submit a job that wants a pool's accelerators and hardly anything else. It is gone before the nodes are."""
    submitted = []

    def submit_to(name, **counts):
        little = {"cpu": "100m", "memory": "64Mi"}
        manifest = job(
            name, nodes=1, resources=little | accelerators(name) | counts, shared_memory="16Mi", cache="16Mi"
        )
        kubectl("create", "--filename=-", text=json.dumps(manifest))
        submitted.append(manifest["metadata"]["name"])
        return submitted[-1]

    yield submit_to
    for name in submitted:
        kubectl("delete", "pytorchjob", name, "--ignore-not-found", "--wait=false")
        # No kubelet says that they have ended.
        kubectl("delete", "pod", "--selector", f"training.kubeflow.org/job-name={name}", "--force", "--grace-period=0")


def pod_of(name):
    return next(iter(objects("pods", f"training.kubeflow.org/job-name={name}")), None)


@pytest.mark.parametrize("name", ["gpu-a100", "neuron-trn1-16"])
def test_job_goes_to_nodes_of_its_pool(node, submit, name):
    made = node(name)
    there = {
        one["metadata"]["name"]
        for one in objects("nodes", f"{INSTANCE}={pools.get(name).pod['spec']['nodeSelector'][INSTANCE]}")
    }
    assert made in there
    submitted = submit(name)
    pod = eventually(
        lambda: (found := pod_of(submitted)) and found["spec"].get("nodeName") and found,
        seconds=120,
        what=f"the pod of {submitted} has a node",
    )
    assert pod["spec"]["nodeName"] in there


def test_more_than_a_node_has_stays_pending(node, submit):
    node("gpu-a100")
    submitted = submit("gpu-a100", **{"nvidia.com/gpu": "9"})

    def refused():
        pod = pod_of(submitted) or {"status": {}}
        found = [one for one in pod["status"].get("conditions", []) if one["type"] == "PodScheduled"]
        return found and "Insufficient nvidia.com/gpu" in found[0].get("message", "") and found[0]

    condition = eventually(refused, seconds=120, what=f"the scheduler's word on {submitted}")
    assert condition["reason"] == "Unschedulable"
