"""The compiled pipeline: fresh, light to make, and the graph that it is meant to be."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
import yaml

from components.image import IMAGE
from pipelines import compile as compilation
from trainer.config import SECTION_OF_STAGE
from trainer.stages import STAGES


@pytest.fixture(scope="module")
def compiled():
    return yaml.safe_load(compilation.compiled_text())


def test_the_committed_file_is_fresh():
    assert compilation.COMPILED.read_text() == compilation.compiled_text(), "run `make compile`"


def test_check_fails_on_a_stale_file_and_writes_nothing(tmp_path, monkeypatch, capsys):
    stale = tmp_path / "distillation.yaml"
    stale.write_text("old")
    monkeypatch.setattr(compilation, "COMPILED", stale)
    assert compilation.main(["--check"]) == 1
    assert stale.read_text() == "old"
    assert "make compile" in capsys.readouterr().err
    assert compilation.main([]) == 0
    assert compilation.main(["--check"]) == 0


def test_compiling_imports_nothing_heavy():
    script = (
        "import json, sys; from pipelines import compile; compile.compiled_text(); "
        "print(json.dumps(sorted({name.partition('.')[0] for name in sys.modules})))"
    )
    ended = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert not {"torch", "timm", "mlflow", "datasets", "sklearn"} & set(json.loads(ended.stdout))


def test_every_stage_is_a_task_of_its_name(compiled):
    assert set(compiled["root"]["dag"]["tasks"]) == {"configure", *STAGES}


def test_nothing_is_conditional(compiled):
    """kfp.local skips a branch whose condition it can not resolve, and succeeds."""
    assert all(
        "triggerPolicy" not in task and "iterator" not in task for task in compiled["root"]["dag"]["tasks"].values()
    )
    assert all("dag" not in component for component in compiled["components"].values())


def test_artifacts_come_from_the_stage_that_makes_them(compiled):
    for name, stage in STAGES.items():
        given = compiled["root"]["dag"]["tasks"][name]["inputs"].get("artifacts", {})
        assert set(given) == set(stage.inputs)
        for keyword, source in given.items():
            producer, output = (source["taskOutputArtifact"][key] for key in ("producerTask", "outputArtifactKey"))
            assert STAGES[producer].outputs[output] == stage.inputs[keyword]
            assert keyword in {output, f"{producer}_{output}"}


def test_every_stage_gets_its_own_section(compiled):
    for name in SECTION_OF_STAGE:
        settings = compiled["root"]["dag"]["tasks"][name]["inputs"]["parameters"]["settings"]["taskOutputParameter"]
        assert settings == {"producerTask": "configure", "outputParameterKey": name}


def test_caching(compiled):
    tasks = compiled["root"]["dag"]["tasks"]
    cached = {name for name, task in tasks.items() if task["cachingOptions"].get("enableCache", False)}
    assert cached == {"prepare", "pretrain", "distill", "profile"}


def test_every_parameter_has_a_default_and_a_description(compiled):
    parameters = compiled["root"]["inputDefinitions"]["parameters"]
    assert set(parameters) == {"recipe", "overrides", "dataset", "teacher", "experiment", "processes_per_node"}
    assert all(parameter["description"] and "defaultValue" in parameter for parameter in parameters.values())


def test_another_image_replaces_the_image_everywhere_and_nothing_else(compiled):
    other = yaml.safe_load(compilation.with_image(compilation.compiled_text(), "elsewhere:1"))
    images = [executor["container"].pop("image") for executor in other["deploymentSpec"]["executors"].values()]
    assert images == ["elsewhere:1"] * len(compiled["components"])
    originals = [executor["container"]["image"] for executor in compiled["deploymentSpec"]["executors"].values()]
    assert set(originals) == {IMAGE}
