"""Where a training runs; tests/local/test_cluster.py trains for real."""

from __future__ import annotations

import json

import pytest

from components import launching
from components.launching import Placement
from trainer import artifacts
from trainer.errors import LaunchError, SettingsError


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


def test_a_place_that_is_right():
    Placement(processes_per_node=2).check()
    Placement(pool="gpu-a100", nodes=4).check()


def test_a_task_of_a_cluster_is_too_small_to_train_in(monkeypatch):
    monkeypatch.setenv("KFP_POD_NAME", "distillation-abc-1")
    Placement(pool="cpu").check()
    with pytest.raises(SettingsError, match=r"pool is empty, but .* name a node pool, such as cpu"):
        Placement().check()


def test_what_was_launched_here_is_recorded_also_when_it_fails(tmp_path):
    inputs = {name: str(tmp_path / name) for name in ("dataset", "teacher")}
    outputs = {name: str(tmp_path / name) for name in ("student", "evidence")}
    place = Placement(processes_per_node=1)
    with pytest.raises(LaunchError, match="no such directory"):
        launching.launch("distill", '{"epochs": 1}', inputs, outputs, place, record=str(tmp_path / "job"))
    recorded = json.loads((tmp_path / "job" / launching.JOB).read_text())
    assert recorded["stage"] == "distill"
    assert recorded["settings"] == {"epochs": 1}
    assert recorded["inputs"] == inputs


@pytest.mark.parametrize("exchange", ["", "/mnt/exchange"])
def test_a_job_elsewhere_needs_a_store_that_both_reach(tmp_path, monkeypatch, exchange):
    monkeypatch.setenv("TRAINER_RUN", "run-1")
    monkeypatch.setenv(launching.ARTIFACTS, exchange)
    with artifacts.create(tmp_path / "dataset", "dataset", settings={}):
        pass
    inputs, place = {"dataset": str(tmp_path / "dataset")}, Placement(pool="cpu")
    with pytest.raises(LaunchError, match=rf"TRAINER_ARTIFACTS='{exchange}': a cluster's job cannot read"):
        launching.launch("pretrain", "{}", inputs, {}, place, record=str(tmp_path))
