"""What a component's body calls, with KFP's own artifacts."""

from __future__ import annotations

import json

import pytest
from kfp import dsl
from kfp.dsl.types import artifact_types

from components import references, task
from components.launch.client import ApiUnavailableError
from components.launching import Placement
from components.sections import configure, resolve
from trainer import config, stages
from trainer.data import preparation
from trainer.io import artifacts, commands
from trainer.io.errors import (
    EXIT_CODE,
    INTERRUPTED_EXIT_CODE,
    DataError,
    PreemptedError,
    StorageAwayError,
    TrackingAwayError,
    TrackingError,
)


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """The folder of a task, as KFP's executor names it."""
    monkeypatch.setattr(artifact_types, "CONTAINER_TASK_ROOT", str(tmp_path / "task"))
    return tmp_path / "task"


def evaluation(path, confusion):
    with artifacts.create(path, "evaluation", settings={}) as draft:
        (path / "confusion.json").write_text(json.dumps(confusion))
        draft.figures.update(student={"test": {"top1": 0.875}, "architecture": "vit"}, verdict={"passed": True})
    return str(path)


def test_evaluation_is_shown_as_numbers_and_matrix(tmp_path):
    made = evaluation(tmp_path / "measurements", {"labels": ["a", "b"], "pairs": [[0, 0, 3], [0, 1, 1], [1, 1, 4]]})
    metrics = dsl.Metrics(uri=str(tmp_path / "metrics"))
    confusion = dsl.ClassificationMetrics(uri=str(tmp_path / "confusion"))
    task.show_evaluation(made, metrics, confusion)
    assert metrics.metadata == {"student.test.top1": 0.875, "verdict.passed": 1.0}
    assert json.loads((tmp_path / "metrics").read_text()) == metrics.metadata
    matrix = confusion.metadata["confusionMatrix"]
    assert [spec["displayName"] for spec in matrix["annotationSpecs"]] == ["a", "b"]
    assert [row["row"] for row in matrix["rows"]] == [[3, 1], [0, 4]]


def test_confusions_of_very_many_classes_are_left_to_page(tmp_path):
    content = {"labels": [str(index) for index in range(task.MOST_CONFUSED_CLASSES + 1)], "pairs": [[0, 1, 2]]}
    made, confusion = evaluation(tmp_path / "made", content), dsl.ClassificationMetrics(uri=str(tmp_path / "confusion"))
    task.show_evaluation(made, dsl.Metrics(uri=str(tmp_path / "metrics")), confusion)
    assert not confusion.metadata
    assert json.loads((tmp_path / "confusion").read_text()) == content


def test_errors_of_a_task(capfd):
    for text in ("no images", "prepare: no images"):
        with pytest.raises(SystemExit) as ended, task.reporting("prepare"):
            raise DataError(text)
        assert ended.value.code == EXIT_CODE
        assert capfd.readouterr().err == "error: prepare: no images\n"
    with pytest.raises(SystemExit) as ended, task.reporting("prepare"):
        raise KeyboardInterrupt
    assert ended.value.code == INTERRUPTED_EXIT_CODE


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (DataError("no images"), "error: prepare: no images"),
        (StorageAwayError("s3://bucket does not answer"), "for now: prepare: s3://bucket does not answer"),
        (ApiUnavailableError("the API server does not answer"), "for now: prepare: the API server does not answer"),
        (TrackingAwayError("MLflow does not answer"), "for now: prepare: MLflow does not answer"),
        (TrackingError("MLflow refuses"), "error: prepare: MLflow refuses"),
        (PreemptedError("was asked to end"), "for now: prepare: was asked to end"),
    ],
)
def test_argo_reads_whether_to_try_again(monkeypatch, tmp_path, error, words):
    """KFP's launcher makes one exit code of all, so the termination message has to say it."""
    monkeypatch.setenv("TRAINER_TERMINATION_LOG", str(tmp_path / "log"))
    with pytest.raises(SystemExit), task.reporting("prepare"):
        raise error
    assert (tmp_path / "log").read_text() == words


def test_a_traceback_is_shown_when_debugging(monkeypatch, capfd):
    monkeypatch.setenv(commands.DEBUG, "1")
    with pytest.raises(SystemExit), task.reporting("prepare"):
        raise DataError("no images")
    assert "Traceback" in capfd.readouterr().err


PREPARE = json.dumps({"source": "digits", "image_size": 8, "encoding": "png"})


def prepare(folder, settings=PREPARE):
    """Run the stage prepare with KFP's artifacts in a folder; returns the reference and the artifacts."""
    shown = {"dataset": dsl.Dataset(uri=str(folder / "shown")), "data_card": dsl.HTML(uri=str(folder / "card"))}
    (made,) = task.run_stage(
        "prepare", {"settings": settings, "source_version": "", "prepare_pool": "", "prepare_nodes": 1, **shown}
    )
    return made, shown


def test_a_stage_writes_into_its_tasks_folder_and_shows_what_it_made(folder, tmp_path):
    made, shown = prepare(tmp_path)
    manifest = artifacts.read(folder / "dataset", "dataset")
    assert made == f"{folder}/dataset#dataset={manifest.fingerprint}"
    assert shown["dataset"].metadata == {"kind": "dataset", "fingerprint": manifest.fingerprint}
    assert (tmp_path / "card").read_bytes() == (folder / "dataset" / "card.html").read_bytes()


def test_stage_on_cluster_writes_into_store_and_shows_the_stores_page(object_store, monkeypatch, tmp_path):
    """KFP's executor names the folder by the path that KFP's launcher would upload from."""
    monkeypatch.setattr(artifact_types, "CONTAINER_TASK_ROOT", f"/minio/{object_store.bucket}/v2/prepare")
    made, _ = prepare(tmp_path)
    assert made.startswith(f"minio://{object_store.bucket}/v2/prepare/dataset#dataset=")
    artifacts.read(references.uri_of(made), "dataset")
    assert (tmp_path / "card").read_text().startswith("<!doctype html>")


def test_equal_results_share_one_reference(object_store, monkeypatch, tmp_path):
    made = set()
    for run in ("run-1", "run-2"):
        monkeypatch.setenv("KFP_RUN_ID", run)
        monkeypatch.setattr(artifact_types, "CONTAINER_TASK_ROOT", f"/minio/{object_store.bucket}/v2/{run}/prepare")
        made.add(prepare(tmp_path)[0])
    (reference,) = made
    assert reference.startswith(f"minio://{object_store.bucket}/v2/run-1/prepare/dataset#dataset=")


def test_what_pods_left_that_were_ended_in_their_share_is_removed(folder, monkeypatch, tmp_path):
    """They are ended as the first one has made the data set, and may have written a part of a chunk."""
    settings = config.validate_section("data", json.loads(PREPARE))
    left = folder / "checkpoints" / preparation.decode_cache_uri(settings, "").rpartition("/")[2] / "000003.arrow"
    monkeypatch.setenv("TRAINER_CHECKPOINTS", str(folder / "checkpoints"))

    def launch(spec, place, _record):
        assert (spec.stage, place) == ("prepare", Placement(pool="cpu", nodes=3, processes_per_node=1))
        stages.call("prepare", json.dumps(spec.settings), spec.outputs)
        left.parent.mkdir(parents=True)
        left.write_bytes(b"half a chunk")

    monkeypatch.setattr(task.launching, "launch", launch)
    shown = {"dataset": dsl.Dataset(uri=str(tmp_path / "shown")), "data_card": dsl.HTML(uri=str(tmp_path / "card"))}
    task.run_stage(
        "prepare", {"settings": PREPARE, "source_version": "", "prepare_pool": "cpu", "prepare_nodes": 3, **shown}
    )
    assert artifacts.exists(folder / "dataset")
    assert not left.exists()


def test_a_wrong_setting_ends_the_task(folder, tmp_path, capfd):
    with pytest.raises(SystemExit):
        prepare(tmp_path, '{"image_size": 1}')
    assert "data.image_size must be >= 8, got 1" in capfd.readouterr().err


@pytest.mark.parametrize(
    ("overrides", "reads"),
    [
        ("", False),
        ("distill.teacher=recorded", True),
        ("distill.teacher=recorded distill.logit_weight=0 distill.feature_weight=1 reinforce.features=true", True),
        ("distill.teacher=recorded distill.logit_weight=0", False),
    ],
)
def test_without_tuning_the_distillation_stays(folder, overrides, reads):
    sections = configure(resolve("digits", overrides), Placement())
    assert sections.reinforce_needed is reads
    assert task.run_stage("tune", {"settings": sections.tune, "needed": sections.tune_needed}) == (
        sections.distill, reads, ""
    )  # fmt: skip
    assert not folder.exists()


@pytest.mark.parametrize("name", ["warm_up", "reinforce", "export"])
def test_a_stage_that_is_not_needed_makes_nothing(folder, name):
    sections = configure(resolve("digits", "export.enabled=false"), Placement())
    given = {"settings": getattr(sections, name), "needed": getattr(sections, f"{name}_needed")}
    assert task.run_stage(name, given) == ("",)
    assert not folder.exists()
