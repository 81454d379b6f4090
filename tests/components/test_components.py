"""Every component is thin, runs on the one image, and fits its stage."""

from __future__ import annotations

import ast
import dataclasses
import importlib
import inspect
from pathlib import Path

import pytest

import components
from components import image
from components.launching import Place
from trainer.stages import STAGES

FOLDER = Path(components.__file__).parent
NAMES = ["configure", *STAGES, "finish"]
TRAININGS = [name for name, stage in STAGES.items() if stage.launched]
TOLD = {
    "warm_up": {"Output": "String"},
    "reinforce": {"Output": "String"},
    "tune": {"distill": "String", "distill_teacher": "String", "uri": "String"},
}
"""What a stage's task tells in parameters: where its output is, because others get that as a URI, and what is to be done."""
UNUSED = {"tune": {"teacher_outputs"}}
"""Optional inputs that a stage never gets in the pipeline: tune decides whether outputs are recorded."""
KFP_TYPES = {"dataset": "system.Dataset", "model": "system.Model"}


def component(name):
    return getattr(importlib.import_module(f"components.{name}"), name)


def definition(name: str) -> ast.FunctionDef:
    module = ast.parse((FOLDER / f"{name}.py").read_text())
    return next(node for node in module.body if isinstance(node, ast.FunctionDef) and node.name == name)


def test_there_is_one_component_a_stage_one_at_each_end_and_one_in_the_place_of_a_stage_that_is_not_needed():
    defined = {path.stem for path in FOLDER.glob("*.py") if "@dsl.component" in path.read_text()}
    assert defined == set(NAMES)


@pytest.mark.parametrize("name", NAMES)
def test_a_body_has_at_most_five_statements(name):
    body = definition(name).body
    assert ast.get_docstring(definition(name)), "the docstring is the task's description in the UI"
    statements = [node for outer in body[1:] for node in ast.walk(outer) if isinstance(node, ast.stmt)]
    assert 1 <= len(statements) <= 5


@pytest.mark.parametrize("name", NAMES)
def test_a_body_uses_nothing_from_its_module(name):
    """KFP ships the function's source alone, so a name from the top of the file would be missing in the task."""
    module = importlib.import_module(f"components.{name}")
    used = {
        node.id for statement in definition(name).body for node in ast.walk(statement) if isinstance(node, ast.Name)
    }
    imported = {
        alias.asname or alias.name
        for node in ast.walk(definition(name))
        if isinstance(node, ast.Import | ast.ImportFrom)
        for alias in node.names
    }
    assert not (used - imported) & {key for key in vars(module) if not key.startswith("__")}


@pytest.mark.parametrize("name", NAMES)
def test_every_component_runs_on_the_one_image_and_installs_nothing(name):
    container = component(name).component_spec.implementation.container
    assert container.image == image.IMAGE
    assert "pip" not in " ".join(container.command[:3])


@pytest.mark.parametrize("name", STAGES)
def test_artifacts_are_those_of_the_stage(name):
    stage, specification = STAGES[name], component(name).component_spec
    inputs = {
        key: spec.type.split("@")[0] for key, spec in specification.inputs.items() if spec.type.startswith("system.")
    }
    assert inputs == {key: KFP_TYPES.get(kind, "system.Artifact") for key, kind in stage.inputs.items()}
    # What may be missing comes as a URI, which can be empty.
    optional = stage.optional_inputs.keys() - UNUSED.get(name, set())
    assert {specification.inputs[key].type for key in optional} <= {"String"}
    outputs = {key: spec.type.split("@")[0] for key, spec in specification.outputs.items()}
    told = {key: outputs.pop(key) for key in TOLD.get(name, {})}
    assert told == TOLD.get(name, {})
    wanted = {key: KFP_TYPES.get(kind, "system.Artifact") for key, kind in stage.outputs.items()}
    assert wanted.items() <= outputs.items()
    further = {key: outputs[key] for key in outputs.keys() - wanted.keys()}
    assert (further.pop("job", None) == "system.Artifact") == (name in TRAININGS)
    assert set(further.values()) <= {"system.HTML", "system.Metrics", "system.ClassificationMetrics"}


@pytest.mark.parametrize("name", TRAININGS)
def test_a_training_takes_its_place(name):
    inputs = component(name).component_spec.inputs
    fields = {field.name: field.type for field in dataclasses.fields(Place)}
    assert {key: {"String": "str", "Integer": "int"}[inputs[key].type] for key in fields} == fields


@pytest.mark.parametrize("name", STAGES)
def test_only_launched_stages_take_processes_and_a_device(name):
    for key in ("processes_per_node", "device"):
        assert (key in component(name).component_spec.inputs) == STAGES[name].launched


@pytest.mark.parametrize("name", NAMES)
def test_every_input_is_described(name):
    specification = component(name).component_spec
    described = inspect.getdoc(component(name).python_func)
    missing = [key for key in specification.inputs or {} if f"    {key}: " not in described]
    assert not missing
