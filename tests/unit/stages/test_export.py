"""The stage export: what it leaves for register and the run's page, also of a student that has no ONNX file."""

from __future__ import annotations

import json
import logging
import shutil
import sys
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from trainer import load_model
from trainer.config import ExportSettings
from trainer.io import artifacts
from trainer.io.errors import ArtifactError, ModelError
from trainer.models.onnx_student import OnnxStudent
from trainer.stages import export
from trainer.stages.onnx_export import exporting, onnx_graph, variants

pytest.importorskip("onnxruntime", reason="needs the extra `export`")


def exported(run, place, **changed):
    given = {name: run / name for name in ("dataset", "student", "evaluation")}
    return export.run(ExportSettings(**changed), **given, exported=place)


@pytest.fixture(scope="module")
def made(judged_run, tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("MLFLOW_TRACKING_URI", raising=False)
        return exported(judged_run, tmp_path_factory.mktemp("stage") / "exported", calibration_images=16)


@pytest.fixture(autouse=True)
def _untracked(monkeypatch):
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)


def test_it_makes_what_the_command_makes(made, judged_run, tmp_path):
    command = exporting.export(str(judged_run), tmp_path / "served", quantized=False)
    assert {file.name for file in made.path.iterdir()} == {file.name for file in command.directory.iterdir()}
    assert made.parents == artifacts.read(command.directory, "export").parents
    assert made.settings["calibration_images"] == 16
    assert set(made.figures["candidates"]) == {"torch", "fp32", "int8", "int8-mixed"}
    assert made.figures["reasons"] == []
    page = (made.path / "export.html").read_text()
    assert (
        f"{made.figures['chosen']} is served: the fastest that passes (of those within 5% of its time the one " in page
    )
    for name, figures in made.figures["candidates"].items():
        assert f"{figures['top1']:.2%}" in page, name
    tested = {name: figures["test"] for name, figures in made.figures["candidates"].items() if "test" in figures}
    assert tested.keys() == {"torch", made.figures["chosen"]}
    assert all(f"{figures['top1']:.2%}" in page for figures in tested.values())


def refused(run, place, caplog, **changed):
    """What is left where there is no file."""
    with caplog.at_level(logging.WARNING, logger="trainer"):
        made = exported(run, place, **changed)
    assert made.figures["chosen"] is None
    assert {file.name for file in made.path.iterdir()} == {"candidates.json", "export.html", "manifest.json"}
    table = json.loads((made.path / "candidates.json").read_text())
    (note,) = table["notes"]
    assert made.figures["reasons"] == [note]
    assert [record.getMessage() for record in caplog.records] == [f"export  {note}"]
    assert "No ONNX file is served." in (made.path / "export.html").read_text()
    return note, table


def test_inexpressible_operators_are_noted(judged_run, monkeypatch, caplog, tmp_path):
    def fail(model, size, file):
        raise ModelError("architecture 'x': its operator aten.special_bessel_j0 cannot be expressed in ONNX (opset 20)")

    (tmp_path / "exported").mkdir()
    (tmp_path / "exported" / "model.onnx").write_text("of an earlier try")
    monkeypatch.setattr(onnx_graph, "write", fail)
    note, table = refused(judged_run, tmp_path / "exported", caplog)
    assert "aten.special_bessel_j0" in note
    assert table["candidates"] == []


def test_where_no_variant_passes_none_is_chosen_and_all_are_shown(finished, caplog, tmp_path):
    run = finished(min_accuracy=1.0, max_accuracy_drop=1)
    note, table = refused(run, tmp_path / "exported", caplog, int8=False)
    assert "no variant of it passes the gate (fp32: accuracy: the student's test top-1" in note
    assert [one["name"] for one in table["candidates"]] == ["torch", "fp32"]


def test_answers_are_compared_on_some_of_many_images(judged_run, tmp_path):
    made = exported(judged_run, tmp_path / "exported", test_images=7, int8=False)
    table = json.loads((made.path / "candidates.json").read_text())
    assert table["images"] == {"val": 7, "test": 7}
    assert all(one["val_top1"] * 7 == pytest.approx(round(one["val_top1"] * 7)) for one in table["candidates"])
    page = (made.path / "export.html").read_text()
    assert "Compared and chosen on 7 validation images" in page
    assert "After the choice, 7 test images show" in page


@pytest.mark.parametrize("steps", [0, 2])
def test_an_int8_student_is_fine_tuned(judged_run, steps, tmp_path):
    made = exported(judged_run, tmp_path / "exported", max_shift=1e-4, finetune_steps=steps, calibration_images=16)
    table = json.loads((made.path / "candidates.json").read_text())
    names = [one["name"] for one in table["candidates"]]
    assert names == ["torch", "fp32", "int8", "int8-mixed"] + ["int8-tuned"] * bool(steps)
    assert table["chosen"] == "fp32"
    assert all("probabilities: gives" in " ".join(one["reasons"]) for one in table["candidates"][2:])


class Answering:
    """What a variant named so answers in place of its own, a split at a time."""

    def __init__(self, monkeypatch, **changed):
        self.answered, self._changed, self._predict = [], changed, variants.predict
        monkeypatch.setattr(variants, "predict", self)

    def __call__(self, answer, split, indices):
        name = getattr(getattr(answer, "__self__", None), "file", None)
        name = name.stem if name else "torch"
        self.answered.append((split.name, name))
        logits = self._predict(answer, split, indices)
        return self._changed.get(f"{name.replace('-', '_')}_{split.name}", lambda logits: logits)(logits)


def test_nothing_is_chosen_by_the_test_images(judged_run, monkeypatch, tmp_path):
    """By answers that are wrong on one of the two splits."""
    ways = Answering(monkeypatch, fp32_test=np.fliplr, int8_test=np.fliplr, int8_mixed_test=np.fliplr)
    chosen = exported(judged_run, tmp_path / "same", calibration_images=16, max_shift=1, finetune_steps=2)
    assert chosen.figures["candidates"]["int8"]["shift"] < 0.5
    assert [name for split, name in ways.answered if split == "test"] == ["torch", chosen.figures["chosen"]]
    assert all(split == "val" for split, _ in ways.answered[:-2])


def test_int8_failing_on_test_images_gives_way(finished, monkeypatch, tmp_path):
    run = finished(min_accuracy=0.6, max_accuracy_drop=1)
    monkeypatch.setattr(variants, "fastest", lambda some: next(one for one in some if one.name == "int8"))
    Answering(monkeypatch, int8_test=np.fliplr)
    made = exported(run, tmp_path / "exported", calibration_images=16, max_shift=1)
    table = {one["name"]: one for one in json.loads((made.path / "candidates.json").read_text())["candidates"]}
    assert made.figures["chosen"] == "fp32"
    assert table["int8"]["test"]["top1"] < 0.6 < table["fp32"]["test"]["top1"]
    assert "evaluate.gate.min_accuracy = 60.00%" in " ".join(table["int8"]["reasons"])
    assert table["fp32"]["reasons"] == []


@pytest.fixture(scope="module")
def in_openvino(judged_run, tmp_path_factory):
    """An export of which the variant in OpenVINO was chosen."""

    def choose(candidates):
        return next(one for one in candidates if one.name == "fp32-openvino")

    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("MLFLOW_TRACKING_URI", raising=False)
        patch.setattr(exporting.variants, "fastest", choose)
        return exported(judged_run, tmp_path_factory.mktemp("openvino") / "exported", openvino=True, int8=False)


def test_openvino_is_tried_beside_onnx_runtime(in_openvino, judged_run, trained_digits, monkeypatch):
    table = json.loads((in_openvino.path / "candidates.json").read_text())
    assert {one["name"]: one["runtime"] for one in table["candidates"]} == {
        "torch": "torch",
        "fp32": "onnxruntime",
        "fp32-openvino": "openvino",
    }
    assert table["candidates"][2]["difference"] < 1e-3
    served = load_model(in_openvino.path)
    assert served.runtime == "openvino"
    assert "openvino" in sys.modules
    squares = trained_digits.images[:5].permute(0, 2, 3, 1).numpy()
    expected = load_model(judged_run).probabilities(list(squares)).to_numpy()
    np.testing.assert_allclose(served.of_squares(squares), expected, atol=1e-4)
    with ThreadPoolExecutor(4) as pool:  # each thread its own answer
        answers = [*pool.map(served.of_squares, np.repeat(squares, 4, axis=0)[:, None])]
    np.testing.assert_allclose(np.concatenate(answers), np.repeat(expected, 4, axis=0), atol=1e-4)
    np.testing.assert_allclose(served.probabilities(list(squares)), expected, atol=1e-4)


def test_an_unknown_runtime_is_an_error(in_openvino, tmp_path):
    card = json.loads((in_openvino.path / "card.json").read_text()) | {"runtime": "os.path"}
    with artifacts.create(tmp_path / "other", "export", settings={}) as draft:
        shutil.copytree(
            in_openvino.path, draft.path, dirs_exist_ok=True, ignore=shutil.ignore_patterns("manifest.json")
        )
        (draft.path / "card.json").write_text(json.dumps(card))
    with pytest.raises(ArtifactError, match=r"its card is not readable \(no runtime 'os\.path'\)"):
        load_model(tmp_path / "other")


def test_an_uncomputable_variant_is_noted(judged_run, monkeypatch, tmp_path):
    compute = OnnxStudent.logits

    def logits(self, images):
        if self.file.stem == "int8":
            raise ModelError("int8.onnx: gives logits that are not finite")
        return compute(self, images)

    monkeypatch.setattr(OnnxStudent, "logits", logits)
    made = exported(judged_run, tmp_path / "exported")
    table = json.loads((made.path / "candidates.json").read_text())
    names = [one["name"] for one in table["candidates"]]
    assert names[:2] == ["torch", "fp32"]
    assert "int8" not in names
    assert "int8.onnx: gives logits that are not finite" in table["notes"]
    assert table["chosen"] in names[1:]


@pytest.mark.parametrize(("setting", "reason"), [("max_shift", "probabilities: gives"), ("max_accuracy_loss", "loses")])
def test_loss_against_student_itself_is_reason(judged_run, made, setting, reason, tmp_path):
    """By a limit below what int8 was measured to lose."""
    table = json.loads((made.path / "candidates.json").read_text())["candidates"]
    lost = {
        one["name"]: one["shift"] if setting == "max_shift" else table[0]["val_top1"] - one["val_top1"] for one in table
    }
    if lost["int8"] <= 0:
        pytest.skip("int8 answers these photos as well as the student")
    limit = {setting: lost["int8"] / 2, "finetune_steps": 0}
    made = exported(judged_run, tmp_path / "exported", calibration_images=16, **limit)
    reasons = json.loads((made.path / "candidates.json").read_text())["candidates"]
    assert any(reason in text for one in reasons if one["name"] == "int8" for text in one["reasons"])
