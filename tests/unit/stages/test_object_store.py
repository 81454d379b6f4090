"""Stages with everything in an object store: they read and write URIs as they do directories."""

import json

import pytest

from tests.trained_digits import pixels, png
from trainer import stages
from trainer.config import TrackingSettings
from trainer.data.dataset import open_dataset
from trainer.io import artifacts, storage
from trainer.io.errors import StorageError
from trainer.report import tracking


def test_prepare_from_and_into_a_store(object_store):
    for index, image in enumerate(pixels(range(40))):
        object_store.put(f"photos/{index % 2}/{index}.png", png(image))
    settings = {"source": "imagefolder:s3://artifacts/photos", "image_size": 16}
    stages.call("prepare", json.dumps(settings), {"dataset": object_store.uri("dataset")})
    manifest = artifacts.manifest(object_store.uri("dataset"), "dataset")
    assert manifest.figures["classes"] == 2
    assert manifest.figures["train"] + manifest.figures["val"] + manifest.figures["test"] == 40
    assert set(manifest.files) == set(storage.files(object_store.uri("dataset"))) - {artifacts.MANIFEST}
    data = open_dataset(object_store.uri("dataset"))
    assert object_store.get("dataset/example.jpg") == bytes(data.split("test").encoded(0))


# MLflow on SQLAlchemy 2.1
@pytest.mark.filterwarnings("ignore:The ``noload`` loader strategy is deprecated")
def test_evaluate_from_and_into_a_store(object_store, trained_digits, tmp_path, monkeypatch):
    for name, value in tracking.environment(TrackingSettings(), directory=tmp_path, run="in a store").items():
        monkeypatch.setenv(name, value)
    kinds = {"dataset": "dataset", "teacher": "model", "student": "model"}
    places = {name: object_store.uri("run", name) for name in (*kinds, "evaluation")}
    for name, kind in kinds.items():
        artifacts.copy(getattr(trained_digits, name), places[name], kind)
    settings = {"latency_runs": 10, "latency_batch_sizes": [1]}
    stages.call("evaluate", json.dumps(settings), places)
    figures = artifacts.manifest(places["evaluation"], "evaluation").figures
    assert figures["student"]["test"]["top1"] > 0.3
    report = object_store.get("run/evaluation/report.html")
    assert b"the student" in report
    client = tracking.client()
    (run,) = (run for run in client.search_runs(["1"]) if run.info.run_name == "evaluate")
    recorded = {file.path for file in client.list_artifacts(run.info.run_id)}
    assert recorded >= {"report.html", "metrics.json", "confusion.json", "label_issues.csv"}
    fetched = {
        one.path.split("/")[4] for one in object_store.requests if one.method == "GET" and "/run/dataset/" in one.path
    }
    assert fetched == {"manifest.json", "dataset.json", "val", "test"}

    object_store.answer(403, path="run/student")
    with pytest.raises(StorageError, match=r"s3://artifacts/run/student/manifest.json: .*403"):
        stages.call("evaluate", json.dumps(settings), places)
