"""The Role allows what is used, and nothing else."""

import logging

import pytest

from components.launch import client, job_manifest, pools, reaper
from components.launch.client import Cluster
from components.launch.job_manifest import BACKENDS
from components.launch.launcher import ClusterLauncher
from tests.manifests.jobs import IDENTITY, job, spec
from tests.stand_ins.kubernetes.resources import PYTORCHJOBS
from tests.stand_ins.kubernetes.stand_in import KubernetesStandIn, Script

KFP = {
    ("argoproj.io", "workflows", ""): {"get", "list"},  # the reaper lists them
    ("argoproj.io", "workflowtaskresults", ""): {"create", "patch"},
    ("", "configmaps", "kfp-launcher"): {"get"},
    ("", "secrets", "mlpipeline-minio-artifact"): {"get"},
}
"""What KFP 2.17's driver and launcher and Argo's executor ask for in a task's pod, as read in their sources; its launcher and driver
read pods as well."""


def used():
    """(group, resource, name or "") -> verbs."""
    launcher = {("", kind, ""): set(verbs) for kind, verbs in client.VERBS.items()}
    jobs = {
        (backend.resource.group, backend.resource.plural, ""): set(client.JOB_VERBS) for backend in BACKENDS.values()
    }
    return launcher | jobs | KFP


def allowed(role):
    rights = {}
    for rule in role["rules"]:
        for group in rule["apiGroups"]:
            for kind in rule["resources"]:
                for name in rule.get("resourceNames", [""]):
                    rights.setdefault((group, kind, name), set()).update(rule["verbs"])
    return rights


@pytest.mark.parametrize("folder", ["base", "overlays/kind", "overlays/eks"])
def test_rights_are_those_that_are_used(render, folder):
    roles = [one for one in render(folder) if one["kind"] in {"Role", "ClusterRole"}]
    assert [one["kind"] for one in roles] == ["Role"]
    assert allowed(roles[0]) == used()
    assert "*" not in str(roles[0]["rules"])


@pytest.fixture
def kubernetes(render, tmp_path, monkeypatch):
    """A cluster that answers 403 to whatever the Role does not allow."""
    monkeypatch.delenv("KUBERNETES_SERVICE_HOST", raising=False)
    (role,) = [one for one in render("base") if one["kind"] == "Role"]
    with KubernetesStandIn(tmp_path) as stand_in:
        monkeypatch.setenv("KUBECONFIG", str(stand_in.kubeconfig))
        stand_in.faults.allow_only(role["rules"])
        yield stand_in


def run(owner):
    account = job_manifest.Identity(run=IDENTITY.run, task=IDENTITY.task, owner=owner)
    ClusterLauncher(pools.get("cpu"), account).run(spec())


def test_the_launcher_works_with_them(kubernetes, caplog):
    """It creates a job, adopts one that runs, follows both to their ends, and deletes one that is left."""
    caplog.set_level(logging.INFO, logger="components")
    pod = kubernetes.add_pod("task")
    owner = job_manifest.Owner(name="task", uid=pod["metadata"]["uid"])
    kubernetes.script("distill-*", Script(output=["step 1", 0.3, "step 2"]))
    run(owner)
    kubernetes.script(
        "distill-*", Script(output=["step 1", 5.0, "step 2"])
    )  # so that it still runs when it is looked for
    kubernetes.add(PYTORCHJOBS, job("cpu", attempt=2))
    run(owner)
    first, second = kubernetes.list(PYTORCHJOBS)
    for one in (first, second):
        assert kubernetes.conditions(one["metadata"]["name"])["Succeeded"] == "True"
        assert [kept["name"] for kept in one["metadata"]["ownerReferences"]] == ["task"]
    kubernetes.script("distill-*", Script(hang=True))
    left = kubernetes.add(PYTORCHJOBS, job("cpu", attempt=3))
    with Cluster.connect() as cluster:
        assert reaper.delete_jobs(cluster, IDENTITY.run) == [left["metadata"]["name"]]
    assert [record.getMessage() for record in caplog.records if record.levelno > logging.INFO] == []
