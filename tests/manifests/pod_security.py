"""Pod Security at its level `restricted`, as the Kubernetes documentation lists it, for what our pods may state."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

HOST_FIELDS = ("hostNetwork", "hostPID", "hostIPC")
VOLUMES = {
    "name", "configMap", "csi", "downwardAPI", "emptyDir", "ephemeral", "persistentVolumeClaim", "projected", "secret",
}  # fmt: skip
PROFILES = {"RuntimeDefault", "Localhost"}


def violations(pod: Mapping[str, Any]) -> list[str]:
    """What keeps a pod's specification from a namespace that enforces `restricted`; empty: nothing."""
    return [*_of_the_pod(pod), *(f"{name}: {what}" for name, what in _of_its_containers(pod))]


def _of_the_pod(pod: Mapping[str, Any]) -> Iterator[str]:
    yield from (f"{field} is set" for field in HOST_FIELDS if pod.get(field))
    for volume in pod.get("volumes", []):
        yield from (f"volume {volume['name']} is a {kind}" for kind in sorted(set(volume) - VOLUMES))
    security = pod.get("securityContext", {})
    if security.get("sysctls"):
        yield "sysctls are set"
    if security.get("runAsUser") == 0:
        yield "runAsUser is 0"


def _of_its_containers(pod: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    for container in [*pod.get("initContainers", []), *pod.get("containers", []), *pod.get("ephemeralContainers", [])]:
        own = container.get("securityContext", {})
        for what in (*_of_its_user(own, pod.get("securityContext", {})), *_of_its_powers(own)):
            yield container["name"], what
        if any("hostPort" in port for port in container.get("ports", [])):
            yield container["name"], "a hostPort is set"


def _of_its_user(own: Mapping[str, Any], pod: Mapping[str, Any]) -> Iterator[str]:
    """A container's own fields go before the pod's."""
    if own.get("runAsNonRoot", pod.get("runAsNonRoot")) is not True:
        yield "runAsNonRoot is not true"
    if own.get("runAsUser") == 0:
        yield "runAsUser is 0"
    if own.get("seccompProfile", pod.get("seccompProfile", {})).get("type") not in PROFILES:
        yield "seccompProfile is neither RuntimeDefault nor Localhost"


def _of_its_powers(own: Mapping[str, Any]) -> Iterator[str]:
    if own.get("privileged"):
        yield "privileged"
    if own.get("allowPrivilegeEscalation") is not False:
        yield "allowPrivilegeEscalation is not false"
    capabilities = own.get("capabilities", {})
    if "ALL" not in capabilities.get("drop", []):
        yield "capabilities are not dropped"
    if set(capabilities.get("add", [])) - {"NET_BIND_SERVICE"}:
        yield "capabilities are added"
    if own.get("procMount", "Default") != "Default":
        yield "procMount is not the default"
