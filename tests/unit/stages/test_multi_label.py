"""Images that may have several labels, from their list to answers: four digits or fewer in a picture, or none."""

from __future__ import annotations

import base64
import csv
import json
import logging
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pyarrow.parquet as pq
import pytest
from mlflow import MlflowClient
from scipy.special import expit
from sklearn.metrics import average_precision_score

from tests.multi_label_digits import write_list
from trainer import load_model
from trainer.config import (
    DataSettings,
    DistillSettings,
    EvaluateSettings,
    ExportSettings,
    GateSettings,
    ModelSettings,
    PretrainSettings,
    RegisterSettings,
    ReinforceSettings,
    TuneSettings,
    resolve_run,
)
from trainer.config.rules import RuleSettings
from trainer.data.dataset import open_dataset
from trainer.io import artifacts
from trainer.io.base_models import flatten
from trainer.io.errors import DataError, ModelError, SettingsError
from trainer.models import networks
from trainer.models.served_student.student import Prediction
from trainer.predict import batch_prediction, drift, photo_classifier
from trainer.profiling.evidence_files import read_evidence
from trainer.profiling.findings import judged
from trainer.profiling.rules.outcomes import Healthy
from trainer.stages import distill, evaluate, export, prepare, pretrain, register, reinforce, tune
from trainer.stages.evaluate import predict
from trainer.stages.tuning import trials
from trainer.stages.tuning.tuning_schema import read_tuning

# MLflow on SQLAlchemy 2.1
pytestmark = pytest.mark.filterwarnings("ignore:The ``noload`` loader strategy is deprecated")

KNOWN = {
    "value": {"0": 0.0, "1": 1.0, "2": 2.0, "3": None, "4": 4.0},
    "shape": {"0": "round", "1": None, "2": "open", "3": "open", "4": "open"},
}
"""What the table of attributes says of each class."""
VIT, VIEWS = "vit_tiny_patch16_224", {"min_scale": 1.0, "flip": False}
TRAINING = {"batch_size": 64, "base_learning_rate": 2e-2, "warmup_epochs": 1, "views": VIEWS}


def args(dim, depth):
    return {"img_size": 16, "patch_size": 8, "embed_dim": dim, "depth": depth, "num_heads": 2}


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """Everything that the stages make of such a list."""
    folder = tmp_path_factory.mktemp("multi_label")
    place = SimpleNamespace(
        list=write_list(folder / "photos", count=500, classes=5),
        **{
            name: folder / name
            for name in ("dataset", "teacher", "outputs", "student", "online", "evidence", "evaluation", "exported")
        },
    )
    (folder / "attributes.csv").write_text("class,value,shape\n0,0,round\n1,1,\n2,2,open\n3,,open\n4,4,open\n")
    data = DataSettings(
        attributes=str(folder / "attributes.csv"),
        source=f"manifest:{place.list}",
        multi_label=True,
        image_size=16,
        encoding="png",
        test_fraction=0.2,
    )
    teacher = PretrainSettings(
        teacher=ModelSettings(architecture=VIT, args=args(48, 2)),
        mae={"epochs": 0},
        finetune={**TRAINING, "epochs": 60, "multi_label_loss": "asymmetric", "layer_decay": 0.9, "drop_path": 0},
        workers=0,
        seed=0,
    )
    student = DistillSettings(
        **{**TRAINING, "base_learning_rate": 4e-2},
        student=ModelSettings(architecture=VIT, args=args(32, 1)),
        teacher="recorded",
        epochs=60,
        workers=0,
        seed=0,
    )
    recording = ReinforceSettings(views=2, augmentation=student.views, workers=0, seed=0)
    given = {"dataset": place.dataset, "teacher": place.teacher}
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("MLFLOW_TRACKING_URI", raising=False)
        prepare.run(data, dataset=place.dataset)
        pretrain.run(teacher, **given, evidence=folder / "e0")
        reinforce.run(recording, **given, teacher_outputs=place.outputs)
        distill.run(student, **given, student=place.student, evidence=place.evidence, teacher_outputs=place.outputs)
        few = student.model_copy(update={"teacher": "online", "epochs": 2})
        distill.run(few, **given, student=place.online, evidence=folder / "e2")
        judging = EvaluateSettings(latency_runs=10, gate=GateSettings(max_accuracy_drop=0.5, min_compression=1))
        evaluate.run(judging, **given, student=place.student, evaluation=place.evaluation)
    return place


def figures_of(place, kind):
    return artifacts.manifest(place, kind).figures


def listed_labels(made):
    """Name of each photo -> the labels that the list gives it."""
    rows = csv.DictReader(made.list.read_text().splitlines())
    return {row["path"]: {part.strip() for part in row["label"].split("|")} - {""} for row in rows}


def test_the_list_becomes_sets_of_classes(made):
    data = open_dataset(made.dataset)
    assert data.classes == ("0", "1", "2", "3", "4")
    listed = listed_labels(made)
    for name in ("train", "val", "test"):
        split = data.split(name)
        for source, wanted in zip(split.sources, split.wanted, strict=True):
            named = {data.classes[one] for one in np.flatnonzero(wanted)}
            assert named == listed[source]
        assert split.wanted.any(axis=0).all(), "each class is in each split"
    card = (made.dataset / "card.html").read_text()
    assert "labels in the mean" in card


def test_what_was_recorded_is_counted_by_sets(made):
    """The teacher is right of most views, whose labels are the numbers of sets."""
    assert figures_of(made.outputs, "teacher_outputs")["label_recorded"] > 0.8, (
        "of all logits, only those of no class are not"
    )
    assert figures_of(made.outputs, "teacher_outputs")["teacher_top1"] > 0.7


def test_a_model_of_another_kind_is_refused(made, tmp_path):
    one_label = tmp_path / "one_label"
    with artifacts.create(one_label, "model", settings={}) as draft:
        model = networks.load(made.teacher)
        model.card = replace(model.card, threshold=None)
        networks.save(model, draft.path)
    message = "chooses one of its classes, but the data set's images may have several labels"
    with pytest.raises(ModelError, match=f"teacher .*{message}"):
        reinforce.run(
            ReinforceSettings(), dataset=made.dataset, teacher=one_label, teacher_outputs=tmp_path / "outputs"
        )
    given = {"dataset": made.dataset, "teacher": one_label}
    few = DistillSettings(student=ModelSettings(architecture=VIT, args=args(16, 1)), epochs=1)
    with pytest.raises(ModelError, match=f"teacher .*{message}"):
        distill.run(few, **given, student=tmp_path / "student", evidence=tmp_path / "evidence")
    with pytest.raises(ModelError, match=f"student .*{message}"):
        evaluate.run(
            EvaluateSettings(),
            dataset=made.dataset,
            teacher=made.teacher,
            student=one_label,
            evaluation=tmp_path / "evaluation",
        )
    as_it_is = PretrainSettings(
        teacher=ModelSettings(architecture=VIT, args=args(48, 2)),
        weights=str(one_label),
        mae={"epochs": 0},
        finetune={"epochs": 0},
    )
    with pytest.raises(ModelError, match=f"pretrain.weights .*{message}"):
        pretrain.run(as_it_is, dataset=made.dataset, teacher=tmp_path / "teacher", evidence=tmp_path / "evidence")


def test_a_gate_that_needs_neighbors_is_refused(made, tmp_path):
    settings = EvaluateSettings(gate=GateSettings(min_knn_accuracy=0.5))
    given = {name: getattr(made, name) for name in ("dataset", "teacher", "student")}
    with pytest.raises(SettingsError, match="neighbors do not vote on images of several labels"):
        evaluate.run(settings, **given, evaluation=tmp_path / "evaluation")


def test_the_teacher_learns_and_the_student_learns_it(made):
    teacher, student = (figures_of(place, "model")["val_map"] for place in (made.teacher, made.student))
    chance = open_dataset(made.dataset).split("val").wanted.mean()
    assert teacher > 0.75 > 2 * chance
    assert student > 0.6
    card = networks.outline(made.student).card
    assert card.threshold == 0.5, "it says of each class by itself how probable it is"
    assert "val_map" in figures_of(made.online, "model")


def test_doctor_judges_teacher_by_its_mean_average_precision(made):
    answers = judged(read_evidence(made.evidence), RuleSettings())
    (found,) = (answer.outcome for answer in answers if answer.rule == "weak_teacher")
    teacher = figures_of(made.teacher, "model")["val_map"]
    assert isinstance(found, Healthy)
    assert found.text.startswith(f"the teacher's validation mAP is {teacher:.1%}")


def test_what_is_measured_is_what_scikit_learn_measures_of_answers(made):
    found, split = figures_of(made.evaluation, "evaluation"), open_dataset(made.dataset).split("test")
    student = found["student"]
    logits = predict(networks.load(made.student), split, 64, "student")
    precisions = average_precision_score(split.wanted, logits, average="macro")
    assert student["test"]["map"] == pytest.approx(precisions)
    named = expit(logits.astype(float) / student["temperature"]) > student["threshold"]
    right = (named & (split.wanted > 0)).sum()
    assert student["test"]["precision"] == pytest.approx(right / named.sum())
    assert student["test"]["recall"] == pytest.approx(right / split.wanted.sum())
    assert (found["verdict"]["passed"], found["verdict"]["reasons"]) == (True, [])
    page = (made.evaluation / "report.html").read_text()
    assert "mean average precision" in page
    details = json.loads((made.evaluation / "metrics.json").read_text())["student"]
    assert details["named"] == dict(zip(details["classes"], named.sum(axis=0).tolist(), strict=True))
    assert details["none_named"] == (~named.any(axis=1)).sum() > 0
    assert sum(details["calibration"]["counts"]) == len(split)


def test_a_failed_gate_names_the_mean_average_precision(made, tmp_path):
    gate = GateSettings(min_accuracy=1, max_accuracy_drop=1, min_compression=1)
    evaluation = evaluate.run(
        EvaluateSettings(latency_runs=10, gate=gate),
        dataset=made.dataset,
        teacher=made.teacher,
        student=made.student,
        evaluation=tmp_path / "evaluation",
    )
    (reason,) = evaluation.figures["verdict"]["reasons"]
    assert reason.startswith("accuracy: the student's test mAP of ")


def test_an_exported_student_names_what_the_student_names(made, tmp_path, caplog):
    caplog.set_level(logging.INFO)
    pytest.importorskip("onnxruntime", reason="needs the extra `export`")
    from fastapi.testclient import TestClient

    from trainer.predict.serving.server import PhotoServer, ServerLimits

    settings = ExportSettings(finetune_steps=2, max_accuracy_loss=1, max_shift=1)
    given = {"dataset": made.dataset, "student": made.student, "evaluation": made.evaluation}
    place = export.run(settings, **given, exported=tmp_path / "exported").path
    table = json.loads((place / "candidates.json").read_text())["candidates"]
    assert table[0]["test"]["map"] == figures_of(made.evaluation, "evaluation")["student"]["test"]["map"]
    assert {"torch", "fp32", "int8"} <= {one["name"] for one in table}
    served = load_model(place)
    photo = (made.list.parent / "7.png").read_bytes()
    (said,) = served.answers(served.of_squares(served.square(photo)[None]), top=5)
    threshold = figures_of(made.evaluation, "evaluation")["student"]["threshold"]
    assert list(said.named) == sorted(label for label, sure in said.labels.items() if sure > threshold)
    assert served.predictions([photo], top=5)[0].named == said.named
    assert sum(said.labels.values()) != pytest.approx(1), "each class is by itself"
    with TestClient(PhotoServer(served, name="several", most=ServerLimits())) as client:
        answer = client.post("/predict?top=1", content=photo, headers={"content-type": "image/png"}).json()
        content = {"name": "photo", "datatype": "BYTES", "shape": [1], "data": [base64.b64encode(photo).decode()]}
        inferred = client.post("/v2/models/several/infer", json={"inputs": [content]}).json()["outputs"]
        described = client.get("/v2/models/several").json()["outputs"]
    assert answer["named"] == list(said.named)
    (named,) = (tensor for tensor in inferred if tensor["name"] == "named")
    assert (named["datatype"], named["shape"]) == ("BOOL", [1, len(served.labels)])
    assert [label for label, is_named in zip(served.labels, named["data"], strict=True) if is_named] == list(said.named)
    assert [(one["name"], one["datatype"]) for one in described] == [(one["name"], one["datatype"]) for one in inferred]
    assert f" bytes named {list(said.named)} " in caplog.text
    assert (
        answer["attributes"]
        == said.attributes
        == {name: [KNOWN[name][label] for label in said.named] for name in KNOWN}
    )
    assert set(answer) == {"model", "version", "labels", "named", "attributes"}


@pytest.fixture
def finished(made, tmp_path):
    """The directory of a run with what was made."""
    for name in ("dataset", "teacher", "student", "evaluation"):
        (tmp_path / "run" / name).parent.mkdir(exist_ok=True)
        (tmp_path / "run" / name).symlink_to(getattr(made, name))
    return tmp_path / "run"


def test_a_folder_of_photos_is_predicted_without_drift(made, finished, tmp_path):
    model = load_model(finished)
    batch_prediction.predict_folder(model, str(made.list.parent), str(tmp_path / "predictions"), top=2)
    (file,) = (tmp_path / "predictions").glob("*.parquet")
    rows = pq.read_table(file).to_pylist()
    listed = listed_labels(made)
    agree = np.mean([set(row["named"]) == listed[row["photo"]] for row in rows])
    assert agree > 0.3, "a guess of five classes is right far less often"
    for row in rows:
        assert row["attributes"] == {name: [KNOWN[name][label] for label in row["named"]] for name in KNOWN}
    text = photo_classifier.lines(
        Prediction(labels={"3": 0.9}, named=["3"], attributes={"value": [None], "shape": ["open"]})
    )
    assert text == ["90.0%  3", "named  3, shape open"]
    found = drift.compare(str(finished), str(tmp_path / "predictions"), limit=0.15)
    assert found.reasons == []
    assert found.labels.names == ["0", "1", "2", "3", "4", "no class is named"]
    named = [label for row in rows for label in row["named"]]
    nothing = sum(not row["named"] for row in rows)
    assert found.labels.now.tolist() == [*map(named.count, "01234"), nothing]

    # As a server logs them, of photos on which there is nothing.
    log = tmp_path / "log.jsonl"
    log.write_text("".join(json.dumps({"label": "0", "probability": 0.01, "named": []}) + "\n" for _ in rows))
    assert drift.compare(str(finished), str(log), limit=0.15).labels.now.tolist() == [0, 0, 0, 0, 0, len(rows)]
    log.write_text(json.dumps({"label": "0", "probability": 0.9}) + "\n")
    with pytest.raises(
        DataError, match=r"log.jsonl: holds no predictions \(no line is an object with named and probability\)"
    ):
        drift.compare(str(finished), str(log), limit=0.15)
    log.write_text(json.dumps({"named": 3, "probability": 0.9}) + "\n")
    with pytest.raises(DataError, match=r"log.jsonl: holds no predictions \(3 is no list of labels\)"):
        drift.compare(str(finished), str(log), limit=0.15)


def test_a_registered_student_names_labels_in_mlflow(made, tmp_path, mlflow_uri, monkeypatch):
    monkeypatch.setenv("MLFLOW_TRACKING_URI", mlflow_uri)
    with artifacts.create(tmp_path / "report", "report", settings={}) as draft:
        (draft.path / "report.html").write_text("<p>where the time went</p>")
    given = {name: getattr(made, name) for name in ("dataset", "teacher", "student", "evaluation")}
    resolved = resolve_run("digits", [f"data.source=manifest:{made.list}", "data.multi_label=true"])
    registration = register.run(
        RegisterSettings(model_name="several"),
        **given,
        pretrain_evidence=made.teacher.parent / "e0",
        distill_evidence=made.evidence,
        report=tmp_path / "report",
        registration=tmp_path / "registration",
        recipe="digits",
        resolved=resolved.model_dump(mode="json"),
    )
    found = figures_of(made.evaluation, "evaluation")["student"]
    summary = json.loads((registration.path / "summary.json").read_text())
    assert set(summary["teacher"]["test"]) == {"map"}
    version = MlflowClient(mlflow_uri).get_model_version("several", "1")
    assert float(version.tags["test_map"]) == pytest.approx(found["test"]["map"], abs=1e-4)
    import mlflow.pyfunc  # here, because its first import warns, which register hides

    model = mlflow.pyfunc.load_model("models:/several/1")
    photos = np.empty(20, dtype=object)
    photos[:] = [(made.list.parent / f"{number}.png").read_bytes() for number in range(20)]
    table = model.predict(photos)
    labels = ["0", "1", "2", "3", "4"]
    columns = [*labels, "named", "value", "shape"]
    assert list(table.columns) == list(model.metadata.get_output_schema().input_names()) == columns
    for name, known in KNOWN.items():
        assert list(table[name]) == [[known[label] for label in named] for named in table["named"]]
    above = table[labels].to_numpy() > found["threshold"]
    assert [[label for label, is_named in zip(labels, row, strict=True) if is_named] for row in above] == list(
        table["named"]
    )
    assert any(map(len, table["named"]))


@pytest.mark.parametrize("asked", ["online", "recorded"])
def test_a_distillation_is_tuned(made, tmp_path, monkeypatch, asked):
    monkeypatch.setattr(trials, "LEAST_S", 0.1)
    monkeypatch.setattr(trials, "LONGEST_S", 0.2)
    shape = ModelSettings(architecture=VIT, args=args(32, 1))
    student = DistillSettings(**TRAINING, student=shape, teacher=asked, epochs=60, workers=0, seed=0)
    recorder = ReinforceSettings(views=2, top_k="all", augmentation=student.views, workers=0, seed=0)
    settings = TuneSettings(enabled=True, search=False, distill=student, reinforce=recorder)
    tune.run(settings, dataset=made.dataset, teacher=made.teacher, tuning=tmp_path / "tuning")
    tuned = read_tuning(tmp_path / "tuning")
    assert tuned.measurement.steps > 0
    assert tuned.measurement.settings["teacher"] == asked
    assert tuned.forecast.hours > 0
    some = settings.model_copy(update={"reinforce": recorder.model_copy(update={"top_k": 2})})
    with pytest.raises(SettingsError, match=r"reinforce\.top_k is 2 of 5 classes"):
        tune.run(some, dataset=made.dataset, teacher=made.teacher, tuning=tmp_path / "another")


def test_a_recording_of_some_logits_is_refused(made, tmp_path):
    with pytest.raises(
        SettingsError, match=r"reinforce\.top_k is 2 of 5 classes, but an image may have several labels"
    ):
        reinforce.run(
            ReinforceSettings(top_k=2), dataset=made.dataset, teacher=made.teacher, teacher_outputs=tmp_path / "outputs"
        )


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"logit": {"loss": "dkd"}}, "distill.logit.loss is dkd, which is for images of one class"),
        ({"logit": {"standardize": True}}, "distill.logit.standardize is true, which compares the classes"),
        (
            {"head": "probe", "logit_weight": 0, "label_weight": 0, "feature_weight": 1},
            "distill.head is probe, and no head is fitted",
        ),
    ],
)
def test_losses_between_classes_of_image_are_refused(made, tmp_path, change, message):
    settings = DistillSettings(student=ModelSettings(architecture=VIT, args=args(16, 1)), **change)
    with pytest.raises(SettingsError, match=message):
        distill.run(
            settings,
            dataset=made.dataset,
            teacher=made.teacher,
            student=tmp_path / "student",
            evidence=tmp_path / "evidence",
        )
    overrides = [f"distill.{name}={json.dumps(value)}" for name, value in flatten(change).items()]
    with pytest.raises(SettingsError, match=message):
        resolve_run("digits", [f"data.source=manifest:{made.list}", "data.multi_label=true", *overrides])


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["data.source=digits"], "multi_label is true, but source is 'digits', which gives an image one label"),
        (["data.hierarchy=x.csv"], "hierarchy=x.csv is for answering with one class or group an image"),
        (
            ["pretrain.head=none", "pretrain.finetune.epochs=0", "distill.logit_weight=0"],
            "no head is fitted to images of several labels",
        ),
        (
            ["pretrain.head=probe", "pretrain.finetune.epochs=0"],
            "pretrain.head is probe, and no head is fitted to images",
        ),
        (["evaluate.gate.min_knn_accuracy=0.5"], "neighbors do not vote on images of several labels"),
        (["evaluate.label_issues=all"], "labels are not doubted where an image may have several"),
        (
            ["distill.teacher=recorded", "reinforce.top_k=3"],
            "but reinforce keeps the 3 largest of each view; set reinforce.top_k=all",
        ),
    ],
)
def test_what_needs_one_label_an_image_is_refused(overrides, message):
    with pytest.raises(SettingsError, match=message):
        resolve_run("digits", ["data.source=manifest:/x.csv", "data.multi_label=true", *overrides])
