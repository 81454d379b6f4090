"""The pipeline: configure -> prepare -> [warm_up] -> pretrain -> [tune] -> [reinforce] -> distill -> profile, evaluate -> register; finish
in any case.

One definition for a cluster and for one machine. A task's name is the stage's name; the tasks hand references to artifacts to one another
(`components/references.py`), and each gets its own section of the settings only, so that a changed distillation setting leaves the cached
teacher valid.

The stages in brackets are in the graph where they are asked for. `definition` makes it with those that a run's settings need, because each
task costs a cluster two pods and some twenty seconds, also one that does nothing; `distillation` has all of them, and there warm_up,
tune and reinforce hand on an empty reference where they are not wanted. A task's cache key is the same in every such graph. There is no
`dsl.If`: KFP 2.17 cannot take an output from a branch (`dsl.OneOf`) whose task comes from its cache.

pretrain waits for warm_up and takes nothing from it, so that a cached teacher stays valid; tune hands on the settings of the
distillation, which it may change.

The exit handler costs a level in Kubeflow's UI and a driver's pod. It stays because nothing else of a run is started when a task's pod
was lost or the run was stopped, and only then do jobs on the node pools and the run in MLflow need to be ended.
"""

from collections.abc import Collection, Mapping
from typing import Any

from kfp import dsl
from kfp.dsl.base_component import BaseComponent
from kfp.dsl.pipeline_channel import PipelineParameterChannel

from components import kfp_components
from components.task import RECORDED
from pipelines.pods import SMALL, WORK, on_cluster
from trainer.graph import OPTIONAL_STAGES, STAGES, Stage

NAME = "distillation"
KEPT_S = 7 * 24 * 3600
"""How long the pods of a run and their logs stay on the cluster after its end."""


def definition(optional: Collection[str] = OPTIONAL_STAGES, generation: str = "") -> BaseComponent:
    """Define the pipeline.

    Args:
        optional: which of `OPTIONAL_STAGES` are in its graph.
        generation: another one takes nothing from KFP's cache that was made under this.
    """

    @dsl.pipeline(
        name=NAME,
        display_name="Distil a vision transformer",
        pipeline_config=dsl.PipelineConfig(
            ttl_seconds_after_finished=KEPT_S,
            ttl_seconds_after_success=KEPT_S,  # KFP's controller has an hour for each end that is left open
            ttl_seconds_after_failure=KEPT_S,
        ),
    )
    def distillation(
        recipe: str = "digits",
        overrides: str = "",
        dataset: str = "",
        teacher: str = "",
        experiment: str = "",
        pool: str = "",
        nodes: int = 1,
        processes_per_node: int = 0,
    ) -> None:
        """Train or take a teacher, distil a student from it, and prove what was done.

        Args:
            recipe: Name of a recipe in trainer/recipes, such as digits.
            overrides: Settings that differ from the recipe, `distill.epochs=20 distill.temperature=3`; see docs/configuration.md.
            dataset: Images: digits, imagefolder:PATH_OR_URI, manifest:FILE.csv or hub:NAME. Empty: the recipe's.
            teacher: Weights of the teacher: a model directory (path or URI) or timm:NAME. Empty: the recipe's.
            experiment: MLflow experiment. Empty: the recipe's.
            pool: Node pool that the trainings run on, such as cpu or gpu-a100. Empty: on this machine, not on a cluster.
            nodes: Machines of the pool for each training.
            processes_per_node: Training processes on each machine. 0: one for each of its devices.
        """
        place = {"pool": pool, "nodes": nodes, "processes_per_node": processes_per_node}
        finishing = kfp_components.finish(pool=pool).set_caching_options(False).set_display_name("Finish")
        with dsl.ExitHandler(on_cluster(finishing, SMALL), name="Distillation"):
            configuring = kfp_components.configure(
                recipe=recipe,
                overrides=overrides,
                dataset=dataset,
                teacher=teacher,
                experiment=experiment,
                optional_stages=" ".join(optional),
                generation=generation,
                run_name=dsl.PIPELINE_JOB_NAME_PLACEHOLDER,
                **place,
            ).set_caching_options(False)  # images change and tracking servers go down without a change of parameters
            settings = on_cluster(configuring, WORK).set_display_name("Configure").outputs

            # What a task can take, by the name of its parameter. A stage that is left out hands on empty references.
            left_out = {spec.name: "" for stage in STAGES.values() for spec in stage.makes.values()}
            given = {**left_out, **settings, "recipe": recipe, "distill_teacher": RECORDED, **place}
            tasks: dict[str, dsl.PipelineTask] = {}
            for name, stage in STAGES.items():
                if name in optional or not stage.needed_if:
                    tasks[name] = _task(stage, given).after(*(tasks[other] for other in stage.after if other in tasks))
                    given |= _handed_on(stage, tasks[name])

    return distillation


def _task(stage: Stage, given: Mapping[str, Any]) -> dsl.PipelineTask:
    """Make a stage's task, with all that its component takes of what is given, and its own section of the settings."""
    component = getattr(kfp_components, stage.name)
    wanted = component.component_spec.inputs
    task = component(**{name: given[stage.name if name == "settings" else name] for name in wanted})
    if not stage.cached:
        task.set_caching_options(False)
    return on_cluster(task, SMALL if stage.launched else WORK).set_display_name(stage.title)


def _handed_on(stage: Stage, task: dsl.PipelineTask) -> dict[str, PipelineParameterChannel]:
    """Return what later tasks can take from this one: references to what its stage makes, and its other outputs."""
    said = {name: output for name, output in task.outputs.items() if isinstance(output, PipelineParameterChannel)}
    return said | {spec.name: said[f"{keyword}_uri"] for keyword, spec in stage.makes.items()}


distillation = definition()
