"""The pipeline on a cluster: Kubeflow Pipelines, the training operator, an object store and MLflow, all real."""

import json
import secrets
import subprocess
import sys
import urllib.request

import pytest

from tests.cluster.conftest import eventually, forwarded, kubectl, objects

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(4500)]


def conditions(job):
    return {one["type"] for one in job.get("status", {}).get("conditions", []) if one["status"] == "True"}


def test_the_whole_pipeline(run_pipeline):
    run = run_pipeline()
    assert run.exit_code == 0, run.output
    jobs = run.jobs()
    assert {job["metadata"]["labels"]["vit-distillation/stage"] for job in jobs} == {"pretrain", "distill"}
    for job in jobs:
        replicas = job["spec"]["pytorchReplicaSpecs"]
        assert {name: replica["replicas"] for name, replica in replicas.items()} == {"Master": 1, "Worker": 1}
        assert "Succeeded" in conditions(job)
    with (
        forwarded("mlflow", 5000) as port,
        urllib.request.urlopen(f"http://localhost:{port}/api/2.0/mlflow/registered-models/search") as answer,
    ):
        assert json.load(answer)["registered_models"]


def test_a_failing_job_turns_the_run_red(run_pipeline):
    """No earlier task can know that timm has no such student."""
    run = run_pipeline("distill.student.architecture=no_such_model")
    assert run.exit_code != 0
    assert "distill" in run.output
    assert "no_such_model" in run.logs()
    assert any("Failed" in conditions(job) for job in run.jobs())


def test_a_cancelled_run_leaves_no_job(run_pipeline):
    run = run_pipeline("run.seed=3 pretrain.finetune.epochs=2000", wait=False)  # a seed of its own: nothing is cached
    eventually(run.jobs, seconds=900, what="a training job of the run")
    subprocess.run([sys.executable, "-m", "pipelines.runs", "stop", run.id], check=True, timeout=120)
    eventually(lambda: not run.jobs(), seconds=300, what="all jobs of the stopped run are deleted")
    eventually(
        lambda: not objects("pods", f"vit-distillation/run={run.id}"), seconds=180, what="all training pods are gone"
    )


def test_the_reaper_has_its_image_and_its_rights():
    name = f"reaper-{secrets.token_hex(4)}"
    kubectl("create", "job", name, "--from=cronjob/vit-distillation-reaper")
    kubectl("wait", f"job/{name}", "--for=condition=Complete", "--timeout=180s")
    assert " of this project's jobs deleted in namespace" in kubectl("logs", f"job/{name}")
    kubectl("delete", "job", name)


@pytest.fixture
def no_right_to_jobs():
    """The Role without the rules on training jobs, for as long as the test takes."""
    role = json.loads(kubectl("get", "role", "vit-distillation", "--output", "json"))
    rules = [rule for rule in role["rules"] if "kubeflow.org" not in str(rule["apiGroups"])]
    change = [{"op": "replace", "path": "/rules", "value": rules}]
    kubectl("patch", "role", "vit-distillation", "--type=json", "--patch", json.dumps(change))
    yield
    change = [{"op": "replace", "path": "/rules", "value": role["rules"]}]
    kubectl("patch", "role", "vit-distillation", "--type=json", "--patch", json.dumps(change))


def test_a_denied_right_is_explained(run_pipeline, no_right_to_jobs):
    run = run_pipeline("run.seed=4")
    assert run.exit_code != 0
    logs = run.logs()
    assert "no right to" in logs
    assert "pytorchjobs.kubeflow.org" in logs
    assert "kubectl apply -k manifests/base" in logs
