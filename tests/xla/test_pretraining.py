"""A teacher is pretrained and fine-tuned through XLA as it is on a CPU."""

import torch

from tests.distillations import QUICK
from trainer import config
from trainer.models import networks
from trainer.profiling.evidence_files import read_evidence
from trainer.stages import pretrain

COMMON = {
    name: QUICK[name] for name in ("batch_size", "warmup_epochs", "log_every", "checkpoint_every", "evidence", "views")
}
SETTINGS = {
    "teacher": QUICK["student"],
    "workers": 0,
    "seed": 3,
    "mae": COMMON | {"epochs": 3, "decoder_dim": 16, "decoder_depth": 1, "decoder_heads": 2},
    "finetune": COMMON
    | {"epochs": 3, "layer_decay": 0.8, "drop_path": 0.0, "accumulation": 2, "validate_every_epochs": 3},
}


def teacher(kind, digits, folder):
    """Train one on a device: its evidence by training, and its weights."""
    settings = config.validate(config.PretrainSettings, SETTINGS)
    pretrain.run(settings, dataset=digits, teacher=folder / kind, evidence=folder / f"{kind}-evidence")
    trainings = {training.name: training for training in read_evidence(folder / f"{kind}-evidence").trainings}
    return trainings, networks.load(folder / kind).network.state_dict()


def test_pretraining_and_fine_tuning_are_those_of_cpu(digits, tmp_path, monkeypatch):
    found = {}
    for kind in ("cpu", "xla"):
        monkeypatch.setenv("TRAINER_DEVICE", kind)
        found[kind] = teacher(kind, digits, tmp_path)
    (there, weights), (here, expected) = found["xla"], found["cpu"]
    for name in ("mae", "finetune"):
        losses, wanted = (trainings[name].metrics["loss"].values for trainings in (there, here))
        assert len(losses) >= 29
        torch.testing.assert_close(torch.tensor(losses), torch.tensor(wanted), rtol=2e-4, atol=1e-5)
        assert not there[name].ranks[0].steps["transfers"].any()
    for name, value in expected.items():
        torch.testing.assert_close(weights[name], value, rtol=0.01, atol=2e-3)
