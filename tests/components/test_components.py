"""Every component is thin, runs on the one image, and fits its stage."""

from __future__ import annotations

import ast
import dataclasses
import inspect
from pathlib import Path

import pytest

from components import kfp_components
from components.launch import IMAGE
from components.launching import Placement
from trainer.graph import STAGES

SOURCE = Path(kfp_components.__file__).read_text(encoding="utf-8")
NAMES = ["configure", *STAGES, "finish", "predict_photos"]
TRAININGS = [name for name, stage in STAGES.items() if stage.launched]
SHOWN = {
    "prepare": {"data_card": "system.HTML"},
    "pretrain": {"teacher": "system.Model"},
    "reinforce": {"recording": "system.HTML"},
    "distill": {"student": "system.Model"},
    "profile": {"profile": "system.HTML"},
    "evaluate": {
        "evaluation": "system.HTML",
        "metrics": "system.Metrics",
        "student_confusion": "system.ClassificationMetrics",
    },
    "export": {"variants": "system.HTML"},
}
"""KFP's artifacts: what a person opens in the UI, by a name that says what it is of."""
FURTHER = {"tune": {"distill", "distill_teacher"}}
"""What a stage's task tells beside the references to its outputs."""
BESIDE = {
    "prepare": {"source_version"},
    "pretrain": {"teacher_weights_version"},
    "reinforce": {"distill_teacher"},
    "distill": {"student_weights_version"},
}
"""What a stage's task gets beside its settings and inputs: it decides whether a cached result is right, or whether there is work."""
UNUSED = {"tune": {"teacher_outputs"}}
"""Optional inputs that a stage never gets in the pipeline: tune decides whether outputs are recorded."""


def component(name):
    return getattr(kfp_components, name)


def definition(name: str) -> ast.FunctionDef:
    return next(node for node in ast.parse(SOURCE).body if isinstance(node, ast.FunctionDef) and node.name == name)


def test_components_are_those_of_the_stages():
    assert [node.name for node in ast.parse(SOURCE).body if isinstance(node, ast.FunctionDef)] == NAMES
    assert SOURCE.count("@dsl.component") == len(NAMES)


@pytest.mark.parametrize("name", NAMES)
def test_a_body_has_at_most_five_statements(name):
    body = definition(name).body
    assert ast.get_docstring(definition(name)), "the docstring is the task's description in the UI"
    statements = [node for outer in body[1:] for node in ast.walk(outer) if isinstance(node, ast.stmt)]
    assert 1 <= len(statements) <= 5


@pytest.mark.parametrize("name", NAMES)
def test_a_body_uses_nothing_from_its_module(name):
    """KFP ships the function's source alone, so a name from the top of the file would be missing in the task."""
    used = {
        node.id for statement in definition(name).body for node in ast.walk(statement) if isinstance(node, ast.Name)
    }
    imported = {
        alias.asname or alias.name
        for node in ast.walk(definition(name))
        if isinstance(node, ast.Import | ast.ImportFrom)
        for alias in node.names
    }
    arguments = {argument.arg for argument in definition(name).args.args}
    assert not (used - imported - arguments) & {key for key in vars(kfp_components) if not key.startswith("__")}


@pytest.mark.parametrize("name", NAMES)
def test_every_component_runs_on_one_image_and_installs_nothing(name):
    container = component(name).component_spec.implementation.container
    assert container.image == IMAGE
    assert "pip" not in " ".join(container.command[:3])


@pytest.mark.parametrize("name", STAGES)
def test_a_task_outputs_references_and_pages(name):
    outputs = component(name).component_spec.outputs
    parameters = {key for key, spec in outputs.items() if spec.type == "String"}
    assert parameters == {f"{key}_uri" for key in STAGES[name].outputs} | FURTHER.get(name, set())
    shown = {key: spec.type.split("@")[0] for key, spec in outputs.items() if key not in parameters}
    assert shown == SHOWN.get(name, {})


@pytest.mark.parametrize("name", STAGES)
def test_task_gets_references_and_no_artifact_that_kfp_would_fetch(name):
    stage, inputs = STAGES[name], component(name).component_spec.inputs
    assert {spec.type for spec in inputs.values()} <= {"String", "Integer"}
    beside = BESIDE.get(name, set()) | ({"recipe", "resolved"} if stage.takes_recipe else set())
    place = {"device", *(field.name for field in dataclasses.fields(Placement))} if stage.launched else set()
    assert inputs.keys() == {"settings", *stage.all_inputs} - UNUSED.get(name, set()) | beside | place


@pytest.mark.parametrize("name", TRAININGS)
def test_a_training_takes_its_place(name):
    inputs = component(name).component_spec.inputs
    fields = {field.name: field.type for field in dataclasses.fields(Placement)}
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
