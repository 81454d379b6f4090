"""A job as a PyTorchJob of the Training Operator (`kubeflow.org/v1`)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from components.launch import pod, state
from components.launch.identity import Identity
from components.launch.pools import Pool
from components.launch.state import State
from trainer.errors import LaunchError
from trainer.launch import JobSpec

GROUP, VERSION, PLURAL, KIND = "kubeflow.org", "v1", "pytorchjobs", "PyTorchJob"
CONTAINER = "pytorch"
"""The name by which the operator knows the container that it gives its variables to."""
QUEUE_LABEL = "kueue.x-k8s.io/queue-name"
PORT = {"name": "pytorchjob-port", "containerPort": 23456, "protocol": "TCP"}


def render(spec: JobSpec, pool: Pool, identity: Identity) -> dict[str, Any]:
    """The manifest of a job: one master, and a worker for every further node.

    Raises:
        LaunchError: the job does not fit the pool.
    """
    body = {
        "apiVersion": f"{GROUP}/{VERSION}",
        "kind": KIND,
        "spec": {
            "nprocPerNode": str(pool.processes(spec.processes_per_node)),
            "runPolicy": _run_policy(spec, pool),
            **_elastic_policy(spec, pool),
            "pytorchReplicaSpecs": {
                "Master": _replica(1, spec, pool, identity),
                **({"Worker": _replica(spec.nodes - 1, spec, pool, identity)} if spec.nodes > 1 else {}),
            },
        },
    }
    metadata = identity.metadata(spec.stage, body)
    if pool.queue:
        metadata["labels"][QUEUE_LABEL] = pool.queue
    return {"apiVersion": body["apiVersion"], "kind": KIND, "metadata": metadata, "spec": body["spec"]}


def _replica(count: int, spec: JobSpec, pool: Pool, identity: Identity) -> dict[str, Any]:
    return {
        "replicas": count,
        "restartPolicy": "OnFailure" if pool.retries else "Never",
        "template": pod.template(spec, pool, identity, container={"name": CONTAINER, "ports": [PORT]}),
    }


def _run_policy(spec: JobSpec, pool: Pool) -> dict[str, Any]:
    return {
        # Workers would otherwise run on when the master has ended; those that ended are kept, with their exit codes.
        "cleanPodPolicy": "Running",
        # The operator adds up the restarts of all pods and stops when the sum reaches the limit; one failure restarts every node.
        "backoffLimit": pool.retries * spec.nodes + 1 if pool.retries else 0,
        # For when the launcher is gone: its own limits are the exact ones, and the operator's clock runs while pods wait for nodes.
        "activeDeadlineSeconds": 60 * (pool.queued_minutes + pool.running_minutes),
        "ttlSecondsAfterFinished": 60 * pool.keep_minutes,
    }


def _elastic_policy(spec: JobSpec, pool: Pool) -> dict[str, Any]:
    if not pool.elastic_min_nodes:
        return {}
    least = max(2, pool.elastic_min_nodes)
    if spec.nodes < least:
        raise LaunchError(
            f"{spec.stage}: nodes = {spec.nodes}, but pool {pool.name} is elastic (elastic_min_nodes = {pool.elastic_min_nodes}) and takes "
            f"jobs of {least} nodes or more; ask for {least}, or choose a pool that is not elastic"
        )
    policy = {
        "rdzvBackend": "c10d",
        "minReplicas": pool.elastic_min_nodes,
        "maxReplicas": spec.nodes,
        "maxRestarts": pool.retries,
    }
    return {"elasticPolicy": policy}


def status(job: Mapping[str, Any]) -> State:
    """How a job stands."""
    return state.from_conditions(
        job,
        {
            "Failed": "failed",
            "Succeeded": "succeeded",
            "Suspended": "suspended",
            "Restarting": "restarting",
            "Running": "running",
        },
    )


def pod_selector(name: str) -> str:
    """The label selector of a job's pods."""
    return f"training.kubeflow.org/job-name={name}"


def replica(labels: Mapping[str, str]) -> str:
    """A pod's part in the job, by its labels: `master-0`, `worker-3`."""
    return f"{labels['training.kubeflow.org/replica-type']}-{labels['training.kubeflow.org/replica-index']}"
