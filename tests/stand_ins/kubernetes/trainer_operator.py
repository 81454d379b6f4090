"""A small Kubeflow Trainer: a TrainJob on the runtime `torch-distributed` becomes pods, as Trainer 2.3 with JobSet does it.

The JobSet and the Job between a TrainJob and its pods are not kept as objects; the pods belong to the TrainJob. As there, a
container that fails is started again in its place, and after six failures the job has failed and the pods that still run are deleted.
"""

from __future__ import annotations

import copy
import random
import string
from collections.abc import Mapping, Sequence
from typing import Any

from kubernetes.utils.quantity import parse_quantity

from tests.stand_ins.kubernetes import schemas
from tests.stand_ins.kubernetes.conditions import holds, set_plain_condition
from tests.stand_ins.kubernetes.controller import Controller
from tests.stand_ins.kubernetes.pod_templates import owner_reference
from tests.stand_ins.kubernetes.resources import PODS, TRAINJOBS
from tests.stand_ins.kubernetes.statuses import ApiError
from tests.stand_ins.kubernetes.store import Object, age_s

RUNTIME = "torch-distributed"
_NODE = "node"
_IMAGE = "pytorch/pytorch:2.13.0-cuda13.0-cudnn9-runtime"
_PORT = 29500
_BACKOFF_LIMIT = 6
_INDEX = "batch.kubernetes.io/job-completion-index"
_CONTROLLER = "trainer-controller-manager"


class TrainerOperator(Controller):
    """Reconciles all TrainJobs."""

    kind = TRAINJOBS

    def reconcile(self, job: Object) -> None:
        status, pods = copy.deepcopy(job.get("status", {})), self.pods_of(job)
        if job["spec"]["runtimeRef"]["name"] != RUNTIME:
            self._refuse_runtime(job)
        elif not holds(status, "Complete") and not holds(status, "Failed"):
            self._suspend_or_run(job, status, pods)
        self.write_status(job, status)

    def _suspend_or_run(self, job: Object, status: Object, pods: Sequence[Object]) -> None:
        if job["spec"].get("suspend"):
            set_plain_condition(status, "Suspended", "True", "Suspended", "TrainJob is suspended")
            self.delete_active(pods)
        else:
            if holds(status, "Suspended"):
                set_plain_condition(status, "Suspended", "False", "Resumed", "TrainJob is resumed")
            self._create_missing(job, pods)
            self._judge(job, status, pods)
        status["jobsStatus"] = [_job_status(job, status, pods)]

    def _create_missing(self, job: Object, pods: Sequence[Object]) -> None:
        there = {int(pod["metadata"]["labels"][_INDEX]) for pod in pods if pod["status"]["phase"] != "Failed"}
        for index in set(range(_nodes(job))) - there:
            manifest = {"apiVersion": PODS.api_version, "kind": PODS.kind, **render(job, index)}
            try:
                schemas.admit(manifest)
            except ApiError as error:
                self.store.record_event(
                    job, "Warning", "FailedCreate", f"Error creating: {error.message}", "job-controller"
                )
            else:
                self.store.create(PODS, job["metadata"]["namespace"], manifest)

    def _judge(self, job: Object, status: Object, pods: Sequence[Object]) -> None:
        failures = sum(pod["status"]["phase"] == "Failed" for pod in pods) + sum(
            container["restartCount"] for pod in pods for container in pod["status"].get("containerStatuses") or []
        )
        deadline_s, name = job["spec"].get("activeDeadlineSeconds"), job["metadata"]["name"]
        if sum(pod["status"]["phase"] == "Succeeded" for pod in pods) == _nodes(job):
            set_plain_condition(status, "Complete", "True", "AllJobsCompleted", "jobset completed successfully")
        elif failures > _BACKOFF_LIMIT:
            cause = f"jobset failed due to one or more job failures (first failed job: {name}-{_NODE}-0)"
            set_plain_condition(status, "Failed", "True", "FailedJobs", cause)
            self.delete_active(pods)
        elif deadline_s and age_s(_started(job, status)) > deadline_s:
            set_plain_condition(status, "Failed", "True", "DeadlineExceeded", "TrainJob exceeded its active deadline")
            for pod in pods:
                self.store.delete(PODS, pod["metadata"]["namespace"], pod["metadata"]["name"])

    def _refuse_runtime(self, job: Object) -> None:
        wanted = job["spec"]["runtimeRef"]["name"]
        cause = f'ClusterTrainingRuntime.trainer.kubeflow.org "{wanted}" not found'
        message = f"TrainJob resources reconciliation failed: {cause}"
        self.store.record_event(job, "Warning", "TrainJobResourcesCreationFailed", message, _CONTROLLER)


def render(job: Mapping[str, Any], index: int) -> Object:
    """The manifest of the pod of one node."""
    name, trainer = job["metadata"]["name"], job["spec"].get("trainer") or {}
    container: Object = {"name": _NODE, "image": trainer.get("image", _IMAGE)}
    container |= {key: trainer[key] for key in ("command", "args") if key in trainer}
    if "resourcesPerNode" in trainer:
        container["resources"] = trainer["resourcesPerNode"]
    template: Object = {"metadata": {}, "spec": {"containers": [container], "restartPolicy": "OnFailure"}}
    for patch in _patches(job):
        template = _patched(template, patch)
    container = next(one for one in template["spec"]["containers"] if one["name"] == _NODE)
    container["env"] = _by_name(_by_name(container.get("env") or [], trainer.get("env") or []), _environment(job))
    template["spec"]["subdomain"] = name
    metadata = template["metadata"]
    suffix = "".join(random.choices(string.ascii_lowercase, k=5))
    return {
        "metadata": {
            **metadata,
            "name": f"{name}-{_NODE}-0-{index}-{suffix}",
            "labels": (metadata.get("labels") or {}) | _labels(name, index),
            "annotations": (metadata.get("annotations") or {}) | {_INDEX: str(index)},
            "ownerReferences": [owner_reference(job)],
        },
        "spec": template["spec"],
    }


def _labels(job: str, index: int) -> dict[str, str]:
    prefix = "jobset.sigs.k8s.io"
    return {
        f"{prefix}/jobset-name": job,
        f"{prefix}/replicatedjob-name": _NODE,
        f"{prefix}/replicatedjob-replicas": "1",
        f"{prefix}/job-index": "0",
        f"{prefix}/job-global-index": "0",
        f"{prefix}/restart-attempt": "0",
        "batch.kubernetes.io/job-name": f"{job}-{_NODE}-0",
        _INDEX: str(index),
    }


def _environment(job: Mapping[str, Any]) -> list[Object]:
    name, trainer = job["metadata"]["name"], job["spec"].get("trainer") or {}
    rank = {"fieldRef": {"fieldPath": f"metadata.annotations['{_INDEX}']"}}
    return [
        {"name": "PET_NNODES", "value": str(_nodes(job))},
        {"name": "PET_NPROC_PER_NODE", "value": _processes(trainer)},
        {"name": "PET_NODE_RANK", "valueFrom": rank},
        {"name": "PET_MASTER_ADDR", "value": f"{name}-{_NODE}-0-0.{name}"},
        {"name": "PET_MASTER_PORT", "value": str(_PORT)},
    ]


def _processes(trainer: Mapping[str, Any]) -> str:
    """As given; without it torch counts the GPUs, or there is one process a requested CPU."""
    if trainer.get("numProcPerNode") is not None:
        return str(trainer["numProcPerNode"])
    resources = trainer.get("resourcesPerNode") or {}
    if any("gpu" in name for name in resources.get("limits") or {}):
        return "auto"
    amount = (resources.get("requests") or {}).get("cpu") or (resources.get("limits") or {}).get("cpu") or 0
    return str(max(1, int(parse_quantity(amount))))


def _patches(job: Mapping[str, Any]) -> list[Object]:
    """The pod templates of the job's patches of its runtime."""
    specs = [patch["trainingRuntimeSpec"] for patch in job["spec"].get("runtimePatches") or []]
    replicated = [one for spec in specs for one in spec["template"]["spec"]["replicatedJobs"] if one["name"] == _NODE]
    return [one["template"]["spec"]["template"] for one in replicated]


def _patched(target: Mapping[str, Any], patch: Mapping[str, Any]) -> Object:
    """Strategic merge: objects by key, lists of named things by name, other lists as a whole."""
    merged = dict(target)
    for key, value in patch.items():
        before = merged.get(key)
        if isinstance(value, Mapping) and isinstance(before, Mapping):
            merged[key] = _patched(before, value)
        elif isinstance(value, list) and isinstance(before, list) and all("name" in item for item in [*value, *before]):
            merged[key] = _by_name(before, value)
        else:
            merged[key] = value
    return merged


def _by_name(target: Sequence[Mapping[str, Any]], patch: Sequence[Mapping[str, Any]]) -> list[Object]:
    """Named things, those of the patch merged into those of the same name."""
    merged = {item["name"]: dict(item) for item in target}
    for item in patch:
        merged[item["name"]] = _patched(merged.get(item["name"], {}), item)
    return list(merged.values())


def _nodes(job: Mapping[str, Any]) -> int:
    count: int = (job["spec"].get("trainer") or {}).get("numNodes", 1)
    return count


def _started(job: Mapping[str, Any], status: Object) -> str:
    """When the deadline's clock began: at the creation, or when the job was resumed."""
    resumed = [one for one in status.get("conditions", []) if (one["type"], one["status"]) == ("Suspended", "False")]
    started: str = resumed[0]["lastTransitionTime"] if resumed else job["metadata"]["creationTimestamp"]
    return started


def _job_status(job: Mapping[str, Any], status: Object, pods: Sequence[Object]) -> Object:
    """Of the one job below a TrainJob: whether it is ready (all its pods are), active, ended."""
    ready = sum(
        pod["status"]["phase"] == "Succeeded"
        or any(one["ready"] for one in pod["status"].get("containerStatuses") or [])
        for pod in pods
    )
    complete, failed = holds(status, "Complete"), holds(status, "Failed")
    suspended = bool(job["spec"].get("suspend"))
    return {
        "name": _NODE,
        "ready": int(ready >= _nodes(job) and not (complete or failed)),
        "succeeded": int(complete),
        "failed": int(failed),
        "active": int(bool(pods) and not (complete or failed or suspended)),
        "suspended": int(suspended),
    }
