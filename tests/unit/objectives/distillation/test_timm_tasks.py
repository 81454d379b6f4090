"""The objective beside timm's own distillation tasks: the same models, images and weights give the same losses and gradients."""

import copy

import pytest
import torch
from timm.task import FeatureDistillationTask, LogitDistillationTask, TokenDistillationTask
from torch import nn

from trainer.config import DistillSettings, ModelSettings
from trainer.config.settings import HardSettings, KlSettings
from trainer.data.batch import Batch
from trainer.devices import choose_device
from trainer.models import networks
from trainer.objectives.distillation.frozen_teacher import FrozenTeacher
from trainer.objectives.distillation.objective import DistillObjective, ProjectedStudent, prepared_student

IMAGES = torch.randint(0, 256, (6, 3, 32, 32), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
LABELS = torch.tensor([0, 1, 2, 3, 0, 1])
BATCH = Batch(IMAGES, LABELS, torch.arange(6), torch.zeros(6, dtype=torch.int64))


@pytest.fixture(autouse=True)
def on_the_cpu(monkeypatch):
    monkeypatch.setenv("TRAINER_DEVICE", "cpu")


def classifier(seed, dim, architecture="vit_tiny_patch16_224"):
    torch.manual_seed(seed)
    arguments = {"img_size": 32, "patch_size": 8, "embed_dim": dim, "depth": 2, "num_heads": 2}
    model = networks.create(ModelSettings(architecture=architecture, args=arguments), ("a", "b", "c", "d"))
    nn.init.normal_(model.network.head.weight)  # timm's starts so small that all logits are nearly equal
    return model


@pytest.fixture
def pair():
    """A teacher and a student, and copies of both networks for timm."""
    teacher, student = classifier(1, 24), classifier(2, 16)
    return teacher, student, copy.deepcopy(teacher.network), copy.deepcopy(student.network)


def assert_same_losses(ours, theirs, names):
    for our_name, their_name in names.items():
        torch.testing.assert_close(ours[our_name], theirs[their_name], rtol=1e-5, atol=0, msg=our_name)


def gradients(network):
    return {name: parameter.grad for name, parameter in network.named_parameters()}


def assert_same_gradients(ours, theirs):
    assert ours.keys() == theirs.keys()
    for name, gradient in ours.items():
        torch.testing.assert_close(
            gradient, theirs[name], rtol=1e-4, atol=1e-6, msg=lambda text, name=name: f"{name}: {text}"
        )


@pytest.mark.parametrize(("temperature", "weights"), [(1.0, (1.0, 1.0)), (4.0, (0.7, 0.3))])
def test_kl_and_labels_are_timms_logit_distillation(pair, temperature, weights):
    teacher, student, their_teacher, their_student = pair
    settings = DistillSettings(logit={"temperature": temperature}, logit_weight=weights[0], label_weight=weights[1])
    frozen = FrozenTeacher(teacher, choose_device(), precision="fp32")
    ours = DistillObjective(student, [frozen], settings)(student, BATCH)
    task = LogitDistillationTask(
        their_student,
        their_teacher,
        nn.CrossEntropyLoss(),
        distill_loss_weight=weights[0],
        task_loss_weight=weights[1],
        temperature=temperature,
        verbose=False,
    ).train()
    theirs = task(student.preprocess(IMAGES), LABELS)
    assert_same_losses(ours, theirs, {"logit": "kd_loss", "label": "task_loss", "loss": "loss"})
    ours["loss"].backward()
    theirs["loss"].backward()
    assert_same_gradients(gradients(student.network), gradients(their_student))


def test_the_mean_squared_feature_is_timms_feature_distillation(pair):
    teacher, student, their_teacher, their_student = pair
    settings = DistillSettings(feature_weight=5.0, feature_loss="mse", logit_weight=0.0, label_weight=1.0)
    frozen = FrozenTeacher(teacher, choose_device(), precision="fp32", features=True)
    projected = ProjectedStudent(student, networks.feature_size(teacher))
    task = FeatureDistillationTask(
        their_student,
        their_teacher,
        nn.CrossEntropyLoss(),
        distill_loss_weight=5.0,
        task_loss_weight=1.0,
        verbose=False,
    ).train()
    task.trainable_module.projection.load_state_dict(projected.projection.state_dict())
    ours = DistillObjective(projected, [frozen], settings)(projected, BATCH)
    theirs = task(student.preprocess(IMAGES), LABELS)
    assert_same_losses(ours, theirs, {"feature": "kd_loss", "label": "task_loss", "loss": "loss"})
    ours["loss"].backward()
    theirs["loss"].backward()
    assert_same_gradients(gradients(student.network), gradients(their_student))
    assert_same_gradients(gradients(projected.projection), gradients(task.trainable_module.projection))


@pytest.mark.parametrize(("kind", "logit"), [("soft", KlSettings(temperature=3.0)), ("hard", HardSettings())])
def test_distillation_token_learns_as_in_timms_token_distillation(pair, kind, logit):
    teacher, _, their_teacher, _ = pair
    student = classifier(2, 16, "deit_tiny_distilled_patch16_224")
    nn.init.normal_(student.network.head_dist.weight)
    their_student = copy.deepcopy(student.network)
    settings = DistillSettings(distillation_token=True, logit=logit, logit_weight=0.7, label_weight=0.3)
    model = prepared_student(student, settings, teacher)
    frozen = FrozenTeacher(teacher, choose_device(), precision="fp32")
    ours = DistillObjective(model, [frozen], settings)(model, BATCH)
    task = TokenDistillationTask(
        their_student,
        their_teacher,
        nn.CrossEntropyLoss(),
        distill_type=kind,
        distill_loss_weight=0.7,
        task_loss_weight=0.3,
        temperature=3.0,
        verbose=False,
    ).train()
    theirs = task(student.preprocess(IMAGES), LABELS)
    assert_same_losses(ours, theirs, {"logit": "distill_loss", "label": "task_loss", "loss": "loss"})
    ours["loss"].backward()
    theirs["loss"].backward()
    assert_same_gradients(gradients(student.network), gradients(their_student))
    with torch.no_grad():
        answers = model.eval()(IMAGES)
        last = student.network.forward_features(student.preprocess(IMAGES))
        heads = student.network.head(last[:, 0]), student.network.head_dist(last[:, 1])
    assert torch.allclose(answers, sum(heads) / 2, atol=1e-6)
    assert ours["agreement"] == (answers.argmax(1) == teacher.eval()(IMAGES).argmax(1)).float().mean()
