"""The pipeline of one's own in docs/cluster.md, as it stands there: it compiles for a cluster, and runs on this machine."""

from __future__ import annotations

import contextlib
import os
import re
import runpy
import sys
from pathlib import Path

import pytest
import yaml

from tests.pipelines import local_runs
from tests.pipelines.local_runs import ROOT
from trainer.io import artifacts

LOCALLY = """
import warnings
from kfp import local
warnings.filterwarnings("ignore")
local.init(local.SubprocessRunner(use_venv=False), pipeline_root="made")
from two_students import two_students
two_students(pool="")
"""


def written(folder):
    """Write the page's pipeline into a folder, with fewer epochs than there."""
    (code,) = re.findall(r"```python\n(.*?)```", (ROOT / "docs/cluster.md").read_text(), re.DOTALL)
    assert len([line for line in code.splitlines() if line.strip()]) <= 20
    assert code.count('resolve_run("digits")') == 1
    short = "pretrain.mae.epochs=0 pretrain.finetune.epochs=1 distill.epochs=1 evaluate.latency_runs=10"
    (folder / "two_students.py").write_text(code.replace('resolve_run("digits")', f'resolve_run("digits", "{short}")'))


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A folder with the pipeline, compiled."""
    folder = tmp_path_factory.mktemp("own")
    written(folder)
    with contextlib.chdir(folder):
        runpy.run_path("two_students.py", run_name="__main__")
    return folder


def test_it_compiles_to_two_distillations_of_one_teacher(folder):
    specification, platform = yaml.safe_load_all((folder / "two_students.yaml").read_text())
    tasks = specification["root"]["dag"]["tasks"]
    assert {*tasks} == {"prepare", "pretrain", "distill", "evaluate", "distill-2", "evaluate-2"}
    for student in ("distill", "distill-2"):
        source = tasks[student]["inputs"]["parameters"]["teacher"]["taskOutputParameter"]
        assert source == {"producerTask": "pretrain", "outputParameterKey": "teacher_uri"}
    pods = platform["platforms"]["kubernetes"]["deploymentSpec"]["executors"]
    assert all(pod["securityContext"]["runAsNonRoot"] for pod in pods.values())


@pytest.mark.long
def test_it_trains_two_students_of_one_teacher(folder):
    (folder / "local_run.py").write_text(LOCALLY)
    paths = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])  # kfp starts `python3`
    ended = local_runs.run(
        [sys.executable, "local_run.py"],
        folder,
        PATH=paths,
        PYTHONWARNINGS="ignore",
        TRAINER_CHECKPOINTS=str(folder / "checkpoints"),
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
    (made,) = (folder / "made").iterdir()
    students = [artifacts.read(made / name / "student", "model") for name in ("distill", "distill-2")]
    assert students[0].settings["seed"] != students[1].settings["seed"]
    for name, student in zip(("evaluate", "evaluate-2"), students, strict=True):
        assert artifacts.read(made / name / "measurements", "evaluation").parents["student"] == student.fingerprint
