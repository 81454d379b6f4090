"""Every state of some objects and every line of a log, whatever happens to connections, containers and pods."""

from __future__ import annotations

import queue
import time
from functools import partial

import pytest

from components.launch import client, readers
from components.launch.client import ApiRetry, ForbiddenError
from components.launch.job_manifest import PODS
from components.launch.job_progress import Replica, read_replica
from components.launch.readers import LogLine, LogPosition, LogState, ReaderThreads, ThreadEnded
from tests.stand_ins.kubernetes import resources as kinds
from tests.stand_ins.kubernetes.stand_in import KubernetesStandIn, Script

pytestmark = pytest.mark.usefixtures("threads_end")


@pytest.fixture
def inbox():
    return queue.SimpleQueue()


@pytest.fixture
def threads(cluster, inbox):
    with ReaderThreads(cluster, ApiRetry(30), inbox.put) as started:
        yield started


class TestWatch:
    @pytest.fixture
    def kubernetes(self, tmp_path, monkeypatch):
        with KubernetesStandIn(tmp_path, kubelet=False) as stand_in:
            monkeypatch.setenv("KUBECONFIG", str(stand_in.kubeconfig))
            yield stand_in

    @pytest.fixture
    def watch(self, threads):
        """Start to watch the pods with the label a=1."""
        return lambda: threads.start("pods", partial(threads.watch, PODS, labels="a=1"))

    @pytest.fixture
    def wait_for(self, inbox):
        """Read until the pods are these: name -> value."""
        known = {}

        def wait_for(**wanted):
            deadline = time.monotonic() + 60
            while known != wanted:
                assert time.monotonic() < deadline, known
                item = inbox.get(timeout=5)
                if isinstance(item, ThreadEnded):
                    raise item.error
                if item.kind == "LISTED":
                    known.clear()
                for one in item.objects:
                    known[one["metadata"]["name"]] = one["metadata"]["labels"].get("value", "")
                    if item.kind == "DELETED":
                        del known[one["metadata"]["name"]]

        return wait_for

    def add(self, kubernetes, name):
        spec = {"containers": [{"name": "main", "image": "task:1"}]}
        kubernetes.add(kinds.PODS, {"metadata": {"name": name, "labels": {"a": "1"}}, "spec": spec})

    def touch(self, kubernetes, name, value):
        with kubernetes.store.changing(kinds.PODS, "kubeflow", name) as pod:
            pod["metadata"]["labels"]["value"] = value

    def follow_one(self, kubernetes, wait_for, **others):
        """Make, change and delete a pod, and see that this is seen."""
        self.add(kubernetes, "p")
        wait_for(p="", **others)
        self.touch(kubernetes, "p", "1")
        wait_for(p="1", **others)
        kubernetes.delete(kinds.PODS, "p")
        wait_for(**others)

    def test_what_is_there_and_what_changes_is_seen(self, kubernetes, watch, wait_for):
        self.add(kubernetes, "before")
        watch()
        wait_for(before="")
        self.follow_one(kubernetes, wait_for, before="")

    @pytest.mark.parametrize("fault", ["cut", "expire", "compact"])
    def test_nothing_is_lost_when_a_watch_breaks(self, kubernetes, watch, wait_for, fault):
        self.add(kubernetes, "stays")
        self.add(kubernetes, "goes")
        watch()
        wait_for(stays="", goes="")
        {"cut": kubernetes.faults.cut, "expire": kubernetes.expire_watches, "compact": kubernetes.compact}[fault]()
        kubernetes.faults.cut()
        kubernetes.delete(kinds.PODS, "goes")
        self.touch(kubernetes, "stays", "2")
        kubernetes.compact()
        wait_for(stays="2")
        self.follow_one(kubernetes, wait_for, stays="2")

    def test_objects_are_listed_where_watch_is_forbidden(self, kubernetes, watch, wait_for, logged):
        kubernetes.faults.deny("watch", "pods")
        watch()
        self.follow_one(kubernetes, wait_for)
        assert logged() == ["pods: watching is not allowed, so they are listed every 0.05 s"]

    def test_objects_are_listed_where_watches_break_at_once(self, kubernetes, watch, wait_for):
        kubernetes.faults.fail(500, times=1000, verb="watch")
        watch()
        self.follow_one(kubernetes, wait_for)

    def test_an_unavailable_server_is_waited_for(self, kubernetes, watch, wait_for, logged):
        self.add(kubernetes, "p")
        watch()
        wait_for(p="")
        kubernetes.faults.away(30)
        self.touch(kubernetes, "p", "1")
        kubernetes.wait_for(logged)
        kubernetes.faults.away(0)
        wait_for(p="1")
        loss, back = logged()
        assert "does not answer" in loss
        assert "answers again" in back

    def test_watches_that_end_in_order_go_on_without_a_gap(self, kubernetes, threads, inbox, wait_for, monkeypatch):
        monkeypatch.setattr(client, "WATCH_TIMEOUT_S", 1)
        listings = []
        publish = threads._publish
        monkeypatch.setattr(threads, "_publish", lambda item: (listings.append(item.kind == "LISTED"), publish(item)))
        threads.start("pods", partial(threads.watch, PODS, labels="a=1"))
        for _ in range(3):
            self.follow_one(kubernetes, wait_for)
            time.sleep(0.7)
        assert sum(listings) == 1

    def test_a_refusal_after_an_answer_is_waited_out(self, kubernetes, watch, wait_for, logged):
        """A server that has just started refuses what it allowed before."""
        self.add(kubernetes, "p")
        watch()
        wait_for(p="")
        kubernetes.faults.deny("list", "pods")
        kubernetes.compact()
        kubernetes.expire_watches()
        self.touch(kubernetes, "p", "1")
        kubernetes.wait_for(logged)
        kubernetes.faults.allow("list", "pods")
        wait_for(p="1")

    def test_denied_listing_ends_the_watch(self, kubernetes, watch, wait_for):
        kubernetes.faults.deny("list", "pods")
        watch()
        rule = r'apiGroups: \[""\], resources: \[pods\], verbs: \[get, list, watch\]'
        with pytest.raises(ForbiddenError, match=rule):
            wait_for(p="")


def at(nanoseconds, text, second=0):
    return f"2026-01-01T00:00:{second:02}.{nanoseconds:09d}Z {text}"


def texts(position, *lines):
    return [line.text for line in (LogLine.parse("worker-0", one) for one in lines) if position.take(line)]


def test_log_position():
    position, ms = LogPosition(), 1_000_000
    assert position.reopen() is None
    assert texts(position, at(1 * ms, "a"), at(2 * ms, "b")) == ["a", "b"]
    assert position.reopen() > readers.CLOCK_MARGIN_S
    assert texts(position, at(1 * ms, "a"), at(2 * ms, "b"), at(3 * ms, "c")) == ["c"]
    assert texts(position, at(4 * ms, "same"), at(4 * ms, "other")) == ["same", "other"]
    position.reopen()
    assert texts(position, at(4 * ms, "same"), at(4 * ms, "other"), at(5 * ms, "next"))[-1] == "next"
    # A clock that is set back loses nothing.
    assert texts(position, at(5 * ms, "a", second=9), at(5 * ms, "b", second=3)) == ["a", "b"]
    position.reopen()
    assert texts(position, at(5 * ms, "a", second=9), at(5 * ms, "b", second=3), at(6 * ms, "c", second=3))[-1] == "c"
    # A log that was rotated no longer has the last line.
    position.reopen()
    assert texts(position, at(7 * ms, "d", second=3)) == ["d"]
    remark = "unable to retrieve container logs for containerd://1"
    assert texts(position, remark, remark, at(1 * ms, "a", second=20), remark) == [remark, "a"]


class TestLog:
    @pytest.fixture
    def replica(self, kubernetes):

        def replica(name="p"):
            return read_replica(kubernetes.get(kinds.PODS, name), "worker-0", "main")

        return replica

    @pytest.fixture
    def pod(self, kubernetes):
        """Start a pod that follows scripts, and wait until it does."""

        def pod(*scripts, restart="Never", name="p"):
            kubernetes.script(name, *scripts)
            spec = {"restartPolicy": restart, "containers": [{"name": "main", "image": "task:1"}]}
            kubernetes.add(kinds.PODS, {"metadata": {"name": name}, "spec": spec})
            kubernetes.wait_for(
                lambda: kubernetes.get(kinds.PODS, name)["status"].get("phase") not in {None, "Pending"}
            )

        return pod

    @pytest.fixture
    def follow(self, threads, replica):
        """Follow the pod; returns what replaces its known state."""

        def follow():
            known = {"now": replica()}
            threads.start("log", partial(threads.follow_log, known["now"], "main", lambda: known["now"]))
            return partial(known.__setitem__, "now")

        return follow

    def read_all(self, inbox):
        """The texts until the reader has ended."""
        found = []
        while not isinstance(item := inbox.get(timeout=5), ThreadEnded):
            found += [item.text] if isinstance(item, LogLine) else []
        assert item.error is None, item.error
        return found

    def over(self, kubernetes, name="p"):
        kubernetes.wait_for(lambda: kubernetes.get(kinds.PODS, name)["status"]["phase"] in {"Succeeded", "Failed"})

    def test_a_log_is_read_while_it_is_written(self, kubernetes, pod, follow, replica, inbox):
        pod(Script(output=["a", 0.2, "b", "", "ä ö | ü"]))
        update = follow()
        assert inbox.get(timeout=5).text == "a"
        self.over(kubernetes)
        update(replica())
        assert self.read_all(inbox) == ["b", "", "ä ö | ü"]

    @pytest.mark.parametrize("cuts", [1, 3])
    def test_streams_that_break_lose_and_repeat_nothing(self, kubernetes, pod, follow, replica, inbox, cuts):
        pauses = [item for number in range(30) for item in (f"line {number}", 0.02)]
        pod(Script(output=pauses))
        update, found = follow(), []
        for _ in range(cuts):
            read = [inbox.get(timeout=5) for _ in range(5)]
            found += [one.text for one in read if isinstance(one, LogLine)]
            kubernetes.faults.cut("pods/log")
        self.over(kubernetes)
        update(replica())
        assert found + self.read_all(inbox) == [f"line {number}" for number in range(30)]

    def test_container_that_restarts_in_its_pod_is_read_further(self, kubernetes, pod, follow, replica, inbox):
        pod(
            Script(output=["first a", "first b"], exit_code=1),
            Script(output=["second a", 0.1, "second b"]),
            restart="OnFailure",
        )
        update = follow()
        self.over(kubernetes)
        update(replica())
        assert self.read_all(inbox) == ["first a", "first b", "second a", "second b"]

    def test_what_was_missed_of_container_before_its_restart_is_fetched(self, kubernetes, pod, follow, replica, inbox):
        pod(Script(output=["a", 0.3, "b", "c"], exit_code=1), Script(output=["d"], hang=True), restart="OnFailure")
        update = follow()
        assert inbox.get(timeout=5).text == "a"
        kubernetes.faults.fail(500, times=1000, resource="pods/log")  # from here on nothing can be read
        kubernetes.faults.cut("pods/log")
        kubernetes.wait_for(lambda: replica().restarts == 1 and replica().running)
        update(replica())
        kubernetes.faults.clear()
        read = [inbox.get(timeout=5) for _ in range(5)]
        assert [one.text for one in read if isinstance(one, LogLine)] == ["b", "c", "d"]
        assert [one.readable for one in read if isinstance(one, LogState)] == [False, True]

    def test_a_pod_that_replaces_another_is_left_to_another_reader(self, kubernetes, pod, follow, inbox):
        pod(Script(output=["old a"], hang=True), Script(output=["new a", 0.1, "new b"]))
        follow()
        assert inbox.get(timeout=5).text == "old a"
        kubernetes.delete(kinds.PODS, "p")
        kubernetes.wait_for(lambda: kubernetes.list(kinds.PODS) == [])
        spec = {"restartPolicy": "Never", "containers": [{"name": "main", "image": "task:1"}]}
        kubernetes.add(kinds.PODS, {"metadata": {"name": "p"}, "spec": spec})
        self.over(kubernetes)
        assert self.read_all(inbox) == []
        follow()
        assert inbox.get(timeout=5).text == "new a"

    def test_denied_log_is_an_error(self, kubernetes, pod, follow, inbox):
        pod(Script(output=["a"], hang=True))
        kubernetes.faults.deny("get", "pods/log")
        follow()
        assert isinstance(inbox.get(timeout=5).error, ForbiddenError)

    def test_pod_that_ended_before_it_began_ends_the_reader(self, kubernetes, threads, inbox):
        gone = Replica(name="worker-0", pod="p", uid="u", placed=True, over=True)
        threads.start("log", partial(threads.follow_log, gone, "main", lambda: gone))
        assert self.read_all(inbox) == []
