"""Every change of some objects, whatever happens to the connection."""

from __future__ import annotations

import queue
import time

import pytest

from components.launch import readers
from components.launch.client import ApiRetry, ForbiddenError
from components.launch.job_manifest import PODS
from components.launch.readers import Informer, ReaderThreads, ThreadEnded
from tests.stand_ins.kubernetes import resources as kinds
from tests.stand_ins.kubernetes.stand_in import KubernetesStandIn

pytestmark = pytest.mark.usefixtures("threads_end")


@pytest.fixture
def inbox():
    return queue.SimpleQueue()


@pytest.fixture
def watch(cluster, inbox, logged, monkeypatch):
    """Start to watch the pods with the label a=1."""
    monkeypatch.setattr(readers, "POLL_S", 0.1)

    def watch(threads):
        threads.start("pods", Informer(cluster, PODS, threads, labels="a=1").run)

    return watch


@pytest.fixture
def threads(inbox):
    with ReaderThreads(ApiRetry(30), inbox.put) as started:
        yield started


def add(kubernetes, name):
    spec = {"containers": [{"name": "main", "image": "task:1"}]}
    kubernetes.add(kinds.PODS, {"metadata": {"name": name, "labels": {"a": "1"}}, "spec": spec})


def touch(kubernetes, name, value):
    with kubernetes.store.changing(kinds.PODS, "kubeflow", name) as pod:
        pod["metadata"]["labels"]["value"] = value


def seen(inbox):
    change = inbox.get(timeout=5)
    if isinstance(change, ThreadEnded):
        raise change.error
    metadata = change.object["metadata"]
    return metadata["name"], "gone" if change.deleted else metadata["labels"].get("value", "new")


@pytest.fixture
def kubernetes(tmp_path, monkeypatch):
    with KubernetesStandIn(tmp_path, kubelet=False) as stand_in:
        monkeypatch.setenv("KUBECONFIG", str(stand_in.kubeconfig))
        yield stand_in


def wait_for(logged):
    deadline = time.monotonic() + 60
    while not logged() and time.monotonic() < deadline:
        time.sleep(0.05)


def follow_one(kubernetes, inbox):
    """Make, change and delete a pod, and see that this is seen."""
    add(kubernetes, "p")
    assert seen(inbox) == ("p", "new")
    touch(kubernetes, "p", "1")
    assert seen(inbox) == ("p", "1")
    kubernetes.delete(kinds.PODS, "p")
    assert seen(inbox) == ("p", "gone")


def test_what_is_there_and_what_changes_is_seen_once(kubernetes, watch, threads, inbox):
    add(kubernetes, "before")
    watch(threads)
    assert seen(inbox) == ("before", "new")
    follow_one(kubernetes, inbox)
    assert inbox.empty()


@pytest.mark.parametrize("fault", ["cut", "expire", "compact"])
def test_nothing_is_lost_when_a_watch_breaks(kubernetes, watch, threads, inbox, fault):
    add(kubernetes, "stays")
    add(kubernetes, "goes")
    watch(threads)
    assert {seen(inbox), seen(inbox)} == {("stays", "new"), ("goes", "new")}
    {"cut": kubernetes.faults.cut, "expire": kubernetes.expire_watches, "compact": kubernetes.compact}[fault]()
    kubernetes.faults.cut()
    kubernetes.delete(kinds.PODS, "goes")
    touch(kubernetes, "stays", "2")
    kubernetes.compact()
    assert {seen(inbox), seen(inbox)} == {("goes", "gone"), ("stays", "2")}
    follow_one(kubernetes, inbox)
    assert inbox.empty()


def test_informer_polls_where_watch_is_forbidden_and_logs_it(kubernetes, watch, threads, inbox, logged):
    kubernetes.faults.deny("watch", "pods")
    watch(threads)
    follow_one(kubernetes, inbox)
    assert logged() == ["pods: watching them is not allowed, so they are listed every 0.1 s"]


def test_informer_polls_where_watches_break_at_once_and_logs_it(kubernetes, watch, threads, inbox, logged):
    kubernetes.faults.fail(500, times=1000, verb="watch")
    watch(threads)
    wait_for(logged)
    follow_one(kubernetes, inbox)
    assert logged()[-1] == "pods: watches break at once, so they are listed every 0.1 s"


def test_an_unavailable_server_is_waited_for(kubernetes, watch, threads, inbox, logged):
    add(kubernetes, "p")
    watch(threads)
    assert seen(inbox) == ("p", "new")
    kubernetes.faults.away(30)
    touch(kubernetes, "p", "1")
    wait_for(logged)
    kubernetes.faults.away(0)
    assert seen(inbox) == ("p", "1")
    loss, back = logged()
    assert "does not answer" in loss
    assert "answers again" in back


def test_denied_listing_ends_the_watch(kubernetes, watch, threads, inbox):
    kubernetes.faults.deny("list", "pods")
    watch(threads)
    with pytest.raises(ForbiddenError, match=r'apiGroups: \[""\], resources: \[pods\], verbs: \[get, list, watch\]'):
        seen(inbox)
