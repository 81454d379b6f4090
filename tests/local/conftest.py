import json

import pytest
import torch

from tests import groups
from tests.distillations import QUICK, TINY
from tests.pathologies import Patient, train_teacher
from trainer import artifacts, config, launch, models
from trainer.profiling.evidence import read_evidence
from trainer.stages import prepare


@pytest.fixture(scope="session")
def digits(tmp_path_factory):
    """The digits, prepared."""
    directory = tmp_path_factory.mktemp("data") / "digits"
    prepare.run(config.resolve("digits").data, dataset=directory)
    return str(directory)


@pytest.fixture(scope="session")
def teacher(tmp_path_factory):
    """A model directory with a teacher that has not learned anything."""
    directory = tmp_path_factory.mktemp("models") / "teacher"
    torch.manual_seed(0)
    settings = config.ModelSettings(architecture="vit_tiny_patch16_224", args=TINY | {"embed_dim": 32})
    with artifacts.create(directory, "model", settings={}) as draft:
        models.save(models.create(settings, [str(digit) for digit in range(10)]), draft.path)
    return str(directory)


class Distillation:
    """One distillation: how to run it and what came out."""

    def __init__(self, dataset, teacher, output, **settings):
        self.inputs = {"dataset": dataset, "teacher": teacher}
        self.outputs = {"student": str(output / "student"), "evidence": str(output / "evidence")}
        section = config.validate(config.DistillSettings, QUICK | settings)
        self.settings = section.model_dump(mode="json")

    def run(self, processes=1):
        """Train to the end."""
        launch.run_stage(
            "distill",
            json.dumps(self.settings),
            inputs=self.inputs,
            outputs=self.outputs,
            processes_per_node=processes,
        )
        return self

    def train(self, processes=1):
        """Train to the end without a launcher, which takes a moment only."""
        ended = groups.run(self, processes=processes)
        assert ended.codes == [0] * processes, ended.messages
        return self

    def arguments(self, processes):
        """The command line that does the same."""
        places = {**self.inputs, **self.outputs}
        return [
            "-m", "trainer", "stage", "distill", "--settings", json.dumps(self.settings), "--processes", str(processes),
            *(text for name, place in places.items() for text in (f"--{name}", place)),
        ]  # fmt: skip

    def losses(self):
        """The loss of each step."""
        (training,) = read_evidence(self.outputs["evidence"]).trainings
        return torch.tensor(training.metrics["loss"].values)

    def weights(self):
        """The student's weights."""
        return models.load(self.outputs["student"]).network.state_dict()


@pytest.fixture
def distillation(digits, teacher, tmp_path):
    """Makes distillations below this test's folder."""
    return lambda name, **settings: Distillation(digits, teacher, tmp_path / name, **settings)


@pytest.fixture(scope="session")
def patient(digits, tmp_path_factory):
    """The digits with a teacher that has learned them; see `tests/pathologies.py`."""
    folder = tmp_path_factory.mktemp("patient")
    return Patient(dataset=digits, teacher=train_teacher(digits, folder), folder=folder)
