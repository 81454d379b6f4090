"""Where a training runs; tests/local/test_cluster.py trains for real."""

from __future__ import annotations

import json
from unittest import mock

import pytest

from components import launching
from components.launching import Placement
from trainer.graph import JobSpec
from trainer.io import artifacts
from trainer.io.errors import LaunchError, SettingsError


@pytest.mark.parametrize(
    ("place", "message"),
    [
        ({"nodes": 0}, r"nodes must be >= 1, got 0"),
        ({"processes_per_node": -1}, r"processes_per_node must be >= 0 \(0: one for each device\), got -1"),
        ({"nodes": 2}, r"nodes = 2, but this machine is one; name a node pool with pool"),
        ({"pool": "gpu-a10"}, r"gpu-a10.*did you mean gpu-a10g"),
        (
            {"pool": "gpu-a100", "processes_per_node": 9},
            r"processes_per_node must be 0 .* to 8 on pool gpu-a100, got 9",
        ),
    ],
)
def test_a_place_that_cannot_be_is_named(place, message):
    with pytest.raises(SettingsError, match=message):
        Placement(**place).check()


def test_task_of_cluster_is_too_small_to_train_in(monkeypatch):
    monkeypatch.setenv("KFP_POD_NAME", "distillation-abc-1")
    Placement(pool="cpu").check()
    with pytest.raises(SettingsError, match=r"pool is empty, but .* name a node pool, such as cpu"):
        Placement().check()


def test_what_was_launched_here_is_recorded_also_when_it_fails(tmp_path):
    inputs = {name: str(tmp_path / name) for name in ("dataset", "teacher")}
    outputs = {name: str(tmp_path / name) for name in ("student", "evidence")}
    place = Placement(processes_per_node=1)
    spec = JobSpec(stage="distill", settings={"epochs": 1}, inputs=inputs, outputs=outputs)
    with pytest.raises(LaunchError, match="no such directory"):
        launching.launch(spec, place, record=str(tmp_path / "job"))
    recorded = json.loads((tmp_path / "job" / launching.JOB).read_text())
    assert recorded["stage"] == "distill"
    assert recorded["settings"] == {"epochs": 1}
    assert recorded["inputs"] == inputs


@pytest.mark.parametrize("exchange", ["", "/mnt/exchange"])
def test_job_elsewhere_needs_store_that_both_reach(tmp_path, monkeypatch, exchange):
    monkeypatch.setenv("TRAINER_RUN", "run-1")
    monkeypatch.setenv(launching.ARTIFACTS, exchange)
    with artifacts.create(tmp_path / "dataset", "dataset", settings={}):
        pass
    inputs, place = {"dataset": str(tmp_path / "dataset")}, Placement(pool="cpu")
    with pytest.raises(LaunchError, match=rf"TRAINER_ARTIFACTS='{exchange}': a cluster's job cannot read"):
        launching.launch(JobSpec(stage="pretrain", settings={}, inputs=inputs, outputs={}), place, record=str(tmp_path))


@pytest.fixture
def small_pool(tmp_path, monkeypatch):
    """A pool with room for 80,000 bytes."""
    file = tmp_path / "pools.toml"
    file.write_text(
        '[pools.small]\ndevice = "cpu"\ncache = "100k"\nprocesses_per_node = 1\nresources = {cpu = "1", memory = "1Gi"}\n'
    )
    monkeypatch.setenv("TRAINER_POOLS", str(file))
    return Placement(pool="small")


def made(path, kind, **files):
    """An artifact with files of so many bytes; `.` stands for `/` in their names."""
    with artifacts.create(path, kind, settings={}) as draft:
        for name, count in files.items():
            file = draft.path / name.replace("__", "/")
            file.parent.mkdir(exist_ok=True)
            file.write_bytes(bytes(count))
    return str(path)


@pytest.mark.parametrize(
    ("stage", "settings", "refused"),
    [
        # Of the data set 60,000 bytes to learn from, 30,000 without labels, 90,000 to test.
        (
            "pretrain",
            {},
            r"pretrain: each node would fetch 90 kB \(dataset 90 kB\), but pool small has room for 80 kB, 0.8 of cache = 100k",
        ),
        ("pretrain", {"mae": {"epochs": 0}}, ""),
        ("distill", {"unlabeled": False}, ""),
        ("distill", {"teacher": "online"}, r"fetch 0.115 MB \(dataset 90 kB, teacher 25 kB\).*data.image_size"),
        (
            "distill",
            {"unlabeled": False, "teacher": "recorded"},
            r"fetch 0.15 MB \(dataset 60 kB, recording 90 kB\).*reinforce.views",
        ),
        ("reinforce", {}, r"0.105 MB \(dataset 80 kB, teacher 25 kB\)"),
        ("reinforce", {"unlabeled": False}, ""),
        ("tune", {"distill": {"unlabeled": False}}, r"85 kB \(dataset 60 kB, teacher 25 kB\)"),
    ],
)
def test_job_without_room_for_its_inputs_is_refused(tmp_path, small_pool, monkeypatch, stage, settings, refused):
    monkeypatch.setenv("TRAINER_RUN", "run-1")
    inputs = {
        "dataset": made(
            tmp_path / "d", "dataset", train__a=50_000, val__a=10_000, test__a=90_000, unlabeled__a=30_000, card=90_000
        )
    }
    if stage != "pretrain":
        inputs["teacher"] = made(tmp_path / "t", "model", weights=25_000)
    if settings.get("teacher") == "recorded":
        inputs["teacher_outputs"] = made(tmp_path / "o", "teacher_outputs", records=90_000)
    if settings.get("unlabeled") is False and stage == "distill" and settings.get("teacher") != "recorded":
        inputs.pop("teacher")
    # What has room gets as far as the store that is missing.
    with pytest.raises(SettingsError if refused else LaunchError, match=refused or "TRAINER_ARTIFACTS"):
        launching.launch(JobSpec(stage=stage, settings=settings, inputs=inputs, outputs={}), small_pool, record="")


@pytest.mark.parametrize(
    ("record", "part", "task"),
    [
        ("s3://bucket/v2/my-pipeline/run-1/distill-2/5f1c/job", "", "distill-2"),
        ("s3://bucket/v2/my-pipeline/other/5f1c/job", "", "distill"),
        ("s3://bucket/v2/my-pipeline/run-1/search/5f1c/job/003-1", "003-1", "search-003-1"),
    ],
)
def test_two_tasks_of_one_stage_have_a_job_each(monkeypatch, record, part, task):
    monkeypatch.setenv("KFP_RUN_ID", "run-1")
    launched = mock.Mock()
    monkeypatch.setattr("components.launch.launcher.ClusterLauncher", launched)
    spec = JobSpec(stage="distill", part=part, settings={}, inputs={}, outputs={})
    launching.launch(spec, Placement(pool="cpu"), record=record)
    _, identity = launched.call_args.args
    assert identity.task == task
