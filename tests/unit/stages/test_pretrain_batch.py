"""A batch of pretrain that is larger than its images."""

import pytest

from tests.distillations import TINY
from trainer import config
from trainer.config import PretrainSettings
from trainer.profiling.evidence_files import read_evidence
from trainer.stages import pretrain
from trainer.training.checkpoints import Checkpoints

PART = {
    "epochs": 2,
    "base_learning_rate": 1e-3,
    "warmup_epochs": 0,
    "log_every": 1,
    "checkpoint_every": 1,
    "evidence": {"operators_steps": 0},
}
SETTINGS = {
    "seed": 3,
    "workers": 0,
    "teacher": {"architecture": "vit_tiny_patch16_224", "args": TINY},
    "mae": PART | {"decoder_dim": 16, "decoder_depth": 1, "decoder_heads": 2},
    "finetune": PART,
}


@pytest.fixture
def pretrained(trained_digits, tmp_path, monkeypatch):
    """Runs the stage with a batch, and gives its trainings by name."""
    monkeypatch.setenv("TRAINER_DEVICE", "cpu")
    for name in ("MLFLOW_TRACKING_URI", "TRAINER_CHECKPOINTS"):
        monkeypatch.delenv(name, raising=False)

    def run(folder, **batches):
        parts = {name: SETTINGS[name] | {"batch_size": size} for name, size in batches.items()}
        places = {"teacher": tmp_path / folder / "teacher", "evidence": tmp_path / folder / "evidence"}
        pretrain.run(config.validate(PretrainSettings, SETTINGS | parts), dataset=trained_digits.dataset, **places)
        return {one.name: one for one in read_evidence(places["evidence"]).trainings}

    return run


def test_batches_are_clamped_for_each_training(pretrained, monkeypatch, caplog):
    """1,020 images with those without labels, and 1,000 labeled ones; pretraining with as many as there are is the same training."""
    keep = Checkpoints.save

    def stop_in_finetune(checkpoints, state, **options):
        keep(checkpoints, state, **options)
        if "finetune-" in checkpoints.uri:
            raise KeyboardInterrupt

    with monkeypatch.context() as interruption:
        interruption.setattr(Checkpoints, "save", stop_in_finetune)
        with pytest.raises(KeyboardInterrupt):
            pretrained("clamped", mae=3000, finetune=2000)
    said = [text.partition(" to train on, and a step")[0] for text in caplog.messages if "images to train on" in text]
    assert said == [
        "pretrain.mae.batch_size = 3000 is larger than the 1020 images",
        "pretrain.finetune.batch_size = 2000 is larger than the 1000 images",
    ]
    trainings = pretrained("clamped", mae=1020, finetune=2000)
    assert len(trainings["finetune"].metrics["loss"].values) == 1, "it goes on after the first of two steps"
    contexts = {name: one.ranks[0].record.context for name, one in trainings.items()}
    assert {name: context.settings["batch_size"] for name, context in contexts.items()} == {
        "mae": 1020,
        "finetune": 1000,
    }
