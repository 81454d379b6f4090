"""What a task's own pod is on a cluster: its size, its environment, its rights. `kfp.local` ignores all of it.

The names of the ConfigMaps and Secrets are those of `manifests/base`.
"""

from __future__ import annotations

from dataclasses import dataclass

from kfp import kubernetes
from kfp.dsl import PipelineTask

from components.finishing import RUN_LABEL, WORKFLOW
from components.sections import KUBEFLOW_UI

CONFIG_MAP = "vit-distillation"
ENVIRONMENT = (
    "MLFLOW_TRACKING_URI",
    "AWS_ENDPOINT_URL_S3",
    "AWS_DEFAULT_REGION",
    "TRAINER_ARTIFACTS",
    "TRAINER_CHECKPOINTS",
    "NEURON_COMPILE_CACHE_URL",
    KUBEFLOW_UI,
)
"""Keys of `CONFIG_MAP` that every task finds in its environment."""
POOLS_CONFIG_MAP = "vit-distillation-pools"
POOLS_FOLDER = "/etc/vit-distillation"
STORE_SECRET = "vit-distillation-store"
STORE_KEYS = ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY")
TRACKING_SECRET = "vit-distillation-tracking"
TRACKING_KEYS = ("MLFLOW_TRACKING_USERNAME", "MLFLOW_TRACKING_PASSWORD", "MLFLOW_TRACKING_TOKEN")
USER = 1000
RETRIES = 2
"""A pod that was taken away is started again; a job that still runs is then followed further, not started twice."""
TRIED_FOR = f"{30 * 24 * 3600}s"
"""How long a task is tried again. Argo counts from the start of the first attempt, so the longest training has to fit into it."""


@dataclass(frozen=True, kw_only=True)
class Size:
    """Resources of a pod: what it is scheduled by, and the most that it may use."""

    cpu: str
    cpu_limit: str
    memory: str
    memory_limit: str


SMALL = Size(cpu="200m", cpu_limit="1", memory="512Mi", memory_limit="2Gi")
"""For a task that only launches a job and follows it."""
WORK = Size(cpu="1", cpu_limit="4", memory="2Gi", memory_limit="16Gi")
"""For a task that does its work itself."""


def on_cluster(task: PipelineTask, size: Size) -> PipelineTask:
    """Set how a task's pod is run.

    Args:
        task: the task.
        size: its resources.
    """
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
    kubernetes.set_security_context(task, run_as_user=USER, run_as_group=USER, run_as_non_root=True)
    return task
