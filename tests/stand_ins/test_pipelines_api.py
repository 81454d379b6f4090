"""The stand-in for the Kubeflow Pipelines API, against the client that everybody uses."""

import kfp
import kfp_server_api as models
import pytest
from kfp import dsl

from tests.stand_ins.pipelines_api import PipelinesApi, state


@dsl.component(base_image="python:3.11", install_kfp_package=False)
def double(number: int) -> int:
    return 2 * number


@dsl.pipeline(name="doubling")
def doubling(number: int, often: bool = False) -> None:
    double(number=number)


@pytest.fixture
def api():
    with PipelinesApi() as server:
        yield server


@pytest.fixture
def client(api, monkeypatch, tmp_path):
    monkeypatch.setattr(kfp.Client, "_LOCAL_KFP_CONTEXT", str(tmp_path / "context.json"))
    with pytest.warns(FutureWarning, match="only works with"):
        client = kfp.Client(api.host)
    yield client
    client._run_api.api_client.rest_client.pool_manager.clear()


@pytest.fixture
def version(client, tmp_path):
    package = str(tmp_path / "doubling.yaml")
    kfp.compiler.Compiler().compile(doubling, package)
    pipeline = client.pipelines.pipeline_service_create_pipeline({"name": "doubling", "display_name": "doubling"})
    return client.upload_pipeline_version(package, "first", pipeline_id=pipeline.pipeline_id)


def refused(call, *arguments, **named):
    with pytest.raises(models.ApiException) as caught:
        call(*arguments, **named)
    return caught.value.status, caught.value.body


def test_kfps_own_client_uploads_runs_and_waits(api, client, version):
    api.script = [state("RUNNING", double="RUNNING"), state("FAILED", double="FAILED")]
    assert client.get_pipeline_id("doubling") == version.pipeline_id
    experiment = client.create_experiment("numbers")
    assert client.create_experiment("numbers").experiment_id == experiment.experiment_id
    run = client.run_pipeline(
        experiment.experiment_id, "first", pipeline_id=version.pipeline_id, version_id=version.pipeline_version_id,
        params={"number": 3},
    )  # fmt: skip
    assert run.runtime_config.parameters == {"number": 3}
    ended = client.wait_for_run_completion(run.run_id, timeout=10, sleep_duration=0)
    assert ended.state == "FAILED"
    (task,) = [task for task in ended.run_details.task_details if task.display_name == "double"]
    assert task.state == "FAILED"
    assert refused(client.terminate_run, run.run_id)[0] == 400


@pytest.mark.parametrize(
    ("parameters", "message"),
    [
        ({}, "parameter number is not optional"),
        ({"number": 1, "color": "red"}, "not required by pipeline: color"),
        ({"number": "1"}, "parameter number is not of its type"),
        ({"number": True}, "parameter number is not of its type"),
        ({"number": 1, "often": 1}, "parameter often is not of its type"),
    ],
)
def test_parameters_must_be_the_pipelines(client, version, parameters, message):
    experiment = client.create_experiment("numbers").experiment_id
    given = {"pipeline_id": version.pipeline_id, "version_id": version.pipeline_version_id, "params": parameters}
    for start, further in (
        (client.run_pipeline, {}),
        (client.create_recurring_run, {"cron_expression": "0 0 3 * * *"}),
    ):
        status, body = refused(start, experiment, "first", **given, **further)
        assert status == 400
        assert message in body


@pytest.mark.parametrize(
    "body", [{"name": "numbers"}, {"display_name": 1}, {"display_name": "a", "storage_state": "LOST"}]
)
def test_bodies_must_be_of_the_models(client, body):
    status, message = refused(client.experiments.experiment_service_create_experiment, body)
    assert status == 400
    assert "proto: " in message


def test_names_are_taken_once_and_full_pipelines_stay(client, version, tmp_path):
    package = str(tmp_path / "doubling.yaml")
    assert refused(client.upload_pipeline_version, package, "first", pipeline_id=version.pipeline_id)[0] == 409
    assert refused(client.pipelines.pipeline_service_create_pipeline, {"name": "doubling"})[0] == 409
    assert refused(client.delete_pipeline, version.pipeline_id)[0] == 400
    client.delete_pipeline_version(version.pipeline_id, version.pipeline_version_id)
    client.delete_pipeline(version.pipeline_id)
    assert refused(client.pipelines.pipeline_service_get_pipeline_by_name, "doubling")[0] == 404
