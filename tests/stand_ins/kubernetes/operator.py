"""A small training operator: a PyTorchJob becomes pods, and its status follows them, as operator 1.9.4 does it.

Where the real one surprises, this one does the same: with the restart policy ExitCode a retryable failure is retried without
limit unless `backoffLimit` is 0; a job that failed by an exit code which is not retryable has no completion time, so its TTL never
runs out; the pods of a finished job run on unless `cleanPodPolicy` says otherwise; restarts count against `backoffLimit`
only while a pod that restarts in its place is running. There are no services; the kubelet makes names of hosts good by itself.

What it follows stands in github.com/kubeflow/training-operator, branch release-1.9: the look at a job, its limits and its clean-up in
pkg/controller.v1/common/job.go (`ReconcileJobs`, `CleanupJob`), exit codes in pkg/controller.v1/common/pod.go (`ReconcilePods`) and
pkg/util/train/train_util.go (`IsRetryableExitCode`: 128 and above), `backoffLimit` in pkg/core/job.go (`PastBackoffLimit`), conditions
in pkg/util/status.go and pkg/controller.v1/pytorch/pytorchjob_controller.go (`UpdateJobStatus`).
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

from tests.stand_ins.kubernetes import schemas
from tests.stand_ins.kubernetes.conditions import finished, holds, set_condition
from tests.stand_ins.kubernetes.pod_templates import OPERATOR_NAME, defaulted, index_of, render, replica_labels
from tests.stand_ins.kubernetes.resources import PODS, PYTORCHJOBS
from tests.stand_ins.kubernetes.statuses import ApiError
from tests.stand_ins.kubernetes.store import Object, Store, age_s, now

_OURS = {None, "kubeflow.org/training-operator"}
_NO_EXIT_CODE = 0xBEEF
_RETRYABLE_FROM = 128


class TrainingOperator:
    """Reconciles all PyTorchJobs. `sync` is called again and again, by one thread."""

    def __init__(self, store: Store) -> None:
        self.store = store

    def sync(self) -> None:
        """Take every job one step further."""
        for job in self.store.list(PYTORCHJOBS):
            managed_by = job["spec"].get("runPolicy", {}).get("managedBy")
            if "deletionTimestamp" in job["metadata"] or managed_by not in _OURS:
                continue
            try:
                _Reconciliation(self.store, job).run()
            except ApiError as refusal:
                if refusal.code not in {404, 409}:  # changed by somebody else meanwhile: the next round sees it
                    raise


class _Reconciliation:
    """One look at one job."""

    def __init__(self, store: Store, job: Object) -> None:
        self.store, self.job = store, defaulted(job)
        self.name, self.namespace = job["metadata"]["name"], job["metadata"]["namespace"]
        self.policy = self.job["spec"]["runPolicy"]
        self.replicas = self.job["spec"]["pytorchReplicaSpecs"]
        self.before = job.get("status", {})
        self.status = copy.deepcopy(self.before)
        self.pods = [
            pod
            for pod in store.list(PODS, self.namespace)
            if any(owner["uid"] == job["metadata"]["uid"] for owner in pod["metadata"].get("ownerReferences") or [])
        ]

    def run(self) -> None:
        if not self.status:
            set_condition(self.status, "Created", "Created", f"PyTorchJob {self.name} is created.")
        if finished(self.status):
            self._after_the_end()
        elif self.policy.get("suspend"):
            self._suspend()
        else:
            self._resume()
            message = self._limit_passed()
            if message:
                self._fail(message)
            else:
                self._run_replicas()
        self._write()

    def _after_the_end(self) -> None:
        self._clean_up()
        if holds(self.status, "Succeeded"):
            for counts in self.status.get("replicaStatuses", {}).values():
                counts["succeeded"] = counts.pop("active", 0) + counts.get("succeeded", 0)

    def _clean_up(self) -> None:
        """Delete pods as the policy says, and the job itself when its time is over."""
        clean = self.policy["cleanPodPolicy"]
        for pod in self.pods:
            unended = pod["status"]["phase"] in {"Running", "Pending"}
            if not finished(self.status) or clean == "All" or (clean == "Running" and unended):
                self._delete(pod)
        keep_s, completed = self.policy.get("ttlSecondsAfterFinished"), self.status.get("completionTime")
        if finished(self.status) and keep_s is not None and completed and age_s(completed) > keep_s:
            self.store.delete(PYTORCHJOBS, self.namespace, self.name)

    def _suspend(self) -> None:
        self._clean_up()
        message = f"PyTorchJob {self.name} is suspended."
        for counts in self.status.get("replicaStatuses", {}).values():
            counts.pop("active", None)
        if holds(self.status, "Running"):
            set_condition(self.status, "Running", "Suspended", message, value=False)
        if not holds(self.status, "Suspended"):
            set_condition(self.status, "Suspended", "Suspended", message)
            self._event("Normal", "PyTorchJobSuspended", message)

    def _resume(self) -> None:
        if holds(self.status, "Suspended"):
            message = f"PyTorchJob {self.name} is resumed."
            set_condition(self.status, "Suspended", "Resumed", message, value=False)
            self.status["startTime"] = now()
            self._event("Normal", "PyTorchJobResumed", message)

    def _limit_passed(self) -> str:
        """Why the job must fail, if it must."""
        limit, deadline_s = self.policy.get("backoffLimit"), self.policy.get("activeDeadlineSeconds")
        if limit is not None and (self._new_failure_is_too_many(limit) or self._restarts_are_too_many(limit)):
            return f"Job {self.name} has failed because it has reached the specified backoff limit"
        started = self.status.get("startTime")
        if deadline_s is not None and started and age_s(started) >= deadline_s:
            return f"Job {self.name} has failed because it was active longer than specified deadline"
        return ""

    def _new_failure_is_too_many(self, limit: int) -> bool:
        failed = sum(pod["status"]["phase"] == "Failed" for pod in self.pods)
        known = sum(counts.get("failed", 0) for counts in self.status.get("replicaStatuses", {}).values())
        active = sum(
            pod["status"]["phase"] in {"Pending", "Running"} and "deletionTimestamp" not in pod["metadata"]
            for pod in self.pods
        )
        total = sum(replica["replicas"] for replica in self.replicas.values())
        return failed > known and active != total and limit < 1

    def _restarts_are_too_many(self, limit: int) -> bool:
        restarts = sum(
            container["restartCount"]
            for role, replica in self.replicas.items()
            if replica["restartPolicy"] != "Never"
            for pod in self._pods_of(role)
            if pod["status"]["phase"] == "Running"
            for container in pod["status"]["containerStatuses"]
        )
        return restarts > 0 if limit == 0 else restarts >= limit

    def _fail(self, message: str) -> None:
        self.status.setdefault("completionTime", now())
        self._event("Normal", "PyTorchJobFailed", message)
        set_condition(self.status, "Failed", "Failed", message)
        self._clean_up()

    def _run_replicas(self) -> None:
        for role in self.replicas:
            self._reconcile_pods(role)
        self.status.setdefault("startTime", now())
        for role in self.replicas:
            if self._judge(role):
                return

    def _pods_of(self, role: str) -> list[Object]:
        labels = replica_labels(self.job, role).items()
        return [pod for pod in self.pods if labels <= pod["metadata"]["labels"].items()]

    def _reconcile_pods(self, role: str) -> None:
        """Create the pods that are missing, replace those that may be tried again, count the others."""
        there = {index_of(pod): pod for pod in self._pods_of(role)}
        counts = {"active": 0, "failed": 0, "succeeded": 0}
        for index in range(self.replicas[role]["replicas"]):
            pod = there.get(index)
            if pod is None:
                self._create_pod(render(self.job, role, index))
                continue
            self._look_at(role, pod)
            counted = _counted(pod)
            if counted:
                counts[counted] += 1
        selector = ",".join(f"{key}={value}" for key, value in sorted(replica_labels(self.job, role).items()))
        shown = {key: count for key, count in counts.items() if count}
        self.status.setdefault("replicaStatuses", {})[role] = shown | {"selector": selector}

    def _create_pod(self, manifest: Object) -> None:
        """Errors in a job's pod template come to light here: a CRD checks their shape only."""
        try:
            schemas.admit({"apiVersion": PODS.api_version, "kind": PODS.kind, **manifest})
        except ApiError as refusal:
            self._event("Warning", "FailedCreatePod", f"Error creating: {refusal.message}")
            return
        created = self.store.create(PODS, self.namespace, manifest)
        self._event("Normal", "SuccessfulCreatePod", f"Created pod: {created['metadata']['name']}")

    def _look_at(self, role: str, pod: Object) -> None:
        name, phase, code = pod["metadata"]["name"], pod["status"]["phase"], _exit_code(pod)
        if code != _NO_EXIT_CODE:
            self._event("Normal", "ExitedWithCode", f"Pod: {self.namespace}.{name} exited with code {code}")
        self._report_waiting(pod)
        policy = self.replicas[role]["restartPolicy"]
        if phase != "Failed" or policy == "Never":
            return
        if policy == "ExitCode" and code < _RETRYABLE_FROM:
            message = f'job "{self.name}" is failing because "{role}" replica(s) failed.'
            self._event("Warning", "PyTorchJobFailed", message)
            set_condition(self.status, "Failed", "Failed", message)
            return
        self._delete(pod)
        message = f"job {self.name} is restarting because {role} replica(s) failed."
        self._event("Warning", "PyTorchJobRestarting", message)
        set_condition(self.status, "Restarting", "Restarting", message)

    def _report_waiting(self, pod: Object) -> None:
        """The operator repeats on the job what a pod waits for."""
        name = pod["metadata"]["name"]
        containers = pod["status"].get("containerStatuses") or []
        for container in containers:
            wait = container["state"].get("waiting", {})
            if wait.get("message"):
                message = f"Error pod {name} container {container['name']} waiting message: {wait['message']}"
                self._event("Warning", wait["reason"], message)
        for condition in [] if containers else pod["status"].get("conditions") or []:
            if condition["status"] != "True":
                message = f"Error pod {name} condition message: {condition['message']}"
                self._event("Warning", condition["reason"], message)

    def _judge(self, role: str) -> bool:
        """Set the conditions that a role's counts call for; whether that ends the look."""
        counts, replica = self.status["replicaStatuses"][role], self.replicas[role]
        active, failed, succeeded = (counts.get(key, 0) for key in ("active", "failed", "succeeded"))
        if "Master" in self.replicas:
            if role == "Master" and active:
                set_condition(self.status, "Running", "Running", f"PyTorchJob {self.name} is running.")
            if role == "Master" and succeeded == replica["replicas"]:
                self._succeed(f"PyTorchJob {self.name} is successfully completed.")
                return True
        elif succeeded == replica["replicas"] or ("elasticPolicy" in self.job["spec"] and succeeded):
            self._succeed(f"PyTorchJob {self.namespace}/{self.name} successfully completed.")
        elif active:
            set_condition(self.status, "Running", "Running", f"PyTorchJob {self.namespace}/{self.name} is running.")
        if failed and replica["replicas"] > succeeded + active:
            self._report_failed(role, failed)
        return False

    def _report_failed(self, role: str, failed: int) -> None:
        if self.replicas[role]["restartPolicy"] != "Never":
            message = f"PyTorchJob {self.name} is restarting because {failed} {role} replica(s) failed."
            self._event("Warning", "PyTorchJobRestarting", message)
            set_condition(self.status, "Restarting", "Restarting", message)
        else:
            message = f"PyTorchJob {self.name} is failed because {failed} {role} replica(s) failed."
            self._event("Normal", "PyTorchJobFailed", message)
            self.status.setdefault("completionTime", now())
            set_condition(self.status, "Failed", "Failed", message)

    def _succeed(self, message: str) -> None:
        self._event("Normal", "PyTorchJobSucceeded", message)
        self.status.setdefault("completionTime", now())
        set_condition(self.status, "Succeeded", "Succeeded", message)

    def _delete(self, pod: Mapping[str, Any]) -> None:
        if "deletionTimestamp" not in pod["metadata"]:
            name = pod["metadata"]["name"]
            self.store.delete(PODS, self.namespace, name)
            self._event("Normal", "SuccessfulDeletePod", f"Deleted pod: {name}")

    def _event(self, type_: str, reason: str, message: str) -> None:
        self.store.record_event(self.job, type_, reason, message, OPERATOR_NAME)

    def _write(self) -> None:
        if self.status != self.before:
            with self.store.changing(PYTORCHJOBS, self.namespace, self.name) as job:
                job["status"] = self.status


def _exit_code(pod: Mapping[str, Any]) -> int:
    for container in pod["status"].get("containerStatuses") or []:
        if container["name"] == "pytorch" and "terminated" in container["state"]:
            code: int = container["state"]["terminated"]["exitCode"]
            return code
    return _NO_EXIT_CODE


def _counted(pod: Mapping[str, Any]) -> str:
    """As what a pod counts in its role's status; a running one that is being deleted counts as failed."""
    if pod["status"]["phase"] == "Running":
        return "failed" if "deletionTimestamp" in pod["metadata"] else "active"
    return {"Succeeded": "succeeded", "Failed": "failed"}.get(pod["status"]["phase"], "")
