"""The stand-in's operators and kubelet: what becomes of jobs and pods."""

import json
import time

import psutil
import pytest
from kubernetes import client, config

from tests.stand_ins.conftest import Jobs
from tests.stand_ins.kubernetes.resources import JOBS, PODS, PYTORCHJOBS
from tests.stand_ins.kubernetes.stand_in import KubernetesStandIn, Node, Script
from tests.stand_ins.manifests import indexed_job, pytorch_job, train_job

FOREVER = Script(output=["begun"], hang=True)
DONE = Script(output=["done"])
CRASHES = Script(output=["begun"], exit_code=1)
FAILS = Script(output=["error: no images"], exit_code=2, termination_message="no images")


def phases(cluster, pattern="*"):
    return {pod["metadata"]["name"]: pod["status"]["phase"] for pod in cluster.list(PODS, pattern)}


def condition(cluster, type_, job="job"):
    conditions = cluster.get(PYTORCHJOBS, job).get("status", {}).get("conditions", [])
    return next((one for one in conditions if one["type"] == type_ and one["status"] == "True"), None)


def wait_for_condition(cluster, type_):
    cluster.wait_for(lambda: condition(cluster, type_) is not None)
    return condition(cluster, type_)


def terminated(cluster, pod):
    return cluster.get(PODS, pod)["status"]["containerStatuses"][0]["state"]["terminated"]


def test_a_job_becomes_pods_that_belong_to_it(cluster, jobs):
    cluster.script("job-*", FOREVER)
    job = jobs.create(pytorch_job(workers=2))
    wait_for_condition(cluster, "Running")
    master, *workers = cluster.list(PODS)
    assert [pod["metadata"]["name"] for pod in (master, *workers)] == ["job-master-0", "job-worker-0", "job-worker-1"]
    assert master["metadata"]["labels"] == {
        "training.kubeflow.org/operator-name": "pytorchjob-controller",
        "training.kubeflow.org/job-name": "job",
        "training.kubeflow.org/replica-type": "master",
        "training.kubeflow.org/replica-index": "0",
        "training.kubeflow.org/job-role": "master",
    }
    owner = {"apiVersion": "kubeflow.org/v1", "kind": "PyTorchJob", "name": "job", "uid": job["metadata"]["uid"]}
    assert master["metadata"]["ownerReferences"] == [owner | {"controller": True, "blockOwnerDeletion": True}]
    assert "initContainers" not in master["spec"]
    assert [pod["spec"]["initContainers"][0]["name"] for pod in workers] == ["init-pytorch", "init-pytorch"]
    jobs.delete("job")
    cluster.wait_for(lambda: not cluster.list(PODS))


def declared(pod):
    return {one["name"]: one["value"] for one in pod["spec"]["containers"][0]["env"]}


def test_the_environment_is_that_of_the_operator(cluster, jobs):
    cluster.script("job-*", FOREVER)
    jobs.create(pytorch_job(workers=2))
    cluster.wait_for(lambda: len(cluster.list(PODS)) == 3)
    assert declared(cluster.get(PODS, "job-worker-1")) == {
        "PYTHONUNBUFFERED": "1",
        "MASTER_PORT": "23456",
        "PET_MASTER_PORT": "23456",
        "MASTER_ADDR": "job-master-0",
        "PET_MASTER_ADDR": "job-master-0",
        "WORLD_SIZE": "6",
        "RANK": "2",
        "PET_NODE_RANK": "2",
        "PET_NPROC_PER_NODE": "2",
        "PET_NNODES": "3",
    }


def test_the_environment_of_an_elastic_job(cluster, jobs):
    cluster.script("job-*", FOREVER)
    manifest = pytorch_job(workers=3)
    del manifest["spec"]["pytorchReplicaSpecs"]["Master"]
    rendezvous = [{"key": "join_timeout", "value": "60"}, {"key": "x", "value": "y"}]
    policy = {"minReplicas": 1, "maxReplicas": 3, "maxRestarts": 5, "rdzvConf": rendezvous}
    manifest["spec"]["elasticPolicy"] = policy
    jobs.create(manifest)
    cluster.wait_for(lambda: len(cluster.list(PODS)) == 3)
    assert declared(cluster.get(PODS, "job-worker-1")) == {
        "PYTHONUNBUFFERED": "1",
        "PET_NPROC_PER_NODE": "2",
        "PET_RDZV_ENDPOINT": "job-worker-0:23456",
        "PET_RDZV_BACKEND": "c10d",
        "PET_NNODES": "1:3",
        "PET_MAX_RESTARTS": "5",
        "PET_RDZV_CONF": "join_timeout=60,x=y",
    }


def test_success_is_the_masters(cluster, jobs):
    cluster.script("job-master-0", DONE)
    cluster.script("job-worker-0", FOREVER)
    jobs.create(pytorch_job())
    succeeded = wait_for_condition(cluster, "Succeeded")
    assert (succeeded["reason"], succeeded["message"]) == (
        "PyTorchJobSucceeded",
        "PyTorchJob job is successfully completed.",
    )
    assert cluster.conditions("job") == {"Created": "True", "Running": "False", "Succeeded": "True"}
    assert cluster.get(PYTORCHJOBS, "job")["status"]["completionTime"]
    assert phases(cluster)["job-worker-0"] == "Running"  # cleanPodPolicy None is the operator's default


@pytest.mark.parametrize(("policy", "left"), [("None", 3), ("Running", 1), ("All", 0)])
def test_pods_are_cleaned_up_by_the_policy(cluster, jobs, policy, left):
    cluster.script("job-worker-*", FOREVER)
    cluster.script("job-master-0", DONE)
    jobs.create(pytorch_job(workers=2, run_policy={"cleanPodPolicy": policy}))
    wait_for_condition(cluster, "Succeeded")
    cluster.wait_for(lambda: len(cluster.list(PODS)) == left)


def test_restarts_count_against_the_backoff_limit(cluster, jobs):
    cluster.script("job-master-0", FAILS)
    jobs.create(pytorch_job(workers=0, restart_policy="OnFailure", run_policy={"backoffLimit": 2}))
    failed = wait_for_condition(cluster, "Failed")
    assert failed["message"] == "Job job has failed because it has reached the specified backoff limit"


def test_a_retryable_exit_code_gives_a_new_pod(cluster, jobs):
    cluster.script("job-master-0", Script(output=[], exit_code=137, reason="OOMKilled"), DONE)
    jobs.create(pytorch_job(workers=0, restart_policy="ExitCode"))
    wait_for_condition(cluster, "Succeeded")
    assert cluster.get(PODS, "job-master-0")["spec"]["restartPolicy"] == "Never"
    assert (
        "job",
        "PyTorchJobRestarting",
        "job job is restarting because Master replica(s) failed.",
    ) in cluster.events()
    assert ("job", "SuccessfulDeletePod", "Deleted pod: job-master-0") in cluster.events()


@pytest.mark.parametrize("exit_code", [137, 143, 200])
def test_exit_codes_do_not_limit_retries(cluster, jobs, exit_code):
    again = Script(output=[], exit_code=exit_code)
    cluster.script("job-master-0", again, again, again, DONE)
    jobs.create(pytorch_job(workers=0, restart_policy="ExitCode", run_policy={"backoffLimit": 1}))
    wait_for_condition(cluster, "Succeeded")
    assert cluster.get(PODS, "job-master-0")["status"]["containerStatuses"][0]["restartCount"] == 0


def test_an_exit_code_ends_a_job_at_once(cluster, jobs):
    cluster.script("job-master-0", Script(output=[], exit_code=143))
    cluster.script("job-worker-0", Script(output=[0.5], exit_code=2))
    jobs.create(pytorch_job(restart_policy="ExitCode", run_policy={"ttlSecondsAfterFinished": 0}))
    failed = wait_for_condition(cluster, "Failed")
    assert failed["message"] == 'job "job" is failing because "Worker" replica(s) failed.'
    time.sleep(0.5)
    assert cluster.list(PYTORCHJOBS)  # it has no completion time, and so stays


def test_elastic_job_has_succeeded_when_one_of_its_workers_has(cluster, jobs):
    cluster.script("job-worker-0", DONE)
    cluster.script("job-worker-1", FOREVER)
    manifest = pytorch_job(workers=2, restart_policy="ExitCode")
    del manifest["spec"]["pytorchReplicaSpecs"]["Master"]
    manifest["spec"]["elasticPolicy"] = {"minReplicas": 1, "maxReplicas": 2}
    jobs.create(manifest)
    succeeded = wait_for_condition(cluster, "Succeeded")
    assert succeeded["message"] == "PyTorchJob kubeflow/job successfully completed."


def test_a_job_is_ended_at_its_deadline(cluster, jobs):
    cluster.script("job-*", FOREVER)
    jobs.create(pytorch_job(run_policy={"activeDeadlineSeconds": 1, "cleanPodPolicy": "Running"}))
    failed = wait_for_condition(cluster, "Failed")
    assert failed["message"] == "Job job has failed because it was active longer than specified deadline"
    cluster.wait_for(lambda: not cluster.list(PODS))


def test_kueue_holds_a_job_of_a_queue_back(tmp_path):
    with KubernetesStandIn(tmp_path, kueue=True) as cluster:
        cluster.script("*", FOREVER)
        with config.new_client_from_config(str(cluster.kubeconfig)) as connection:
            jobs = Jobs(connection)
            jobs.create(pytorch_job(labels={"kueue.x-k8s.io/queue-name": "gpus"}))
            jobs.create(pytorch_job("free"))
            cluster.wait_for(lambda: condition(cluster, "Running", "free") is not None)
            assert cluster.conditions("job") == {"Created": "True", "Suspended": "True"}
            cluster.resume("job")
            wait_for_condition(cluster, "Running")
            connection.rest_client.pool_manager.clear()


def test_bad_pod_template_shows_when_pod_is_made(cluster, jobs):
    manifest = pytorch_job(workers=0)
    template = manifest["spec"]["pytorchReplicaSpecs"]["Master"]["template"]
    template["spec"]["containers"][0]["volumeMounts"] = [{"name": "cache", "mountPath": "/cache"}]
    jobs.create(manifest)
    cluster.wait_for(lambda: cluster.events("job"))
    name, reason, message = cluster.events("job")[0]
    assert (name, reason) == ("job", "FailedCreatePod")
    assert message == (
        'Error creating: Pod "job-master-0" is invalid: spec.containers[0].volumeMounts[0].name: Not found: "cache"'
    )


def with_gpus(count):
    manifest = pytorch_job()
    for replica in manifest["spec"]["pytorchReplicaSpecs"].values():
        spec = replica["template"]["spec"]
        spec["containers"][0]["resources"] = {"limits": {"nvidia.com/gpu": count, "cpu": "2"}}
        spec["nodeSelector"] = {"pool": "gpu"}
        spec["tolerations"] = [{"key": "nvidia.com/gpu", "operator": "Exists", "effect": "NoSchedule"}]
    return manifest


def gpu_node(name, gpus, labels=("pool",)):
    taint = {"key": "nvidia.com/gpu", "value": "present", "effect": "NoSchedule"}
    return Node(name=name, capacity={"nvidia.com/gpu": gpus}, labels=dict.fromkeys(labels, "gpu"), taints=[taint])


def test_devices_are_scheduled_by_capacity_selector_and_taint(tmp_path):
    with KubernetesStandIn(tmp_path, nodes=[Node(), gpu_node("small", "4"), gpu_node("large", "8")]) as cluster:
        cluster.script("job-*", FOREVER)
        cluster.add(PYTORCHJOBS, with_gpus(8))
        cluster.wait_for(lambda: phases(cluster).get("job-master-0") == "Running")
        cluster.wait_for(lambda: any(reason == "FailedScheduling" for _, reason, _ in cluster.events("job-worker-0")))
        assert cluster.get(PODS, "job-master-0")["spec"]["nodeName"] == "large"
        messages = [message for _, reason, message in cluster.events("job-worker-0") if reason == "FailedScheduling"]
        assert messages == [
            (
                "0/3 nodes are available: 1 node(s) didn't match Pod's node affinity/selector, 2 Insufficient nvidia.com/gpu. "
                "preemption: 0/3 nodes are available: 3 Preemption is not helpful for scheduling."
            )
        ]
        cluster.delete(PODS, "job-master-0")  # its place is free then, and the first to look takes it
        cluster.wait_for(lambda: "Running" in phases(cluster).values())


def test_a_taint_must_be_tolerated(tmp_path):
    with KubernetesStandIn(tmp_path, nodes=[gpu_node("gpu", "8")]) as cluster:
        cluster.add(PYTORCHJOBS, pytorch_job(workers=0))
        cluster.wait_for(lambda: len(cluster.events("job-master-0")) == 1)
        assert "1 node(s) had untolerated taint {nvidia.com/gpu: present}" in cluster.events("job-master-0")[0][2]


CHILD = """
import os, subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"], start_new_session=True)
print(child.pid, flush=True)
time.sleep(60)
"""


def has_ended(process):
    """Whether a process runs no more; that its parent has not asked for its end yet does not matter."""
    try:
        return process.status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


@pytest.mark.parametrize("how", ["delete", "oom_kill"])
def test_a_pods_processes_end_with_it(cluster, jobs, how):
    jobs.create(pytorch_job(workers=0, code=CHILD))
    cluster.wait_for(lambda: phases(cluster).get("job-master-0") == "Running")
    while not cluster.log("job-master-0"):
        time.sleep(0.02)
    child = psutil.Process(int(cluster.log("job-master-0")[0]))
    if how == "delete":
        jobs.delete("job")
        cluster.wait_for(lambda: not cluster.list(PODS))
    else:
        cluster.oom_kill("job-master-0")
        wait_for_condition(cluster, "Failed")
        assert terminated(cluster, "job-master-0")["reason"] == "OOMKilled"
    assert has_ended(child)


@pytest.fixture
def train_jobs(connection):
    return Jobs(connection, "trainer.kubeflow.org", "v1alpha1", "trainjobs")


def test_a_train_job_becomes_pods(cluster, train_jobs):
    code = "import json, os; print(json.dumps({k: v for k, v in os.environ.items() if k.startswith('PET_')}))"
    template = {"metadata": {"labels": {"run": "a"}}, "spec": {"nodeSelector": {"kubernetes.io/os": "linux"}}}
    replicated = {"name": "node", "template": {"spec": {"template": template}}}
    patch = {"manager": "tests/patch", "trainingRuntimeSpec": {"template": {"spec": {"replicatedJobs": [replicated]}}}}
    train_jobs.create(train_job(code=code, runtimePatches=[patch]))
    cluster.wait_for(lambda: cluster.conditions("job") == {"Complete": "True"})
    first, second = cluster.list(PODS)
    assert first["metadata"]["name"].startswith("job-node-0-0-")
    labels = second["metadata"]["labels"]
    assert labels["jobset.sigs.k8s.io/jobset-name"] == "job"
    assert (labels["batch.kubernetes.io/job-completion-index"], labels["run"]) == ("1", "a")
    assert second["spec"]["nodeSelector"] == {"kubernetes.io/os": "linux"}
    environment = json.loads(cluster.log(second["metadata"]["name"])[0])
    port = environment.pop("PET_MASTER_PORT")
    assert port == json.loads(cluster.log(first["metadata"]["name"])[0])["PET_MASTER_PORT"]
    assert environment == {
        "PET_NNODES": "2",
        "PET_NPROC_PER_NODE": "1",
        "PET_NODE_RANK": "1",
        "PET_MASTER_ADDR": "127.0.0.1",
    }


def test_a_train_job_is_suspended_runs_and_fails(cluster, train_jobs):
    cluster.script("job-*", FOREVER)
    train_jobs.create(train_job(suspend=True, activeDeadlineSeconds=4))
    cluster.wait_for(lambda: cluster.conditions("job") == {"Suspended": "True"})
    cluster.resume("job")
    cluster.wait_for(lambda: (train_jobs.get("job")["status"]["jobsStatus"] or [{}])[0].get("ready") == 1)
    assert cluster.conditions("job") == {"Suspended": "False"}
    cluster.wait_for(lambda: cluster.conditions("job").get("Failed") == "True")
    reason = [one["reason"] for one in train_jobs.get("job")["status"]["conditions"] if one["type"] == "Failed"]
    assert reason == ["DeadlineExceeded"]
    cluster.wait_for(lambda: not cluster.list(PODS))


def test_a_train_job_fails_after_its_retries(cluster, train_jobs):
    cluster.script("job-*", FAILS)
    train_jobs.create(train_job(nodes=1))
    cluster.wait_for(lambda: cluster.conditions("job").get("Failed") == "True")
    failed = train_jobs.get("job")["status"]["conditions"][0]
    assert failed["reason"] == "FailedJobs"
    assert failed["message"].endswith("(first failed job: job-node-0)")


def test_a_train_job_on_an_unknown_runtime_waits(cluster, train_jobs):
    train_jobs.create(train_job(runtimeRef={"name": "elsewhere"}))
    cluster.wait_for(lambda: cluster.events("job"))
    assert '"elsewhere" not found' in cluster.events("job")[0][2]
    assert not cluster.list(PODS)


@pytest.fixture
def indexed_jobs(connection):
    return Jobs(connection, "batch", "v1", "jobs")


MISTAKE = {"action": "FailJob", "onExitCodes": {"containerName": "share", "operator": "In", "values": [2]}}
LOST = {"action": "Ignore", "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]}


def test_an_indexed_job_becomes_pods_that_know_their_index(cluster, indexed_jobs):
    indexed_jobs.create(indexed_job(code="import os; print(os.environ['JOB_COMPLETION_INDEX'])"))
    cluster.wait_for(lambda: cluster.conditions("job").get("Complete") == "True")
    pods = cluster.list(PODS)
    assert [cluster.log(pod["metadata"]["name"]) for pod in pods] == [["0"], ["1"]]
    assert [pod["metadata"]["name"].rpartition("-")[0] for pod in pods] == ["job-0", "job-1"]
    status = indexed_jobs.get("job")["status"]
    assert (status["succeeded"], status["ready"]) == (2, 0)
    assert cluster.conditions("job") == {"SuccessCriteriaMet": "True", "Complete": "True"}


def test_the_index_that_a_job_is_for_ends_it(cluster, indexed_jobs):
    cluster.script("job-0-*", DONE)
    cluster.script("job-1-*", FOREVER)
    indexed_jobs.create(indexed_job(successPolicy={"rules": [{"succeededIndexes": "0"}]}))
    cluster.wait_for(lambda: cluster.conditions("job").get("Complete") == "True")
    assert set(phases(cluster).values()) == {"Succeeded"}


def test_a_failed_pod_stays_and_another_one_takes_its_index(cluster, indexed_jobs):
    cluster.script("job-0-*", DONE)
    cluster.script("job-1-*", CRASHES, CRASHES, DONE)
    policy = {"rules": [LOST, MISTAKE]}
    indexed_jobs.create(indexed_job(backoffLimitPerIndex=1, podFailurePolicy=policy))
    cluster.wait_for(lambda: cluster.conditions("job").get("Failed") == "True")
    assert sorted(phases(cluster).values()) == ["Failed", "Failed", "Succeeded"]
    assert next(one["reason"] for one in indexed_jobs.get("job")["status"]["conditions"]) == "FailedIndexes"


def test_what_fails_again_for_sure_fails_the_job_at_once(cluster, indexed_jobs):
    cluster.script("job-0-*", FOREVER)
    cluster.script("job-1-*", FAILS)
    indexed_jobs.create(indexed_job(backoffLimitPerIndex=5, podFailurePolicy={"rules": [LOST, MISTAKE]}))
    cluster.wait_for(lambda: cluster.conditions("job").get("Failed") == "True")
    (message,) = {one["message"] for one in indexed_jobs.get("job")["status"]["conditions"]}
    assert message.endswith("failed with exit code 2 matching FailJob rule at index 1")
    cluster.wait_for(lambda: set(phases(cluster).values()) == {"Failed"})


def test_a_pod_whose_machine_is_taken_away_does_not_count(cluster, indexed_jobs):
    cluster.script("job-*", FOREVER)
    indexed_jobs.create(indexed_job(pods=1, backoffLimitPerIndex=0, podFailurePolicy={"rules": [LOST, MISTAKE]}))
    cluster.wait_for(lambda: indexed_jobs.get("job").get("status", {}).get("ready") == 1)
    (first,) = phases(cluster)
    cluster.preempt(first)
    cluster.wait_for(lambda: indexed_jobs.get("job")["status"]["ready"] == 1 and first not in phases(cluster))
    assert cluster.conditions("job") == {}


def test_an_indexed_job_is_suspended_runs_into_its_limit_and_goes(cluster, indexed_jobs):
    cluster.script("job-*", FOREVER)
    indexed_jobs.create(indexed_job(suspend=True, activeDeadlineSeconds=2, ttlSecondsAfterFinished=2))
    cluster.wait_for(lambda: cluster.conditions("job") == {"Suspended": "True"})
    cluster.resume("job")
    cluster.wait_for(lambda: cluster.conditions("job").get("Failed") == "True")
    reasons = {one["type"]: one["reason"] for one in indexed_jobs.get("job")["status"]["conditions"]}
    assert (reasons["Suspended"], reasons["Failed"]) == ("JobResumed", "DeadlineExceeded")
    cluster.wait_for(lambda: not cluster.list(JOBS))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"completions": None}, "spec.completions: Required value: when completion mode is Indexed"),
        ({"completionMode": "NonIndexed", "backoffLimitPerIndex": 1}, "spec.backoffLimitPerIndex: Invalid value"),
        ({"successPolicies": {}}, 'unknown field "spec.successPolicies"'),
        (
            {"podFailurePolicy": {"rules": [{"action": "FailJob"}]}},
            "one of OnExitCodes and OnPodConditions is required",
        ),
    ],
)
def test_a_job_that_the_server_refuses(indexed_jobs, change, message):
    with pytest.raises(client.ApiException) as refused:
        indexed_jobs.create(indexed_job(**change), field_validation="Strict")
    assert message in refused.value.body.replace("\\", "")
