"""Our patches of Kubeflow Pipelines' own services, against what its manifests and Argo's source say."""

from __future__ import annotations

import re

import pytest
import yaml

from components import task
from tests.manifests.conftest import MANIFESTS
from tests.pipelines.test_workflow import DEFAULTS
from trainer.io.errors import DataError, StorageAwayError


def patch(name):
    return yaml.safe_load((MANIFESTS / "kfp" / name).read_text())


@pytest.fixture
def defaults():
    return yaml.safe_load(patch("workflow-controller-configmap.yaml")["data"]["workflowDefaults"])


@pytest.fixture
def tries_again(defaults):
    """Whether Argo tries a node again after its last try ended with a message."""
    expression = defaults["spec"]["templateDefaults"]["retryStrategy"]["expression"]
    parts = re.fullmatch(r"lastRetry\.message != '' && !\(lastRetry\.message contains '(.*)'\)", expression)
    return lambda message: message != "" and parts[1] not in message


def argos(termination_message):
    """What Argo 4.0 says of a pod whose task has failed: `inferFailedReason` in its workflow/controller/operator.go."""
    return f"main: Error (exit code 1): {termination_message}" if termination_message else "main: Error (exit code 1)"


def test_only_the_retries_differ_from_kfps_own(defaults):
    theirs = yaml.safe_load(DEFAULTS.read_text())
    assert defaults["spec"]["ttlStrategy"] == theirs["spec"]["ttlStrategy"]
    ours = defaults["spec"]["templateDefaults"]["retryStrategy"]
    assert ours.pop("expression")
    assert ours == theirs["spec"]["templateDefaults"]["retryStrategy"] | {"retryPolicy": "Always"}


def test_a_task_asks_for_some_disk():
    container = yaml.safe_load(patch("workflow-controller-configmap.yaml")["data"]["mainContainer"])
    assert container == {"resources": {"requests": {"ephemeral-storage": "4Gi"}}}


@pytest.mark.parametrize("error", [DataError("no images"), StorageAwayError("the store does not answer")])
def test_task_is_tried_again_unless_its_error_would_come_again(monkeypatch, tmp_path, tries_again, error):
    monkeypatch.setenv("TRAINER_TERMINATION_LOG", str(tmp_path / "log"))
    with pytest.raises(SystemExit), task.reporting("prepare"):
        raise error
    assert tries_again(argos((tmp_path / "log").read_text())) == error.is_transient


@pytest.mark.parametrize(
    "message",
    [
        argos(""),  # a crash, whose traceback is in the log
        "main: OOMKilled (exit code 137)",
        "The node was low on resource: memory.",
        "pod deleted",
    ],
)
def test_a_lost_pod_is_tried_again(tries_again, message):
    assert tries_again(message)


def test_kfp_is_set_up(tries_again):
    (container,) = patch("api-server.yaml")["spec"]["template"]["spec"]["containers"]
    assert container == {"name": "ml-pipeline-api-server", "env": [{"name": "PLUGINS", "value": ""}]}
    # A run of ten small tasks waits for little else.
    (container,) = patch("workflow-controller.yaml")["spec"]["template"]["spec"]["containers"]
    variables = {one["name"]: one["value"] for one in container["env"]}
    assert container["name"] == "workflow-controller"
    assert variables["DEFAULT_REQUEUE_TIME"] == "100ms"
    # KFP records no task of a Workflow that Argo has compressed; etcd takes 1.5 MiB.
    assert 2**20 < int(variables["MAX_WORKFLOW_SIZE"]) < 1.5 * 2**20
    # A graph is not tried again because a task in it failed.
    assert not tries_again("")
