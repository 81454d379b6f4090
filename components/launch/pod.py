"""The pods of a job, as far as all backends share them."""

from __future__ import annotations

from typing import Any

from components.image import IMAGE, neuron
from components.launch.environment import CACHE, variables
from components.launch.identity import Identity
from components.launch.pools import Pool
from trainer.errors import LaunchError
from trainer.launch import SHUTDOWN_TIMEOUT_S, JobSpec

USER = 1000
"""The image's user. It stands in the pod because the operator's own init container has an image whose user is root."""
GRACE_S = SHUTDOWN_TIMEOUT_S + 30
"""How long a pod has to end: first its processes, then its last words and its logs have to get out."""

SECURITY: dict[str, Any] = {
    "runAsNonRoot": True,
    "runAsUser": USER,
    "runAsGroup": USER,
    "fsGroup": USER,
    "seccompProfile": {"type": "RuntimeDefault"},
}
"""With `CONTAINER_SECURITY`, what Pod Security asks of a pod at its level `restricted`."""
CONTAINER_SECURITY: dict[str, Any] = {
    "allowPrivilegeEscalation": False,
    "readOnlyRootFilesystem": True,
    "capabilities": {"drop": ["ALL"]},
}
COMMAND = ["python"]


def image(pool: Pool, task: str = IMAGE) -> str:
    """The pool's own image, or else that of its task, in the variant for the pool's device.

    Raises:
        LaunchError: the variant cannot be told, since the task's image is named by its digest.
    """
    if pool.image or pool.device != "xla":
        return pool.image or task
    if "@" in task:
        raise LaunchError(
            f"pool {pool.name}: {task} names one image by its digest, not that for Neuron; set image of the pool"
        )
    return neuron(task)


def resources(pool: Pool) -> dict[str, Any]:
    """Limits are requests: accelerators demand it, and a training that is throttled or evicted holds up all others."""
    return {"requests": pool.resources, "limits": pool.resources}


def volumes(pool: Pool) -> list[dict[str, Any]]:
    """Everything that a pod writes to."""
    return [
        {"name": "shared-memory", "emptyDir": {"medium": "Memory", "sizeLimit": pool.shared_memory}},
        {"name": "cache", "emptyDir": {"sizeLimit": pool.cache}},
        {"name": "tmp", "emptyDir": {}},
    ]


def mounts() -> list[dict[str, Any]]:
    """Where a container finds `volumes`."""
    return [
        {"name": "shared-memory", "mountPath": "/dev/shm"},
        {"name": "cache", "mountPath": CACHE},
        {"name": "tmp", "mountPath": "/tmp"},
    ]


def metadata(spec: JobSpec, identity: Identity) -> dict[str, Any]:
    """Labels and annotations of the pods."""
    return {
        # A sidecar would outlive the training, and the pod would never end.
        "labels": identity.labels(spec.stage) | {"sidecar.istio.io/inject": "false"},
        # To move a training pod to another node is to restart the whole job.
        "annotations": {"cluster-autoscaler.kubernetes.io/safe-to-evict": "false"},
    }


def placement(pool: Pool) -> dict[str, Any]:
    """Which nodes take the pods, and who the pods are; without what the pool leaves empty."""
    fields = {
        "nodeSelector": pool.node_selector,
        "tolerations": [toleration.manifest() for toleration in pool.tolerations],
        "serviceAccountName": pool.service_account,
    }
    return {name: value for name, value in fields.items() if value}


def template(spec: JobSpec, pool: Pool, identity: Identity, *, container: dict[str, Any]) -> dict[str, Any]:
    """A whole pod template.

    Args:
        spec: the job.
        pool: where it runs.
        identity: which job it is.
        container: what the backend adds to the container, its name among them.
    """
    return {
        "metadata": metadata(spec, identity),
        "spec": {
            **placement(pool),
            "automountServiceAccountToken": False,
            "enableServiceLinks": False,
            "securityContext": SECURITY,
            "terminationGracePeriodSeconds": GRACE_S,
            "containers": [
                {
                    **container,
                    "image": image(pool),
                    "imagePullPolicy": "IfNotPresent",
                    "command": COMMAND,
                    "args": spec.node_arguments(),
                    "env": variables(spec, pool, identity),
                    "resources": resources(pool),
                    "securityContext": CONTAINER_SECURITY,
                    "terminationMessagePolicy": "FallbackToLogsOnError",
                    "volumeMounts": mounts(),
                }
            ],
            "volumes": volumes(pool),
        },
    }
