"""Every line of a replica once, whatever happens to streams, containers and pods."""

from __future__ import annotations

import queue
from dataclasses import replace

import pytest

from components.launch import readers
from components.launch.client import ApiRetry, ForbiddenError
from components.launch.job_progress import Replica, read_replica
from components.launch.readers import LogLine, LogPosition, LogReader, ReaderThreads
from tests.stand_ins.kubernetes.resources import PODS
from tests.stand_ins.kubernetes.stand_in import Script

pytestmark = pytest.mark.usefixtures("threads_end")


def at(nanoseconds, text, second=0):
    return f"2026-01-01T00:00:{second:02}.{nanoseconds:09d}Z {text}"


def texts(position, *lines):
    return [taken[1] for taken in map(position.take, lines) if taken]


def test_log_position():
    position = LogPosition()
    assert texts(position, at(1, "a"), at(2, "b")) == ["a", "b"]
    position.reopen()
    assert texts(position, at(1, "a"), at(2, "b"), at(3, "c")) == ["c"]
    assert texts(position, at(1, "same"), at(1, "same")) == ["same", "same"]
    position.reopen()
    assert texts(position, at(1, "same"), at(1, "same"), at(1, "same"), at(1, "other")) == ["same", "other"]
    position.reopen()
    assert texts(position, *[at(1, "same")] * 3, at(1, "other"), at(2, "next")) == ["next"]
    assert texts(position, at(5, "a", second=9), at(5, "b", second=3)) == ["a", "b"]
    assert texts(position, "2026-01-01T02:00:00.5+02:00 a") == ["a"]
    position.reopen()
    assert texts(position, at(500_000_000, "a"), "2026-01-01T00:00:00.51Z b") == ["b"]
    remark = "unable to retrieve container logs for containerd://1"
    assert texts(position, remark, remark, at(1, "a"), remark) == [remark, "a"]


@pytest.fixture
def lines():
    return queue.SimpleQueue()


@pytest.fixture
def threads(lines):
    with ReaderThreads(ApiRetry(10), lines.put) as started:
        yield started


@pytest.fixture
def replica(kubernetes):

    def replica(name="p"):
        return read_replica(kubernetes.get(PODS, name), "worker-0", "main")

    return replica


@pytest.fixture
def pod(kubernetes):
    """Start a pod that follows scripts, and wait until it does."""

    def pod(*scripts, restart="Never", name="p"):
        kubernetes.script(name, *scripts)
        spec = {"restartPolicy": restart, "containers": [{"name": "main", "image": "task:1"}]}
        kubernetes.add(PODS, {"metadata": {"name": name}, "spec": spec})
        kubernetes.wait_for(lambda: kubernetes.get(PODS, name)["status"].get("phase") not in {None, "Pending"})

    return pod


@pytest.fixture
def reader(cluster, threads, lines, replica, monkeypatch):
    monkeypatch.setattr(readers, "RECONNECT_S", 0.05)

    def reader():
        started = LogReader(replica(), "main", cluster, threads)
        threads.start("log", started.run)
        return started

    return reader


def read_all(lines):
    """The texts until the reader has ended."""
    found = []
    while isinstance(line := lines.get(timeout=5), LogLine):
        found.append(line.text)
    assert line.error is None, line.error
    return found


def over(kubernetes, name="p"):
    kubernetes.wait_for(lambda: kubernetes.get(PODS, name)["status"]["phase"] in {"Succeeded", "Failed"})


def test_a_log_is_read_while_it_is_written(kubernetes, pod, reader, replica, lines):
    pod(Script(output=["a", 0.2, "b", "", "ä ö | ü"]))
    follower = reader()
    assert lines.get(timeout=5) == LogLine("worker-0", follower._position.time, "a")
    over(kubernetes)
    follower.update(replica())
    follower.finish()
    assert read_all(lines) == ["b", "", "ä ö | ü"]


@pytest.mark.parametrize("cuts", [1, 3])
def test_streams_that_break_lose_and_repeat_nothing(kubernetes, pod, reader, replica, lines, cuts):
    pauses = [item for number in range(30) for item in (f"line {number}", 0.02)]
    pod(Script(output=pauses))
    follower, found = reader(), []
    for _ in range(cuts):
        found += [lines.get(timeout=5).text for _ in range(5)]
        kubernetes.faults.cut("pods/log")
    over(kubernetes)
    follower.update(replica())
    follower.finish()
    assert found + read_all(lines) == [f"line {number}" for number in range(30)]


def test_container_that_restarts_in_its_pod_is_read_further(kubernetes, pod, reader, replica, lines):
    pod(
        Script(output=["first a", "first b"], exit_code=1),
        Script(output=["second a", 0.1, "second b"]),
        restart="OnFailure",
    )
    follower = reader()
    over(kubernetes)
    follower.update(replica())
    follower.finish()
    assert read_all(lines) == ["first a", "first b", "second a", "second b"]


def test_what_was_missed_of_container_before_its_restart_is_fetched(kubernetes, pod, reader, replica, lines):
    pod(Script(output=["a", 0.3, "b", "c"], exit_code=1), Script(output=["d"], hang=True), restart="OnFailure")
    follower = reader()
    assert lines.get(timeout=5).text == "a"
    kubernetes.faults.deny("get", "pods/log")  # from here on nothing can be read
    kubernetes.faults.cut("pods/log")
    error = lines.get(timeout=5).error
    assert isinstance(error, ForbiddenError)
    kubernetes.wait_for(lambda: kubernetes.get(PODS, "p")["status"]["containerStatuses"][0].get("restartCount") == 1)
    kubernetes.wait_for(lambda: replica().running)
    kubernetes.faults.allow("get", "pods/log")
    follower.update(replica())
    follower._threads.start("again", follower.run)
    assert [lines.get(timeout=5).text for _ in range(3)] == ["b", "c", "d"]


def test_a_replacing_pod_is_read_from_its_start(kubernetes, pod, reader, replica, lines):
    pod(Script(output=["old a"], hang=True), Script(output=["new a", 0.1, "new b"]))
    follower = reader()
    assert lines.get(timeout=5).text == "old a"
    follower._position.take("2199-01-01T00:00:00Z as a node says whose clock is ahead")
    kubernetes.delete(PODS, "p")
    kubernetes.wait_for(lambda: kubernetes.list(PODS) == [])
    kubernetes.add(
        PODS,
        {
            "metadata": {"name": "p"},
            "spec": {"restartPolicy": "Never", "containers": [{"name": "main", "image": "task:1"}]},
        },
    )
    over(kubernetes)
    assert lines.empty()  # it is not known yet that this is another pod
    follower.update(replica())
    follower.finish()
    assert read_all(lines) == ["new a", "new b"]


def test_a_pod_that_was_deleted_is_no_fault(kubernetes, pod, reader, replica, lines):
    pod(Script(output=["a"], hang=True))
    follower, last = reader(), replica()
    assert lines.get(timeout=5).text == "a"
    kubernetes.delete(PODS, "p")
    kubernetes.wait_for(lambda: kubernetes.list(PODS) == [])
    follower.update(replace(last, over=True))
    follower.finish()
    assert read_all(lines) == []


def test_nothing_to_read_ends_at_once(kubernetes, cluster, threads, lines):
    waiting = Replica(name="worker-0", pod="p", uid="u", placed=False)
    follower = LogReader(waiting, "main", cluster, threads)
    threads.start("log", follower.run)
    follower.finish()
    assert read_all(lines) == []
