"""The exit task: on a cluster with jobs that are left, and with what MLflow knows of the run."""

from __future__ import annotations

import copy
import inspect
from datetime import UTC, datetime, timedelta

import pytest
from kfp.local.orchestrator import enhanced_dag_orchestrator

from components.launch import __main__ as command
from components.launch import finishing
from tests.manifests.jobs import job
from tests.stand_ins.kubernetes.resources import PYTORCHJOBS, WORKFLOWS
from tests.stand_ins.kubernetes.stand_in import KubernetesStandIn
from trainer.report import tracking

RUN = "0b8e1f"


@pytest.fixture
def tracked(mlflow_uri, monkeypatch):
    """A run whose parent run was made by an earlier task, in an experiment that only that task knew."""
    monkeypatch.setenv("MLFLOW_TRACKING_URI", mlflow_uri)
    monkeypatch.setenv("TRAINER_RUN", RUN)
    monkeypatch.setenv("MLFLOW_EXPERIMENT_NAME", "fruit")
    run_id = tracking.start_parent({}, {})
    monkeypatch.delenv("MLFLOW_EXPERIMENT_NAME")
    return lambda: tracking.client().get_run(run_id)


KFP_STATES = {
    "a cluster": ("UNKNOWN", "NEW", "RUNNING", "COMPLETE", "FAILED", "CACHED", "CANCELED"),
    "kfp.local": ("SUCCEEDED", "FAILED"),
}
"""Every word that KFP 2.17 can say: `Execution.State` of ml_metadata, whose name the driver (resolve.go) hands
over; and what kfp/local/orchestrator/enhanced_dag_orchestrator.py writes."""


def test_the_words_are_kfps():
    assert set(finishing.ENDS) == {state for states in KFP_STATES.values() for state in states}
    local_words = inspect.getsource(enhanced_dag_orchestrator)
    assert all(f"'{state}'" in local_words for state in KFP_STATES["kfp.local"])


@pytest.mark.filterwarnings("ignore:The ``noload`` loader strategy is deprecated")
@pytest.mark.parametrize(
    ("state", "status"),
    [
        ("COMPLETE", "FINISHED"),
        ("SUCCEEDED", "FINISHED"),
        ("FAILED", "FAILED"),
        ("RUNNING", "FAILED"),
        ("CANCELED", "KILLED"),
    ],
)
def test_mlflow_learns_how_the_run_ended(tracked, state, status):
    error = "" if status == "FINISHED" else "distill: worker-0 was OOM-killed"
    finishing.finish("", state, error)
    assert tracked().info.status == status
    assert tracked().data.tags.get(tracking.ERROR_TAG, "") == error


@pytest.mark.filterwarnings("ignore:The ``noload`` loader strategy is deprecated")
@pytest.mark.parametrize(
    ("state", "specification", "status"),
    [
        ("RUNNING", {"activeDeadlineSeconds": 0}, "KILLED"),
        ("FAILED", {"activeDeadlineSeconds": 0}, "KILLED"),
        ("FAILED", {}, "FAILED"),
        ("COMPLETE", {"activeDeadlineSeconds": 0}, "FINISHED"),
    ],
    ids=["stopped", "stopped at a launcher that could say so", "failed", "stopped too late"],
)
def test_a_run_that_somebody_stopped_was_killed(tracked, tmp_path, monkeypatch, state, specification, status):
    """KFP stops a run by leaving its Workflow no time, and does not say CANCELED."""
    with KubernetesStandIn(tmp_path, kubelet=False) as cluster:
        monkeypatch.setenv("KUBECONFIG", str(cluster.kubeconfig))
        monkeypatch.setenv(finishing.WORKFLOW, "distillation-x7k2p")
        cluster.add(WORKFLOWS, {"metadata": {"name": "distillation-x7k2p"}, "spec": specification})
        finishing.finish("", state, "")
    assert tracked().info.status == status


def test_unreadable_or_away(tracked, tmp_path, monkeypatch, caplog):
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "missing"))
    monkeypatch.setenv(finishing.WORKFLOW, "distillation-x7k2p")
    finishing.finish("", "FAILED", "")
    assert tracked().info.status == "FAILED"
    assert "whether the run was stopped is not known: " in caplog.text
    # A cluster or a server that is away is said and ends nothing else.
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://127.0.0.1:9")
    monkeypatch.setenv("TRAINER_RUN", RUN)
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "missing"))
    finishing.finish("cpu", "FAILED", "")
    assert "jobs of this run may be left: " in caplog.text
    assert "the run stays open in MLflow: MLflow at http://127.0.0.1:9: does not answer" in caplog.text


def ended_workflow(ago_s: float, *, stopped: bool, finish: str) -> dict:
    """As Argo 4.0 leaves it."""
    ended = datetime.now(UTC) - timedelta(seconds=ago_s)
    pods = {"distill(0).executor(0)": "Failed", "finish-driver(0)": "Succeeded", "finish(0).executor(0)": finish}
    nodes = {
        name: {"name": f"distillation-x7k2p(0).root(0).exit-handler-1.{name}", "type": "Pod", "phase": phase}
        for name, phase in pods.items()
    }
    return {
        "metadata": {
            "name": "distillation-x7k2p",
            "labels": {finishing.RUN_LABEL: RUN, "workflows.argoproj.io/phase": "Failed"},
        },
        "spec": {"activeDeadlineSeconds": 0} if stopped else {},
        "status": {"phase": "Failed", "finishedAt": f"{ended:%Y-%m-%dT%H:%M:%SZ}", "nodes": nodes},
    }


@pytest.mark.filterwarnings("ignore:The ``noload`` loader strategy is deprecated")
@pytest.mark.parametrize(
    ("ago_s", "stopped", "finish", "status"),
    [
        (90, True, "Failed", "KILLED"),
        (90, False, "Error", "FAILED"),
        (90, True, "Succeeded", "RUNNING"),
        (20, True, "Pending", "RUNNING"),
        (7200, True, "Failed", "RUNNING"),
    ],
    ids=["stopped", "failed", "its finish did its work", "just now", "long ago"],
)
def test_run_whose_finish_was_ended_is_ended_by_reaper(
    tracked, tmp_path, monkeypatch, capsys, ago_s, stopped, finish, status
):
    monkeypatch.delenv("TRAINER_RUN")
    workflow = ended_workflow(ago_s, stopped=stopped, finish=finish)
    with KubernetesStandIn(tmp_path, operator=False, kubelet=False) as cluster:
        monkeypatch.setenv("KUBECONFIG", str(cluster.kubeconfig))
        cluster.add(WORKFLOWS, workflow)
        others = copy.deepcopy(workflow)
        others["metadata"]["name"], others["metadata"]["labels"][finishing.RUN_LABEL] = "x", "of-others"
        cluster.add(WORKFLOWS, others)
        assert command.main(["reap", "--orphaned"]) == 0
    assert tracked().info.status == status
    assert (f"ended in MLflow: the run {RUN}, " in capsys.readouterr().out) == (status != "RUNNING")


def test_mlflow_that_is_away_does_not_keep_jobs_alive(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://127.0.0.1:9")
    with KubernetesStandIn(tmp_path, operator=False, kubelet=False) as cluster:
        monkeypatch.setenv("KUBECONFIG", str(cluster.kubeconfig))
        cluster.add(WORKFLOWS, ended_workflow(90, stopped=True, finish="Failed"))
        assert command.main(["reap", "--orphaned"]) == 0
    said = capsys.readouterr()
    assert "warning: runs may be left open in MLflow: MLflow at http://127.0.0.1:9: does not answer" in said.err
    assert "0 of this project's jobs deleted" in said.out


def test_jobs_left_of_this_run_alone_are_deleted(tmp_path, monkeypatch, caplog):
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "")
    monkeypatch.setenv("TRAINER_RUN", RUN)
    with KubernetesStandIn(tmp_path, kubelet=False) as cluster:
        monkeypatch.setenv("KUBECONFIG", str(cluster.kubeconfig))
        jobs = (job("cpu", run=run) for run in (RUN, "another"))
        ours, others = (cluster.add(PYTORCHJOBS, one)["metadata"]["name"] for one in jobs)
        with caplog.at_level("INFO"):
            finishing.finish("cpu", "FAILED", "")
        cluster.wait_for(lambda: [found["metadata"]["name"] for found in cluster.list(PYTORCHJOBS)] == [others])
    assert f"deleted the job {ours}, which was left" in caplog.text
