"""Images that may have several labels teach through XLA what they teach on a CPU."""

import pytest
import torch

from tests.distillations import QUICK
from tests.multi_label_digits import write_list
from trainer import config
from trainer.data.dataset import open_dataset
from trainer.models import networks
from trainer.profiling.evidence_files import read_evidence
from trainer.stages import distill, evaluate, prepare, pretrain, reinforce

VIEWS = {"min_scale": 1.0, "flip": False, "mixup": 0.4}
COMMON = {
    name: QUICK[name] for name in ("batch_size", "warmup_epochs", "log_every", "checkpoint_every", "evidence")
} | {"views": VIEWS, "epochs": 4, "validate_every_epochs": 2}


@pytest.fixture(scope="module")
def dataset(tmp_path_factory):
    folder = tmp_path_factory.mktemp("several")
    photos = write_list(folder / "photos", count=600)
    data = config.DataSettings(source=f"manifest:{photos}", multi_label=True, image_size=16, encoding="png")
    prepare.run(data, dataset=folder / "data")
    return folder / "data"


def taught(dataset, folder, loss):
    """A teacher fine-tuned, recorded, and taught to a student: the evidence of both trainings, and the student's answers."""
    place = {"dataset": dataset, "teacher": folder / "teacher"}
    own = COMMON | {"layer_decay": 0.8, "drop_path": 0.0, "multi_label_loss": loss}
    given = {"teacher": QUICK["student"], "workers": 0, "seed": 3, "mae": {"epochs": 0}, "finetune": own}
    pretrain.run(config.validate(config.PretrainSettings, given), **place, evidence=folder / "evidence")
    recording = {"views": 2, "batch_size": 100, "workers": 0, "seed": 3, "augmentation": VIEWS}
    outputs = folder / "outputs"
    reinforce.run(config.validate(config.ReinforceSettings, recording), **place, teacher_outputs=outputs)
    learning = QUICK | COMMON | {"teacher": "recorded", "label_weight": 0.3, "multi_label_loss": loss}
    student = {"student": folder / "student", "evidence": folder / "student-evidence", "teacher_outputs": outputs}
    distill.run(config.validate(config.DistillSettings, learning), **place, **student)
    trainings = [read_evidence(folder / name).trainings[0] for name in ("evidence", "student-evidence")]
    return trainings, evaluate.predict(
        networks.load(folder / "student"), open_dataset(dataset).split("test"), 50, "student"
    )


@pytest.mark.parametrize("loss", ["bce", "asymmetric"])
def test_losses_validation_and_answers_are_those_of_cpu(dataset, tmp_path, monkeypatch, loss):
    found = {}
    for kind in ("cpu", "xla"):
        monkeypatch.setenv("TRAINER_DEVICE", kind)
        found[kind] = taught(dataset, tmp_path / kind, loss)
    (there, answers), (here, expected) = found["xla"], found["cpu"]
    for training, wanted in zip(there, here, strict=True):
        assert training.ranks[0].record.device.startswith("xla")
        assert not training.ranks[0].steps["transfers"].any()
        for name in ("loss", "val_loss", "val_map"):
            values, others = (torch.tensor(one.metrics[name].values) for one in (training, wanted))
            assert len(values) >= 2
            torch.testing.assert_close(values, others, rtol=5e-4, atol=0.02 if name == "val_map" else 1e-4)
    torch.testing.assert_close(torch.from_numpy(answers), torch.from_numpy(expected), rtol=0.01, atol=2e-3)
