"""The stage warm_up on real digits: what it compiles a training then finds, and nothing of it stays but a report."""

import json

import pytest
import torch
from torch._dynamo.utils import counters

from tests.distillations import QUICK, TINY
from trainer import config
from trainer.config import DistillSettings, WarmUpSettings
from trainer.io import artifacts
from trainer.io.errors import SettingsError
from trainer.stages import distill, warm_up

PART = {name: QUICK[name] for name in ("batch_size", "warmup_epochs", "evidence")} | {"log_every": 2, "compile": "off"}
TEACHER = {
    "teacher": {"architecture": "vit_tiny_patch16_224", "args": TINY | {"embed_dim": 32}},
    "workers": 0,
    "mae": PART | {"epochs": 50, "decoder_dim": 16, "decoder_depth": 1, "decoder_heads": 2},
    "finetune": PART | {"epochs": 50},
}
STUDENT = QUICK | PART | {"epochs": 50, "checkpoint_every": 500}
WHOLE = {
    "enabled": True,
    "pretrain": TEACHER,
    "reinforce": {"views": 2, "augmentation": QUICK["views"]},
    "distill": STUDENT,
}
STEPS = 5
"""In which losses are read back twice."""


@pytest.fixture(autouse=True)
def on_the_cpu(monkeypatch):
    monkeypatch.setenv("TRAINER_DEVICE", "cpu")


@pytest.fixture
def warm(trained_digits, tmp_path):
    """Runs the stage below this test's folder and gives its report."""

    def run(**changes):
        section = config.validate(WarmUpSettings, WHOLE | changes)
        warm_up.run(section, dataset=trained_digits.dataset, warmed=tmp_path / "warmed")
        return {one["training"]: one for one in json.loads((tmp_path / "warmed" / warm_up.FILE).read_text())}

    return run


def test_each_training_of_recipe_takes_its_first_steps(warm, tmp_path):
    report = warm()
    steps = {name: one["steps"] for name, one in report.items()}
    assert steps == {"mae": STEPS + 1, "finetune": STEPS, "distill": STEPS + 1}, "there are unlabeled images too"
    made = artifacts.read(tmp_path / "warmed", "warm_up")
    assert made.figures["distill"]["steps"] == STEPS + 1
    assert made.settings["distill"]["epochs"] == 50


def test_batch_larger_than_data_takes_no_more_steps(warm):
    """Each has the shape of the training's own batch, which is clamped to all images."""
    report = warm(distill=STUDENT | {"batch_size": 3000})
    assert report["distill"]["steps"] == STEPS


def test_nothing_stays_but_the_report(warm, tmp_path, monkeypatch):
    """Neither models, evidence and checkpoints nor a run in MLflow, also where checkpoints of real trainings stand."""
    monkeypatch.setenv("TRAINER_CHECKPOINTS", str(tmp_path / "checkpoints"))
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{tmp_path}/mlflow.db")
    warm()
    files = {path.relative_to(tmp_path).as_posix() for path in tmp_path.rglob("*") if path.is_file()}
    assert files == {f"warmed/{warm_up.FILE}", "warmed/manifest.json"}


@pytest.mark.parametrize(
    ("changes", "trainings"),
    [
        ({"pretrain": TEACHER | {"mae": TEACHER["mae"] | {"epochs": 0}}}, ["finetune", "distill"]),
        ({"distill": STUDENT | {"epochs": 0}}, ["mae", "finetune"]),
        ({"distill": STUDENT | {"teacher": "recorded"}}, ["mae", "finetune", "distill"]),
        ({"distill": STUDENT | {"logit_weight": 0}}, ["mae", "finetune", "distill"]),
    ],
    ids=["given images only", "no student", "recorded", "no teacher"],
)
def test_only_what_the_recipe_trains(warm, changes, trainings):
    assert list(warm(**changes)) == trainings


def test_a_teacher_that_is_given_is_only_distilled(warm, trained_digits):
    parts = {name: TEACHER[name] | {"epochs": 0} for name in ("mae", "finetune")}
    assert list(warm(pretrain=TEACHER | parts | {"weights": str(trained_digits.teacher)})) == ["distill"]


@pytest.mark.long
def test_the_training_finds_all_graphs_in_the_cache(warm, trained_digits, tmp_path, monkeypatch):
    """Torch's compiler keeps them by their content; the training comes after all that it keeps in memory is gone."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "inductor"))
    model = {"architecture": "vit_tiny_patch16_224", "args": TINY | {"depth": 1}}
    student = STUDENT | {"student": model, "compile": "on", "logit_weight": 0, "epochs": 1, "batch_size": 250}
    given = TEACHER | {name: TEACHER[name] | {"epochs": 0} for name in ("mae", "finetune")}
    torch.compiler.reset()
    counters.clear()
    report = warm(pretrain=given | {"weights": str(trained_digits.teacher)}, distill=student)
    assert report["distill"]["graphs"] > 0
    assert report["distill"]["compile_s"] > 0
    assert counters["inductor"]["fxgraph_cache_miss"] > 0
    torch.compiler.reset()
    counters.clear()
    distill.run(
        config.validate(DistillSettings, student),
        dataset=trained_digits.dataset,
        teacher=trained_digits.teacher,
        student=tmp_path / "student",
        evidence=tmp_path / "evidence",
    )
    assert counters["inductor"]["fxgraph_cache_miss"] == 0
    assert counters["inductor"]["fxgraph_cache_hit"] > 0


def test_without_trainings_there_is_nothing_to_compile_for(tmp_path):
    with pytest.raises(SettingsError, match=r"warm_up has no trainings to compile for.*warm_up\.enabled=true"):
        warm_up.run(WarmUpSettings(), dataset=tmp_path / "none", warmed=tmp_path / "warmed")
