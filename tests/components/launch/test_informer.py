"""Every change of some objects, whatever happens to the connection."""

from __future__ import annotations

import queue
import time

import pytest

from components.launch import readers
from components.launch.api_errors import PODS, ApiRetry, ApiUnavailableError, ForbiddenError
from components.launch.readers import Informer, ReaderThreads, ThreadEnded
from tests.stand_ins.kubernetes import resources as kinds
from tests.stand_ins.kubernetes.stand_in import KubernetesStandIn

pytestmark = pytest.mark.usefixtures("threads_end")


@pytest.fixture
def inbox():
    return queue.SimpleQueue()


@pytest.fixture
def watch(cluster, inbox, told, monkeypatch):
    """Start to watch the pods with the label a=1."""
    monkeypatch.setattr(readers, "POLL_S", 0.1)

    def watch(threads):
        threads.start("pods", Informer(cluster, PODS, threads, inbox.put, labels="a=1").run)

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


def wait_for(told):
    deadline = time.monotonic() + 60
    while not told() and time.monotonic() < deadline:
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
def test_a_watch_that_breaks_is_made_good(kubernetes, watch, threads, inbox, fault):
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


def test_where_watching_is_denied_we_poll_and_say_so(kubernetes, watch, threads, inbox, told):
    kubernetes.faults.deny("watch", "pods")
    watch(threads)
    follow_one(kubernetes, inbox)
    assert told() == ["pods: watching them is not allowed, so they are listed every 0.1 s"]


def test_where_watches_break_at_once_we_poll_and_say_so(kubernetes, watch, threads, inbox, told):
    kubernetes.faults.fail(500, times=1000, verb="watch")
    watch(threads)
    wait_for(told)
    follow_one(kubernetes, inbox)
    assert told()[-1] == "pods: watches break at once, so they are listed every 0.1 s"


def test_a_server_that_is_away_for_a_while_is_waited_for(kubernetes, watch, threads, inbox, told):
    add(kubernetes, "p")
    watch(threads)
    assert seen(inbox) == ("p", "new")
    kubernetes.faults.away(30)
    touch(kubernetes, "p", "1")
    wait_for(told)
    kubernetes.faults.away(0)
    assert seen(inbox) == ("p", "1")
    loss, back = told()
    assert "does not answer" in loss
    assert "answers again" in back


def test_a_server_that_stays_away_ends_the_watch(kubernetes, watch, inbox):
    with ReaderThreads(ApiRetry(0.3), inbox.put) as threads:
        watch(threads)
        kubernetes.faults.away(30)
        with pytest.raises(ApiUnavailableError):
            seen(inbox)


def test_denied_listing_ends_the_watch(kubernetes, watch, threads, inbox):
    kubernetes.faults.deny("list", "pods")
    watch(threads)
    with pytest.raises(ForbiddenError, match=r'apiGroups: \[""\], resources: \[pods\], verbs: \[get, list, watch\]'):
        seen(inbox)
