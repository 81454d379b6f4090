"""Jobs for GPUs and Neuron devices are scheduled where these are; the nodes of manifests/kind/pretend.sh only claim to have them."""

import json

import pytest

from components.launch import pools
from tests.cluster.conftest import eventually, kubectl, objects
from tests.manifests.jobs import job

pytestmark = pytest.mark.cluster


@pytest.fixture
def submit():
    """Submit a job that wants a pool's accelerators and hardly anything else, for the nodes' processors and memory are this machine's."""
    submitted = []

    def submit_to(name, **counts):
        wanted = {key: text for key, text in pools.get(name).resources.items() if "/" in key} | counts
        little = {"cpu": "100m", "memory": "64Mi"}
        manifest = job(name, nodes=1, resources=little | wanted, shared_memory="16Mi", cache="16Mi")
        kubectl("create", "--filename=-", text=json.dumps(manifest))
        submitted.append(manifest["metadata"]["name"])
        return submitted[-1]

    yield submit_to
    for name in submitted:
        kubectl("delete", "pytorchjob", name, "--ignore-not-found")


def pod_of(name):
    return next(iter(objects("pods", f"training.kubeflow.org/job-name={name}")), None)


@pytest.mark.parametrize(("name", "node"), [("gpu-a100", "gpu"), ("neuron-trn1-16", "neuron")])
def test_a_job_goes_to_the_nodes_of_its_pool(submit, name, node):
    (expected,) = objects("nodes", f"vit-distillation/node={node}")
    submitted = submit(name)
    pod = eventually(
        lambda: (found := pod_of(submitted)) and found["spec"].get("nodeName") and found,
        seconds=120,
        what=f"the pod of {submitted} has a node",
    )
    assert pod["spec"]["nodeName"] == expected["metadata"]["name"]


def test_more_than_a_node_has_stays_pending(submit):
    submitted = submit("gpu-a100", **{"nvidia.com/gpu": "9"})

    def refused():
        pod = pod_of(submitted) or {"status": {}}
        found = [one for one in pod["status"].get("conditions", []) if one["type"] == "PodScheduled"]
        return found and found[0].get("reason") == "Unschedulable" and found[0]

    condition = eventually(refused, seconds=120, what=f"the scheduler's word on {submitted}")
    assert "Insufficient nvidia.com/gpu" in condition["message"]
