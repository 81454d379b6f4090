"""Jobs that were left over, on a stand-in for Kubernetes."""

from __future__ import annotations

import logging
from dataclasses import replace
from datetime import UTC, datetime, timedelta

import pytest

from components.launch import __main__ as command
from components.launch import reaper
from components.launch.client import ApiRetry, ForbiddenError
from components.launch.job import TaskJob
from components.launch.job_manifest import BACKENDS, Owner
from tests.stand_ins.kubernetes.resources import PODS, PYTORCHJOBS, TRAINJOBS, WORKFLOWS
from trainer.io.errors import SettingsError


@pytest.fixture
def kubernetes(still_kubernetes):
    return still_kubernetes


@pytest.fixture
def make(kubernetes, cluster, pool, identity, spec):
    """Make a job of a run; gives its name."""

    def make(run, *, backend="pytorchjob", task="distill", age_s=0, condition="", owner=None):
        job = TaskJob(cluster, BACKENDS[backend], spec, pool, replace(identity, run=run, task=task, owner=owner))
        job.submit(ApiRetry(5))
        kind = PYTORCHJOBS if backend == "pytorchjob" else TRAINJOBS
        with kubernetes.store.changing(kind, "kubeflow", job.name) as made:
            made["metadata"]["creationTimestamp"] = ago(age_s)
            if condition:
                made["status"] = {"conditions": [{"type": condition, "status": "True"}]}
        return job.name

    return make


@pytest.fixture
def foreign(kubernetes, make):
    """A job of another project: ours without its labels."""
    name = make("foreign")
    with kubernetes.store.changing(PYTORCHJOBS, "kubeflow", name) as job:
        job["metadata"]["labels"] = {"app": "other"}
    return name


def ago(seconds):
    """A time as objects carry it."""
    return f"{datetime.now(UTC) - timedelta(seconds=seconds):%Y-%m-%dT%H:%M:%SZ}"


@pytest.fixture
def task_pod(kubernetes):
    """Add the pod of a task, made three hours ago; gives it as the owner of a job."""

    def task_pod(name="task-1", *, phase="Running", ended_s=0, container=True):
        pod = kubernetes.add_pod(name)
        state = {"terminated": {"exitCode": 143, "finishedAt": ago(ended_s)}} if phase != "Running" else {"running": {}}
        with kubernetes.store.changing(PODS, "kubeflow", name) as changed:
            changed["metadata"]["creationTimestamp"] = ago(3 * 3600)
            changed["status"] = {
                "phase": phase,
                "conditions": [
                    {"type": "PodScheduled", "status": "True", "lastTransitionTime": ago(3 * 3600)},
                    {"type": "Ready", "status": "False", "lastTransitionTime": ago(ended_s)},
                ],
                "containerStatuses": [{"name": "main", "state": state}] if container else [],
            }
        return Owner(name=name, uid=pod["metadata"]["uid"])

    return task_pod


def left(kubernetes):
    return {job["metadata"]["name"] for kind in (PYTORCHJOBS, TRAINJOBS) for job in kubernetes.list(kind)}


@pytest.fixture
def left_soon(kubernetes):
    """The jobs that are left when the deletion has had time."""

    def left_soon(*names):
        kubernetes.wait_for(lambda: left(kubernetes) == set(names))
        return True

    return left_soon


def test_the_exit_task_deletes_jobs_of_its_run(cluster, make, foreign, left_soon):
    going, other_backend = make("run-1"), make("run-1", backend="trainjob", task="pretrain")
    ended, other_run = make("run-1", task="tune", condition="Failed"), make("run-2")
    assert sorted(reaper.delete_jobs(cluster, "run-1")) == sorted([going, other_backend])
    assert left_soon(ended, other_run, foreign)
    assert reaper.delete_jobs(cluster, "run-1") == []


def test_backend_that_is_not_installed_has_no_jobs(kubernetes, cluster, make):
    kubernetes.uninstall("trainjobs")
    name = make("run-1")
    assert [job.name for job in reaper.find(cluster)] == [name]


def test_backend_that_may_not_be_listed_is_logged(kubernetes, cluster, make, caplog):
    kubernetes.faults.deny("list", "trainjobs")
    caplog.set_level(logging.WARNING)
    name = make("run-1")
    assert [job.name for job in reaper.find(cluster)] == [name]
    assert "these jobs are skipped: no right to list trainjobs.trainer.kubeflow.org" in caplog.text
    kubernetes.faults.deny("list", "pytorchjobs")
    kubernetes.faults.deny("list", "jobs")
    with pytest.raises(ForbiddenError):
        reaper.find(cluster)


def test_the_command_deletes_by_run(make, foreign, left_soon, capsys):
    one, other = make("run-1", age_s=7200), make("run-2")
    assert command.main(["reap", "--run", "run-1"]) == 0
    assert left_soon(other, foreign)
    said = capsys.readouterr().out.splitlines()
    assert said == [
        f"deleted: pytorchjobs.kubeflow.org {one} (run run-1, distill, pending, created 2 h ago)",
        "1 of this project's jobs deleted in namespace kubeflow",
    ]


def test_the_command_deletes_by_age_what_has_ended(make, foreign, left_soon, capsys):
    make("run-1", age_s=7300, condition="Failed")
    young, long = make("run-2", age_s=60, condition="Failed"), make("run-3", age_s=7300, condition="Running")
    assert command.main(["reap", "--older-than", "2h"]) == 0
    assert left_soon(young, long, foreign)
    said = capsys.readouterr().out
    assert f"left, since it has not ended: pytorchjobs.kubeflow.org {long} (run run-3, distill, running" in said
    assert "1 of this project's jobs deleted in namespace kubeflow" in said
    # As of a shell's variable that is not set.
    assert command.main(["reap", "--older-than", ""]) == 2
    assert left_soon(young, long, foreign)


def test_a_job_from_a_clock_ahead_is_deleted(make, left_soon, capsys):
    make("run-1", age_s=-30)
    assert command.main(["reap", "--all"]) == 0
    assert left_soon()
    assert "created 0 s ago" in capsys.readouterr().out


@pytest.mark.parametrize("phase", ["Succeeded", "Failed"])
def test_job_whose_tasks_pod_ended_long_ago_is_orphan(make, task_pod, left_soon, capsys, phase):
    name = make("run-1", age_s=7200, condition="Running", owner=task_pod(phase=phase, ended_s=1500))
    assert command.main(["reap", "--orphaned"]) == 0
    assert left_soon()
    why = f"the pod of its task, task-1, ended 25 min ago ({phase})"
    assert capsys.readouterr().out.splitlines() == [
        f"deleted: pytorchjobs.kubeflow.org {name} (run run-1, distill, running, created 2 h ago): {why}",
        "1 of this project's jobs deleted in namespace kubeflow",
    ]


def test_orphans_of_both_backends_are_found(kubernetes, make, task_pod, capsys):
    owner = task_pod(phase="Failed", ended_s=1500)
    jobs = {make("run-1", owner=owner), make("run-1", backend="trainjob", task="pretrain", owner=owner)}
    assert command.main(["reap", "--orphaned", "--dry-run"]) == 0
    assert left(kubernetes) == jobs
    said = capsys.readouterr().out
    assert said.count("would be deleted: ") == 2
    assert said.endswith("2 of this project's jobs would be deleted in namespace kubeflow\n")


def test_a_followed_job_is_no_orphan(kubernetes, make, task_pod, foreign, capsys):
    make("ended-just-now", owner=task_pod("task-1", phase="Failed", ended_s=reaper.ORPHANED_AFTER_S - 60))
    make("running", owner=task_pod("task-2", ended_s=7200))  # nothing has happened to it since
    make("from-a-laptop", age_s=7200)
    make("over", condition="Failed", owner=task_pod("task-3", phase="Failed", ended_s=1500))
    jobs = left(kubernetes)
    assert len(jobs) == 5
    assert command.main(["reap", "--orphaned"]) == 0
    assert left(kubernetes) == jobs
    assert capsys.readouterr().out == "0 of this project's jobs deleted in namespace kubeflow\n"


@pytest.mark.parametrize(("ended", "is_left"), [(True, False), (False, True)], ids=["ended", "still running"])
def test_job_of_ended_run_is_orphan(kubernetes, make, task_pod, ended, is_left):
    status = {"phase": "Failed", "finishedAt": ago(5)} if ended else {"phase": "Running", "finishedAt": None}
    kubernetes.add(WORKFLOWS, {"metadata": {"name": "distillation-x7k2p"}, "spec": {}, "status": status})
    name = make("run-1", condition="Running", owner=task_pod(phase="Failed", ended_s=10))
    with kubernetes.store.changing(PODS, "kubeflow", "task-1") as pod:
        pod["metadata"]["labels"] = {reaper.WORKFLOW_LABEL: "distillation-x7k2p"}
    assert command.main(["reap", "--orphaned"]) == 0
    kubernetes.wait_for(lambda: left(kubernetes) == ({name} if is_left else set()))


@pytest.mark.parametrize(("created_s", "is_left"), [(100, True), (9000, False)], ids=["next try", "another task"])
def test_job_whose_task_is_tried_again_is_no_orphan(kubernetes, make, task_pod, created_s, is_left):
    """The new pod waits for a node, or for its image, for longer than a task's pod may be gone."""
    status = {"phase": "Running", "finishedAt": None}
    kubernetes.add(WORKFLOWS, {"metadata": {"name": "distillation-x7k2p"}, "spec": {}, "status": status})
    name = make("run-1", condition="Running", owner=task_pod(phase="Failed", ended_s=600))
    kubernetes.add_pod("task-2")
    for pod_name in ("task-1", "task-2"):
        with kubernetes.store.changing(PODS, "kubeflow", pod_name) as pod:
            pod["metadata"]["labels"] = {reaper.WORKFLOW_LABEL: "distillation-x7k2p"}
            if pod_name == "task-2":
                pod["metadata"]["creationTimestamp"], pod["status"] = ago(created_s), {"phase": "Pending"}
    assert command.main(["reap", "--orphaned"]) == 0
    kubernetes.wait_for(lambda: left(kubernetes) == ({name} if is_left else set()))


def test_evicted_pod_has_no_container_and_ended_all_same(make, task_pod, left_soon):
    young = make("run-1", owner=task_pod("task-1", phase="Failed", ended_s=60, container=False))
    make("run-2", owner=task_pod("task-2", phase="Failed", ended_s=1500, container=False))
    assert command.main(["reap", "--orphaned"]) == 0
    assert left_soon(young)


def test_job_that_was_adopted_belongs_to_new_pod(kubernetes, make, task_pod):
    name = make("run-1", owner=task_pod("task-1", phase="Failed", ended_s=1500))
    assert make("run-1", owner=task_pod("task-2")) == name
    assert command.main(["reap", "--orphaned"]) == 0
    assert left(kubernetes) == {name}


def test_job_that_is_adopted_after_it_was_found_is_left(kubernetes, cluster, make, task_pod):
    name = make("run-1", owner=task_pod("task-1", phase="Failed", ended_s=1500))
    (found,) = reaper.find_orphaned(cluster)
    make("run-1", owner=task_pod("task-2"))
    assert not reaper.delete(cluster, found)
    assert left(kubernetes) == {name}


@pytest.mark.parametrize("name", ["task-1", "gone"])
def test_job_without_owner_is_left_to_collector(cluster, make, task_pod, name):
    """The uid is that of a pod which is there, or the stand-in's collector would be quicker than the test."""
    task_pod("task-1", phase="Failed", ended_s=1500)
    make("run-1", owner=Owner(name=name, uid=task_pod("task-2").uid))
    assert reaper.find_orphaned(cluster) == []


def test_without_right_to_pods_orphans_cannot_be_found(kubernetes, make, task_pod, capsys):
    make("run-1", owner=task_pod(phase="Failed", ended_s=1500))
    kubernetes.faults.deny("get", "pods")
    assert command.main(["reap", "--orphaned"]) == 2
    assert capsys.readouterr().err.startswith("error: no right to get pods task-1 in namespace kubeflow")


@pytest.mark.parametrize("arguments", [[], ["--run", ""], ["--all", "--run", "r"], ["--orphaned", "--all"]])
def test_the_command_wants_one_scope(arguments, capsys):
    with pytest.raises(SystemExit):
        command.main(["reap", *arguments])
    assert "error: " in capsys.readouterr().err


def test_without_a_cluster_the_command_says_so(monkeypatch, tmp_path, capsys):
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "none"))
    assert command.main(["reap", "--all"]) == 2
    assert capsys.readouterr().err.startswith("error: no cluster to launch on")


@pytest.mark.parametrize(("text", "seconds"), [("90s", 90), ("30m", 1800), ("1.5h", 5400), ("7d", 604800)])
def test_ages(text, seconds):
    assert reaper.parse_age(text) == seconds


@pytest.mark.parametrize("text", ["", "2", "h", "-1h", "2 weeks"])
def test_what_is_no_age_is_refused(text):
    with pytest.raises(SettingsError, match="is no age; give a number with s, m, h or d"):
        reaper.parse_age(text)
