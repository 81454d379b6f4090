"""Prometheus finds the replica that has measurements, at the port that jobs open, and the dashboard asks for what is there."""

import importlib
import inspect
import json
import re

import pytest

from components.launch import pools
from components.launch.job_manifest import METRICS_PORT
from tests.manifests import jobs
from tests.manifests.test_network import selects
from trainer.graph import STAGES
from trainer.report.tracking import exporter


@pytest.fixture
def objects(render):
    return {one["kind"]: one for one in render("components/monitoring")}


@pytest.fixture
def endpoint(objects):
    (found,) = objects["PodMonitor"]["spec"]["podMetricsEndpoints"]
    return found


def is_kept(endpoint, labels):
    """Whether a running pod with these labels stays a target, as Prometheus relabels."""
    known = {f"__meta_kubernetes_pod_label_{re.sub(r'[^a-zA-Z0-9_]', '_', key)}": text for key, text in labels.items()}
    known["__meta_kubernetes_pod_phase"] = "Running"
    rules = [rule for rule in endpoint["relabelings"] if rule.get("action") == "keep"]
    assert len(rules) == 2
    return all(
        re.fullmatch(rule["regex"], ";".join(known.get(name, "") for name in rule["sourceLabels"])) for rule in rules
    )


@pytest.mark.parametrize(("replica", "kept"), [("master", True), ("worker", False)])
def test_the_first_replica_of_a_pytorchjob_is_read(endpoint, replica, kept):
    labels = {"training.kubeflow.org/replica-type": replica, "training.kubeflow.org/replica-index": "0"}
    assert is_kept(endpoint, labels) == kept


def test_the_first_replica_of_a_trainjob_is_read(endpoint):
    label = "batch.kubernetes.io/job-completion-index"
    assert is_kept(endpoint, {label: "0"})
    assert not is_kept(endpoint, {label: "1"})


def test_jobs_that_answer_are_read_and_no_others(objects):
    """What opens a session answers, as its process exports what the session tracks."""
    answering = {
        name
        for name in STAGES
        if "open_session(" in inspect.getsource(importlib.import_module(f"trainer.stages.{name}"))
    }
    selector = objects["PodMonitor"]["spec"]["selector"]
    assert {name for name in STAGES if selects(selector, jobs.IDENTITY.labels(name))} == answering
    assert answering == {"pretrain", "distill"}


def test_the_port_is_that_of_jobs(objects, endpoint):
    (template, *_) = jobs.templates(jobs.job("cpu"))
    (container,) = template["spec"]["containers"]
    assert {"name": exporter.PORT_VARIABLE, "value": str(METRICS_PORT)} in container["env"]
    labels = template["metadata"]["labels"]
    policy = objects["NetworkPolicy"]["spec"]
    assert selects(objects["PodMonitor"]["spec"]["selector"], labels)
    assert selects(policy["podSelector"], labels)
    peers, prometheus = policy["ingress"]
    assert selects(peers["from"][0]["podSelector"], labels), (
        "else the policy would cut the pods of a job off from one another"
    )
    assert "ports" not in peers
    assert prometheus["ports"] == [{"port": METRICS_PORT}]

    def address(ip):
        rules = [rule for rule in endpoint["relabelings"] if rule.get("targetLabel") == "__address__"]
        (found,) = [rule["replacement"] for rule in rules if re.fullmatch(rule["regex"], ip)]
        return found.replace("$1", ip)

    assert address("10.0.0.7") == f"10.0.0.7:{METRICS_PORT}"
    assert address("fd00::7") == f"[fd00::7]:{METRICS_PORT}"
    assert all(f":{METRICS_PORT}" not in str(pool.environment) for pool in pools.load().values())


def test_the_dashboard_asks_for_what_is_exported(objects):
    found = objects["ConfigMap"]
    assert found["metadata"]["labels"]["grafana_dashboard"] == "1"
    dashboard = json.loads(found["data"]["dashboard.json"])
    asked = {name for panel in dashboard["panels"] for name in re.findall(r"trainer_\w+", panel["targets"][0]["expr"])}
    assert asked == set(exporter._HELP)
