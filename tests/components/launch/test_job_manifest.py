"""The manifest of a job: its identity, its pods and their environment, PyTorchJobs and TrainJobs."""

import re
from dataclasses import replace
from typing import get_args

import kubernetes_validate
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from components.launch import IMAGE, job_manifest, pools
from components.launch.job_manifest import BACKENDS, HASH_ANNOTATION, Identity, JobState, Owner
from components.launch.pools import Pool
from tests.manifests.pod_security import violations
from tests.stand_ins.kubernetes import schemas
from trainer.graph import JobSpec
from trainer.io.costs import Machines
from trainer.io.errors import LaunchError, SettingsError


def spec(**changes):
    values = {
        "stage": "distill",
        "settings": {"temperature": 2},
        "inputs": {"dataset": "s3://b/d", "teacher": "s3://b/t"},
        "outputs": {"student": "s3://b/s", "evidence": "s3://b/e"},
        "processes_per_node": 0,
    }
    return JobSpec(**values | changes)


@given(run=st.text(), task=st.text(), attempt=st.integers(1, 10**6))
@settings(max_examples=200, deadline=None)
def test_any_run_gives_names_and_labels_that_kubernetes_takes(run, task, attempt):
    job = Identity(run=run, task=task, attempt=attempt)
    assert re.fullmatch(r"[a-z]([-a-z0-9]*[a-z0-9])?", job.name)
    assert len(job.name) <= 40
    assert "--" not in job.name
    for value in job.labels("distill").values():
        assert re.fullmatch(r"[A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?", value)


@pytest.mark.parametrize(
    ("run", "words"),
    [
        ("20261121-101010-digits", "distill-20261121-101010-digi-"),
        ("0f4f6e0c-8a4e-4f0f-9c0e-1d7d3f6f8a11", "distill-0f4f6e0c-8a4e-4f0f-9-"),
        ("Größe 7", "distill-gr-e-7-"),
        ("数字", "distill-run-"),
    ],
)
def test_name_begins_with_task_and_run(run, words):
    assert Identity(run=run, task="distill").name.startswith(words)


def test_names_differ():
    jobs = [
        Identity(run=run, task=task, attempt=attempt)
        for run in ("a" * 60 + "1", "a" * 60 + "2", "A", "a")
        for task in ("pretrain", "distill")
        for attempt in (1, 2)
    ]
    assert len({job.name for job in jobs}) == len(jobs)
    assert Identity(run="a", task="distill").name == Identity(run="a", task="distill", namespace="other").name
    # Labels of different runs differ and valid ones are kept.
    assert job_manifest.label_value("20261121-101010-digits") == "20261121-101010-digits"
    assert job_manifest.label_value("a b") != job_manifest.label_value("a-b")
    assert job_manifest.label_value("x" * 64) != job_manifest.label_value("x" * 65)


def test_the_environment_of_a_task_names_its_job(monkeypatch):
    for name, value in {
        "KFP_RUN_ID": "run-1",
        "TRAINER_RUN": "other",
        "KFP_POD_NAME": "pod",
        "KFP_POD_UID": "uid",
        "TRAINER_NAMESPACE": "team",
    }.items():
        monkeypatch.setenv(name, value)
    job = Identity.from_environment("distill")
    assert job == Identity(run="run-1", task="distill", attempt=1, namespace="team", owner=Owner(name="pod", uid="uid"))
    monkeypatch.delenv("KFP_RUN_ID")
    monkeypatch.delenv("KFP_POD_UID")
    job = Identity.from_environment("distill")
    assert (job.run, job.owner) == ("other", None)


def test_without_a_run_there_is_no_name(monkeypatch):
    monkeypatch.delenv("KFP_RUN_ID", raising=False)
    monkeypatch.delenv("TRAINER_RUN", raising=False)
    with pytest.raises(LaunchError, match="distill: nothing names the run, so its job can have no name"):
        Identity.from_environment("distill")


def test_the_job_belongs_to_its_tasks_pod():
    def metadata(owner):
        job = Identity(run="a", task="distill", owner=owner)
        return job_manifest.render_pytorchjob(spec(), pools.get("cpu"), job)["metadata"]

    owner = Owner(name="pod", uid="u-1")
    assert metadata(owner)["ownerReferences"] == [{"apiVersion": "v1", "kind": "Pod", "name": "pod", "uid": "u-1"}]
    assert "ownerReferences" not in metadata(None)


def test_the_hash_is_of_the_specification_alone():
    job = {"apiVersion": "kubeflow.org/v1", "kind": "PyTorchJob", "metadata": {"name": "a"}, "spec": {"args": ["-m"]}}
    hashed = job_manifest.spec_hash(job)
    assert job_manifest.spec_hash(job | {"metadata": {"name": "b"}, "status": {"conditions": []}}) == hashed
    for change in ({"spec": {"args": []}}, {"kind": "TrainJob"}):
        assert job_manifest.spec_hash(job | change) != hashed


def pod_on(pool):
    job = Identity(run="run", task="distill")
    return job_manifest.pod_template(spec(), pool, job, container={"name": "pytorch"})


@pytest.fixture(params=["cpu", "gpu-a100-spot", "neuron-trn1-16"])
def template(request):
    return pod_on(pools.get(request.param))


def test_a_pod_meets_pod_security_restricted(template):
    assert violations(template["spec"]) == []
    assert template["spec"]["securityContext"]["runAsUser"] > 0
    assert all(set(volume) - {"name"} == {"emptyDir"} for volume in template["spec"]["volumes"])


def test_only_volumes_can_be_written_to_and_environment_points_there(template):
    (container,) = template["spec"]["containers"]
    assert container["securityContext"]["readOnlyRootFilesystem"] is True
    mounted = {mount["mountPath"]: mount["name"] for mount in container["volumeMounts"]}
    assert set(mounted) == {"/dev/shm", "/cache", "/tmp"}
    assert set(mounted.values()) == {volume["name"] for volume in template["spec"]["volumes"]}
    values = {entry["name"]: entry.get("value", "") for entry in container["env"]}
    for name in ("TRAINER_CACHE", "HOME", "HF_HOME"):
        assert values[name].startswith(tuple(mounted))


def test_volumes_and_resources():
    volumes = {volume["name"]: volume["emptyDir"] for volume in pod_on(pools.get("gpu-a100"))["spec"]["volumes"]}
    assert volumes["shared-memory"] == {"medium": "Memory", "sizeLimit": "256Gi"}
    assert volumes["cache"] == {"sizeLimit": "5000Gi"}
    assert volumes["tmp"] == {"sizeLimit": "10Gi"}
    # Limits are requests and accelerators are among them.
    (container,) = pod_on(pools.get("gpu-h100"))["spec"]["containers"]
    resources = container["resources"]
    assert resources["limits"] == resources["requests"]
    assert resources["limits"]["nvidia.com/gpu"] == "8"


def test_a_pod_has_no_token_and_no_sidecar(template):
    assert template["spec"]["automountServiceAccountToken"] is False
    assert template["spec"]["serviceAccountName"] == "vit-distillation"
    assert template["metadata"]["labels"]["sidecar.istio.io/inject"] == "false"


@pytest.mark.parametrize("name", pools.load())
def test_no_autoscaler_moves_a_pod_off_its_node(name):
    """Karpenter evicts no pod with its annotation, also where the node is to be reclaimed (its `IsEvictable`)."""
    kept = {"cluster-autoscaler.kubernetes.io/safe-to-evict": "false", "karpenter.sh/do-not-disrupt": "true"}
    if pools.get(name).spot:
        del kept["karpenter.sh/do-not-disrupt"]
    assert pod_on(pools.get(name))["metadata"]["annotations"] == kept


def test_image_of_a_pod():
    cpu, trainium = pools.get("cpu"), pools.get("neuron-trn1")
    assert job_manifest.pod_image(cpu) == IMAGE
    assert job_manifest.pod_image(cpu, "registry:5000/team/own:1") == "registry:5000/team/own:1"
    assert job_manifest.pod_image(trainium) == IMAGE.replace("vit-distillation", "vit-distillation-neuron")
    assert job_manifest.pod_image(trainium, "registry:5000/team/own:1") == "registry:5000/team/own-neuron:1"
    assert job_manifest.pod_image(trainium, "own") == "own-neuron"
    assert (
        job_manifest.pod_image(trainium.model_copy(update={"image": "registry/other:1"}), "own@sha256:ab")
        == "registry/other:1"
    )
    with pytest.raises(LaunchError, match="pool neuron-trn1: own@sha256:ab names one image by its digest"):
        job_manifest.pod_image(trainium, "own@sha256:ab")


def test_placement_says_nothing_where_the_pool_says_nothing():
    def placement(pool):
        names = ("nodeSelector", "tolerations", "serviceAccountName")
        return {name: value for name, value in pod_on(pool)["spec"].items() if name in names}

    assert placement(pools.get("cpu").model_copy(update={"pod": {}})) == {}
    assert placement(pools.get("gpu-a10g-spot")) == {
        "nodeSelector": {"node.kubernetes.io/instance-type": "g5.xlarge", "eks.amazonaws.com/capacityType": "SPOT"},
        "tolerations": [
            {"key": "nvidia.com/gpu", "operator": "Exists", "effect": "NoSchedule"},
            {"key": "vit-distillation/spot", "operator": "Exists", "effect": "NoSchedule"},
        ],
        "serviceAccountName": "vit-distillation",
    }


OWN_POD = {
    "metadata": {"labels": {"team": "vision"}, "annotations": {"karpenter.sh/do-not-disrupt": "false"}},
    "spec": {
        "priorityClassName": "high",
        "runtimeClassName": "nvidia",
        "schedulerName": "bin-packing",
        "imagePullSecrets": [{"name": "registry"}],
        "affinity": {
            "nodeAffinity": {
                "preferredDuringSchedulingIgnoredDuringExecution": [
                    {"weight": 1, "preference": {"matchExpressions": [{"key": "fast", "operator": "Exists"}]}}
                ]
            }
        },
        "enableServiceLinks": True,
        "securityContext": {"runAsUser": 0, "supplementalGroups": [5]},
        "volumes": [{"name": "photos", "persistentVolumeClaim": {"claimName": "fsx"}}],
        "containers": [
            {
                "name": "mine",
                "command": ["bash"],
                "volumeMounts": [{"name": "photos", "mountPath": "/photos"}],
                "resources": {"limits": {"hugepages-2Mi": "1Gi", "cpu": "99"}},
            }
        ],
    },
}


def test_pools_own_part_of_pod_is_merged_under_the_launchers():
    plain, own = pod_on(pools.get("cpu")), pod_on(pools.get("cpu").model_copy(update={"pod": OWN_POD}))
    assert own["metadata"]["labels"] == {"team": "vision"} | plain["metadata"]["labels"]
    assert own["metadata"]["annotations"] == plain["metadata"]["annotations"]
    for field in ("priorityClassName", "runtimeClassName", "schedulerName", "imagePullSecrets", "affinity"):
        assert own["spec"][field] == OWN_POD["spec"][field]
    kubernetes_validate.validate({"apiVersion": "v1", "kind": "PodTemplate", "template": own}, "1.34", strict=True)
    assert own["spec"]["enableServiceLinks"] is False
    assert own["spec"]["securityContext"] == {"supplementalGroups": [5]} | plain["spec"]["securityContext"]
    assert own["spec"]["volumes"] == OWN_POD["spec"]["volumes"] + plain["spec"]["volumes"]
    (container,), (before,) = own["spec"]["containers"], plain["spec"]["containers"]
    assert container["volumeMounts"] == [{"name": "photos", "mountPath": "/photos"}, *before["volumeMounts"]]
    assert container["resources"]["limits"] == {"hugepages-2Mi": "1Gi"} | before["resources"]["limits"]
    assert {name: container[name] for name in ("name", "command", "args", "env")} == {
        name: before[name] for name in ("name", "command", "args", "env")
    }


def test_nodes_of_one_job_prefer_one_zone():
    pool = pools.get("cpu").model_copy(update={"pod": OWN_POD})
    assert "affinity" not in pod_on(pools.get("cpu"))["spec"]
    template = job_manifest.pod_template(
        spec(nodes=2), pool, Identity(run="run", task="distill"), container={"name": "c"}
    )
    affinity = template["spec"]["affinity"]
    assert affinity["nodeAffinity"] == OWN_POD["spec"]["affinity"]["nodeAffinity"]
    (preferred,) = affinity["podAffinity"]["preferredDuringSchedulingIgnoredDuringExecution"]
    term = preferred["podAffinityTerm"]
    assert term["topologyKey"] == "topology.kubernetes.io/zone"
    assert term["labelSelector"]["matchLabels"].items() <= template["metadata"]["labels"].items()
    kubernetes_validate.validate({"apiVersion": "v1", "kind": "PodTemplate", "template": template}, "1.34", strict=True)


def test_pools_own_part_of_pod_reaches_trainjobs():
    (patch,) = trainjob(pod=OWN_POD)["spec"]["runtimePatches"]
    (replicated,) = patch["trainingRuntimeSpec"]["template"]["spec"]["replicatedJobs"]
    pod = replicated["template"]["spec"]["template"]
    assert pod["metadata"]["labels"]["team"] == "vision"
    assert pod["spec"]["volumes"][0] == OWN_POD["spec"]["volumes"][0]
    assert pod["spec"]["containers"][0]["volumeMounts"][0]["mountPath"] == "/photos"


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


def rendered(job=None, pool="cpu", **changes):
    chosen = pools.get(pool).model_copy(update=changes)
    entries = job_manifest.pod_environment(job or spec(), chosen, Identity(run="run", task="distill"))
    names = [entry["name"] for entry in entries]
    assert len(set(names)) == len(names)
    return {entry["name"]: entry.get("value", entry.get("valueFrom")) for entry in entries}


def test_task_forwards_where_things_are_and_no_secret():
    assert job_manifest.forwarded_environment(TASK) == {
        "AWS_ENDPOINT_URL_S3": "http://store:9000",
        "AWS_DEFAULT_REGION": "eu-central-1",
        "MLFLOW_TRACKING_URI": "http://mlflow:5000",
        "MLFLOW_EXPERIMENT_ID": "7",
        "MLFLOW_RUN_ID": "r",
        "TRAINER_RUN": "run",
        "TRAINER_RUN_ID": "0123",
        "TRAINER_CHECKPOINTS": "s3://bucket/checkpoints",
    }


def test_compiled_graphs_are_kept_where_reachable():
    def cache(value):
        given = job_manifest.forwarded_environment(TASK | {"NEURON_COMPILE_CACHE_URL": value})
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
def test_warm_up_that_would_be_lost_is_refused(pool, cache, message):
    with pytest.raises(SettingsError, match=message):
        job_manifest.check_compile_cache(pools.get(pool), {"NEURON_COMPILE_CACHE_URL": cache})


def test_a_warm_up_in_reach_is_taken():
    job_manifest.check_compile_cache(pools.get("neuron-trn1"), {"NEURON_COMPILE_CACHE_URL": "s3://bucket/cache"})
    own = pools.get("neuron-trn1").model_copy(update={"environment": {"NEURON_COMPILE_CACHE_URL": "s3://bucket/own"}})
    job_manifest.check_compile_cache(own, {})


@pytest.mark.parametrize("name", [name for name, pool in pools.load().items() if pool.device == "xla"])
def test_a_neuron_pod_has_its_runtime_and_cores(name):
    """Which core is whose, torch_neuronx reads from torchrun's variables."""
    pool, values = pools.get(name), rendered(pool=name)
    assert (values["TRAINER_DEVICE"], values["PJRT_DEVICE"]) == ("xla", "NEURON")
    cores = 4 if name == "neuron-trn2" else 2
    assert pool.processes_per_node == cores * pool.accelerators
    assert values.get("NEURON_LOGICAL_NC_CONFIG") == (
        "2" if name == "neuron-trn2" else None
    )  # 8 physical cores of a device as 4
    assert ("FI_PROVIDER" in values) == pool.joins_nodes
    assert not [variable for variable in values if variable.startswith(("NEURON_PJRT", "XLA_", "NEURON_RT_NUM"))]


@pytest.mark.parametrize("name", ["MLFLOW_TRACKING_URI", "AWS_ENDPOINT_URL_S3", "TRAINER_CHECKPOINTS"])
@pytest.mark.parametrize("address", ["https://me:leaked@host/x", "https://leaked@host", "https://host/x?token=leaked"])
def test_address_with_password_does_not_get_into_job(name, address):
    given = job_manifest.forwarded_environment(TASK | {name: address})
    with pytest.raises(LaunchError, match=f"{name} holds a password or a token") as caught:
        rendered(spec(environment=given))
    assert "leaked" not in str(caught.value)


def test_places_on_tasks_own_machine_are_not_forwarded():
    local = TASK | {"MLFLOW_TRACKING_URI": "sqlite:////home/me/mlflow.db", "TRAINER_CHECKPOINTS": "/home/me/runs"}
    given = job_manifest.forwarded_environment(local)
    assert not [name for name in given if name.startswith("MLFLOW_") or name == "TRAINER_CHECKPOINTS"]


def test_addresses_of_mlflow_services_are_no_settings():
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
    assert job_manifest.forwarded_environment(TASK | links) == job_manifest.forwarded_environment(TASK)
    own = {"MLFLOW_HTTP_REQUEST_TIMEOUT": "60"}
    assert job_manifest.forwarded_environment(TASK | own) == job_manifest.forwarded_environment(TASK) | own


def test_secrets_come_by_reference():
    values = rendered(spec(environment=job_manifest.forwarded_environment(TASK)))
    assert values["AWS_SECRET_ACCESS_KEY"] == {
        "secretKeyRef": {"name": "vit-distillation-store", "key": "AWS_SECRET_ACCESS_KEY", "optional": True}
    }
    assert "leaked" not in str(values)


@pytest.mark.parametrize(
    ("name", "reason"),
    [("MY_TOKEN", "it looks like a secret; name it under secrets of the pool"), ("RANK", "it is set by the launcher")],
)
def test_job_cannot_bring_secrets_or_what_launcher_sets(name, reason):
    with pytest.raises(LaunchError, match=f"distill: {name} cannot be part of a job's environment: {reason}"):
        rendered(spec(environment={name: "x"}))


def test_pool_and_job_make_the_environment():
    values = rendered(pool="gpu-a100")
    assert (values["TRAINER_DEVICE"], values["OMP_NUM_THREADS"]) == ("cuda", "11")
    assert rendered(spec(processes_per_node=2), pool="gpu-a100")["OMP_NUM_THREADS"] == "45"
    assert rendered(spec(processes_per_node=5))["OMP_NUM_THREADS"] == "1"
    # The job goes before the pool and that before the defaults.
    pool = {"environment": {"OMP_NUM_THREADS": "3", "NCCL_DEBUG": "WARN"}}
    values = rendered(spec(environment={"NCCL_DEBUG": "INFO"}), **pool)
    assert (values["OMP_NUM_THREADS"], values["NCCL_DEBUG"]) == ("3", "INFO")
    # Nodes wait for one another as long as a job may be queued.
    assert rendered(queued_minutes=90)["PET_RDZV_CONF"] == "timeout=5400,join_timeout=5400"
    # The cache stays within its volume.
    assert float(rendered(cache="20Gi")["TRAINER_CACHE_GIB"]) == pytest.approx(16)
    with pytest.raises(LaunchError, match="TRAINER_CACHE_GIB cannot be part of a job's environment"):
        rendered(spec(environment={"TRAINER_CACHE_GIB": "100"}))


def test_pods_know_their_place_and_its_price():
    place = Machines.model_validate_json(rendered(spec(nodes=4), pool="gpu-a100")["TRAINER_PLACE"])
    assert (place.pool, place.instance, place.nodes, place.processes_per_node) == ("gpu-a100", "p4d.24xlarge", 4, 8)
    assert place.price == pools.get("gpu-a100").price
    spot = Machines.model_validate_json(rendered(spec(processes_per_node=2), pool="gpu-a100-spot")["TRAINER_PLACE"])
    assert (spot.processes_per_node, spot.price) == (2, None)
    with pytest.raises(LaunchError, match="TRAINER_PLACE cannot be part of a job's environment: it is set by the"):
        rendered(spec(environment={"TRAINER_PLACE": "{}"}))


def pytorchjob(nodes=2, pool="cpu", attempt=1, processes=0, **changes):
    chosen = pools.get(pool).model_copy(update=changes)
    job = Identity(run="run", task="distill", attempt=attempt)
    return job_manifest.render_pytorchjob(spec(nodes=nodes, processes_per_node=processes), chosen, job)


@pytest.mark.parametrize(
    ("pool", "nodes"),
    [(name, nodes) for name, pool in pools.load().items() for nodes in (1, 2)[: 1 + pool.joins_nodes]],
)
def test_api_server_takes_pytorchjob_of_any_pool(pool, nodes):
    schemas.check(pytorchjob(nodes=nodes, pool=pool, queue="team"))


def test_replicas_and_processes():
    replicas = pytorchjob(nodes=4)["spec"]["pytorchReplicaSpecs"]
    assert {role: replica["replicas"] for role, replica in replicas.items()} == {"Master": 1, "Worker": 3}
    assert replicas["Master"]["template"] == replicas["Worker"]["template"]
    assert [one["name"] for one in replicas["Master"]["template"]["spec"]["containers"]] == ["pytorch"]
    # Processes are text.
    assert pytorchjob(pool="gpu-a100")["spec"]["nprocPerNode"] == "8"
    assert pytorchjob(pool="gpu-a100", processes=4)["spec"]["nprocPerNode"] == "4"
    with pytest.raises(SettingsError, match="got 9"):
        pytorchjob(pool="gpu-a100", processes=9)


def test_retries_decide_restarts():
    job = pytorchjob(nodes=4)["spec"]
    assert {replica["restartPolicy"] for replica in job["pytorchReplicaSpecs"].values()} == {"Never"}
    # With retries the exit code decides whether a pod is started again.
    job = pytorchjob(nodes=4, retries=2)["spec"]
    assert {replica["restartPolicy"] for replica in job["pytorchReplicaSpecs"].values()} == {"ExitCode"}
    # The run policy ends and cleans up what is not followed.
    policy = pytorchjob(queued_minutes=10, running_minutes=20, keep_minutes=30)["spec"]["runPolicy"]
    assert policy == {
        "cleanPodPolicy": "Running",
        "activeDeadlineSeconds": 1800,
        "ttlSecondsAfterFinished": 1800,
    }


def test_elastic_pool():
    job = pytorchjob(nodes=4, elastic_min_nodes=2, retries=3)
    assert job["spec"]["elasticPolicy"] == {"rdzvBackend": "c10d", "minReplicas": 2, "maxReplicas": 4, "maxRestarts": 3}
    assert {role: one["replicas"] for role, one in job["spec"]["pytorchReplicaSpecs"].items()} == {"Worker": 4}
    schemas.check(job)
    schemas.check(pytorchjob(nodes=1, elastic_min_nodes=1, retries=1))
    assert "elasticPolicy" not in pytorchjob()["spec"]
    # An elastic job needs nodes enough.
    with pytest.raises(LaunchError, match="nodes = 2, but pool cpu is elastic and needs 3 at least"):
        pytorchjob(nodes=2, elastic_min_nodes=3, retries=1)


def test_queue_and_hash():
    assert "kueue.x-k8s.io/queue-name" not in pytorchjob()["metadata"]["labels"]
    assert pytorchjob(queue="team")["metadata"]["labels"]["kueue.x-k8s.io/queue-name"] == "team"
    # The recorded hash is the same for every attempt and changes with the job.
    first, again = (pytorchjob(attempt=attempt)["metadata"] for attempt in (1, 2))
    assert first["name"] != again["name"]
    assert first["annotations"] == again["annotations"]
    assert first["annotations"][HASH_ANNOTATION] != pytorchjob(nodes=3)["metadata"]["annotations"][HASH_ANNOTATION]


def condition(kind, status="True"):
    return {"type": kind, "status": status, "reason": f"PyTorchJob{kind}", "message": f"it is {kind}"}


@pytest.mark.parametrize(
    ("conditions", "phase"),
    [
        ([], "pending"),
        ([condition("Created")], "pending"),
        ([condition("Created"), condition("Suspended")], "suspended"),
        ([condition("Created"), condition("Suspended", "False"), condition("Running")], "running"),
        ([condition("Created"), condition("Running", "False"), condition("Restarting")], "restarting"),
        ([condition("Created"), condition("Running", "False"), condition("Succeeded")], "succeeded"),
        ([condition("Created"), condition("Running", "False"), condition("Failed")], "failed"),
    ],
)
def test_the_conditions_of_a_pytorchjob_give_its_state(conditions, phase):
    state = BACKENDS["pytorchjob"].state({"status": {"conditions": conditions}})
    assert state.phase == phase
    if phase != "pending":
        kind = phase.capitalize()
        assert state == JobState(phase=phase, reason=f"PyTorchJob{kind}", message=f"it is {kind}")


# TrainJobs

JOB = Identity(run="run", task="distill")


def trainjob(nodes=2, pool="gpu-a100", **changes):
    return job_manifest.render_trainjob(spec(nodes=nodes), pools.get(pool).model_copy(update=changes), JOB)


@pytest.mark.parametrize("pool", pools.load())
def test_api_server_takes_trainjob_of_any_pool(pool):
    schemas.check(trainjob(pool=pool, nodes=2 if pools.get(pool).joins_nodes else 1, queue="team"))


def test_both_backends_run_the_same():
    """The pods that Trainer makes of the patch have what the PyTorchJob's have, as far as a patch can say it."""
    job = trainjob(nodes=4)["spec"]
    other = job_manifest.render_pytorchjob(spec(nodes=4), pools.get("gpu-a100"), JOB)["spec"]
    template = other["pytorchReplicaSpecs"]["Master"]["template"]
    (container,) = template["spec"]["containers"]
    trained = job["trainer"]
    assert [trained[name] for name in ("image", "command", "args", "env")] == [
        container[name] for name in ("image", "command", "args", "env")
    ]
    assert trained["resourcesPerNode"] == container["resources"]
    assert (trained["numNodes"], str(trained["numProcPerNode"])) == (4, other["nprocPerNode"])
    (patch,) = job["runtimePatches"]
    (replicated,) = patch["trainingRuntimeSpec"]["template"]["spec"]["replicatedJobs"]
    patched = replicated["template"]["spec"]["template"]
    assert patched["metadata"] == template["metadata"]
    assert patched["metadata"]["annotations"]["karpenter.sh/do-not-disrupt"] == "true"
    (patched_container,) = patched["spec"].pop("containers")
    assert patched["spec"].items() <= template["spec"].items()
    assert template["spec"].keys() - patched["spec"].keys() == {
        "containers",
        "automountServiceAccountToken",
        "enableServiceLinks",
    }
    assert patched_container == {
        "name": "node",
        "volumeMounts": container["volumeMounts"],
        "securityContext": container["securityContext"],
    }


KNOWN_TO_KUEUE = {
    "serviceAccountName",
    "volumes",
    "initContainers",
    "containers",
    "imagePullSecrets",
    "securityContext",
    "nodeSelector",
    "affinity",
    "tolerations",
    "schedulingGates",
}
"""PodSpecPatch of Trainer 2.2.1, whose types Kueue 0.19.2 is built with; it writes a TrainJob without the fields that others have."""


def test_a_queued_job_has_only_fields_kueue_knows():
    """The server denies what a dropped field changes, and the job stays suspended."""
    (patch,) = trainjob(queue="team")["spec"]["runtimePatches"]
    (replicated,) = patch["trainingRuntimeSpec"]["template"]["spec"]["replicatedJobs"]
    assert replicated["template"]["spec"]["template"]["spec"].keys() <= KNOWN_TO_KUEUE


def test_a_trainjob_cannot_be_elastic():
    with pytest.raises(
        LaunchError, match="pool gpu-a100: elastic_min_nodes = 2 is not supported by TrainJobs; set it to 0"
    ):
        trainjob(elastic_min_nodes=2, retries=1)


def test_retries_of_a_trainjob_are_its_runtimes():
    assert trainjob(retries=0)["spec"]["runtimeRef"] == {"name": "torch-distributed"}
    assert trainjob(retries=2)["spec"]["runtimeRef"] == {"name": "vit-distillation", "kind": "TrainingRuntime"}


# Indexed Jobs, of stages whose work is shared


def shared_job(nodes=4, pool="gpu-a100", **changes):
    preparing = JobSpec(
        stage="prepare", settings={}, inputs={}, outputs={"dataset": "s3://bucket/dataset"}, nodes=nodes
    )
    return job_manifest.render_indexed_job(preparing, pools.get(pool).model_copy(update=changes), JOB)


@pytest.mark.parametrize("pool", pools.load())
def test_api_server_takes_a_job_of_shares_on_any_pool(pool):
    schemas.check(shared_job(pool=pool, nodes=4 if pools.get(pool).joins_nodes else 1, queue="team"))


def test_each_pod_knows_its_share():
    job = shared_job(nodes=4)["spec"]
    assert (job["completionMode"], job["completions"], job["parallelism"]) == ("Indexed", 4, 4)
    (container,) = job["template"]["spec"]["containers"]
    assert container["args"] == [
        *("-m", "trainer", "stage", "prepare", "--node", "--share", "$(JOB_COMPLETION_INDEX)/4"),
        *("--settings", "{}", "--dataset", "s3://bucket/dataset"),
    ]
    assert {"name": "TRAINER_CACHE", "value": "/cache"} in container["env"]
    assert "affinity" not in job["template"]["spec"]  # shares exchange nothing


def test_rules_of_a_job_of_shares():
    job = shared_job(retries=5, keep_minutes=2)["spec"]
    assert job["successPolicy"] == {"rules": [{"succeededIndexes": "0"}]}
    lost, mistake = job["podFailurePolicy"]["rules"]
    assert (lost["action"], lost["onPodConditions"][0]["type"]) == ("Ignore", "DisruptionTarget")
    assert (mistake["action"], mistake["onExitCodes"]["values"]) == ("FailJob", [2])
    assert mistake["onExitCodes"]["containerName"] == job["template"]["spec"]["containers"][0]["name"]
    assert (job["backoffLimitPerIndex"], job["ttlSecondsAfterFinished"]) == (5, 120)
    assert shared_job(retries=0)["spec"]["backoffLimitPerIndex"] == 3
    assert job["template"]["spec"]["restartPolicy"] == "Never"


def test_the_kind_of_a_job_follows_from_stage_and_pool():
    preparing = replace(spec(), stage="prepare")
    of_pools = {*get_args(Pool.model_fields["backend"].annotation)}
    for backend in of_pools:
        pool = pools.get("cpu").model_copy(update={"backend": backend})
        assert job_manifest.backend_of(spec(), pool) is BACKENDS[backend]
        assert job_manifest.backend_of(preparing, pool) is BACKENDS["job"]
    assert of_pools == {name for name, backend in BACKENDS.items() if not backend.independent} == {*BACKENDS} - {"job"}


@pytest.mark.parametrize(
    ("status", "phase"),
    [
        ({}, "pending"),
        ({"active": 2, "ready": 0}, "pending"),
        ({"active": 2, "ready": 1}, "running"),
        ({"conditions": [condition("Suspended")]}, "suspended"),
        ({"ready": 1, "conditions": [condition("SuccessCriteriaMet")]}, "running"),
        ({"conditions": [condition("SuccessCriteriaMet"), condition("Complete")]}, "succeeded"),
        ({"conditions": [condition("FailureTarget"), condition("Failed")]}, "failed"),
    ],
)
def test_the_status_of_a_job_of_shares_gives_its_state(status, phase):
    assert BACKENDS["job"].state({"status": status}).phase == phase


def trainjob_condition(kind, status="True"):
    return {"type": kind, "status": status, "reason": "Because", "message": "it is so"}


@pytest.mark.parametrize(
    ("status", "phase"),
    [
        ({}, "pending"),
        ({"jobsStatus": [{"name": "node", "active": 1, "ready": 0}]}, "pending"),
        ({"jobsStatus": [{"name": "node", "active": 1, "ready": 1}]}, "running"),
        ({"conditions": [trainjob_condition("Suspended")]}, "suspended"),
        (
            {"conditions": [trainjob_condition("Suspended", "False")], "jobsStatus": [{"name": "node", "ready": 1}]},
            "running",
        ),
        (
            {"conditions": [trainjob_condition("Complete")], "jobsStatus": [{"name": "node", "succeeded": 1}]},
            "succeeded",
        ),
        ({"conditions": [trainjob_condition("Failed")]}, "failed"),
    ],
)
def test_the_status_of_a_trainjob_gives_its_state(status, phase):
    assert BACKENDS["trainjob"].state({"status": status}).phase == phase


def test_backend_finds_jobs_pods_and_names_their_parts():
    old, new = BACKENDS["pytorchjob"], BACKENDS["trainjob"]
    assert old.pod_selector("a") == "training.kubeflow.org/job-name=a"
    assert new.pod_selector("a") == "jobset.sigs.k8s.io/jobset-name=a,jobset.sigs.k8s.io/replicatedjob-name=node"
    labels = {"training.kubeflow.org/replica-type": "worker", "training.kubeflow.org/replica-index": "2"}
    assert old.replica(labels) == "worker-2"
    assert new.replica({"batch.kubernetes.io/job-completion-index": "2"}) == "node-2"


def test_a_backend_sends_what_this_process_forwards(monkeypatch):
    monkeypatch.setenv("AWS_ENDPOINT_URL_S3", "http://store:9000")
    monkeypatch.setenv("TRAINER_IMAGE", "registry/vit-distillation:abc")
    sent = BACKENDS["trainjob"].render(spec(), pools.get("cpu"), JOB)["spec"]["trainer"]
    assert sent["image"] == "registry/vit-distillation:abc"
    assert {"name": "AWS_ENDPOINT_URL_S3", "value": "http://store:9000"} in sent["env"]
    pool = pools.get("cpu").model_copy(update={"image": "registry/own:1"})
    assert BACKENDS["trainjob"].render(spec(), pool, JOB)["spec"]["trainer"]["image"] == "registry/own:1"
