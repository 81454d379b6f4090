"""Jobs that were left over, on a stand-in for Kubernetes."""

from __future__ import annotations

import logging
from dataclasses import replace
from datetime import UTC, datetime, timedelta

import pytest

from components.launch import __main__ as command
from components.launch import reaping
from components.launch.backends import BACKENDS
from components.launch.patience import Patience
from components.launch.refusals import DeniedError
from components.launch.submitting import Job
from tests.stand_ins.kubernetes.resources import PYTORCHJOBS, TRAINJOBS
from tests.stand_ins.kubernetes.stand_in import KubernetesStandIn
from trainer.errors import SettingsError


@pytest.fixture
def kubernetes(tmp_path, monkeypatch):
    with KubernetesStandIn(tmp_path, operator=False, kubelet=False) as stand_in:
        monkeypatch.setenv("KUBECONFIG", str(stand_in.kubeconfig))
        yield stand_in


@pytest.fixture
def make(kubernetes, cluster, pool, identity, spec):
    """Make a job of a run; gives its name."""

    def make(run, *, backend="pytorchjob", task="distill", age_s=0, condition=""):
        job = Job(cluster, BACKENDS[backend], spec, pool, replace(identity, run=run, task=task))
        job.submit(Patience(5))
        kind = PYTORCHJOBS if backend == "pytorchjob" else TRAINJOBS
        with kubernetes.store.changing(kind, "kubeflow", job.name) as made:
            made["metadata"]["creationTimestamp"] = f"{datetime.now(UTC) - timedelta(seconds=age_s):%Y-%m-%dT%H:%M:%SZ}"
            if condition:
                made["status"] = {"conditions": [{"type": condition, "status": "True"}]}
        return job.name

    return make


@pytest.fixture
def foreign(kubernetes, make):
    """A job of somebody else: ours without its labels."""
    name = make("foreign")
    with kubernetes.store.changing(PYTORCHJOBS, "kubeflow", name) as job:
        job["metadata"]["labels"] = {"app": "other"}
    return name


def left(kubernetes):
    return {job["metadata"]["name"] for kind in (PYTORCHJOBS, TRAINJOBS) for job in kubernetes.list(kind)}


@pytest.fixture
def left_soon(kubernetes):
    """The jobs that are left when the deletion has had time."""

    def left_soon(*names):
        kubernetes.wait_for(lambda: left(kubernetes) == set(names))
        return True

    return left_soon


def test_the_exit_task_deletes_what_goes_on_of_its_run_and_nothing_else(cluster, make, foreign, left_soon):
    going, other_backend = make("run-1"), make("run-1", backend="trainjob", task="pretrain")
    ended, other_run = make("run-1", task="tune", condition="Failed"), make("run-2")
    assert sorted(reaping.delete_jobs(cluster, "run-1")) == sorted([going, other_backend])
    assert left_soon(ended, other_run, foreign)
    assert reaping.delete_jobs(cluster, "run-1") == []


def test_a_runs_name_that_is_no_label_is_found(cluster, make):
    name = make("Läufe / grün")
    assert reaping.delete_jobs(cluster, "Läufe / grün") == [name]


def test_a_backend_that_is_not_installed_has_no_jobs(kubernetes, cluster, make):
    kubernetes.uninstall("trainjobs")
    name = make("run-1")
    assert [job.name for job in reaping.find(cluster)] == [name]


def test_a_backend_that_may_not_be_listed_is_said(kubernetes, cluster, make, caplog):
    kubernetes.faults.deny("list", "trainjobs")
    caplog.set_level(logging.WARNING)
    name = make("run-1")
    assert [job.name for job in reaping.find(cluster)] == [name]
    assert "these jobs are not looked at: no right to list trainjobs.trainer.kubeflow.org" in caplog.text
    kubernetes.faults.deny("list", "pytorchjobs")
    with pytest.raises(DeniedError):
        reaping.find(cluster)


def test_the_command_deletes_by_run(make, foreign, left_soon, capsys):
    one, other = make("run-1", age_s=7200), make("run-2")
    assert command.main(["reap", "--run", "run-1"]) == 0
    assert left_soon(other, foreign)
    said = capsys.readouterr().out.splitlines()
    assert said == [
        f"deleted: pytorchjobs.kubeflow.org {one} (run run-1, distill, pending, made 2 h ago)",
        "1 of this project's jobs deleted in namespace kubeflow",
    ]


def test_the_command_deletes_by_age(make, foreign, left_soon):
    make("run-1", age_s=7300)
    young = make("run-2", age_s=60)
    assert command.main(["reap", "--older-than", "2h"]) == 0
    assert left_soon(young, foreign)


def test_the_command_deletes_all_of_ours(make, foreign, left_soon):
    make("run-1", condition="Succeeded")
    make("run-2", backend="trainjob")
    assert command.main(["reap", "--all"]) == 0
    assert left_soon(foreign)


def test_a_dry_run_deletes_nothing(kubernetes, make, capsys):
    name = make("run-1")
    assert command.main(["reap", "--all", "--dry-run"]) == 0
    assert left(kubernetes) == {name}
    assert f"would be deleted: pytorchjobs.kubeflow.org {name}" in capsys.readouterr().out


@pytest.mark.parametrize("arguments", [[], ["--run", ""], ["--all", "--run", "r"]])
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
    assert reaping.age(text) == seconds


@pytest.mark.parametrize("text", ["", "2", "h", "-1h", "2 weeks"])
def test_what_is_no_age_is_refused(text):
    with pytest.raises(SettingsError, match="is no age; give a number with s, m, h or d"):
        reaping.age(text)
