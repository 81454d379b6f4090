"""The environment of a job's pods: what its task hands on, what its pool adds, and what the launcher itself sets."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from components.launch.identity import Identity
from components.launch.pools import RESERVED, SECRET, Pool, quantity
from trainer.config import CHECKPOINTS_VARIABLE, DEVICE_VARIABLE
from trainer.errors import LaunchError
from trainer.launch import JobSpec
from trainer.sections import holds_secret
from trainer.storage.cache import CACHE_VARIABLE, LIMIT_VARIABLE

logger = logging.getLogger(__name__)

CACHE = "/cache"
"""Where a pod keeps what it read from the object store."""
_CACHE_FILLED = 0.8
"""A pod whose volume is over its limit is evicted; what is being fetched or written comes on top of what is kept."""
TRACKING_URI = "MLFLOW_TRACKING_URI"
HANDED_ON = (
    "AWS_ENDPOINT_URL",
    "AWS_ENDPOINT_URL_S3",
    "AWS_REGION",
    "AWS_DEFAULT_REGION",
    "TRAINER_RUN",
    "TRAINER_DEBUG",
)
"""Variables of a task that its job gets too, besides MLflow's. Other AWS variables speak of files and roles of the task's pod."""


def handed_on(task: Mapping[str, str]) -> dict[str, str]:
    """What a task hands on to its job: never a secret's value, and nothing that names a place on the task's own machine.

    Args:
        task: the task's environment.
    """
    given = {name: task[name] for name in HANDED_ON if task.get(name)}
    if "://" in task.get(CHECKPOINTS_VARIABLE, ""):
        given[CHECKPOINTS_VARIABLE] = task[CHECKPOINTS_VARIABLE]
    return given | _tracking(task)


def _tracking(task: Mapping[str, str]) -> dict[str, str]:
    uri = task.get(TRACKING_URI, "")
    if not uri.startswith(("http://", "https://", "databricks")):
        if uri:
            logger.warning("the job's metrics are not tracked: its pods can not reach %s=%s", TRACKING_URI, uri)
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
                f"{spec.stage}: {name} can not be part of a job's environment: "
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
