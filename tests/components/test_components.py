"""Every component runs on the one image, fits its stage, and is there for pipelines of one's own."""

from __future__ import annotations

import dataclasses
import inspect
import subprocess
import sys

import pytest

import components
from components import kfp_components
from components.launch import IMAGE
from components.launching import Placement
from trainer.graph import STAGES

NAMES = ["configure", *STAGES, "finish", "predict_photos"]
SHOWN = {
    "prepare": {"dataset": "system.Dataset", "data_card": "system.HTML"},
    "pretrain": {"teacher": "system.Model"},
    "reinforce": {"recording": "system.HTML"},
    "search": {"trials": "system.HTML"},
    "distill": {"student": "system.Model"},
    "profile": {"profile": "system.HTML"},
    "evaluate": {
        "evaluation": "system.HTML",
        "metrics": "system.Metrics",
        "student_confusion": "system.ClassificationMetrics",
    },
    "export": {"exported": "system.Model", "variants": "system.HTML"},
}
"""KFP's artifacts: what a person opens in the UI, by a name that says what it is of."""
FURTHER = {"tune": {"distill": "String", "reinforce_needed": "Boolean"}, "search": {"distill": "String"}}
"""Outputs of a stage's task beside the references."""
OPTIONAL = {"warm_up", "tune", "reinforce", "search", "export"}


def component(name):
    return kfp_components.of_stages.get(name) or getattr(kfp_components, name)


@pytest.mark.parametrize("name", NAMES)
def test_every_component_runs_on_one_image_and_installs_nothing(name):
    container = component(name).component_spec.implementation.container
    assert container.image == IMAGE
    assert "pip" not in " ".join(container.command[:3])


@pytest.mark.parametrize("name", STAGES)
def test_a_task_outputs_references_and_what_a_person_opens(name):
    outputs = {key: spec.type.split("@")[0] for key, spec in component(name).component_spec.outputs.items()}
    references = dict.fromkeys((f"{key}_uri" for key in STAGES[name].outputs), "String")
    assert outputs == references | FURTHER.get(name, {}) | SHOWN.get(name, {})


@pytest.mark.parametrize("name", STAGES)
def test_task_gets_references_and_no_artifact_that_kfp_would_fetch(name):
    stage, inputs = STAGES[name], component(name).component_spec.inputs
    fields = {field.name: {"str": "String", "int": "Integer"}[field.type] for field in dataclasses.fields(Placement)}
    expected = dict.fromkeys(["settings", *stage.all_inputs, *kfp_components.CACHE_KEYS.get(name, ())], "String")
    expected |= {"needed": "Boolean"} if name in OPTIONAL else {}
    expected |= {"recipe": "String", "resolved": "String"} if stage.takes_recipe else {}
    expected |= {"device": "String", **fields} if stage.trains else {}
    expected |= {"distill": "String"} if name == "search" else {}
    expected |= {"prepare_pool": "String", "prepare_nodes": "Integer"} if name == "prepare" else {}
    assert {key: spec.type for key, spec in inputs.items()} == expected
    # What has no default is what no run can do without.
    required = {key for key, spec in inputs.items() if spec.default is None}
    assert required == {*stage.inputs} | ({"recipe", "resolved"} if stage.takes_recipe else set())


@pytest.mark.parametrize("name", NAMES)
def test_every_input_is_described(name):
    specification = component(name).component_spec
    described = inspect.getdoc(component(name).python_func)
    assert not [key for key in specification.inputs or {} if f"    {key}: " not in described]


def test_components_are_made_when_they_are_asked_for():
    assert components.distill is kfp_components.of_stages["distill"]
    assert components.on_cluster is kfp_components.on_cluster
    with pytest.raises(AttributeError, match="no attribute 'pretraining'"):
        _ = components.pretraining
    loaded = "import sys, components.launching; assert 'kfp' not in sys.modules"
    subprocess.run([sys.executable, "-c", loaded], check=True)
