"""The stand-in's kubelet: a pod's process and its log."""

import base64
import json
from datetime import UTC, datetime, timedelta

import pytest
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


def test_the_termination_message(cluster):
    writing = "import os; open(os.environ['TRAINER_TERMINATION_LOG'], 'w').write('no images'); raise SystemExit(2)"
    run(cluster, pod("written", writing))
    assert state(cluster, "written")["terminated"]["message"] == "no images"
    silent = "print('first'); print('error: last'); raise SystemExit(2)"
    run(cluster, pod("silent", silent))
    assert "message" not in state(cluster, "silent")["terminated"]
    run(cluster, with_container(pod("log", silent), terminationMessagePolicy="FallbackToLogsOnError"))
    assert state(cluster, "log")["terminated"]["message"] == "first\nerror: last"


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
