"""A run's student as an ONNX file: what is written, that it serves photos without torch, and what is refused."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import textwrap
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from tests.unit.stages.photos import KINDS, measure, write_photos
from trainer import cli
from trainer.config import EvaluateSettings, GateSettings
from trainer.data.dataset import open_dataset
from trainer.evaluation import metrics
from trainer.io import artifacts
from trainer.io.errors import EXIT_CODE, ArtifactError, ModelError, SettingsError
from trainer.models import networks
from trainer.models.onnx_student import OnnxStudent
from trainer.models.served_student import preprocessing
from trainer.models.served_student.class_tags import ClassTags
from trainer.stages import evaluate
from trainer.stages.onnx_export import exporting, variants
from trainer.stages.onnx_export.variants import fastest

pytest.importorskip("onnxruntime", reason="needs the extra `export`")

ROOT = Path(__file__).parents[4]


@pytest.fixture(scope="module")
def made(judged_run, tmp_path_factory):
    return exporting.export(str(judged_run), tmp_path_factory.mktemp("exported") / "served")


def test_every_variant_is_measured_and_fastest_that_passes_is_kept(made, judged_run):
    itself, *others = made.candidates
    assert itself.name == "torch"
    assert {one.name for one in others} == {"fp32", "int8", "int8-mixed"}
    evaluated = artifacts.manifest(judged_run / "evaluation", "evaluation").figures["student"]
    assert itself.test.score == evaluated["test"]["top1"] > 0.6
    assert {one.name for one in others if one.test} == {made.chosen}, "only what was chosen is tested"
    for one in others:
        assert [timed.batch_size for timed in one.latencies] == [1, 4]
        assert all(0 < timed.p50_ms <= timed.p95_ms for timed in one.latencies)
    by_name = {one.name: one for one in others}
    assert by_name["fp32"].same == 1
    assert by_name["fp32"].difference < 1e-4
    assert by_name["fp32"].shift < 1e-5
    assert by_name["int8-mixed"].difference > 1e-3
    chosen = fastest(made.candidates)
    assert (made.chosen, chosen.runtime) == (chosen.name, "onnxruntime")
    kept = json.loads((made.directory / "candidates.json").read_text())
    assert kept["chosen"] == made.chosen
    assert [one["name"] for one in kept["candidates"]] == [one.name for one in made.candidates]
    assert kept["candidates"][1]["latencies"][0]["p50_ms"] == others[0].latencies[0].p50_ms
    assert kept["machine"]["threads"] == torch.get_num_threads()
    size = next(one.size_bytes for one in others if one.name == made.chosen)
    assert (made.directory / "model.onnx").stat().st_size == size


def test_the_card_is_the_contract(made, judged_run):
    card = json.loads((made.directory / "card.json").read_text())
    student = networks.load(judged_run / "student").card
    assert card["labels"] == list(student.labels)
    assert card["square"] == {
        "fit": "crop",
        "size": 16,
        "interpolation": "bicubic",
        "max_pixels": 100_000,
        "gray_bits": 16,
    }
    assert card["input"]["shape"] == ["batch", 16, 16, 3]
    assert card["output"]["shape"] == ["batch", 10]
    assert card["inside"]["mean"] == list(student.mean)
    assert card["fingerprints"] == {
        name: artifacts.manifest(judged_run / name, kind).fingerprint
        for name, kind in (("dataset", "dataset"), ("student", "model"), ("evaluation", "evaluation"))
    }
    assert artifacts.read(made.directory, "export").parents == card["fingerprints"]
    measured = card["measured"]
    assert measured["name"] == card["variant"] == made.chosen
    data = open_dataset(judged_run / "dataset")
    network = OnnxStudent(made.directory / card["file"])
    for split, score in (("val", measured["val_top1"]), ("test", measured["test"]["top1"])):
        images = data.split(split)
        answers = variants.predict(network.logits, images, range(len(images)))
        assert score == metrics.top_k(answers, images.labels, 1), split
    tags = ClassTags.of(json.loads((made.directory / card["tags"]).read_text()))
    judged = artifacts.manifest(judged_run / "evaluation", "evaluation").figures["student"]
    assert card["temperature"] == judged["temperature"] != 1
    answers = judged["test"]["answers"]
    assert (tags.risk, tags.threshold) == (answers["risk"], answers["threshold"])


def test_the_files_name_nothing_of_this_machine(made):
    for file in made.directory.iterdir():
        content = file.read_bytes()
        assert str(ROOT).encode() not in content, file
        assert b"site-packages" not in content, file


SERVE = """
    import json, pathlib, sys
    import numpy, onnxruntime
    folder, listed = map(pathlib.Path, sys.argv[1:])
    sys.path.insert(0, str(folder))
    from preprocessing import Square, to_pixels
    card = json.loads((folder / "card.json").read_text())
    square = Square(**card["square"])
    squares = [to_pixels(pathlib.Path(file).read_bytes(), square) for file in json.loads(listed.read_text())]
    session = onnxruntime.InferenceSession(folder / card["file"])
    batches = [squares[:1], squares[1:]]
    logits = [session.run(None, {card["input"]["name"]: numpy.stack(batch)})[0] for batch in batches]
    loaded = {name.split(".")[0] for name in sys.modules}
    assert not loaded & {"torch", "timm", "trainer", "mlflow"}, loaded
    print(json.dumps(numpy.concatenate(logits).tolist()))
"""


@pytest.mark.slow
def test_photos_of_every_kind_get_measured_logits_without_torch(judged_run, trained_digits, tmp_path):
    write_photos(tmp_path / "photos")
    known = measure(trained_digits.student, tmp_path / "photos", tmp_path, image_size=64)
    assert {file.name.partition("-")[0] for file in known.files} == {kind.__name__.strip("_") for kind in KINDS}
    (tmp_path / "teacher").symlink_to(trained_digits.teacher)
    given = {name: tmp_path / name for name in ("dataset", "teacher", "student", "evaluation")}
    evaluate.run(EvaluateSettings(latency_runs=10, gate=GateSettings(max_accuracy_drop=1)), **given)
    made = exporting.export(str(tmp_path), tmp_path / "served", quantized=False)
    assert [one.name for one in made.candidates] == ["torch", "fp32"]
    copied = (made.directory / "preprocessing.py").read_bytes()
    assert copied == Path(preprocessing.__file__).read_bytes(), "one implementation"
    (tmp_path / "files.json").write_text(json.dumps([str(file) for file in known.files]))
    process = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(SERVE), str(made.directory), str(tmp_path / "files.json")],
        cwd=tmp_path / "photos",
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert process.returncode == 0, process.stderr
    logits = np.array(json.loads(process.stdout))
    np.testing.assert_allclose(logits, known.logits, atol=1e-3)
    assert metrics.top_k(logits, known.labels, 1) == metrics.top_k(known.logits, known.labels, 1) > 0.6


def test_the_lines_of_the_page_serve_a_photo(made, trained_digits, tmp_path):
    page = (ROOT / "docs" / "serving.md").read_text().partition("\n### Without this package\n")[2].partition("\n##")[0]
    lines = [line.removeprefix("    ") for line in page.splitlines() if line.startswith("    ")]
    served = tmp_path / "served"
    shutil.copytree(made.directory, served)
    Image.fromarray(trained_digits.images[0].permute(1, 2, 0).numpy()).save(served / "photo.jpg", "PNG")
    expected = OnnxStudent(served / "model.onnx").logits(trained_digits.images[:1].permute(0, 2, 3, 1).numpy())
    process = subprocess.run(
        [sys.executable, "-c", "\n".join(lines)], cwd=served, capture_output=True, text=True, timeout=300, check=True
    )
    assert process.stdout == f"{expected.argmax()}\n"


def test_the_command_prints_the_table(judged_run, tmp_path, capsys):
    given = [str(judged_run), "--output", str(tmp_path / "served"), "--no-int8", "--openvino"]
    assert cli.main(["export", *given]) == 0
    heading, itself, *tried, last = capsys.readouterr().out.splitlines()
    assert "p50, p95 ms at 1" in heading
    assert itself.startswith("torch")
    assert [line.split()[0] for line in tried[:2]] == ["fp32", "fp32-openvino"]
    assert sum(line.endswith("chosen") for line in tried[:2]) == 1
    assert last == f"written to {tmp_path / 'served'}"


@pytest.mark.slow
def test_what_passes_no_gate_is_exported_only_by_force(finished, tmp_path, capsys):
    run, place = finished(min_accuracy=1.0, max_accuracy_drop=1), tmp_path / "served"
    command = ["export", str(run), "--output", str(place), "--no-int8"]
    assert cli.main(command) == EXIT_CODE
    said = capsys.readouterr().err
    assert "no variant of it passes the gate (fp32: accuracy: the student's test top-1" in said
    assert (
        "evaluate.gate.min_accuracy = 100.00%); `python -m trainer export RUN --force` takes fp32 all the same" in said
    )
    assert not artifacts.exists(place)
    assert cli.main([*command, "--force"]) == 0
    assert OnnxStudent(place / "model.onnx").logits(np.zeros((3, 16, 16, 3), np.uint8)).shape == (3, 10)


@pytest.mark.parametrize("teacher", [{}, {"test": {"top5": 0.9}}, []])
def test_an_evaluation_without_a_score_is_one_message(judged_run, teacher, tmp_path):
    run, before = tmp_path / "run", artifacts.read(judged_run / "evaluation", "evaluation")
    run.mkdir()
    for name in ("dataset", "teacher", "student"):
        (run / name).symlink_to(judged_run / name)
    with artifacts.create(run / "evaluation", "evaluation", settings=before.settings, parents=before.parents) as draft:
        draft.figures = {**before.figures, "teacher": teacher}
    with pytest.raises(ArtifactError, match=r"run/evaluation: manifest\.json has no score of the teacher \("):
        exporting.export(str(run), tmp_path / "served")


def test_what_cannot_be_exported_is_refused_before_anything_is_loaded(judged_run, tmp_path, monkeypatch):
    with pytest.raises(ArtifactError, match="none: no student at"):
        exporting.export(str(tmp_path / "none"), tmp_path / "served")
    unjudged = tmp_path / "unjudged"
    unjudged.mkdir()
    (unjudged / "student").symlink_to(judged_run / "student")
    with pytest.raises(ModelError, match="unjudged: its student was not evaluated"):
        exporting.export(str(unjudged), tmp_path / "served")
    for place in (judged_run / "student", judged_run):
        before = sorted(place.rglob("*"))
        with pytest.raises(SettingsError, match=f"output {place}: holds something already"):
            exporting.export(str(judged_run), place)
        assert sorted(place.rglob("*")) == before
    monkeypatch.setattr("trainer.stages.onnx_export.PACKAGES", ("onnx", "no_such_package"))
    with pytest.raises(SettingsError, match=r"needs the package no_such_package"):
        exporting.export(str(judged_run), tmp_path / "served")
    assert not (tmp_path / "served").exists()
