"""The kinds of job that a cluster can run, PyTorchJob and TrainJob: how each is rendered, found and read.

The manifests come from pure functions; `BACKENDS` is the one place where a kind is chosen by name.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

from components.image import IMAGE, IMAGE_VARIABLE
from components.launch import pod_template
from components.launch.api_errors import Resource
from components.launch.identity import Identity
from components.launch.pools import Pool
from trainer.errors import LaunchError
from trainer.launch import JobSpec

PYTORCHJOBS = Resource("pytorchjobs", "kubeflow.org", "v1")
TRAINJOBS = Resource("trainjobs", "trainer.kubeflow.org", "v1alpha1")
PYTORCHJOB_CONTAINER = "pytorch"
"""The operator gives its variables to the container of this name."""
TRAINJOB_NODE = "node"
"""The runtime's name for the job of the training pods, and for their container."""
QUEUE_LABEL = "kueue.x-k8s.io/queue-name"

JobPhase = Literal["pending", "suspended", "running", "restarting", "succeeded", "failed"]


@dataclass(frozen=True, kw_only=True)
class JobState:
    """The state of a job, in terms that all backends share."""

    phase: JobPhase
    reason: str = ""
    """The operator's reason, such as PyTorchJobFailed."""
    message: str = ""
    """The operator's message."""


@dataclass(frozen=True, kw_only=True)
class Backend:
    """A kind of job."""

    resource: Resource
    kind: str
    container: str
    """The name of the training container in a job's pods."""
    renderer: Callable[[JobSpec, Pool, Identity], dict[str, Any]]
    """A pure function; `render` adds the launching process's environment and image."""
    state: Callable[[Mapping[str, Any]], JobState]
    """A job as the API server shows it -> its state."""
    pod_selector: Callable[[str], str]
    """A job's name -> the label selector of its pods."""
    replica: Callable[[Mapping[str, str]], str]
    """A pod's labels -> its replica's name, such as `worker-3`."""

    def render(self, spec: JobSpec, pool: Pool, identity: Identity) -> dict[str, Any]:
        """Render the manifest of a job as it is sent, with the environment and the image that this process forwards.

        Raises:
            TrainerError: the job does not fit the pool or the backend.
        """
        forwarded = pod_template.forwarded_environment(os.environ)
        image = pod_template.image(pool, os.environ.get(IMAGE_VARIABLE) or IMAGE)
        return self.renderer(
            replace(spec, environment=forwarded | dict(spec.environment)),
            pool.model_copy(update={"image": image}),
            identity,
        )


def render_pytorchjob(spec: JobSpec, pool: Pool, identity: Identity) -> dict[str, Any]:
    """Render a PyTorchJob: a master, and a worker for each further node; an elastic job has workers only, since any node may leave.

    Raises:
        LaunchError: the job does not fit the pool.
    """
    run_policy = {
        # Workers would otherwise continue when the master has ended; those that ended are kept, with their exit codes.
        "cleanPodPolicy": "Running",
        # It would count restarts within a pod, of which the policy ExitCode has none; `JobProgress` counts instead.
        **({} if pool.retries else {"backoffLimit": 0}),
        # For when the launcher is gone. Its own limits are the exact ones: the operator's clock also runs while pods wait for nodes.
        "activeDeadlineSeconds": 60 * (pool.queued_minutes + pool.running_minutes),
        "ttlSecondsAfterFinished": 60 * pool.keep_minutes,
    }
    masters = 0 if pool.elastic_min_nodes else 1
    job = {
        "nprocPerNode": str(pool.processes(spec.processes_per_node)),
        "runPolicy": run_policy,
        **_elastic_policy(spec, pool),
        "pytorchReplicaSpecs": {
            role: _replica_spec(count, spec, pool, identity)
            for role, count in {"Master": masters, "Worker": spec.nodes - masters}.items()
            if count
        },
    }
    return _manifest(PYTORCHJOBS, "PyTorchJob", job, spec, pool, identity)


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


def _replica_spec(count: int, spec: JobSpec, pool: Pool, identity: Identity) -> dict[str, Any]:
    port = {"name": "pytorchjob-port", "containerPort": 23456, "protocol": "TCP"}
    container = {"name": PYTORCHJOB_CONTAINER, "ports": [port]}
    return {
        "replicas": count,
        # Exit codes below 128 fail the job: the trainer's own errors, which would come again. Others (preempted, killed, crashed) get a
        # new pod.
        "restartPolicy": "ExitCode" if pool.retries else "Never",
        "template": pod_template.template(spec, pool, identity, container=container),
    }


def render_trainjob(spec: JobSpec, pool: Pool, identity: Identity) -> dict[str, Any]:
    """Render a TrainJob on a runtime with torch's policy: `trainer` says what runs, a patch of the runtime what its pods are.

    Raises:
        LaunchError: the pool asks for what TrainJobs do not support.
    """
    for field in ("elastic_min_nodes", "retries"):
        if getattr(pool, field):
            raise LaunchError(
                f"{spec.stage}: pool {pool.name}: {field} = {getattr(pool, field)} is not supported by TrainJobs; "
                f'set it to 0, or backend = "pytorchjob"'
            )
    job = {
        "runtimeRef": {"name": pool.runtime},
        # For when the launcher is gone: its own limits are the exact ones.
        "activeDeadlineSeconds": 60 * (pool.queued_minutes + pool.running_minutes),
        "trainer": {
            "image": pod_template.image(pool),
            "command": pod_template.COMMAND,
            "args": spec.node_arguments(),
            "env": pod_template.environment(spec, pool, identity),
            "numNodes": spec.nodes,
            "numProcPerNode": pool.processes(spec.processes_per_node),
            "resourcesPerNode": pod_template.resources(pool),
        },
        # The manager says whose patch it is: a path with a domain, as Trainer requires.
        "runtimePatches": [
            {"manager": "vit-distillation/launcher", "trainingRuntimeSpec": _runtime_patch(spec, pool, identity)}
        ],
    }
    return _manifest(TRAINJOBS, "TrainJob", job, spec, pool, identity)


def _runtime_patch(spec: JobSpec, pool: Pool, identity: Identity) -> dict[str, Any]:
    # Trainer lets a patch set these fields only.
    template = {
        "metadata": pod_template.metadata(spec, identity),
        "spec": {
            **pod_template.placement(pool),
            "securityContext": pod_template.POD_SECURITY,
            # Kueue 0.19 writes a TrainJob with the types of Trainer 2.2, which drops this field of 2.3 when it lets a job start; JobSet
            # then denies the change, and the job stays suspended.
            **({} if pool.queue else {"terminationGracePeriodSeconds": pod_template.GRACE_PERIOD_S}),
            "containers": [
                {
                    "name": TRAINJOB_NODE,
                    "volumeMounts": pod_template.VOLUME_MOUNTS,
                    "securityContext": pod_template.CONTAINER_SECURITY,
                }
            ],
            "volumes": pod_template.volumes(pool),
        },
    }
    return {
        "template": {
            "spec": {"replicatedJobs": [{"name": TRAINJOB_NODE, "template": {"spec": {"template": template}}}]}
        }
    }


def _manifest(
    resource: Resource, kind: str, job: dict[str, Any], spec: JobSpec, pool: Pool, identity: Identity
) -> dict[str, Any]:
    head = {"apiVersion": f"{resource.group}/{resource.version}", "kind": kind}
    metadata = identity.metadata(spec.stage, {**head, "spec": job})
    if pool.queue:
        metadata["labels"][QUEUE_LABEL] = pool.queue
    return {**head, "metadata": metadata, "spec": job}


def _pytorchjob_state(job: Mapping[str, Any]) -> JobState:
    phases: Mapping[str, JobPhase] = {
        "Failed": "failed",
        "Succeeded": "succeeded",
        "Suspended": "suspended",
        "Restarting": "restarting",
        "Running": "running",
    }
    return _state_from_conditions(job, phases)


def _trainjob_state(job: Mapping[str, Any]) -> JobState:
    state = _state_from_conditions(job, {"Failed": "failed", "Complete": "succeeded", "Suspended": "suspended"})
    # A TrainJob has no condition for running; pods that are ready show it.
    if state.phase == "pending" and any(part.get("ready") for part in job.get("status", {}).get("jobsStatus") or []):
        return JobState(phase="running")
    return state


def _state_from_conditions(job: Mapping[str, Any], phases: Mapping[str, JobPhase]) -> JobState:
    """Return the state that the conditions of a job's status show.

    Args:
        job: the job as the API server shows it.
        phases: type of a condition -> phase; where several are true, the first one here decides.
    """
    conditions = job.get("status", {}).get("conditions") or []
    true = {condition["type"]: condition for condition in conditions if condition.get("status") == "True"}
    for kind, phase in phases.items():
        if kind in true:
            return JobState(phase=phase, reason=true[kind].get("reason", ""), message=true[kind].get("message", ""))
    return JobState(phase="pending")


def _pytorchjob_replica(labels: Mapping[str, str]) -> str:
    return f"{labels['training.kubeflow.org/replica-type']}-{labels['training.kubeflow.org/replica-index']}"


BACKENDS: Mapping[str, Backend] = {
    "pytorchjob": Backend(
        resource=PYTORCHJOBS,
        kind="PyTorchJob",
        container=PYTORCHJOB_CONTAINER,
        renderer=render_pytorchjob,
        state=_pytorchjob_state,
        pod_selector="training.kubeflow.org/job-name={}".format,
        replica=_pytorchjob_replica,
    ),
    "trainjob": Backend(
        resource=TRAINJOBS,
        kind="TrainJob",
        container=TRAINJOB_NODE,
        renderer=render_trainjob,
        state=_trainjob_state,
        pod_selector=f"jobset.sigs.k8s.io/jobset-name={{}},jobset.sigs.k8s.io/replicatedjob-name={TRAINJOB_NODE}".format,
        replica=lambda labels: f"{TRAINJOB_NODE}-{labels['batch.kubernetes.io/job-completion-index']}",
    ),
}
"""Name of a pool's backend -> the backend."""
