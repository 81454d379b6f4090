"""The components: `configure`, one for each stage of the graph (`trainer/graph.py`), `finish`; and `predict_photos`.

A stage's component is generated from its entry in the graph: settings, inputs, place of a training, what else makes a cached result stale;
references to what it makes; pages and artifacts for Kubeflow's UI. KFP ships the source text of a component's function, so the text is
generated, and registered where `inspect` looks for it, as `dataclasses` and `attrs` do.
"""

import linecache
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from kfp import dsl, kubernetes

from components.launch import IMAGE
from components.launch.finishing import RUN_LABEL, WORKFLOW
from components.launch.job_manifest import AUTOSCALER_ANNOTATION, KARPENTER_ANNOTATION, USER
from components.launch.pools import Pool
from components.launching import SMALL, WORK, Size
from components.sections import KUBEFLOW_UI
from trainer.graph import STAGES, Kind, Stage
from trainer.io.notifications import ADDRESSES, SECRET

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
NOTIFY_SECRET = "vit-distillation-notify"
NOTIFY_KEYS = (ADDRESSES, SECRET)
RETRIES = 2
"""A pod that was taken away is started again; a job that still runs is then followed further, not started twice."""
TRIED_FOR = f"{30 * 24 * 3600}s"
"""How long a task is tried again. Argo counts from the start of the first attempt, so the longest training has to fit into it."""


def on_cluster(task: dsl.PipelineTask, *, size: Size | None = None) -> dsl.PipelineTask:
    """Set title, caching, size, environment and rights of a task and its pod; `kfp.local` ignores the pod's.

    Without `size` the pod of a stage that is launched as a job is small, and others are large enough to work in.
    """
    name = task.component_spec.name.replace("-", "_")
    stage = STAGES.get(name)
    if stage is None or not stage.cached:
        task.set_caching_options(False)
    task.set_display_name(stage.title if stage else name.replace("_", " ").capitalize())
    size = size or (SMALL if stage is not None and stage.trains else WORK)
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
    kubernetes.use_secret_as_env(task, NOTIFY_SECRET, {name: name for name in NOTIFY_KEYS}, optional=True)
    # The pod that follows a training asks for little of a shared node, which would be the first to be emptied.
    for name, value in (AUTOSCALER_ANNOTATION | KARPENTER_ANNOTATION).items():
        kubernetes.add_pod_annotation(task, name, value)
    kubernetes.set_security_context(task, run_as_user=USER, run_as_group=USER, run_as_non_root=True)
    return task


def on_pool(task: dsl.PipelineTask, pool: Pool) -> dsl.PipelineTask:
    """Give a task's own pod a place on a node pool: its resources, node selector and tolerations."""
    cpu, memory = pool.resources["cpu"], pool.resources["memory"]
    on_cluster(task, size=Size(cpu=cpu, cpu_limit=cpu, memory=memory, memory_limit=memory))
    pod = pool.pod.get("spec", {})
    for label, value in pod.get("nodeSelector", {}).items():
        kubernetes.add_node_selector(task, label, value)
    for one in pod.get("tolerations", []):
        kubernetes.add_toleration_json(task, one)
    return task


class Parameter(NamedTuple):
    """A parameter of a component."""

    type: str
    description: str
    default: object = None  # none: it has to be given


PLACE = {
    "pool": Parameter("str", "Node pool of the trainings; empty: this task's own machine.", ""),
    "nodes": Parameter("int", "Machines of the pool.", 1),
    "processes_per_node": Parameter("int", "Processes on each machine; 0: one for each of its devices.", 0),
}
"""The fields of `launching.Placement`."""
PREPARE_PLACE = {
    "prepare_pool": Parameter("str", "Node pool that prepares the images; empty: the task's own pod.", ""),
    "prepare_nodes": Parameter("int", "Machines of that pool, which share the decoding.", 1),
}
"""The arguments of `launching.preparing`."""
CACHE_KEYS: Mapping[str, Mapping[str, str]] = {
    "prepare": {"source_version": "Version of the images"},
    "pretrain": {"teacher_weights_version": "Version of given weights"},
    "search": {"student_weights_version": "Version of the weights that the student starts from"},
    "distill": {"student_weights_version": "Version of the weights that the student starts from"},
}
"""Further parameters of a stage: no code reads them, and another value makes a cached result stale."""
ARTIFACT_TYPES: Mapping[Kind, str] = {"dataset": "Dataset", "model": "Model", "export": "Model"}
"""Kinds of artifacts that are KFP's artifacts too, under the keyword of the output."""
FURTHER_ARTIFACTS = {
    "evaluate": {
        "metrics": Parameter("dsl.Output[dsl.Metrics]", "The main numbers."),
        "student_confusion": Parameter(
            "dsl.Output[dsl.ClassificationMetrics]", "Confusion matrix of the student, of at most 200 classes."
        ),
    }
}
FURTHER_OUTPUTS = {"tune": {"distill": "str"}, "search": {"distill": "str"}}
"""Outputs of a stage's task beside the references: tune and search hand on the settings of the distillation, which they may change."""


def _component(
    name: str, summary: str, parameters: Mapping[str, Parameter], outputs: Mapping[str, str], call: str
) -> Any:
    """Make a lightweight component, whose function returns `components.task.<call>` of all that it is given."""
    ordered = sorted(parameters.items(), key=lambda item: item[1].default is not None)
    signature = [f"{key}: {one.type}" + ("" if one.default is None else f" = {one.default!r}") for key, one in ordered]
    fields = [f'("{key}", {kind})' for key, kind in outputs.items()]
    source = "\n".join(
        [
            f"def {name}(",
            *(f"    {one}," for one in signature),
            f') -> NamedTuple("Outputs", [{", ".join(fields)}]):',
            "    given = dict(locals())",
            "    from components import task",
            "",
            f"    return task.{call}",
            "",
        ]
    )
    file, namespace = f"<component {name}>", {"NamedTuple": NamedTuple, "dsl": dsl, "__name__": __name__}
    linecache.cache[file] = len(source), None, source.splitlines(keepends=True), file
    exec(compile(source, file, "exec"), namespace)  # the text above, of the graph's names
    function: Callable[..., Any] = namespace[name]
    # No part of the source, which each task's command has.
    described = "".join(f"    {key}: {one.description}\n" for key, one in ordered)
    function.__doc__ = f"{summary}\n\nArgs:\n{described}"
    return dsl.component(function, base_image=IMAGE, install_kfp_package=False)


def _of_stage(stage: Stage) -> Any:
    parameters = {"settings": Parameter("str", f"The section `{stage.section}`, as JSON.", "{}")}
    if stage.needed_if:
        parameters["needed"] = Parameter("bool", "Whether to run it; otherwise its outputs are empty texts.", True)
    for key, text in CACHE_KEYS.get(stage.name, {}).items():
        parameters[key] = Parameter("str", f"{text}; another value makes a cached result stale.", "")
    if stage.trains:
        text = "Kind of the devices that it runs on; another one makes a cached result stale."
        parameters |= {"device": Parameter("str", text, ""), **PLACE}
    if stage.shared:
        parameters |= PREPARE_PLACE
    for spec in stage.reads:
        parameters[spec.name] = Parameter("str", f"Reference to an artifact of kind {spec.kind}.")
    for spec in stage.reads_if_made:
        parameters[spec.name] = Parameter("str", f"Reference to an artifact of kind {spec.kind}; empty: none.", "")
    if stage.name == "search":
        parameters["distill"] = Parameter(
            "str", "The section `distill` to search around, as JSON; empty: that of `settings`.", ""
        )
    if stage.takes_recipe:
        parameters["recipe"] = Parameter("str", "Name of the recipe.")
        parameters["resolved"] = Parameter("str", "All settings of the run, as a recipe.")
    for keyword, spec in stage.makes.items():
        if kind := ARTIFACT_TYPES.get(spec.kind):
            parameters[keyword] = Parameter(f"dsl.Output[dsl.{kind}]", f"The {spec.kind} that it makes.")
    for page, file in stage.pages.items():
        parameters[page] = Parameter("dsl.Output[dsl.HTML]", f"{file} of what it makes, as a page.")
    parameters |= FURTHER_ARTIFACTS.get(stage.name, {})
    outputs = dict(FURTHER_OUTPUTS.get(stage.name, {}))
    outputs |= {f"{other.name}_needed": "bool" for other in STAGES.values() if other.decided_by == stage.name}
    outputs |= {f"{keyword}_uri": "str" for keyword in stage.makes}
    summary = f"{stage.summary[0].upper()}{stage.summary[1:]}."
    return _component(stage.name, summary, parameters, outputs, f'run_stage("{stage.name}", given)')


configure = _component(
    "configure",
    "Resolve the settings, and check that images, node pool and tracking are available.",
    {
        "recipe": Parameter("str", "Name of a recipe."),
        "overrides": Parameter("str", "Settings that differ from it, `key=value key=value`.", ""),
        "dataset": Parameter("str", "Source of the images, instead of the recipe's.", ""),
        "teacher": Parameter("str", "Weights of the teacher, instead of the recipe's.", ""),
        "experiment": Parameter("str", "MLflow experiment, instead of the recipe's.", ""),
        **PLACE,
        **PREPARE_PLACE,
        "fresh": Parameter(
            "bool", "Whether earlier cached results no longer count, in this run and in later ones.", False
        ),
        "run_name": Parameter("str", "As Kubeflow shows the run.", ""),
    },
    {
        **dict.fromkeys(STAGES, "str"),
        **{f"{name}_needed": "bool" for name, stage in STAGES.items() if stage.needed_if},
        **{key: "str" for keys in CACHE_KEYS.values() for key in keys},
        "device": "str",
        "resolved": "str",
    },
    "configure(**given)",
)
of_stages = {name: _of_stage(stage) for name, stage in STAGES.items()}


@dsl.component(base_image=IMAGE, install_kfp_package=False)
def finish(pool: str, status: dsl.PipelineTaskFinalStatus) -> None:
    """Delete the run's jobs that are left on the cluster, and record how the run ended.

    Args:
        pool: Node pool that the trainings ran on; empty: none.
        status: How the other tasks ended.
    """
    from components import task
    from components.launch import finishing

    with task.reporting("finish"):
        finishing.finish(pool, status.state, status.error_message)


@dsl.component(base_image=IMAGE, install_kfp_package=False)
def predict_photos(photos: str, model: str, output: str, top: int, force: bool, share: str = "0/1") -> NamedTuple(  # type: ignore[valid-type]  # KFP evaluates the annotation where no class of ours is at hand
    "Predicted", [("photos", int), ("unreadable", int)]
):
    """Predict the labels of all photos of a folder or a bucket, in Parquet files; what is there already is kept.

    Args:
        photos: URI of the folder.
        model: A registered model, such as models:/vit-student-digits@champion, or the URI of a model or an export.
        output: URI of the folder to write.
        top: How many labels each photo gets.
        force: Ask a student that did not pass its gate, too.
        share: The files that this task begins with, 0/4 to 3/4 of four tasks.
    """
    from components import task

    return task.predict(photos, model, output, top, force, share)
