"""What a component's body calls, with KFP's own artifacts."""

from __future__ import annotations

import json

import pytest
from kfp import dsl
from kfp.dsl.types import artifact_types

from components import references, task
from components.launching import Placement
from components.sections import configure, resolve
from trainer.io import artifacts
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


def test_evaluation_is_shown_as_page_numbers_and_matrix(tmp_path):
    path = tmp_path / "measurements"
    with artifacts.create(path, "evaluation", settings={}) as draft:
        (path / "confusion.json").write_text(
            json.dumps({"labels": ["a", "b"], "pairs": [[0, 0, 3], [0, 1, 1], [1, 1, 4]]})
        )
        (path / "report.html").write_text("<p>report</p>")
        draft.figures.update(student={"test": {"top1": 0.875}, "architecture": "vit"}, verdict={"passed": True})
    page, metrics = dsl.HTML(uri=str(tmp_path / "page")), dsl.Metrics(uri=str(tmp_path / "metrics"))
    confusion = dsl.ClassificationMetrics(uri=str(tmp_path / "confusion"))
    task.show_evaluation(references.to(str(path), "evaluation"), page, metrics, confusion)
    assert (tmp_path / "page").read_text() == "<p>report</p>"
    assert metrics.metadata == {"student.test.top1": 0.875, "verdict.passed": 1.0}
    assert json.loads((tmp_path / "metrics").read_text()) == metrics.metadata
    matrix = confusion.metadata["confusionMatrix"]
    assert [spec["displayName"] for spec in matrix["annotationSpecs"]] == ["a", "b"]
    assert [row["row"] for row in matrix["rows"]] == [[3, 1], [0, 4]]


def test_confusions_of_very_many_classes_are_left_to_page(tmp_path):
    path, classes = tmp_path / "measurements", task.MOST_CONFUSED_CLASSES + 1
    content = {"labels": [str(index) for index in range(classes)], "pairs": [[0, 1, 2]]}
    with artifacts.create(path, "evaluation", settings={}) as draft:
        (path / "confusion.json").write_text(json.dumps(content))
        (path / "report.html").write_text("<p>report</p>")
        draft.figures.update(student={"test": {"top1": 0.875}})
    page, metrics = dsl.HTML(uri=str(tmp_path / "page")), dsl.Metrics(uri=str(tmp_path / "metrics"))
    confusion = dsl.ClassificationMetrics(uri=str(tmp_path / "confusion"))
    task.show_evaluation(references.to(str(path), "evaluation"), page, metrics, confusion)
    assert not confusion.metadata
    assert json.loads((tmp_path / "confusion").read_text()) == content


def test_page_that_job_wrote_comes_from_store(object_store, tmp_path):
    uri = f"minio://{object_store.bucket}/outputs"
    with artifacts.create(uri, "teacher_outputs", settings={}) as draft:
        (draft.path / "report.html").write_text("<p>recorded</p>")
    page = dsl.HTML(uri=str(tmp_path / "page"))
    task.show_page(references.to(uri, "teacher_outputs"), "report.html", page)
    assert (tmp_path / "page").read_text() == "<p>recorded</p>"


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
    monkeypatch.setenv(task.DEBUG, "1")
    with pytest.raises(SystemExit), task.reporting("prepare"):
        raise DataError("no images")
    assert "Traceback" in capfd.readouterr().err


PREPARE = json.dumps({"source": "digits", "image_size": 8, "encoding": "png"})


def test_a_stage_writes_into_its_tasks_folder(folder):
    (made,) = task.run_stage("prepare", PREPARE, {})
    assert made == f"{folder}/dataset#dataset={artifacts.read(folder / 'dataset', 'dataset').fingerprint}"


def test_stage_on_cluster_writes_into_store(object_store, monkeypatch):
    """KFP's executor names the folder by the path that KFP's launcher would upload from."""
    monkeypatch.setattr(artifact_types, "CONTAINER_TASK_ROOT", f"/minio/{object_store.bucket}/v2/prepare")
    (made,) = task.run_stage("prepare", PREPARE, {})
    assert made.startswith(f"minio://{object_store.bucket}/v2/prepare/dataset#dataset=")
    artifacts.read(references.uri_of(made), "dataset")


def test_equal_results_share_one_reference(object_store, monkeypatch):
    made = set()
    for run in ("run-1", "run-2"):
        monkeypatch.setenv("KFP_RUN_ID", run)
        monkeypatch.setattr(artifact_types, "CONTAINER_TASK_ROOT", f"/minio/{object_store.bucket}/v2/{run}/prepare")
        made |= {*task.run_stage("prepare", PREPARE, {})}
    (reference,) = made
    assert reference.startswith(f"minio://{object_store.bucket}/v2/run-1/prepare/dataset#dataset=")


def test_a_wrong_setting_ends_the_task(folder, capfd):
    with pytest.raises(SystemExit):
        task.run_stage("prepare", '{"image_size": 1}', {})
    assert "data.image_size must be >= 8, got 1" in capfd.readouterr().err


@pytest.mark.parametrize(
    ("overrides", "asked"),
    [
        ("", "online"),
        ("distill.teacher=recorded", "recorded"),
        (
            "distill.teacher=recorded distill.logit_weight=0 distill.feature_weight=1 reinforce.features=true",
            "recorded",
        ),
        ("distill.teacher=recorded distill.logit_weight=0", "online"),
    ],
)
def test_without_tuning_the_distillation_stays(folder, overrides, asked):
    sections = configure(resolve("digits", overrides), Placement())
    assert task.tune(sections.tune, {}, Placement()) == (sections.distill, asked, "")
    assert not folder.exists()


def test_a_stage_not_asked_for_is_not_launched(folder, tmp_path):
    sections = configure(resolve("digits"), Placement())
    page = dsl.HTML(uri=str(tmp_path / "page"))
    assert task.reinforce(sections.reinforce, task.ONLINE, {}, Placement(), page) == ("",)
    assert task.warm_up(sections.warm_up, {}, Placement()) == ("",)
    off = configure(resolve("digits", "export.enabled=false"), Placement())
    assert task.export(off.export, {}, page) == ("",)
    assert list(tmp_path.iterdir()) == []
