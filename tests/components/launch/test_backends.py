"""PyTorchJobs and TrainJobs: their manifests, and how they are read."""

import pytest

from components.launch import backends, pools
from components.launch.backends import BACKENDS, JobState
from components.launch.identity import HASH_ANNOTATION, Identity
from tests.stand_ins.kubernetes import schemas
from trainer.errors import LaunchError, SettingsError
from trainer.launch import JobSpec


def spec(**changes):
    values = {
        "stage": "distill",
        "settings": {"temperature": 2},
        "inputs": {"dataset": "s3://b/d", "teacher": "s3://b/t"},
        "outputs": {"student": "s3://b/s", "evidence": "s3://b/e"},
        "processes_per_node": 0,
    }
    return JobSpec(**values | changes)


def pytorchjob(nodes=2, pool="cpu", attempt=1, processes=0, **changes):
    chosen = pools.get(pool).model_copy(update=changes)
    job = Identity(run="run", task="distill", attempt=attempt)
    return backends.render_pytorchjob(spec(nodes=nodes, processes_per_node=processes), chosen, job)


@pytest.mark.parametrize(
    ("pool", "nodes"),
    [(name, nodes) for name, pool in pools.load().items() for nodes in (1, 2)[: 1 + pool.joins_nodes]],
)
def test_the_api_server_takes_a_pytorchjob_of_any_pool(pool, nodes):
    schemas.check(pytorchjob(nodes=nodes, pool=pool, queue="team"))


def test_one_node_is_a_master_alone():
    replicas = pytorchjob(nodes=1)["spec"]["pytorchReplicaSpecs"]
    assert list(replicas) == ["Master"]
    assert replicas["Master"]["replicas"] == 1


def test_four_nodes_are_a_master_and_three_workers_of_the_same_pod():
    replicas = pytorchjob(nodes=4)["spec"]["pytorchReplicaSpecs"]
    assert {role: replica["replicas"] for role, replica in replicas.items()} == {"Master": 1, "Worker": 3}
    assert replicas["Master"]["template"] == replicas["Worker"]["template"]
    assert [one["name"] for one in replicas["Master"]["template"]["spec"]["containers"]] == ["pytorch"]


def test_processes_are_text():
    assert pytorchjob(pool="gpu-a100")["spec"]["nprocPerNode"] == "8"
    assert pytorchjob(pool="gpu-a100", processes=4)["spec"]["nprocPerNode"] == "4"
    with pytest.raises(SettingsError, match="got 9"):
        pytorchjob(pool="gpu-a100", processes=9)


def test_the_run_policy_ends_and_cleans_up_what_is_not_followed():
    policy = pytorchjob(queued_minutes=10, running_minutes=20, keep_minutes=30)["spec"]["runPolicy"]
    assert policy == {
        "cleanPodPolicy": "Running",
        "backoffLimit": 0,
        "activeDeadlineSeconds": 1800,
        "ttlSecondsAfterFinished": 1800,
    }


def test_without_retries_the_first_failure_ends_the_job():
    job = pytorchjob(nodes=4)["spec"]
    assert job["runPolicy"]["backoffLimit"] == 0
    assert {replica["restartPolicy"] for replica in job["pytorchReplicaSpecs"].values()} == {"Never"}


def test_with_retries_the_exit_code_decides_whether_a_pod_is_started_again():
    job = pytorchjob(nodes=4, retries=2)["spec"]
    assert {replica["restartPolicy"] for replica in job["pytorchReplicaSpecs"].values()} == {"ExitCode"}
    assert "backoffLimit" not in job["runPolicy"]  # with 0 the first preemption would be the end


def test_an_elastic_pool_gives_an_elastic_job_of_equal_nodes():
    job = pytorchjob(nodes=4, elastic_min_nodes=2, retries=3)
    assert job["spec"]["elasticPolicy"] == {"rdzvBackend": "c10d", "minReplicas": 2, "maxReplicas": 4, "maxRestarts": 3}
    assert {role: one["replicas"] for role, one in job["spec"]["pytorchReplicaSpecs"].items()} == {"Worker": 4}
    schemas.check(job)
    schemas.check(pytorchjob(nodes=1, elastic_min_nodes=1, retries=1))
    assert "elasticPolicy" not in pytorchjob()["spec"]


def test_an_elastic_job_needs_nodes_enough():
    with pytest.raises(LaunchError, match="nodes = 2, but pool cpu is elastic and needs 3 at least"):
        pytorchjob(nodes=2, elastic_min_nodes=3, retries=1)


def test_a_queue_is_kueues_label():
    assert "kueue.x-k8s.io/queue-name" not in pytorchjob()["metadata"]["labels"]
    assert pytorchjob(queue="team")["metadata"]["labels"]["kueue.x-k8s.io/queue-name"] == "team"


def test_the_recorded_hash_is_the_same_for_every_attempt_and_changes_with_the_job():
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


def test_a_new_job_without_status_is_pending():
    assert BACKENDS["pytorchjob"].state({}).phase == "pending"
    assert BACKENDS["pytorchjob"].state({"status": {"conditions": None}}).phase == "pending"


# TrainJobs

JOB = Identity(run="run", task="distill")


def trainjob(nodes=2, pool="gpu-a100", **changes):
    return backends.render_trainjob(spec(nodes=nodes), pools.get(pool).model_copy(update=changes), JOB)


@pytest.mark.parametrize("pool", [name for name, pool in pools.load().items() if not pool.retries])
def test_the_api_server_takes_a_trainjob_of_any_pool(pool):
    schemas.check(trainjob(pool=pool, nodes=2 if pools.get(pool).joins_nodes else 1, queue="team"))


def test_both_backends_run_the_same():
    """The pods that Trainer makes of the patch have what the PyTorchJob's have, as far as a patch can say it."""
    job = trainjob(nodes=4)["spec"]
    other = backends.render_pytorchjob(spec(nodes=4), pools.get("gpu-a100"), JOB)["spec"]
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
    (patch,) = trainjob(queue="team")["spec"]["runtimePatches"]
    (replicated,) = patch["trainingRuntimeSpec"]["template"]["spec"]["replicatedJobs"]
    assert replicated["template"]["spec"]["template"]["spec"].keys() <= KNOWN_TO_KUEUE


def test_the_runtime_is_the_pools():
    assert trainjob(runtime="torch-neuron")["spec"]["runtimeRef"] == {"name": "torch-neuron"}


@pytest.mark.parametrize("field", ["retries", "elastic_min_nodes"])
def test_what_trainjobs_do_not_support_is_refused(field):
    with pytest.raises(
        LaunchError, match=f"pool gpu-a100: {field} = 2 is not supported by TrainJobs; set it to 0, or backend"
    ):
        trainjob(**{field: 2})


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


def test_a_backend_finds_a_jobs_pods_and_names_their_parts():
    old, new = BACKENDS["pytorchjob"], BACKENDS["trainjob"]
    assert old.pod_selector("a") == "training.kubeflow.org/job-name=a"
    assert new.pod_selector("a") == "jobset.sigs.k8s.io/jobset-name=a,jobset.sigs.k8s.io/replicatedjob-name=node"
    labels = {"training.kubeflow.org/replica-type": "worker", "training.kubeflow.org/replica-index": "2"}
    assert old.replica(labels) == "worker-2"
    assert new.replica({"batch.kubernetes.io/job-completion-index": "2"}) == "node-2"


def test_every_pools_backend_is_there():
    (allowed,) = [set(pools.Pool.model_fields["backend"].annotation.__args__)]
    assert allowed == set(BACKENDS)


def test_a_backend_sends_what_this_process_forwards(monkeypatch):
    monkeypatch.setenv("AWS_ENDPOINT_URL_S3", "http://store:9000")
    monkeypatch.setenv("TRAINER_IMAGE", "registry/vit-distillation:abc")
    sent = BACKENDS["trainjob"].render(spec(), pools.get("cpu"), JOB)["spec"]["trainer"]
    assert sent["image"] == "registry/vit-distillation:abc"
    assert {"name": "AWS_ENDPOINT_URL_S3", "value": "http://store:9000"} in sent["env"]
    pool = pools.get("cpu").model_copy(update={"image": "registry/own:1"})
    assert BACKENDS["trainjob"].render(spec(), pool, JOB)["spec"]["trainer"]["image"] == "registry/own:1"
