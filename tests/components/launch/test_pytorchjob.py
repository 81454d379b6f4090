import pytest

from components.launch import pools, pytorchjob
from components.launch.identity import HASH_ANNOTATION, Identity
from components.launch.state import JobState
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


def rendered(nodes=2, pool="cpu", attempt=1, processes=0, **changes):
    chosen = pools.get(pool).model_copy(update=changes)
    job = Identity(run="run", task="distill", attempt=attempt)
    return pytorchjob.render(spec(nodes=nodes, processes_per_node=processes), chosen, job)


@pytest.mark.parametrize(
    ("pool", "nodes"),
    [(name, nodes) for name, pool in pools.load().items() for nodes in (1, 2)[: 1 + pool.joins_nodes]],
)
def test_the_api_server_takes_a_job_of_any_pool(pool, nodes):
    schemas.check(rendered(nodes=nodes, pool=pool, queue="team"))


def test_one_node_is_a_master_alone():
    replicas = rendered(nodes=1)["spec"]["pytorchReplicaSpecs"]
    assert list(replicas) == ["Master"]
    assert replicas["Master"]["replicas"] == 1


def test_four_nodes_are_a_master_and_three_workers_of_the_same_pod():
    replicas = rendered(nodes=4)["spec"]["pytorchReplicaSpecs"]
    assert {role: replica["replicas"] for role, replica in replicas.items()} == {"Master": 1, "Worker": 3}
    assert replicas["Master"]["template"] == replicas["Worker"]["template"]
    assert [one["name"] for one in replicas["Master"]["template"]["spec"]["containers"]] == ["pytorch"]


def test_processes_are_text():
    assert rendered(pool="gpu-a100")["spec"]["nprocPerNode"] == "8"
    assert rendered(pool="gpu-a100", processes=4)["spec"]["nprocPerNode"] == "4"
    with pytest.raises(SettingsError, match="got 9"):
        rendered(pool="gpu-a100", processes=9)


def test_the_run_policy_ends_and_cleans_up_what_nobody_follows():
    policy = rendered(queued_minutes=10, running_minutes=20, keep_minutes=30)["spec"]["runPolicy"]
    assert policy == {
        "cleanPodPolicy": "Running",
        "backoffLimit": 0,
        "activeDeadlineSeconds": 1800,
        "ttlSecondsAfterFinished": 1800,
    }


def test_without_retries_the_first_failure_ends_the_job():
    job = rendered(nodes=4)["spec"]
    assert job["runPolicy"]["backoffLimit"] == 0
    assert {replica["restartPolicy"] for replica in job["pytorchReplicaSpecs"].values()} == {"Never"}


def test_with_retries_the_exit_code_tells_whether_a_pod_is_started_again():
    job = rendered(nodes=4, retries=2)["spec"]
    assert {replica["restartPolicy"] for replica in job["pytorchReplicaSpecs"].values()} == {"ExitCode"}
    assert "backoffLimit" not in job["runPolicy"]  # with 0 the first preemption would be the end


def test_an_elastic_pool_gives_an_elastic_job_of_equal_nodes():
    job = rendered(nodes=4, elastic_min_nodes=2, retries=3)
    assert job["spec"]["elasticPolicy"] == {"rdzvBackend": "c10d", "minReplicas": 2, "maxReplicas": 4, "maxRestarts": 3}
    assert {role: one["replicas"] for role, one in job["spec"]["pytorchReplicaSpecs"].items()} == {"Worker": 4}
    schemas.check(job)
    schemas.check(rendered(nodes=1, elastic_min_nodes=1, retries=1))
    assert "elasticPolicy" not in rendered()["spec"]


def test_an_elastic_job_needs_nodes_enough():
    with pytest.raises(LaunchError, match="nodes = 2, but pool cpu is elastic and needs 3 at least"):
        rendered(nodes=2, elastic_min_nodes=3, retries=1)


def test_a_queue_is_kueues_label():
    assert "kueue.x-k8s.io/queue-name" not in rendered()["metadata"]["labels"]
    assert rendered(queue="team")["metadata"]["labels"]["kueue.x-k8s.io/queue-name"] == "team"


def test_the_recorded_hash_is_the_same_for_every_attempt_and_changes_with_the_job():
    first, again = (rendered(attempt=attempt)["metadata"] for attempt in (1, 2))
    assert first["name"] != again["name"]
    assert first["annotations"] == again["annotations"]
    assert first["annotations"][HASH_ANNOTATION] != rendered(nodes=3)["metadata"]["annotations"][HASH_ANNOTATION]


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
def test_conditions_tell_how_a_job_stands(conditions, phase):
    state = pytorchjob.status({"status": {"conditions": conditions}})
    assert state.phase == phase
    if phase != "pending":
        kind = phase.capitalize()
        assert state == JobState(phase=phase, reason=f"PyTorchJob{kind}", message=f"it is {kind}")


def test_a_new_job_without_status_is_pending():
    assert pytorchjob.status({}).phase == "pending"
    assert pytorchjob.status({"status": {"conditions": None}}).phase == "pending"
