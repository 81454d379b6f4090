"""`vit-distill predict`: where its model may lie, what it prints, and what it refuses."""

import importlib.util
import json
import shutil
from dataclasses import replace

import numpy as np
import pytest
import torch
from PIL import Image
from torch import nn

from tests.distillations import TINY
from tests.trained_digits import write_tagged_dataset
from trainer import cli, config, load_model
from trainer.data.dataset import open_dataset
from trainer.io import artifacts
from trainer.io.errors import EXIT_CODE, ArtifactError, ModelError, SettingsError
from trainer.models import networks
from trainer.models.served_student.class_tags import ClassTags
from trainer.predict import photo_classifier

LABELS = tuple("0123456789")
TAGS = ClassTags(
    labels=LABELS,
    attributes={"value": (*map(float, range(9)), None), "parity": ("even", "odd") * 5},
    parents={digit: "small" if digit < "5" else "large" for digit in LABELS},
)


@pytest.fixture(scope="module")
def run(digits, tmp_path_factory):
    """A run's directory, whose student has not learned anything but passed, and whose classes have tags."""
    folder = tmp_path_factory.mktemp("runs") / "run"
    torch.manual_seed(0)
    model = networks.create(config.ModelSettings(architecture="vit_tiny_patch16_224", args=TINY), LABELS)
    nn.init.normal_(model.network.head.weight)  # so that the classes differ
    model.card = replace(model.card, square=open_dataset(digits).square)
    with artifacts.create(folder / "student", "model", settings={}) as draft:
        networks.save(model, draft.path)
    write_tagged_dataset(digits, folder / "dataset", TAGS)
    write_evaluation(folder)
    return folder


def write_evaluation(folder, *reasons, parent=None):
    parent = parent or artifacts.manifest(folder / "student", "model").fingerprint
    artifacts.remove(folder / "evaluation")
    with artifacts.create(folder / "evaluation", "evaluation", settings={}, parents={"student": parent}) as draft:
        (draft.path / "metrics.json").write_text("{}")
        answers = {"risk": 0.1, "threshold": 0.0}
        verdict = {"passed": not reasons, "reasons": reasons}
        draft.figures.update({"student": {"test": {"answers": answers}}, "verdict": verdict})


@pytest.fixture
def photos(tmp_path):
    paths = [tmp_path / "a.jpg", tmp_path / "b.png"]
    for seed, path in enumerate(paths):
        Image.fromarray(np.random.default_rng(seed).integers(0, 256, (48, 64, 3), dtype=np.uint8)).save(path)
    return list(map(str, paths))


def test_each_photo_gets_its_labels_answer_and_its_attributes(run, photos, capsys):
    assert cli.main(["predict", *photos, "--model", str(run), "--json"]) == 0
    said = json.loads(capsys.readouterr().out)
    assert [one["photo"] for one in said] == photos
    expected = load_model(run).probabilities(photos)
    for one, (_, row) in zip(said, expected.iterrows(), strict=True):
        best = row.sort_values(ascending=False)[:5]
        assert one["labels"] == pytest.approx(best.to_dict())
        assert list(one["labels"]) == list(best.index)
        assert one["answer"] == best.index[0], "a threshold of 0 lets every class be the answer"
        assert one["confidence"] == pytest.approx(best.iloc[0])
        index = LABELS.index(one["answer"])
        assert one["attributes"] == {name: values[index] for name, values in TAGS.attributes.items()}

    assert cli.main(["predict", photos[0], "--model", str(run), "--top", "2"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == photos[0]
    (first, second) = list(said[0]["labels"].items())[:2]
    assert [line.split() for line in lines[1:3]] == [[f"{value:.1%}", label] for label, value in (first, second)]
    assert lines[3].split() == ["answer", first[0], f"({first[1]:.1%})"]
    assert any(line.split() == ["parity", said[0]["attributes"]["parity"]] for line in lines[4:])


def test_an_export_answers_with_its_runs_temperature(judged_run, exported, trained_digits, monkeypatch, tmp_path):
    model, images = load_model(exported, judged=True), list(trained_digits.images[:5].permute(0, 2, 3, 1).numpy())
    of_run, alone = (
        load_model(judged_run).probabilities(images),
        load_model(trained_digits.student).probabilities(images),
    )
    np.testing.assert_allclose(model.probabilities(images), of_run, atol=1e-5)
    temperature = artifacts.manifest(judged_run / "evaluation", "evaluation").figures["student"]["temperature"]
    calibrated = alone.to_numpy() ** (1 / temperature)
    np.testing.assert_allclose(of_run, calibrated / calibrated.sum(axis=1, keepdims=True), atol=1e-5)
    assert np.abs(of_run.to_numpy() - alone.to_numpy()).max() > 1e-3
    card = json.loads((exported / "card.json").read_text())
    del card["temperature"]  # as of a version that knew none
    with artifacts.create(tmp_path / "older", "export", settings={}) as draft:
        shutil.copytree(exported, draft.path, dirs_exist_ok=True, ignore=shutil.ignore_patterns("manifest.json"))
        (draft.path / "card.json").write_text(json.dumps(card))
    np.testing.assert_allclose(load_model(tmp_path / "older").probabilities(images), alone, atol=1e-5)
    assert model.predictions(images, top=1)[0].confidence is not None
    found = importlib.util.find_spec
    monkeypatch.setattr(photo_classifier, "find_spec", lambda name: None if name == "onnxruntime" else found(name))
    with pytest.raises(SettingsError, match="is an ONNX file, which needs the package onnxruntime"):
        load_model(exported)


@pytest.mark.parametrize("damage", ["no labels", "no graph"])
def test_export_that_cannot_be_loaded_is_one_message(exported, damage, tmp_path, capsys):
    card = json.loads((exported / "card.json").read_text())
    with artifacts.create(tmp_path / "export", "export", settings={}) as draft:
        shutil.copytree(exported, draft.path, dirs_exist_ok=True, ignore=shutil.ignore_patterns("manifest.json"))
        if damage == "no labels":
            del card["labels"]
            (draft.path / "card.json").write_text(json.dumps(card))
        else:
            (draft.path / card["file"]).write_bytes(b"no graph")
    assert cli.main(["predict", __file__, "--model", str(tmp_path / "export")]) == EXIT_CODE
    said = capsys.readouterr().err
    assert said.startswith(f"error: export {tmp_path / 'export'}: cannot be loaded (")
    assert said.endswith("); export the student again\n")


def test_run_whose_data_set_is_gone_still_has_its_labels(run, photos, tmp_path):
    gone, damaged = tmp_path / "gone", tmp_path / "damaged"
    shutil.copytree(run, gone, ignore=shutil.ignore_patterns("dataset"))
    (said,) = load_model(gone).predictions(photos[:1], top=1)
    assert list(said.labels) == list(load_model(run).predictions(photos[:1], top=1)[0].labels)
    assert said.answer is None
    shutil.copytree(run, damaged)
    (damaged / "dataset" / "tags.json").write_text('{"labels": []}')
    with pytest.raises(ArtifactError, match=r"tags\.json: does not describe classes"):
        load_model(damaged)


def test_student_that_failed_its_gate_is_asked_only_by_force(run, photos, tmp_path, capsys):
    failed = tmp_path / "failed"
    shutil.copytree(run, failed)
    write_evaluation(failed, "accuracy: too low", "latency: too long")
    assert cli.main(["predict", photos[0], "--model", str(failed)]) == EXIT_CODE
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err == (
        f"error: model {failed}: did not pass its gate (accuracy: too low; latency: too long); choose another one, or use it all the same "
        "(--force)\n"
    )
    assert cli.main(["predict", photos[0], "--model", str(failed), "--force"]) == 0
    assert load_model(failed).labels == LABELS, "the API judges only if asked"
    with pytest.raises(ModelError, match="did not pass its gate"):
        load_model(failed, judged=True)
    # The verdict on an earlier student says nothing of this one.
    write_evaluation(failed, "accuracy: too low", parent="of another student")
    assert load_model(failed, judged=True).labels == LABELS


def test_exports_of_a_run(judged_run, exported, tmp_path):
    failed = tmp_path / "failed"
    for name in ("student", "evaluation"):
        shutil.copytree(judged_run / name, failed / name)
    shutil.copytree(exported, failed / "exported")
    own = artifacts.manifest(exported, "export").fingerprint
    assert load_model(failed, judged=True, exported=True).fingerprint == own, "it passed"
    write_evaluation(failed, "accuracy: too low")
    with pytest.raises(ModelError, match=r"failed: did not pass its gate \(accuracy: too low\).*--force"):
        load_model(failed, judged=True, exported=True)
    assert load_model(failed, exported=True).fingerprint == own

    # As a second run in the same output leaves them, which makes no export.
    again = tmp_path / "again"
    shutil.copytree(judged_run / "student", again / "student")
    with artifacts.create(
        again / "exported", "export", settings={}, parents={"student": "of another student"}
    ) as draft:
        shutil.copytree(exported, draft.path, dirs_exist_ok=True, ignore=shutil.ignore_patterns("manifest.json"))
    with pytest.raises(
        ArtifactError, match=r"again: its student was not exported, and the export at .*exported is of another one"
    ):
        load_model(again, exported=True)


def test_what_cannot_be_asked_or_read_is_one_message(run, photos, tmp_path, capsys):
    broken = tmp_path / "broken.jpg"
    broken.write_bytes(b"no image")
    for arguments, message in (
        (
            [photos[0], str(broken), "--model", str(run)],
            f"image 1 ({broken}): no image that can be read: a text file; mend the photo",
        ),
        ([str(tmp_path / "none.jpg"), "--model", str(run)], "none.jpg: there is no such file; give paths of photos"),
        (["n" * 300, "--model", str(run)], "n: there is no such file; give paths of photos"),
        ([photos[0], "--model", str(tmp_path / "none")], "none: no student at "),
        (
            [photos[0], "--model", "models:/vit-student"],
            "models:/vit-student: names no version of a model; write models:/",
        ),
    ):
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{tmp_path}/mlflow.db")
            assert cli.main(["predict", *arguments]) == EXIT_CODE
        printed = capsys.readouterr()
        assert printed.out == ""
        assert message in printed.err
        assert printed.err.count("\n") == 1
