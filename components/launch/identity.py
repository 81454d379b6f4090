"""The identity of a job: its name, labels and owner, and the hash of its specification."""

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
"""Of a failed job that would fail again: its message."""

NAMESPACE_VARIABLE = "TRAINER_NAMESPACE"
DEFAULT_NAMESPACE = "kubeflow"
_OWN_NAMESPACE = Path("/var/run/secrets/kubernetes.io/serviceaccount/namespace")
"""The file that holds a pod's own namespace."""


@dataclass(frozen=True, kw_only=True)
class Owner:
    """The pod of the task that launches; when it is deleted, so is the job."""

    name: str
    uid: str


@dataclass(frozen=True, kw_only=True)
class Identity:
    """A job of a run."""

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
        """The job's name: a DNS-1035 label of at most 40 characters, the same for equal run, task and attempt."""
        # 40 characters, because the operator adds `-worker-31` and pods' names may have 63.
        distinct = digest([self.run, self.task, self.attempt])[:8]
        task, run = (re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-") for text in (self.task, self.run))
        words = f"{task[:10].strip('-') or 'task'}-{run[:20].strip('-') or 'run'}"
        return f"{words if words[0].isalpha() else f'j{words[1:]}'}-{distinct}"

    def labels(self, stage: str) -> dict[str, str]:
        """Return the labels of the job and its pods, by which they are found."""
        return {RUN_LABEL: label_value(self.run), TASK_LABEL: label_value(self.task), STAGE_LABEL: label_value(stage)}

    def metadata(self, stage: str, body: Mapping[str, Any]) -> dict[str, Any]:
        """Render the metadata of a job.

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
    """Return the identity of a task's job, from the environment that Kubeflow Pipelines or a local run has set.

    Args:
        task: the task's name.
        namespace: where its job goes; empty: `TRAINER_NAMESPACE`, or the pod's own namespace, or kubeflow.
        attempt: which of the task's jobs it is.

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
    """Return the namespace that jobs go to by default: `TRAINER_NAMESPACE`, or the pod's own, or kubeflow."""
    named = os.environ.get(NAMESPACE_VARIABLE)
    if named:
        return named
    return _OWN_NAMESPACE.read_text().strip() if _OWN_NAMESPACE.is_file() else DEFAULT_NAMESPACE


def label_value(text: str) -> str:
    """Return a valid label value for any text: the text itself if it is one, otherwise a short form with a digest."""
    if re.fullmatch(r"[A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?", text):
        return text
    words = re.sub(r"[^-A-Za-z0-9_.]+", "-", text)[:50].strip("-_.")
    return f"{words}-{digest(text)[:8]}".lstrip("-")


def spec_hash(manifest: Mapping[str, Any]) -> str:
    """Return a digest of a job's kind and specification, but neither name, owner nor attempt."""
    return digest([manifest["apiVersion"], manifest["kind"], manifest["spec"]])[:16]


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
