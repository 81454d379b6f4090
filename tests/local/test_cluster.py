"""Training on a node pool, for real: a cluster whose pods are processes here, an S3 server, and the pipeline's own tasks."""

from __future__ import annotations

import base64
import json
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict

import pytest
from kfp import dsl
from kfp.dsl.types import artifact_types

from components import references, task
from components.launching import Placement
from tests.pipelines import local_runs
from tests.pipelines.local_runs import SMALL
from tests.stand_ins.kubernetes.resources import JOBS, PODS, PYTORCHJOBS, SECRETS
from tests.stand_ins.kubernetes.stand_in import KubernetesStandIn, Node
from tests.stand_ins.object_store import ObjectStore
from trainer import config
from trainer.io import artifacts
from trainer.objectives.distillation.recording import REPORT
from trainer.stages import STAGES, prepare

POOLS = """
[pools.small]
device = "cpu"
processes_per_node = 1
resources = { cpu = 1, memory = "2Gi" }
secrets.AWS_ACCESS_KEY_ID = { name = "vit-distillation-store", key = "AWS_ACCESS_KEY_ID" }
secrets.AWS_SECRET_ACCESS_KEY = { name = "vit-distillation-store", key = "AWS_SECRET_ACCESS_KEY" }

[pools.interrupted]
based_on = "small"
retries = 1
silent_minutes = 2
"""
"""One core, and so one thread, for each process: what two of them get on the machines of the CI too."""
TWO_MACHINES = Placement(pool="small", nodes=2)


@pytest.fixture(scope="module")
def store():
    with ObjectStore() as store:
        yield store


@pytest.fixture
def cluster(tmp_path, store):
    """A cluster with two machines, which knows the store's credentials as a Secret only."""
    credentials = {name: store.environment[name] for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY")}
    with KubernetesStandIn(tmp_path / "cluster", nodes=[Node(name="one"), Node(name="two")]) as cluster:
        data = {name: base64.b64encode(value.encode()).decode() for name, value in credentials.items()}
        cluster.add(SECRETS, {"metadata": {"name": "vit-distillation-store"}, "data": data})
        yield cluster


@pytest.fixture
def environment(cluster, store, tmp_path):
    pools = tmp_path / "pools.toml"
    pools.write_text(POOLS)
    return {
        "TRAINER_POOLS": str(pools),
        "TRAINER_IMAGE": "registry/vit-distillation:mine",
        **store.environment,
        "KUBECONFIG": str(cluster.kubeconfig),
        "TRAINER_CACHE": str(tmp_path / "cache"),
        "TRAINER_ARTIFACTS": f"s3://{store.bucket}/exchange",
        "TRAINER_NAMESPACE": cluster.namespace,
    }


def train_on_cluster(job, place, run, environment, store, monkeypatch):
    """A distillation as the task of a run, with the URIs that KFP gives to it; gives their root and the student as KFP has it."""
    for name, value in {**environment, "TRAINER_RUN": run, "MLFLOW_TRACKING_URI": ""}.items():
        monkeypatch.setenv(name, value)
    root = f"minio://{store.bucket}/v2/artifacts/{run}"
    for name, kind in STAGES["distill"].inputs.items():
        artifacts.copy(job.inputs[name], f"{root}/{name}", kind)
    inputs = {name: references.to(f"{root}/{name}", kind) for name, kind in STAGES["distill"].inputs.items()}
    student = dsl.Model(uri=f"{root}/student")
    monkeypatch.setattr(artifact_types, "CONTAINER_TASK_ROOT", f"/minio/{store.bucket}/v2/artifacts/{run}")
    given = {"settings": json.dumps(job.settings), "teacher_outputs": "", "student": student}
    task.run_stage("distill", {**given, **inputs, **asdict(place)})
    return root, student


@pytest.mark.slow
def test_pods_share_a_preparation_and_one_is_killed(cluster, environment, store, monkeypatch, tmp_path):
    """The data set is that of one machine, and nothing is left of what the pods exchanged."""
    for name, value in {**environment, "TRAINER_RUN": "run-3", "MLFLOW_TRACKING_URI": ""}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(artifact_types, "CONTAINER_TASK_ROOT", f"/minio/{store.bucket}/v2/artifacts/run-3")
    settings = config.resolve("digits").for_stage("prepare")
    alone = prepare.run(config.resolve("digits").data, dataset=tmp_path / "dataset")
    store.delay(60, times=1, method="PUT", path=r".*/checkpoints/prepare-.*/000003\.jsonl")

    def kill_the_first():
        cluster.wait_for(lambda: store.held == 1, timeout_s=120)
        (first,) = cluster.list(PODS, "*-0-*")
        cluster.kill(first["metadata"]["name"])
        store.clear()

    page = dsl.HTML(uri="s3://bucket/page")
    monkeypatch.setattr(dsl.HTML, "path", property(lambda _: str(tmp_path / "card.html")))
    with ThreadPoolExecutor(1) as thread:
        killed = thread.submit(kill_the_first)
        given = {"settings": json.dumps(settings), "source_version": "", "data_card": page, "dataset": dsl.Dataset()}
        (made,) = task.run_stage("prepare", {**given, "prepare_pool": "small", "prepare_nodes": 2})
        killed.result()
    (job,) = cluster.list(JOBS)
    assert cluster.conditions(job["metadata"]["name"])["Complete"] == "True"
    assert made.endswith(alone.fingerprint)
    assert [key for key in store.keys("v2/artifacts/run-3") if "/checkpoints/" in key] == []


@pytest.mark.slow
def test_two_machines_train_what_one_trains(distillation, cluster, environment, store, monkeypatch):
    """The job writes to the URIs that KFP gave, and the task's own disk stays empty."""
    here = distillation("here").train(processes=2)
    root, shown = train_on_cluster(here, TWO_MACHINES, "run-1", environment, store, monkeypatch)
    student = artifacts.read(f"{root}/student", "model")
    assert student.files == artifacts.read(here.outputs["student"], "model").files
    assert shown.metadata == {"kind": "model", "fingerprint": student.fingerprint}
    evidence = artifacts.manifest(f"{root}/evidence", "evidence")
    assert {name for name in evidence.files if "rank" in name} == {
        name for name in artifacts.manifest(here.outputs["evidence"], "evidence").files if "rank" in name
    }
    (sent,) = cluster.list(PYTORCHJOBS)
    assert "stand-in-secret" not in json.dumps(sent)


@pytest.mark.long
def test_a_lost_machine_does_not_change_the_student(distillation, cluster, environment, store, monkeypatch, capsys):
    """The machine that is lost comes back before the first one has noticed."""
    here = distillation("here", checkpoint_every=3).train(processes=2)
    store.delay(60, times=1, method="PUT", path="run-2/checkpoints/.*step-00000006-g001/manifest")

    def came_back(lost):
        """Whether another pod has taken the place of one, and its node is on its way to the others."""
        name = lost["metadata"]["name"]
        there = [pod for pod in cluster.list(PODS, name) if pod["metadata"]["uid"] != lost["metadata"]["uid"]]
        return there and there[0]["status"]["phase"] == "Running" and "joining the others" in "".join(cluster.log(name))

    def lose_a_machine():
        cluster.wait_for(lambda: store.held == 1, timeout_s=120)
        (worker,) = cluster.list(PODS, "*-worker-0")
        cluster.oom_kill(worker["metadata"]["name"])
        cluster.wait_for(lambda: came_back(worker), timeout_s=60)
        store.clear()

    with ThreadPoolExecutor(1) as thread:
        lost = thread.submit(lose_a_machine)
        place = Placement(pool="interrupted", nodes=2)
        root, _ = train_on_cluster(here, place, "run-2", environment, store, monkeypatch)
        lost.result()
    printed = capsys.readouterr().out
    assert "worker-0 ended with exit code 137 (OOMKilled)" in printed
    assert "distill  resuming after step " in printed
    assert artifacts.read(f"{root}/student", "model").files == artifacts.read(here.outputs["student"], "model").files
    assert store.keys("v2/artifacts/run-2/checkpoints") == []


@pytest.mark.long
def test_a_pool_gives_the_student_of_this_machine(cluster, environment, tmp_path):
    overrides = f"{SMALL} tracking.enabled=false distill.teacher=recorded reinforce.views=2"
    students = {}
    here, pool = ["trainer", "run"], ["components.pool_run", "--pool", "small", "--nodes", "2"]
    for name, words in {"here": here, "pool": pool}.items():
        folder = tmp_path / name
        folder.mkdir()
        ended = local_runs.run(
            [sys.executable, "-m", *words, "digits", "--overrides", overrides], folder, **environment
        )
        assert ended.returncode == 0, ended.stdout + ended.stderr
        latest = folder / "runs" / "latest"
        students[name] = json.loads((latest / "summary.json").read_text())["student"]
        recorded = artifacts.read(latest / "teacher-outputs", "teacher_outputs").files
        students[name] |= {"files": artifacts.read(latest / "student", "model").files, "latency_ms": None}
        students[name] |= {"recorded": {file: record for file, record in recorded.items() if file != REPORT}}
    assert students["pool"] == students["here"]
    jobs = {
        job["metadata"]["labels"]["vit-distillation/stage"]: job["metadata"]["name"]
        for job in cluster.list(PYTORCHJOBS)
    }
    assert set(jobs) == {"pretrain", "reinforce", "distill"}
    assert all(cluster.conditions(name)["Succeeded"] == "True" for name in jobs.values())
    (template,) = {
        replica["template"]["spec"]["containers"][0]["image"]
        for job in cluster.list(PYTORCHJOBS)
        for replica in job["spec"]["pytorchReplicaSpecs"].values()
    }
    assert template == "registry/vit-distillation:mine"
    record = tmp_path / "pool" / "runs" / "latest" / "jobs" / "distill"
    assert {file.name for file in record.glob("logs/*")} == {"master-0.log", "worker-0.log"}
