"""Deploying a student, as far as it goes without a cluster; tests/cluster/test_serving.py goes on."""

import functools
import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from pipelines import deploy_student
from tests.pipelines.local_runs import ROOT


@pytest.fixture
def registry(mlflow_uri, monkeypatch):
    """A registry whose version 1 is the champion and passed its gate, and whose version 2 is the challenger and did not."""
    from mlflow.tracking import MlflowClient

    client = MlflowClient(mlflow_uri)
    client.create_registered_model("vit-student-digits")
    for alias, verdict in (("champion", "passed"), ("challenger", "not passed")):
        version = client.create_model_version(
            "vit-student-digits", source="s3://bucket/model", tags={"verdict": verdict}
        )
        client.set_registered_model_alias("vit-student-digits", alias, version.version)
    monkeypatch.setenv("MLFLOW_TRACKING_URI", mlflow_uri)


@pytest.fixture
def command(command):
    """Run the command; gives exit code, output and errors."""
    return functools.partial(command, deploy_student.main)


def arguments(output):
    """Of the server in what was printed."""
    (deployment,) = [one for one in yaml.safe_load_all(output) if one["kind"] == "Deployment"]
    return deployment["spec"]["template"]["spec"]["containers"][0]["args"]


@pytest.mark.usefixtures("registry")
def test_alias_is_pinned_to_what_it_names_now(command):
    code, output, _ = command("--dry-run")
    # A place in the registry is taken as it is.
    assert code == 0
    assert arguments(output)[0] == "models:/vit-student-digits/1"
    (service,) = [one for one in yaml.safe_load_all(output) if one["kind"] == "Service"]
    assert service["metadata"]["name"] == "vit-student-digits", "students of two recipes stand side by side"


@pytest.mark.usefixtures("registry")
def test_each_recipe_has_students_of_its_own(command):
    code, _, errors = command("--dry-run", "--recipe", "grocery")
    assert code == 2
    assert "models:/vit-student-grocery@champion" in errors
    code, _, errors = command("--dry-run", "--recipe", "my_photos.toml")
    assert code == 2
    assert "--name 'vit-student-my_photos': becomes part of names in Kubernetes; give --name at most 30" in errors


@pytest.mark.usefixtures("registry")
def test_a_version_that_failed_its_gate_needs_force(command):
    code, output, errors = command("--dry-run", "--alias", "challenger")
    assert (code, output) == (2, "")
    assert (
        "vit-student-digits@challenger is models:/vit-student-digits/2, which did not pass its gate; move the alias, or take it all the "
        "same (--force; FORCE=1 of make)" in errors
    )
    code, output, _ = command("--dry-run", "--alias", "challenger", "--force")
    assert code == 0
    assert arguments(output)[0] == "models:/vit-student-digits/2"
    assert arguments(output)[-1] == "--force"


@pytest.mark.usefixtures("registry")
def test_alias_that_is_on_no_version_is_refused(command):
    code, output, errors = command("--alias", "canary")
    assert (code, output) == (2, "")
    assert "models:/vit-student-digits@canary" in errors
    assert "has no such model" in errors


def test_without_address_of_mlflow_next_move_is_said(command, monkeypatch):
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    code, _, errors = command("--dry-run")
    assert code == 2
    assert "MLFLOW_TRACKING_URI is not set" in errors
    assert "port-forward service/mlflow 5000" in errors


def test_an_export_in_a_store_needs_no_registry(command, monkeypatch):
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    code, output, _ = command("--dry-run", "--model", "s3://bucket/served")
    assert code == 0
    assert arguments(output)[0] == "s3://bucket/served"
    code, output, _ = command("--dry-run", "--model", "s3://bucket/served", "--serve", "--log - --log-share 0.1")
    assert arguments(output)[-4:] == ["--log", "-", "--log-share", "0.1"]


def test_make_hands_on_single_option_of_server():
    """As a word of its own argparse would take it for one of this command."""
    words = ["make", "--dry-run", "deploy-student", "SERVE=--drain=30"]
    shown = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    assert '--serve="--drain=30"' in shown


@pytest.mark.parametrize("option", ["--name", "--alias"])
@pytest.mark.parametrize("value", ["", "Champion", "-a", "a-", "a_b", "a" * 31])
def test_what_cannot_be_name_in_kubernetes_is_refused(command, option, value):
    code, _, errors = command("--model", "s3://bucket/served", f"{option}={value}")
    assert code == 2
    assert f"{option} {value!r}: becomes part of names" in errors


def test_a_cluster_that_does_not_answer_is_named(command, tmp_path, monkeypatch):
    config = {
        "apiVersion": "v1",
        "kind": "Config",
        "clusters": [{"name": "gone", "cluster": {"server": "https://127.0.0.1:1"}}],
        "contexts": [{"name": "gone", "context": {"cluster": "gone", "user": "nobody"}}],
        "users": [{"name": "nobody", "user": {"token": "none"}}],
        "current-context": "gone",
    }
    (tmp_path / "config").write_text(yaml.safe_dump(config))
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "config"))
    code, _, errors = command("--model", "s3://bucket/served")
    assert code == 2
    assert errors.startswith("error: kubectl get: The connection to the server 127.0.0.1:1 was refused")
    code, _, errors = command("--context", "other", "--remove")
    assert code == 2
    assert 'error: kubectl delete: error: context "other" does not exist' in errors


def test_name_and_alias_must_fit_together(command):
    code, _, errors = command("--model", "s3://bucket/served", "--name", "a" * 30, "--alias", "b" * 30)
    assert code == 2
    assert "too long together" in errors


@pytest.mark.parametrize(
    ("option", "message"),
    [
        ("--model=file:///exports/1", "--model file:///exports/1: pods cannot reach it; give a URI in a store"),
        ("--serve=--log 'here", '--serve "--log \'here": No closing quotation; close the quotation'),
    ],
)
def test_what_no_pod_could_serve_is_refused_before_anything_is_sent(command, option, message):
    code, output, errors = command("--dry-run", "--model", "s3://bucket/served", option)
    assert (code, output) == (2, "")
    assert errors.startswith(f"error: {message}")


@pytest.fixture
def played(monkeypatch, tmp_path):
    """A cluster that takes everything; gives the calls to kubectl, and what was applied."""
    tool, calls, applied = (tmp_path / name for name in ("kubectl", "calls", "applied"))
    real = shutil.which("kubectl", path=Path(sys.executable).parent)
    cases = f'kustomize*) exec {real} "$@";; *" apply "*) cat >{applied};;'
    tool.write_text(f'#!/bin/sh\necho "$@" >>{calls}\ncase "$*" in {cases} esac\n')
    tool.chmod(0o755)
    monkeypatch.setattr(deploy_student.shutil, "which", lambda _tool, path=None: str(tool))
    return lambda: (calls.read_text().splitlines()[1:], json.loads(applied.read_text())["items"])


def test_autoscaler_is_gone_before_number_of_pods_is_set(command, played):
    code, output, _ = command("--model", "s3://bucket/served", "--replicas", "1")
    assert code == 0
    assert "s3://bucket/served answers at http://vit-student.kubeflow.svc/predict" in output
    calls, _ = played()
    assert [call.split()[1] for call in calls] == ["delete", "apply", "rollout"]


@pytest.mark.parametrize(("timeout", "deadline"), [(600, 600), (20, 300)])
def test_kubernetes_gives_up_no_sooner_than_the_command(command, played, timeout, deadline):
    assert command("--model", "s3://bucket/served", "--timeout", str(timeout))[0] == 0
    calls, objects = played()
    (deployment,) = [one for one in objects if one["kind"] == "Deployment"]
    assert deployment["spec"]["progressDeadlineSeconds"] == deadline
    (server,) = deployment["spec"]["template"]["spec"]["containers"]
    probe = server["startupProbe"]
    assert probe["failureThreshold"] * probe["periodSeconds"] == max(timeout, 180), "the kubelet waits as long"
    assert calls[-1].endswith(f"--timeout={timeout}s")


def test_without_kubectl_the_next_move_is_said(command, monkeypatch):
    monkeypatch.setattr(deploy_student.shutil, "which", lambda _tool, path=None: None)
    code, _, errors = command("--model", "s3://bucket/served", "--dry-run")
    assert code == 2
    assert "kubectl is not installed; run 'make setup'" in errors
