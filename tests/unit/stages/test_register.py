from __future__ import annotations

import base64
import importlib.metadata
import io
import json
import os
import re
import shutil
import subprocess
import sys
import textwrap
import tomllib
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import yaml
from fastapi.testclient import TestClient

from tests.trained_digits import TAGS, png
from tests.unit.stages.photos import measure, write_photos
from trainer import cli, load_model
from trainer.config import EvaluateSettings, ExportSettings, GateSettings, RegisterSettings, TrackingSettings, resolve
from trainer.evaluation import metrics
from trainer.io import artifacts
from trainer.io.costs import PLACE_VARIABLE, Machines, Price
from trainer.io.errors import EXIT_CODE, ModelError, TrackingAwayError, TrackingError
from trainer.models import networks
from trainer.models.served_student.student import to_probabilities
from trainer.objectives.distillation import recording
from trainer.report import finished_run, tracking
from trainer.report.billing import Bill
from trainer.report.forecast import Measurement, WorkCount, forecast
from trainer.runner import preflight
from trainer.stages import STAGES, evaluate, export, register
from trainer.stages.onnx_export import variants
from trainer.stages.tuning.tuning_schema import FILE, Tuning

# MLflow on SQLAlchemy 2.1
pytestmark = pytest.mark.filterwarnings("ignore:The ``noload`` loader strategy is deprecated")

RESOLVED = resolve("digits").model_dump(mode="json")
PASSING = GateSettings(max_accuracy_drop=1)
FAILING = GateSettings(max_accuracy_drop=0, min_compression=1000)


@pytest.fixture(scope="module")
def inputs(trained_digits, tmp_path_factory):
    """What register reads, apart from the evaluation."""
    directory = tmp_path_factory.mktemp("inputs")
    for name, kind in (("pretrain_evidence", "evidence"), ("distill_evidence", "evidence"), ("report", "report")):
        with artifacts.create(directory / name, kind, settings={}) as draft:
            (draft.path / "report.html").write_text("<p>where the time went</p>")
    made = {name: directory / name for name in ("pretrain_evidence", "distill_evidence", "report")}
    return {
        "dataset": trained_digits.dataset,
        "teacher": trained_digits.teacher,
        "student": trained_digits.student,
        **made,
    }


@pytest.fixture(scope="module")
def evaluations(trained_digits, tmp_path_factory):
    directory = tmp_path_factory.mktemp("evaluations")
    models_and_data = {
        "dataset": trained_digits.dataset,
        "teacher": trained_digits.teacher,
        "student": trained_digits.student,
    }
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("MLFLOW_TRACKING_URI", raising=False)
        return {
            gate: evaluate.run(
                EvaluateSettings(latency_runs=10, gate=gate), **models_and_data, evaluation=directory / name
            ).path
            for gate, name in ((PASSING, "passing"), (FAILING, "failing"))
        }


@pytest.fixture(scope="module")
def store(empty_mlflow_store, tmp_path_factory):
    return Path(shutil.copy(empty_mlflow_store, tmp_path_factory.mktemp("store") / "mlflow.db")).parent


@pytest.fixture
def tracked(store, monkeypatch):
    """A SQLite store that the tests of this module share."""
    for name in (tracking.RUN_ID, tracking.EXPERIMENT_ID, tracking.EXPERIMENT_NAME, tracking.URI):
        monkeypatch.delenv(name, raising=False)
    for name, value in tracking.environment(TrackingSettings(), directory=store, run="the run").items():
        monkeypatch.setenv(name, value)
    return tracking.client()


def run(inputs, evaluation, path, **changed):
    settings = RegisterSettings(**changed)
    return register.run(
        settings, **inputs, evaluation=evaluation, registration=path, recipe="digits", resolved=RESOLVED
    )


def exported(inputs, evaluation, place, **changed):
    """The student as an ONNX file in fp32, or another one that `changed` asks for."""
    given = {name: inputs[name] for name in ("dataset", "student")}
    return export.run(ExportSettings(int8=False, **changed), **given, evaluation=evaluation, exported=place).path


def read_summary(artifact):
    return json.loads((artifact.path / "summary.json").read_text())


PREDICT = """
    import base64, json, pathlib, sys
    import mlflow.models, mlflow.pyfunc, numpy, pandas
    from PIL import Image
    uri, listed = sys.argv[1:]
    model = mlflow.pyfunc.load_model(uri)
    files = [pathlib.Path(name) for name in json.loads(pathlib.Path(listed).read_text())]
    probabilities = model.predict(numpy.array(files, dtype=object))
    assert not any(name.split(".")[0] == "trainer" for name in sys.modules), "needs this package"

    def kind(name):
        path = next(path for path in files if path.name.startswith(name))
        return path, probabilities.values[files.index(path)]

    asked, answers, expected = [], [], []
    for name in ("wide", "gray", "transparent", "deep"):
        path, right = kind(name)
        array = numpy.asarray(Image.open(path))
        for given in (array, (array if array.ndim == 3 else array[..., None])[None]):
            asked.append(f"{name} {given.shape} {given.dtype}")
            answers.append(model.predict(given).values[0].tolist())
            expected.append(right.tolist())
    contents = [path.read_bytes() for path in files[:9]]
    mixed = numpy.empty(9, dtype=object)
    for index, content in enumerate(contents):
        mixed[index] = files[index] if index % 2 else content
    several = {
        "objects": model.predict(mixed),
        "column": model.predict(pandas.DataFrame({"image": contents})),
        "list": model.get_raw_model().predict(list(mixed)),
    }
    texts = [base64.b64encode(content).decode() for content in contents]
    def over_http(**request):
        return mlflow.models.validate_serving_input(uri, json.dumps(request))
    column = {"columns": ["image"], "data": [[text] for text in texts]}
    several |= {"base64": over_http(inputs=texts), "base64 in a column": over_http(dataframe_split=column)}
    best = over_http(dataframe_split=column, params={"top_k": 2})
    example = mlflow.models.convert_input_example_to_serving_input(model.input_example)
    served = mlflow.models.validate_serving_input(uri, example)
    print(json.dumps({
        "torch": sorted({"torch", "timm", "safetensors"} & set(sys.modules)),
        "labels": list(probabilities.columns),
        "values": probabilities.values.tolist(),
        "asked": asked, "answers": answers, "expected": expected,
        "several": {name: table.values.tolist() for name, table in several.items()},
        "best": best.values.tolist(),
        "example": model.input_example.shape,
        "example over HTTP": served.values.tolist(),
        "example itself": model.predict(model.input_example).values.tolist(),
    }))
"""


@pytest.mark.parametrize("network", ["onnx", pytest.param("torch", marks=pytest.mark.long)])
def test_a_registered_model_answers_in_a_clean_process(inputs, tracked, trained_digits, tmp_path, network):
    write_photos(tmp_path / "photos")
    measured = measure(trained_digits.student, tmp_path / "photos", tmp_path, image_size=64)
    given = {"dataset": measured.dataset, "teacher": trained_digits.teacher, "student": measured.student}
    settings = EvaluateSettings(latency_runs=10, gate=PASSING)
    evaluation = evaluate.run(settings, **given, evaluation=tmp_path / "evaluation")
    if network == "onnx":
        given["exported"] = exported(given, evaluation.path, tmp_path / "exported")
    artifact = run(inputs | given, evaluation.path, tmp_path / "registration", model_name="clean")
    version = read_summary(artifact)["mlflow"]["model_version"]
    (tmp_path / "files.json").write_text(json.dumps([str(file) for file in measured.files]))
    (tmp_path / "elsewhere").mkdir()
    environment = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "TRAINER_RUN")}
    process = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(PREDICT), f"models:/clean/{version}", str(tmp_path / "files.json")],
        cwd=tmp_path / "elsewhere",
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert process.returncode == 0, process.stderr
    answer = json.loads(process.stdout.splitlines()[-1])
    assert answer["torch"] == ([] if network == "onnx" else ["safetensors", "timm", "torch"])
    assert answer["labels"] == list("0123456789")
    values = np.array(answer["values"])
    temperature = evaluation.figures["student"]["temperature"]
    assert abs(temperature - 1) > 0.01
    np.testing.assert_allclose(values, to_probabilities(measured.logits / temperature), atol=1e-5)
    top1 = evaluation.figures["student"]["test"]["top1"]
    assert metrics.top_k(values, measured.labels, 1) == top1 > 0.6
    for asked, values_of_array, values_of_file in zip(
        answer["asked"], answer["answers"], answer["expected"], strict=True
    ):
        np.testing.assert_allclose(values_of_array, values_of_file, atol=1e-5, err_msg=asked)
    for name, values_of_nine in answer["several"].items():
        np.testing.assert_allclose(values_of_nine, values[:9], atol=1e-5, err_msg=name)
    for row, (labels, probabilities) in zip(values, answer["best"], strict=False):
        assert labels == [str(index) for index in np.argsort(-row)[:2]]
        np.testing.assert_allclose(probabilities, np.sort(row)[:-3:-1], atol=1e-5)
    assert len(answer["best"]) == 9
    assert answer["example"] == [1, 64, 64, 3]
    np.testing.assert_allclose(answer["example over HTTP"], answer["example itself"], atol=1e-5)


def test_every_page_of_a_run_has_a_title(tmp_path):
    inputs = dict.fromkeys(register._READ, SimpleNamespace(path=tmp_path))
    assert {*register._reports(inputs), "reinforce"} == finished_run.TITLES.keys()


def test_a_model_with_tags_answers_with_groups(inputs, tracked, trained_digits, tagged_dataset, tmp_path):
    given = {"dataset": tagged_dataset, "teacher": trained_digits.teacher, "student": trained_digits.student}
    settings = EvaluateSettings(latency_runs=10, answer_risk=0.1)
    evaluation = evaluate.run(settings, **given, evaluation=tmp_path / "evaluation")
    artifact = run(inputs | given, evaluation.path, tmp_path / "registration", model_name="tagged")
    version = read_summary(artifact)["mlflow"]["model_version"]
    import mlflow.artifacts
    import mlflow.pyfunc
    from mlflow.models import get_model_info
    from mlflow.pyfunc.scoring_server import predictions_to_json

    uri = f"models:/tagged/{version}"
    model = mlflow.pyfunc.load_model(uri)
    columns = [*"0123456789", "answer", "confidence", "value", "shape"]
    outputs = get_model_info(uri).signature.outputs
    assert outputs.input_names() == columns
    assert [str(column.type).split(".")[-1] for column in outputs.inputs[10:]] == [
        "string",
        "double",
        "double",
        "string",
    ]
    assert [column.required for column in outputs.inputs[10:]] == [False, True, False, False]

    threshold = evaluation.figures["student"]["test"]["answers"]["threshold"]
    assert tracked.get_model_version("tagged", version).tags["answer_threshold"] == f"{threshold:.6f}"
    table = model.predict(trained_digits.images.permute(0, 2, 3, 1).numpy())
    assert list(table.columns) == columns
    expected = TAGS.answering(risk=0.1, threshold=threshold).columns(table[[*"0123456789"]].to_numpy())
    for name, values in expected.items():
        assert table[name].tolist() == values.tolist(), name
    assert {"round", "open", "3", None} <= set(table["answer"])
    wrong = [
        answer not in (None, str(label), TAGS.parents[str(label)])
        for answer, label in zip(table["answer"], trained_digits.labels, strict=True)
    ]
    assert np.mean(wrong) == pytest.approx(evaluation.figures["student"]["test"]["answers"]["wrong"])
    assert (table["shape"].isna() == table["answer"].isna()).all()

    unsure, nine = table["answer"].isna().argmax(), (table["answer"] == "9").argmax()
    body = io.StringIO()
    predictions_to_json(table.iloc[[unsure, nine]], body)
    answered = json.loads(body.getvalue(), parse_constant=lambda name: pytest.fail(f"{name} is no JSON"))["predictions"]
    assert answered[0] | {"answer": None, "value": None, "shape": None} == answered[0]
    assert answered[1] | {"answer": "9", "value": None, "shape": "round"} == answered[1]

    # The public API gives the probabilities alone, also of a registered model's files.
    data = next(Path(mlflow.artifacts.download_artifacts(uri)).glob("data/*"))
    best = load_model(data).predict(trained_digits.images[0].permute(1, 2, 0).numpy())
    assert set(best) == set("0123456789")


def test_model_has_signature_and_pinned_requirements(inputs, evaluations, tracked, monkeypatch, tmp_path):
    (tmp_path / "project").mkdir()
    (tmp_path / "project/pyproject.toml").write_text("[project]\nname = 'another'\nversion = '0'\n")
    (tmp_path / "project/uv.lock").write_text("version = 1\n")
    monkeypatch.chdir(tmp_path / "project")
    artifact = run(inputs, evaluations[PASSING], tmp_path / "registration", model_name="described")
    version = read_summary(artifact)["mlflow"]["model_version"]
    import mlflow.pyfunc
    from mlflow.models import get_model_info

    info = get_model_info(f"models:/described/{version}")
    assert str(info.signature.inputs.inputs[0].type) == "object"
    assert info.signature.inputs.inputs[0].shape == (-1,)
    assert info.signature.outputs.input_names() == list("0123456789")
    requirements = (
        Path(mlflow.pyfunc.get_model_dependencies(f"models:/described/{version}"))
        .read_text(encoding="utf-8")
        .splitlines()
    )
    assert f"pillow=={importlib.metadata.version('pillow')}" in requirements
    assert f"timm=={importlib.metadata.version('timm')}" in requirements
    assert all(requirement.count("==") == 1 and "+" not in requirement for requirement in requirements)

    # Another machine has another 3.11 and another project, or none.
    model = Path(mlflow.artifacts.download_artifacts(f"models:/described/{version}"))
    python = f"{sys.version_info.major}.{sys.version_info.minor}"
    assert yaml.safe_load((model / "python_env.yaml").read_text()) == {
        "python": python,
        "dependencies": ["-r requirements.txt"],
    }
    assert yaml.safe_load((model / "conda.yaml").read_text())["dependencies"][0] == f"python={python}"
    assert not (model / "uv.lock").exists()
    assert not (model / "pyproject.toml").exists()


@pytest.fixture(scope="module")
def export_of_passing(inputs, evaluations, tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("MLFLOW_TRACKING_URI", raising=False)
        return exported(inputs, evaluations[PASSING], tmp_path_factory.mktemp("exports") / "exported")


def test_exported_student_is_registered_as_its_onnx_file_without_torch(
    inputs, evaluations, export_of_passing, tracked, trained_digits, tmp_path, capsys
):
    artifact = run(
        inputs | {"exported": export_of_passing}, evaluations[PASSING], tmp_path / "registration", model_name="onnx"
    )
    summary = read_summary(artifact)
    assert summary["export"]["chosen"] == "fp32"
    assert summary["reports"]["export"] == str(export_of_passing / "export.html")
    assert "export" in summary["stages"]
    version = tracked.get_model_version_by_alias("onnx", "champion")
    assert version.tags["variant"] == "fp32"
    import mlflow.pyfunc

    requirements = (
        Path(mlflow.pyfunc.get_model_dependencies("models:/onnx@champion")).read_text(encoding="utf-8").splitlines()
    )
    assert [one.partition("==")[0] for one in requirements] == ["mlflow", "numpy", "onnxruntime", "pandas", "pillow"]
    assert all(one.count("==") == 1 and "+" not in one for one in requirements)
    parent = tracked.get_run(summary["mlflow"]["run_id"])
    assert parent.data.metrics["export/candidates/fp32/test/top1"] == summary["student"]["test"]["top1"]
    assert "student/model.safetensors" in {one.path for one in tracked.list_artifacts(parent.info.run_id, "student")}

    images = trained_digits.images[:9].permute(0, 2, 3, 1).numpy()
    model = load_model("models:/onnx@champion", judged=True)
    with torch.inference_mode():
        logits = networks.load(inputs["student"])(trained_digits.images[:9]).numpy()
    expected = to_probabilities(
        logits / artifacts.manifest(evaluations[PASSING], "evaluation").figures["student"]["temperature"]
    )
    np.testing.assert_allclose(model.probabilities(list(images)), expected, atol=1e-5)
    served = load_model("models:/onnx@champion", judged=True, exported=True)
    np.testing.assert_allclose(served.of_squares(images), expected, atol=1e-5)
    assert served.version == artifacts.manifest(export_of_passing, "export").fingerprint[:12]


def test_mlflows_server_says_in_one_message_what_it_cannot_use(
    inputs, evaluations, export_of_passing, tracked, trained_digits, monkeypatch, tmp_path
):
    given = inputs | {"exported": export_of_passing}
    run(given, evaluations[PASSING], tmp_path / "registration", model_name="asked")
    import mlflow.pyfunc
    from mlflow.pyfunc import scoring_server

    monkeypatch.setenv(
        "_MLFLOW_IS_IN_SERVING_ENVIRONMENT", "true"
    )  # the server sets it, and no test is to leave it behind
    photo = base64.b64encode(png(trained_digits.images[0])).decode()
    letter = base64.b64encode(b"Dear colleague,\n" * 1000).decode()
    server = scoring_server.init(mlflow.pyfunc.load_model("models:/asked@champion"))
    with TestClient(server, raise_server_exceptions=False) as client:
        for content, message in (
            (column("a photo"), "image 0: no image: text must be an image file in base64"),
            (column("/etc/passwd"), "image 0: no image: text must be an image file in base64"),
            (column(letter), "image 0: no image that can be read"),
            (column(photo, letter), "image 1: no image that can be read"),
            (column(""), "image 0: empty file"),
            ({"inputs": [letter]}, "image 0: no image that can be read"),
            ({"inputs": [[[[0.5] * 3] * 4] * 4]}, "image 0: floating-point pixels"),
            (column(photo) | {"params": {"top_k": -1}}, "top_k: -1; give how many labels are wanted, or 0 for"),
        ):
            answer = client.post("/invocations", json=content)
            assert (answer.status_code, answer.json()["error_code"]) == (400, "INVALID_PARAMETER_VALUE")
            assert answer.json()["message"].startswith(message)
            assert not any(part in answer.text for part in ("Traceback", ".py", letter[:40]))
        answer = client.post("/invocations", json=column(photo) | {"params": {"top_k": 2}})
        assert answer.status_code == 200
        assert [len(one["top_labels"]) for one in answer.json()["predictions"]] == [2]


def column(*texts):
    return {"dataframe_split": {"columns": ["image"], "data": [[text] for text in texts]}}


def test_what_was_chosen_for_openvino_is_registered_with_it(
    inputs, evaluations, tracked, trained_digits, monkeypatch, tmp_path
):
    monkeypatch.setattr(variants, "fastest", lambda candidates: candidates[2])
    made = exported(inputs, evaluations[PASSING], tmp_path / "exported", openvino=True)
    assert artifacts.manifest(made, "export").figures["chosen"] == "fp32-openvino"
    run(inputs | {"exported": made}, evaluations[PASSING], tmp_path / "registration", model_name="openvino")
    import mlflow.pyfunc

    requirements = (
        Path(mlflow.pyfunc.get_model_dependencies("models:/openvino@champion")).read_text(encoding="utf-8").splitlines()
    )
    assert [one.partition("==")[0] for one in requirements] == ["mlflow", "numpy", "openvino", "pandas", "pillow"]
    images = list(trained_digits.images[:5].permute(0, 2, 3, 1).numpy())
    found = load_model("models:/openvino@champion").probabilities(images)
    np.testing.assert_allclose(found, load_model(made).probabilities(images), atol=1e-6)


def test_what_was_not_exported_is_registered_in_torch(inputs, evaluations, tracked, monkeypatch, tmp_path, capsys):
    place = exported(inputs, evaluations[FAILING], tmp_path / "exported")
    assert not (place / "model.onnx").exists()
    given = inputs | {"exported": place}
    summary = read_summary(run(given, evaluations[FAILING], tmp_path / "registration", model_name="failed"))
    assert summary["export"]["chosen"] is None
    version = summary["mlflow"]["model_version"]
    assert tracked.get_model_version("failed", version).tags["variant"] == "torch"
    assert load_model(f"models:/failed/{version}").labels == tuple("0123456789")
    for words, message in (
        ([f"models:/failed/{version}"], "did not pass its gate (its MLflow run says why)"),
        ([f"models:/failed/{version}", "--force"], "is a network in torch, not an ONNX file"),
        ([str(place)], "has no ONNX file (student "),
        (["models:/none@champion"], "has no such model"),
    ):
        assert cli.main(["serve", *words]) == EXIT_CODE
        assert message in capsys.readouterr().err


def test_a_student_without_its_square_is_not_registered(inputs, evaluations, tracked, trained_digits, tmp_path):
    model = networks.load(trained_digits.student)
    with artifacts.create(tmp_path / "student", "model", settings={}) as draft:
        networks.save(model, draft.path)
        config = json.loads((draft.path / "config.json").read_text())
        older = {name: value for name, value in config.items() if name not in ("square", "interpolation")}
        (draft.path / "config.json").write_text(json.dumps(older))
    assert networks.load(tmp_path / "student").card == replace(model.card, square=None)
    with pytest.raises(ModelError, match=r"config.json does not say how a photo becomes its input.*distill it again"):
        run(
            inputs | {"student": tmp_path / "student"},
            evaluations[PASSING],
            tmp_path / "registration",
            model_name="older",
        )
    assert not artifacts.exists(tmp_path / "registration")
    assert tracked.search_model_versions("name = 'older'") == []


def test_alias_moves_only_if_the_gate_passed(inputs, evaluations, tracked, tmp_path):
    first = read_summary(run(inputs, evaluations[PASSING], tmp_path / "first", model_name="aliased"))
    described = tracked.get_model_version("aliased", first["mlflow"]["model_version"]).description
    assert (
        f"{first['student']['test']['top1']:.1%} test top-1, the teacher {first['teacher']['test']['top1']:.1%}"
        in described
    )
    assert "Passed its gate." in described
    assert "10 classes: 0, 1, 2" in described
    assert str(tracked.get_model_version_by_alias("aliased", "champion").version) == first["mlflow"]["model_version"]
    second = read_summary(run(inputs, evaluations[FAILING], tmp_path / "second", model_name="aliased"))
    assert second["mlflow"]["model_version"] != first["mlflow"]["model_version"]
    refused = tracked.get_model_version("aliased", second["mlflow"]["model_version"]).description
    assert f"Did not pass its gate: {second['verdict']['reasons'][0]}" in refused
    assert str(tracked.get_model_version_by_alias("aliased", "champion").version) == first["mlflow"]["model_version"]
    tags = tracked.get_model_version("aliased", second["mlflow"]["model_version"]).tags
    assert load_model("models:/aliased@champion", judged=True).labels == tuple("0123456789")
    refused = f"models:/aliased/{second['mlflow']['model_version']}"
    assert load_model(refused).labels == tuple("0123456789")
    with pytest.raises(ModelError, match=rf"model {refused}: did not pass its gate \(its MLflow run says why\)"):
        load_model(refused, judged=True)
    for missing in ("models:/aliased@none", "models:/aliased/99", "models:/none@champion"):
        with pytest.raises(TrackingError, match=rf"{missing}: MLflow at sqlite:.* has no such model \("):
            load_model(missing)
    assert tags["verdict"] == "not passed"
    assert tags["student_fingerprint"] == artifacts.read(inputs["student"], "model").fingerprint
    assert float(tags["test_top1"]) == pytest.approx(second["student"]["test"]["top1"], abs=1e-4)


def test_alias_stays_on_a_student_of_other_classes(inputs, evaluations, tracked, monkeypatch, tmp_path, caplog):
    def registered(name, **changed):
        monkeypatch.setenv(tracking.RUN, name)  # each in a run of its own
        return read_summary(run(inputs, evaluations[PASSING], tmp_path / name, model_name="photos", **changed))

    def champion():
        return str(tracked.get_model_version_by_alias("photos", "champion").version)

    assert "alias_stays" not in registered("first")["mlflow"]
    tracked.create_model_version("photos", source="s3://bucket/gone", tags={"verdict": "passed"})
    tracked.set_registered_model_alias("photos", "champion", "2")
    stays = registered("unknown")["mlflow"]["alias_stays"]
    assert stays.startswith("models:/photos@champion is version 2, whose classes cannot be read (failed (")
    assert champion() == "2"
    tracked.set_registered_model_alias("photos", "champion", "1")
    monkeypatch.setattr(register.networks, "outline", with_labels(("0", "1", "apple", "pear")))
    caplog.clear()
    summary = registered("others")
    difference = "8 only there (2, 3, 4, 5, 6 and 3 more), 2 only here (apple, pear)"
    stays = f"models:/photos@champion is version 1, which knows other classes: {difference}"
    assert summary["mlflow"]["alias_stays"] == stays
    assert int(summary["mlflow"]["model_version"]) > 2, "it is registered all the same"
    assert champion() == "1"
    assert (
        f"register.alias=champion stays: {stays}; set register.model_name to a name for these classes, or"
        in caplog.text
    )
    table = finished_run.table(summary, tmp_path / "page.html")
    assert "not promoted (other classes)" in table
    assert stays in table
    preflight.warn_of_other_classes(resolve("digits", "register.model_name=photos"))
    assert "register.alias=champion will stay" not in caplog.text, "the same digits"
    folder = tmp_path / "fruit"
    for name in ("apple", "pear"):
        (folder / name).mkdir(parents=True)
        (folder / name / "1.png").touch()
    other = resolve("digits", ["register.model_name=photos", f"data.source=imagefolder:{folder}"])
    preflight.warn_of_other_classes(other)
    assert "register.alias=champion will stay: models:/photos@champion is version 1, which knows other" in caplog.text
    registered("moved", same_classes=False)
    assert int(champion()) > int(summary["mlflow"]["model_version"])


def with_labels(labels):
    """Outline models as if they knew other classes."""
    outline = networks.outline

    def changed(place):
        model = outline(place)
        model.card = replace(model.card, labels=labels)
        return model

    return changed


def test_a_killed_try_continues_its_version(inputs, evaluations, tracked, monkeypatch, tmp_path):
    def registered():
        return read_summary(run(inputs, evaluations[PASSING], tmp_path / "registration", model_name="twice"))["mlflow"]

    class Killed(BaseException):
        """No code catches it, as none runs after SIGKILL."""

    def killed(*_, **__):
        raise Killed

    with monkeypatch.context() as patch:
        patch.setattr(register, "build_summary", killed)
        with pytest.raises(Killed):
            registered()
    (made,) = tracked.search_model_versions("name = 'twice'")
    assert registered()["model_version"] == str(made.version)
    assert len(tracked.search_model_versions("name = 'twice'")) == 1
    monkeypatch.setenv("TRAINER_RUN", "another run")
    artifacts.remove(tmp_path / "registration")
    assert registered()["model_version"] == str(int(made.version) + 1)


def test_parent_run_holds_reports_settings_and_figures_and_is_finished(
    inputs, evaluations, tracked, monkeypatch, tmp_path
):
    monkeypatch.setenv(tracking.RUN, "a run of its own")
    summary = read_summary(run(inputs, evaluations[PASSING], tmp_path / "registration", model_name="parent"))
    parent = tracked.get_run(summary["mlflow"]["run_id"])
    assert parent.info.status == "FINISHED"
    assert parent.info.run_name == "a run of its own"
    assert parent.data.params["distill.logit.temperature"] == str(RESOLVED["distill"]["logit"]["temperature"])
    assert parent.data.metrics["student/test/top1"] == summary["student"]["test"]["top1"]
    tags = parent.data.tags
    assert tags["trainer.data"] == artifacts.manifest(inputs["dataset"], "dataset").fingerprint
    assert tags["trainer.commit"].removesuffix("-dirty") == tags["mlflow.source.git.commit"]
    assert "% test top-1, the teacher" in tags[tracking.NOTE_TAG]
    assert [(one.dataset.name.split()[-1], one.tags[0].value) for one in parent.inputs.dataset_inputs] == [
        ("train", "training"), ("val", "validation"), ("test", "testing"),
    ]  # fmt: skip
    folder = tracked.download_artifacts(parent.info.run_id, "settings.toml", str(tmp_path))
    settings = tomllib.loads(Path(folder).read_text(encoding="utf-8"))
    assert settings["distill"]["logit"]["temperature"] == RESOLVED["distill"]["logit"]["temperature"]
    version = tracked.get_model_version("parent", "1")
    assert float(version.tags["latency_p50_ms"]) == pytest.approx(summary["student"]["latency_ms"]["p50"], abs=0.001)
    assert version.tags["teacher"] == summary["teacher"]["title"]
    reports = tracked.list_artifacts(parent.info.run_id, "reports")
    assert [report.path for report in reports] == ["reports/data", "reports/evaluation", "reports/profile"]


PRICED = Machines(pool="gpu", price=Price(dollars_an_hour=3600.0, date="2026-11", region="here", source="bill"))


@pytest.fixture
def tuning(tmp_path):
    """A trial that found something better, and a forecast of what it makes of the distillation."""
    with artifacts.create(tmp_path / "tuning", "tuning", settings={}) as draft:
        measurement = Measurement(
            place=PRICED, settings={}, batch_size=32, step_s=0.1, steps=20,
            startup_s=1.0, validation_s=0.1, checkpoint_s=0.1,
        )  # fmt: skip
        work = WorkCount(steps=90, validations=0, checkpoints=0)
        found = Tuning(
            place=PRICED, given=RESOLVED["distill"], chosen=RESOLVED["distill"] | {"batch_size": 4096}, applied=True,
            tried=(), untried={}, reasons=(), stopped="", search_s=1.0, measurement=measurement, work=work,
            forecast=forecast(measurement, work), alternatives={},
        )  # fmt: skip
        (draft.path / FILE).write_text(found.model_dump_json())
    return tmp_path / "tuning"


def test_a_tuned_run_has_its_forecast(inputs, evaluations, tuning, tracked, monkeypatch, tmp_path, capsys):
    monkeypatch.setenv(PLACE_VARIABLE, PRICED.model_dump_json())
    summary = read_summary(run(inputs | {"tuning": tuning}, evaluations[PASSING], tmp_path / "registration"))
    assert summary["settings"]["distill"] == RESOLVED["distill"] | {"batch_size": 4096}
    assert list(summary["stages"])[:3] == ["prepare", "pretrain", "tune"]
    bill = Bill.model_validate(summary["bill"])
    assert bill.forecast
    assert bill.forecast.hours == pytest.approx(10 / 3600)
    assert bill.stages[-1].stage == "register"
    assert bill.stages[-1].dollars == pytest.approx(bill.stages[-1].seconds)

    parent = tracked.get_run(summary["mlflow"]["run_id"])
    assert parent.data.metrics["bill/distill/seconds"] == pytest.approx(bill.stage("distill").seconds)
    assert parent.data.params["distill.batch_size"] == str(RESOLVED["distill"]["batch_size"])
    assert cli.main(["bill", "--experiment", "vit-distillation"]) == 0
    row = capsys.readouterr().out.splitlines()[1]
    assert row.startswith("the run")
    assert f"{summary['student']['test']['top1']:.2%}" in row
    assert cli.main(["bill", "--experiment", "vit"]) == EXIT_CODE
    assert re.search(r"has no experiment 'vit', but .*vit-distillation.*; name one of these", capsys.readouterr().err)


def test_without_tracking_the_summary_is_still_written(inputs, evaluations, monkeypatch, tmp_path):
    monkeypatch.delenv(tracking.URI, raising=False)
    summary = read_summary(run(inputs, evaluations[PASSING], tmp_path / "registration"))
    evaluation = artifacts.manifest(evaluations[PASSING], "evaluation").figures
    assert [Path(one["picture"]).name for one in summary["examples"]] == ["example-1.png", "example-2.png"]
    assert all(Path(one["picture"]).is_file() for one in summary["examples"])
    assert summary["examples"][1]["student"]["answer"] != summary["examples"][1]["label"]
    assert summary["examples"][0]["teacher"] == evaluation["examples"][0]["teacher"]
    assert summary["mlflow"] == {"tracking_uri": None, "run_id": None, "model_name": None, "model_version": None}
    assert summary["student"]["test"]["top1"] > 0.3


@pytest.fixture
def recorded(inputs, object_store, monkeypatch, tmp_path):
    """The inputs, with recorded outputs that lie in a store and whose records cannot be fetched."""
    uri, figures = f"s3://{object_store.bucket}/outputs", {"views": 2, "mass": {"t1": {"mean": 0.9}}}
    with artifacts.create(uri, "teacher_outputs", settings={}) as draft:
        (draft.path / recording.REPORT).write_text("<p>what they hold</p>")
        (draft.path / "shard.bin").write_bytes(bytes(1000))
        draft.figures.update(figures)
    object_store.answer(404, path=".*shard.bin")
    monkeypatch.setenv("TRAINER_CACHE", str(tmp_path / "another cache"))
    return inputs | {"teacher_outputs": uri}


def test_what_lies_in_store_is_registered_from_there(inputs, evaluations, tracked, object_store, monkeypatch, tmp_path):
    """As on a cluster: each task fetches what it reads into its own machine's cache."""
    places = inputs | {"evaluation": evaluations[PASSING]}
    for name, place in places.items():
        artifacts.copy(place, object_store.uri(name), STAGES["register"].inputs[name])
    uris = {name: object_store.uri(name) for name in inputs}
    monkeypatch.setenv("TRAINER_CACHE", str(tmp_path / "another cache"))
    artifact = run(uris, object_store.uri("evaluation"), object_store.uri("registration"), model_name="from-a-store")
    got = [one for one in object_store.requests if one.method == "GET" and not one.query]
    fetched = {
        name: {one.path.split("/", 3)[3] for one in got if f"/{name}/" in one.path} for name in ("dataset", "teacher")
    }
    assert fetched["dataset"] <= {"manifest.json", "dataset.json", "tags.json", "card.html", "example.png"}, "no split"
    assert fetched["teacher"] == {"manifest.json"}, "it is not registered"
    summary = read_summary(artifact)
    assert summary["reports"]["data"] == object_store.uri("dataset", "card.html")
    assert summary["reports"]["evaluation"] == object_store.uri("evaluation", "report.html")
    (version,) = tracked.search_model_versions("name = 'from-a-store'")
    assert version.tags["student_fingerprint"] == artifacts.manifest(inputs["student"], "model").fingerprint
    model = tracked.get_logged_model(version.source.removeprefix("models:/"))
    folder = Path(model.artifact_location.removeprefix("file://"))
    kept = {path.name for path in folder.glob("data/**/*") if path.is_file()}
    assert kept >= {path.name for path in Path(inputs["student"]).iterdir()}, sorted(folder.rglob("*"))


def test_recorded_outputs_are_summed_up_and_their_page_is_kept(recorded, evaluations, monkeypatch, tmp_path):
    monkeypatch.delenv(tracking.URI, raising=False)
    artifact = run(recorded, evaluations[PASSING], tmp_path / "registration")
    outputs, summary = artifacts.manifest(recorded["teacher_outputs"], "teacher_outputs"), read_summary(artifact)
    assert artifact.parents["teacher_outputs"] == outputs.fingerprint
    assert summary["teacher_outputs"] == outputs.figures
    assert list(summary["stages"])[:4] == ["prepare", "pretrain", "reinforce", "distill"]
    assert summary["stages"]["reinforce"]["seconds"] == outputs.seconds
    assert Path(summary["reports"]["reinforce"]).read_text(encoding="utf-8") == "<p>what they hold</p>"


def test_mlflow_down_says_how_to_go_on(inputs, evaluations, monkeypatch, tmp_path):
    monkeypatch.setenv(tracking.URI, "http://127.0.0.1:9")
    with pytest.raises(TrackingAwayError) as caught:  # so a cluster tries again
        run(inputs, evaluations[PASSING], tmp_path / "registration")
    message = str(caught.value)
    assert "http://127.0.0.1:9: does not answer" in message
    assert f"The student is safe in {inputs['student']}" in message
    assert "MLFLOW_TRACKING_URI=http://127.0.0.1:9 python -m trainer stage register" in message
    assert "--set register.model_name=" in message
    assert f"--registration {tmp_path / 'registration'}" in message
    assert "--teacher-outputs" not in message
