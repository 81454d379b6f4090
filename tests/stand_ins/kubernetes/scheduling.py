"""Nodes, and which of them takes a pod."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from decimal import Decimal
from typing import Any

from kubernetes.utils.quantity import parse_quantity


@dataclass(frozen=True, kw_only=True)
class Node:
    """A machine, real enough to schedule on."""

    name: str = "stand-in"
    capacity: Mapping[str, str] = field(default_factory=dict)
    """Resource -> quantity. What is not named here is unlimited if it is Kubernetes' own (cpu, memory), and absent
    if a device plugin offers it (nvidia.com/gpu)."""
    labels: Mapping[str, str] = field(default_factory=dict)
    taints: Sequence[Mapping[str, str]] = ()
    """Each `{"key": ..., "value": ..., "effect": "NoSchedule"}`."""


def place(pod: Mapping[str, Any], nodes: Sequence[Node], others: Sequence[Mapping[str, Any]]) -> tuple[str, str]:
    """The node for a pod, or why there is none.

    Args:
        pod: to be placed.
        nodes: of the cluster.
        others: pods that have a node and have not ended.

    Returns:
        The node's name and an empty text, or an empty text and the scheduler's message.
    """
    obstacles: Counter[str] = Counter()
    for node in nodes:
        found = _obstacles(pod, node, [other for other in others if other["spec"]["nodeName"] == node.name])
        if not found:
            return node.name, ""
        obstacles.update(found)
    count = len(nodes)
    reasons = ", ".join(sorted(f"{times} {reason}" for reason, times in obstacles.items()))
    return "", (
        f"0/{count} nodes are available: {reasons}. preemption: 0/{count} nodes are available: "
        f"{count} Preemption is not helpful for scheduling."
    )


def _obstacles(pod: Mapping[str, Any], node: Node, others: Sequence[Mapping[str, Any]]) -> list[str]:
    labels = {
        "kubernetes.io/os": "linux",
        "kubernetes.io/arch": "amd64",
        "kubernetes.io/hostname": node.name,
        **node.labels,
    }
    if any(labels.get(key) != value for key, value in (pod["spec"].get("nodeSelector") or {}).items()):
        return ["node(s) didn't match Pod's node affinity/selector"]
    for taint in node.taints:
        if not any(_tolerates(toleration, taint) for toleration in pod["spec"].get("tolerations") or []):
            return [f"node(s) had untolerated taint {{{taint['key']}: {taint.get('value', '')}}}"]
    used = sum((requested(other) for other in others), Counter())
    return [
        f"Insufficient {resource}"
        for resource, wanted in sorted(requested(pod).items())
        if (free := _capacity(node, resource)) is not None and wanted > free - used[resource]
    ]


def requested(pod: Mapping[str, Any]) -> Counter[str]:
    """Resource -> amount over all containers; a limit without a request is one."""
    total: Counter[str] = Counter()
    for container in pod["spec"]["containers"]:
        resources = container.get("resources") or {}
        for resource, amount in {**(resources.get("limits") or {}), **(resources.get("requests") or {})}.items():
            total[resource] += parse_quantity(amount)
    return total


def _capacity(node: Node, resource: str) -> Decimal | None:
    """How much a node has of a resource; `None` is without limit."""
    absent = "0" if "/" in resource else None
    amount = node.capacity.get(resource, absent)
    return None if amount is None else Decimal(parse_quantity(amount))


def _tolerates(toleration: Mapping[str, Any], taint: Mapping[str, str]) -> bool:
    if toleration.get("key") not in {None, taint["key"]} or toleration.get("effect") not in {None, "", taint["effect"]}:
        return False
    return toleration.get("operator") == "Exists" or toleration.get("value", "") == taint.get("value", "")
