"""The compiled pipeline: fresh, light to make, and the graph that it is meant to be."""

from __future__ import annotations

import argparse
import dataclasses
import functools
import json
import subprocess
import sys

import pytest
import yaml

from components import kfp_components, sections
from components.kfp_components import CONFIG_MAP, NOTIFY_SECRET, STORE_SECRET, TRACKING_SECRET
from components.launch import IMAGE, IMAGE_VARIABLE
from components.launching import Placement
from pipelines import compile as compilation
from pipelines import distillation
from tests.cluster import empty_pipeline
from trainer import config
from trainer.graph import STAGES
from trainer.runner import preflight

compiled_text = functools.cache(compilation.compiled_text)  # a second each


def load(text):
    return yaml.load_all(text, Loader=yaml.CSafeLoader)


@pytest.fixture(scope="module")
def compiled():
    return next(load(compiled_text()))


@pytest.fixture(scope="module")
def pods():
    _, platforms = load(compiled_text())
    return platforms["platforms"]["kubernetes"]["deploymentSpec"]["executors"]


TASKS = {stage: stage.replace("_", "-") for stage in STAGES}
"""Stage -> its task: KFP puts hyphens."""
GROUP = "exit-handler-1"
"""What `finish` waits for."""


def stages_of(compiled):
    """The tasks that `finish` waits for."""
    return compiled["components"][f"comp-{GROUP}"]["dag"]["tasks"]


def source_of(compiled, task, name):
    """Task and output that a task's input comes from."""
    output = stages_of(compiled)[task]["inputs"]["parameters"][name]["taskOutputParameter"]
    return output["producerTask"], output["outputParameterKey"]


def constant(compiled, task, name):
    return stages_of(compiled)[task]["inputs"]["parameters"][name]["runtimeValue"]["constant"]


def test_the_committed_file_is_fresh():
    assert compilation.COMPILED.read_text() == compiled_text(), "run `make compile`"


def test_check_fails_on_stale_file_and_writes_nothing(tmp_path, monkeypatch, capsys):
    stale = tmp_path / "distillation.yaml"
    stale.write_text("old")
    monkeypatch.setattr(compilation, "COMPILED", stale)
    monkeypatch.setattr(compilation, "compiled_text", compiled_text)
    assert compilation.main(["--check"]) == 1
    assert stale.read_text() == "old"
    assert "make compile" in capsys.readouterr().err
    assert compilation.main([]) == 0
    assert compilation.main(["--check"]) == 0


def test_compiling_and_deploying_import_nothing_heavy():
    script = (
        "import json, sys; from components.launch import pools; from pipelines import compile, deploy, undeploy; compile.compiled_text(); "
        "print(json.dumps(sorted({name.partition('.')[0] for name in sys.modules})))"
    )
    ended = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert not {"torch", "timm", "mlflow", "datasets", "sklearn"} & set(json.loads(ended.stdout))


def test_every_task(compiled):
    assert set(stages_of(compiled)) == {"configure", *TASKS.values()}
    assert compilation.task_names(compiled_text()) == {*stages_of(compiled), "finish"}
    # Finish runs however the stages end.
    last = compiled["root"]["dag"]["tasks"]["finish"]
    assert last["dependentTasks"] == ["exit-handler-1"]
    assert last["triggerPolicy"]["strategy"] == "ALL_UPSTREAM_TASKS_COMPLETED"
    # No task is conditional.
    assert not [task for task in stages_of(compiled).values() if "triggerPolicy" in task or "iterator" in task]
    assert {name for name, component in compiled["components"].items() if "dag" in component} == {f"comp-{GROUP}"}


@pytest.mark.parametrize("reader", ["distill", "register"])
def test_recorded_outputs_come_from_reinforce(compiled, reader):
    assert source_of(compiled, reader, "teacher_outputs") == ("reinforce", "teacher_outputs_uri")
    assert source_of(compiled, "reinforce", "needed") == ("tune", "reinforce_needed")


def test_every_input_comes_from_its_stage(compiled):
    makers = {spec.name: (stage, keyword) for stage in STAGES.values() for keyword, spec in stage.makes.items()}
    for name, stage in STAGES.items():
        for keyword, kind in stage.all_inputs.items():
            if keyword not in stages_of(compiled)[TASKS[name]]["inputs"]["parameters"]:
                assert (name, keyword) == ("tune", "teacher_outputs")
                continue
            maker, key = makers[keyword]
            assert source_of(compiled, TASKS[name], keyword) == (TASKS[maker.name], f"{key}_uri")
            assert maker.outputs[key] == kind


def test_every_stage_gets_its_section_and_hears_whether_it_is_needed(compiled):
    for name, stage in STAGES.items():
        maker = "search" if name == "distill" else "configure"
        assert source_of(compiled, TASKS[name], "settings") == (maker, name)
        if stage.needed_if:
            assert source_of(compiled, TASKS[name], "needed") == (stage.decided_by or "configure", f"{name}_needed")


def test_search_takes_what_tune_chose(compiled):
    """And a student that starts from other weights is searched for anew."""
    assert source_of(compiled, "search", "student_weights_version") == ("configure", "student_weights_version")
    assert source_of(compiled, "search", "distill") == ("tune", "distill")


def test_one_look_at_graph_shows_what_person_opens(compiled):
    """No task reads one of KFP's artifacts: each would be fetched into its pod, and every one is a knot in the picture."""
    assert not [name for name, task in stages_of(compiled).items() if "artifacts" in task["inputs"]]
    shown = [
        artifact
        for component in compiled["components"].values()
        for artifact in component.get("outputDefinitions", {}).get("artifacts", {})
    ]
    assert sorted(shown) == sorted({*shown})
    assert len(shown) <= 12
    names = [task["taskInfo"]["name"] for task in stages_of(compiled).values()]
    assert len(names) == len({*names})
    assert all(name[0].isupper() for name in names)


def test_trainings_wait_for_warm_up_and_take_nothing_from_it(compiled):
    """So a cached teacher stays valid whether or not something was compiled before."""
    task = stages_of(compiled)["pretrain"]
    assert "warm-up" in task["dependentTasks"]
    given = [source for kind in task["inputs"].values() for source in kind.values()]
    producers = {value["producerTask"] for source in given for value in source.values() if isinstance(value, dict)}
    assert producers == {"configure", "prepare"}


def test_caching(compiled):
    tasks = {**stages_of(compiled), "finish": compiled["root"]["dag"]["tasks"]["finish"]}
    cached = {name for name, task in tasks.items() if task["cachingOptions"].get("enableCache", False)}
    assert cached == {"prepare", "warm-up", "pretrain", "tune", "reinforce", "search", "distill", "profile", "export"}


def test_the_empty_pipeline_has_our_graph():
    """Or its time would say nothing of what Kubeflow Pipelines takes for ours."""

    def shape(text, names):
        tasks = stages_of(next(load(text)))
        known = {task: names(task, one) for task, one in tasks.items()}
        return {
            known[task].replace("_", "-"): (
                {known[other].replace("_", "-") for other in one.get("dependentTasks", ())},
                bool(one["cachingOptions"]),
            )
            for task, one in tasks.items()
        }

    ours = shape(compiled_text(), lambda task, _: task)
    empty = shape(compilation.yaml_of(empty_pipeline.empty), lambda _, one: one["taskInfo"]["name"])
    assert empty.keys() == ours.keys()
    for task, (after, cached) in empty.items():
        assert cached == ours[task][1]
        # All of ours wait for configure besides, which comes before all.
        assert after - {"configure"} == ours[task][0] - {"configure"}


def test_every_parameter_has_a_default_and_a_description(compiled):
    parameters = compiled["root"]["inputDefinitions"]["parameters"]
    named = {"recipe", "overrides", "dataset", "teacher", "experiment", "fresh", *kfp_components.PREPARE_PLACE}
    assert set(parameters) == named | {field.name for field in dataclasses.fields(Placement)}
    assert all(parameter["description"] and "defaultValue" in parameter for parameter in parameters.values())


def test_another_image_replaces_image_everywhere_and_nothing_else(compiled):
    text = compiled_text()
    local, platforms = load(compilation.with_image(text, "elsewhere:1"))
    other, platforms_there = load(compilation.for_cluster(text, "elsewhere:1"))
    containers = [executor["container"] for executor in other["deploymentSpec"]["executors"].values()]
    assert [container.pop("image") for container in containers] == ["elsewhere:1"] * len(
        other["deploymentSpec"]["executors"]
    )
    assert all(container.pop("env") == [{"name": IMAGE_VARIABLE, "value": "elsewhere:1"}] for container in containers)
    for executor in local["deploymentSpec"]["executors"].values():
        assert executor["container"].pop("image") == "elsewhere:1"
    original, original_platforms = load(text)
    originals = [executor["container"].pop("image") for executor in original["deploymentSpec"]["executors"].values()]
    assert set(originals) == {IMAGE}
    assert (other, platforms_there) == (original, original_platforms) == (local, platforms)


def test_every_pod_is_unprivileged_and_finds_its_services(pods, compiled):
    assert set(pods) == set(compiled["deploymentSpec"]["executors"])
    for pod in pods.values():
        assert {source["configMapName"] for source in pod["configMapAsEnv"]} == {CONFIG_MAP}
        assert {source["secretName"] for source in pod["secretAsEnv"]} == {STORE_SECRET, TRACKING_SECRET, NOTIFY_SECRET}
        assert all(source["optional"] for kind in ("configMapAsEnv", "secretAsEnv") for source in pod[kind])
        assert {field["name"] for field in pod["fieldPathAsEnv"]} >= {"KFP_RUN_ID", "TRAINER_RUN"}
        assert pod["securityContext"]["runAsNonRoot"]


def test_no_autoscaler_moves_a_task(pods):
    """A pod that follows a training of days asks for little of a shared node, which would be emptied first."""
    for pod in pods.values():
        assert pod["podMetadata"]["annotations"] == {
            "cluster-autoscaler.kubernetes.io/safe-to-evict": "false",
            "karpenter.sh/do-not-disrupt": "true",
        }


def test_the_forms_defaults_pass_all_checks(compiled, monkeypatch):
    """A person uploads the compiled pipeline, and starts it without a change; `make deploy-pipeline` gives the same values."""
    inputs = compiled["root"]["inputDefinitions"]["parameters"]
    given = {name: value["defaultValue"] for name, value in inputs.items()}
    assert given.keys() == inputs.keys()
    place = {name: given.pop(name) for name in ("pool", "nodes", "processes_per_node")}
    assert given.pop("fresh") is False
    preparing = {name: given.pop(name) for name in kfp_components.PREPARE_PLACE}
    parser = argparse.ArgumentParser()
    distillation.add_parameters(parser)
    options = parser.parse_args([])
    assert given == distillation.given_parameters(options)
    assert preparing == distillation.given_preparing(options)
    deployed = distillation.given_place(options)
    assert Placement(**{name: type(getattr(deployed, name))(value) for name, value in place.items()}) == deployed
    monkeypatch.setenv("KFP_POD_NAME", "configure")
    deployed.check()
    settings = sections.resolve(**given)
    preflight.checked(settings, trains_here=False, processes=deployed.processes("auto"), device=deployed.device("auto"))
    assert distillation.SERVICE_ACCOUNT in compiled["pipelineInfo"]["description"]


def test_every_task_has_limits(compiled):
    memory = {}
    for name, executor in compiled["deploymentSpec"]["executors"].items():
        resources = executor["container"]["resources"]
        assert {"resourceCpuLimit", "resourceMemoryLimit", "resourceCpuRequest", "resourceMemoryRequest"} <= set(
            resources
        )
        memory[name.removeprefix("exec-")] = float(resources["resourceMemoryLimit"].removesuffix("Gi"))
    launching = {TASKS[name] for name, stage in STAGES.items() if stage.trains}
    assert {name for name, limit in memory.items() if limit <= 2} == {*launching, "finish"}


@pytest.fixture
def parse():
    parser = argparse.ArgumentParser()
    distillation.add_parameters(parser)
    return lambda *arguments: parser.parse_args(arguments)


def test_space_of_a_search_travels_as_text(parse):
    options = parse(
        "--search", "distill.drop_path=uniform(0,0.2) distill.logit.loss=choice(kl,dist)", "--set", "search.trials=4"
    )
    search = config.resolve("digits", distillation.given_parameters(options)["overrides"]).search
    assert search.space == {"distill.drop_path": "uniform(0,0.2)", "distill.logit.loss": "choice(kl,dist)"}
    assert (search.enabled, search.trials) == (True, 4)


def test_every_parameter_of_the_pipeline_is_an_option(parse):
    options = parse()
    place = vars(distillation.given_place(options))
    wanted = distillation.distillation.component_spec.inputs
    preparing = distillation.given_preparing(options)
    assert {*distillation.given_parameters(options), *place, *preparing, "fresh"} == {*wanted}
    assert {**distillation.given_parameters(options), **place, **preparing} == {
        **dict.fromkeys(("overrides", "dataset", "teacher", "experiment"), ""),
        "recipe": "digits", "pool": "cpu", "nodes": 1, "processes_per_node": 0, "prepare_pool": "", "prepare_nodes": 1,
    }  # fmt: skip
