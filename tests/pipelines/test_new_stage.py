"""Adding a stage takes three edits: its own file, its entry in the graph, and its test. All else follows."""

from __future__ import annotations

import json
import shutil
import sys

import pytest
import yaml

from tests.pipelines import local_runs
from tests.pipelines.local_runs import ROOT

STAGE = """
from pathlib import Path

from trainer.io import artifacts


def run(settings, *, dataset, student, inspection):
    parents = {"student": artifacts.manifest(student, "model").fingerprint}
    with artifacts.create(inspection, "inspection", settings=settings.model_dump(mode="json"), parents=parents) as draft:
        (draft.path / "inspection.json").write_text("{}")
"""
EDITS = {
    "trainer/graph.py": {
        '    "registration",\n': '    "registration",\n    "inspection",\n',
        "\nSTAGES: ": '\nINSPECTION = ArtifactSpec(name="inspection", kind="inspection")\n\nSTAGES: ',
        '        Stage(\n            name="profile",\n': """        Stage(
            name="inspect",
            title="Inspect",
            summary="look at the student",
            section="evaluate",
            reads=(DATASET, STUDENT),
            makes={"inspection": INSPECTION},
        ),
        Stage(
            name="profile",
""",
        "TUNING, SEARCH, WARMED)": "TUNING, SEARCH, WARMED, INSPECTION)",
    },
}
"""File -> what is replaced in it, by what."""


@pytest.fixture(scope="module")
def copy(tmp_path_factory):
    """A copy of the packages with a stage more, between distill and profile."""
    folder = tmp_path_factory.mktemp("copy")
    for package in ("trainer", "components", "pipelines", "docs"):
        shutil.copytree(ROOT / package, folder / package, ignore=shutil.ignore_patterns("__pycache__", "pictures"))
    for name, edits in EDITS.items():
        text = (folder / name).read_text()
        for old, new in edits.items():
            assert text.count(old) == 1, (name, old)
            text = text.replace(old, new)
        (folder / name).write_text(text)
    (folder / "trainer/stages/inspect.py").write_text(STAGE)
    return folder


COMMANDS = """
import runpy, sys
from components import sections
from components.launching import Placement
print(sections.configure(sections.resolve("digits"), Placement()).inspect, flush=True)
for start, *words in (["pipelines.compile"], ["docs/generate.py"], ["trainer", "stage", "inspect", "--help"]):
    sys.argv = [start, *words]
    try:
        (runpy.run_path if start.endswith(".py") else runpy.run_module)(start, run_name="__main__")
    except SystemExit as end:
        assert not end.code, (start, end.code)
"""


def run(copy, *words, cwd=None):
    ended = local_runs.run([sys.executable, *words], cwd or copy, PYTHONPATH=str(copy), PYTHONSAFEPATH="1")
    assert ended.returncode == 0, ended.stderr
    return ended.stdout


@pytest.fixture(scope="module")
def said(copy):
    """What the configuration of the stage and its help are, in a process that also compiles the pipeline and makes the pages."""
    return run(copy, "-c", COMMANDS)


def test_the_pipeline_has_the_new_task(copy, said):
    compiled = next(iter(yaml.safe_load_all((copy / "pipelines/compiled/distillation.yaml").read_text())))
    tasks = compiled["components"]["comp-exit-handler-1"]["dag"]["tasks"]
    assert tasks["inspect"]["taskInfo"]["name"] == "Inspect"
    assert tasks["inspect"]["cachingOptions"] == {"enableCache": True}

    def source(task, name):
        output = tasks[task]["inputs"]["parameters"][name]["taskOutputParameter"]
        return output["producerTask"], output["outputParameterKey"]

    assert source("inspect", "settings") == ("configure", "inspect")
    assert source("inspect", "dataset") == ("prepare", "dataset_uri")
    assert source("inspect", "student") == ("distill", "student_uri")
    assert source("register", "inspection") == ("inspect", "inspection_uri")


def test_configure_pages_and_commands_know_the_stage(copy, said):
    section, *_ = (line for line in said.splitlines() if line.startswith("{"))
    assert "latency_runs" in json.loads(section)
    page = (copy / "docs/stages.md").read_text()
    (row,) = (
        line for line in page.splitlines() if "[inspect](configuration.md#evaluate) | Look at the student. |" in line
    )
    assert "| `inspection` |" in row
    assert "`search`, `warmed` (warm_up), `inspection`" in page
    assert "Look at the student." in said
    assert "--dataset DIR" in said
    assert "output: the inspection directory to write" in said


@pytest.mark.long
def test_a_local_run_runs_keeps_and_bills_it(copy, tmp_path):
    short = "pretrain.mae.epochs=0 pretrain.finetune.epochs=1 distill.epochs=1 evaluate.latency_runs=10 tracking.enabled=false"
    command = ["-m", "trainer", "run", "digits", "--processes", "1", "--output", str(tmp_path / "run"), "--set"]
    shown = run(copy, *command, *short.split(), cwd=tmp_path)
    assert (tmp_path / "run/inspection/inspection.json").exists()
    summary = json.loads((tmp_path / "run/summary.json").read_text())
    assert list(summary["stages"])[3:5] == ["inspect", "profile"]
    assert "inspect" in [stage["stage"] for stage in summary["bill"]["stages"]]
    assert "\ninspect " in shown
