"""Operators that a cluster need not have: Kubeflow Trainer v2, which runs TrainJobs, and Kueue, which holds jobs until there is room."""

import json
import re

import pytest

from components.launch.job_manifest import BACKENDS
from tests.cluster.conftest import LONG, eventually, installed, kubectl, objects, pool
from tests.cluster.faults import KILL, execute, registered

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(3600, func_only=True)]
QUEUE = "vit-distillation"
"""The LocalQueue and the ClusterQueue of manifests/components/kueue."""


def need(kind):
    """Skip the test where a cluster does not know a kind of object."""
    if not installed(kind):
        pytest.skip(f"not installed here: {kind}")


@pytest.fixture
def held():
    """Let Kueue admit nothing, until the test calls what this gives."""
    need("clusterqueues.kueue.x-k8s.io")

    def policy(text):
        change = json.dumps({"spec": {"stopPolicy": text}})
        kubectl("patch", "clusterqueue", QUEUE, "--type=merge", "--patch", change)

    policy("Hold")
    yield lambda: policy("None")
    policy("None")


def test_a_run_of_train_jobs(run_pipeline, uncached, mlflow):
    need("trainjobs.trainer.kubeflow.org")
    with pool(backend="trainjob") as name:
        run = run_pipeline(uncached, pool=name)
    assert run.exit_code == 0, run.output
    jobs = objects("trainjobs", f"vit-distillation/run={run.id}")
    assert {job["metadata"]["labels"]["vit-distillation/stage"] for job in jobs} == {"pretrain", "distill", "evaluate"}
    assert len(registered(mlflow, run)) == 1


def test_a_train_job_with_retries_goes_on_after_a_killed_process(run_pipeline, uncached, mlflow):
    """The failure policy of our runtime's JobSet starts both pods again, and the training resumes from its checkpoint."""
    need("trainingruntimes.trainer.kubeflow.org")
    with pool(backend="trainjob", retries=2) as name:
        run = run_pipeline(f"{uncached} distill.checkpoint_every=50", length=LONG, pool=name, wait=False)
        ours = f"vit-distillation/run={run.id},vit-distillation/stage=distill"

        def has_checkpoint():
            logs = kubectl("logs", "--selector", ours, "--container=node", "--tail=-1", check=False)
            steps = [int(step) for step in re.findall(r"distill  step (\d+)/", logs)]
            return max(steps, default=0) > 100 and [
                pod for pod in objects("pods", ours) if pod["status"]["phase"] == "Running"
            ]

        first, *_ = eventually(has_checkpoint, seconds=2400, what="the student has a checkpoint")
        assert not [one for one in first["spec"]["volumes"] if one["name"].startswith("kube-api-access-")], "a token"
        execute(first, "node", KILL)
        assert run.wait().exit_code == 0, run.output
    (job,) = objects("trainjobs", ours)
    (jobs,) = [one for one in objects("jobsets.jobset.x-k8s.io") if one["metadata"]["name"] == job["metadata"]["name"]]
    assert jobs["status"]["restarts"] == 1
    assert "resuming after step" in run.logs()
    assert len(registered(mlflow, run)) == 1


@pytest.mark.parametrize(
    "backend", sorted(BACKENDS.keys() - {"job"})
)  # that of a shared preparation, which no pool names
def test_queue_holds_job_until_there_is_room(run_pipeline, uncached, held, backend):
    jobs = str(BACKENDS[backend].resource)
    need(jobs)
    with pool(backend=backend, queue=QUEUE) as name:
        run = run_pipeline(uncached, pool=name, wait=False)
        eventually(lambda: "suspended, waiting in its queue" in run.logs(), seconds=900, what="the job is held back")
        (job,) = objects(jobs, f"vit-distillation/run={run.id}")
        assert not objects("pods", f"vit-distillation/run={run.id}"), "the job has pods already"
        held()
        assert run.wait().exit_code == 0, run.output
    assert job["metadata"]["labels"]["kueue.x-k8s.io/queue-name"] == QUEUE
