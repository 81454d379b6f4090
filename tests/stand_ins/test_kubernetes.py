"""The stand-in's API server, asked by the real client."""

import contextlib
import itertools
import json
import threading
import time

import pytest
import urllib3
from kubernetes import watch
from kubernetes.client import ApiException

from tests.stand_ins.kubernetes.resources import PODS
from tests.stand_ins.kubernetes.stand_in import KubernetesStandIn, Script
from tests.stand_ins.manifests import pod, pytorch_job


@pytest.fixture
def cluster(tmp_path):
    """Only the API server: nothing changes by itself."""
    with KubernetesStandIn(tmp_path, operator=False, kubelet=False) as cluster:
        yield cluster


def refused(call, *arguments, **options):
    """The Status body of a refusal."""
    with pytest.raises(ApiException) as caught:
        call(*arguments, **options)
    status = json.loads(caught.value.body)
    assert (status["kind"], status["code"]) == ("Status", caught.value.status)
    return status


def take(count, call, **query):
    """The first objects of a watch."""
    with contextlib.closing(watch.Watch().stream(call, timeout_seconds=5, **query)) as stream:
        return list(itertools.islice(stream, count))


def test_refusals_are_in_the_servers_words(jobs, core):
    missing = refused(jobs.get, "job")
    assert (missing["code"], missing["reason"]) == (404, "NotFound")
    assert missing["message"] == 'pytorchjobs.kubeflow.org "job" not found'
    assert missing["details"] == {"name": "job", "group": "kubeflow.org", "kind": "pytorchjobs"}
    assert refused(core.read_namespaced_pod, "one", "kubeflow")["message"] == 'pods "one" not found'
    jobs.create(pytorch_job())
    taken = refused(jobs.create, pytorch_job())
    assert (taken["code"], taken["reason"]) == (409, "AlreadyExists")
    assert taken["message"] == 'pytorchjobs.kubeflow.org "job" already exists'
    nowhere = refused(core.create_namespaced_pod, "elsewhere", pod())
    assert (nowhere["code"], nowhere["message"]) == (404, 'namespaces "elsewhere" not found')


def test_a_kind_without_crd_is_no_path(cluster, jobs):
    cluster.uninstall("pytorchjobs")
    with pytest.raises(ApiException) as caught:
        jobs.create(pytorch_job())
    assert (caught.value.status, caught.value.body) == (404, "404 page not found\n")


@pytest.mark.parametrize(
    ("selector", "found"),
    [
        ("run=a", "ab"),
        ("run==a,stage!=distill", "b"),
        ("stage in (distill, tune)", "ac"),
        ("stage notin (distill)", "bd"),
        ("stage", "ac"),
        ("!stage", "bd"),
        ("app.kubernetes.io/name=x", "d"),
    ],
)
def test_label_selectors(core, selector, found):
    labels = {
        "a": {"run": "a", "stage": "distill"},
        "b": {"run": "a"},
        "c": {"stage": "distill"},
        "d": {"app.kubernetes.io/name": "x"},
    }
    for name, values in labels.items():
        core.create_namespaced_pod("kubeflow", pod() | {"metadata": {"name": name, "labels": values}})
    items = core.list_namespaced_pod("kubeflow", label_selector=selector).items
    assert "".join(item.metadata.name for item in items) == found


def test_field_selectors(cluster, core):
    one, _ = (core.create_namespaced_pod("kubeflow", pod(name)) for name in ("one", "two"))
    cluster.store.record_event(cluster.get(PODS, "one"), "Warning", "FailedScheduling", "no node", "scheduler")
    cluster.store.record_event(cluster.get(PODS, "two"), "Warning", "FailedScheduling", "no node", "scheduler")
    events = core.list_namespaced_event("kubeflow", field_selector=f"involvedObject.uid={one.metadata.uid}").items
    assert [event.involved_object.name for event in events] == ["one"]
    names = [
        item.metadata.name for item in core.list_namespaced_pod("kubeflow", field_selector="metadata.name!=one").items
    ]
    assert names == ["two"]
    assert refused(core.list_namespaced_pod, "kubeflow", field_selector="spec.color=red")["code"] == 400


def test_an_event_that_repeats_is_counted(cluster, core):
    core.create_namespaced_pod("kubeflow", pod())
    for _ in range(3):
        cluster.store.record_event(cluster.get(PODS, "one"), "Warning", "BackOff", "again", "kubelet")
    assert [event.count for event in core.list_namespaced_event("kubeflow").items] == [3]


def test_a_watch_sees_an_object_leave_its_selector(jobs):
    version = jobs.create(pytorch_job(labels={"run": "a"}))["metadata"]["resourceVersion"]
    jobs.patch("job", {"metadata": {"labels": {"run": "b"}}})
    jobs.patch("job", {"metadata": {"labels": {"run": "a"}}})
    seen = take(2, jobs.list, resource_version=version, label_selector="run=a")
    assert [one["type"] for one in seen] == ["DELETED", "ADDED"]


def test_status_is_written_at_its_own_path_only(jobs):
    given = pytorch_job() | {"status": {"conditions": [], "replicaStatuses": {}}}
    assert "status" not in jobs.create(given)
    assert "status" not in jobs.patch("job", {"status": {"startTime": "2026-01-01T00:00:00Z"}})
    changed = jobs.patch_status("job", {"status": {"startTime": "2026-01-01T00:00:00Z"}, "spec": {"nprocPerNode": "7"}})
    assert changed["status"] == {"startTime": "2026-01-01T00:00:00Z"}
    assert changed["spec"]["nprocPerNode"] == "2"


def test_nothing_is_left_behind(tmp_path):
    before = set(threading.enumerate())
    with urllib3.PoolManager() as pool:
        with KubernetesStandIn(tmp_path) as cluster:
            cluster.add_pod("task")
            cluster.script("played", Script(output=["line", 60.0]))
            cluster.add(PODS, pod("played"))
            cluster.add(PODS, pod("real", "import time; print('here', flush=True); time.sleep(60)"))
            cluster.wait_for(lambda: all(item["status"]["phase"] == "Running" for item in cluster.list(PODS)))
            url = f"{cluster.url}/api/v1/namespaces/kubeflow/pods?watch=true"
            answer = pool.request("GET", url, preload_content=False)
            start = time.monotonic()
        assert time.monotonic() - start < 30
        answer.close()
    assert set(threading.enumerate()) == before
    assert not list((tmp_path / "pods").iterdir())


def test_a_failure_of_a_controller_fails_the_test(tmp_path):
    def run():
        with KubernetesStandIn(tmp_path) as cluster:
            cluster.add(PODS, {"metadata": {"name": "broken"}, "spec": {}})
            cluster.wait_for(lambda: False, timeout_s=0.2)

    with pytest.raises(KeyError, match="containers"):
        run()
