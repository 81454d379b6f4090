"""What a component's body calls, with KFP's own artifacts."""

from __future__ import annotations

import json

import pytest
from kfp import dsl

from components import task
from components.launching import Place, Training
from components.sections import configure, resolve
from trainer import artifacts
from trainer.errors import EXIT_CODE, INTERRUPTED_EXIT_CODE, DataError, PreemptedError, StorageAwayError


@pytest.fixture
def evaluation(tmp_path) -> dsl.Artifact:
    path = tmp_path / "evaluation"
    with artifacts.create(path, "evaluation", settings={}) as draft:
        (path / "confusion.json").write_text(json.dumps({"labels": ["a", "b"], "matrix": [[3, 1], [0, 4]]}))
        (path / "report.html").write_text("<p>report</p>")
        draft.figures.update(student={"test": {"top1": 0.875}, "architecture": "vit"}, verdict={"passed": True})
    return dsl.Artifact(uri=str(path), metadata={"kind": "evaluation"})


def test_metrics_are_the_numbers_under_their_full_names(evaluation, tmp_path):
    metrics = dsl.Metrics(uri=str(tmp_path / "metrics"))
    task.show_metrics(evaluation, metrics)
    assert metrics.metadata == {"student.test.top1": 0.875, "verdict.passed": 1.0}
    assert json.loads((tmp_path / "metrics").read_text()) == metrics.metadata


def test_the_confusion_matrix_is_logged(evaluation, tmp_path):
    confusion = dsl.ClassificationMetrics(uri=str(tmp_path / "confusion"))
    task.show_confusion(evaluation, confusion)
    matrix = confusion.metadata["confusionMatrix"]
    assert [spec["displayName"] for spec in matrix["annotationSpecs"]] == ["a", "b"]
    assert [row["row"] for row in matrix["rows"]] == [[3, 1], [0, 4]]


def test_a_page_is_copied(evaluation, tmp_path):
    page = dsl.HTML(uri=str(tmp_path / "page"))
    task.show_page(evaluation, "report.html", page)
    assert (tmp_path / "page").read_text() == "<p>report</p>"


def test_a_page_that_a_job_wrote_comes_from_the_store(object_store, tmp_path):
    uri = f"minio://{object_store.bucket}/outputs"
    with artifacts.create(uri, "teacher_outputs", settings={}) as draft:
        (draft.path / "report.html").write_text("<p>recorded</p>")
    page = dsl.HTML(uri=str(tmp_path / "page"))
    task.show_page(dsl.Artifact(uri=uri), "report.html", page)
    assert (tmp_path / "page").read_text() == "<p>recorded</p>"


def test_an_error_becomes_one_message_in_the_file_that_somebody_reads(tmp_path, monkeypatch, capfd):
    monkeypatch.setenv(task.ERROR_FILE, str(tmp_path / "error.txt"))
    with pytest.raises(SystemExit) as ended, task.reporting("prepare"):
        raise DataError("no images")
    assert ended.value.code == EXIT_CODE
    assert (tmp_path / "error.txt").read_text() == "prepare: no images"
    assert capfd.readouterr().err == ""


def test_an_error_is_printed_where_nobody_waits_for_it(monkeypatch, capfd):
    monkeypatch.delenv(task.ERROR_FILE, raising=False)
    with pytest.raises(SystemExit), task.reporting("prepare"):
        raise DataError("prepare: no images")
    assert capfd.readouterr().err == "error: prepare: no images\n"


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (DataError("no images"), "error: prepare: no images"),
        (StorageAwayError("s3://bucket does not answer"), "for now: prepare: s3://bucket does not answer"),
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


def test_an_interruption_has_its_own_exit_code():
    with pytest.raises(SystemExit) as ended, task.reporting("prepare"):
        raise KeyboardInterrupt
    assert ended.value.code == INTERRUPTED_EXIT_CODE


def test_a_fault_of_ours_keeps_its_traceback():
    with pytest.raises(ZeroDivisionError), task.reporting("prepare"):
        _ = 1 / 0


def test_a_stage_runs_on_the_artifacts_paths_and_leaves_its_fingerprint(tmp_path):
    dataset = dsl.Dataset(uri=str(tmp_path / "dataset"))
    settings = json.dumps({"source": "digits", "image_size": 8, "encoding": "png"})
    task.run_stage("prepare", settings, inputs={}, outputs={"dataset": dataset})
    made = artifacts.read(tmp_path / "dataset", "dataset")
    assert dataset.metadata == {"kind": "dataset", "fingerprint": made.fingerprint}


def test_a_wrong_setting_ends_the_task(tmp_path, capfd):
    dataset = dsl.Dataset(uri=str(tmp_path / "dataset"))
    with pytest.raises(SystemExit):
        task.run_stage("prepare", '{"image_size": 1}', inputs={}, outputs={"dataset": dataset})
    assert "data.image_size must be >= 8, got 1" in capfd.readouterr().err


def tuned(tmp_path, section):
    """What the task tune tells, with that section."""
    training = Training(
        stage="tune",
        settings=section,
        inputs={},
        outputs={"tuning": dsl.Artifact(uri=str(tmp_path / "tuning"))},
        place=Place(),
        job=dsl.Artifact(uri=str(tmp_path / "job")),
    )
    return task.tune(training)


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
def test_without_tuning_the_distillation_is_handed_on_as_it_is_and_nothing_is_launched(tmp_path, overrides, asked):
    sections = configure(resolve("digits", overrides), Place())
    assert tuned(tmp_path, sections.tune) == (sections.distill, asked, "")
    assert list(tmp_path.iterdir()) == []


def test_without_a_recording_nothing_is_launched_and_its_place_is_empty(tmp_path):
    training = Training(
        stage="reinforce",
        settings="{}",
        inputs={},
        outputs={"teacher_outputs": dsl.Artifact(uri=str(tmp_path / "teacher_outputs"))},
        place=Place(),
        job=dsl.Artifact(uri=str(tmp_path / "job")),
    )
    assert task.reinforce(training, task.ONLINE, dsl.HTML(uri=str(tmp_path / "page"))) == ""
    assert list(tmp_path.iterdir()) == []
