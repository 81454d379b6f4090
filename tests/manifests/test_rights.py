"""The Role allows what is used, and nothing else."""

import pytest

from components.launch import resources
from components.launch.backends import BACKENDS

KFP = {
    ("argoproj.io", "workflows", ""): {"get"},
    ("argoproj.io", "workflowtaskresults", ""): {"create", "patch"},
    ("", "configmaps", "kfp-launcher"): {"get"},
    ("", "secrets", "mlpipeline-minio-artifact"): {"get"},
}
"""What KFP 2.17's driver and launcher and Argo's executor ask for in a task's pod, as read in their sources; its launcher and driver
read pods as well."""


def used():
    """(group, resource, name or "") -> verbs."""
    launcher = {("", kind, ""): set(verbs) for kind, verbs in resources.VERBS.items()}
    jobs = {(backend.group, backend.plural, ""): set(resources.JOB_VERBS) for backend in BACKENDS.values()}
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
