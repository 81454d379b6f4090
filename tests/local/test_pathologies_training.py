"""Each rule on what is learned: its pathology is really made, and exactly that rule fires.

Every training here is the real distillation of the digits, or the real training of a teacher, with one fault in it.
"""

from __future__ import annotations

import itertools
import logging
import re
import time
from contextlib import contextmanager
from functools import partial
from unittest.mock import patch

import numpy as np
import pytest
import torch
from PIL import Image
from sklearn.datasets import load_digits

from tests import pathologies
from tests.distillations import TINY
from tests.pathologies import SETTINGS, TEACHER, Patient
from trainer import config
from trainer.config.rules import RuleSettings
from trainer.data.dataset import Split
from trainer.io import artifacts
from trainer.io.errors import LaunchError, TrainingError
from trainer.models import networks
from trainer.models.served_student.torch_network import Preprocessing
from trainer.objectives.distillation.objective import DistillObjective
from trainer.profiling.evidence_files import read_evidence
from trainer.profiling.rules.outcomes import TrainingRule
from trainer.profiling.rules.stalled import StalledTraining
from trainer.stages import prepare, pretrain, reinforce
from trainer.training.loop import Trainer

LOOKS = SETTINGS["evidence"] | {"tensors_every": 5, "tensors_budget": 1.0, "operators_steps": 0}
"""Many looks in a short training."""
WATCH = {"interval_s": 0.0, "budget": 1.0}
long = partial(pytest.param, marks=pytest.mark.long)
"""Judges after every step."""
QUICK = {"epochs": 4, "evidence": LOOKS}
WIDE = TINY | {"patch_size": 4, "embed_dim": 96, "depth": 2}
DIGITS = {"image_size": 32, "encoding": "png", "workers": 0}


def findings(training, rules=None):
    """Name of each rule on the training itself that finds something -> what.

    Those on what slows it have their own tests: steps of some milliseconds have outliers wherever the machine does something else.
    """
    names = {rule.name for rule in TrainingRule.__subclasses__()}
    return {name: text for name, text in pathologies.findings(training, rules).items() if name in names}


@pytest.fixture
def distill(patient):
    """Forty steps with a look at every fifth."""
    return partial(patient.distill, **QUICK)


# ---------------------------------------------------------------------------------------------------------------------
# Faults


@contextmanager
def changed_student(change):
    """The student's weights are changed before it is trained."""
    create = networks.create

    def made(*arguments, **keywords):
        model = create(*arguments, **keywords)
        with torch.no_grad():
            change(model)
        return model

    with patch.object(networks, "create", made):
        yield


def each_matrix(change, part=""):
    def apply(model):
        for name, weights in model.named_parameters():
            if weights.dim() >= 2 and part in name:
                change(weights)

    return apply


def frozen(model):
    for name, weights in model.named_parameters():
        weights.requires_grad_("blocks.0." not in name)


@contextmanager
def scaled_loss(factor):
    method = DistillObjective.__call__

    def called(*arguments):
        losses = method(*arguments)
        return losses | {"loss": losses["loss"] * factor}

    with patch.object(DistillObjective, "__call__", called):
        yield


@contextmanager
def growing_loss():
    """The loss grows to a million times as much over the first steps.

    A learning rate alone is not enough: whether gradients grow under it, or only stay huge, depends on the processor's rounding.
    """
    method, calls = DistillObjective.__call__, itertools.count()

    def called(*arguments):
        losses = method(*arguments)
        return losses | {"loss": losses["loss"] * min(1e6, 2.0 ** next(calls))}

    with patch.object(DistillObjective, "__call__", called):
        yield


@contextmanager
def blind():
    """Every image is the same to the models."""
    preprocess = Preprocessing.forward
    with patch.object(Preprocessing, "forward", lambda module, images: 0 * preprocess(module, images)):
        yield


@contextmanager
def noise():
    """Every image is noise to the models."""
    preprocess = Preprocessing.forward
    with patch.object(Preprocessing, "forward", lambda module, images: torch.randn_like(preprocess(module, images))):
        yield


@contextmanager
def relabeled():
    """Four of five training images of a three have the label of an eight."""
    init = Split.__init__

    def made(split, *arguments, **options):
        init(split, *arguments, **options)
        if split.name == "train":
            most = (split.labels == 3) & (np.arange(len(split.labels)) % 5 > 0)
            split.rows.labels = np.where(most, 8, split.labels)

    with patch.object(Split, "__init__", made):
        yield


@contextmanager
def noisy_labels():
    """Every training image has a label by lot."""
    init = Split.__init__

    def made(split, *arguments, **options):
        init(split, *arguments, **options)
        if split.name == "train":
            split.rows.labels = np.random.default_rng(0).integers(0, 10, len(split.labels))

    with patch.object(Split, "__init__", made):
        yield


@contextmanager
def one_step(number, action):
    """Something happens within one step."""
    method = Trainer.train_step

    def called(loop, step, *arguments):
        if step == number:
            action()
        return method(loop, step, *arguments)

    with patch.object(Trainer, "train_step", called):
        yield


# ---------------------------------------------------------------------------------------------------------------------
# Weights and gradients


@pytest.mark.parametrize(
    "change",
    [
        long(each_matrix(lambda weights: weights.normal_(std=1e3)), id="1000 times too large"),
        long(each_matrix(lambda weights: weights.fill_(0.02)), id="all alike"),
        pytest.param(each_matrix(lambda weights: weights.mul_(50), "blocks.1.mlp"), id="one block at another scale"),
    ],
)
def test_poor_initialization(distill, change):
    found = findings(distill(fault=partial(changed_student, change)))
    assert set(found) == {"poor_initialization"}, found


def test_exploding_gradients(distill):
    found = findings(distill(base_learning_rate=100.0, fault=growing_loss))
    assert set(found) == {"exploding_gradients"}, found
    assert "times its own norm" in found["exploding_gradients"]


@pytest.mark.parametrize(
    "settings",
    [
        long({"fault": partial(scaled_loss, 1e38)}, id="loss scale"),
        pytest.param({"base_learning_rate": 1e4}, id="learning rate"),
    ],
)
def test_evidence_tells_why_a_loss_was_not_finite(distill, settings):
    with pytest.raises(TrainingError, match="the loss is not finite at step") as caught:
        distill(evidence=LOOKS | {"tensors_every": 1}, **settings)
    place = str(caught.value).rpartition("; what it recorded is at ")[2]
    (training,) = read_evidence(place).trainings
    found = findings(training)
    assert set(found) == {"exploding_gradients"}, found
    assert "are not finite" in found["exploding_gradients"]


def test_vanishing_gradients(distill):
    found = findings(distill(fault=partial(scaled_loss, 1e-12)))
    assert set(found) == {"vanishing_gradients"}, found


@pytest.mark.parametrize("rate", [1.0, 2e-9])
def test_update_ratio(distill, rate):
    found = findings(distill(base_learning_rate=rate))
    assert set(found) == {"update_ratio"}, found


def test_unchanged_weights_of_a_frozen_layer(distill):
    found = findings(distill(fault=partial(changed_student, frozen)))
    assert set(found) == {"unchanged_weights"}, found
    assert found["unchanged_weights"].startswith("12 of 32 tensors of weights (network.blocks.0.norm1.weight, ")


def test_unchanged_weights_at_learning_rate_that_rounding_swallows(distill):
    found = findings(distill(base_learning_rate=1e-30))
    assert set(found) == {"unchanged_weights"}, found
    assert "nothing is learned" in found["unchanged_weights"]


# ---------------------------------------------------------------------------------------------------------------------
# Losses


def test_loss_not_falling_where_the_images_say_nothing(distill):
    found = findings(distill(fault=noise, logit_weight=0.0, label_weight=1.0, log_every=4))
    assert set(found) == {"loss_not_falling"}, found
    assert "did not fall by 3%" in found["loss_not_falling"]


def test_overfitting_of_wrong_labels(patient, tmp_path):
    """Some fifty of the digits are for training, and their labels are drawn by lot."""
    few = config.validate(config.DataSettings, {**DIGITS, "val_fraction": 0.485, "test_fraction": 0.485})
    prepare.run(few, dataset=tmp_path / "few")
    patient = Patient(dataset=str(tmp_path / "few"), teacher=patient.teacher, folder=tmp_path)
    student = {"architecture": "vit_tiny_patch16_224", "args": TINY | {"embed_dim": 32}}
    settings = {
        "student": student,
        "logit_weight": 0.0,
        "label_weight": 1.0,
        "weight_decay": 0.0,
        "views": {"min_scale": 1.0, "flip": False},
    }
    settings |= {"batch_size": 32, "epochs": 100, "validate_every_epochs": 20, "base_learning_rate": 2e-2}
    found = findings(patient.distill(fault=noisy_labels, **settings))
    assert set(found) == {"overfitting"}, found


@pytest.mark.parametrize(
    "settings",
    [
        long({"label_weight": 1e-9}, id="label weight"),
        pytest.param({"logit_weight": 1e-9}, id="logit weight"),
        long({"logit": {"temperature": 1e-4}}, id="low temperature"),
        pytest.param({"logit": {"temperature": 1e4}}, id="high temperature"),
    ],
)
def test_vanishing_loss_term(distill, settings):
    found = findings(distill(**settings))
    assert set(found) == {"vanishing_loss_term"}, found


# ---------------------------------------------------------------------------------------------------------------------
# Inputs


def test_images_that_are_empty(distill):
    found = findings(distill(fault=blind, logit_weight=0.0, label_weight=1.0, log_every=4))
    assert set(found) == {"check_input_images"}, found
    assert found["check_input_images"].startswith("All channels of the input hold one value")


def test_confused_classes_of_a_class_that_was_relabeled(distill):
    student = {"architecture": "vit_tiny_patch16_224", "args": WIDE}
    found = findings(distill(fault=relabeled, logit_weight=0.0, label_weight=1.0, student=student, epochs=20))
    assert set(found) == {"confused_classes"}, found
    assert "'3' for '8'" in found["confused_classes"]


def test_weak_teacher_that_guesses(digits, patient, tmp_path):
    weak = TEACHER | {"finetune": TEACHER["finetune"] | {"epochs": 1, "base_learning_rate": 1e-9}}
    settings = config.validate(config.PretrainSettings, weak)
    pretrain.run(settings, dataset=digits, teacher=tmp_path / "teacher", evidence=tmp_path / "evidence")
    patient = Patient(dataset=digits, teacher=str(tmp_path / "teacher"), folder=tmp_path)
    found = findings(patient.distill(**QUICK))
    assert set(found) == {"weak_teacher"}, found
    assert "is near chance: always saying the most frequent class" in found["weak_teacher"]


def test_class_imbalance(patient, tmp_path):
    """Twenty images of the digit 1 for each of the digit 0."""
    folder = tmp_path / "images"
    images = load_digits()
    for number, (image, digit) in enumerate(zip(images.images, images.target, strict=True)):
        if digit == 1 or (digit == 0 and number % 20 == 0):
            (folder / str(digit)).mkdir(parents=True, exist_ok=True)
            Image.fromarray((image * 15).astype(np.uint8)).resize((16, 16)).convert("RGB").save(
                folder / str(digit) / f"{number}.png"
            )
    settings = config.validate(config.DataSettings, {**DIGITS, "source": f"imagefolder:{folder}"})
    prepare.run(settings, dataset=tmp_path / "uneven")
    patient = Patient(dataset=str(tmp_path / "uneven"), teacher=patient.teacher, folder=tmp_path)
    found = findings(patient.distill(logit_weight=0.0, label_weight=1.0, batch_size=32, **QUICK | {"epochs": 10}))
    assert set(found) == {"class_imbalance"}, found


def test_low_recorded_mass(patient, tmp_path):
    """The largest logit only, of a teacher whose distribution is wide at temperature 4."""
    record = config.validate(
        config.ReinforceSettings, {"views": 2, "top_k": 1, "seed": 3, "workers": 0, "augmentation": SETTINGS["views"]}
    )
    outputs = tmp_path / "outputs"
    reinforce.run(record, dataset=patient.dataset, teacher=patient.teacher, teacher_outputs=outputs)
    found = findings(
        patient.distill(teacher="recorded", teacher_outputs=str(outputs), logit={"temperature": 4.0}, **QUICK)
    )
    assert set(found) == {"low_recorded_mass"}, found


def test_healthy_trainings_of_teacher_fire_no_rule(digits, tmp_path):
    part = TEACHER["finetune"] | {"epochs": 8, "validate_every_epochs": 2, "log_every": 5, "evidence": LOOKS}
    mae = {name: value for name, value in part.items() if name in config.MaeSettings.model_fields}
    mae |= {"epochs": 6, "base_learning_rate": 4e-3, "decoder_dim": 32, "decoder_depth": 1, "decoder_heads": 2}
    small = {"architecture": "vit_tiny_patch16_224", "args": TINY | {"embed_dim": 48}}
    settings = config.validate(config.PretrainSettings, TEACHER | {"teacher": small, "mae": mae, "finetune": part})
    pretrain.run(settings, dataset=digits, teacher=tmp_path / "teacher", evidence=tmp_path / "evidence")
    trainings = read_evidence(tmp_path / "evidence").trainings
    assert {training.name: findings(training) for training in trainings} == {"mae": {}, "finetune": {}}


# ---------------------------------------------------------------------------------------------------------------------
# Time


STALLED = RuleSettings(stalled_training=StalledTraining(seconds=3))


def test_stalled_training(distill, caplog):
    caplog.set_level(logging.INFO)
    fault = partial(one_step, 20, partial(time.sleep, 5))
    found = findings(distill(fault=fault, watch={"rules": STALLED}), STALLED)
    assert set(found) == {"stalled_training"}, found
    assert "between steps 20 and 21" in found["stalled_training"]
    (line,) = (line for line in caplog.messages if "severe: Stalled training. " in line)
    assert "since step 20; the first process is in trainer.training.loop.Trainer.take_step (line " in line


def test_a_training_that_hangs_is_ended(distill):
    watch = {"rules": STALLED, "stop_on": ["stalled_training"]}
    began = time.monotonic()
    with pytest.raises(
        TrainingError, match=r"^distill: stopped after step 20, as profile.stop_on has stalled_training: No "
    ):
        distill(fault=partial(one_step, 20, partial(time.sleep, 600)), watch=watch)
    assert time.monotonic() - began < 300


# ---------------------------------------------------------------------------------------------------------------------
# While it runs


def test_an_explosion_ends_the_training_early(distill, patient, caplog):
    caplog.set_level(logging.INFO)
    watch = WATCH | {"stop_on": ["exploding_gradients"]}
    with pytest.raises(TrainingError) as caught:
        distill(base_learning_rate=100.0, watch=watch, checkpoint_every=2, fault=growing_loss)
    message = re.match(
        r"distill: stopped after step (\d+), as profile.stop_on has exploding_gradients: The gradient's norm grew from .* "
        r"Lower distill.base_learning_rate from 100 to 0\.00\d+, ",
        str(caught.value),
    )
    assert message is not None, str(caught.value)
    assert int(message[1]) <= 25
    assert any("severe: Exploding gradients. " in line for line in caplog.messages)
    newest = max(patient.folder.rglob("step-*"), key=lambda path: path.stat().st_mtime)
    assert artifacts.read(newest, "checkpoint")


def test_all_processes_end_where_the_first_one_stops(distillation):
    watch = WATCH | {"stop_on": ["update_ratio"]}
    with pytest.raises(
        LaunchError, match=r"process 0 of 2: distill: stopped after step 1, as profile.stop_on has update_ratio"
    ):
        distillation("stopped", base_learning_rate=100.0, watch=watch, epochs=4).run(processes=2)


def test_watching_changes_nothing_that_is_trained(distill):
    plain, watched = distill(log_every=1), distill(log_every=1, watch=WATCH)
    assert watched.ranks[0].record.overhead["rules"] > 0
    np.testing.assert_array_equal(plain.metrics["loss"].values, watched.metrics["loss"].values)
