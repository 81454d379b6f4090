"""Which of a namespace's events are the job's."""

from __future__ import annotations

import threading
import time

import pytest

from components.launch.client import ApiRetry
from components.launch.job import TaskJob
from components.launch.job_manifest import BACKENDS
from components.launch.job_progress import JobLimits, JobProgress
from components.launch.launcher import JobFollower
from tests.stand_ins.kubernetes.resources import EVENTS, PYTORCHJOBS

pytestmark = pytest.mark.usefixtures("threads_end")


@pytest.fixture
def kubernetes(still_kubernetes):
    return still_kubernetes


@pytest.fixture
def job(cluster, pool, identity, spec):
    job = TaskJob(cluster, BACKENDS["pytorchjob"], spec, pool, identity)
    job.submit(ApiRetry(5))
    return job


@pytest.fixture
def report(kubernetes):

    def report(message, **about):
        metadata = {"generateName": "event-"}
        event = {
            "metadata": metadata,
            "involvedObject": about,
            "reason": "Trouble",
            "message": message,
            "type": "Warning",
        }
        kubernetes.add(EVENTS, event)

    return report


def test_only_events_of_the_job_are_reported(kubernetes, cluster, job, report):
    report("ours", kind="PyTorchJob", name=job.name, uid=job.uid)
    report("an earlier one's", kind="PyTorchJob", name=job.name, uid="earlier")
    report("our worker's", kind="Pod", name=f"{job.name}-worker-0", uid="w")
    report("our job set's", kind="JobSet", name=job.name, uid="j")
    report("somebody's", kind="Pod", name="other-worker-0", uid="o")
    report("a like-named one's", kind="Pod", name=f"{job.name}0-worker-0", uid="l")
    messages = []

    def end():
        deadline = time.monotonic() + 60
        while len(messages) < 4 and time.monotonic() < deadline:
            time.sleep(0.02)
        with kubernetes.store.changing(PYTORCHJOBS, "kubeflow", job.name) as found:
            found["status"] = {"conditions": [{"type": "Succeeded", "status": "True"}]}

    thread = threading.Thread(target=end)
    thread.start()
    progress = JobProgress(nodes=1, limits=JobLimits(queued_s=10, running_s=10, silent_s=10), now=time.monotonic())
    with JobFollower(cluster, job, progress, ApiRetry(5), record="", report=messages.append) as follower:
        assert follower.follow().kind == "succeeded"
    thread.join()
    assert sorted(line for line in messages if "Trouble" in line) == [
        "JobSet: Trouble: our job set's",
        "the job: Trouble: ours",
        "worker-0: Trouble: our worker's",
    ]
