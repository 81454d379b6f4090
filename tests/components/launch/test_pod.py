import pytest

from components.image import IMAGE
from components.launch import pod, pools
from components.launch.identity import Identity
from trainer.errors import LaunchError
from trainer.launch import JobSpec

SPEC = JobSpec(
    stage="distill", settings={"temperature": 2}, inputs={"dataset": "s3://b/d"}, outputs={"student": "s3://b/s"}
)


@pytest.fixture(params=["cpu", "gpu-a100-spot", "neuron-trn1-16"])
def template(request):
    job = Identity(run="run", task="distill")
    return pod.template(SPEC, pools.get(request.param), job, container={"name": "pytorch"})


def test_a_pod_meets_pod_security_restricted(template):
    """The rules of https://kubernetes.io/docs/concepts/security/pod-security-standards, one by one."""
    spec = template["spec"]
    (container,) = spec["containers"]
    assert not {"hostNetwork", "hostPID", "hostIPC"} & spec.keys()
    assert spec["securityContext"]["runAsNonRoot"] is True
    assert spec["securityContext"]["runAsUser"] > 0
    assert spec["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
    assert container["securityContext"]["allowPrivilegeEscalation"] is False
    assert container["securityContext"]["capabilities"] == {"drop": ["ALL"]}
    assert "privileged" not in container["securityContext"]
    assert all("hostPort" not in port for port in container.get("ports", []))
    assert all(set(volume) - {"name"} == {"emptyDir"} for volume in spec["volumes"])


def test_only_volumes_can_be_written_to_and_the_environment_points_there(template):
    (container,) = template["spec"]["containers"]
    assert container["securityContext"]["readOnlyRootFilesystem"] is True
    mounted = {mount["mountPath"]: mount["name"] for mount in container["volumeMounts"]}
    assert set(mounted) == {"/dev/shm", "/cache", "/tmp"}
    assert set(mounted.values()) == {volume["name"] for volume in template["spec"]["volumes"]}
    values = {entry["name"]: entry.get("value", "") for entry in container["env"]}
    for name in ("TRAINER_CACHE", "HOME", "HF_HOME"):
        assert values[name].startswith(tuple(mounted))


def test_shared_memory_is_memory():
    volumes = {volume["name"]: volume["emptyDir"] for volume in pod.volumes(pools.get("gpu-a100"))}
    assert volumes["shared-memory"] == {"medium": "Memory", "sizeLimit": "256Gi"}
    assert volumes["cache"] == {"sizeLimit": "250Gi"}


def test_limits_are_requests_and_accelerators_are_among_them():
    resources = pod.resources(pools.get("gpu-h100"))
    assert resources["limits"] == resources["requests"]
    assert resources["limits"]["nvidia.com/gpu"] == "8"
    assert resources["limits"]["vpc.amazonaws.com/efa"] == "32"


def test_a_pod_has_no_token_and_no_sidecar(template):
    assert template["spec"]["automountServiceAccountToken"] is False
    assert template["spec"]["serviceAccountName"] == "vit-distillation"
    assert template["metadata"]["labels"]["sidecar.istio.io/inject"] == "false"


def test_a_pod_runs_a_node_of_the_stage(template):
    (container,) = template["spec"]["containers"]
    assert [*container["command"], *container["args"]] == ["python", *SPEC.node_arguments()]


def test_the_image_is_the_pools_or_the_tasks_for_the_pools_device():
    cpu, trainium = pools.get("cpu"), pools.get("neuron-trn1")
    assert pod.image(cpu) == IMAGE
    assert pod.image(cpu, "registry:5000/team/own:1") == "registry:5000/team/own:1"
    assert pod.image(trainium) == IMAGE.replace("vit-distillation", "vit-distillation-neuron")
    assert pod.image(trainium, "registry:5000/team/own:1") == "registry:5000/team/own-neuron:1"
    assert pod.image(trainium, "own") == "own-neuron"
    assert pod.image(trainium.model_copy(update={"image": "registry/other:1"}), "own@sha256:ab") == "registry/other:1"
    with pytest.raises(LaunchError, match="pool neuron-trn1: own@sha256:ab names one image by its digest"):
        pod.image(trainium, "own@sha256:ab")


def test_placement_says_nothing_where_the_pool_says_nothing():
    assert pod.placement(pools.get("cpu").model_copy(update={"service_account": ""})) == {}
    assert pod.placement(pools.get("gpu-a10g-spot")) == {
        "nodeSelector": {"node.kubernetes.io/instance-type": "g5.xlarge", "eks.amazonaws.com/capacityType": "SPOT"},
        "tolerations": [
            {"key": "nvidia.com/gpu", "operator": "Exists", "effect": "NoSchedule"},
            {"key": "vit-distillation/spot", "operator": "Exists", "effect": "NoSchedule"},
        ],
        "serviceAccountName": "vit-distillation",
    }
