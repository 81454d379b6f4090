"""Which replica caused a failed job."""

from __future__ import annotations

from collections import deque
from dataclasses import replace

import pytest

from components.launch.backends import JobState
from components.launch.diagnosis import explain_failure, first_failure
from components.launch.job_progress import JobLimits, JobProgress, Replica, Termination
from trainer.launch import MISSED_ANOTHER


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


def test_without_an_end_of_its_own_the_replica_that_went_away_is_named():
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


def test_the_earliest_failure_is_the_cause():
    early, late = end("worker-1", second=10), end("master-0", second=12)
    assert first_failure([late, early], {}) == early


def test_within_a_second_the_cause_is_the_replica_that_fell_silent_first():
    ends = [end("master-0"), end("worker-1")]
    assert first_failure(ends, {"master-0": 5.2, "worker-1": 5.1}).replica == "worker-1"


@pytest.mark.parametrize("exit_code", [130, 137, 143])
def test_a_replica_that_was_killed_because_another_failed_is_not_the_cause(exit_code):
    killed, culprit = end("master-0", exit_code, second=9), end("worker-0", 2, second=10)
    assert first_failure([killed, culprit], {}) == culprit


@pytest.mark.parametrize("exit_code", [1, 2, 137])
def test_a_replica_that_missed_another_one_is_not_the_cause(exit_code):
    missed_it = end("master-0", 1, message=f"distill: Broken pipe; {MISSED_ANOTHER}", second=9)
    asked, culprit = end("worker-1", 143, second=8), end("worker-0", exit_code, second=10)
    assert first_failure([asked, missed_it, culprit], {}) == culprit
    assert first_failure([asked, missed_it], {}) == missed_it


@pytest.mark.parametrize(
    ("exit_code", "reason"), [(137, "OOMKilled"), (None, "Evicted"), (143, "PreemptionByScheduler")]
)
def test_what_kubernetes_ended_is_the_cause_even_if_others_ended_sooner(exit_code, reason):
    taken, missed_it = end("worker-1", exit_code, reason, second=12), end("master-0", 1, second=10)
    assert first_failure([missed_it, taken], {}) == taken


def test_success_is_no_failure():
    assert first_failure([end(exit_code=0, reason="Completed")], {}) is None


def test_its_own_message_is_the_explanation(explain):
    message = "distill: node 1 of 2: data.source: no images; give another"
    explained = explain(end(exit_code=2, message=message), lines=["step 1"])
    assert explained == f"job job-1 failed (PyTorchJobFailed): worker-0 ended with exit code 2: {message}"


def test_else_its_last_lines_are(explain):
    explained = explain(end(exit_code=1), lines=[f"line {number}" for number in range(10)])
    assert explained.splitlines() == [
        "job job-1 failed (PyTorchJobFailed): worker-0 ended with exit code 1; its log above has the traceback; its last lines:",
        *(f"    worker-0 | line {number}" for number in range(5, 10)),
    ]


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


def test_without_a_failed_replica_the_operators_message_is_the_explanation(explain):
    explained = explain()
    assert explained == "job job-1 failed (PyTorchJobFailed): 1 replica failed; see `kubectl describe`"


def test_a_container_that_runs_again_is_not_the_cause():
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
