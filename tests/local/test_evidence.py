"""What a training records of itself changes nothing of it, and outlives its failure."""

import math
from pathlib import Path

import pytest
import torch

from tests.distillations import QUICK
from trainer import config
from trainer.io import artifacts
from trainer.io.errors import TrainingError
from trainer.models import networks
from trainer.objectives.distillation.objective import DistillObjective
from trainer.profiling.evidence_files import read_evidence
from trainer.stages import distill

STEPS = 20
LOOKING = {"tensors_every": 1, "tensors_budget": 1.0, "operators_at": [2, 9], "operators_steps": 2}
BLIND = {"tensors_every": 0, "operators_steps": 0, "system_interval_s": 60}


@pytest.fixture
def run(digits, teacher, tmp_path, monkeypatch):
    """Distills in this process; gives the folder of the outputs."""
    monkeypatch.setenv("TRAINER_DEVICE", "cpu")

    def start(name, **changes):
        settings = config.validate(config.DistillSettings, QUICK | {"epochs": 2} | changes)
        folder = tmp_path / name
        distill.run(settings, dataset=digits, teacher=teacher, student=folder / "student", evidence=folder / "evidence")
        return folder

    return start


def evidence_of(path):
    (training,) = read_evidence(path).trainings
    return training


def test_looking_changes_no_bit_of_what_is_trained(run):
    drawing = {"drop_path": 0.2, "ema_decay": 0.9, "accumulation": 2, "views": QUICK["views"] | {"mixup": 0.8}}
    folders = [run("looking", evidence=LOOKING, **drawing), run("blind", evidence=BLIND, **drawing)]
    looking, blind = (networks.load(folder / "student").network.state_dict() for folder in folders)
    assert all(torch.equal(looking[name], value) for name, value in blind.items())
    seen, unseen = (evidence_of(folder / "evidence") for folder in folders)
    assert seen.metrics["loss"].values.tolist() == unseen.metrics["loss"].values.tolist()
    (rank,) = seen.ranks
    assert sorted(set(rank.tensors.steps)) == list(range(STEPS)), "it did look, in each step"
    assert len(seen.metrics["attention_entropy/network.blocks.1"].values) == STEPS
    assert not len(unseen.ranks[0].tensors.steps)


def test_what_is_known_of_training_stands_in_its_evidence(run, teacher):
    folder = run("plain", evidence=LOOKING)
    record = evidence_of(folder / "evidence").ranks[0].record
    context = record.context
    assert (context.total_steps, context.micro_batch) == (STEPS, 128)
    assert context.settings["epochs"] == 2
    assert list(context.classes) == [str(digit) for digit in range(10)]
    assert sum(context.classes.values()) == context.samples
    assert context.teacher_val_top1 is None, "this teacher was not measured"
    assert {"fetch", "join", "preparation", "first_step"} <= set(record.startup)
    assert [(attempt.first_step, attempt.steps_seen) for attempt in record.attempts] == [(0, STEPS)]
    measured = evidence_of(folder / "evidence").metrics["val_top1"].values[-1]
    assert artifacts.manifest(folder / "student", "model").figures["val_top1"] == measured
    assert record.operators.steps == 4


class Spoiled(DistillObjective):
    """Loses its way after some steps."""

    calls = 0

    def __call__(self, model, batch):
        losses = super().__call__(model, batch)
        self.calls += 1
        return {name: loss * math.nan for name, loss in losses.items()} if self.calls == 13 else losses


def test_a_failed_training_leaves_its_evidence(run, monkeypatch, tmp_path):
    with monkeypatch.context() as spoiling:
        spoiling.setattr("trainer.stages.distill.DistillObjective", Spoiled)
        with pytest.raises(TrainingError, match=r"not finite at step 13") as caught:
            run("again", checkpoint_every=5, evidence=LOOKING | {"operators_steps": 0})
    place = Path(str(caught.value).rsplit(" at ", 1)[1])
    assert place.parent.parent == tmp_path / "again" / "checkpoints"
    failed = evidence_of(place)
    (rank,) = failed.ranks
    assert "not finite at step 13" in rank.record.failed
    assert rank.tensors.steps.max() == 12
    last = rank.tensors.steps == 12
    assert (rank.tensors.values["gradient_nonfinite"][last] > 0).all(), "the look at the last step is kept too"
    record = (
        evidence_of(run("again", checkpoint_every=5, evidence=LOOKING | {"operators_steps": 0}) / "evidence")
        .ranks[0]
        .record
    )
    assert [(attempt.first_step, attempt.steps_seen) for attempt in record.attempts] == [(0, 12), (10, STEPS - 10)]
    assert record.failed is None
    assert not place.exists(), "what had failed is of no use once it has not"
