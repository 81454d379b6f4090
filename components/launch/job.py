"""The job of one task on the cluster: created once or adopted, deleted when it is no longer followed; and its record."""

from __future__ import annotations

import json
import logging
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from components.launch.client import ApiRetry, ApiUnavailableError, Cluster, ClusterError, ConflictError, NotFoundError
from components.launch.job_manifest import (
    ATTEMPT_LABEL,
    FAILURE_ANNOTATION,
    HASH_ANNOTATION,
    RUN_LABEL,
    TASK_LABEL,
    Backend,
    Identity,
)
from components.launch.pools import Pool
from components.launch.readers import LogLine
from trainer.graph import JobSpec
from trainer.io import artifacts, storage
from trainer.io.artifacts import canonical_json
from trainer.io.errors import LaunchError, TrainerError
from trainer.io.formatting import listed

logger = logging.getLogger(__name__)

SHOWN_DIFFERENCES = 5
LATE_S = 1.0  # how much later than an interrupted request the server may still create what it asked for


class TaskJob:
    """The job of one task. What asks the API server raises a `ClusterError` if it does not answer or refuses."""

    def __init__(self, cluster: Cluster, backend: Backend, spec: JobSpec, pool: Pool, identity: Identity) -> None:
        self.backend = backend
        self.identity = identity  # its attempt is counted when it is submitted
        self.manifest: dict[str, Any] = {}  # as it is sent; rendered when it is submitted
        self._cluster, self._spec, self._pool = cluster, spec, pool
        self._created: dict[str, Any] = {}  # as the server has it; empty until it is created or adopted
        self._unanswered = False  # whether a request to create it got no answer

    @property
    def name(self) -> str:
        return self.identity.name

    @property
    def uid(self) -> str:
        return str(self._created["metadata"]["uid"])

    @property
    def may_exist(self) -> bool:
        """Whether it was created, or requested without an answer."""
        return bool(self._created) or self._unanswered

    @property
    def pod_selector(self) -> str:
        return self.backend.pod_selector(self.name)

    def kubectl(self, verb: str) -> str:
        """Return the kubectl command that does something to the job."""
        return f"kubectl {verb} {self.backend.resource} {self.name} -n {self._cluster.namespace}"

    def submit(self, retry: ApiRetry) -> bool:
        """Create the job, or adopt the one of this run and task that has not failed; returns whether it was created.

        A `LaunchError` if such a job has another specification or failed for good, or the API server refuses.
        """
        labels = self.identity.labels(stage="")
        selector = f"{RUN_LABEL}={labels[RUN_LABEL]},{TASK_LABEL}={labels[TASK_LABEL]}"
        resource = self.backend.resource
        earlier = retry(lambda: self._cluster.list(resource, labels=selector))["items"]
        running = next(
            (
                job
                for job in earlier
                if "deletionTimestamp" not in job["metadata"]
                and self.backend.state(job).phase not in {"succeeded", "failed"}
            ),
            None,
        )
        if not running and (done := self._succeeded(earlier)):
            running = done
        # Counted from the jobs on the cluster, since a restarted task remembers none.
        attempt = (_attempt(running) or 1) if running else 1 + max(map(_attempt, earlier), default=0)
        self.identity = replace(self.identity, attempt=attempt)
        self.manifest = self.backend.render(self._spec, self._pool, self.identity)
        if running:
            self._adopt(running, retry)
            return False
        for job in earlier:
            message = job["metadata"].get("annotations", {}).get(FAILURE_ANNOTATION)
            if message and _hash(job) == _hash(self.manifest):
                name = job["metadata"]["name"]
                raise LaunchError(
                    f"not retried, since it would fail again: {message}. Fix that and start a new run; or, if the fix lies outside of "
                    f"the run, delete the failed job first (kubectl delete {resource} {name} -n {self._cluster.namespace})"
                )
        self._unanswered = True
        try:
            self._created = retry(lambda: self._cluster.create(resource, self.manifest))
        except ConflictError:  # another launcher was faster; or our request arrived, and only its answer was lost
            self._adopt(retry(lambda: self._cluster.get(resource, self.name)), retry)
            return False
        except ClusterError as error:
            self._unanswered = isinstance(error, ApiUnavailableError)
            raise
        return True

    def _succeeded(self, earlier: Sequence[Mapping[str, Any]]) -> dict[str, Any] | None:
        """Return a job of the same specification that succeeded while nobody followed it, if all that it made is there."""
        wanted = _hash(self.backend.render(self._spec, self._pool, self.identity))
        done = [
            dict(job)
            for job in earlier
            if "deletionTimestamp" not in job["metadata"]
            and self.backend.state(job).phase == "succeeded"
            and _hash(job) == wanted
        ]
        return done[-1] if done and all(map(artifacts.exists, self._spec.outputs.values())) else None

    def annotate_failure(self, message: str) -> None:
        """Record on the job that it would fail again."""
        change = {"metadata": {"annotations": {FAILURE_ANNOTATION: message}}}
        self._cluster.patch(self.backend.resource, self.name, change)

    def delete(self) -> bool:
        """Delete the job, if it was created; return whether there was one."""
        if not self._created and self._unanswered:  # the request may have created it all the same
            for pause_s in (0.0, LATE_S):
                time.sleep(pause_s)
                with suppress(NotFoundError):
                    found = self._cluster.get(self.backend.resource, self.name)
                    if _hash(found) == _hash(self.manifest):
                        self._created = found
                    break
        if not self._created:
            return False
        with suppress(NotFoundError, ConflictError):  # it is gone, and another may have its name
            self._cluster.delete(self.backend.resource, self.name, uid=self.uid)
        return True

    def is_gone(self) -> bool:
        """Return whether the job and all its pods are deleted."""
        try:
            return bool(self._cluster.get(self.backend.resource, self.name)["metadata"]["uid"] != self.uid)
        except NotFoundError:
            return True

    def _adopt(self, job: dict[str, Any], retry: ApiRetry) -> None:
        """Take an existing job, if its specification is the same (else a `LaunchError`), and make this task's pod its owner."""
        self._unanswered = False
        if _hash(job) != _hash(self.manifest):
            found = differences(job, self.manifest)
            # Fields that the server and the operator filled in by themselves explain least.
            found.sort(key=lambda text: text.endswith(" -> unset"))
            shown = listed(found, SHOWN_DIFFERENCES, between="; ", last="; and ") or "its recorded hash differs"
            raise LaunchError(
                f"job {self.name} of this run and task exists already with another specification: {shown}. "
                f"Wait for its end, delete it ({self.kubectl('delete')}), or give the run another name"
            )
        self._created = job
        # Without an owner this is None, which removes the former one: its pod's deletion would delete the job.
        change = {"metadata": {"ownerReferences": self.manifest["metadata"].get("ownerReferences")}}
        self._created = retry(lambda: self._cluster.patch(self.backend.resource, self.name, change))


def _attempt(job: Mapping[str, Any]) -> int:
    label = job["metadata"].get("labels", {}).get(ATTEMPT_LABEL, "")
    return int(label) if label.isdigit() else 0


def _hash(job: Mapping[str, Any]) -> str:
    return str(job["metadata"].get("annotations", {}).get(HASH_ANNOTATION, ""))


def differences(existing: Mapping[str, Any], wanted: Mapping[str, Any]) -> list[str]:
    """List what differs between the specifications of two manifests, such as `spec.runPolicy.backoffLimit: 0 -> 3`."""
    pair = [{key: manifest.get(key) for key in ("apiVersion", "kind", "spec")} for manifest in (existing, wanted)]
    return list(_differences("", *pair))


def _differences(path: str, existing: Any, wanted: Any) -> Iterator[str]:
    if isinstance(existing, list) and isinstance(wanted, list):
        existing, wanted = _keyed(existing), _keyed(wanted)
    if not (isinstance(existing, dict) and isinstance(wanted, dict)):
        if existing != wanted:
            yield f"{path}: {_shown(existing)} -> {_shown(wanted)}"
        return
    for key in [*existing, *(key for key in wanted if key not in existing)]:
        inner = f"{path}{key}" if key.startswith("[") else f"{path}.{key}" if path else key
        yield from _differences(inner, existing.get(key), wanted.get(key))


def _keyed(items: list[Any]) -> dict[str, Any]:
    # By `name` where all items have one, so that an added variable in the middle is one difference.
    named = all(isinstance(item, dict) and "name" in item for item in items)
    return {f"[{item['name'] if named else index}]": item for index, item in enumerate(items)}


def _shown(value: Any) -> str:
    return "unset" if value is None else value if isinstance(value, str) else canonical_json(value)


class JobRecord:
    """Collects a job's log lines, and writes its record below a URI, if there is one, at the end.

    A record that cannot be written is a warning: it must not hide how the job ended.
    """

    def __init__(self, uri: str) -> None:
        self._uri, self._folder = uri, tempfile.TemporaryDirectory(prefix="launch-")

    def add_line(self, line: LogLine) -> None:
        """Keep a line of a replica's log."""
        if self._uri:
            path = Path(self._folder.name) / f"{line.replica}.log"
            with self._until_it_fails(), path.open("a", encoding="utf-8") as file:
                file.write(f"{line.time} {line.text}\n")

    def write(self, **contents: object) -> None:
        """Write the logs, and each of the contents as JSON in a file of its name; nothing more can be added then."""
        with self._folder, self._until_it_fails():
            if not self._uri:
                return
            for name, content in contents.items():
                text = json.dumps(content, indent=2, ensure_ascii=False)
                storage.write_bytes(storage.join(self._uri, f"{name}.json"), text.encode())
            for log in Path(self._folder.name).iterdir():
                storage.write_bytes(storage.join(self._uri, "logs", log.name), log.read_bytes())
            logger.info("manifest, status, events and logs of the job are kept in %s", self._uri)

    @contextmanager
    def _until_it_fails(self) -> Iterator[None]:
        """Keep no record after a failure in the block."""
        try:
            yield
        except (TrainerError, OSError) as error:
            logger.warning("the record of the job cannot be kept in %s: %s", self._uri, error)
            self._uri = ""
