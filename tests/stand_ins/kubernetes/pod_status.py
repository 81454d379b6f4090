"""A pod's status as scheduler and kubelet write it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tests.stand_ins.kubernetes.containers import End
from tests.stand_ins.kubernetes.store import Object, now


def unschedulable(message: str) -> Object:
    """No node takes the pod."""
    condition = {"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": message}
    return {"phase": "Pending", "conditions": [condition], "qosClass": "BestEffort"}


def scheduled(pod: Mapping[str, Any]) -> Object:
    """The pod has a node, which prepares its containers."""
    condition = {"type": "PodScheduled", "status": "True", "lastTransitionTime": now()}
    status = {"phase": "Pending", "conditions": [condition], "startTime": now(), "hostIP": "127.0.0.1"}
    return with_state({**pod, "status": status}, waiting("ContainerCreating", ""), "Pending")


def waiting(reason: str, message: str) -> Object:
    """State of a container that has not started."""
    return {"waiting": {"reason": reason} | ({"message": message} if message else {})}


def running(started_at: str) -> Object:
    """State of a container that runs."""
    return {"running": {"startedAt": started_at}}


def terminated(identity: str, started_at: str, end: End) -> Object:
    return {
        "terminated": {
            "exitCode": end.exit_code,
            "reason": end.reason,
            "startedAt": started_at,
            "finishedAt": end.finished_at,
            "containerID": identity,
        }
        | ({"message": end.message} if end.message else {})
    }


def with_state(
    pod: Mapping[str, Any], state: Object, phase: str, *, last: Object | None = None, restarts: int = 0
) -> Object:
    """The pod's status with its first container in a state, and `last` as the state before its restart."""
    before = pod["status"]
    first = pod["spec"]["containers"][0]
    known = (before.get("containerStatuses") or [{}])[0].get("lastState", {})
    ready = "running" in state
    container = {
        "name": first["name"],
        "image": first["image"],
        "imageID": first["image"] if ready else "",
        "ready": ready,
        "started": ready,
        "restartCount": restarts,
        "state": state,
        "lastState": last or known,
    }
    conditions = [one for one in before.get("conditions", []) if one["type"] == "PodScheduled"]
    conditions += [
        {"type": "Initialized", "status": "True", "lastTransitionTime": before.get("startTime")},
        {"type": "Ready", "status": str(ready)},
        {"type": "ContainersReady", "status": str(ready)},
    ]
    return {**before, "phase": phase, "podIP": "127.0.0.1", "conditions": conditions, "containerStatuses": [container]}
