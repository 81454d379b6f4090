"""Deletion of jobs that are no longer followed. Only jobs with this project's labels are considered.

What asks the API server raises a `ClusterError` if it does not answer or refuses.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from datetime import UTC, datetime

from components.launch.client import (
    Cluster,
    ConflictError,
    ForbiddenError,
    KindNotInstalledError,
    NotFoundError,
)
from components.launch.job_manifest import (
    BACKENDS,
    PODS,
    RUN_LABEL,
    TASK_LABEL,
    WORKFLOWS,
    JobPhase,
    Owner,
    Resource,
    label_value,
)
from trainer.io.errors import SettingsError
from trainer.io.formatting import duration

logger = logging.getLogger(__name__)

ORPHANED_AFTER_S = 120.0
"""How long after the end of its task's pod a job is an orphan: KFP waits a minute at most (`pipelines/distillation.py`) before it retries
the task, whose new pod then adopts the job. A run that has ended retries nothing, and its jobs are orphans at once."""
WORKFLOW_LABEL = "workflows.argoproj.io/workflow"  # the label by which Argo's pods know their Workflow


@dataclass(frozen=True, kw_only=True)
class ProjectJob:
    """A job of this project."""

    resource: Resource
    name: str
    uid: str
    run: str  # the run's label: its name, or a short form of it
    task: str
    phase: JobPhase
    age_s: float
    owner: Owner | None  # the pod of the task that follows it; None: it was created from outside of the cluster
    version: str  # its resource version
    orphaned: str = ""  # why it is an orphan; empty: it is none, or that was not checked

    def __str__(self) -> str:
        age = duration(self.age_s)
        text = f"{self.resource} {self.name} (run {self.run}, {self.task}, {self.phase}, created {age} ago)"
        return f"{text}: {self.orphaned}" if self.orphaned else text

    @property
    def over(self) -> bool:
        return self.phase in {"succeeded", "failed"}


def find(cluster: Cluster, run: str = "") -> list[ProjectJob]:
    """Return the jobs of a run, or of all runs, in the cluster's namespace, the oldest first."""
    selector = f"{RUN_LABEL}={label_value(run)}" if run else RUN_LABEL
    return sorted(_list(cluster, selector), key=lambda job: -job.age_s)


def find_orphaned(cluster: Cluster) -> list[ProjectJob]:
    """Return the jobs in the cluster's namespace that still run although their task's pod ended a while ago, the oldest first.

    A job without an owner is followed from elsewhere, such as a laptop; Kubernetes deletes one whose owner is deleted.
    """
    jobs = [job for job in find(cluster) if not job.over]
    return [replace(job, orphaned=why) for job in jobs if job.owner and (why := _why_orphaned(cluster, job.owner))]


def delete(cluster: Cluster, job: ProjectJob) -> bool:
    """Delete a job, with its pods; return whether it still existed. An orphan that has changed, as by adoption, is left."""
    try:
        cluster.delete(job.resource, job.name, uid=job.uid, version=job.version if job.orphaned else "")
    except (NotFoundError, ConflictError):
        logger.info("%s was changed or deleted meanwhile", job.name)
        return False
    return True


def delete_jobs(cluster: Cluster, run: str) -> list[str]:
    """Delete the jobs of a run that have not ended; return their names. Those that ended stay as evidence."""
    left = [job for job in find(cluster, run) if not job.over]
    for job in left:
        delete(cluster, job)
    return [job.name for job in left]


def parse_age(text: str) -> float:
    """Return the seconds of `90s`, `30m`, `2h`, `7d`; a `SettingsError` if it is no such time."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([smhd])", text)
    if not match:
        raise SettingsError(f"{text!r} is no age; give a number with s, m, h or d, such as 30m or 2h")
    return float(match[1]) * {"s": 1, "m": 60, "h": 3600, "d": 86400}[match[2]]


def _list(cluster: Cluster, selector: str) -> Iterator[ProjectJob]:
    forbidden: list[ForbiddenError] = []
    for backend in BACKENDS.values():
        try:
            jobs = cluster.list(backend.resource, labels=selector)["items"]
        except KindNotInstalledError:  # then there are no such jobs
            continue
        except ForbiddenError as error:
            forbidden.append(error)
            continue
        for job in jobs:
            metadata = job["metadata"]
            owners = metadata.get("ownerReferences") or []
            pods = [Owner(name=owner["name"], uid=owner["uid"]) for owner in owners if owner["kind"] == "Pod"]
            yield ProjectJob(
                resource=backend.resource,
                name=metadata["name"],
                uid=metadata["uid"],
                run=metadata["labels"][RUN_LABEL],
                task=metadata["labels"].get(TASK_LABEL, ""),
                phase=backend.state(job).phase,
                age_s=_seconds_since(metadata["creationTimestamp"]),
                owner=pods[0] if pods else None,
                version=metadata["resourceVersion"],
            )
    if len(forbidden) == len(BACKENDS):
        raise forbidden[0]
    for refusal in forbidden:
        logger.warning("these jobs are skipped: %s", refusal)


def _why_orphaned(cluster: Cluster, owner: Owner) -> str:
    """Return why a job of this owner is an orphan; empty: it is none."""
    try:
        pod = cluster.get(PODS, owner.name)
    except NotFoundError:
        return ""
    status = pod["status"]
    phase, containers = status.get("phase", ""), status.get("containerStatuses") or []
    # The pod's end is the last time in it; an evicted pod reports no end of a container.
    times = [pod["metadata"]["creationTimestamp"]]
    times += [condition.get("lastTransitionTime") for condition in status.get("conditions") or []]
    times += [container["state"].get("terminated", {}).get("finishedAt") for container in containers]
    ended_s = min(_seconds_since(time) for time in times if time)
    if pod["metadata"]["uid"] != owner.uid or phase not in {"Succeeded", "Failed"}:
        return ""
    workflow = pod["metadata"].get("labels", {}).get(WORKFLOW_LABEL, "")
    if not _has_ended(cluster, workflow) and (ended_s < ORPHANED_AFTER_S or _goes_on(cluster, workflow, ended_s)):
        return ""
    return f"the pod of its task, {owner.name}, ended {duration(ended_s)} ago ({phase})"


def _has_ended(cluster: Cluster, workflow: str) -> bool:
    """Return whether a Workflow is there and has ended; of a pod without one nothing is known."""
    try:
        return bool(workflow and cluster.get(WORKFLOWS, workflow).get("status", {}).get("finishedAt"))
    except NotFoundError:
        return False


def _goes_on(cluster: Cluster, workflow: str, ended_s: float) -> bool:
    """Return whether a Workflow has an unfinished pod that was made after another one's end: its next try, which may wait for a node."""
    pods = cluster.list(PODS, labels=f"{WORKFLOW_LABEL}={workflow}")["items"] if workflow else []
    unfinished = [pod for pod in pods if pod["status"].get("phase") not in {"Succeeded", "Failed"}]
    return any(_seconds_since(pod["metadata"]["creationTimestamp"]) <= ended_s for pod in unfinished)


def _seconds_since(time: str) -> float:
    """Return the seconds since an RFC 3339 time; 0 where the cluster's clock is ahead of ours."""
    return max(0.0, (datetime.now(UTC) - datetime.fromisoformat(time)).total_seconds())
