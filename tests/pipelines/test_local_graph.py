"""The compiled pipeline, every task of it, as `kfp.local` runs it: without Docker, and without a change of kfp."""

from __future__ import annotations

import json
import sys

from pipelines.compile import COMPILED
from tests.pipelines import local_runs
from tests.pipelines.local_runs import SMALL
from trainer.io import artifacts

PROGRAM = """
import sys, warnings
from kfp import components, local
warnings.filterwarnings("ignore", category=UserWarning)
warnings.filterwarnings("ignore", category=RuntimeWarning)
local.init(local.SubprocessRunner(use_venv=False), pipeline_root="made")
compiled, overrides, sys.executable = sys.argv[1:]  # kfp starts each task by this interpreter
components.load_component_from_file(compiled)(recipe="digits", overrides=overrides, pool="", processes_per_node=1)
"""


def test_the_compiled_graph_makes_a_student(mlflow_uri, tmp_path):
    overrides = f"{SMALL} pretrain.mae.epochs=0 export.enabled=false"
    with local_runs.forking_python() as python:
        ended = local_runs.run(
            [sys.executable, "-c", PROGRAM, str(COMPILED), overrides, python],
            tmp_path,
            MLFLOW_TRACKING_URI=mlflow_uri,
            TRAINER_RUN="graph",
            TRAINER_CHECKPOINTS=str(tmp_path / "checkpoints"),
            PYTHONWARNINGS="ignore",
        )
    assert ended.returncode == 0, ended.stdout + ended.stderr
    (tasks,) = (tmp_path / "made").iterdir()
    student = artifacts.read(tasks / "distill" / "student", "model")
    registration = artifacts.read(tasks / "register" / "registration", "registration")
    assert registration.parents["student"] == student.fingerprint
    summary = json.loads((registration.path / "summary.json").read_text())
    assert list(summary["stages"]) == ["prepare", "pretrain", "distill", "profile", "evaluate", "register"]
    assert summary["mlflow"]["model_version"] == "1"
