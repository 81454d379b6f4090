"""The check of Pod Security finds what the level `restricted` forbids."""

import copy

import pytest

from tests.manifests.pod_security import violations

GOOD = {
    "securityContext": {"runAsNonRoot": True, "seccompProfile": {"type": "RuntimeDefault"}},
    "initContainers": [
        {"name": "first", "securityContext": {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}}}
    ],
    "containers": [
        {
            "name": "main",
            "ports": [{"containerPort": 5000}],
            "securityContext": {
                "allowPrivilegeEscalation": False,
                "capabilities": {"drop": ["ALL"], "add": ["NET_BIND_SERVICE"]},
            },
        }
    ],
    "volumes": [
        {"name": "temporary", "emptyDir": {}},
        {"name": "data", "persistentVolumeClaim": {"claimName": "data"}},
    ],
}


def changed(path, value):
    pod = copy.deepcopy(GOOD)
    *parents, last = path
    part = pod
    for step in parents:
        part = part[step] if isinstance(step, int) else part.setdefault(step, {})
    part[last] = value
    return pod


def test_a_restricted_pod_passes():
    assert violations(GOOD) == []


SECURITY = ("containers", 0, "securityContext")


@pytest.mark.parametrize(
    ("path", "value", "complaint"),
    [
        (("hostNetwork",), True, "hostNetwork is set"),
        (("hostPID",), True, "hostPID is set"),
        (("hostIPC",), True, "hostIPC is set"),
        (("volumes", 0, "hostPath"), {"path": "/"}, "volume temporary is a hostPath"),
        (("volumes", 0, "nfs"), {"path": "/"}, "volume temporary is a nfs"),
        (("securityContext", "sysctls"), [{"name": "a", "value": "b"}], "sysctls are set"),
        (("securityContext", "runAsUser"), 0, "runAsUser is 0"),
        (("securityContext", "seccompProfile"), {"type": "Unconfined"}, "main: seccompProfile is neither"),
        (("securityContext", "runAsNonRoot"), None, "main: runAsNonRoot is not true"),
        ((*SECURITY, "runAsNonRoot"), False, "main: runAsNonRoot is not true"),
        ((*SECURITY, "runAsUser"), 0, "main: runAsUser is 0"),
        ((*SECURITY, "seccompProfile"), {"type": "Unconfined"}, "main: seccompProfile is neither"),
        ((*SECURITY, "privileged"), True, "main: privileged"),
        ((*SECURITY, "allowPrivilegeEscalation"), True, "main: allowPrivilegeEscalation is not false"),
        ((*SECURITY, "allowPrivilegeEscalation"), None, "main: allowPrivilegeEscalation is not false"),
        ((*SECURITY, "capabilities"), {}, "main: capabilities are not dropped"),
        ((*SECURITY, "capabilities"), {"drop": ["ALL"], "add": ["SYS_ADMIN"]}, "main: capabilities are added"),
        ((*SECURITY, "procMount"), "Unmasked", "main: procMount is not the default"),
        (("containers", 0, "ports"), [{"containerPort": 1, "hostPort": 1}], "main: a hostPort is set"),
        (("initContainers", 0, "securityContext"), {}, "first: allowPrivilegeEscalation is not false"),
    ],
)
def test_what_is_forbidden_is_found(path, value, complaint):
    assert any(found.startswith(complaint) for found in violations(changed(path, value)))
