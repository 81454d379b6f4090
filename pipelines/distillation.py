"""The pipeline: configure -> prepare -> warm_up -> pretrain -> tune -> reinforce -> search -> distill -> profile, evaluate -> export ->
register; finish in any case.

It is for a cluster; on one machine `trainer/runner/local_run.py` runs the same stages. A task's name is the stage's name; the tasks hand
references to artifacts to one another (`components/references.py`), and each gets its own section of the settings only, so that a changed
distillation setting leaves the cached teacher valid.

warm_up, tune, reinforce, search and export hand on an empty reference where the settings do not need them; such a task costs a
cluster two pods and some twenty seconds. There is no `dsl.If`: KFP 2.17 cannot take an output from a branch (`dsl.OneOf`) whose task comes
from its cache.

pretrain waits for warm_up and takes nothing from it, so that a cached teacher stays valid; tune and search hand on the settings of
the distillation, which they may change.

The exit handler costs a level in Kubeflow's UI and a driver's pod. It stays because nothing else of a run is started when a task's pod
was lost or the run was stopped, and only then do jobs on the node pools and the run in MLflow need to be ended.
"""

import argparse
from typing import Any

from kfp import dsl
from kfp.dsl.pipeline_channel import PipelineParameterChannel

from components import kfp_components, launching
from components.kfp_components import on_cluster
from components.launching import SMALL, Placement
from trainer.graph import STAGES
from trainer.io import commands

NAME = "distillation"
DEFAULT_POOL = "cpu"
"""Pool of a run on a cluster that names none: started with the defaults of Kubeflow's form, or by `make deploy-pipeline`."""
SERVICE_ACCOUNT = "vit-distillation"
DESCRIPTION = (
    f"Distill a vision transformer. In the form for a run give the service account {SERVICE_ACCOUNT}: Kubeflow's default (pipeline-runner, "
    "or default-editor for several users) may lack the rights to training jobs and an identity for the object store."
)  # shown in Kubeflow's UI where a pipeline and its version are chosen
KEPT_S = 7 * 24 * 3600  # how long the pods of a run and their logs stay on the cluster after its end


@dsl.pipeline(
    name=NAME,
    display_name="Distill a vision transformer",
    description=DESCRIPTION,
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
    pool: str = DEFAULT_POOL,
    nodes: int = 1,
    processes_per_node: int = 0,
    prepare_pool: str = "",
    prepare_nodes: int = 1,
    fresh: bool = False,
) -> None:
    """Train or take a teacher, distill a student from it, and prove what was done.

    Args:
        recipe: Name of a recipe in trainer/config/recipes, such as digits.
        overrides: Settings that differ from the recipe, `distill.epochs=20 distill.logit.temperature=3`; see docs/configuration.md.
        dataset: Images: digits, imagefolder:PATH_OR_URI, manifest:FILE.csv or hub:NAME. Empty: the recipe's.
        teacher: Weights of the teacher: a model directory (path or URI) or timm:NAME. Empty: the recipe's.
        experiment: MLflow experiment. Empty: the recipe's.
        pool: Node pool that the trainings run on, such as cpu or gpu-a100. Empty: on this machine; refused on a cluster.
        nodes: Machines of the pool for each training.
        processes_per_node: Training processes on each machine. 0: one for each of its devices.
        prepare_pool: Node pool that prepares the images, where they are too many for a task's pod. Empty: the task's own pod.
        prepare_nodes: Machines of that pool, which share the decoding. Another number prepares again.
        fresh: Make everything again: earlier cached results count neither in this run nor in later ones.
    """
    place = {"pool": pool, "nodes": nodes, "processes_per_node": processes_per_node}
    place |= {"prepare_pool": prepare_pool, "prepare_nodes": prepare_nodes}
    with dsl.ExitHandler(on_cluster(kfp_components.finish(pool=pool), size=SMALL), name="Distillation"):
        # Never cached: images change and tracking servers go down without a change of parameters.
        configuring = on_cluster(
            kfp_components.configure(
                recipe=recipe,
                overrides=overrides,
                dataset=dataset,
                teacher=teacher,
                experiment=experiment,
                fresh=fresh,
                run_name=dsl.PIPELINE_JOB_NAME_PLACEHOLDER,
                **place,
            )
        )
        # What a task can take, by the name of its parameter. In a run tune reads no recorded outputs.
        given = {**configuring.outputs, "recipe": recipe, **place}
        tasks: dict[str, dsl.PipelineTask] = {}
        for name, stage in STAGES.items():
            component = kfp_components.of_stages[name]
            of_its_own = {"settings": name, "needed": f"{name}_needed"}
            sources = {key: of_its_own.get(key, key) for key in component.component_spec.inputs}
            task = on_cluster(component(**{key: given[source] for key, source in sources.items() if source in given}))
            tasks[name] = task.after(*(tasks[other] for other in stage.after))
            # Later tasks can take references to what the stage makes, and its task's other outputs.
            made = {key: out for key, out in task.outputs.items() if isinstance(out, PipelineParameterChannel)}
            given |= made | {spec.name: made[f"{keyword}_uri"] for keyword, spec in stage.makes.items()}


def add_parameters(options: commands.Options) -> None:
    """Add an option for each parameter of the pipeline."""
    commands.add_recipe(options, files=False)  # a cluster's tasks cannot read a file of this machine
    commands.add_overrides(options)
    commands.add_search(options, quoted=True)
    options.add_argument("--dataset", default="", help="images, instead of the recipe's data.source")
    options.add_argument(
        "--teacher", default="", help="weights of the teacher, instead of the recipe's pretrain.weights"
    )
    options.add_argument(
        "--experiment",
        default="",
        help="of MLflow and KFP, instead of the recipe's tracking.experiment",
    )
    commands.add_place(options, pool=DEFAULT_POOL)
    commands.add_preparing(options)


def given_parameters(options: argparse.Namespace) -> dict[str, str]:
    """Return the values of those that `add_parameters` added, but for the place."""
    named = {name: getattr(options, name) for name in ("recipe", "dataset", "teacher", "experiment")}
    return {**named, "overrides": commands.as_text(options.overrides)}


def given_preparing(options: argparse.Namespace) -> dict[str, Any]:
    """Return where the images are prepared, which is checked."""
    given = {"prepare_pool": options.prepare_pool, "prepare_nodes": options.prepare_nodes}
    launching.preparing(**given)
    return given


def given_place(options: argparse.Namespace) -> Placement:
    """Return where the trainings run; not checked."""
    return Placement(pool=options.pool or DEFAULT_POOL, nodes=options.nodes, processes_per_node=options.processes)
