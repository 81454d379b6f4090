"""Compiling beforehand, through XLA."""

import json

from tests.distillations import QUICK, TINY
from trainer import config
from trainer.config import WarmUpSettings
from trainer.stages import warm_up

TEACHER = {
    "teacher": {"architecture": "vit_tiny_patch16_224", "args": TINY | {"embed_dim": 32}},
    "workers": 0,
    "mae": {"epochs": 0},
    "finetune": {"epochs": 50, "batch_size": 128, "log_every": 2},
}


def test_first_steps_of_each_training_have_its_graphs(digits, tmp_path, monkeypatch):
    monkeypatch.setenv("TRAINER_DEVICE", "xla")
    student = QUICK | {"epochs": 50, "log_every": 2, "teacher": "recorded"}
    values = {"enabled": True, "pretrain": TEACHER, "reinforce": {"views": 2}, "distill": student}
    warm_up.run(config.validate(WarmUpSettings, values), dataset=digits, warmed=tmp_path / "warmed")
    compiled = {one["training"]: one for one in json.loads((tmp_path / "warmed" / warm_up.FILE).read_text())}
    assert list(compiled) == ["finetune", "distill"]
    for one in compiled.values():
        assert 0 < one["graphs"] < one["steps"] + 5
        assert 0 < one["compile_s"] < one["seconds"]
