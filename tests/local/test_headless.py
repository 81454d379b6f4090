"""A teacher without a head, from a copy of the hub's file, teaches its embedding; the student's head is fitted afterward."""

import json
import re
import shutil
from pathlib import Path

import datasets
import numpy as np
import pytest
import safetensors.torch
import timm
import torch

import trainer
from tests.distillations import QUICK, TINY, Distillation
from trainer import config
from trainer.data.dataset import open_dataset
from trainer.data.dataset_schema import SPLITS, DatasetDescription, features
from trainer.io import artifacts
from trainer.io.errors import ModelError, SettingsError
from trainer.models import networks
from trainer.models.served_student.student import Predictor
from trainer.profiling.evidence_files import read_evidence
from trainer.stages import distill, evaluate, pretrain, reinforce

NAME = "vit_small_patch16_224.dino"
ARGS = TINY | {"embed_dim": 32}
VIEWS = QUICK["views"]
LEARNS = {
    "head": "probe",
    "logit_weight": 0,
    "label_weight": 0,
    "feature_weight": 1,
    "feature_loss": "cosine_smooth_l1",
}


@pytest.fixture(autouse=True)
def on_the_cpu(monkeypatch):
    monkeypatch.setenv("TRAINER_DEVICE", "cpu")
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)


@pytest.fixture(scope="module")
def weights_file(tmp_path_factory):
    """What the hub has of a backbone without a classifier, in little; it has learned nothing."""
    torch.manual_seed(0)
    network = timm.create_model(NAME, **ARGS)
    assert network.num_classes == 0
    file = tmp_path_factory.mktemp("hub") / "model.safetensors"
    safetensors.torch.save_file(network.state_dict(), file)
    return file


def overrides(file):
    args = ",".join(f"{name}={value}" for name, value in ARGS.items())
    return [
        *(f"pretrain.weights=timm:{NAME}", f"pretrain.weights_file={file}", f"pretrain.teacher.architecture={NAME}"),
        *(f"pretrain.teacher.args={{{args}}}", "pretrain.mae.epochs=0", "pretrain.finetune.epochs=0"),
        "pretrain.head=none",
    ]


@pytest.fixture(scope="module")
def headless(digits, weights_file, tmp_path_factory):
    """The teacher as the stage pretrain makes it of the file."""
    folder = tmp_path_factory.mktemp("headless")
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("TRAINER_DEVICE", "cpu")
        environment.delenv("MLFLOW_TRACKING_URI", raising=False)
        settings = config.resolve("digits", overrides(weights_file)).pretrain
        pretrain.run(settings, dataset=digits, teacher=folder / "teacher", evidence=folder / "evidence")
    return folder / "teacher"


def recorded(digits, teacher, folder, **settings):
    quick = {"views": 2, "seed": 3, "workers": 0, "batch_size": 250, "augmentation": VIEWS}
    section = config.validate(config.ReinforceSettings, quick | settings)
    reinforce.run(section, dataset=digits, teacher=teacher, teacher_outputs=folder)
    return folder


def distilled(digits, teaching, folder, teacher_outputs=None, **settings):
    section = config.validate(config.DistillSettings, QUICK | LEARNS | settings)
    distill.run(
        section,
        dataset=digits,
        teacher=teaching,
        student=folder / "student",
        evidence=folder / "evidence",
        teacher_outputs=teacher_outputs,
    )
    return folder / "student"


@pytest.fixture(scope="module")
def taught(digits, headless, tmp_path_factory):
    """The student of one process and the teacher in every step."""
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("TRAINER_DEVICE", "cpu")
        environment.delenv("MLFLOW_TRACKING_URI", raising=False)
        return distilled(digits, headless, tmp_path_factory.mktemp("taught"))


def losses(student):
    (training,) = read_evidence(student.parent / "evidence").trainings
    return torch.tensor(training.metrics["loss"].values)


def test_teacher_is_file_with_statistics_of_its_embedding(digits, headless, weights_file):
    model, given = networks.load(headless), safetensors.torch.load_file(weights_file)
    assert model.card.labels == ()
    assert model.card.origin.license == "apache-2.0"
    assert all(torch.equal(value, given[name]) for name, value in model.network.state_dict().items())
    split = open_dataset(digits).split("train")
    with torch.no_grad():
        embeddings = model(split.read(range(len(split)))).double().numpy()
    assert np.allclose(model.card.embedding.mean, embeddings.mean(0), atol=1e-5)
    assert np.allclose(model.card.embedding.std, embeddings.std(0), rtol=0.01)
    assert "val_top1" not in artifacts.manifest(headless, "model").figures
    with torch.no_grad():
        places = model.outputs(split.read(range(len(split))), tokens=True).tokens.double().flatten(0, 2).numpy()
    assert np.allclose(model.card.tokens.mean, places.mean(0), atol=1e-4)
    assert np.allclose(model.card.tokens.std, places.std(0), rtol=0.01)


def test_a_probe_can_be_a_teachers_head(digits, weights_file, tmp_path):
    settings = config.resolve("digits", [*overrides(weights_file), "pretrain.head=probe"]).pretrain
    assert settings.splits == ("train", "val"), "no image without a label is read"
    pretrain.run(settings, dataset=digits, teacher=tmp_path / "teacher", evidence=tmp_path / "evidence")
    model, given = networks.load(tmp_path / "teacher"), safetensors.torch.load_file(weights_file)
    weights = model.network.state_dict()
    assert all(torch.equal(weights[name], value) for name, value in given.items())
    assert model.card.labels == tuple("0123456789")
    val = artifacts.manifest(tmp_path / "teacher", "model").figures["val_top1"]
    assert val > 0.5, "what a network makes of pixels by chance already tells many digits apart"


def test_from_recorded_embeddings_to_student_that_serves_classes(digits, headless, taught, tmp_path):
    """Same seeds, same views: what differs is that the standardized embedding was rounded to half precision."""
    outputs = recorded(digits, headless, tmp_path / "outputs", features=True)
    figures = artifacts.manifest(outputs, "teacher_outputs").figures
    assert figures["bytes_per_view"] == 2 * ARGS["embed_dim"]
    page = (outputs / "report.html").read_text()
    assert "an embedding of 32 numbers each" in page
    assert re.search(r"bytes a view</td><td[^>]*>64<", page)
    online = losses(taught)
    student = distilled(digits, headless, tmp_path / "recorded", outputs, teacher="recorded")
    offline = losses(student)
    assert torch.allclose(online, offline, rtol=5e-4)
    assert not torch.equal(online, offline)
    assert offline[-1] < 0.8 * offline[0]
    small = recorded(digits, headless, tmp_path / "int8", features=True, feature_format="int8")
    assert artifacts.manifest(small, "teacher_outputs").figures["bytes_per_view"] == ARGS["embed_dim"] + 4
    coarse = losses(distilled(digits, headless, tmp_path / "coarse", small, teacher="recorded"))
    assert torch.allclose(online, coarse, rtol=5e-3)
    assert not torch.equal(offline, coarse)

    model = networks.load(student)
    assert model.card.labels == tuple(str(digit) for digit in range(10))
    assert set(model.network.state_dict()) == set(
        networks.create(config.ModelSettings(**QUICK["student"]), "ab").network.state_dict()
    )
    settings = config.EvaluateSettings(latency_runs=10, latency_batch_sizes=(1,), label_issues="all")
    measured = evaluate.run(
        settings, dataset=digits, teacher=headless, student=student, evaluation=tmp_path / "evaluation"
    )
    teacher, ours = measured.figures["teacher"], measured.figures["student"]
    assert teacher["head"] == "linear probe"
    assert min(teacher["test"]["top1"], teacher["test"]["knn_top1"], ours["test"]["knn_top1"]) > 0.4  # by chance 0.1
    assert ours["test"]["top1"] > 0.4
    page = (measured.path / "report.html").read_text()
    assert "k-NN top-1 of the embeddings" in page
    judged = json.loads((measured.path / "metrics.json").read_text())["label_issues"]
    data = open_dataset(digits)
    assert {name: count["judged"] for name, count in judged.items()} == {
        name: len(data.split(name)) for name in ("train", "val", "test")
    }
    assert "Labels that the teacher contradicts" in page
    assert "learned by heart" not in page, "it has learned no label"

    test = open_dataset(digits).split("test")
    photos = test.read(range(40)).permute(0, 2, 3, 1).numpy()
    with torch.no_grad():
        wanted = model(test.read(range(40))).softmax(1).numpy()
    assert np.allclose(Predictor(student).table(photos).to_numpy(), wanted, atol=1e-5)


def relabeled(dataset, directory):
    """Make a copy of a prepared data set there, of whose training images each has the label of the next class."""
    whole = open_dataset(dataset)
    train = datasets.load_from_disk(str(Path(dataset) / "train"))
    train = train.map(lambda row: row | {"label": (row["label"] + 1) % 10}, keep_in_memory=True)
    with artifacts.create(
        directory, "dataset", settings=dict(artifacts.manifest(dataset, "dataset").settings)
    ) as draft:
        for name in set(SPLITS) - {"train"}:
            shutil.copytree(Path(dataset) / name, draft.path / name)
        train.cast(features(), keep_in_memory=True).save_to_disk(str(draft.path / "train"))
        images = {name: len(whole.split(name)) for name in SPLITS}
        DatasetDescription(classes=whole.classes, image_size=whole.image_size, images=images).write(draft.path)
    return directory


def test_no_label_is_learned_from_before_head_is_fitted(digits, headless, taught, tmp_path):
    """With every label another one, the student's own weights are the same bits."""
    student = networks.load(taught).network.state_dict()
    others = relabeled(digits, tmp_path / "relabeled")
    other = networks.load(distilled(others, headless, tmp_path / "other")).network.state_dict()
    differing = {name for name in student if not torch.equal(student[name], other[name])}
    assert differing == {"head.weight", "head.bias"}


def test_two_processes_give_the_student_of_one(digits, headless, taught, tmp_path):
    """They share the images that the head is fitted to, and both take the same head."""
    two = Distillation(digits, str(headless), tmp_path, **LEARNS).train(processes=2)
    assert torch.allclose(losses(taught), two.losses(), rtol=2e-3)
    split = open_dataset(digits).split("val")
    with torch.no_grad():
        one, other = (
            networks.load(student)(split.read(range(len(split)))).argmax(1).numpy()
            for student in (taught, two.outputs["student"])
        )
    assert (one == other).mean() > 0.95
    assert (other == split.labels).mean() > 0.4


EVERYTHING = LEARNS | {
    "token_weight": 1,
    "similarity_weight": 1,
    "similarity_queue": 300,
    "blocks": {"0": 1},
    "block_weight": 1,
}


def test_several_processes_teach_tokens_blocks_and_similarities_alike(digits, headless, tmp_path):
    """Three do not divide the batch evenly. The queue holds the images of all of them, in their order."""
    one = Distillation(digits, str(headless), tmp_path / "one", **EVERYTHING).train()
    several = Distillation(digits, str(headless), tmp_path / "several", **EVERYTHING).train(processes=3)
    for name in ("token", "block", "similarity", "feature"):
        assert torch.allclose(one.losses(name), several.losses(name), rtol=2e-3), name
        assert one.losses(name)[-1] < one.losses(name)[0], name


def test_limits_of_a_teacher_without_a_head(digits, headless, tmp_path):
    with pytest.raises(
        SettingsError,
        match=r"has no head, .* but reinforce\.features and reinforce\.tokens are false.*reinforce\.features=true",
    ):
        recorded(digits, headless, tmp_path / "outputs")
    logits = {"head": "trained", "logit_weight": 0.9, "label_weight": 0.1}
    with pytest.raises(
        SettingsError, match=r"logit_weight is 0\.9, but teacher .* has no head, .* set distill\.logit_weight=0"
    ):
        distilled(digits, headless, tmp_path / "online", **logits)
    outputs = recorded(digits, headless, tmp_path / "features", features=True)
    with pytest.raises(SettingsError, match=r"logit_weight is 0\.9, but the teacher whose outputs .* has no head"):
        distilled(digits, headless, tmp_path / "recorded", outputs, teacher="recorded", **logits)
    assert not (tmp_path / "online").exists()
    with pytest.raises(ModelError, match=r"has no head, so it names no class"):
        trainer.load_model(headless)


def test_a_recording_without_the_embedding_is_refused(digits, teacher, tmp_path):
    """Of a teacher with a head, whose logits alone were recorded."""
    outputs = recorded(digits, teacher, tmp_path / "outputs", top_k=3)
    with pytest.raises(SettingsError, match=r"feature_weight is 1, but .* holds no features"):
        distilled(digits, teacher, tmp_path / "student", outputs, teacher="recorded")
