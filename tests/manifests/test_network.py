"""Network policies select the pods that they are about, and let through what the pods need."""

import pytest

from components.launch import pools
from tests.manifests import jobs
from tests.manifests.jobs import job
from tests.manifests.pod_security import violations
from tests.manifests.workloads import template, workloads


def selects(selector, labels):
    rules = selector.get("matchExpressions", [])
    assert {rule["operator"] for rule in rules} <= {"Exists", "In"}
    found = all(rule["key"] in labels and labels[rule["key"]] in rule.get("values", labels.values()) for rule in rules)
    return found and selector.get("matchLabels", {}).items() <= labels.items()


@pytest.fixture(scope="module")
def policies(render):
    found = [one for one in render("overlays/kind") if one["kind"] == "NetworkPolicy"]
    return {one["metadata"]["name"]: one["spec"] for one in found}


@pytest.fixture(scope="module")
def pods(render):
    """Name -> labels of every kind of pod that the policies are about, and KFP's object store, as its manifests label it."""
    own = {one["metadata"]["name"]: template(one)["metadata"]["labels"] for one in workloads(render("overlays/kind"))}
    return {"job": jobs.templates(job("cpu"))[0]["metadata"]["labels"], "seaweedfs": {"app": "seaweedfs"}, **own}


def test_policies(policies, pods):
    about = {
        name: [pod for pod, labels in pods.items() if selects(spec["podSelector"], labels)]
        for name, spec in policies.items()
    }
    assert about == {"vit-distillation-jobs": ["job"], "mlflow": ["mlflow"], "mlflow-database": ["mlflow-database"]}
    # Who may come in.
    assert ingress(policies, pods, "job", "job") == {None}
    assert ingress(policies, pods, "mlflow", "job") == set()
    assert ingress(policies, pods, "job", "mlflow") == {5000}
    assert ingress(policies, pods, "mlflow", "mlflow-database") == {5432}
    assert ingress(policies, pods, "job", "mlflow-database") == set()

    # To names, its peers, MLflow, and an object store inside or outside.
    reached, outside, namespaces = {}, set(), {}
    for rule in policies["vit-distillation-jobs"]["egress"]:
        ports = frozenset(port["port"] for port in rule.get("ports", []))
        if "to" not in rule:
            outside |= ports
        for peer in rule.get("to", []):
            if set(peer) == {"namespaceSelector"}:
                (name,) = peer["namespaceSelector"]["matchLabels"].values()
                namespaces[name] = ports
            for pod in [pod for pod in pods if "podSelector" in peer and selects(peer["podSelector"], pods[pod])]:
                reached[pod] = ports
    assert reached == {"job": frozenset(), "mlflow": {5000}, "seaweedfs": {8333}}
    assert outside == {53, 443}
    # Trainer's server of a TrainJob's status (by its default), and Alertmanager.
    assert namespaces == {"kubeflow-system": {10443}, "monitoring": {9093}}


def ingress(policies, pods, source, target):
    """Ports on which a pod of the namespace reaches another; None: all."""
    found = set()
    for spec in policies.values():
        if "Ingress" in spec["policyTypes"] and selects(spec["podSelector"], pods[target]):
            for rule in spec.get("ingress", []):
                if any(selects(peer["podSelector"], pods[source]) for peer in rule["from"] if "podSelector" in peer):
                    found |= {port["port"] for port in rule["ports"]} if "ports" in rule else {None}
    return found


@pytest.mark.parametrize("name", list(pools.load()))
def test_jobs_meet_pod_security(name):
    for pod in jobs.templates(job(name)):
        assert violations(pod["spec"]) == []
