"""The pod template of a job's replicas, as pure functions: image, environment, resources, volumes, security, placement."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from components.image import IMAGE, neuron
from components.launch.identity import Identity
from components.launch.pools import RESERVED, SECRET, Pool, quantity
from trainer.base_models import holds_secret
from trainer.config import CHECKPOINTS_VARIABLE, DEVICE_VARIABLE
from trainer.errors import LaunchError, SettingsError
from trainer.launch import SHUTDOWN_TIMEOUT_S, JobSpec
from trainer.storage.cache import CACHE_VARIABLE, LIMIT_VARIABLE

USER = 1000
"""The image's user. The pod names it because the operator's own init container has an image whose user is root."""
GRACE_PERIOD_S = SHUTDOWN_TIMEOUT_S + 30
"""How long a pod has to end: first its processes end, then its termination message and its logs have to get out."""
COMMAND = ["python"]

POD_SECURITY: dict[str, Any] = {
    "runAsNonRoot": True,
    "runAsUser": USER,
    "runAsGroup": USER,
    "fsGroup": USER,
    "seccompProfile": {"type": "RuntimeDefault"},
}
"""With `CONTAINER_SECURITY`, what Pod Security requires of a pod at its level `restricted`."""
CONTAINER_SECURITY: dict[str, Any] = {
    "allowPrivilegeEscalation": False,
    "readOnlyRootFilesystem": True,
    "capabilities": {"drop": ["ALL"]},
}

CACHE = "/cache"
"""Where a pod keeps what it read from the object store."""
CACHE_FRACTION = 0.8
"""Share of the cache's volume that is filled. A pod whose volume exceeds its limit is evicted, and files in transit come on top."""
VOLUME_MOUNTS = [
    {"name": "shared-memory", "mountPath": "/dev/shm"},
    {"name": "cache", "mountPath": CACHE},
    {"name": "tmp", "mountPath": "/tmp"},
]
"""Where a container finds the `volumes`."""

COMPILE_CACHE = "NEURON_COMPILE_CACHE_URL"
"""Where Neuron's compiler keeps graphs: a folder of the pod, or of an object store, where the next job finds them."""
TRACKING_URI = "MLFLOW_TRACKING_URI"
FORWARDED = (
    "AWS_ENDPOINT_URL",
    "AWS_ENDPOINT_URL_S3",
    "AWS_REGION",
    "AWS_DEFAULT_REGION",
    "TRAINER_RUN",
    "TRAINER_RUN_ID",
    "TRAINER_DEBUG",
)
"""Variables of a task that its job gets too, besides MLflow's. Other AWS variables name files and roles of the task's own pod."""
_SERVICE_LINK = re.compile(r"\w+_(SERVICE_HOST|SERVICE_PORT(_\w+)?|PORT(_\d+_(TCP|UDP|SCTP)(_\w+)?)?)")
"""Variables that Kubernetes sets in a task's pod for each Service of its namespace, one called `mlflow` among them."""


def template(spec: JobSpec, pool: Pool, identity: Identity, *, container: dict[str, Any]) -> dict[str, Any]:
    """Render a whole pod template.

    Args:
        spec: the job.
        pool: where it runs.
        identity: which job it is.
        container: what the backend adds to the container, its name among them.

    Raises:
        LaunchError: the image is not known, or the environment holds a secret or a reserved variable.
    """
    return {
        "metadata": metadata(spec, identity),
        "spec": {
            **placement(pool),
            # The API server is the launcher's business, not the training's.
            "automountServiceAccountToken": False,
            "enableServiceLinks": False,
            "securityContext": POD_SECURITY,
            "terminationGracePeriodSeconds": GRACE_PERIOD_S,
            "containers": [
                {
                    **container,
                    "image": image(pool),
                    "imagePullPolicy": "IfNotPresent",
                    "command": COMMAND,
                    "args": spec.node_arguments(),
                    "env": environment(spec, pool, identity),
                    "resources": resources(pool),
                    "securityContext": CONTAINER_SECURITY,
                    # A process that is killed leaves no termination message; its last lines take the place.
                    "terminationMessagePolicy": "FallbackToLogsOnError",
                    "volumeMounts": VOLUME_MOUNTS,
                }
            ],
            "volumes": volumes(pool),
        },
    }


def image(pool: Pool, task: str = IMAGE) -> str:
    """Return the pool's own image, or else that of its task, in the variant for the pool's device.

    Raises:
        LaunchError: the variant is not known, since a digest names the task's image.
    """
    if pool.image or pool.device != "xla":
        return pool.image or task
    if "@" in task:
        raise LaunchError(
            f"pool {pool.name}: {task} names one image by its digest, not that for Neuron; set image of the pool"
        )
    return neuron(task)


def resources(pool: Pool) -> dict[str, Any]:
    """Render requests and limits."""
    # They are equal: accelerators require it, and a replica that is throttled or evicted holds up all others.
    return {"requests": pool.resources, "limits": pool.resources}


def volumes(pool: Pool) -> list[dict[str, Any]]:
    """Render the volumes: everything that a pod writes to, since its root file system is read-only."""
    return [
        {"name": "shared-memory", "emptyDir": {"medium": "Memory", "sizeLimit": pool.shared_memory}},
        {"name": "cache", "emptyDir": {"sizeLimit": pool.cache}},
        {"name": "tmp", "emptyDir": {}},
    ]


def metadata(spec: JobSpec, identity: Identity) -> dict[str, Any]:
    """Render labels and annotations of the pods."""
    return {
        # A sidecar would outlive the training, and the pod would never end.
        "labels": identity.labels(spec.stage) | {"sidecar.istio.io/inject": "false"},
        # Moving a training pod to another node restarts the whole job.
        "annotations": {"cluster-autoscaler.kubernetes.io/safe-to-evict": "false"},
    }


def placement(pool: Pool) -> dict[str, Any]:
    """Render which nodes take the pods, and their service account, without what the pool leaves empty."""
    fields = {
        "nodeSelector": pool.node_selector,
        "tolerations": [toleration.manifest() for toleration in pool.tolerations],
        "serviceAccountName": pool.service_account,
    }
    return {name: value for name, value in fields.items() if value}


def environment(spec: JobSpec, pool: Pool, identity: Identity) -> list[dict[str, Any]]:
    """Render the container's `env`: values, and secrets by reference.

    Raises:
        LaunchError: the job's environment holds a secret, also within an address, or sets a reserved variable.
        SettingsError: the job does not fit the pool's nodes.
    """
    for name in spec.environment:
        if SECRET.search(name) or RESERVED.fullmatch(name):
            raise LaunchError(
                f"{spec.stage}: {name} cannot be part of a job's environment: "
                + (
                    "it looks like a secret; name it under secrets of the pool"
                    if SECRET.search(name)
                    else "it is set by the launcher"
                )
            )
    # A pod sees all cores of its node, but may use only those that it requested.
    threads = max(1, int(pool.cpus / pool.processes(spec.processes_per_node)))
    defaults = {
        "TRAINER_RUN": identity.run,
        "OMP_NUM_THREADS": str(threads),
        # The root file system is read-only, so these point to volumes.
        "HOME": "/tmp",
        "HF_HOME": f"{CACHE}/huggingface",
    }
    values = {
        **defaults,
        **pool.environment,
        **spec.environment,
        **pool.place(spec.nodes, spec.processes_per_node).environment(),
        DEVICE_VARIABLE: pool.device,
        CACHE_VARIABLE: CACHE,
        LIMIT_VARIABLE: f"{CACHE_FRACTION * quantity(pool.cache) / 2**30:g}",
        # An autoscaler adds nodes one after the other; torch's own timeout is a quarter of an hour.
        "PET_RDZV_CONF": f"timeout={60 * pool.queued_minutes},join_timeout={60 * pool.queued_minutes}",
    }
    for name, value in values.items():
        if holds_secret(value):
            raise LaunchError(
                f"{spec.stage}: {name} holds a password or a token, which everybody could read in the job; leave it out of the address, "
                "and name a Secret and its key under secrets of the pool, such as for MLFLOW_TRACKING_PASSWORD"
            )
    references = [
        {
            "name": name,
            "valueFrom": {"secretKeyRef": {"name": secret.name, "key": secret.key, "optional": secret.optional}},
        }
        for name, secret in sorted(pool.secrets.items())
    ]
    return [{"name": name, "value": values[name]} for name in sorted(values)] + references


def forwarded_environment(task: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that a task forwards to its job: no secret's value, and no place on the task's own machine.

    Args:
        task: the task's environment.
    """
    forwarded = {name: task[name] for name in FORWARDED if task.get(name)}
    forwarded |= {name: task[name] for name in (CHECKPOINTS_VARIABLE, COMPILE_CACHE) if "://" in task.get(name, "")}
    if not tracks_in_reach(task):
        return forwarded
    return forwarded | {
        name: value
        for name, value in task.items()
        if name.startswith("MLFLOW_") and not SECRET.search(name) and not _SERVICE_LINK.fullmatch(name)
    }


def tracks_in_reach(task: Mapping[str, str]) -> bool:
    """Return whether a task's MLflow has an address that the pods of its job reach as well."""
    return task.get(TRACKING_URI, "").startswith(("http://", "https://", "databricks"))


def check_compile_cache(pool: Pool, task: Mapping[str, str]) -> None:
    """Check that the next job finds what is compiled on a pool.

    Args:
        pool: where the job runs.
        task: the environment of the task that launches it.

    Raises:
        SettingsError: it would be lost with the pods.
    """
    if pool.device != "xla":
        raise SettingsError(
            f"pool {pool.name}: what is compiled on it stays in the pods and is lost with them, so warm_up would warm nothing; it serves "
            "pools of Neuron devices, and a machine of your own; set warm_up.enabled=false"
        )
    cache = forwarded_environment(task).get(COMPILE_CACHE) or pool.environment.get(COMPILE_CACHE, "")
    if "://" not in cache:
        raise SettingsError(
            f"pool {pool.name}: {COMPILE_CACHE}={cache} lies in the pods, so what warm_up compiles would be lost with them; set it to a "
            "folder of an object store, such as s3://BUCKET/neuron-cache: in the ConfigMap vit-distillation, from a laptop in its "
            "environment, or in the pool's; or set warm_up.enabled=false"
        )
