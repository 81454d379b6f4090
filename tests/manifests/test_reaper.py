"""The CronJob that ends orphaned jobs: what it runs, as whom, when, and what it may and may not do."""

from __future__ import annotations

import re

import pytest

from components.launch import IMAGE, reaper
from components.launch import __main__ as command
from pipelines.compile import COMPILED
from tests.manifests.jobs import job
from tests.manifests.workloads import template
from tests.stand_ins.kubernetes.resources import PODS, PYTORCHJOBS
from tests.stand_ins.kubernetes.stand_in import KubernetesStandIn


@pytest.fixture
def cron_job(render):
    (found,) = [one for one in render("base") if one["kind"] == "CronJob"]
    return found["spec"]


@pytest.fixture
def container(cron_job):
    (found,) = cron_job["jobTemplate"]["spec"]["template"]["spec"]["containers"]
    return found


def test_reaper_cron_job(container, render, cron_job):
    assert container["command"][:3] == ["python", "-m", "components.launch"]
    assert container["image"] == IMAGE
    # On eks its image comes from a registry.
    (found,) = [one for one in render("overlays/eks") if one["kind"] == "CronJob"]
    (container,) = template(found)["spec"]["containers"]
    assert container["image"] == f"registry/{IMAGE}"
    # It comes often never twice and never stays.
    assert cron_job["schedule"] == "* * * * *"
    assert reaper.ORPHANED_AFTER_S + 60 == 3 * 60  # as documentation and messages say
    assert cron_job["concurrencyPolicy"] == "Forbid"
    assert cron_job["startingDeadlineSeconds"] < 60
    assert cron_job["jobTemplate"]["spec"]["activeDeadlineSeconds"] <= 300
    assert cron_job["successfulJobsHistoryLimit"] + cron_job["failedJobsHistoryLimit"] <= 2
    # A task that is tried again is there before it.
    duration, factor, tries = (
        {int(number) for number in re.findall(rf"{field}: (\d+)", COMPILED.read_text())}
        for field in ("backoffDuration", "backoffFactor", "maxRetryCount")
    )
    assert 2 * max(duration) * max(factor) ** (max(tries) - 1) <= reaper.ORPHANED_AFTER_S


def test_the_role_is_enough_for_it(render, container, tmp_path, monkeypatch, capsys):
    (role,) = [one for one in render("base") if one["kind"] == "Role"]
    monkeypatch.delenv("KUBERNETES_SERVICE_HOST", raising=False)
    with KubernetesStandIn(tmp_path, operator=False, kubelet=False) as kubernetes:
        monkeypatch.setenv("KUBECONFIG", str(kubernetes.kubeconfig))
        pod = kubernetes.add_pod("task")
        with kubernetes.store.changing(PODS, "kubeflow", "task") as ended:
            ended["metadata"]["creationTimestamp"] = "2026-01-01T00:00:00Z"
            ended["status"] = {"phase": "Failed", "reason": "Evicted"}
        orphan = job("cpu")
        owner = {"apiVersion": "v1", "kind": "Pod", "name": "task", "uid": pod["metadata"]["uid"]}
        orphan["metadata"]["ownerReferences"] = [owner]
        kubernetes.add(PYTORCHJOBS, orphan)
        kubernetes.faults.allow_only(role["rules"])
        assert command.main(container["command"][3:]) == 0
        kubernetes.wait_for(lambda: kubernetes.list(PYTORCHJOBS) == [])
    assert "1 of this project's jobs deleted" in capsys.readouterr().out
