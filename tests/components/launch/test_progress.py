"""What follows from what was seen of a job, with a clock that the test turns."""

from __future__ import annotations

from dataclasses import replace

import pytest

from components.launch.progress import JobProgress, Limits
from components.launch.replicas import Replica, Termination
from components.launch.state import JobState

LIMITS = Limits(queued_s=100, running_s=1000, silent_s=50)
PENDING, SUSPENDED, RUNNING = JobState(phase="pending"), JobState(phase="suspended"), JobState(phase="running")


@pytest.fixture
def progress():
    return JobProgress(nodes=2, limits=LIMITS, now=0)


def replica(number, **changes):
    return replace(
        Replica(name=f"worker-{number}", pod=f"job-worker-{number}", uid=f"uid-{number}", placed=False), **changes
    )


def start(progress, now):
    progress.see_job(RUNNING, deleting=False, now=now)
    for number in range(2):
        progress.see_replica(replica(number, placed=True, running=True), now)


def event(reason, message="", *, type_="Warning", uid="e", **fields):
    return {"metadata": {"uid": uid}, "type": type_, "reason": reason, "message": message, **fields}


def test_a_job_counts_as_running_when_all_replicas_run(progress):
    progress.see_job(RUNNING, deleting=False, now=1)
    progress.see_replica(replica(0, placed=True), 2)
    assert progress.news() == [
        "waiting for its machines (0 of 2 replicas)",
        "waiting for its machines (1 of 2 replicas)",
    ]
    progress.see_replica(replica(1, placed=True), 3)
    assert progress.news() == ["running (2 of 2 replicas)"]
    assert progress.news() == []


def test_an_elastic_job_runs_with_fewer(progress):
    elastic = JobProgress(nodes=1, limits=LIMITS, now=0)
    elastic.see_job(RUNNING, deleting=False, now=1)
    elastic.see_replica(replica(1, placed=True), 2)
    assert elastic.news()[-1] == "running (1 of 1 replicas)"


@pytest.mark.parametrize(("phase", "kind"), [("succeeded", "succeeded"), ("failed", "failed")])
def test_the_jobs_own_state_ends_it(progress, phase, kind):
    assert progress.ending(0) is None
    progress.see_job(JobState(phase=phase), deleting=True, now=1)
    ending = progress.ending(1)
    assert ending
    assert ending.kind == kind


def test_a_job_that_is_being_deleted_or_gone_is_over(progress):
    progress.see_job(RUNNING, deleting=True, now=1)
    assert progress.ending(1).kind == "deleted"
    gone = JobProgress(nodes=1, limits=LIMITS, now=0)
    gone.see_job_gone()
    assert gone.ending(1).kind == "deleted"


def test_waiting_has_its_limit_and_names_the_last_trouble(progress):
    progress.see_job(PENDING, deleting=False, now=1)
    progress.see_event("worker-0", event("FailedScheduling", "0/3 nodes are available"))
    assert progress.next_limit_s(40) == 60
    assert progress.ending(99.9) is None
    ending = progress.ending(100)
    assert ending.kind == "overdue"
    assert ending.message.startswith("was not running after 100 s (waiting for its machines (0 of 2 replicas))")
    assert "last trouble: worker-0: FailedScheduling: 0/3 nodes are available" in ending.message
    assert "queued_minutes" in ending.message


def test_time_in_the_queue_does_not_count_as_running(progress):
    start(progress, 10)
    progress.see_line("worker-0", "step 1", 400)
    progress.see_job(SUSPENDED, deleting=False, now=410)  # 400 s have run
    assert progress.news()[-1] == "suspended, waiting in its queue"
    assert progress.ending(500) is None
    assert progress.ending(510).message.startswith("was not running after 100 s (suspended")
    progress.see_job(RUNNING, deleting=False, now=505)
    progress.see_line("worker-0", "step 2", 1100)
    assert progress.next_limit_s(1100) == pytest.approx(5)  # 600 s of running are left from 505 on
    ending = progress.ending(1105)
    assert ending.message.startswith("ran for 16.7 min, the longest that its pool allows")
    assert "running_minutes" in ending.message


def test_a_replica_that_is_replaced_makes_the_job_wait_again(progress):
    start(progress, 10)
    progress.see_replica_gone(replica(1, placed=True), 20)
    assert progress.news()[-1] == "waiting for its machines (1 of 2 replicas)"
    progress.see_replica(replica(1, uid="new", placed=True), 30)
    assert progress.news()[-1] == "running (2 of 2 replicas)"


def test_the_end_of_an_old_pod_says_nothing_of_the_new_one(progress):
    start(progress, 10)
    progress.see_replica(replica(1, uid="new", placed=True), 20)
    progress.news()
    progress.see_replica_gone(replica(1, placed=True), 21)
    assert progress.news() == []


def test_silence_has_its_limit_and_any_line_is_a_sign_of_life(progress):
    start(progress, 10)
    assert progress.ending(59) is None
    progress.see_line("worker-1", "step 7", 59)
    assert progress.ending(108) is None
    ending = progress.ending(109)
    assert ending.message.startswith("wrote no line for 50 s, so it seems to hang (the last was worker-1's: step 7)")
    assert "silent_minutes" in ending.message


def test_silence_means_nothing_where_logs_can_not_be_read(progress):
    progress.see_no_logs()
    start(progress, 10)
    assert progress.ending(900) is None


def test_without_a_view_of_pods_the_jobs_state_has_to_do(progress):
    progress.see_no_replicas()
    progress.see_job(RUNNING, deleting=False, now=1)
    assert progress.news() == ["running"]
    assert progress.ending(100).message.startswith("wrote no line")


def test_an_image_that_can_not_be_had_ends_the_waiting_early(progress, monkeypatch):
    monkeypatch.setattr("components.launch.progress.STUCK_S", 20)
    stuck = replica(0, waiting="ImagePullBackOff", waiting_message='Back-off pulling image "trainer:typo"')
    progress.see_replica(stuck, 5)
    progress.see_replica(replace(stuck, waiting="ErrImagePull"), 10)
    assert progress.ending(24) is None
    ending = progress.ending(25)
    assert ending.message.startswith("could not start for 20 s; last trouble: worker-0: ErrImagePull")
    progress.see_replica(replica(0, placed=True), 26)
    assert progress.ending(30) is None


def test_trouble_that_is_over_is_forgotten(progress):
    """A job that failed 280 s later was explained by it."""
    progress.see_job(PENDING, deleting=False, now=1)
    progress.see_event("the job", event("Unschedulable", "0/1 nodes are available"))
    progress.see_event("worker-0", event("FailedScheduling", "0/1 nodes are available"))
    assert progress.trouble == "worker-0: FailedScheduling: 0/1 nodes are available"
    start(progress, 2)
    assert progress.trouble == ""
    progress.see_event("the job", event("Unschedulable", "0/1 nodes are available", uid="late"))
    assert progress.trouble == "", "told late, or again after a break"
    progress.see_event("worker-0", event("Evicted", "out of disk", uid="now"))
    assert progress.trouble == "worker-0: Evicted: out of disk"


def test_trouble_of_one_replica_is_over_when_it_runs_while_others_wait(progress):
    progress.see_job(RUNNING, deleting=False, now=1)
    progress.see_event("worker-0", event("FailedScheduling", "0/1 nodes are available"))
    progress.see_replica(replica(1, placed=True, running=True), 2)
    assert progress.trouble
    progress.see_replica(replica(0, placed=True, running=True), 3)
    assert progress.trouble == ""


def test_a_replica_that_is_deleted_before_it_ran_is_named(progress):
    progress.see_job(RUNNING, deleting=False, now=1)
    progress.see_replica(replica(0, waiting="PodInitializing"), 2)
    progress.see_replica_gone(replica(0, waiting="PodInitializing"), 3)
    assert progress.lost == {"worker-0": "was deleted before it had started"}
    assert progress.news()[-1] == "worker-0 was deleted before it had started"
    progress.see_replica(replace(replica(0, placed=True, running=True), uid="another"), 4)
    assert progress.lost == {}


def test_a_deleted_pod_whose_init_container_was_killed_did_not_start(progress):
    """Its phase is Failed, and its own container still waits: so it was seen on a cluster."""
    progress.see_job(RUNNING, deleting=False, now=1)
    progress.see_replica(replica(0, placed=True, over=True, deleting=True), 2)
    assert progress.lost == {"worker-0": "was deleted before it had started"}
    progress.see_job(JobState(phase="failed"), deleting=False, now=3)
    progress.see_replica(replica(1, placed=True, over=True, deleting=True), 4)  # cleaned up
    assert list(progress.lost) == ["worker-0"]
    assert progress.news()[-1] == "failed"


def test_what_the_operator_removes_after_the_end_is_no_news(progress):
    start(progress, 1)
    progress.see_job(JobState(phase="succeeded"), deleting=False, now=2)
    progress.news()
    progress.see_replica_gone(replica(0, placed=True), 3)
    assert (progress.lost, progress.news()) == ({}, [])


def test_trouble_is_told_once_and_its_repetitions_are_counted(progress):
    for count in range(1, 31):
        progress.see_event("worker-0", event("FailedScheduling", "no nodes", count=count))
    assert progress.news() == [
        "worker-0: FailedScheduling: no nodes",
        "worker-0: FailedScheduling: no nodes (10 times by now)",
    ]
    progress.see_event("worker-1", event("FailedScheduling", "no nodes"))
    assert progress.news() == ["worker-1: FailedScheduling: no nodes"]


def test_a_count_that_jumps_is_not_overlooked(progress):
    progress.see_event("worker-0", event("FailedMount", "no volume"))
    progress.see_event("worker-0", event("FailedMount", "no volume", series={"count": 57}))
    assert progress.news()[-1] == "worker-0: FailedMount: no volume (57 times by now)"


def test_what_is_normal_is_not_told_but_preemption_is(progress):
    progress.see_event("worker-0", event("Scheduled", type_="Normal"))
    assert progress.news() == []
    progress.see_event("worker-0", event("Preempted", "by another", type_="Normal", uid="f"))
    assert progress.news() == ["worker-0: Preempted: by another"]
    assert len(progress.events) == 2


def test_the_end_of_a_container_is_told_once(progress):
    end = Termination(
        replica="worker-0", exit_code=137, reason="OOMKilled", message="", finished="2026-01-01T00:00:00Z"
    )
    for _ in range(2):
        progress.see_replica(replica(0, placed=True, ended=end), 5)
    told = [line for line in progress.news() if "ended" in line]
    assert told == ["worker-0 ended with exit code 137 (OOMKilled)"]
