"""The pipeline: configure -> prepare -> warm_up -> pretrain -> tune -> reinforce -> distill -> profile, evaluate -> export -> register;
finish in any case.

It is for a cluster; on one machine `trainer/runner/local_run.py` runs the same stages. A task's name is the stage's name; the tasks hand
references to artifacts to one another (`components/references.py`), and each gets its own section of the settings only, so that a changed
distillation setting leaves the cached teacher valid.

warm_up, tune, reinforce and export hand on an empty reference where the settings do not need them; such a task costs a cluster two pods
and some twenty seconds. There is no `dsl.If`: KFP 2.17 cannot take an output from a branch (`dsl.OneOf`) whose task comes from its cache.

pretrain waits for warm_up and takes nothing from it, so that a cached teacher stays valid; tune hands on the settings of the
distillation, which it may change.

The exit handler costs a level in Kubeflow's UI and a driver's pod. It stays because nothing else of a run is started when a task's pod
was lost or the run was stopped, and only then do jobs on the node pools and the run in MLflow need to be ended.
"""

import argparse
from dataclasses import dataclass

from kfp import dsl, kubernetes
from kfp.dsl.pipeline_channel import PipelineParameterChannel

from components import kfp_components
from components.launch.finishing import RUN_LABEL, WORKFLOW
from components.launch.job_manifest import AUTOSCALER_ANNOTATION, KARPENTER_ANNOTATION, USER
from components.launching import Placement
from components.sections import KUBEFLOW_UI
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

# The names of the ConfigMaps and Secrets are those of `manifests/base`.
CONFIG_MAP = "vit-distillation"
ENVIRONMENT = (
    "MLFLOW_TRACKING_URI",
    "AWS_ENDPOINT_URL_S3",
    "AWS_DEFAULT_REGION",
    "TRAINER_ARTIFACTS",
    "TRAINER_CHECKPOINTS",
    "NEURON_COMPILE_CACHE_URL",
    KUBEFLOW_UI,
)  # keys of `CONFIG_MAP` that every task finds in its environment
POOLS_CONFIG_MAP = "vit-distillation-pools"
POOLS_FOLDER = "/etc/vit-distillation"
STORE_SECRET = "vit-distillation-store"
STORE_KEYS = ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY")
TRACKING_SECRET = "vit-distillation-tracking"
TRACKING_KEYS = ("MLFLOW_TRACKING_USERNAME", "MLFLOW_TRACKING_PASSWORD", "MLFLOW_TRACKING_TOKEN")
RETRIES = 2
"""A pod that was taken away is started again; a job that still runs is then followed further, not started twice."""
TRIED_FOR = f"{30 * 24 * 3600}s"
"""How long a task is tried again. Argo counts from the start of the first attempt, so the longest training has to fit into it."""


@dataclass(frozen=True, kw_only=True)
class Size:
    """Resources of a pod: its requests, and its limits."""

    cpu: str
    cpu_limit: str
    memory: str
    memory_limit: str


SMALL = Size(cpu="200m", cpu_limit="1", memory="512Mi", memory_limit="2Gi")
"""For a task that only launches a job and follows it."""
WORK = Size(cpu="1", cpu_limit="4", memory="2Gi", memory_limit="16Gi")  # for a task that does its work itself


def on_cluster(task: dsl.PipelineTask, size: Size) -> dsl.PipelineTask:
    """Set the size, environment and rights of a task's own pod, which `kfp.local` ignores."""
    task.set_cpu_request(size.cpu).set_cpu_limit(size.cpu_limit)
    task.set_memory_request(size.memory).set_memory_limit(size.memory_limit)
    task.set_retry(RETRIES, backoff_duration="30s", backoff_factor=2, backoff_max_duration=TRIED_FOR)
    for variable, field in {
        "KFP_RUN_ID": f"metadata.labels['{RUN_LABEL}']",
        "TRAINER_RUN": f"metadata.labels['{RUN_LABEL}']",
        "TRAINER_NAMESPACE": "metadata.namespace",
        WORKFLOW: "metadata.labels['workflows.argoproj.io/workflow']",
    }.items():
        kubernetes.use_field_path_as_env(task, variable, field)
    kubernetes.use_config_map_as_env(task, CONFIG_MAP, {name: name for name in ENVIRONMENT}, optional=True)
    kubernetes.use_config_map_as_volume(task, POOLS_CONFIG_MAP, POOLS_FOLDER, optional=True)
    kubernetes.use_secret_as_env(task, STORE_SECRET, {name: name for name in STORE_KEYS}, optional=True)
    kubernetes.use_secret_as_env(task, TRACKING_SECRET, {name: name for name in TRACKING_KEYS}, optional=True)
    # The pod that follows a training asks for little of a shared node, which would be the first to be emptied.
    for name, value in (AUTOSCALER_ANNOTATION | KARPENTER_ANNOTATION).items():
        kubernetes.add_pod_annotation(task, name, value)
    kubernetes.set_security_context(task, run_as_user=USER, run_as_group=USER, run_as_non_root=True)
    return task


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
    fresh: bool = False,
) -> None:
    """Train or take a teacher, distill a student from it, and prove what was done.

    Args:
        recipe: Name of a recipe in trainer/config/recipes, such as digits.
        overrides: Settings that differ from the recipe, `distill.epochs=20 distill.temperature=3`; see docs/configuration.md.
        dataset: Images: digits, imagefolder:PATH_OR_URI, manifest:FILE.csv or hub:NAME. Empty: the recipe's.
        teacher: Weights of the teacher: a model directory (path or URI) or timm:NAME. Empty: the recipe's.
        experiment: MLflow experiment. Empty: the recipe's.
        pool: Node pool that the trainings run on, such as cpu or gpu-a100. Empty: on this machine; refused on a cluster.
        nodes: Machines of the pool for each training.
        processes_per_node: Training processes on each machine. 0: one for each of its devices.
        fresh: Make everything again: earlier cached results count neither in this run nor in later ones.
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
            fresh=fresh,
            run_name=dsl.PIPELINE_JOB_NAME_PLACEHOLDER,
            **place,
        ).set_caching_options(False)  # images change and tracking servers go down without a change of parameters
        settings = on_cluster(configuring, WORK).set_display_name("Configure").outputs

        # What a task can take, by the name of its parameter. In a run tune reads no recorded outputs.
        given = {**settings, "recipe": recipe, **place}
        tasks: dict[str, dsl.PipelineTask] = {}
        for name, stage in STAGES.items():
            component = getattr(kfp_components, name)
            wanted = component.component_spec.inputs  # and its own section of the settings
            task = component(**{key: given[name if key == "settings" else key] for key in wanted})
            if not stage.cached:
                task.set_caching_options(False)
            on_cluster(task, SMALL if stage.launched else WORK).set_display_name(stage.title)
            tasks[name] = task.after(*(tasks[other] for other in stage.after))
            # Later tasks can take references to what the stage makes, and its task's other outputs.
            said = {key: out for key, out in task.outputs.items() if isinstance(out, PipelineParameterChannel)}
            given |= said | {spec.name: said[f"{keyword}_uri"] for keyword, spec in stage.makes.items()}


def add_parameters(options: commands.Options) -> None:
    """Add an option for each parameter of the pipeline."""
    commands.add_recipe(options, files=False)  # a cluster's tasks cannot read a file of this machine
    commands.add_overrides(options)
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


def given_parameters(options: argparse.Namespace) -> dict[str, str]:
    """Return the values of those that `add_parameters` added, but for the place."""
    named = {name: getattr(options, name) for name in ("recipe", "dataset", "teacher", "experiment")}
    return {**named, "overrides": commands.as_text(options.overrides)}


def given_place(options: argparse.Namespace) -> Placement:
    """Return where the trainings run; not checked."""
    return Placement(pool=options.pool or DEFAULT_POOL, nodes=options.nodes, processes_per_node=options.processes)
