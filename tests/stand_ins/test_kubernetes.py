"""The stand-in's API server, asked by the real client."""

import contextlib
import itertools
import json
import threading
import time

import pytest
import urllib3
from kubernetes import client, watch
from kubernetes.client import ApiException

from tests.stand_ins.kubernetes.faults import USER
from tests.stand_ins.kubernetes.resources import PODS, PYTORCHJOBS
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


def test_an_object_is_created_read_listed_and_deleted(jobs):
    created = jobs.create(pytorch_job())
    assert created["metadata"]["uid"]
    assert created["metadata"]["namespace"] == "kubeflow"
    assert jobs.get("job") == created
    listing = jobs.list()
    assert (listing["kind"], listing["items"]) == ("PyTorchJobList", [created])
    gone = jobs.delete("job")
    assert (gone["status"], gone["details"]["uid"]) == ("Success", created["metadata"]["uid"])
    assert jobs.list()["items"] == []


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
    cluster.install("pytorchjobs")
    jobs.create(pytorch_job())


def test_names_are_generated(core):
    manifest = pod() | {"metadata": {"generateName": "task-"}}
    names = {core.create_namespaced_pod("kubeflow", manifest).metadata.name for _ in range(3)}
    assert len(names) == 3
    assert all(name.startswith("task-") and len(name) == 10 for name in names)


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


def test_a_watch_begins_where_the_list_ended(jobs):
    jobs.create(pytorch_job("before"))
    version = jobs.list()["metadata"]["resourceVersion"]
    jobs.create(pytorch_job("after"))
    jobs.delete("before")
    seen = take(2, jobs.list, resource_version=version)
    assert [(one["type"], one["object"]["metadata"]["name"]) for one in seen] == [
        ("ADDED", "after"),
        ("DELETED", "before"),
    ]


def test_a_watch_without_version_begins_with_what_is_there_and_ends_in_time(jobs):
    jobs.create(pytorch_job())
    start = time.monotonic()
    assert [one["type"] for one in watch.Watch().stream(jobs.list, timeout_seconds=1)] == ["ADDED"]
    assert 0.9 < time.monotonic() - start < 30


def test_a_watch_sees_an_object_leave_its_selector(jobs):
    version = jobs.create(pytorch_job(labels={"run": "a"}))["metadata"]["resourceVersion"]
    jobs.patch("job", {"metadata": {"labels": {"run": "b"}}})
    jobs.patch("job", {"metadata": {"labels": {"run": "a"}}})
    seen = take(2, jobs.list, resource_version=version, label_selector="run=a")
    assert [one["type"] for one in seen] == ["DELETED", "ADDED"]


def test_a_watch_gets_bookmarks_if_it_wants_them(jobs):
    version = jobs.create(pytorch_job())["metadata"]["resourceVersion"]
    (bookmark,) = take(1, jobs.list, resource_version=version, allow_watch_bookmarks=True)
    assert bookmark["type"] == "BOOKMARK"
    assert int(bookmark["object"]["metadata"]["resourceVersion"]) >= int(version)


def test_a_forgotten_version_is_expired(cluster, jobs):
    version = jobs.create(pytorch_job())["metadata"]["resourceVersion"]
    cluster.compact()
    status = refused(jobs.list, resource_version=version, watch=True)
    assert (status["code"], status["reason"]) == (410, "Expired")
    assert "too old resource version" in status["message"]
    fresh = jobs.list()["metadata"]["resourceVersion"]
    jobs.patch("job", {"metadata": {"labels": {"a": "b"}}})
    assert [one["type"] for one in take(1, jobs.list, resource_version=fresh)] == ["MODIFIED"]


def test_an_open_watch_can_expire(cluster, jobs):
    version = jobs.create(pytorch_job())["metadata"]["resourceVersion"]
    timer = threading.Timer(0.3, cluster.expire_watches)
    timer.start()
    with pytest.raises(ApiException) as caught:
        take(1, jobs.list, resource_version=version)
    assert (caught.value.status, caught.value.reason.split(":")[0]) == (410, "Expired")
    timer.join()


def test_a_merge_patch_changes_what_it_names(jobs):
    jobs.create(pytorch_job(labels={"keep": "1", "drop": "1"}))
    changed = jobs.patch("job", {"metadata": {"labels": {"drop": None, "new": "1"}}})
    assert changed["metadata"]["labels"] == {"keep": "1", "new": "1"}
    assert changed["metadata"]["generation"] == 1
    assert jobs.patch("job", {"spec": {"runPolicy": {"suspend": True}}})["metadata"]["generation"] == 2


def test_a_status_is_written_at_its_own_path_only(jobs):
    given = pytorch_job() | {"status": {"conditions": [], "replicaStatuses": {}}}
    assert "status" not in jobs.create(given)
    assert "status" not in jobs.patch("job", {"status": {"startTime": "2026-01-01T00:00:00Z"}})
    changed = jobs.patch_status("job", {"status": {"startTime": "2026-01-01T00:00:00Z"}, "spec": {"nprocPerNode": "7"}})
    assert changed["status"] == {"startTime": "2026-01-01T00:00:00Z"}
    assert changed["spec"]["nprocPerNode"] == "2"


def test_a_stale_object_cannot_replace_a_newer_one(jobs):
    stale = jobs.create(pytorch_job())
    fresh = jobs.patch("job", {"metadata": {"labels": {"a": "b"}}})
    status = refused(jobs.replace, "job", stale)
    assert (status["code"], status["reason"]) == (409, "Conflict")
    assert "the object has been modified" in status["message"]
    jobs.replace("job", fresh | {"metadata": fresh["metadata"] | {"labels": {}}})


def test_a_patch_of_another_type_is_refused(cluster, jobs):
    jobs.create(pytorch_job())
    path = "/apis/kubeflow.org/v1/namespaces/kubeflow/pytorchjobs/job"
    with urllib3.PoolManager() as pool:
        headers = {"Content-Type": "application/json-patch+json"}
        answer = pool.request("PATCH", cluster.url + path, body="[]", headers=headers)
    assert answer.status == 415


@pytest.fixture
def family(cluster, jobs, core):
    """A job and what it owns."""
    owner = jobs.create(pytorch_job())
    reference = {
        "apiVersion": owner["apiVersion"],
        "kind": "PyTorchJob",
        "name": "job",
        "uid": owner["metadata"]["uid"],
    }
    core.create_namespaced_pod(
        "kubeflow", pod() | {"metadata": {"name": "one", "ownerReferences": [{**reference, "controller": True}]}}
    )
    return cluster


def test_dependents_go_with_their_owner(family, jobs):
    jobs.delete("job", propagation_policy="Background")
    family.wait_for(lambda: not family.list(PODS))


def test_orphans_stay(family, jobs):
    jobs.delete("job", propagation_policy="Orphan")
    time.sleep(0.1)
    assert [item["metadata"]["ownerReferences"] for item in family.list(PODS)] == [[]]


def test_a_foreground_deletion_waits_for_dependents(family, jobs):
    with family.store.changing(PODS, "kubeflow", "one") as bound:
        bound["spec"]["nodeName"] = "somewhere"  # there is no kubelet, so the pod stays
    left = jobs.delete("job", propagation_policy="Foreground")
    assert left["metadata"]["finalizers"] == ["foregroundDeletion"]
    family.wait_for(lambda: "deletionTimestamp" in family.get(PODS, "one")["metadata"])
    assert family.list(PYTORCHJOBS)
    family.store.remove(PODS, "kubeflow", "one")
    family.wait_for(lambda: not family.list(PYTORCHJOBS))


def test_what_has_no_owner_left_is_collected(cluster, jobs):
    reference = {"apiVersion": "v1", "kind": "Pod", "name": "task", "uid": "00000000-0000-0000-0000-000000000000"}
    jobs.create(pytorch_job(ownerReferences=[reference]))
    cluster.wait_for(lambda: not cluster.list(PYTORCHJOBS))


def test_a_deletion_may_insist_on_a_uid(jobs):
    jobs.create(pytorch_job())
    options = client.V1DeleteOptions(preconditions=client.V1Preconditions(uid="another"))
    assert refused(jobs.delete, "job", body=options)["code"] == 409
    assert jobs.get("job")


def test_a_denied_verb(cluster, jobs, core):
    cluster.faults.deny("create", "pytorchjobs")
    status = refused(jobs.create, pytorch_job())
    assert (status["code"], status["reason"]) == (403, "Forbidden")
    assert status["message"] == (
        f'pytorchjobs.kubeflow.org is forbidden: User "{USER}" cannot create resource "pytorchjobs" '
        f'in API group "kubeflow.org" in the namespace "kubeflow"'
    )
    cluster.faults.deny("get", "pods/log")
    log = refused(core.read_namespaced_pod_log, "one", "kubeflow")
    assert log["message"].startswith(f'pods "one" is forbidden: User "{USER}" cannot get resource "pods/log"')
    assert jobs.list()["items"] == []
    cluster.faults.allow("create", "pytorchjobs")
    jobs.create(pytorch_job())


def test_the_rules_of_a_role(cluster, connection, jobs, core):
    rules = [{"apiGroups": ["kubeflow.org"], "resources": ["pytorchjobs"], "verbs": ["get", "create"]}]
    cluster.faults.allow_only(rules)
    jobs.create(pytorch_job())
    assert refused(jobs.delete, "job")["code"] == 403
    assert refused(core.list_namespaced_pod, "kubeflow")["code"] == 403

    def may(verb):
        wanted = {"group": "kubeflow.org", "resource": "pytorchjobs", "verb": verb, "namespace": "kubeflow"}
        review = client.V1SelfSubjectAccessReview(spec={"resourceAttributes": wanted})
        return client.AuthorizationV1Api(connection).create_self_subject_access_review(review).status.allowed

    assert (may("create"), may("delete")) == (True, False)


@pytest.mark.parametrize("code", [401, 429, 500, 503, 504])
def test_failures_pass(cluster, jobs, code):
    cluster.faults.fail(code, times=2, verb="list")
    jobs.create(pytorch_job())
    assert [refused(jobs.list)["code"] for _ in range(2)] == [code, code]
    assert jobs.list()["items"]


def test_too_many_requests_say_when_to_come_back(cluster, jobs):
    cluster.faults.fail(429, retry_after_s=1)
    start = time.monotonic()
    assert jobs.list()["items"] == []  # urllib3 reads the header, waits, and asks again by itself
    assert 1 <= time.monotonic() - start < 30


def test_the_server_can_be_away(cluster, jobs):
    version = jobs.create(pytorch_job())["metadata"]["resourceVersion"]
    threading.Timer(0.2, cluster.faults.away, [0.5]).start()
    with pytest.raises(urllib3.exceptions.HTTPError):
        list(watch.Watch().stream(jobs.list, resource_version=version, timeout_seconds=5))
    with pytest.raises(urllib3.exceptions.HTTPError):
        jobs.list(_request_timeout=1)
    time.sleep(0.5)
    assert jobs.list()["items"]


def test_a_stream_can_be_cut_in_the_middle(cluster, jobs):
    version = jobs.create(pytorch_job())["metadata"]["resourceVersion"]
    jobs.patch("job", {"metadata": {"labels": {"a": "b"}}})
    stream = watch.Watch().stream(jobs.list, resource_version=version, timeout_seconds=5)
    assert next(stream)["type"] == "MODIFIED"
    cluster.faults.cut("pods")
    cluster.faults.cut("pytorchjobs")
    with pytest.raises(urllib3.exceptions.ProtocolError):
        next(stream)


def test_answers_can_be_slow(cluster, jobs):
    cluster.faults.slow(0.3)
    with pytest.raises(urllib3.exceptions.HTTPError):
        jobs.list(_request_timeout=(1, 0.1))
    jobs.list(_request_timeout=2)


def test_config_maps_and_secrets_are_kept(core):
    core.create_namespaced_config_map("kubeflow", {"metadata": {"name": "settings"}, "data": {"key": "value"}})
    assert core.read_namespaced_config_map("settings", "kubeflow").data == {"key": "value"}
    core.create_namespaced_secret("kubeflow", {"metadata": {"name": "store"}, "stringData": {"key": "value"}})
    assert core.read_namespaced_secret("store", "kubeflow")


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
