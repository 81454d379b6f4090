"""The pipeline on a cluster: Kubeflow Pipelines, the training operator, an object store and MLflow, all real."""

import argparse
import json
import re
import secrets
import subprocess
import sys

import pytest

from pipelines import connection, versions
from tests.cluster.conftest import LONG, NAMESPACE, eventually, image, kubectl, objects
from tests.cluster.faults import registered

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(4500, func_only=True)]
TRAININGS = {"pretrain", "distill"}


def conditions(job):
    return {one["type"] for one in job.get("status", {}).get("conditions", []) if one["status"] == "True"}


def trained(run):
    """The stages for which a run has made jobs, but for `evaluate`, which every run does."""
    return {job["metadata"]["labels"]["vit-distillation/stage"] for job in run.jobs()} - {"evaluate"}


def parent_run(mlflow, run):
    experiments = [one["experiment_id"] for one in mlflow("experiments/search", max_results=1000)["experiments"]]
    found = mlflow("runs/search", experiment_ids=experiments, filter=f"tags.`trainer.run` = '{run.id}'").get("runs", [])
    nested = {tag["key"] for one in found for tag in one["data"]["tags"]}
    assert nested, f"no run of {run.id} in MLflow"
    (parent,) = [one for one in found if "mlflow.parentRunId" not in {tag["key"] for tag in one["data"]["tags"]}]
    return parent["info"]


def test_two_runs_at_once_their_cache_and_changed_setting(run_pipeline, mlflow):
    """Four runs, as users make them: two that train everything, one that trains nothing, and one that trains the student only.

    Their images are prepared by two pods together.
    """
    shared = ["--prepare-pool", "cpu", "--prepare-nodes", "2"]
    seeds = [f"run.seed={seed} data.split_seed={seed}" for seed in (secrets.randbelow(2**31) for _ in range(2))]
    for first in [run_pipeline(seed, wait=False, further=shared) for seed in seeds]:
        assert first.wait().exit_code == 0, first.output
        assert "register: succeeded" in first.output, "KFP has lost sight of the last tasks: the Workflow is too large"
        assert trained(first) == TRAININGS
        (preparing,) = objects("jobs.batch", f"vit-distillation/run={first.id}")
        assert "Complete" in conditions(preparing)
        for job in first.jobs():
            replicas = job["spec"]["pytorchReplicaSpecs"]
            assert {name: replica["replicas"] for name, replica in replicas.items()} == {"Master": 1, "Worker": 1}
            assert "Succeeded" in conditions(job)
            assert job["metadata"]["labels"]["vit-distillation/attempt"] == "1"
        assert parent_run(mlflow, first)["status"] == "FINISHED"
        assert len(registered(mlflow, first)) == 1
    second = run_pipeline(seeds[0], further=shared)
    assert second.exit_code == 0, second.output
    assert trained(second) == set()
    third = run_pipeline(f"{seeds[0]} distill.logit.temperature=3", further=shared)
    assert third.exit_code == 0, third.output
    assert trained(third) == {"distill"}


def test_a_failing_job_fails_its_run_at_once(run_pipeline, uncached):
    """What the trainer itself refuses would come again: neither the task nor Argo pays for it twice."""
    run = run_pipeline(f"{uncached} pretrain.finetune.base_learning_rate=1e30")
    assert run.exit_code != 0
    assert "pretrain" in run.output
    (job,) = run.jobs()
    assert "Failed" in conditions(job)
    assert len(run.task_pods("pretrain")) == 1


def test_run_that_is_stopped_in_training_leaves_no_job(run_pipeline, uncached, mlflow):
    run = run_pipeline(uncached, length=LONG, wait=False)
    eventually(lambda: run.pods("distill", "worker"), seconds=2400, what="the distillation has begun")
    run.stop()
    eventually(lambda: not run.jobs("distill"), seconds=300, what="all jobs of the stopped run are deleted")
    eventually(lambda: not run.pods("distill", "worker"), seconds=120, what="all training pods are gone")
    status = eventually(
        lambda: (ended := parent_run(mlflow, run)["status"]) != "RUNNING" and ended,
        seconds=300,
        what="it ends in MLflow",
    )
    assert status == "KILLED"


def test_the_reaper_has_its_image_and_its_rights():
    name = f"reaper-{secrets.token_hex(4)}"
    kubectl("create", "job", name, "--from=cronjob/vit-distillation-reaper")
    kubectl("wait", f"job/{name}", "--for=condition=Complete", "--timeout=180s")
    assert " of this project's jobs deleted in namespace" in kubectl("logs", f"job/{name}")
    kubectl("delete", "job", name)


def test_what_was_deployed_can_be_taken_back():
    """This version alone; runs and what they made stay, and the next deployment makes it again."""

    def undeploy():
        command = [sys.executable, "-m", "pipelines.undeploy", "--namespace", NAMESPACE, *image()]
        return subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)

    deploying = [sys.executable, "-m", "pipelines.deploy", "--namespace", NAMESPACE, *image()]
    subprocess.run(deploying, check=True, timeout=120)
    assert undeploy().returncode == 0
    assert "is not there; nothing to remove" in undeploy().stdout


@pytest.fixture
def account():
    """A service account with the rights of ours but those on training jobs."""
    name = f"test-{secrets.token_hex(4)}"
    role = json.loads(kubectl("get", "role", "vit-distillation", "--output", "json"))
    rules = [rule for rule in role["rules"] if "kubeflow.org" not in str(rule["apiGroups"])]
    rights = {"apiVersion": "rbac.authorization.k8s.io/v1", "metadata": {"name": name}}
    parts = [
        {"apiVersion": "v1", "kind": "ServiceAccount", "metadata": {"name": name}},
        {**rights, "kind": "Role", "rules": rules},
        {
            **rights,
            "kind": "RoleBinding",
            "roleRef": {"apiGroup": "rbac.authorization.k8s.io", "kind": "Role", "name": name},
            "subjects": [{"kind": "ServiceAccount", "name": name}],
        },
    ]
    kubectl("create", "--filename=-", text=json.dumps({"apiVersion": "v1", "kind": "List", "items": parts}))
    yield name
    kubectl("delete", f"serviceaccount/{name}", f"role/{name}", f"rolebinding/{name}")


def test_a_denied_right_is_explained(run_pipeline, uncached, account):
    run = run_pipeline(uncached, further=["--service-account", account])
    assert run.exit_code != 0
    logs = run.logs()
    assert "no right to" in logs
    assert "pytorchjobs.kubeflow.org" in logs
    assert account in logs
    assert "apply the overlay that set up this namespace again" in logs


@pytest.fixture
def schedule():
    """A run of the recipe `grocery`, on digits, each minute."""
    command = [sys.executable, "-m", "pipelines.deploy", "--namespace", NAMESPACE, *image(), "--cron", "* * * * *"]
    command += ["--recipe", "grocery", "--dataset", "digits", "--pool", "cpu"]
    made = subprocess.run(command, check=True, capture_output=True, text=True, timeout=120).stdout
    yield re.search(r"recurringrun/details/([0-9a-f-]{36})", made)[1]
    parser = argparse.ArgumentParser()
    connection.add_arguments(parser)
    with connection.connect(parser.parse_args(["--namespace", NAMESPACE])) as api:
        for one in versions.schedules(api, versions.pipeline(api).pipeline_id):
            if one.display_name == "scheduled grocery":
                versions.remove_schedule(api, one)


def test_a_schedule_starts_runs(schedule):
    selector = "scheduledworkflows.kubeflow.org/scheduledWorkflowName"
    started = eventually(
        lambda: [one for one in objects("workflows", selector) if schedule in json.dumps(one["metadata"])],
        seconds=180,
        what="the schedule has started a run",
    )
    for workflow in started:
        run = workflow["metadata"]["labels"]["pipeline/runid"]
        subprocess.run([sys.executable, "-m", "pipelines.runs", "stop", run], check=True, timeout=120)
