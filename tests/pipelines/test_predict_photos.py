"""Predicting a bucket on a cluster: what starts and what is refused. The files are those of tests/unit/predict/test_batch_prediction.py."""

import json

import pyarrow.parquet as pq
import pytest
from kfp import dsl, local
from mlflow.tracking import MlflowClient

from components import kfp_components
from pipelines import predict_photos, runs
from tests.stand_ins.pipelines_api import state
from tests.trained_digits import pixels, png, write_model


@pytest.mark.usefixtures("deployed")
def test_run_of_one_task_is_started_with_what_was_asked(api, capsys):
    places = ["--photos", "s3://bucket/photos", "--output", "s3://bucket/out", "--model", "s3://bucket/served"]
    assert predict_photos.main([*places, "--top", "3", "--image", "registry/image:1"]) == 0
    assert "run predict 20" in capsys.readouterr().out
    (run,) = api.store.runs.values()
    assert run.runtime_config.parameters == {
        "photos": "s3://bucket/photos",
        "output": "s3://bucket/out",
        "model": "s3://bucket/served",
        "top": 3,
        "force": False,
    }
    (executor,) = run.pipeline_spec["pipeline_spec"]["deploymentSpec"]["executors"].values()
    assert executor["container"]["image"] == "registry/image:1"
    (task,) = run.pipeline_spec["pipeline_spec"]["root"]["dag"]["tasks"].values()
    assert task["cachingOptions"] == {}
    assert run.pipeline_spec["platform_spec"]["platforms"]["kubernetes"], "secrets and the ConfigMap come from there"
    assert run.service_account == "vit-distillation"
    assert not run.description, "MLflow has no run of it"


@pytest.mark.usefixtures("deployed")
def test_following_shows_the_tasks_last_words(api, capsys):
    places = ["--photos", "s3://bucket/photos", "--output", "s3://bucket/out", "--model", "s3://bucket/served"]
    api.script = [state("FAILED", predict_photos="FAILED")]
    assert predict_photos.main(places) == 0
    name, message = "batch-prediction-x7k2p.root.predict-photos.executor(0)", "main: Error: error: no photo"
    api.workflow = {"status": {"nodes": {"1": {"name": name, "type": "Pod", "phase": "Failed", "message": message}}}}
    assert runs.main(["follow", *api.store.runs]) == 2
    said = capsys.readouterr()
    assert "predict-photos: failed\n" in said.out
    assert "\n  predict-photos failed: no photo\n" in said.err


@pytest.mark.usefixtures("deployed")
@pytest.mark.parametrize("option", ["photos", "output", "model"])
def test_a_folder_of_this_machine_is_refused(api, capsys, option):
    places = {"photos": "s3://bucket/photos", "output": "s3://bucket/out", option: "/tmp/here"}
    assert predict_photos.main([part for name, value in places.items() for part in (f"--{name}", value)]) == 2
    assert f"--{option} /tmp/here: a cluster's task cannot reach it" in capsys.readouterr().err
    assert not api.store.runs


@pytest.mark.usefixtures("deployed")
def test_an_alias_is_pinned_for_retries(api, mlflow_uri, monkeypatch):
    client = MlflowClient(mlflow_uri)
    client.create_registered_model("vit-student-digits")
    client.create_model_version("vit-student-digits", source="s3://bucket/model")
    client.set_registered_model_alias("vit-student-digits", "champion", "1")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", mlflow_uri)
    assert predict_photos.main(["--photos", "s3://bucket/photos", "--output", "s3://bucket/out"]) == 0
    (run,) = api.store.runs.values()
    assert run.runtime_config.parameters["model"] == "models:/vit-student-digits/1"


@pytest.mark.filterwarnings("ignore:You may be attemping to run a task")  # the environment here is that of the image
def test_task_writes_files_and_second_one_keeps_them(tmp_path, monkeypatch):
    photos, output = tmp_path / "photos", tmp_path / "out"
    photos.mkdir()
    write_model(tmp_path / "student", dim=16, depth=1, steps=1)
    for number, image in enumerate(pixels(range(3))):
        (photos / f"{number}.png").write_bytes(png(image))
    (photos / "broken.jpg").write_bytes(b"no image")
    monkeypatch.chdir(tmp_path)
    local.init(local.SubprocessRunner(use_venv=False), pipeline_root=str(tmp_path / "root"))
    given = {"photos": str(photos), "model": str(tmp_path / "student"), "output": str(output), "top": 2, "force": False}
    task = kfp_components.predict_photos(**given)
    assert isinstance(task, dsl.PipelineTask)
    assert (task.outputs["photos"], task.outputs["unreadable"]) == (4, 1)
    (file,) = output.glob("part-*.parquet")
    written = file.stat().st_mtime_ns
    assert len(pq.read_table(file)) == 4
    assert kfp_components.predict_photos.python_func(**given) == (4, 1)  # as the task calls it
    assert [*output.glob("part-*.parquet")] == [file]
    assert file.stat().st_mtime_ns == written
    assert json.loads((output / "_predictions.json").read_text())["photos"] == 4
