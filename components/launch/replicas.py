"""What a pod's status says about a replica of a job."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from trainer.errors import INTERRUPTED_EXIT_CODE, PREEMPTED_EXIT_CODE
from trainer.launch import MISSED_ANOTHER

STUCK = frozenset(
    {
        "ErrImagePull",
        "ImagePullBackOff",
        "InvalidImageName",
        "ErrImageNeverPull",
        "CreateContainerConfigError",
        "CreateContainerError",
        "RunContainerError",
    }
)
"""Reasons for which a container waits and that seldom pass by themselves."""

_DISRUPTIONS = frozenset(
    {
        "PreemptionByScheduler",
        "DeletionByTaintManager",
        "EvictionByEvictionAPI",
        "DeletionByPodGC",
        "TerminationByKubelet",
    }
)
"""Kubernetes' reasons for the condition DisruptionTarget: it has taken the machine away."""


@dataclass(frozen=True, kw_only=True)
class Termination:
    """How a replica's container ended, or why its pod was taken away."""

    replica: str
    exit_code: int | None
    """None: the pod ended without its container's having started."""
    reason: str
    """Kubernetes' word: Completed, Error, OOMKilled, Evicted, PreemptionByScheduler, ..."""
    message: str
    """What the container left as its termination message, or Kubernetes' sentence."""
    finished: str
    """RFC 3339 time, in whole seconds."""

    @property
    def asked_to_end(self) -> bool:
        """Whether it left on request, as a replica does that is preempted, or that the others leave behind."""
        return self.exit_code in {INTERRUPTED_EXIT_CODE, PREEMPTED_EXIT_CODE}

    @property
    def missed_another(self) -> bool:
        """Whether it says that another one was gone."""
        return self.message.endswith(MISSED_ANOTHER)

    @property
    def failed(self) -> bool:
        """Whether it ended by a fault of its own, as far as can be told."""
        taken_away = self.exit_code is None or self.reason in _DISRUPTIONS
        return self.exit_code != 0 and not (taken_away or self.asked_to_end or self.missed_another)

    def __str__(self) -> str:
        code = "" if self.exit_code is None else f" with exit code {self.exit_code}"
        return f"ended{code}" + (f" ({self.reason})" if self.reason not in {"", "Error", "Completed"} else "")


@dataclass(frozen=True, kw_only=True)
class Replica:
    """One pod of a job."""

    name: str
    """Such as `worker-0`."""
    pod: str
    uid: str
    placed: bool
    """Whether its container runs or ran: it is not waiting for a node, an image or a volume."""
    running: bool = False
    restarts: int = 0
    waiting: str = ""
    """Why its container does not run, such as ImagePullBackOff."""
    waiting_message: str = ""
    over: bool = False
    """Whether its container has ended and is not started again."""
    ended: Termination | None = None
    """The last end of its container."""
    deleting: bool = False
    """Whether somebody has asked for its deletion."""

    @property
    def stuck(self) -> bool:
        """Whether it waits for something that does not come by itself."""
        return self.waiting in STUCK


def read(pod: Mapping[str, Any], name: str, container: str) -> Replica:
    """The replica that a pod is.

    Args:
        pod: as the API shows it.
        name: the replica's.
        container: the one that trains.
    """
    status = pod.get("status", {})
    own = _status_of(status.get("containerStatuses"), container)
    state = own.get("state", {})
    waiting = _first_waiting(status) if "running" not in state else {}
    phase = status.get("phase", "Pending")
    return Replica(
        name=name,
        pod=pod["metadata"]["name"],
        uid=pod["metadata"]["uid"],
        placed=bool(
            own.get("restartCount") or state.keys() & {"running", "terminated"} or phase in {"Succeeded", "Failed"}
        ),
        running="running" in state,
        restarts=own.get("restartCount", 0),
        waiting=waiting.get("reason", ""),
        waiting_message=waiting.get("message", ""),
        over=phase in {"Succeeded", "Failed"},
        ended=_termination(name, status, own),
        deleting="deletionTimestamp" in pod["metadata"],
    )


def _status_of(statuses: list[dict[str, Any]] | None, container: str) -> dict[str, Any]:
    return next((status for status in statuses or [] if status["name"] == container), {})


def _first_waiting(status: Mapping[str, Any]) -> dict[str, Any]:
    """Why a container waits; that of an init container goes first, since the others wait for it."""
    for container in [*(status.get("initContainerStatuses") or []), *(status.get("containerStatuses") or [])]:
        waiting: dict[str, Any] | None = container.get("state", {}).get("waiting")
        if waiting:
            return waiting
    return {}


def _termination(name: str, status: Mapping[str, Any], own: Mapping[str, Any]) -> Termination | None:
    end = own.get("state", {}).get("terminated") or own.get("lastState", {}).get("terminated") or {}
    taken = _taken_away(status)
    if not end and not taken:
        return None
    return Termination(
        replica=name,
        exit_code=end.get("exitCode"),
        reason=taken.get("reason") or end.get("reason") or "",
        message=(taken.get("message") or end.get("message") or "").strip(),
        finished=end.get("finishedAt") or taken.get("lastTransitionTime") or "",
    )


def _taken_away(status: Mapping[str, Any]) -> Mapping[str, Any]:
    """Why Kubernetes ended the pod itself, with `reason` and `message`; empty if it did not."""
    if status.get("phase") == "Failed" and status.get("reason"):
        return status
    conditions = status.get("conditions") or []
    return next((one for one in conditions if one["type"] == "DisruptionTarget" and one["status"] == "True"), {})
