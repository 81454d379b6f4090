"""`mlflow models serve` on a machine that has MLflow, uv and a package index, and nothing of ours."""

from __future__ import annotations

import base64
import importlib.metadata
import json
import os
import shutil
import subprocess
import sys
import urllib.error
import urllib.request
from pathlib import Path

import numpy as np
import pytest

from tests.mlflow_server import serving
from tests.trained_digits import png
from trainer.config import EvaluateSettings, ExportSettings, GateSettings, RegisterSettings, TrackingSettings, resolve
from trainer.io import artifacts
from trainer.report import tracking
from trainer.stages import evaluate, export, register

ROOT = Path(__file__).parents[3]
UV = shutil.which("uv", path=f"{ROOT / '.uv/bin'}:{os.environ['PATH']}")

pytestmark = [
    pytest.mark.long,
    pytest.mark.skipif(UV is None, reason="needs uv; `make setup` installs it"),
    # MLflow on SQLAlchemy 2.1
    pytest.mark.filterwarnings("ignore:The ``noload`` loader strategy is deprecated"),
]


@pytest.fixture
def registered(trained_digits, tagged_dataset, monkeypatch, tmp_path):
    """URI of an exported student with attributes, in a registry of its own."""
    for name in (tracking.RUN_ID, tracking.EXPERIMENT_ID, tracking.EXPERIMENT_NAME, tracking.URI):
        monkeypatch.delenv(name, raising=False)
    for name, value in tracking.environment(TrackingSettings(), directory=tmp_path / "store", run="the run").items():
        monkeypatch.setenv(name, value)
    given = {"dataset": tagged_dataset, "teacher": trained_digits.teacher, "student": trained_digits.student}
    for name, kind in (("pretrain_evidence", "evidence"), ("distill_evidence", "evidence"), ("report", "report")):
        with artifacts.create(tmp_path / name, kind, settings={}) as draft:
            (draft.path / "report.html").write_text("<p>where the time went</p>")
        given[name] = tmp_path / name
    models_and_data = {name: given[name] for name in ("dataset", "teacher", "student")}
    settings = EvaluateSettings(latency_runs=10, answer_risk=0.1, gate=GateSettings(max_accuracy_drop=1))
    given["evaluation"] = evaluate.run(settings, **models_and_data, evaluation=tmp_path / "evaluation").path
    exported = {name: given[name] for name in ("dataset", "student", "evaluation")}
    given["exported"] = export.run(ExportSettings(int8=False), **exported, exported=tmp_path / "exported").path
    resolved = resolve("digits").model_dump(mode="json")
    place = {"registration": tmp_path / "registration", "recipe": "digits", "resolved": resolved}
    register.run(RegisterSettings(model_name="empty"), **given, **place)
    return "models:/empty@champion"


@pytest.fixture
def machine(tmp_path):
    """The environment of processes on a machine with MLflow alone, in an empty folder."""
    assert UV
    home = tmp_path / "home"
    home.mkdir()
    ours = ("PYTHON", "TRAINER", "VIRTUAL_ENV", "COV", "MLFLOW_RUN", "MLFLOW_EXPERIMENT")
    kept = {name: value for name, value in os.environ.items() if not name.startswith(ours)}
    places = (home / "venv/bin", Path(UV).parent, Path(sys.base_prefix) / "bin", "/usr/bin", "/bin")
    environment = kept | {"HOME": str(home), "PATH": ":".join(map(str, places)), "UV_PYTHON_DOWNLOADS": "never"}
    mlflow = f"mlflow=={importlib.metadata.version('mlflow')}"
    subprocess.run([UV, "venv", "venv", "--python", sys.executable], cwd=home, env=environment, check=True)
    install = [UV, "pip", "install", "--python", "venv", mlflow]
    made = subprocess.run(install, cwd=home, env=environment, capture_output=True, text=True, check=False)
    if made.returncode and "error sending request" in made.stderr:
        pytest.skip(f"no package index: {made.stderr}")
    assert not made.returncode, made.stderr
    return environment


def post(address, **content):
    """Status and body of what the server answers."""
    headers = {"Content-Type": "application/json"}
    request = urllib.request.Request(f"{address}/invocations", json.dumps(content).encode(), headers)
    try:
        with urllib.request.urlopen(request, timeout=60) as answer:
            return answer.status, json.load(answer)
    except urllib.error.HTTPError as error:
        with error:
            return error.code, json.load(error)


def test_mlflow_serves_registered_student_where_nothing_else_is(registered, machine, trained_digits, tmp_path):
    import mlflow.pyfunc

    pictures = [png(image) for image in trained_digits.images[:9]]
    table = mlflow.pyfunc.load_model(registered).predict(np.array(pictures, dtype=object), params={"top_k": 3})
    columns = {"top_labels", "top_probabilities", "answer", "confidence", "value", "shape"}
    assert columns == set(table.columns)

    home = Path(machine["HOME"])
    with serving(
        home / "venv/bin/mlflow", registered, manager="uv", log=tmp_path / "log", folder=home, environment=machine
    ) as address:
        with urllib.request.urlopen(f"{address}/ping", timeout=60) as answer:
            assert answer.status == 200
        texts = [base64.b64encode(picture).decode() for picture in pictures]
        column = {"columns": ["image"], "data": [[text] for text in texts]}
        tensor = trained_digits.images[:9].permute(0, 2, 3, 1).tolist()
        for content in ({"dataframe_split": column}, {"inputs": texts}, {"inputs": tensor}):
            status, body = post(address, **content, params={"top_k": 3})
            assert status == 200
            answers = {name: [one[name] for one in body["predictions"]] for name in columns}
            for name in ("top_labels", "answer", "shape"):
                assert answers[name] == table[name].tolist()
            for name in ("top_probabilities", "confidence"):
                np.testing.assert_allclose(answers[name], table[name].tolist(), atol=1e-5)
        status, body = post(address, inputs=["no photo"])
        assert (status, body["message"][:18]) == (400, "image 0: no image:")

    (packages,) = home.glob(".mlflow/envs/*/lib/python*/site-packages")
    names = {path.name.partition("-")[0] for path in packages.iterdir()}
    assert {"mlflow", "onnxruntime"} <= names
    assert not [name for name in names if name.startswith(("torch", "nvidia", "cuda", "triton", "trainer", "vit_"))]
