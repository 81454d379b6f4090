"""Secrets are planted in the environment of real runs, and then looked for in all that these leave behind and say."""

from __future__ import annotations

import base64
import gzip
import json
import os
import re
import subprocess
import sys
import urllib.parse
import zipfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from components.launch import pools
from components.launch.job_manifest import BACKENDS, Identity
from pipelines import deploy
from tests.faults.tracking_server import TrackingServer
from tests.stand_ins.object_store import ACCESS_KEY, SECRET_KEY
from tests.stand_ins.pipelines_api import PipelinesApi
from trainer import cli
from trainer.graph import JobSpec
from trainer.io.errors import CRASH_EXIT_CODE, EXIT_CODE

ROOT = Path(__file__).parents[2]
PLANTED = {
    name: f"planted-{name.lower().replace('_', '-')}-7Qe/w+2="
    for name in (
        "AWS_SESSION_TOKEN",
        "MLFLOW_TRACKING_PASSWORD",
        "MLFLOW_TRACKING_TOKEN",
        "HF_TOKEN",
        "HUGGING_FACE_HUB_TOKEN",
        "KFP_TOKEN",
        "KFP_COOKIES",
        "GITHUB_TOKEN",
        "DATABASE_PASSWORD",
    )
}
URI_PASSWORD = "planted-in-the-address"
SECRETS = {*PLANTED.values(), URI_PASSWORD, ACCESS_KEY, SECRET_KEY}


def disguises(secret: str) -> set[bytes]:
    """The ways in which a secret may stand somewhere."""
    plain = secret.encode()
    return {
        plain,
        json.dumps(secret).strip('"').encode(),
        urllib.parse.quote(secret, safe="").encode(),
        urllib.parse.quote_plus(secret).encode(),
        base64.b64encode(plain).rstrip(b"="),
        secret.encode("utf-16-le"),
    }


FORMS = {form: secret for secret in SECRETS for form in disguises(secret)}


def leaked(content: bytes) -> set[str]:
    return {secret for form, secret in FORMS.items() if form in content}


def contents(path: Path) -> Iterator[tuple[str, bytes]]:
    """A file, its name, and what is packed in it."""
    content = path.read_bytes()
    yield str(path), content + str(path).encode()
    if content.startswith(b"\x1f\x8b"):
        yield f"{path} (unpacked)", gzip.decompress(content)
    if zipfile.is_zipfile(path):
        with zipfile.ZipFile(path) as archive:
            for name in archive.namelist():
                yield f"{path}: {name}", archive.read(name)


def found_in(folder: Path) -> dict[str, set[str]]:
    """Where below a folder a secret stands."""
    files = [path for path in folder.rglob("*") if path.is_file()]
    assert files
    pairs = [pair for path in files for pair in contents(path)]
    return {name: found for name, content in pairs if (found := leaked(content))}


def test_a_secret_would_be_found(tmp_path):
    for number, form in enumerate(FORMS):
        with zipfile.ZipFile(tmp_path / f"{number}.zip", "w", zipfile.ZIP_DEFLATED) as archive:
            archive.writestr("inside", b"before " + form + b" after")
        (tmp_path / f"{number}.gz").write_bytes(gzip.compress(form))
        (tmp_path / f"{number}.db").write_bytes(b"\0" * 100 + form)
    assert len(found_in(tmp_path)) == 3 * len(FORMS)


@pytest.fixture
def planted(monkeypatch):
    for name, value in PLANTED.items():
        monkeypatch.setenv(name, value)


@pytest.mark.long
def test_a_run_leaves_no_secret_behind(object_store, planted, teacher, tmp_path):
    kept = {
        name: value for name, value in os.environ.items() if not name.startswith(("MLFLOW_TRACKING_URI", "TRAINER_"))
    }
    places = {name: str(tmp_path / name.lower()) for name in ("HOME", "TMPDIR", "XDG_CACHE_HOME", "TRAINER_CACHE")}
    for place in places.values():
        Path(place).mkdir()
    with TrackingServer(tmp_path / "server") as server, server.answering():
        ended = subprocess.run(
            [
                *(sys.executable, "-m", "trainer", "run", "digits", "--output", tmp_path / "run", "--set"),
                *("pretrain.mae.epochs=0", "pretrain.finetune.epochs=0", f"pretrain.weights={teacher}"),
                *("distill.epochs=1", "distill.checkpoint_every=5", "evaluate.latency_runs=10"),
            ],
            cwd=tmp_path,
            env=kept
            | places
            | {
                "PYTHONPATH": str(ROOT),
                "MLFLOW_TRACKING_URI": server.uri.replace("http://", f"http://me:{URI_PASSWORD}@"),
                "TRAINER_CHECKPOINTS": object_store.uri("checkpoints"),
                "TRAINER_DEVICE": "cpu",
                "MLFLOW_TRACKING_USERNAME": "me",
            },
            capture_output=True,
            timeout=500,
            check=False,
        )
    assert ended.returncode == 0, ended.stderr.decode()
    assert any(one.method == "PUT" and "/checkpoints/" in one.path for one in object_store.requests)
    assert b"me:***@127.0.0.1" in ended.stdout
    assert leaked(ended.stdout + ended.stderr) == set()
    assert found_in(tmp_path) == {}
    stored = b"".join(map(object_store.get, object_store.keys()))
    assert leaked(stored) == set()


@pytest.mark.parametrize(("status", "message"), [(403, "refuses"), (404, "nothing is there")])
def test_store_that_refuses_is_reported_without_its_keys(
    object_store, planted, capsys, caplog, tmp_path, status, message
):
    object_store.answer(status, path="data")
    places = {name: object_store.uri("data", name) for name in ("dataset", "teacher", "student", "evaluation")}
    arguments = [text for name, place in places.items() for text in (f"--{name}", place)]
    assert cli.main(["--debug", "stage", "evaluate", *arguments]) == EXIT_CODE
    said = capsys.readouterr()
    assert re.search(message, said.err)
    assert leaked((said.out + said.err + caplog.text).encode()) == set()


@pytest.mark.parametrize(
    "arguments",
    [
        ["--set", f"tracking.uri=http://me:{URI_PASSWORD}@127.0.0.1:9"],
        ["--set", f"data.source=imagefolder:s3://{ACCESS_KEY}:{SECRET_KEY}@bucket/photos"],
        ["--set", f"data.source=manifest:https://127.0.0.1:9/x.csv?token={URI_PASSWORD}"],
        [],
    ],
)
def test_address_with_password_is_refused_or_hidden(planted, capsys, monkeypatch, tmp_path, arguments):
    for name in ("MLFLOW_EXPERIMENT_NAME", "TRAINER_RUN", "TRAINER_RUN_ID", "TRAINER_DEVICE"):  # which a run sets
        monkeypatch.setenv(name, "")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"http://me:{URI_PASSWORD}@127.0.0.1:9")
    monkeypatch.chdir(tmp_path)
    assert cli.main(["--debug", "run", "digits", *arguments]) == (EXIT_CODE if arguments else CRASH_EXIT_CODE)
    said = capsys.readouterr()
    message = "holds a password or a token" if arguments else r"http://me:\*\*\*@127\.0\.0\.1:9"
    (error,) = [line for line in said.err.splitlines() if line.startswith("error: ")]
    assert re.search(message, error)
    assert leaked((said.out + error).encode()) == set()


@pytest.mark.parametrize("backend", sorted(BACKENDS))
def test_a_job_holds_no_secret(planted, monkeypatch, backend):
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", ACCESS_KEY)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", SECRET_KEY)
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://mlflow:5000")
    places = {"dataset": "s3://bucket/dataset", "teacher": "s3://bucket/teacher"}
    spec = JobSpec(stage="distill", settings={}, inputs=places, outputs={"student": "s3://bucket/student"})
    identity = Identity(run="run", task="distill")
    for pool in pools.load().values():
        plain = pool.model_copy(update={"retries": 0, "elastic_min_nodes": 0})  # a TrainJob cannot say more
        manifest = BACKENDS[backend].render(replace(spec, nodes=2 if pool.joins_nodes else 1), plain, identity)
        assert leaked(json.dumps(manifest).encode()) == set()
        assert "http://mlflow:5000" in json.dumps(manifest)


def test_a_pipeline_and_its_parameters_hold_no_secret(planted, capsys, monkeypatch):
    for name in ("KFP_COOKIES", "KFP_NAMESPACE", "NAMESPACE"):
        monkeypatch.delenv(name, raising=False)
    with PipelinesApi() as api:
        monkeypatch.setenv("KFP_HOST", api.host)
        assert deploy.main(["--run", "--set", "distill.epochs=2"]) == 0
        sent = [version.pipeline_spec for version in api.store.versions.values()]
        sent += [run.to_dict() for run in api.store.runs.values()]
    assert len(sent) == 2
    assert leaked(json.dumps(sent, default=str).encode()) == set()
    said = capsys.readouterr()
    assert leaked((said.out + said.err).encode()) == set()
