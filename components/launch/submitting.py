"""A job on the cluster: made once for a task, or found again; and deleted when nobody is to follow it."""

from __future__ import annotations

import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from typing import Any

from components.launch.api_errors import (
    ApiRetry,
    ApiUnavailableError,
    ClusterError,
    ConflictError,
    NotFoundError,
)
from components.launch.backends import Backend
from components.launch.client import Cluster
from components.launch.identity import (
    ATTEMPT_LABEL,
    FAILURE_ANNOTATION,
    HASH_ANNOTATION,
    RUN_LABEL,
    TASK_LABEL,
    Identity,
    differences,
)
from components.launch.pools import Pool
from trainer.errors import LaunchError
from trainer.launch import JobSpec

SHOWN_DIFFERENCES = 5
LATE_S = 1.0
"""How much later than an interrupted request the server may still make what it asked for."""


def selector(identity: Identity) -> str:
    """The label selector of a task's jobs, of all attempts."""
    labels = identity.labels(stage="")
    return f"{RUN_LABEL}={labels[RUN_LABEL]},{TASK_LABEL}={labels[TASK_LABEL]}"


class TaskJob:
    """The job of one task."""

    def __init__(self, cluster: Cluster, backend: Backend, spec: JobSpec, pool: Pool, identity: Identity) -> None:
        """Render it; nothing is sent before `submit`.

        Raises:
            TrainerError: the job does not fit the pool or the backend.
        """
        self.backend, self.kind = backend, backend.resource
        self.manifest = backend.render(spec, pool, identity)
        """As it is sent."""
        self._cluster, self._spec, self._pool, self._identity = cluster, spec, pool, identity
        self._made: dict[str, Any] = {}
        """As the server has it; empty until it is made or found."""
        self._sent = False
        """Whether a request went out whose answer did not come."""

    @property
    def name(self) -> str:
        return str(self.manifest["metadata"]["name"])

    @property
    def uid(self) -> str:
        return str(self._made["metadata"]["uid"])

    @property
    def attempt(self) -> int:
        """Which of the task's jobs in its run it is, from 1 on; known when it is submitted."""
        return _attempt(self.manifest)

    @property
    def may_exist(self) -> bool:
        """Whether it was made, or asked for without an answer."""
        return bool(self._made) or self._sent

    @property
    def pod_selector(self) -> str:
        return self.backend.pod_selector(self.name)

    def kubectl(self, verb: str) -> str:
        """The command that does something to it by hand."""
        return f"kubectl {verb} {self.kind} {self.name} -n {self._cluster.namespace}"

    def submit(self, retry: ApiRetry) -> bool:
        """Make the job, or take the one of this run and task that goes on already; gives whether it was made.

        Raises:
            LaunchError: such a job goes on with another specification; or the same one failed, and would again; or the API server
                refuses.
        """
        labels = selector(self._identity)
        earlier = retry(lambda: self._cluster.list(self.kind, labels=labels)).items
        for job in earlier:
            if not self._is_over(job):
                self._adopt(job, retry)
                return False
            self._refuse_to_repeat(job)
        self._number(1 + max((_attempt(job) for job in earlier), default=0))
        self._sent = True
        try:
            self._made = retry(lambda: self._cluster.create(self.kind, self.manifest))
        except ConflictError:  # somebody else was quicker; or our request arrived, and only its answer was lost
            self._adopt(retry(lambda: self._cluster.get(self.kind, self.name)), retry)
            return False
        except ClusterError as error:
            self._sent = isinstance(error, ApiUnavailableError)
            raise
        return True

    def note_failure(self, message: str) -> None:
        """Record on the job that it would fail again.

        Raises:
            ClusterError: the API server does not answer or refuses.
        """
        self._cluster.patch(self.kind, self.name, {"metadata": {"annotations": {FAILURE_ANNOTATION: message}}})

    def _refuse_to_repeat(self, job: Mapping[str, Any]) -> None:
        """
        Raises:
            LaunchError: this very job failed with a message of the trainer's own.
        """
        message = job["metadata"].get("annotations", {}).get(FAILURE_ANNOTATION)
        if message and _hash(job) == _hash(self.manifest):
            name = job["metadata"]["name"]
            raise LaunchError(
                f"not tried again, for it would fail again: {message}. Mend that and start a new run; or, if it is mended outside of "
                f"the run, delete the failed job first (kubectl delete {self.kind} {name} -n {self._cluster.namespace})"
            )

    def delete(self) -> bool:
        """Delete the job, if it was made; gives whether there was one.

        Raises:
            ClusterError: the API server does not answer or refuses.
        """
        if not self._made and self._sent:
            self._find()
        if not self._made:
            return False
        with suppress(NotFoundError, ConflictError):  # it is gone, and another may have its name
            self._cluster.delete(self.kind, self.name, uid=self.uid)
        return True

    def is_gone(self) -> bool:
        """Whether the job and all its pods are deleted."""
        try:
            return bool(self._cluster.get(self.kind, self.name)["metadata"]["uid"] != self.uid)
        except NotFoundError:
            return True

    def _find(self) -> None:
        """Look for the job that a request made whose answer did not come."""
        for pause_s in (0.0, LATE_S):
            time.sleep(pause_s)
            try:
                found = self._cluster.get(self.kind, self.name)
            except NotFoundError:
                continue
            if _hash(found) == _hash(self.manifest):
                self._made = found
            return

    def _number(self, attempt: int) -> None:
        self.manifest = self.backend.render(self._spec, self._pool, replace(self._identity, attempt=attempt))

    def _is_over(self, job: Mapping[str, Any]) -> bool:
        return "deletionTimestamp" in job["metadata"] or self.backend.state(job).phase in {"succeeded", "failed"}

    def _adopt(self, job: dict[str, Any], retry: ApiRetry) -> None:
        """Take a job that is there already, if it is what would have been made, and let it belong to this task's pod.

        Raises:
            LaunchError: it is not.
        """
        self._sent = False
        self._number(_attempt(job) or 1)
        if _hash(job) != _hash(self.manifest):
            raise self._differs(job)
        self._made, owners = job, self.manifest["metadata"].get("ownerReferences")
        change = {"metadata": {"ownerReferences": owners}}
        self._made = retry(lambda: self._cluster.patch(self.kind, self.name, change))

    def _differs(self, job: Mapping[str, Any]) -> LaunchError:
        found = differences(job, self.manifest)
        # What the server and the operator filled in by themselves tells least.
        found.sort(key=lambda text: text.endswith(" -> nothing"))
        shown = "; ".join(found[:SHOWN_DIFFERENCES]) or "its recorded hash is another"
        more = f"; and {len(found) - SHOWN_DIFFERENCES} more" if len(found) > SHOWN_DIFFERENCES else ""
        return LaunchError(
            f"job {self.name} of this run and task is there already, and is not the one that is wanted: {shown}{more}. "
            f"Wait for its end, delete it ({self.kubectl('delete')}), or give the run another name"
        )


def _attempt(job: Mapping[str, Any]) -> int:
    label = job["metadata"].get("labels", {}).get(ATTEMPT_LABEL, "")
    return int(label) if label.isdigit() else 0


def _hash(job: Mapping[str, Any]) -> str:
    return str(job["metadata"].get("annotations", {}).get(HASH_ANNOTATION, ""))
