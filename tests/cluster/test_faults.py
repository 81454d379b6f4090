"""What goes wrong while a training runs: its task is killed, a pod of it is deleted. The run goes on, and the student is the same."""

import subprocess

import pytest

from tests.cluster.conftest import LONG, eventually, kubectl

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(6000)]


KILL = """
import os, pathlib, signal
for process in pathlib.Path("/proc").glob("[0-9]*"):
    if process.name not in {"1", str(os.getpid())}:
        os.kill(int(process.name), signal.SIGKILL)
"""
"""Kills a container's processes but the first, of which the kernel lets nobody inside dispose: the end has exit code 137, as after an OOM
kill. Memory that is taken beside a task does not do: the kernel then chooses the taker."""


def kill(pod):
    """Kill what runs in a task's container."""
    where = ["--namespace", pod["metadata"]["namespace"], pod["metadata"]["name"], "--container", "main"]
    command = ["kubectl", "exec", *where, "--", "python", "-c", KILL]
    subprocess.run(command, capture_output=True, check=False, timeout=120)


def is_training(run, stage):
    """Whether a stage's master has said how far it is."""
    pods = run.pods(stage, "master")
    return pods and " step " in kubectl("logs", pods[0]["metadata"]["name"], "--container=pytorch", check=False)


def test_a_task_that_is_killed_is_tried_again_and_follows_the_same_job(run_pipeline, uncached):
    """Argo calls it a failure; KFP's default would end the run."""
    # Longer than Argo's pause: a job that has ended meanwhile would be made again.
    run = run_pipeline(f"{uncached} pretrain.finetune.epochs=150", wait=False)
    eventually(lambda: run.pods("pretrain", "worker"), seconds=2400, what="pretrain has begun")
    (first,) = run.task_pods("pretrain")
    kill(first)
    assert run.wait().exit_code == 0, run.output
    tries = run.task_pods("pretrain")
    assert len(tries) == 2
    assert "goes on already; followed further" in kubectl("logs", tries[1]["metadata"]["name"], "--container=main")
    assert len(run.jobs("pretrain")) == 1


def test_a_master_that_is_deleted_in_training_costs_no_bit(run_pipeline, uncached, mlflow):
    disturbed = run_pipeline(uncached, length=LONG, wait=False)
    eventually(lambda: is_training(disturbed, "distill"), seconds=2400, what="the student learns")
    (master,) = disturbed.pods("distill", "master")
    kubectl("delete", "pod", master["metadata"]["name"], "--wait=false")
    assert disturbed.wait().exit_code == 0, disturbed.output
    undisturbed = run_pipeline(uncached, length=LONG, further=["--fresh"])
    assert undisturbed.exit_code == 0, undisturbed.output
    versions = mlflow("model-versions/search", max_results=1000, order_by=["last_updated_timestamp DESC"])[
        "model_versions"
    ]
    tags = [{tag["key"]: tag["value"] for tag in version["tags"]} for version in versions[:2]]
    assert tags[0]["student_fingerprint"] == tags[1]["student_fingerprint"]
