"""Predicting a bucket on a cluster: what starts and what is refused. The files are those of tests/unit/predict/test_batch_prediction.py."""

import json

import pyarrow.parquet as pq
import pytest
from kfp import dsl, local
from kfp_server_api import models
from mlflow.tracking import MlflowClient

from components import kfp_components
from pipelines import predict_photos, runs
from tests.stand_ins.pipelines_api import state
from tests.trained_digits import pixels, png, write_model

PLACES = ["--photos", "s3://bucket/photos", "--output", "s3://bucket/out", "--model", "s3://bucket/served"]


def tasks_of(run):
    """Return the tasks of a run's loop."""
    specification = run.pipeline_spec["pipeline_spec"]
    (loop,) = specification["root"]["dag"]["tasks"].values()
    return specification["components"][loop["componentRef"]["name"]]["dag"]["tasks"].values()


@pytest.mark.usefixtures("deployed")
def test_run_of_one_task_is_started_with_what_was_asked(api, capsys):
    assert predict_photos.main([*PLACES, "--top", "3", "--image", "registry/image:1"]) == 0
    assert "run predict 20" in capsys.readouterr().out
    (run,) = api.store.runs.values()
    assert run.runtime_config.parameters == {
        "photos": "s3://bucket/photos",
        "output": "s3://bucket/out",
        "model": "s3://bucket/served",
        "top": 3,
        "force": False,
        "shares": ["0/1"],
    }
    (executor,) = run.pipeline_spec["pipeline_spec"]["deploymentSpec"]["executors"].values()
    assert executor["container"]["image"] == "registry/image:1"
    (task,) = tasks_of(run)
    assert task["cachingOptions"] == {}
    assert run.pipeline_spec["platform_spec"]["platforms"]["kubernetes"], "secrets and the ConfigMap come from there"
    assert run.service_account == "vit-distillation"
    assert not run.description, "MLflow has no run of it"


@pytest.mark.usefixtures("deployed")
def test_several_pods_of_a_pool_share_the_photos(api, tmp_path, monkeypatch, capsys):
    file = tmp_path / "pools.toml"
    label, taint = "example.com/kind", "example.com/photos"
    file.write_text(f"""
        [pools.many]
        device = "cpu"
        processes_per_node = 1
        resources = {{ cpu = 7, memory = "13Gi" }}
        pod.spec.nodeSelector = {{ "{label}" = "cores" }}
        pod.spec.tolerations = [{{ key = "{taint}", operator = "Exists", effect = "NoSchedule" }}]
        [pools.gpus]
        device = "cuda"
        processes_per_node = 1
        resources = {{ cpu = 7, memory = "13Gi", "nvidia.com/gpu" = 1 }}
    """)
    monkeypatch.setenv("TRAINER_POOLS", str(file))
    assert predict_photos.main([*PLACES, "--pool", "many", "--nodes", "3"]) == 0
    (run,) = api.store.runs.values()
    assert run.runtime_config.parameters["shares"] == ["0/3", "1/3", "2/3"]
    (executor,) = run.pipeline_spec["pipeline_spec"]["deploymentSpec"]["executors"].values()
    resources = executor["container"]["resources"]
    assert resources["resourceCpuRequest"] == resources["resourceCpuLimit"] == "7"
    assert resources["resourceMemoryRequest"] == resources["resourceMemoryLimit"] == "13Gi"
    platform = run.pipeline_spec["platform_spec"]["platforms"]["kubernetes"]["deploymentSpec"]["executors"]
    (pod,) = platform.values()
    assert pod["nodeSelector"] == {"labels": {label: "cores"}}
    assert pod["tolerations"] == [{"key": taint, "operator": "Exists", "effect": "NoSchedule"}]
    assert predict_photos.main([*PLACES, "--pool", "gpus"]) == 2
    assert "--pool gpus: its accelerators would stand idle" in capsys.readouterr().err
    assert predict_photos.main([*PLACES, "--pool", "man"]) == 2
    assert "unknown pool 'man'; did you mean many?" in capsys.readouterr().err
    assert len(api.store.runs) == 1


@pytest.mark.usefixtures("deployed")
def test_following_counts_the_tasks_of_a_loop(api, capsys):
    def step(run, *states):
        details = [models.V2beta1PipelineTaskDetail(display_name="predict-photos", state=one) for one in states]
        return state(run) | {"run_details": models.V2beta1RunDetails(task_details=details)}

    api.script = [step("RUNNING", "RUNNING", "PENDING", "RUNNING"), step("SUCCEEDED", *["SUCCEEDED"] * 3)]
    assert predict_photos.main([*PLACES, "--nodes", "3", "--wait"]) == 0
    said = capsys.readouterr().out
    assert "predict-photos: 1 pending, 2 running\n" in said
    assert "predict-photos: succeeded\n" in said
    api.script = [step("FAILED", "SUCCEEDED", "FAILED", "SUCCEEDED")]
    assert predict_photos.main([*PLACES, "--nodes", "3", "--wait"]) == 2
    assert "predict-photos failed" in capsys.readouterr().err


@pytest.mark.usefixtures("deployed")
def test_following_shows_the_tasks_last_words(api, capsys):
    api.script = [state("FAILED", predict_photos="FAILED")]
    assert predict_photos.main(PLACES) == 0
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
