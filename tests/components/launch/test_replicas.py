"""Pods' statuses, as the API shows them."""

from __future__ import annotations

import pytest

from components.launch.replicas import Termination, read

FINISHED = "2026-01-01T00:00:00Z"


def pod(phase="Running", *, state=None, last=None, restarts=0, **status):
    container = {"name": "pytorch", "state": state or {}, "lastState": last or {}, "restartCount": restarts}
    sidecar = {"name": "istio-proxy", "state": {"running": {}}, "restartCount": 7}
    containers = [sidecar, container] if state is not None else []
    return {
        "metadata": {"name": "job-worker-0", "uid": "u"},
        "status": {"phase": phase, "containerStatuses": containers, **status},
    }


def replica(*arguments, **fields):
    return read(pod(*arguments, **fields), "worker-0", "pytorch")


def ended(code, reason="Error", message=""):
    return {"terminated": {"exitCode": code, "reason": reason, "message": message, "finishedAt": FINISHED}}


def test_a_pod_without_a_node_is_not_placed():
    waiting = replica("Pending")
    assert (waiting.placed, waiting.over, waiting.ended, waiting.waiting) == (False, False, None, "")


def test_a_pod_without_any_status_is_not_placed():
    assert not read({"metadata": {"name": "p", "uid": "u"}}, "worker-0", "pytorch").placed


def test_a_running_container_is_placed():
    running = replica(state={"running": {}})
    assert running.placed
    assert running.running
    assert not running.over


@pytest.mark.parametrize(
    ("reason", "stuck"),
    [("ContainerCreating", False), ("ImagePullBackOff", True), ("CreateContainerConfigError", True)],
)
def test_why_a_container_waits(reason, stuck):
    waiting = replica("Pending", state={"waiting": {"reason": reason, "message": "because"}})
    assert (waiting.waiting, waiting.waiting_message, waiting.stuck, waiting.placed) == (
        reason,
        "because",
        stuck,
        False,
    )


def test_an_init_container_that_waits_is_the_reason():
    init = [{"name": "init-pytorch", "state": {"waiting": {"reason": "ErrImagePull"}}}]
    waiting = replica("Pending", state={"waiting": {"reason": "PodInitializing"}}, initContainerStatuses=init)
    assert waiting.waiting == "ErrImagePull"


def test_the_end_of_a_container():
    over = replica("Failed", state=ended(3, message=" no images \n"), restarts=1)
    assert over.over
    assert over.restarts == 1
    assert over.ended == Termination(
        replica="worker-0", exit_code=3, reason="Error", message="no images", finished=FINISHED
    )


def test_a_container_that_was_started_again_keeps_its_last_end():
    again = replica(state={"running": {}}, last=ended(137, "OOMKilled"), restarts=1)
    assert again.running
    assert str(again.ended) == "ended with exit code 137 (OOMKilled)"


def test_a_container_that_waits_for_its_next_start_is_placed():
    backing_off = replica(state={"waiting": {"reason": "CrashLoopBackOff"}}, last=ended(1), restarts=2)
    assert backing_off.placed
    assert not backing_off.stuck


def test_an_evicted_pod_has_no_exit_code():
    evicted = replica("Failed", reason="Evicted", message="The node was low on resource: memory.")
    assert evicted.over
    assert str(evicted.ended) == "ended (Evicted)"
    assert evicted.ended.message == "The node was low on resource: memory."


def test_a_preempted_pod_says_who_took_its_place():
    condition = {
        "type": "DisruptionTarget",
        "status": "True",
        "reason": "PreemptionByScheduler",
        "message": "default-scheduler: preempting to accommodate a higher priority pod",
        "lastTransitionTime": FINISHED,
    }
    preempted = replica(state=ended(143), conditions=[{"type": "Ready", "status": "False"}, condition])
    assert str(preempted.ended) == "ended with exit code 143 (PreemptionByScheduler)"
    assert preempted.ended.finished == FINISHED
