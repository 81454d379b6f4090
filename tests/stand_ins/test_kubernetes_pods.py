"""The stand-in's kubelet: a pod's process and its log."""

import base64
import json
import signal
import threading
import time
from datetime import UTC, datetime, timedelta

import pytest
import urllib3
from kubernetes.client import ApiException

from tests.stand_ins.kubernetes.resources import CONFIG_MAPS, PODS, SECRETS
from tests.stand_ins.kubernetes.stand_in import Script
from tests.stand_ins.manifests import pod

PRINT_ENVIRONMENT = "import json, os, sys; print(json.dumps(dict(os.environ, arguments=sys.argv[1:])))"


def phase(cluster, name="one"):
    return cluster.get(PODS, name)["status"]["phase"]


def state(cluster, name="one"):
    containers = cluster.get(PODS, name)["status"].get("containerStatuses")
    return containers[0]["state"] if containers else {}


def run(cluster, manifest):
    """Let a pod run to its end; its lines."""
    cluster.add(PODS, manifest)
    name = manifest["metadata"]["name"]
    cluster.wait_for(lambda: phase(cluster, name) in {"Succeeded", "Failed"})
    return cluster.log(name)


def with_container(manifest, **values):
    manifest["spec"]["containers"][0] |= values
    return manifest


def test_variables_come_from_where_the_manifest_says(cluster):
    cluster.add(CONFIG_MAPS, {"metadata": {"name": "settings"}, "data": {"MLFLOW_TRACKING_URI": "http://mlflow"}})
    secret = base64.b64encode(b"hidden").decode()
    cluster.add(SECRETS, {"metadata": {"name": "store"}, "data": {"AWS_SECRET_ACCESS_KEY": secret}})
    variables = [
        {"name": "PLAIN", "value": "$(KEY) $(UNKNOWN) $$(KEY)"},
        {"name": "KEY", "valueFrom": {"secretKeyRef": {"name": "store", "key": "AWS_SECRET_ACCESS_KEY"}}},
        {"name": "AFTER", "value": "<$(KEY)>"},
        {"name": "POD", "valueFrom": {"fieldRef": {"fieldPath": "metadata.name"}}},
        {"name": "RUN", "valueFrom": {"fieldRef": {"fieldPath": "metadata.labels['run']"}}},
        {"name": "ABSENT", "valueFrom": {"configMapKeyRef": {"name": "other", "key": "x", "optional": True}}},
    ]
    manifest = with_container(
        pod(code=PRINT_ENVIRONMENT), env=variables, envFrom=[{"configMapRef": {"name": "settings"}}], args=["$(AFTER)"]
    )
    manifest["metadata"]["labels"] = {"run": "a"}
    seen = json.loads(run(cluster, manifest)[0])
    assert seen["PLAIN"] == "$(KEY) $(UNKNOWN) $(KEY)"  # as in a cluster: a variable sees those before it
    assert (seen["KEY"], seen["AFTER"], seen["arguments"]) == ("hidden", "<hidden>", ["<hidden>"])
    assert (seen["POD"], seen["RUN"], seen["MLFLOW_TRACKING_URI"]) == ("one", "a", "http://mlflow")
    assert "ABSENT" not in seen


def test_a_pod_does_not_see_this_process_environment(cluster, monkeypatch):
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "of the test")
    assert "AWS_SECRET_ACCESS_KEY" not in json.loads(run(cluster, pod(code=PRINT_ENVIRONMENT))[0])


def test_a_missing_secret_keeps_the_container_from_starting(cluster, core):
    reference = {"secretKeyRef": {"name": "store", "key": "KEY"}}
    cluster.add(PODS, with_container(pod(), env=[{"name": "KEY", "valueFrom": reference}]))
    cluster.wait_for(lambda: ("one", "Failed", 'Error: secret "store" not found') in cluster.events())
    waiting = {"reason": "CreateContainerConfigError", "message": 'secret "store" not found'}
    cluster.wait_for(lambda: state(cluster) == {"waiting": waiting})
    with pytest.raises(ApiException, match="is waiting to start: CreateContainerConfigError"):
        core.read_namespaced_pod_log("one", "kubeflow")
    cluster.add(SECRETS, {"metadata": {"name": "store"}, "stringData": {"KEY": "value"}})
    cluster.wait_for(lambda: phase(cluster) == "Succeeded")


def test_mounts_are_folders_of_the_pod(cluster, tmp_path):
    cluster.add(CONFIG_MAPS, {"metadata": {"name": "pools"}, "data": {"pools.toml": "[cpu]"}})
    code = (
        "import os, pathlib, sys\n"
        "pathlib.Path(os.environ['TRAINER_CACHE'], 'kept').write_text('x')\n"
        "print(*sys.argv[1:], pathlib.Path(os.environ['POOLS']).read_text(), os.environ['SHARED'])"
    )
    manifest = with_container(
        pod(code=code),
        args=["--out=/cache/out", "file:///cache", "s3://bucket/cache", "/cache-2", '{"path": "/cache"}'],
        env=[
            {"name": "TRAINER_CACHE", "value": "/cache"},
            {"name": "POOLS", "value": "/etc/pools/pools.toml"},
            {"name": "SHARED", "value": "/dev/shm"},
        ],
        volumeMounts=[
            {"name": "cache", "mountPath": "/cache"},
            {"name": "pools", "mountPath": "/etc/pools"},
            {"name": "shared", "mountPath": "/dev/shm"},
        ],
    )
    memory = {"emptyDir": {"medium": "Memory"}}
    manifest["spec"]["volumes"] = [
        {"name": "cache", "emptyDir": {}},
        {"name": "pools", "configMap": {"name": "pools"}},
        {"name": "shared", **memory},
    ]
    uid_folder = run(cluster, manifest)[0].split()[0].removeprefix("--out=").removesuffix("/out")
    assert cluster.log("one") == [
        f'--out={uid_folder}/out file://{uid_folder} s3://bucket/cache /cache-2 {{"path": "{uid_folder}"}} [cpu] /dev/shm'
    ]
    assert uid_folder.startswith(str(tmp_path / "pods"))


@pytest.mark.parametrize(
    ("code", "phase_then", "exit_code", "reason"),
    [
        ("raise SystemExit(0)", "Succeeded", 0, "Completed"),
        ("raise SystemExit(130)", "Failed", 130, "Error"),
        ("import os; os.abort()", "Failed", 128 + signal.SIGABRT, "Error"),
    ],
)
def test_how_a_process_ends_is_the_containers_state(cluster, code, phase_then, exit_code, reason):
    run(cluster, pod(code=code))
    end = state(cluster)["terminated"]
    assert (phase(cluster), end["exitCode"], end["reason"]) == (phase_then, exit_code, reason)


def test_a_program_that_is_not_there(cluster):
    run(cluster, with_container(pod(), command=["torchrum"]))
    end = state(cluster)["terminated"]
    assert (end["exitCode"], end["reason"]) == (128, "StartError")
    assert 'exec: "torchrum": No such file or directory' in end["message"]


def test_the_termination_message(cluster):
    writing = "import os; open(os.environ['TRAINER_TERMINATION_LOG'], 'w').write('no images'); raise SystemExit(2)"
    run(cluster, pod("written", writing))
    assert state(cluster, "written")["terminated"]["message"] == "no images"
    silent = "print('first'); print('error: last'); raise SystemExit(2)"
    run(cluster, pod("silent", silent))
    assert "message" not in state(cluster, "silent")["terminated"]
    run(cluster, with_container(pod("log", silent), terminationMessagePolicy="FallbackToLogsOnError"))
    assert state(cluster, "log")["terminated"]["message"] == "first\nerror: last"


STUBBORN = (
    "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('ready', flush=True); time.sleep(60)"
)
POLITE = (
    "import signal, time; signal.signal(signal.SIGTERM, lambda *_: exit(0)); print('ready', flush=True); time.sleep(60)"
)


@pytest.mark.parametrize(("code", "grace_s"), [(STUBBORN, 1), (POLITE, 30)])
def test_a_deleted_pod_gets_time_to_end(cluster, core, code, grace_s):
    cluster.add(PODS, pod(code=code, terminationGracePeriodSeconds=grace_s))
    cluster.wait_for(lambda: phase(cluster) == "Running" and cluster.log("one") == ["ready"])
    start = time.monotonic()
    deleted = core.delete_namespaced_pod("one", "kubeflow")
    assert deleted.metadata.deletion_grace_period_seconds == grace_s
    cluster.wait_for(lambda: not cluster.list(PODS))
    took_s = time.monotonic() - start
    assert took_s >= grace_s if code == STUBBORN else took_s < grace_s
    assert [reason for _, reason, _ in cluster.events()] == ["Scheduled", "Created", "Started", "Killing"]


def test_a_log_is_read_while_it_is_written(cluster, core):
    cluster.script("one", Script(output=["a", 0.3, "b", 0.3, "c"]))
    cluster.add(PODS, pod())
    cluster.wait_for(lambda: phase(cluster) == "Running")
    answer = core.read_namespaced_pod_log("one", "kubeflow", follow=True, _preload_content=False)
    start, arrivals = time.monotonic(), []
    for line in answer:
        arrivals.append((line.decode().strip(), time.monotonic() - start))
    assert [line for line, _ in arrivals] == ["a", "b", "c"]
    assert arrivals[0][1] < 0.3 < arrivals[2][1]


def test_the_lines_of_a_log_can_be_chosen(cluster, core):
    cluster.script("one", Script(output=["a", "b", 1.1, "c"]))
    run(cluster, pod())

    def log(**query):
        return core.read_namespaced_pod_log("one", "kubeflow", **query).split()

    assert log() == ["a", "b", "c"]
    assert log(tail_lines=2) == ["b", "c"]
    assert log(tail_lines=0) == []
    assert log(since_seconds=1) == ["c"]
    stamps = [
        line.partition(" ")[0] for line in core.read_namespaced_pod_log("one", "kubeflow", timestamps=True).splitlines()
    ]
    assert sorted(stamps) == stamps
    assert len(stamps[0]) == len("2026-01-31T12:00:00.000000001Z")
    assert datetime.fromisoformat(stamps[0]) - datetime.now(UTC) < timedelta(minutes=1)


def test_since_time_counts_in_whole_seconds(cluster):
    cluster.script("one", Script(output=["a", "b"]))
    run(cluster, pod())
    url = f"{cluster.url}/api/v1/namespaces/kubeflow/pods/one/log"
    with urllib3.PoolManager() as pool:
        last = pool.request("GET", url, fields={"timestamps": "true"}).data.decode().splitlines()[1].split()[0]
        again = pool.request("GET", url, fields={"sinceTime": last}).data.decode().split()
    assert again[-2:] == ["a", "b"]  # the server cuts the fraction off: lines of the same second come again


def test_a_log_of_an_earlier_start(cluster, core):
    cluster.script("one", Script(output=["first"], exit_code=1), Script(output=["second"], hang=True))
    cluster.add(PODS, pod(restartPolicy="OnFailure"))
    cluster.wait_for(lambda: phase(cluster) == "Running" and cluster.log("one") == ["second"])
    assert core.read_namespaced_pod_log("one", "kubeflow", previous=True).split() == ["first"]


def test_logs_that_are_not_there(cluster, core):
    def refusal(name="one", **query):
        with pytest.raises(ApiException) as caught:
            core.read_namespaced_pod_log(name, "kubeflow", **query)
        return caught.value.status, json.loads(caught.value.body)["message"]

    assert refusal() == (404, 'pods "one" not found')
    cluster.script("one", Script(output=["line"], pull_error_s=30))
    cluster.script("pending", Script(pending_s=30))
    cluster.add(PODS, pod())
    cluster.add(PODS, pod("pending"))
    cluster.wait_for(lambda: state(cluster).get("waiting", {}).get("reason") == "ImagePullBackOff")
    assert refusal() == (400, 'container "main" in pod "one" is waiting to start: trying and failing to pull image')
    assert refusal(container="other") == (400, "container other is not valid for pod one")
    assert refusal(previous=True) == (400, 'previous terminated container "main" in pod "one" not found')
    assert core.read_namespaced_pod_log("pending", "kubeflow") == ""


def test_a_container_that_is_being_created_has_no_log(cluster, core):
    cluster.script("one", Script(output=["line"], creating_s=3.0))
    cluster.add(PODS, pod())
    cluster.wait_for(lambda: state(cluster))
    with pytest.raises(ApiException) as caught:
        core.read_namespaced_pod_log("one", "kubeflow", follow=True)
    message = json.loads(caught.value.body)["message"]
    assert message == 'container "main" in pod "one" is waiting to start: ContainerCreating'
    cluster.wait_for(lambda: phase(cluster) == "Succeeded")


def test_a_followed_log_can_be_cut_and_taken_up_again(cluster, core):
    cluster.script("one", Script(output=["a", 0.4, "b"]))
    cluster.add(PODS, pod())
    cluster.wait_for(lambda: phase(cluster) == "Running")
    answer = core.read_namespaced_pod_log("one", "kubeflow", follow=True, _preload_content=False)
    timer = threading.Timer(0.1, cluster.faults.cut, ["pods/log"])
    timer.start()
    with pytest.raises(urllib3.exceptions.ProtocolError):
        answer.read()
    assert core.read_namespaced_pod_log("one", "kubeflow", follow=True).split() == ["a", "b"]
    timer.join()
