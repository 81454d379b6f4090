"""The graph of stages fits together, fits the settings, and fits the stages' own functions."""

import ast
import importlib.util
from collections import Counter
from dataclasses import replace
from itertools import takewhile
from pathlib import Path
from typing import get_args

import pytest

from trainer import config
from trainer.graph import DATASET, SCHEMA_VERSIONS, STAGES, TEACHER, Kind
from trainer.io.base_models import Section
from trainer.runner import local_run


def definition(name):
    """A stage's `run`, without importing what the stage needs."""
    source = Path(importlib.util.find_spec(f"trainer.stages.{name}").origin).read_text(encoding="utf-8")
    return next(node for node in ast.parse(source).body if isinstance(node, ast.FunctionDef) and node.name == "run")


@pytest.mark.parametrize("name", STAGES)
def test_stages_function_takes_inputs_and_outputs_of_graph(name):
    stage, run = STAGES[name], definition(name)
    keywords = {
        argument.arg: default for argument, default in zip(run.args.kwonlyargs, run.args.kw_defaults, strict=True)
    }
    beside = {"recipe", "resolved"} if stage.takes_recipe else {"launch", "in_turns"} if stage.launches else set()
    beside |= {"share"} if stage.shared else set()
    expected = {*stage.all_inputs, *stage.outputs} | beside
    if run.args.kwarg:  # it takes whatever the graph says
        assert keywords.keys() == {*stage.outputs} | beside
    else:
        assert keywords.keys() == expected
        optional = {key for key, default in keywords.items() if default is not None} - {"in_turns", "share"}
        assert optional == {*stage.optional_inputs}


def test_every_module_of_stage_is_in_graph():
    folder = Path(importlib.util.find_spec("trainer.stages").origin).parent
    assert {path.stem for path in folder.glob("*.py")} - {"__init__"} == {*STAGES}


def test_every_artifact_is_made_once_and_before_it_is_read():
    made = [spec for stage in STAGES.values() for spec in stage.makes.values()]
    for values in ([spec.name for spec in made], [spec.folder for spec in made]):
        assert [value for value, count in Counter(values).items() if count > 1] == []
    for stage in STAGES.values():
        before = list(takewhile(lambda one, stage=stage: one is not stage, STAGES.values()))
        there = [spec for one in before for spec in one.makes.values()]
        certain = [spec for one in before if not one.needed_if for spec in one.makes.values()]
        assert [spec.name for spec in stage.reads if spec not in certain] == []
        late = [spec.name for spec in stage.reads_if_made if spec not in there]
        assert late == (["teacher_outputs"] if stage.name == "tune" else [])
        assert {*stage.after, *filter(None, [stage.decided_by])} <= {one.name for one in before}


def test_every_kind_has_a_version():
    assert {*SCHEMA_VERSIONS} == {*get_args(Kind)}
    used = {kind for stage in STAGES.values() for kind in (*stage.all_inputs.values(), *stage.outputs.values())}
    assert used == {*SCHEMA_VERSIONS} - {"checkpoint"}


@pytest.mark.parametrize("name", STAGES)
def test_a_stages_section_and_condition_are_settings(name):
    settings = config.Settings()
    assert isinstance(getattr(settings, STAGES[name].section), Section)
    assert STAGES[name].is_needed(settings) is (not STAGES[name].needed_if or name == "export")


@pytest.mark.parametrize(
    ("overrides", "optional"),
    [
        ("", {"export"}),
        ("export.enabled=false", set()),
        ("warm_up.enabled=true", {"export", "warm_up"}),
        ("distill.teacher=recorded", {"export", "reinforce"}),
        ("tune.enabled=true", {"export", "tune"}),
        ("run.budget_hours=3", {"export", "tune"}),
    ],
)
def test_a_run_has_the_stages_it_needs(overrides, optional):
    settings = config.resolve("digits", overrides)
    always = {name for name, stage in STAGES.items() if not stage.needed_if}
    assert {name for name, stage in STAGES.items() if stage.is_needed(settings)} == always | optional


def test_artifacts_of_a_local_run_have_folders():
    plain, all_of_it = (
        config.resolve("digits"),
        config.resolve("digits", "warm_up.enabled=true distill.teacher=recorded"),
    )
    assert local_run.folders(STAGES["distill"], plain) == {
        "dataset": "dataset",
        "teacher": "teacher",
        "student": "student",
        "evidence": "distill-evidence",
    }
    assert local_run.folders(STAGES["distill"], all_of_it)["teacher_outputs"] == "teacher-outputs"
    assert local_run.folders(STAGES["warm_up"], all_of_it) == {"dataset": "dataset", "warmed": "warm-up"}
    given = local_run.folders(STAGES["register"], all_of_it)
    assert given.keys() == {*STAGES["register"].all_inputs, "registration"} - {"tuning", "search"}
    assert "teacher_outputs" not in local_run.folders(STAGES["tune"], all_of_it), (
        "tune decides whether they are recorded"
    )


def test_stage_that_lacks_input_in_graph_is_found(monkeypatch):
    """That the tests above can fail."""
    monkeypatch.setitem(STAGES, "profile", replace(STAGES["profile"], reads=(DATASET, TEACHER)))
    with pytest.raises(AssertionError):
        test_stages_function_takes_inputs_and_outputs_of_graph("profile")
