"""Which job this is: its name, its labels, its owner, and what makes it the same as another."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trainer.artifacts import canonical_json, digest
from trainer.errors import LaunchError

RUN_LABEL = "vit-distillation/run"
TASK_LABEL = "vit-distillation/task"
STAGE_LABEL = "vit-distillation/stage"
ATTEMPT_LABEL = "vit-distillation/attempt"
HASH_ANNOTATION = "vit-distillation/spec-hash"
FAILURE_ANNOTATION = "vit-distillation/failure"
"""Of a failed job: the message, where the same job would fail with it again."""

NAMESPACE_VARIABLE = "TRAINER_NAMESPACE"
DEFAULT_NAMESPACE = "kubeflow"
_OWN_NAMESPACE = Path("/var/run/secrets/kubernetes.io/serviceaccount/namespace")
"""Where a pod finds the namespace that it runs in."""


@dataclass(frozen=True, kw_only=True)
class Owner:
    """The pod of the task that launches; when it is deleted, so is the job."""

    name: str
    uid: str


@dataclass(frozen=True, kw_only=True)
class Identity:
    """Which job of which run this is."""

    run: str
    """Name or id of the run, any text."""
    task: str
    """The pipeline's task, which is the stage's name."""
    attempt: int = 1
    """Counts the jobs of one task in one run."""
    namespace: str = DEFAULT_NAMESPACE
    owner: Owner | None = None

    @property
    def name(self) -> str:
        """The job's name: a DNS-1035 label of at most 40 characters, the same for equal run, task and attempt.

        40, because the operator adds `-worker-31` and pods' names may have 63.
        """
        distinct = digest([self.run, self.task, self.attempt])[:8]
        words = f"{_slug(self.task)[:10].strip('-') or 'task'}-{_slug(self.run)[:20].strip('-') or 'run'}"
        return f"{words if words[0].isalpha() else f'j{words[1:]}'}-{distinct}"

    def labels(self, stage: str) -> dict[str, str]:
        """Labels of the job and its pods, by which they are found."""
        return {RUN_LABEL: label(self.run), TASK_LABEL: label(self.task), STAGE_LABEL: label(stage)}

    def metadata(self, stage: str, body: Mapping[str, Any]) -> dict[str, Any]:
        """The metadata of a job.

        Args:
            stage: the stage that it runs.
            body: the manifest without metadata, whose hash is recorded.
        """
        metadata: dict[str, Any] = {
            "name": self.name,
            "namespace": self.namespace,
            "labels": self.labels(stage) | {ATTEMPT_LABEL: str(self.attempt)},
            "annotations": {HASH_ANNOTATION: spec_hash(body)},
        }
        if self.owner:
            owner = {"apiVersion": "v1", "kind": "Pod", "name": self.owner.name, "uid": self.owner.uid}
            metadata["ownerReferences"] = [owner]
        return metadata


def from_environment(task: str, *, namespace: str = "", attempt: int = 1) -> Identity:
    """The job of a task, from what Kubeflow Pipelines or a local run put into the environment.

    Args:
        task: the task's name.
        namespace: where its job goes; empty: `TRAINER_NAMESPACE`, or the pod's own namespace, or kubeflow.
        attempt: counts the jobs of the task.

    Raises:
        LaunchError: nothing names the run.
    """
    run = os.environ.get("KFP_RUN_ID") or os.environ.get("TRAINER_RUN")
    if not run:
        raise LaunchError(f"{task}: nothing names the run, so its job can have no name; set TRAINER_RUN")
    pod, uid = os.environ.get("KFP_POD_NAME"), os.environ.get("KFP_POD_UID")
    return Identity(
        run=run,
        task=task,
        attempt=attempt,
        namespace=namespace or default_namespace(),
        owner=Owner(name=pod, uid=uid) if pod and uid else None,
    )


def default_namespace() -> str:
    """Where jobs go unless told otherwise: `TRAINER_NAMESPACE`, or the pod's own namespace, or kubeflow."""
    named = os.environ.get(NAMESPACE_VARIABLE)
    if named:
        return named
    return _OWN_NAMESPACE.read_text().strip() if _OWN_NAMESPACE.is_file() else DEFAULT_NAMESPACE


def label(text: str) -> str:
    """A valid value of a label for any text: itself where it is one, otherwise shortened and told apart by a digest."""
    if re.fullmatch(r"[A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?", text):
        return text
    words = re.sub(r"[^-A-Za-z0-9_.]+", "-", text)[:50].strip("-_.")
    return f"{words}-{digest(text)[:8]}".lstrip("-")


def _slug(text: str) -> str:
    return re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-")


def spec_hash(manifest: Mapping[str, Any]) -> str:
    """A digest of what makes a job the same: its kind and specification, but neither name, owner nor attempt."""
    return digest([manifest["apiVersion"], manifest["kind"], manifest["spec"]])[:16]


def differences(existing: Mapping[str, Any], wanted: Mapping[str, Any]) -> list[str]:
    """What differs between the specifications of two manifests, in words: `spec.runPolicy.backoffLimit: 0 -> 3`."""
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
    """A list as a table, by `name` where all items have one: so one more variable in the middle is one difference."""
    named = all(isinstance(item, dict) and "name" in item for item in items)
    return {f"[{item['name'] if named else index}]": item for index, item in enumerate(items)}


def _shown(value: Any) -> str:
    return "nothing" if value is None else value if isinstance(value, str) else canonical_json(value)
