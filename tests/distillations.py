"""Distillations that take seconds."""

import json
from pathlib import Path

import datasets
import numpy as np
import torch

from tests import groups
from trainer import config, stages
from trainer.data.dataset import open_dataset
from trainer.data.dataset_schema import SPLITS, UNLABELED, DatasetDescription, features
from trainer.graph import JobSpec
from trainer.io import artifacts
from trainer.models import networks
from trainer.profiling.evidence_files import read_evidence
from trainer.stages import prepare

TINY = {"img_size": 16, "patch_size": 8, "embed_dim": 16, "depth": 2, "num_heads": 2}
"""A vision transformer for the digits."""
QUICK = {
    "epochs": 1,
    "batch_size": 128,
    "base_learning_rate": 8e-3,
    "warmup_epochs": 0,
    "log_every": 1,
    "checkpoint_every": 0,
    "workers": 0,
    "seed": 3,
    "student": {"architecture": "vit_tiny_patch16_224", "args": TINY},
    "evidence": {"operators_steps": 0},
    "views": {"min_scale": 0.5, "flip": False},
}
"""A distillation of ten steps."""

MIXED = {"min_scale": 0.5, "flip": False, "mixup": 0.4, "cutmix": 0.6}
"""Views that are mixed with others'."""


def prepared_digits(directory):
    prepare.run(config.resolve("digits").data, dataset=directory)
    return str(directory)


def half_labeled(dataset, directory):
    """Make a copy of a prepared data set there, of whose training images every second one has lost its label."""
    whole = open_dataset(dataset)
    train = whole.split("train")
    without = [index % 2 == 1 for index in range(len(train))]
    splits = {name: datasets.load_from_disk(str(Path(dataset) / name)) for name in SPLITS}
    in_memory = {"keep_in_memory": True}  # else a cache file comes into the data set that is read
    lost = splits["train"].select(np.flatnonzero(without)).map(lambda row: row | {"label": UNLABELED}, **in_memory)
    splits["train"] = splits["train"].select(np.flatnonzero(np.logical_not(without)))
    splits["unlabeled"] = datasets.concatenate_datasets([splits["unlabeled"], lost])
    settings = dict(artifacts.manifest(dataset, "dataset").settings)
    with artifacts.create(directory, "dataset", settings=settings) as draft:
        for name, split in splits.items():
            split.cast(features(), **in_memory).save_to_disk(str(draft.path / name))
        images = {name: len(split) for name, split in splits.items()}
        DatasetDescription(classes=whole.classes, image_size=whole.image_size, images=images).write(draft.path)
    return str(directory)


def blank_teacher(directory):
    """Make a model directory there, with a teacher that has not learned anything."""
    torch.manual_seed(0)
    settings = config.ModelSettings(architecture="vit_tiny_patch16_224", args=TINY | {"embed_dim": 32})
    with artifacts.create(directory, "model", settings={}) as draft:
        networks.save(networks.create(settings, [str(digit) for digit in range(10)]), draft.path)
    return str(directory)


class Distillation:
    """One distillation: how to run it and what came out."""

    def __init__(self, dataset, teacher, output, /, **settings):
        self.inputs = {"dataset": dataset, "teacher": teacher}
        self.outputs = {"student": str(output / "student"), "evidence": str(output / "evidence")}
        section = config.validate(config.DistillSettings, QUICK | settings)
        self.settings = section.model_dump(mode="json")

    def run(self, processes=1):
        """Train to the end, by the launcher of this machine."""
        groups.launch(
            JobSpec(
                stage="distill",
                settings=self.settings,
                inputs=self.inputs,
                outputs=self.outputs,
                processes_per_node=processes,
            )
        )
        return self

    def train(self, processes=1, **environment):
        """Train to the end without a launcher, which takes a moment only."""
        ended = groups.run(self, processes=processes, limit_s=300, **environment)
        assert ended.codes == [0] * processes, ended
        return self

    def run_here(self):
        """Train to the end in this process."""
        stages.call("distill", json.dumps(self.settings), {**self.inputs, **self.outputs})
        return self

    def arguments(self, processes):
        """The command line that does the same."""
        places = {**self.inputs, **self.outputs}
        return [
            "-m", "trainer", "stage", "distill", "--settings", json.dumps(self.settings), "--processes", str(processes),
            *(text for name, place in places.items() for text in (f"--{name}", place)),
        ]  # fmt: skip

    def losses(self, name="loss"):
        (training,) = read_evidence(self.outputs["evidence"]).trainings
        return torch.tensor(training.metrics[name].values)

    def weights(self):
        return networks.load(self.outputs["student"]).network.state_dict()
