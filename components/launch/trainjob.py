"""A job as a TrainJob of Kubeflow Trainer v2 (`trainer.kubeflow.org/v1alpha1`), on a runtime with torch's policy."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from components.launch import pod, state
from components.launch.environment import variables
from components.launch.identity import Identity
from components.launch.pools import Pool
from components.launch.pytorchjob import QUEUE_LABEL
from components.launch.state import JobState
from trainer.errors import LaunchError
from trainer.launch import JobSpec

GROUP, VERSION, PLURAL, KIND = "trainer.kubeflow.org", "v1alpha1", "trainjobs", "TrainJob"
NODE = "node"
"""The runtime's name for the job of the training pods, and for their container."""
MANAGER = "vit-distillation/launcher"
"""Whose patches of the runtime ours are; a path with a domain, as Trainer wants it."""


def render(spec: JobSpec, pool: Pool, identity: Identity) -> dict[str, Any]:
    """The manifest of a job: what is run stands in `trainer`, what its pods are in a patch of the runtime.

    Raises:
        LaunchError: the pool asks for what a TrainJob cannot say.
    """
    _check(spec, pool)
    body = {
        "apiVersion": f"{GROUP}/{VERSION}",
        "kind": KIND,
        "spec": {
            "runtimeRef": {"name": pool.runtime},
            # For when the launcher is gone: its own limits are the exact ones.
            "activeDeadlineSeconds": 60 * (pool.queued_minutes + pool.running_minutes),
            "trainer": {
                "image": pod.image(pool),
                "command": pod.COMMAND,
                "args": spec.node_arguments(),
                "env": variables(spec, pool, identity),
                "numNodes": spec.nodes,
                "numProcPerNode": pool.processes(spec.processes_per_node),
                "resourcesPerNode": pod.resources(pool),
            },
            "runtimePatches": [{"manager": MANAGER, "trainingRuntimeSpec": _patch(spec, pool, identity)}],
        },
    }
    metadata = identity.metadata(spec.stage, body)
    if pool.queue:
        metadata["labels"][QUEUE_LABEL] = pool.queue
    return {"apiVersion": body["apiVersion"], "kind": KIND, "metadata": metadata, "spec": body["spec"]}


def _check(spec: JobSpec, pool: Pool) -> None:
    for field in ("elastic_min_nodes", "retries"):
        if getattr(pool, field):
            raise LaunchError(
                f"{spec.stage}: pool {pool.name}: {field} = {getattr(pool, field)} cannot be said in a TrainJob; "
                f'set it to 0, or backend = "pytorchjob"'
            )


def _patch(spec: JobSpec, pool: Pool, identity: Identity) -> dict[str, Any]:
    """What the runtime's pods are to be besides; Trainer lets a patch set these fields only."""
    template = {
        "metadata": pod.metadata(spec, identity),
        "spec": {
            **pod.placement(pool),
            "securityContext": pod.SECURITY,
            # Kueue 0.19 writes a TrainJob with the types of Trainer 2.2, which drops this field of 2.3 when it lets a job start; JobSet
            # then denies the change, and the job stays suspended.
            **({} if pool.queue else {"terminationGracePeriodSeconds": pod.GRACE_S}),
            "containers": [{"name": NODE, "volumeMounts": pod.mounts(), "securityContext": pod.CONTAINER_SECURITY}],
            "volumes": pod.volumes(pool),
        },
    }
    return {"template": {"spec": {"replicatedJobs": [{"name": NODE, "template": {"spec": {"template": template}}}]}}}


def status(job: Mapping[str, Any]) -> JobState:
    """How a job stands. A TrainJob has no condition for running; the pods that are ready tell it."""
    ended = state.from_conditions(job, {"Failed": "failed", "Complete": "succeeded", "Suspended": "suspended"})
    if ended.phase == "pending" and any(part.get("ready") for part in job.get("status", {}).get("jobsStatus") or []):
        return JobState(phase="running")
    return ended


def pod_selector(name: str) -> str:
    """The label selector of a job's pods."""
    return f"jobset.sigs.k8s.io/jobset-name={name},jobset.sigs.k8s.io/replicatedjob-name={NODE}"


def replica(labels: Mapping[str, str]) -> str:
    """A pod's part in the job, by its labels: `node-3`."""
    return f"{NODE}-{labels['batch.kubernetes.io/job-completion-index']}"
