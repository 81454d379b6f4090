"""A small Job controller: an Indexed Job becomes pods, and its status follows them, as Kubernetes 1.34 does it.

What it follows stands in github.com/kubernetes/kubernetes, pkg/controller/job: a failed pod stays, and another one takes its index unless
its failures pass `backoffLimitPerIndex` (backoff_utils.go, indexed_job_utils.go); the rules of `podFailurePolicy` are tried in their order,
and the first that fits decides (pod_failure_policy.go); with `successPolicy` the pods that still run are ended once the indexes that it
names have succeeded (success_policy.go). Jobs of another completion mode are left alone.
"""

from __future__ import annotations

import copy
import random
import string
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from tests.stand_ins.kubernetes import schemas
from tests.stand_ins.kubernetes.conditions import holds, set_plain_condition
from tests.stand_ins.kubernetes.controller import Controller
from tests.stand_ins.kubernetes.pod_templates import owner_reference
from tests.stand_ins.kubernetes.resources import JOBS, PODS
from tests.stand_ins.kubernetes.statuses import ApiError
from tests.stand_ins.kubernetes.store import Object, age_s, now

_INDEX = "batch.kubernetes.io/job-completion-index"
_VARIABLE = "JOB_COMPLETION_INDEX"
_CONTROLLER = "job-controller"


class JobController(Controller):
    """Reconciles all Indexed Jobs."""

    kind = JOBS

    def reconcile(self, job: Object) -> None:
        if job["spec"].get("completionMode") != "Indexed":
            return
        status, pods = copy.deepcopy(job.get("status", {})), self.pods_of(job)
        if holds(status, "Complete") or holds(status, "Failed"):
            keep_s = job["spec"].get("ttlSecondsAfterFinished")
            ended = next(one for one in status["conditions"] if one["type"] in {"Complete", "Failed"})
            if keep_s is not None and age_s(ended["lastTransitionTime"]) > keep_s:
                self.store.delete(JOBS, job["metadata"]["namespace"], job["metadata"]["name"])
            return
        if job["spec"].get("suspend"):
            set_plain_condition(status, "Suspended", "True", "JobSuspended", "Job suspended")
            self.delete_active(pods)
        else:
            if holds(status, "Suspended"):
                set_plain_condition(status, "Suspended", "False", "JobResumed", "Job resumed")
            status.setdefault("startTime", now())
            self._run(job, status, pods)
        _count(status, pods)
        self.write_status(job, status)

    def _run(self, job: Object, status: Object, pods: Sequence[Object]) -> None:
        spec, name = job["spec"], job["metadata"]["name"]
        succeeded = {_index(pod) for pod in pods if pod["status"]["phase"] == "Succeeded"}
        failures, mistake = _failures(spec, pods)
        limit = spec.get("backoffLimitPerIndex")
        given_up = {index for index, count in failures.items() if limit is not None and count > limit} - succeeded
        deadline_s = spec.get("activeDeadlineSeconds")
        rules = (spec.get("successPolicy") or {}).get("rules", [])
        named = {int(index) for rule in rules for index in rule["succeededIndexes"].split(",")}
        everything = set(range(spec["completions"]))
        if mistake:
            self._end(status, pods, "Failed", "PodFailurePolicy", mistake)
        elif deadline_s and age_s(status["startTime"]) > deadline_s:
            self._end(status, pods, "Failed", "DeadlineExceeded", "Job was active longer than specified deadline")
        elif named and named <= succeeded:
            self._end(status, pods, "Complete", "SuccessPolicy", "Matched rules at index 0")
        elif succeeded | given_up == everything:
            if given_up:
                self._end(status, pods, "Failed", "FailedIndexes", "Job has failed indexes")
            else:
                self._end(status, pods, "Complete", "CompletionsReached", "Reached expected number of succeeded pods")
        else:
            active = {_index(pod) for pod in pods if pod["status"]["phase"] in {"Pending", "Running"}}
            for index in sorted(everything - succeeded - given_up - active)[: spec["parallelism"] - len(active)]:
                self._create(job, name, index)

    def _create(self, job: Object, name: str, index: int) -> None:
        manifest = {"apiVersion": PODS.api_version, "kind": PODS.kind, **render(job, index)}
        try:
            schemas.admit(manifest)
        except ApiError as error:
            self.store.record_event(job, "Warning", "FailedCreate", f"Error creating: {error.message}", _CONTROLLER)
            return
        created = self.store.create(PODS, job["metadata"]["namespace"], manifest)["metadata"]["name"]
        self.store.record_event(job, "Normal", "SuccessfulCreate", f"Created pod: {created}", _CONTROLLER)

    def _end(self, status: Object, pods: Sequence[Object], type_: str, reason: str, message: str) -> None:
        """First what will be true, then, when no pod runs any more, the end."""
        before = {"Complete": "SuccessCriteriaMet", "Failed": "FailureTarget"}[type_]
        set_plain_condition(status, before, "True", reason, message)
        self.delete_active(pods)
        if not any(pod["status"]["phase"] in {"Pending", "Running"} for pod in pods):
            set_plain_condition(status, type_, "True", reason, message)


def render(job: Mapping[str, Any], index: int) -> Object:
    """The manifest of the pod of one index."""
    name, template = job["metadata"]["name"], copy.deepcopy(job["spec"]["template"])
    metadata = template.get("metadata") or {}
    own = {"name": _VARIABLE, "valueFrom": {"fieldRef": {"fieldPath": f"metadata.labels['{_INDEX}']"}}}
    for container in template["spec"]["containers"]:
        container["env"] = [*(container.get("env") or []), own]
    labels = {"batch.kubernetes.io/job-name": name, "job-name": name, _INDEX: str(index)}
    return {
        "metadata": {
            **metadata,
            "name": f"{name}-{index}-{''.join(random.choices(string.ascii_lowercase, k=5))}",
            "labels": (metadata.get("labels") or {}) | labels,
            "annotations": (metadata.get("annotations") or {}) | {_INDEX: str(index)},
            "ownerReferences": [owner_reference(job)],
        },
        "spec": template["spec"],
    }


def _index(pod: Mapping[str, Any]) -> int:
    return int(pod["metadata"]["labels"][_INDEX])


def _failures(spec: Mapping[str, Any], pods: Sequence[Object]) -> tuple[Counter[int], str]:
    """How often each index has failed, and why the job has to fail at once, if it has."""
    counts: Counter[int] = Counter()
    for pod in pods:
        if pod["status"]["phase"] != "Failed":
            continue
        action, why = _ruled(spec, pod)
        if action == "FailJob":
            return counts, why
        counts[_index(pod)] += action != "Ignore"
    return counts, ""


def _ruled(spec: Mapping[str, Any], pod: Object) -> tuple[str, str]:
    status, name = pod["status"], pod["metadata"]["name"]
    true = {one["type"] for one in status.get("conditions") or [] if one["status"] == "True"}
    codes = {
        one["name"]: one["state"]["terminated"]["exitCode"]
        for one in status.get("containerStatuses") or []
        if "terminated" in one["state"]
    }
    for number, rule in enumerate((spec.get("podFailurePolicy") or {}).get("rules", [])):
        if any(pattern["type"] in true for pattern in rule.get("onPodConditions") or []):
            return rule[
                "action"
            ], f"Pod {name} has condition DisruptionTarget matching {rule['action']} rule at index {number}"
        wanted = rule.get("onExitCodes")
        for container, code in codes.items() if wanted else ():
            of_it, fits = (
                container == wanted["containerName"],
                (code in wanted["values"]) == (wanted["operator"] == "In"),
            )
            if code and of_it and fits:
                cause = (
                    f"Container {container} for pod {pod['metadata']['namespace']}/{name} failed with exit code {code}"
                )
                return rule["action"], f"{cause} matching {rule['action']} rule at index {number}"
    return "Count", ""


def _count(status: Object, pods: Sequence[Object]) -> None:
    phases = Counter(pod["status"]["phase"] for pod in pods)
    ready = sum(any(one["ready"] for one in pod["status"].get("containerStatuses") or []) for pod in pods)
    counts = {
        "active": phases["Pending"] + phases["Running"],
        "ready": ready,
        "succeeded": phases["Succeeded"],
        "failed": phases["Failed"],
    }
    for name, count in counts.items():
        status.pop(name, None)
        if count or name == "ready":
            status[name] = count
