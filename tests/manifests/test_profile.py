"""overlays/profile: what a namespace of a shared Kubeflow gets, held against what Kubeflow gives to a profile.

Of KFP 2.17.0, manifests/kustomize/base/installs/multi-user/pipelines-profile-controller/sync.py, and of its SeaweedFS's policy.
"""

import fnmatch
import os
from pathlib import Path

import pytest

from components import kfp_components
from tests.manifests.test_network import selects
from tests.manifests.workloads import template, workloads

OVERLAY = Path(__file__).parents[2] / "manifests" / "overlays" / "profile"
NAME = "your-profile"
WRITABLE = ("artifacts/", f"private-artifacts/{NAME}/", f"private/{NAME}/", "shared/")
"""Below `mlpipeline`, for the key of a profile; what is below private-artifacts/ goes after some days."""
PROFILES = {"app.kubernetes.io/part-of": "kubeflow-profile"}
"""Labels of a profile's namespace, by which Kubeflow's store admits it."""


@pytest.fixture(scope="module")
def objects(render):
    return render("overlays/profile")


def of(objects, kind):
    return {one["metadata"]["name"]: one for one in objects if one["kind"] == kind}


def test_all_is_in_the_profile_and_nothing_is_a_server(objects):
    assert {one["metadata"]["namespace"] for one in objects} == {NAME}
    assert [one["kind"] for one in workloads(objects)] == ["CronJob"]
    (subject,) = of(objects, "RoleBinding")["vit-distillation"]["subjects"]
    assert subject["namespace"] == NAME
    for one in workloads(objects):
        assert template(one)["metadata"]["labels"]["sidecar.istio.io/inject"] == "false"


def test_the_store_is_kubeflows_below_what_the_profile_may_write(objects, render):
    environment = of(objects, "ConfigMap")[kfp_components.CONFIG_MAP]["data"]
    assert set(environment) == set(kfp_components.ENVIRONMENT)
    for name in ("TRAINER_ARTIFACTS", "TRAINER_CHECKPOINTS", "NEURON_COMPILE_CACHE_URL"):
        key = environment[name].removeprefix("s3://mlpipeline/")
        assert key.startswith(WRITABLE)
        assert not key.startswith("private-artifacts/")
    there = of(render("overlays/kind"), "ConfigMap")[kfp_components.CONFIG_MAP]["data"]
    assert environment["AWS_ENDPOINT_URL_S3"] == there["AWS_ENDPOINT_URL_S3"].replace("seaweedfs", "seaweedfs.kubeflow")


def test_jobs_reach_the_central_mlflow_and_it_admits_them(objects, render):
    central = render("overlays/kind")
    (egress,) = [one["spec"]["egress"] for one in of(objects, "NetworkPolicy").values()]
    mlflow = template(of(central, "Deployment")["mlflow"])
    assert mlflow["metadata"]["labels"]["sidecar.istio.io/inject"] == "false"
    peers = [
        (rule, peer)
        for rule in egress
        for peer in rule.get("to", [])
        if peer.keys() >= {"namespaceSelector", "podSelector"}
    ]
    reached = {
        name: rule["ports"][0]["port"]
        for rule, peer in peers
        for name, labels in {"mlflow": mlflow["metadata"]["labels"], "seaweedfs": {"app": "seaweedfs"}}.items()
        if selects(peer["podSelector"], labels)
    }
    assert reached == {"mlflow": 5000, "seaweedfs": 8333}
    assert all(selects(peer["namespaceSelector"], {"kubernetes.io/metadata.name": "kubeflow"}) for _, peer in peers)
    (rule,) = of(central, "NetworkPolicy")["mlflow"]["spec"]["ingress"]
    assert any(selects(peer["namespaceSelector"], PROFILES) for peer in rule["from"] if "namespaceSelector" in peer)
    # The rest is as the policy of jobs has it elsewhere.
    usual = of(central, "NetworkPolicy")["vit-distillation-jobs"]["spec"]["egress"]
    for _, peer in peers:
        del peer["namespaceSelector"]
    assert egress == usual
    # MLflow answers to the name that the profile uses.
    (server,) = mlflow["spec"]["containers"]
    (hosts,) = [text.partition("=")[2].split(",") for text in server["command"] if text.startswith("--allowed-hosts=")]
    address = of(objects, "ConfigMap")[kfp_components.CONFIG_MAP]["data"]["MLFLOW_TRACKING_URI"].removeprefix("http://")
    assert any(fnmatch.fnmatch(address, host) for host in hosts)


def test_optional_parts_are_a_line_away(render, tmp_path):
    text = (OVERLAY / "kustomization.yaml").read_text()
    assert text.count("\n  # - ") == 3
    for part in ("queue.yaml", "network-policy.yaml", "environment.env"):
        (tmp_path / part).write_bytes((OVERLAY / part).read_bytes())
    there = os.path.relpath(OVERLAY.parents[1], tmp_path.resolve())
    text = text.replace("\n  # - ", "\n  - ").replace("../..", there)
    (tmp_path / "kustomization.yaml").write_text(text)
    found = render(os.path.relpath(tmp_path, OVERLAY.parents[1]))
    assert {one["metadata"]["namespace"] for one in found} == {NAME}
    assert {"TrainingRuntime", "PodMonitor"} < {one["kind"] for one in found}
    (queue,) = [one for one in found if one["kind"] == "LocalQueue"]
    (central,) = [one for one in render("components/kueue") if one["kind"] == "ClusterQueue"]
    assert queue["metadata"]["namespace"] == NAME
    assert queue["spec"]["clusterQueue"] == central["metadata"]["name"]
