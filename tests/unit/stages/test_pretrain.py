"""pretrain from timm's weights: what becomes of their head, and what the teacher's directory says of them."""

import json
from types import SimpleNamespace

import huggingface_hub.constants
import pytest
import torch

from tests.unit.models.test_pretrained import ARGS, NAME, NEW, OLD, publish
from trainer import config, stages
from trainer.data.dataset import open_dataset
from trainer.io.errors import ModelError, SettingsError
from trainer.models import networks
from trainer.stages import pretrain

BARELY = ["pretrain.mae.epochs=0", "pretrain.finetune.epochs=1", "pretrain.finetune.base_learning_rate=1e-9"]
"""Fine-tuning that changes no weight by as much as the tests see."""
DIGITS = {str(digit): 100 * digit for digit in range(10)}
MAPPED = "pretrain.label_map={" + ",".join(f"{digit}={index}" for digit, index in DIGITS.items()) + "}"


@pytest.fixture(autouse=True)
def _quietly(monkeypatch):
    monkeypatch.setenv("TRAINER_DEVICE", "cpu")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "")


@pytest.fixture
def hub(tmp_path, monkeypatch):
    """The cache of the hub's client; the hub does not answer."""
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    return tmp_path / "hub"


def section(*overrides, weights=f"timm:{NAME}"):
    args = ",".join(f"{name}={value}" for name, value in ARGS.items())
    given = [f"pretrain.weights={weights}", f"pretrain.teacher.args={{{args}}}", *BARELY, *overrides]
    return config.resolve("digits", given).pretrain


def taught(settings, dataset, output):
    """Run the stage; gives the teacher."""
    text = json.dumps(settings.model_dump(mode="json"))
    places = {"dataset": str(dataset), "teacher": str(output / "teacher"), "evidence": str(output / "evidence")}
    stages.call("pretrain", text, places)
    return networks.load(output / "teacher")


def is_kept(network, teacher, *rows):
    """Whether the teacher's head is these rows of the network's head."""
    kept = network.head.weight[list(rows)] if rows else network.head.weight
    return torch.allclose(teacher.network.head.weight, kept, atol=1e-5)


def test_a_head_of_other_classes_is_refused(hub, trained_digits):
    publish(hub, NAME, OLD)
    with pytest.raises(
        ModelError,
        match=rf"pretrain\.weights timm:{NAME}: of the data set's 10 classes 10 are not among its 1000 .*label_map",
    ):
        pretrain.start(section("pretrain.finetune.epochs=0"), open_dataset(trained_digits.dataset))


def test_a_label_map_makes_timms_weights_the_teacher(hub, trained_digits, tmp_path):
    network = publish(hub, NAME, OLD)
    teacher = taught(section("pretrain.finetune.epochs=0", MAPPED), trained_digits.dataset, tmp_path)
    assert teacher.card.labels == tuple(DIGITS)
    assert is_kept(network, teacher, *DIGITS.values())
    assert teacher.card.origin == networks.Origin(
        name=f"timm:{NAME}", repository=f"timm/{NAME}", revision=OLD, license="apache-2.0"
    )


def test_fine_tuning_begins_with_head_that_label_map_chooses(hub, trained_digits, tmp_path):
    network = publish(hub, NAME, OLD)
    assert is_kept(network, taught(section(MAPPED), trained_digits.dataset, tmp_path), *DIGITS.values())


def test_another_revision_is_another_parent(hub, trained_digits):
    publish(hub, NAME, OLD, seed=0)
    data, parents = open_dataset(trained_digits.dataset), []
    for weights in (f"timm:{NAME}", f"timm:{NAME}@{OLD}"):
        parents.append(pretrain.start(section(weights=weights), data)[1])
    assert parents[0] == parents[1]
    publish(hub, NAME, NEW, seed=0)
    assert pretrain.start(section(), data)[1] != parents[0]


def test_model_directory_may_know_more_classes_than_data_set(trained_digits):
    """Refused by their number before; which of them are meant is known by their names."""
    two = SimpleNamespace(classes=("4", "2"), fingerprint="of two classes", targets=None)
    settings = section("pretrain.finetune.epochs=0", weights=trained_digits.teacher)
    chosen, _ = pretrain.start(settings, two)
    images = trained_digits.images[:4]
    assert torch.allclose(chosen.eval()(images), networks.load(trained_digits.teacher)(images)[:, [4, 2]], atol=1e-5)


@pytest.mark.parametrize("method", ["head", "lora"])
def test_what_is_frozen_must_have_learned_something(method):
    frozen = [f"pretrain.finetune.method={method}", "pretrain.mae.epochs=0"]
    with pytest.raises(
        SettingsError, match=rf"finetune\.method is {method}, but weights is empty and mae\.epochs is 0"
    ):
        config.resolve("digits", frozen)
    assert config.resolve("digits", [*frozen, "pretrain.weights=/some"]).pretrain.finetune.method == method
    assert config.resolve("digits", frozen[:1]).pretrain.finetune.method == method
