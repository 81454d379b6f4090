"""Compiling beforehand with several real processes."""

import json

import pytest

from tests import groups
from tests.distillations import QUICK, TINY
from trainer import config
from trainer.config import WarmUpSettings
from trainer.graph import JobSpec
from trainer.stages import warm_up


@pytest.mark.slow
def test_all_processes_take_the_first_steps_together(digits, tmp_path, monkeypatch):
    monkeypatch.setenv("TRAINER_DEVICE", "cpu")
    part = {"epochs": 50, "batch_size": 128, "log_every": 2}
    teacher = {
        "teacher": {"architecture": "vit_tiny_patch16_224", "args": TINY},
        "mae": {"epochs": 0},
        "finetune": part,
    }
    values = {"enabled": True, "pretrain": teacher, "reinforce": {"views": 2}}
    values["distill"] = QUICK | part | {"teacher": "recorded", "checkpoint_every": 500}
    section = config.validate(WarmUpSettings, values).model_dump(mode="json")
    groups.launch(
        JobSpec(
            stage="warm_up",
            settings=section,
            inputs={"dataset": digits},
            outputs={"warmed": str(tmp_path / "warmed")},
            processes_per_node=2,
        )
    )
    report = json.loads((tmp_path / "warmed" / warm_up.FILE).read_text())
    assert {one["training"]: one["steps"] for one in report} == {"finetune": 5, "distill": 5}
    assert not list((tmp_path / "checkpoints").iterdir()), "no checkpoint stays"
