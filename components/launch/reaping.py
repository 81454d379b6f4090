"""Deleting jobs that nobody follows any more. Only jobs with this project's labels are ever looked at."""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from components.launch.backends import BACKENDS
from components.launch.cluster import Cluster
from components.launch.identity import RUN_LABEL, TASK_LABEL, label
from components.launch.patience import duration
from components.launch.refusals import ConflictError, DeniedError, NotFoundError, NotInstalledError
from components.launch.resources import Resource
from components.launch.state import Phase
from components.launch.submitting import resource
from trainer.errors import SettingsError

logger = logging.getLogger(__name__)

_SECONDS: Mapping[str, int] = {"s": 1, "m": 60, "h": 3600, "d": 86400}


@dataclass(frozen=True, kw_only=True)
class Found:
    """A job of this project."""

    kind: Resource
    name: str
    uid: str
    run: str
    """The run's label: its name, or a short form of it."""
    task: str
    phase: Phase
    age_s: float

    def __str__(self) -> str:
        return f"{self.kind} {self.name} (run {self.run}, {self.task}, {self.phase}, made {duration(self.age_s)} ago)"

    @property
    def over(self) -> bool:
        return self.phase in {"succeeded", "failed"}


def find(cluster: Cluster, run: str = "") -> list[Found]:
    """The jobs of a run, or of all runs, in the cluster's namespace, the oldest first.

    Raises:
        ClusterError: the API server does not answer or refuses.
    """
    selector = f"{RUN_LABEL}={label(run)}" if run else RUN_LABEL
    return sorted(_listed(cluster, selector), key=lambda job: -job.age_s)


def delete(cluster: Cluster, job: Found) -> None:
    """Delete a job, with its pods.

    Raises:
        ClusterError: the API server does not answer or refuses.
    """
    try:
        cluster.delete(job.kind, job.name, uid=job.uid)
    except (NotFoundError, ConflictError):
        logger.info("%s was deleted by somebody else meanwhile", job.name)


def delete_jobs(cluster: Cluster, run: str) -> list[str]:
    """Delete the jobs of a run that have not ended; gives their names. Those that ended stay, to be looked at.

    Raises:
        ClusterError: the API server does not answer or refuses.
    """
    left = [job for job in find(cluster, run) if not job.over]
    for job in left:
        delete(cluster, job)
    return [job.name for job in left]


def age(text: str) -> float:
    """Seconds: `90s`, `30m`, `2h`, `7d`.

    Raises:
        SettingsError: it is no such time.
    """
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([smhd])", text)
    if not match:
        raise SettingsError(f"{text!r} is no age; give a number with s, m, h or d, such as 30m or 2h")
    return float(match[1]) * _SECONDS[match[2]]


def _listed(cluster: Cluster, selector: str) -> Iterator[Found]:
    refused: list[DeniedError] = []
    for backend in BACKENDS.values():
        kind = resource(backend)
        try:
            jobs = cluster.list(kind, labels=selector).items
        except NotInstalledError:  # then there are no such jobs
            continue
        except DeniedError as error:
            refused.append(error)
            continue
        for job in jobs:
            yield _found(kind, job, backend.state(job).phase)
    if len(refused) == len(BACKENDS):
        raise refused[0]
    for refusal in refused:
        logger.warning("these jobs are not looked at: %s", refusal)


def _found(kind: Resource, job: Mapping[str, Any], phase: Phase) -> Found:
    metadata = job["metadata"]
    created = datetime.fromisoformat(metadata["creationTimestamp"])
    return Found(
        kind=kind,
        name=metadata["name"],
        uid=metadata["uid"],
        run=metadata["labels"][RUN_LABEL],
        task=metadata["labels"].get(TASK_LABEL, ""),
        phase=phase,
        age_s=(datetime.now(UTC) - created).total_seconds(),
    )
