"""The environment of a job's pods: what its task hands on, what its pool adds, and what the launcher itself sets."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from components.launch.identity import Identity
from components.launch.pools import RESERVED, SECRET, Pool, quantity
from trainer.config import CHECKPOINTS_VARIABLE, DEVICE_VARIABLE
from trainer.errors import LaunchError, SettingsError
from trainer.launch import JobSpec
from trainer.sections import holds_secret
from trainer.storage.cache import CACHE_VARIABLE, LIMIT_VARIABLE

logger = logging.getLogger(__name__)

CACHE = "/cache"
"""Where a pod keeps what it read from the object store."""
_CACHE_FILLED = 0.8
"""A pod whose volume is over its limit is evicted; what is being fetched or written comes on top of what is kept."""
COMPILE_CACHE = "NEURON_COMPILE_CACHE_URL"
"""Where Neuron's compiler keeps graphs: a folder of the pod, or of an object store, where the next job finds them."""
TRACKING_URI = "MLFLOW_TRACKING_URI"
HANDED_ON = (
    "AWS_ENDPOINT_URL",
    "AWS_ENDPOINT_URL_S3",
    "AWS_REGION",
    "AWS_DEFAULT_REGION",
    "TRAINER_RUN",
    "TRAINER_RUN_ID",
    "TRAINER_DEBUG",
)
"""Variables of a task that its job gets too, besides MLflow's. Other AWS variables speak of files and roles of the task's pod."""


def handed_on(task: Mapping[str, str]) -> dict[str, str]:
    """What a task hands on to its job: never a secret's value, and nothing that names a place on the task's own machine.

    Args:
        task: the task's environment.
    """
    given = {name: task[name] for name in HANDED_ON if task.get(name)}
    given |= {name: task[name] for name in (CHECKPOINTS_VARIABLE, COMPILE_CACHE) if "://" in task.get(name, "")}
    return given | _tracking(task)


def check_compile_cache(pool: Pool, task: Mapping[str, str]) -> None:
    """Make sure that what is compiled on a pool is there for the next job.

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
    cache = handed_on(task).get(COMPILE_CACHE) or pool.environment.get(COMPILE_CACHE, "")
    if "://" not in cache:
        raise SettingsError(
            f"pool {pool.name}: {COMPILE_CACHE}={cache} lies in the pods, so what warm_up compiles would be lost with them; set it to a "
            "folder of an object store, such as s3://BUCKET/neuron-cache: in the ConfigMap vit-distillation, from a laptop in its "
            "environment, or in the pool's; or set warm_up.enabled=false"
        )


def _tracking(task: Mapping[str, str]) -> dict[str, str]:
    uri = task.get(TRACKING_URI, "")
    if not uri.startswith(("http://", "https://", "databricks")):
        if uri:
            logger.warning("the job's metrics are not tracked: its pods cannot reach %s=%s", TRACKING_URI, uri)
        return {}
    return {name: value for name, value in task.items() if name.startswith("MLFLOW_") and not SECRET.search(name)}


def variables(spec: JobSpec, pool: Pool, identity: Identity) -> list[dict[str, Any]]:
    """The container's `env`: values, and secrets by reference.

    Raises:
        LaunchError: the job's environment holds a secret, also in an address, or what the launcher or the operator sets.
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
    values = {
        **_defaults(spec, pool, identity),
        **pool.environment,
        **spec.environment,
        **pool.place(spec.nodes, spec.processes_per_node).environment(),
        DEVICE_VARIABLE: pool.device,
        CACHE_VARIABLE: CACHE,
        LIMIT_VARIABLE: f"{_CACHE_FILLED * quantity(pool.cache) / 2**30:g}",
        # Nodes may come one after the other, as an autoscaler gets them; torch's own limit is a quarter of an hour.
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


def _defaults(spec: JobSpec, pool: Pool, identity: Identity) -> dict[str, str]:
    """What a pool or a job may set otherwise."""
    threads = max(1, int(pool.cpus / pool.processes(spec.processes_per_node)))
    return {
        "TRAINER_RUN": identity.run,
        # A pod sees all cores of its node, but may use those that it asked for.
        "OMP_NUM_THREADS": str(threads),
        # The root file system is read-only.
        "HOME": "/tmp",  # a volume of the pod's own
        "HF_HOME": f"{CACHE}/huggingface",
    }
