"""The pods of a job and their environment."""

import pytest

from components.image import IMAGE
from components.launch import pod_template, pools
from components.launch.identity import Identity
from trainer.costs import Machines
from trainer.errors import LaunchError, SettingsError
from trainer.launch import JobSpec

SPEC = JobSpec(
    stage="distill", settings={"temperature": 2}, inputs={"dataset": "s3://b/d"}, outputs={"student": "s3://b/s"}
)


@pytest.fixture(params=["cpu", "gpu-a100-spot", "neuron-trn1-16"])
def template(request):
    job = Identity(run="run", task="distill")
    return pod_template.template(SPEC, pools.get(request.param), job, container={"name": "pytorch"})


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
    volumes = {volume["name"]: volume["emptyDir"] for volume in pod_template.volumes(pools.get("gpu-a100"))}
    assert volumes["shared-memory"] == {"medium": "Memory", "sizeLimit": "256Gi"}
    assert volumes["cache"] == {"sizeLimit": "250Gi"}


def test_limits_are_requests_and_accelerators_are_among_them():
    resources = pod_template.resources(pools.get("gpu-h100"))
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
    assert pod_template.image(cpu) == IMAGE
    assert pod_template.image(cpu, "registry:5000/team/own:1") == "registry:5000/team/own:1"
    assert pod_template.image(trainium) == IMAGE.replace("vit-distillation", "vit-distillation-neuron")
    assert pod_template.image(trainium, "registry:5000/team/own:1") == "registry:5000/team/own-neuron:1"
    assert pod_template.image(trainium, "own") == "own-neuron"
    assert (
        pod_template.image(trainium.model_copy(update={"image": "registry/other:1"}), "own@sha256:ab")
        == "registry/other:1"
    )
    with pytest.raises(LaunchError, match="pool neuron-trn1: own@sha256:ab names one image by its digest"):
        pod_template.image(trainium, "own@sha256:ab")


def test_placement_says_nothing_where_the_pool_says_nothing():
    assert pod_template.placement(pools.get("cpu").model_copy(update={"service_account": ""})) == {}
    assert pod_template.placement(pools.get("gpu-a10g-spot")) == {
        "nodeSelector": {"node.kubernetes.io/instance-type": "g5.xlarge", "eks.amazonaws.com/capacityType": "SPOT"},
        "tolerations": [
            {"key": "nvidia.com/gpu", "operator": "Exists", "effect": "NoSchedule"},
            {"key": "vit-distillation/spot", "operator": "Exists", "effect": "NoSchedule"},
        ],
        "serviceAccountName": "vit-distillation",
    }


# The environment

TASK = {
    "AWS_ENDPOINT_URL_S3": "http://store:9000",
    "AWS_DEFAULT_REGION": "eu-central-1",
    "AWS_ACCESS_KEY_ID": "AKIA-leaked",
    "AWS_SECRET_ACCESS_KEY": "leaked",
    "AWS_SESSION_TOKEN": "leaked",
    "AWS_WEB_IDENTITY_TOKEN_FILE": "/var/run/secrets/token",
    "AWS_PROFILE": "me",
    "MLFLOW_TRACKING_URI": "http://mlflow:5000",
    "MLFLOW_EXPERIMENT_ID": "7",
    "MLFLOW_RUN_ID": "r",
    "MLFLOW_TRACKING_USERNAME": "leaked",
    "MLFLOW_TRACKING_PASSWORD": "leaked",
    "MLFLOW_TRACKING_TOKEN": "leaked",
    "TRAINER_RUN": "run",
    "TRAINER_RUN_ID": "0123",
    "TRAINER_CHECKPOINTS": "s3://bucket/checkpoints",
    "TRAINER_ARTIFACTS": "s3://bucket/artifacts",
    "TRAINER_DEVICE": "cuda",
    "HOME": "/home/me",
    "PATH": "/bin",
}


def spec(**changes):
    values = {"stage": "distill", "settings": {}, "inputs": {}, "outputs": {}, "processes_per_node": 0}
    return JobSpec(**values | changes)


def rendered(job=None, pool="cpu", **changes):
    chosen = pools.get(pool).model_copy(update=changes)
    entries = pod_template.environment(job or spec(), chosen, Identity(run="run", task="distill"))
    names = [entry["name"] for entry in entries]
    assert len(set(names)) == len(names)
    return {entry["name"]: entry.get("value", entry.get("valueFrom")) for entry in entries}


def test_a_task_forwards_where_things_are_and_no_secret():
    assert pod_template.forwarded_environment(TASK) == {
        "AWS_ENDPOINT_URL_S3": "http://store:9000",
        "AWS_DEFAULT_REGION": "eu-central-1",
        "MLFLOW_TRACKING_URI": "http://mlflow:5000",
        "MLFLOW_EXPERIMENT_ID": "7",
        "MLFLOW_RUN_ID": "r",
        "TRAINER_RUN": "run",
        "TRAINER_RUN_ID": "0123",
        "TRAINER_CHECKPOINTS": "s3://bucket/checkpoints",
    }


def test_compiled_graphs_are_kept_where_the_task_says_if_the_next_job_reaches_that():
    def cache(value):
        given = pod_template.forwarded_environment(TASK | {"NEURON_COMPILE_CACHE_URL": value})
        return rendered(spec(environment=given), "neuron-trn1")["NEURON_COMPILE_CACHE_URL"]

    assert cache("s3://bucket/neuron-cache") == "s3://bucket/neuron-cache"
    assert cache("/var/tmp/mine") == cache("") == "/cache/neuron"


@pytest.mark.parametrize(
    ("pool", "cache", "message"),
    [
        ("neuron-trn1", "", r"pool neuron-trn1: NEURON_COMPILE_CACHE_URL=/cache/neuron lies in the pods, so .* lost"),
        ("neuron-trn1-16", "/mnt/shared", r"NEURON_COMPILE_CACHE_URL=/cache/neuron lies in the pods"),
        (
            "gpu-a100",
            "s3://bucket/cache",
            r"pool gpu-a100: what is compiled on it stays in the pods .* warm_up\.enabled",
        ),
    ],
)
def test_a_warm_up_that_would_be_lost_with_its_pods_is_refused(pool, cache, message):
    with pytest.raises(SettingsError, match=message):
        pod_template.check_compile_cache(pools.get(pool), {"NEURON_COMPILE_CACHE_URL": cache})


def test_a_warm_up_is_not_refused_where_the_next_job_finds_it():
    pod_template.check_compile_cache(pools.get("neuron-trn1"), {"NEURON_COMPILE_CACHE_URL": "s3://bucket/cache"})
    own = pools.get("neuron-trn1").model_copy(update={"environment": {"NEURON_COMPILE_CACHE_URL": "s3://bucket/own"}})
    pod_template.check_compile_cache(own, {})


@pytest.mark.parametrize("name", [name for name, pool in pools.load().items() if pool.device == "xla"])
def test_a_neuron_pod_finds_its_runtime_and_takes_one_process_a_core(name):
    """Which core is whose, torch_neuronx reads from torchrun's variables."""
    pool, values = pools.get(name), rendered(pool=name)
    assert (values["TRAINER_DEVICE"], values["PJRT_DEVICE"]) == ("xla", "NEURON")
    assert pool.processes_per_node == 2 * pool.accelerators
    assert ("FI_PROVIDER" in values) == pool.joins_nodes
    assert not [variable for variable in values if variable.startswith(("NEURON_PJRT", "XLA_", "NEURON_RT_NUM"))]


@pytest.mark.parametrize("name", ["MLFLOW_TRACKING_URI", "AWS_ENDPOINT_URL_S3", "TRAINER_CHECKPOINTS"])
@pytest.mark.parametrize("address", ["https://me:leaked@host/x", "https://leaked@host", "https://host/x?token=leaked"])
def test_an_address_with_a_password_does_not_get_into_the_job(name, address):
    given = pod_template.forwarded_environment(TASK | {name: address})
    with pytest.raises(LaunchError, match=f"{name} holds a password or a token") as caught:
        rendered(spec(environment=given))
    assert "leaked" not in str(caught.value)


def test_places_on_the_tasks_own_machine_are_not_forwarded():
    local = TASK | {"MLFLOW_TRACKING_URI": "sqlite:////home/me/mlflow.db", "TRAINER_CHECKPOINTS": "/home/me/runs"}
    given = pod_template.forwarded_environment(local)
    assert not [name for name in given if name.startswith("MLFLOW_") or name == "TRAINER_CHECKPOINTS"]


def test_the_addresses_of_services_called_mlflow_are_not_taken_for_its_settings():
    """Kubernetes sets them in a task's pod, for the Services `mlflow` and `mlflow-database` of its namespace."""
    links = {
        "MLFLOW_SERVICE_HOST": "10.96.0.7",
        "MLFLOW_SERVICE_PORT": "5000",
        "MLFLOW_SERVICE_PORT_HTTP": "5000",
        "MLFLOW_PORT": "tcp://10.96.0.7:5000",
        "MLFLOW_PORT_5000_TCP": "tcp://10.96.0.7:5000",
        "MLFLOW_PORT_5000_TCP_ADDR": "10.96.0.7",
        "MLFLOW_DATABASE_PORT": "tcp://10.96.0.8:5432",
        "MLFLOW_DATABASE_PORT_5432_TCP_PROTO": "tcp",
    }
    assert pod_template.forwarded_environment(TASK | links) == pod_template.forwarded_environment(TASK)
    own = {"MLFLOW_HTTP_REQUEST_TIMEOUT": "60"}
    assert pod_template.forwarded_environment(TASK | own) == pod_template.forwarded_environment(TASK) | own


def test_secrets_come_by_reference():
    values = rendered(spec(environment=pod_template.forwarded_environment(TASK)))
    assert values["AWS_SECRET_ACCESS_KEY"] == {
        "secretKeyRef": {"name": "vit-distillation-store", "key": "AWS_SECRET_ACCESS_KEY", "optional": True}
    }
    assert "leaked" not in str(values)


@pytest.mark.parametrize(
    ("name", "reason"),
    [("MY_TOKEN", "it looks like a secret; name it under secrets of the pool"), ("RANK", "it is set by the launcher")],
)
def test_a_job_cannot_bring_secrets_or_what_the_launcher_sets(name, reason):
    with pytest.raises(LaunchError, match=f"distill: {name} cannot be part of a job's environment: {reason}"):
        rendered(spec(environment={name: "x"}))


def test_the_pool_decides_the_device_and_the_threads():
    values = rendered(pool="gpu-a100")
    assert (values["TRAINER_DEVICE"], values["OMP_NUM_THREADS"]) == ("cuda", "11")
    assert rendered(spec(processes_per_node=2), pool="gpu-a100")["OMP_NUM_THREADS"] == "45"
    assert rendered(spec(processes_per_node=5))["OMP_NUM_THREADS"] == "1"


def test_pods_know_their_place_and_its_price():
    place = Machines.model_validate_json(rendered(spec(nodes=4), pool="gpu-a100")["TRAINER_PLACE"])
    assert (place.pool, place.instance, place.nodes, place.processes_per_node) == ("gpu-a100", "p4d.24xlarge", 4, 8)
    assert place.price == pools.get("gpu-a100").price
    spot = Machines.model_validate_json(rendered(spec(processes_per_node=2), pool="gpu-a100-spot")["TRAINER_PLACE"])
    assert (spot.processes_per_node, spot.price) == (2, None)
    with pytest.raises(LaunchError, match="TRAINER_PLACE cannot be part of a job's environment: it is set by the"):
        rendered(spec(environment={"TRAINER_PLACE": "{}"}))


def test_the_job_goes_before_the_pool_and_that_before_the_defaults():
    pool = {"environment": {"OMP_NUM_THREADS": "3", "NCCL_DEBUG": "WARN"}}
    values = rendered(spec(environment={"NCCL_DEBUG": "INFO"}), **pool)
    assert (values["OMP_NUM_THREADS"], values["NCCL_DEBUG"]) == ("3", "INFO")


def test_nodes_wait_for_one_another_as_long_as_a_job_may_be_queued():
    assert rendered(queued_minutes=90)["PET_RDZV_CONF"] == "timeout=5400,join_timeout=5400"


def test_the_cache_stays_within_its_volume():
    assert float(rendered(cache="20Gi")["TRAINER_CACHE_GIB"]) == pytest.approx(16)
    with pytest.raises(LaunchError, match="TRAINER_CACHE_GIB cannot be part of a job's environment"):
        rendered(spec(environment={"TRAINER_CACHE_GIB": "100"}))
