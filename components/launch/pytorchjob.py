"""A job as a PyTorchJob of the Training Operator (`kubeflow.org/v1`)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from components.launch import pod, state
from components.launch.identity import Identity
from components.launch.pools import Pool
from components.launch.state import JobState
from trainer.errors import LaunchError
from trainer.launch import JobSpec

GROUP, VERSION, PLURAL, KIND = "kubeflow.org", "v1", "pytorchjobs", "PyTorchJob"
CONTAINER = "pytorch"
"""The name by which the operator knows the container that it gives its variables to."""
QUEUE_LABEL = "kueue.x-k8s.io/queue-name"
PORT = {"name": "pytorchjob-port", "containerPort": 23456, "protocol": "TCP"}


def render(spec: JobSpec, pool: Pool, identity: Identity) -> dict[str, Any]:
    """The manifest of a job: one master, and a worker for every further node; in an elastic job, where any node may go, workers only.

    Raises:
        LaunchError: the job does not fit the pool.
    """
    body = {
        "apiVersion": f"{GROUP}/{VERSION}",
        "kind": KIND,
        "spec": {
            "nprocPerNode": str(pool.processes(spec.processes_per_node)),
            "runPolicy": _run_policy(pool),
            **_elastic_policy(spec, pool),
            "pytorchReplicaSpecs": {
                role: _replica(count, spec, pool, identity) for role, count in _roles(spec, pool).items() if count
            },
        },
    }
    metadata = identity.metadata(spec.stage, body)
    if pool.queue:
        metadata["labels"][QUEUE_LABEL] = pool.queue
    return {"apiVersion": body["apiVersion"], "kind": KIND, "metadata": metadata, "spec": body["spec"]}


def _roles(spec: JobSpec, pool: Pool) -> dict[str, int]:
    """How many replicas each role has."""
    masters = 0 if pool.elastic_min_nodes else 1
    return {"Master": masters, "Worker": spec.nodes - masters}


def _replica(count: int, spec: JobSpec, pool: Pool, identity: Identity) -> dict[str, Any]:
    return {
        "replicas": count,
        # Codes below 128 fail the job: the trainer's own errors, which would come again. Others get a new pod: preempted, killed, crashed.
        "restartPolicy": "ExitCode" if pool.retries else "Never",
        "template": pod.template(spec, pool, identity, container={"name": CONTAINER, "ports": [PORT]}),
    }


def _run_policy(pool: Pool) -> dict[str, Any]:
    return {
        # Workers would otherwise run on when the master has ended; those that ended are kept, with their exit codes.
        "cleanPodPolicy": "Running",
        # It would count restarts within a pod, of which the policy ExitCode has none; whoever follows the job counts (`JobProgress`).
        **({} if pool.retries else {"backoffLimit": 0}),
        # For when the launcher is gone: its own limits are the exact ones, and the operator's clock runs while pods wait for nodes.
        "activeDeadlineSeconds": 60 * (pool.queued_minutes + pool.running_minutes),
        "ttlSecondsAfterFinished": 60 * pool.keep_minutes,
    }


def _elastic_policy(spec: JobSpec, pool: Pool) -> dict[str, Any]:
    if not pool.elastic_min_nodes:
        return {}
    if spec.nodes < pool.elastic_min_nodes:
        raise LaunchError(
            f"{spec.stage}: nodes = {spec.nodes}, but pool {pool.name} is elastic and needs {pool.elastic_min_nodes} at least "
            f"(elastic_min_nodes); ask for {pool.elastic_min_nodes} or more, or choose a pool that is not elastic"
        )
    policy = {
        "rdzvBackend": "c10d",
        "minReplicas": pool.elastic_min_nodes,
        "maxReplicas": spec.nodes,
        "maxRestarts": pool.retries,
    }
    return {"elasticPolicy": policy}


def status(job: Mapping[str, Any]) -> JobState:
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
