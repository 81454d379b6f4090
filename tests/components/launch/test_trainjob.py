import pytest

from components.launch import backends, pools, pytorchjob, trainjob
from components.launch.identity import Identity
from tests.components.launch.test_pytorchjob import spec
from tests.stand_ins.kubernetes import schemas
from trainer.errors import LaunchError

JOB = Identity(run="run", task="distill")


def rendered(nodes=2, pool="gpu-a100", **changes):
    return trainjob.render(spec(nodes=nodes), pools.get(pool).model_copy(update=changes), JOB)


@pytest.mark.parametrize("pool", [name for name, pool in pools.load().items() if not pool.retries])
def test_the_api_server_takes_a_job_of_any_pool(pool):
    schemas.check(rendered(pool=pool, nodes=2 if pools.get(pool).joins_nodes else 1, queue="team"))


def test_both_backends_run_the_same():
    """The pods that Trainer makes of the patch have what the PyTorchJob's have, as far as a patch can say it."""
    job = rendered(nodes=4)["spec"]
    other = pytorchjob.render(spec(nodes=4), pools.get("gpu-a100"), JOB)["spec"]
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


def test_a_job_in_a_queue_has_no_field_that_kueue_would_drop():
    """The server denies what a dropped field changes, and the job stays suspended."""
    (patch,) = rendered(queue="team")["spec"]["runtimePatches"]
    (replicated,) = patch["trainingRuntimeSpec"]["template"]["spec"]["replicatedJobs"]
    assert replicated["template"]["spec"]["template"]["spec"].keys() <= KNOWN_TO_KUEUE


def test_the_runtime_is_the_pools():
    assert rendered(runtime="torch-neuron")["spec"]["runtimeRef"] == {"name": "torch-neuron"}


@pytest.mark.parametrize("field", ["retries", "elastic_min_nodes"])
def test_what_a_trainjob_can_not_say_is_refused(field):
    with pytest.raises(
        LaunchError, match=f"pool gpu-a100: {field} = 2 cannot be said in a TrainJob; set it to 0, or backend"
    ):
        rendered(**{field: 2})


def condition(kind, status="True"):
    return {"type": kind, "status": status, "reason": "Because", "message": "it is so"}


@pytest.mark.parametrize(
    ("status", "phase"),
    [
        ({}, "pending"),
        ({"jobsStatus": [{"name": "node", "active": 1, "ready": 0}]}, "pending"),
        ({"jobsStatus": [{"name": "node", "active": 1, "ready": 1}]}, "running"),
        ({"conditions": [condition("Suspended")]}, "suspended"),
        ({"conditions": [condition("Suspended", "False")], "jobsStatus": [{"name": "node", "ready": 1}]}, "running"),
        ({"conditions": [condition("Complete")], "jobsStatus": [{"name": "node", "succeeded": 1}]}, "succeeded"),
        ({"conditions": [condition("Failed")]}, "failed"),
    ],
)
def test_the_status_tells_how_a_job_stands(status, phase):
    assert trainjob.status({"status": status}).phase == phase


def test_a_backend_finds_a_jobs_pods_and_names_their_parts():
    old, new = backends.BACKENDS["pytorchjob"], backends.BACKENDS["trainjob"]
    assert old.pod_selector("a") == "training.kubeflow.org/job-name=a"
    assert new.pod_selector("a") == "jobset.sigs.k8s.io/jobset-name=a,jobset.sigs.k8s.io/replicatedjob-name=node"
    labels = {"training.kubeflow.org/replica-type": "worker", "training.kubeflow.org/replica-index": "2"}
    assert old.replica(labels) == "worker-2"
    assert new.replica({"batch.kubernetes.io/job-completion-index": "2"}) == "node-2"


def test_every_pools_backend_is_there():
    (allowed,) = [set(pools.Pool.model_fields["backend"].annotation.__args__)]
    assert allowed == set(backends.BACKENDS)


def test_a_backend_sends_what_this_process_hands_on(monkeypatch):
    monkeypatch.setenv("AWS_ENDPOINT_URL_S3", "http://store:9000")
    monkeypatch.setenv("TRAINER_IMAGE", "registry/vit-distillation:abc")
    sent = backends.BACKENDS["trainjob"].render(spec(), pools.get("cpu"), JOB)["spec"]["trainer"]
    assert sent["image"] == "registry/vit-distillation:abc"
    assert {"name": "AWS_ENDPOINT_URL_S3", "value": "http://store:9000"} in sent["env"]
    pool = pools.get("cpu").model_copy(update={"image": "registry/own:1"})
    assert backends.BACKENDS["trainjob"].render(spec(), pool, JOB)["spec"]["trainer"]["image"] == "registry/own:1"
