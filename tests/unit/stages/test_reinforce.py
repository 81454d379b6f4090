"""The stage: records that are what the teacher says of the views, found again after a failure, refused where they do not fit."""

from __future__ import annotations

import io
import json
import logging
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from tests.trained_digits import DATA, write_dataset
from trainer import stages
from trainer.config import DistillSettings, ReinforceSettings, ViewSettings
from trainer.data.dataset import open_dataset
from trainer.data.loader import Samples, Views
from trainer.data.sampler import SampleSlice, partners
from trainer.data.views.rendering import mix
from trainer.io import artifacts, storage
from trainer.io.errors import ArtifactError, SettingsError, StorageError, TrainingError
from trainer.models import networks
from trainer.objectives.distillation.recording import check_fits, open_recording
from trainer.stages import reinforce

VIEWS = ViewSettings(min_scale=0.5, mixup=0.8, cutmix=1.0)
SETTINGS = ReinforceSettings(views=3, top_k=4, augmentation=VIEWS, batch_size=150, seed=7, workers=0)


@pytest.fixture(autouse=True)
def untracked(monkeypatch):
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    monkeypatch.delenv("TRAINER_CHECKPOINTS", raising=False)


def record(trained_digits, output, settings=SETTINGS, **changes):
    section = settings.model_copy(update=changes)
    reinforce.run(section, dataset=trained_digits.dataset, teacher=trained_digits.teacher, teacher_outputs=output)
    return Path(output)


@pytest.fixture(scope="module")
def outputs(trained_digits, tmp_path_factory):
    """Recorded outputs of the trained teacher, with features."""
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("MLFLOW_TRACKING_URI", raising=False)
        patch.setenv("TRAINER_DEVICE", "cpu")  # also where there is a GPU, which would record in bf16
        return record(trained_digits, tmp_path_factory.mktemp("recorded") / "outputs", features=True)


def shards_of(path):
    return {file.name: file.read_bytes() for file in sorted((Path(path) / "records").iterdir())}


# ---------------------------------------------------------------------------------------------------------------------
# What is recorded


def test_records_hold_the_teachers_outputs(trained_digits, outputs):
    """Views, mixing and outputs computed once more, a few samples at a time, in the order of a training."""
    samples = Samples([open_dataset(trained_digits.dataset).split("train")])
    views = Views(samples, size=16, seed=7, settings=VIEWS)
    teacher, recording = networks.load(trained_digits.teacher), open_recording(outputs)
    indices, numbers = np.array([3, 999, 500, 42, 3]), np.array([0, 2, 1, 1, 2])
    others = np.array([partners(1000, 7, number)[index] for index, number in zip(indices, numbers, strict=True)])
    batch = views.batch(SampleSlice(indices, numbers, others))
    with torch.inference_mode():
        logits, _, features, *_ = teacher.outputs(mix(batch.images, batch.mixing), features=True)
    read = recording.read(indices, numbers)
    values, classes = logits.topk(4, dim=1)
    assert torch.equal(read.indices, classes)
    assert torch.allclose(read.logits, values, rtol=6e-4, atol=1e-4)
    assert torch.allclose(read.features, features, rtol=6e-4, atol=1e-4)
    rest = logits.scatter(1, classes, -torch.inf)
    assert torch.allclose(read.rest, torch.stack([rest.logsumexp(1), (rest / 2).logsumexp(1)], 1), atol=1e-4)


def test_view_is_same_where_images_are_not_kept_decoded(trained_digits, tmp_path, monkeypatch):
    """The student will see it decoded at full size; a training that draws views anew decodes large JPEG files at a half or less."""

    def jpeg(image):
        buffer = io.BytesIO()
        Image.fromarray(image.permute(1, 2, 0).numpy()).save(buffer, "JPEG")
        return buffer.getvalue()

    monkeypatch.setattr("tests.trained_digits.EDGE", 64)
    monkeypatch.setattr("tests.trained_digits.png", jpeg)
    write_dataset(tmp_path / "dataset")
    shards = []
    for limit in (10**9, 0):
        monkeypatch.setattr("trainer.data.dataset.IN_MEMORY_BYTES", limit)
        section, output = SETTINGS.model_copy(update={"views": 1}), tmp_path / f"outputs-{limit}"
        reinforce.run(section, dataset=tmp_path / "dataset", teacher=trained_digits.teacher, teacher_outputs=output)
        shards.append(shards_of(output))
    assert shards[0] == shards[1]


def test_artifact_says_what_it_is_and_leaves_nothing_beside_it(outputs):
    manifest = artifacts.read(outputs, "teacher_outputs")
    assert set(manifest.parents) == {"dataset", "teacher"}
    assert set(manifest.files) == {
        *(f"records/view-{view:05d}-block-00000.bin" for view in range(3)),
        *("recording.json", "keys.bin", "report.html"),
    }
    assert storage.children(outputs.parent / "checkpoints") == []
    figures = manifest.figures
    assert figures["bytes_per_view"] == 4 * 2 + 4 * 2 + 2 * 4 + 48 * 2
    assert figures["samples"] * figures["views"] == 3060
    assert figures["mib"] == pytest.approx(3060 * 120 / 2**20)
    assert 0.5 < figures["mass"]["t2"]["p1"] < figures["mass"]["t2"]["p5"] < figures["mass"]["t1"]["mean"] < 1
    assert 0.2 < figures["teacher_top1"] < figures["label_recorded"] < 1
    assert figures["views_per_second"] > 0


def test_loader_processes_and_a_second_run_change_nothing(trained_digits, outputs, tmp_path):
    again = record(trained_digits, tmp_path / "outputs", features=True, workers=2)
    assert shards_of(again) == shards_of(outputs)
    assert (again / "keys.bin").read_bytes() == (outputs / "keys.bin").read_bytes()


def test_patch_tokens_are_those_of_the_view(trained_digits, tmp_path):
    path = record(trained_digits, tmp_path / "outputs", views=1, tokens=True)
    teacher, data, outputs = (
        networks.load(trained_digits.teacher),
        open_dataset(trained_digits.dataset),
        open_recording(path),
    )
    height, width, numbers = networks.token_shape(teacher)
    size = height * width * (numbers + 4)
    assert artifacts.manifest(path, "teacher_outputs").figures["bytes_per_view"] == 4 * 4 + 2 * 4 + size
    page = (path / "report.html").read_text()
    assert f"{height} x {width} patch tokens of {numbers} numbers, int8 with a scale: each to within 1/254" in page
    assert f"{size:,} of the bytes of a view" in page
    indices = np.array([0, 511])
    views = Views(Samples([data.split("train")]), size=16, seed=7, settings=VIEWS)
    others = np.array([partners(1000, 7, 0)[index] for index in indices])
    batch = views.batch(SampleSlice(indices, np.zeros(2, dtype=np.int64), others))
    with torch.inference_mode():
        tokens = teacher.outputs(mix(batch.images, batch.mixing), tokens=True).tokens
    read = outputs.read(indices, np.zeros(2, dtype=np.int64)).restored().tokens
    assert ((read - tokens).abs() <= tokens.abs().amax(-1, keepdim=True) / 254 + 1e-4).all()


def test_records_that_take_too_much_are_refused_before_first_one(trained_digits, tmp_path, caplog):
    with pytest.raises(
        SettingsError,
        match=r"reinforce would take 0\.000\d+ GiB: 1 views of 1,020 images, \d+ bytes each, but reinforce\.largest_gib is 0\.0001"
        r".*allow reinforce\.largest_gib=1, or set distill\.teacher=online",
    ):
        record(trained_digits, tmp_path / "outputs", views=1, tokens=True, largest_gib=1e-4)
    assert not (tmp_path / "outputs").exists()


@pytest.mark.gpu
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_gpu_records_what_a_cpu_does(trained_digits, outputs, tmp_path, monkeypatch, precision):
    monkeypatch.setenv("TRAINER_DEVICE", "cuda")
    path = record(
        trained_digits, tmp_path / "outputs", features=True, workers="auto", precision=precision, compile="off"
    )
    indices, numbers = np.arange(1000), np.arange(1000) % 3
    on_gpu, on_cpu = (open_recording(place).read(indices, numbers) for place in (path, outputs))
    tolerance = 0.02 if precision == "fp32" else 0.2  # views made on a GPU differ by a level here and there
    assert torch.allclose(on_gpu.logits, on_cpu.logits, atol=tolerance, rtol=tolerance)
    assert (on_gpu.indices[:, 0] == on_cpu.indices[:, 0]).float().mean() > 0.97


# ---------------------------------------------------------------------------------------------------------------------
# Interruptions


def test_a_failing_teacher_names_the_samples(trained_digits, tmp_path):
    model = networks.load(trained_digits.teacher)
    with torch.no_grad():
        model.network.head.bias[3] = torch.nan
    with artifacts.create(tmp_path / "teacher", "model", settings={}) as draft:
        networks.save(model, draft.path)
    with pytest.raises(
        TrainingError, match=r"outputs on view 0 are not finite, .* for [0-9a-f]{16} digits/0, .* and 138 more"
    ):
        reinforce.run(
            SETTINGS, dataset=trained_digits.dataset, teacher=tmp_path / "teacher", teacher_outputs=tmp_path / "outputs"
        )
    assert not artifacts.exists(tmp_path / "outputs")


def test_a_failing_store_costs_no_finished_shard(trained_digits, outputs, object_store, caplog):
    places = {
        "dataset": str(trained_digits.dataset),
        "teacher": str(trained_digits.teacher),
        "teacher_outputs": object_store.uri("run", "outputs"),
    }
    section = SETTINGS.model_copy(update={"features": True}).model_dump_json()
    object_store.answer(403, method="PUT", path="view-00002")
    with pytest.raises(StorageError, match="view-00002"):
        stages.call("reinforce", section, places)
    object_store.clear()
    (kept,) = {key.rsplit("/records/")[0] for key in object_store.keys("run/checkpoints")}
    assert len(object_store.keys(kept)) == 2
    damaged = bytearray(object_store.get(f"{kept}/records/view-00001-block-00000.bin"))
    damaged[200] ^= 1
    object_store.put(f"{kept}/records/view-00001-block-00000.bin", bytes(damaged))

    with caplog.at_level(logging.INFO):
        stages.call("reinforce", section, places)
    assert "view-00001-block-00000.bin: is damaged (checksum)" in caplog.text
    assert "resuming: 1 of 3 shards are there" in caplog.text
    assert not object_store.keys("run/checkpoints")
    recording = artifacts.read(places["teacher_outputs"], "teacher_outputs")
    read = open_recording(places["teacher_outputs"]).read(np.arange(9), np.full(9, 2))
    assert torch.equal(read.logits, open_recording(outputs).read(np.arange(9), np.full(9, 2)).logits)
    assert check(places["teacher_outputs"], trained_digits).views == 3
    assert shards_of(recording.path) == shards_of(outputs)
    assert recording.figures["mass"] == artifacts.manifest(outputs, "teacher_outputs").figures["mass"]


# ---------------------------------------------------------------------------------------------------------------------
# Whether it fits


def check(outputs, trained_digits, *, dataset=None, teacher=None, **settings):
    dataset = dataset or trained_digits.dataset
    return check_fits(
        outputs,
        DistillSettings(teacher="recorded", **({"views": VIEWS} | settings)),
        data=open_dataset(dataset),
        dataset=dataset,
        teacher=teacher or trained_digits.teacher,
    )


def test_other_recordings_are_refused(outputs, trained_digits, monkeypatch):
    then = artifacts.manifest(trained_digits.teacher, "model").fingerprint[:12]
    now = artifacts.manifest(trained_digits.student, "model").fingerprint[:12]
    with pytest.raises(
        ArtifactError,
        match=rf"outputs: do not fit this distillation: they were recorded from another teacher \(vit_tiny_patch16_224 {then}\), but "
        rf".*student is model {now}; record again with the stage reinforce, or give the teacher that they are from",
    ):
        check(outputs, trained_digits, teacher=trained_digits.student)
    # Other views are refused with every difference.
    views = VIEWS.model_copy(update={"flip": False, "mixup": 0.2})
    with pytest.raises(
        ArtifactError,
        match=r"the views are others: distill.views.flip was True and is False, distill.views.mixup was 0.8 and is 0.2",
    ):
        check(outputs, trained_digits, views=views)
    # Another decoder is refused.
    check(outputs, trained_digits, decode_on="cuda")  # images that are kept decoded are not left to the GPU
    monkeypatch.setattr("trainer.data.dataset.IN_MEMORY_BYTES", 0)
    with pytest.raises(
        ArtifactError,
        match=r"decoded by pillow [\d.]+, but here by nvJPEG of torchcodec [\d.]+, which may give other pixels",
    ):
        check(outputs, trained_digits, decode_on="cuda")
    # So is one whose views were mixed in another window, which only a large recording can be.
    monkeypatch.setattr("trainer.objectives.distillation.recording.SHARD", 15)
    with pytest.raises(ArtifactError, match=r"mixed within windows of 1,020 of 1,020 images, and here of 960 of 1,020"):
        check(outputs, trained_digits)


def test_changed_data_set_is_refused_with_its_settings_and_images(outputs, trained_digits, tmp_path, monkeypatch):
    monkeypatch.setattr(
        "tests.trained_digits.IMAGES",
        {"train": range(10, 1003), "val": range(1200, 1300), "test": range(1300, 1500), "unlabeled": range(1500, 1501)},
    )
    write_dataset(tmp_path / "dataset")
    manifest = json.loads((tmp_path / "dataset" / "manifest.json").read_text())
    manifest["settings"] = DATA | {"image_size": 16}
    covered = ("kind", "schema_version", "settings", "parents", "files")
    manifest["fingerprint"] = artifacts.digest({key: manifest[key] for key in covered})
    (tmp_path / "dataset" / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(
        ArtifactError,
        match=r"the data set has changed \([0-9a-f]{12}, now [0-9a-f]{12}\): data.image_size was None and is 16, of 1,020 training images "
        r"29 are gone and 3 are new; record again",
    ):
        check(outputs, trained_digits, dataset=tmp_path / "dataset")


def test_the_same_images_stored_differently_are_refused(outputs, trained_digits, tmp_path):
    shutil.copytree(trained_digits.dataset, tmp_path / "dataset")
    with artifacts.create(tmp_path / "dataset", "dataset", settings=DATA) as draft:
        (draft.path / "card.html").write_text("<p>another card</p>")
    with pytest.raises(ArtifactError, match="its settings and images are the same, but stored differently"):
        check(outputs, trained_digits, dataset=tmp_path / "dataset")


def test_all_that_differs_is_said_at_once_without_reading_record(outputs, trained_digits, tmp_path):
    shutil.copytree(outputs, tmp_path / "outputs", ignore=shutil.ignore_patterns("records"))
    with pytest.raises(ArtifactError, match=r"(?s)another teacher.*; and the views are others"):
        check(
            tmp_path / "outputs",
            trained_digits,
            teacher=trained_digits.student,
            views=ViewSettings(),
            student={"architecture": "x"},
        )
