"""The CronJob that ends orphaned jobs: what it runs, as whom, when, and what it may and may not do."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

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
    assert container["image"] == f"registry/{IMAGE.replace(':', '-reaper:')}"
    # It comes often never twice and never stays.
    assert cron_job["schedule"] == "*/3 * * * *"
    assert reaper.ORPHANED_AFTER_S + 3 * 60 == 5 * 60  # as documentation and messages say
    assert cron_job["concurrencyPolicy"] == "Forbid"
    assert cron_job["startingDeadlineSeconds"] < 3 * 60
    assert cron_job["jobTemplate"]["spec"]["activeDeadlineSeconds"] <= 300
    assert cron_job["successfulJobsHistoryLimit"] + cron_job["failedJobsHistoryLimit"] <= 2
    # A task that is tried again is there before it.
    duration, factor, tries = (
        {int(number) for number in re.findall(rf"{field}: (\d+)", COMPILED.read_text())}
        for field in ("backoffDuration", "backoffFactor", "maxRetryCount")
    )
    assert 2 * max(duration) * max(factor) ** (max(tries) - 1) <= reaper.ORPHANED_AFTER_S


ALONE = """
import sys
from importlib.metadata import packages_distributions
allowed = set(sys.argv[1].split())
others = {name for name, owners in packages_distributions().items() if not {one.lower().replace("_", "-") for one in owners} & allowed}
for name in others:
    sys.modules[name] = None  # as if it were not installed
from components.launch import __main__
import components.launch.reaper, components.launch.finishing
from trainer.report import tracking
tracking.client()
sys.exit(__main__.main(["reap", "--orphaned"]))
"""


def test_it_needs_its_own_few_packages_only(tmp_path):
    """An image without torch is fetched in seconds, on whichever node the pod lands."""
    text = (Path(__file__).parents[2] / "requirements" / "reaper.txt").read_text()
    locked = set(re.findall(r"^([a-z0-9][\w.-]*)==", text, re.MULTILINE))
    assert not locked & {"torch", "numpy", "pyarrow", "kfp", "mlflow"}
    environment = os.environ | {"KUBECONFIG": str(tmp_path / "none"), "MLFLOW_TRACKING_URI": "http://127.0.0.1:9"}
    environment.pop("KUBERNETES_SERVICE_HOST", None)
    ended = subprocess.run(
        [sys.executable, "-c", ALONE, " ".join(locked)], env=environment, capture_output=True, text=True, check=False
    )
    assert (ended.returncode, "none" in ended.stderr) == (2, True), ended.stderr
    assert "not installed" not in ended.stderr


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
