"""What the API server itself says of our account and of our pods."""

import json
import secrets
import subprocess

import pytest
import yaml

from components.launch import client
from components.launch.job_manifest import BACKENDS
from tests.cluster.conftest import NAMESPACE, installed, kubectl
from tests.manifests.jobs import job, templates

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(600, func_only=True)]
ACCOUNT = f"system:serviceaccount:{NAMESPACE}:vit-distillation"


def may(verb, kind):
    part = ["--subresource", kind.split("/")[1]] if "/" in kind else []
    return kubectl("auth", "can-i", verb, kind.split("/")[0], *part, "--as", ACCOUNT, check=False).strip() == "yes"


KINDS = [str(backend.resource) for backend in BACKENDS.values()]


def test_each_kind_of_job_is_known_here():
    if missing := [kind for kind in KINDS if not installed(kind)]:
        pytest.skip(f"not looked at, since their operator is not installed here: {', '.join(missing)}")


def test_the_account_may_do_what_is_used():
    """Of the kinds of jobs that this cluster knows: the API server does not answer what may be done with another."""
    needed = client.VERBS | {kind: client.JOB_VERBS for kind in KINDS if installed(kind)}
    assert [(verb, kind) for kind, verbs in needed.items() for verb in verbs if not may(verb, kind)] == []


@pytest.mark.parametrize(
    ("verb", "kind"),
    [("list", "secrets"), ("create", "pods"), ("create", "pods/exec"), ("delete", "pods"), ("get", "nodes")],
)
def test_the_account_may_do_no_more(verb, kind):
    assert not may(verb, kind)


@pytest.fixture
def strict_namespace():
    """A namespace that refuses pods below the level `restricted`."""
    name = f"vit-distillation-{secrets.token_hex(4)}"
    label = {"pod-security.kubernetes.io/enforce": "restricted"}
    body = {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": name, "labels": label}}
    kubectl("apply", "--filename=-", text=json.dumps(body))
    yield name
    kubectl("delete", "namespace", name, "--wait=false")


def test_the_pods_of_a_job_are_restricted(strict_namespace):
    for number, template in enumerate(templates(job("gpu-a100", pod={}))):
        pod = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": f"pod-{number}"}, "spec": template["spec"]}
        result = subprocess.run(
            ["kubectl", "--namespace", strict_namespace, "create", "--dry-run=server", "--filename=-"],
            input=yaml.safe_dump(json.loads(json.dumps(pod))),
            capture_output=True,
            text=True,
            check=False,
        )
        assert result.returncode == 0, result.stderr
