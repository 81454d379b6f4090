"""What follows from the observed status of a job and its pods, on a clock that the test sets; and which replica caused a failure."""

from __future__ import annotations

from collections import deque
from dataclasses import replace

import pytest

from components.launch.job_manifest import JobState
from components.launch.job_progress import (
    JobLimits,
    JobProgress,
    Replica,
    Termination,
    explain_failure,
    fails_again,
    first_failure,
    read_replica,
)
from trainer.io.errors import EXIT_CODE, MISSED_ANOTHER

LIMITS = JobLimits(queued_s=100, running_s=1000, silent_s=50)
PENDING, SUSPENDED, RUNNING = JobState(phase="pending"), JobState(phase="suspended"), JobState(phase="running")


@pytest.fixture
def progress():
    return JobProgress(nodes=2, limits=LIMITS, now=0)


def replica(number, **changes):
    return replace(
        Replica(name=f"worker-{number}", pod=f"job-worker-{number}", uid=f"uid-{number}", placed=False), **changes
    )


def start(progress, now):
    progress.set_job_state(RUNNING, deleting=False, now=now)
    for number in range(2):
        progress.update_replica(replica(number, placed=True, running=True), now)


def event(reason, message="", *, type_="Warning", uid="e", **fields):
    return {"metadata": {"uid": uid}, "type": type_, "reason": reason, "message": message, **fields}


def test_running_replicas(progress):
    progress.set_job_state(RUNNING, deleting=False, now=1)
    progress.update_replica(replica(0, placed=True), 2)
    assert progress.take_messages() == [
        "waiting for its machines (0 of 2 replicas)",
        "waiting for its machines (1 of 2 replicas)",
    ]
    progress.update_replica(replica(1, placed=True), 3)
    assert progress.take_messages() == ["running (2 of 2 replicas)"]
    assert progress.take_messages() == []
    # An elastic job runs with fewer.
    elastic = JobProgress(nodes=1, limits=LIMITS, now=0)
    elastic.set_job_state(RUNNING, deleting=False, now=1)
    elastic.update_replica(replica(1, placed=True), 2)
    assert elastic.take_messages()[-1] == "running (1 of 1 replicas)"


@pytest.mark.parametrize(("phase", "kind"), [("succeeded", "succeeded"), ("failed", "failed")])
def test_the_jobs_own_state_ends_it(progress, phase, kind):
    assert progress.outcome(0) is None
    progress.set_job_state(JobState(phase=phase), deleting=True, now=1)
    ending = progress.outcome(1)
    assert ending
    assert ending.kind == kind


def test_job_that_is_being_deleted_or_deleted_is_over(progress):
    progress.set_job_state(RUNNING, deleting=True, now=1)
    assert progress.outcome(1).kind == "deleted"
    gone = JobProgress(nodes=1, limits=LIMITS, now=0)
    gone.mark_job_deleted()
    assert gone.outcome(1).kind == "deleted"


def test_waiting_has_its_limit_and_names_last_problem(progress):
    progress.set_job_state(PENDING, deleting=False, now=1)
    progress.add_event("worker-0", event("FailedScheduling", "0/3 nodes are available"))
    assert progress.next_limit_s(40) == 60
    assert progress.outcome(99.9) is None
    ending = progress.outcome(100)
    assert ending.kind == "limit"
    assert ending.message.startswith("was not running after 100 s (waiting for its machines (0 of 2 replicas))")
    assert "last problem: worker-0: FailedScheduling: 0/3 nodes are available" in ending.message
    assert "queued_minutes" in ending.message


def test_time_in_queue_does_not_count_as_running(progress):
    start(progress, 10)
    progress.add_line("worker-0", "step 1", 400)
    progress.set_job_state(SUSPENDED, deleting=False, now=410)  # 400 s have run
    assert progress.take_messages()[-1] == "suspended, waiting in its queue"
    assert progress.outcome(500) is None
    assert progress.outcome(510).message.startswith("was not running after 100 s (suspended")
    progress.set_job_state(RUNNING, deleting=False, now=505)
    progress.add_line("worker-0", "step 2", 1100)
    assert progress.next_limit_s(1100) == pytest.approx(5)  # 600 s of running are left from 505 on
    ending = progress.outcome(1105)
    assert ending.message.startswith("ran for 16.7 min, the longest that its pool allows")
    assert "running_minutes" in ending.message


def test_replaced_replicas(progress):
    start(progress, 10)
    progress.remove_replica(replica(1, placed=True), 20)
    assert progress.take_messages()[-1] == "waiting for its machines (1 of 2 replicas)"
    progress.update_replica(replica(1, uid="new", placed=True), 30)
    assert progress.take_messages()[-1] == "running (2 of 2 replicas)"


def test_the_end_of_an_old_pod_changes_nothing(progress):
    start(progress, 10)
    progress.update_replica(replica(1, uid="new", placed=True), 20)
    progress.take_messages()
    progress.remove_replica(replica(1, placed=True), 21)
    assert progress.take_messages() == []


def test_pods_that_are_made_again_of_a_failed_job_do_not_hide_why_it_failed(progress):
    """The training operator 1.9.3 did so: it deleted both pods, created them once more in the same second, and reported the failure."""
    start(progress, 10)
    end = Termination(
        replica="worker-1", exit_code=EXIT_CODE, reason="Error", message="lower it", finished="2026-11-30T08:51:48Z"
    )
    progress.update_replica(replica(1, placed=True, over=True, ended=end), 20)
    for number in range(2):
        progress.update_replica(replica(number, uid=f"again-{number}", waiting="ContainerCreating"), 21)
    progress.set_job_state(JobState(phase="failed", message="the backoff limit"), deleting=False, now=22)
    assert fails_again(progress)
    assert explain_failure("job", "describe", progress) == "job job failed: worker-1 ended with exit code 2: lower it"


def test_what_a_restarted_job_failed_of_before_is_forgotten(progress):
    start(progress, 10)
    end = Termination(
        replica="worker-1", exit_code=EXIT_CODE, reason="Error", message="lower it", finished="2026-11-30T08:51:48Z"
    )
    progress.update_replica(replica(1, placed=True, over=True, ended=end), 20)
    progress.update_replica(replica(1, uid="again", placed=True, running=True), 30)
    progress.set_job_state(JobState(phase="failed", message="its store is gone"), deleting=False, now=40)
    assert not fails_again(progress)
    assert "its store is gone" in explain_failure("job", "describe", progress)


def test_a_failed_pod_that_stays_does_not_take_the_place_of_its_successor(progress):
    """Those of an Indexed Job do; times are in whole seconds."""
    start(progress, 10)
    for created, uid in (("2026-11-29T16:00:00Z", "same second"), ("2026-11-29T16:00:01Z", "later")):
        progress.update_replica(replica(1, uid=uid, placed=True, created=created), 20)
        failed = replica(1, uid="old", placed=True, over=True, created="2026-11-29T16:00:00Z")
        progress.update_replica(failed, 21)
        assert progress.replicas["worker-1"].uid == uid
    progress.update_replica(replica(1, uid="newest", created="2026-11-29T16:00:01Z"), 22)
    assert progress.replicas["worker-1"].uid == "newest"


def test_silence_has_a_limit(progress):
    start(progress, 10)
    assert progress.outcome(59) is None
    progress.add_line("worker-1", "step 7", 59)
    assert progress.outcome(108) is None
    ending = progress.outcome(109)
    assert ending.message.startswith("wrote no line for 50 s, so it seems to hang (the last was worker-1's: step 7)")
    assert "silent_minutes" in ending.message


def test_a_log_that_cannot_be_read_is_no_silence(progress):
    start(progress, 10)
    progress.set_log_state(30, readable=False)
    assert progress.outcome(500) is None
    progress.set_log_state(500, readable=True)
    assert progress.outcome(549) is None
    assert progress.outcome(550).message.startswith("wrote no line for 50 s")


def test_what_was_refused_is_not_started_again_and_again(progress):
    """By a runtime of TrainJobs whose pods are restarted in place."""
    start(progress, 10)
    end = Termination(
        replica="worker-1", exit_code=1, reason="Error", message="crashed", finished="2026-11-30T08:51:48Z"
    )
    progress.update_replica(replica(1, placed=True, running=True, restarts=1, ended=end), 20)
    assert progress.outcome(21) is None
    refused = replace(end, exit_code=EXIT_CODE, message="lower it")
    progress.update_replica(replica(1, placed=True, running=True, restarts=2, ended=refused), 22)
    ending = progress.outcome(23)
    assert (ending.kind, ending.retryable) == ("limit", False)
    assert (
        ending.message == "would fail again, but its pods are started again: worker-1 ended with exit code 2: lower it"
    )


def test_line_that_was_read_late_ends_silence_at_its_own_time(progress):
    start(progress, 10)
    progress.add_line("worker-1", "step 7", 59, age_s=20, new=False)
    assert progress.outcome(88) is None
    assert "(the last was worker-1's: step 7)" in progress.outcome(89).message
    progress.add_line("worker-0", "from a node whose clock is slow", 88, age_s=1000)
    assert progress.outcome(137) is None


def test_unreadable_logs_and_pods(progress):
    progress.logs_readable = False
    start(progress, 10)
    assert progress.outcome(900) is None


def test_without_view_of_pods_jobs_state_decides(progress):
    progress.pods_readable = False
    progress.set_job_state(RUNNING, deleting=False, now=1)
    assert progress.take_messages() == ["running"]
    assert progress.outcome(100).message.startswith("wrote no line")


def test_image_that_cannot_be_pulled_ends_wait_early(progress, monkeypatch):
    monkeypatch.setattr("components.launch.job_progress.STUCK_S", 20)
    stuck = replica(0, waiting="ImagePullBackOff", waiting_message='Back-off pulling image "trainer:typo"')
    progress.update_replica(stuck, 5)
    progress.update_replica(replace(stuck, waiting="ErrImagePull"), 10)
    assert progress.outcome(24) is None
    ending = progress.outcome(25)
    assert ending.message.startswith("could not start for 20 s; last problem: worker-0: ErrImagePull")
    progress.update_replica(replica(0, placed=True), 26)
    assert progress.outcome(30) is None


def test_problems_are_resolved(progress):
    # A job that failed 280 s later was explained by it.
    progress.set_job_state(PENDING, deleting=False, now=1)
    progress.add_event("the job", event("Unschedulable", "0/1 nodes are available"))
    progress.add_event("worker-0", event("FailedScheduling", "0/1 nodes are available"))
    assert progress.problem == "worker-0: FailedScheduling: 0/1 nodes are available"
    start(progress, 2)
    assert progress.problem == ""
    progress.add_event("the job", event("Unschedulable", "0/1 nodes are available", uid="late"))
    assert progress.problem == "", "delivered late, or again after a break"
    progress.add_event("worker-0", event("Evicted", "out of disk", uid="now"))
    assert progress.problem == "worker-0: Evicted: out of disk"


def test_replicas_problem_is_resolved_when_it_runs_while_others_wait(progress):
    progress.set_job_state(RUNNING, deleting=False, now=1)
    progress.add_event("worker-0", event("FailedScheduling", "0/1 nodes are available"))
    progress.update_replica(replica(1, placed=True, running=True), 2)
    assert progress.problem
    progress.update_replica(replica(0, placed=True, running=True), 3)
    assert progress.problem == ""


def test_replica_that_is_deleted_before_it_ran_is_named(progress):
    progress.set_job_state(RUNNING, deleting=False, now=1)
    progress.update_replica(replica(0, waiting="PodInitializing"), 2)
    progress.remove_replica(replica(0, waiting="PodInitializing"), 3)
    assert progress.lost == {"worker-0": "was deleted before it had started"}
    assert progress.take_messages()[-1] == "worker-0 was deleted before it had started"
    progress.update_replica(replace(replica(0, placed=True, running=True), uid="another"), 4)
    assert progress.lost == {}


def test_deleted_pod_whose_init_container_was_killed_did_not_start(progress):
    """Its phase is Failed, and its own container still waits: so it was seen on a cluster."""
    progress.set_job_state(RUNNING, deleting=False, now=1)
    progress.update_replica(replica(0, placed=True, over=True, deleting=True), 2)
    assert progress.lost == {"worker-0": "was deleted before it had started"}
    progress.set_job_state(JobState(phase="failed"), deleting=False, now=3)
    progress.update_replica(replica(1, placed=True, over=True, deleting=True), 4)  # cleaned up
    assert list(progress.lost) == ["worker-0"]
    assert progress.take_messages()[-1] == "failed"


def test_what_operator_removes_after_end_is_not_reported(progress):
    start(progress, 1)
    progress.set_job_state(JobState(phase="succeeded"), deleting=False, now=2)
    progress.take_messages()
    progress.remove_replica(replica(0, placed=True), 3)
    assert (progress.lost, progress.take_messages()) == ({}, [])


def test_problem_is_reported_once_and_its_repetitions_are_counted(progress):
    for count in range(1, 31):
        progress.add_event("worker-0", event("FailedScheduling", "no nodes", count=count))
    assert progress.take_messages() == [
        "worker-0: FailedScheduling: no nodes",
        "worker-0: FailedScheduling: no nodes (10 times so far)",
    ]
    progress.add_event("worker-1", event("FailedScheduling", "no nodes"))
    assert progress.take_messages() == ["worker-1: FailedScheduling: no nodes"]


def test_normal_events_are_not_reported_but_preemption_is(progress):
    progress.add_event("worker-0", event("Scheduled", type_="Normal"))
    assert progress.take_messages() == []
    progress.add_event("worker-0", event("Preempted", "by another", type_="Normal", uid="f"))
    assert progress.take_messages() == ["worker-0: Preempted: by another"]
    assert len(progress.events) == 2


def test_the_end_of_a_container_is_reported_once(progress):
    end = Termination(
        replica="worker-0", exit_code=137, reason="OOMKilled", message="", finished="2026-01-01T00:00:00Z"
    )
    for _ in range(2):
        progress.update_replica(replica(0, placed=True, ended=end), 5)
    ended = [line for line in progress.take_messages() if "ended" in line]
    assert ended == ["worker-0 ended with exit code 137 (OOMKilled)"]


# The status of pods, as the API shows it

FINISHED = "2026-01-01T00:00:00Z"


def pod(phase="Running", *, state=None, last=None, restarts=0, **status):
    container = {"name": "pytorch", "state": state or {}, "lastState": last or {}, "restartCount": restarts}
    sidecar = {"name": "istio-proxy", "state": {"running": {}}, "restartCount": 7}
    containers = [sidecar, container] if state is not None else []
    return {
        "metadata": {"name": "job-worker-0", "uid": "u"},
        "status": {"phase": phase, "containerStatuses": containers, **status},
    }


def status_of(*arguments, **fields):
    return read_replica(pod(*arguments, **fields), "worker-0", "pytorch")


def ended(code, reason="Error", message=""):
    return {"terminated": {"exitCode": code, "reason": reason, "message": message, "finishedAt": FINISHED}}


def test_read_status_of_a_container():
    waiting = status_of("Pending")
    assert (waiting.placed, waiting.over, waiting.ended, waiting.waiting) == (False, False, None, "")
    # An init container that waits is the reason.
    init = [{"name": "init-pytorch", "state": {"waiting": {"reason": "ErrImagePull"}}}]
    waiting = status_of("Pending", state={"waiting": {"reason": "PodInitializing"}}, initContainerStatuses=init)
    assert waiting.waiting == "ErrImagePull"
    # The end of a container.
    over = status_of("Failed", state=ended(3, message=" no images \n"), restarts=1)
    assert over.over
    assert over.restarts == 1
    assert over.ended == Termination(
        replica="worker-0", exit_code=3, reason="Error", message="no images", finished=FINISHED
    )
    # A container that was started again keeps its last end.
    again = status_of(state={"running": {}}, last=ended(137, "OOMKilled"), restarts=1)
    assert again.running
    assert str(again.ended) == "ended with exit code 137 (OOMKilled)"
    # A container that waits for its next start is placed.
    backing_off = status_of(state={"waiting": {"reason": "CrashLoopBackOff"}}, last=ended(1), restarts=2)
    assert backing_off.placed
    assert not backing_off.stuck


@pytest.mark.parametrize(
    ("reason", "stuck"),
    [("ContainerCreating", False), ("ImagePullBackOff", True), ("CreateContainerConfigError", True)],
)
def test_why_a_container_waits(reason, stuck):
    waiting = status_of("Pending", state={"waiting": {"reason": reason, "message": "because"}})
    assert (waiting.waiting, waiting.waiting_message, waiting.stuck, waiting.placed) == (
        reason,
        "because",
        stuck,
        False,
    )


def test_read_status_of_a_lost_pod():
    evicted = status_of("Failed", reason="Evicted", message="The node was low on resource: memory.")
    assert evicted.over
    assert str(evicted.ended) == "ended (Evicted)"
    assert evicted.ended.message == "The node was low on resource: memory."
    # A preempted pod says who took its place.
    condition = {
        "type": "DisruptionTarget",
        "status": "True",
        "reason": "PreemptionByScheduler",
        "message": "default-scheduler: preempting to accommodate a higher priority pod",
        "lastTransitionTime": FINISHED,
    }
    preempted = status_of(state=ended(143), conditions=[{"type": "Ready", "status": "False"}, condition])
    assert str(preempted.ended) == "ended with exit code 143 (PreemptionByScheduler)"
    assert preempted.ended.finished == FINISHED


def end(replica="worker-0", exit_code=1, reason="Error", message="", second=10):
    return Termination(
        replica=replica, exit_code=exit_code, reason=reason, message=message, finished=f"2026-01-01T00:00:{second:02}Z"
    )


@pytest.fixture
def explain():
    """The message for replicas that ended so."""

    def explain(*ends, lines=()):
        progress = JobProgress(nodes=1, limits=JobLimits(queued_s=1, running_s=1, silent_s=1), now=0)
        progress.state = JobState(phase="failed", reason="PyTorchJobFailed", message="1 replica failed.")
        for one in ends:
            progress.replicas[one.replica] = Replica(
                name=one.replica, pod="p", uid="u", placed=True, over=True, ended=one
            )
            progress.log_tails[one.replica] = deque(lines)
        return explain_failure("job-1", "kubectl describe", progress)

    return explain


def test_a_replica_that_went_away_is_named():
    progress = JobProgress(nodes=2, limits=JobLimits(queued_s=1, running_s=1, silent_s=1), now=0)
    for name, waiting in (("worker-0", "PodInitializing"), ("worker-1", "ContainerCreating")):
        progress.update_replica(Replica(name=name, pod=name, uid=name, placed=False, waiting=waiting), 0)
    progress.remove_replica(progress.replicas["worker-0"], 1)
    progress.set_job_state(
        JobState(phase="failed", reason="PyTorchJobFailed", message="Job has reached the limit."), deleting=False, now=2
    )
    assert explain_failure("job-1", "kubectl describe", progress) == (
        "job job-1 failed (PyTorchJobFailed): Job has reached the limit; worker-0 was deleted before it had started; "
        "worker-1 had not started (ContainerCreating); see `kubectl describe`"
    )


def test_first_failure():
    early, late = end("worker-1", second=10), end("master-0", second=12)
    assert first_failure([late, early], {}) == early
    # Within a second the cause is the replica that fell silent first.
    ends = [end("master-0"), end("worker-1")]
    assert first_failure(ends, {"master-0": 5.2, "worker-1": 5.1}).replica == "worker-1"


@pytest.mark.parametrize("exit_code", [130, 137, 143])
def test_a_replica_killed_for_another_is_no_cause(exit_code):
    killed, culprit = end("master-0", exit_code, second=9), end("worker-0", 2, second=10)
    assert first_failure([killed, culprit], {}) == culprit


@pytest.mark.parametrize("exit_code", [1, 2, 137])
def test_replica_that_missed_another_one_is_not_cause(exit_code):
    missed_it = end("master-0", 1, message=f"distill: Broken pipe; {MISSED_ANOTHER}", second=9)
    asked, culprit = end("worker-1", 143, second=8), end("worker-0", exit_code, second=10)
    assert first_failure([asked, missed_it, culprit], {}) == culprit
    assert first_failure([asked, missed_it], {}) == missed_it


@pytest.mark.parametrize(
    ("exit_code", "reason"), [(137, "OOMKilled"), (None, "Evicted"), (143, "PreemptionByScheduler")]
)
def test_what_kubernetes_ended_is_cause_even_if_others_ended_sooner(exit_code, reason):
    taken, missed_it = end("worker-1", exit_code, reason, second=12), end("master-0", 1, second=10)
    assert first_failure([missed_it, taken], {}) == taken


def test_explanations(explain):
    message = "distill: node 1 of 2: data.source: no images; give another"
    explained = explain(end(exit_code=2, message=message), lines=["step 1"])
    assert explained == f"job job-1 failed (PyTorchJobFailed): worker-0 ended with exit code 2: {message}"
    # Else its last lines are.
    explained = explain(end(exit_code=1), lines=[f"line {number}" for number in range(10)])
    assert explained.splitlines() == [
        "job job-1 failed (PyTorchJobFailed): worker-0 ended with exit code 1; its log above has the traceback; its last lines:",
        *(f"    worker-0 | line {number}" for number in range(5, 10)),
    ]
    # Without a failed replica the operators message is the explanation.
    explained = explain()
    assert explained == "job job-1 failed (PyTorchJobFailed): 1 replica failed; see `kubectl describe`"


@pytest.mark.parametrize(
    ("exit_code", "reason", "advice"),
    [
        (137, "OOMKilled", "it ran out of memory: lower batch_size"),
        (None, "Evicted", "its node ran short of something"),
        (143, "PreemptionByScheduler", "its machine was taken away: run again, which resumes from the last checkpoint"),
        (None, "NodeLost", "its machine was taken away"),
        (128, "StartError", "the image does not fit"),
        (137, "Error", "it was killed from outside"),
        (139, "Error", "it crashed below Python"),
    ],
)
def test_every_cause_has_a_next_move(explain, exit_code, reason, advice):
    assert advice in explain(end(exit_code=exit_code, reason=reason))


def test_container_that_runs_again_is_not_cause():
    progress = JobProgress(nodes=1, limits=JobLimits(queued_s=1, running_s=1, silent_s=1), now=0)
    progress.state = JobState(phase="failed")
    again = Replica(
        name="worker-0", pod="p", uid="u", placed=True, running=True, ended=end("worker-0", 137, "OOMKilled")
    )
    progress.replicas = {
        "worker-0": again,
        "worker-1": replace(again, name="worker-1", running=False, ended=end("worker-1", 2)),
    }
    assert "worker-1 ended with exit code 2" in explain_failure("job-1", "kubectl describe", progress)
    del progress.replicas["worker-1"]
    assert "worker-0 ended with exit code 137 (OOMKilled)" in explain_failure("job-1", "kubectl describe", progress)
