"""Conditions of jobs: of a PyTorchJob by the training operator's rules, of others by those of Kubernetes' own library."""

from __future__ import annotations

from typing import Any

from tests.stand_ins.kubernetes.store import Object, now


def holds(status: Object, type_: str) -> bool:
    """Whether a condition is there and true."""
    return any(one["type"] == type_ and one["status"] == "True" for one in status.get("conditions") or [])


def finished(status: Object) -> bool:
    """Whether the job has ended, one way or the other."""
    return holds(status, "Succeeded") or holds(status, "Failed")


def set_condition(status: Object, type_: str, reason: str, message: str, *, value: bool = True) -> None:
    """Add or change a condition.

    Nothing changes after Failed. Running and Restarting replace each other, and the end makes Running false.
    """
    conditions: list[dict[str, Any]] = status.setdefault("conditions", [])
    current = next((one for one in conditions if one["type"] == type_), None)
    new = {"type": type_, "status": str(value), "reason": f"PyTorchJob{reason}", "message": message}
    if holds(status, "Failed") or (current and all(current[key] == new[key] for key in ("status", "reason"))):
        return
    same = current is not None and current["status"] == new["status"]
    new |= {"lastUpdateTime": now(), "lastTransitionTime": current["lastTransitionTime"] if current and same else now()}
    replaced = {"Restarting": "Running", "Running": "Restarting"}.get(type_)
    kept = [one for one in conditions if one["type"] not in {type_, replaced}]
    if type_ in {"Succeeded", "Failed"}:
        kept = [{**one, "status": "False"} if one["type"] == "Running" else one for one in kept]
    status["conditions"] = [*kept, new]


def set_plain_condition(status: Object, type_: str, value: str, reason: str, message: str) -> None:
    """Add or change a condition by the rules of Kubernetes' own library."""
    conditions: list[Object] = status.setdefault("conditions", [])
    current = next((one for one in conditions if one["type"] == type_), None)
    since = current["lastTransitionTime"] if current and current["status"] == value else now()
    new = {"type": type_, "status": value, "reason": reason, "message": message, "lastTransitionTime": since}
    if current is None:
        conditions.append(new)
    else:
        current.update(new)
