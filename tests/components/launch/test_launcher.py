"""Jobs from submission to their end, on a stand-in for Kubernetes, with its real client."""

from __future__ import annotations

import _thread
import json
import os
import re
import signal
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest

from components.launch import launcher, pools
from components.launch.client import ApiUnavailableError
from components.launch.job_manifest import Owner
from components.launch.launcher import ClusterLauncher
from tests.stand_ins.kubernetes.resources import JOBS, PODS, PYTORCHJOBS, TRAINJOBS
from tests.stand_ins.kubernetes.stand_in import Script
from trainer.graph import JobSpec
from trainer.io.costs import Price
from trainer.io.errors import CRASHED_NODE_EXIT_CODE, EXIT_CODE, MISSED_ANOTHER, PREEMPTED_EXIT_CODE, LaunchError

pytestmark = pytest.mark.usefixtures("threads_end")

QUICK = Script(output=["step 1", "step 2"])
HANGING = Script(output=["step 1"], hang=True)


@pytest.fixture
def minutes_of_half_a_second(monkeypatch):
    monkeypatch.setattr("components.launch.launcher.MINUTE_S", 0.5)


@pytest.fixture
def run(kubernetes, pool, identity, spec, logged):
    """Run a job; changes of the pool by keyword."""

    def run(*, owner=None, record="", attempts=1, api_timeout_s=60.0, stop=None, **changes):
        changed, owned = pool.model_copy(update=changes), replace(identity, owner=owner)
        further = {"record": record, "attempts": attempts, "api_timeout_s": api_timeout_s, "stop": stop}
        ClusterLauncher(changed, owned, **further).run(spec)

    return run


@pytest.fixture
def fails(run):

    def fails(kind=LaunchError, **changes):
        with pytest.raises(kind) as failed:
            run(**changes)
        return str(failed.value)

    return fails


@pytest.fixture
def meanwhile(logged):
    """Do something, in a thread, as soon as a text has been logged or a condition holds."""
    threads = []

    def start(when, action):
        def wait():
            deadline = time.monotonic() + 60  # then it is done all the same, so that whoever waits for it does not hang
            while not (any(when in line for line in logged()) if isinstance(when, str) else when()):
                if time.monotonic() > deadline:
                    break
                time.sleep(0.02)
            action()

        threads.append(threading.Thread(target=wait))
        threads[-1].start()

    yield start
    for thread in threads:
        thread.join()


def jobs(kubernetes):
    return kubernetes.list(PYTORCHJOBS)


def interrupt(number=signal.SIGINT):
    os.kill(os.getpid(), number)


# Success


def test_job_runs_to_its_end_and_all_replicas_are_heard(kubernetes, run, logged):
    kubernetes.script("*-master-0", Script(output=["step 1", 0.7, "step 2"]))
    kubernetes.script("*-worker-0", QUICK)
    start = time.monotonic()
    run()
    assert time.monotonic() - start < 30
    lines = logged()
    for replica in ("master-0", "worker-0"):
        assert [line for line in lines if line.startswith(replica)] == [f"{replica} | step 1", f"{replica} | step 2"]
    name = jobs(kubernetes)[0]["metadata"]["name"]
    steps = [line.partition(f" s] job {name}: ")[2] for line in lines if line.startswith("[")]
    assert steps[0] == "created for 2 nodes of pool cpu"
    assert "running (2 of 2 replicas)" in steps
    assert steps[-1] == "succeeded"


def test_workers_that_still_run_after_masters_end_delay_nothing(kubernetes, run):
    kubernetes.script("*-master-0", QUICK)
    kubernetes.script("*-worker-0", HANGING)
    start = time.monotonic()
    run()
    assert time.monotonic() - start < 30


def test_a_trainjob_is_followed_too(kubernetes, identity, spec, logged):
    kubernetes.script("*", QUICK)
    pool = pools.get("cpu").model_copy(update={"backend": "trainjob", "retries": 0})
    ClusterLauncher(pool, identity).run(spec)
    assert len(kubernetes.list(TRAINJOBS)) == 1
    assert {"node-0 | step 1", "node-1 | step 2"} <= set(logged())


# Stages whose work is shared


@pytest.fixture
def shares(kubernetes, pool, identity):
    """Run a preparation on several nodes of a pool, which the scripts of its pods play."""

    def run(nodes=3, **changes):
        spec = JobSpec(stage="prepare", settings={}, inputs={}, outputs={"dataset": "s3://bucket/dataset"}, nodes=nodes)
        given = {"attempts": 1, **changes}
        ClusterLauncher(pool, replace(identity, task="prepare"), **given).run(spec)

    return run


def test_the_first_share_ends_the_job(kubernetes, shares, logged):
    kubernetes.script("*-0-*", Script(output=["decoding", 0.5, "written"]))
    kubernetes.script("*-1-*", Script(output=["helping"]))
    kubernetes.script("*-2-*", HANGING)
    shares()
    (job,) = kubernetes.list(JOBS)
    assert kubernetes.conditions(job["metadata"]["name"])["Complete"] == "True"
    lines = logged()
    assert {"share-0 | decoding", "share-0 | written", "share-1 | helping"} <= set(lines)
    assert any(line.endswith("created for 3 nodes of pool cpu") for line in lines)


def test_a_share_works_before_others_have_machines(kubernetes, shares, minutes_of_half_a_second):
    """The limit on waiting counts until the first one works, not until all do."""
    kubernetes.script("*-0-*", Script(output=["decoding", 1.5, "written"]))
    kubernetes.script("*-1-*", Script(pending_s=600.0))
    shares(nodes=2)


def test_a_crash_of_a_share_costs_its_pod(kubernetes, shares, logged):
    kubernetes.script("*-0-*", Script(output=["first life"], exit_code=1), Script(output=["second life", 0.5]))
    kubernetes.script("*-1-*", HANGING)
    shares(nodes=2)
    lines = [line for line in logged() if line.startswith("share-0 |")]
    assert sorted(lines) == ["share-0 | first life", "share-0 | second life"]


def test_the_log_of_a_pod_that_failed_and_stays_is_read_once(kubernetes, shares, logged, meanwhile):
    kubernetes.script("*-0-*", Script(output=["decoding", 2.0, "written"]))
    kubernetes.script("*-1-*", Script(output=["first life"], exit_code=1), HANGING)

    def change():
        """Kubernetes changes a pod that failed once more, when it has counted it."""
        (failed,) = [pod for pod in kubernetes.list(PODS, "*-1-*") if pod["status"]["phase"] == "Failed"]
        with kubernetes.store.changing(PODS, "kubeflow", failed["metadata"]["name"]) as pod:
            pod["metadata"]["labels"]["counted"] = "yes"

    meanwhile(lambda: len(kubernetes.list(PODS, "*-1-*")) == 2, change)
    shares(nodes=2)
    assert logged().count("share-1 | first life") == 1


def test_a_user_s_mistake_ends_all_shares(kubernetes, shares):
    mistake = Script(output=["error: no images"], exit_code=EXIT_CODE, termination_message="no images in s3://bucket")
    kubernetes.script("*-0-*", HANGING)
    kubernetes.script("*-1-*", mistake)
    with pytest.raises(LaunchError, match=r"share-1 ended with exit code 2: no images in s3://bucket"):
        shares(nodes=2, attempts=3)
    assert len(kubernetes.list(JOBS)) == 1


def test_machines_that_are_taken_away_count_for_nothing(kubernetes, shares, meanwhile):
    kubernetes.script("*-0-*", Script(output=["first life"], hang=True), Script(output=["second life"]))
    kubernetes.script("*-1-*", HANGING)

    def preempt():
        (pod,) = kubernetes.list(PODS, "*-0-*")
        kubernetes.preempt(pod["metadata"]["name"])

    meanwhile("share-0 | first life", preempt)
    shares(nodes=2)


def test_an_old_price_is_warned_of_once(kubernetes, run, logged):
    kubernetes.script("*", QUICK)
    run(price=Price(dollars_an_hour=2.0, date="2020-01", region="r", source="s"))
    (warning,) = (line for line in logged() if "price" in line)
    assert warning.startswith("pool cpu: the price of 2.00 $/h (r; s) is of 2020-01, ")
    assert warning.endswith(" days old; look it up again")


@pytest.mark.parametrize(("uri", "warnings"), [("sqlite:////home/me/mlflow.db", 1), ("http://mlflow:5000", 0)])
def test_mlflow_that_pods_cannot_reach_is_warned_of_once(kubernetes, run, logged, monkeypatch, uri, warnings):
    kubernetes.script("*", QUICK)
    monkeypatch.setenv("MLFLOW_TRACKING_URI", uri)
    run()
    text = f"the job's metrics are not tracked: its pods cannot reach MLFLOW_TRACKING_URI={uri}"
    assert logged().count(text) == warnings


def test_logs_are_followed_from_pending_on(kubernetes, run, logged):
    kubernetes.script("*-master-0", Script(output=["step 1", 1.0, "step 2"]))
    kubernetes.script("*-worker-0", replace(QUICK, pending_s=0.6))
    run()
    assert sum("worker-0: FailedScheduling: 0/1 nodes are available" in line for line in logged()) == 1
    assert "worker-0 | step 2" in logged()


@pytest.mark.parametrize("exit_code", [PREEMPTED_EXIT_CODE, CRASHED_NODE_EXIT_CODE, 137])
def test_log_of_restarted_replica_is_read_further(kubernetes, run, logged, exit_code):
    kubernetes.script("*-worker-0", Script(output=["step 1", 1.5, "step 2"]))
    kubernetes.script(
        "*-master-0",
        Script(output=["first", 2.0], exit_code=exit_code, termination_message="why"),
        Script(output=["second", 1.5]),
    )
    run(retries=3)
    first = [line for line in logged() if line.startswith("master-0 |")]
    assert first == ["master-0 | first", "master-0 | second"]
    assert any(line.endswith(f"master-0 ended with exit code {exit_code}: why") for line in logged())


def test_restarted_worker_is_explained_and_read_at_the_end(kubernetes, run, logged):
    """The operator may delete its first pod before the log is read; the message of its end is kept all the same."""
    kubernetes.script("*-master-0", Script(output=["step 1", 1.5, "step 2"]))
    kubernetes.script(
        "*-worker-0", Script(output=["first", 0.5], exit_code=137, termination_message="why"), Script(output=["second"])
    )
    run(retries=3)
    assert [line for line in logged() if line.startswith("worker-0 |")][-1] == "worker-0 | second"
    assert any(line.endswith("worker-0 ended with exit code 137: why") for line in logged())


def test_log_of_failing_worker_is_read_while_the_others_run(kubernetes, run, tmp_path):
    kubernetes.script("*-master-0", HANGING)
    kubernetes.script("*-worker-0", Script(output=["step 1", "Traceback"], exit_code=CRASHED_NODE_EXIT_CODE))
    with pytest.raises(LaunchError):
        run(record=str(tmp_path / "record"))
    assert "Traceback" in read(tmp_path / "record")["logs/worker-0.log"]


def test_a_preemption_is_no_failure_that_is_counted(kubernetes, run):
    taken = Script(output=["step 1"], exit_code=PREEMPTED_EXIT_CODE)
    kubernetes.script("*-master-0", Script(output=["step 1", 1.5, "step 2"]))
    kubernetes.script("*-worker-0", taken, taken, taken, QUICK)
    run(retries=1)
    assert len(jobs(kubernetes)) == 1


def test_a_preempted_replica_is_waited_for(kubernetes, run, logged, meanwhile):
    kubernetes.script("*-master-0", Script(output=["step 1", 1.2, "step 2"]))
    kubernetes.script("*-worker-0", HANGING, QUICK)
    meanwhile(
        "master-0 | step 1", lambda: kubernetes.preempt(kubernetes.list(PODS, "*-worker-0")[0]["metadata"]["name"])
    )
    run(retries=3)
    assert any("worker-0: Preempted: Preempted by pod" in line for line in logged())
    assert [line for line in logged() if line.startswith("worker-0 |")][-2:] == [
        "worker-0 | step 1",
        "worker-0 | step 2",
    ]


# Failure


def test_the_first_failing_replica_explains_a_job(kubernetes, fails):
    kubernetes.script("*-master-0", HANGING)
    message = "distill: node 1 of 2: loss is not finite at step 3; lower learning_rate"
    kubernetes.script("*-worker-0", Script(output=["step 1"], exit_code=2, termination_message=message))
    failure = fails()
    name = jobs(kubernetes)[0]["metadata"]["name"]
    assert failure == f"job {name} failed (PyTorchJobFailed): worker-0 ended with exit code 2: {message}"


def test_what_the_trainer_itself_refused_is_not_retried(kubernetes, fails, run, identity, pool, spec):
    wrong = Script(
        output=["starting"], exit_code=2, termination_message="distill: batch_size = 127 cannot be dealt evenly"
    )
    kubernetes.script("*", wrong)
    first = fails(attempts=3)
    assert len(jobs(kubernetes)) == 1
    again = fails()
    assert again.startswith(f"not retried, since it would fail again: {first}. Fix that and start a new run; or")
    (failed,) = kubernetes.list(PYTORCHJOBS)
    assert f"kubectl delete pytorchjobs.kubeflow.org {failed['metadata']['name']} -n kubeflow" in again
    kubernetes.script("*", QUICK)
    ClusterLauncher(pool, identity).run(replace(spec, settings={"batch_size": 128}))  # other settings are another job
    kubernetes.delete(PYTORCHJOBS, failed["metadata"]["name"])
    run()


def test_refused_settings_are_not_retried_within_a_job(kubernetes, fails):
    message = "distill: failed twice at step 7 in the same way: ValueError: planted"
    kubernetes.script("*-master-0", HANGING)
    kubernetes.script("*-worker-0", Script(output=["step 1"], exit_code=EXIT_CODE, termination_message=message))
    assert fails(retries=3).endswith(f"failed (PyTorchJobFailed): worker-0 ended with exit code 2: {message}")
    assert fails(retries=3).startswith("not retried, since it would fail again")


def test_a_job_that_fails_too_often_is_ended(kubernetes, fails):
    crash = Script(
        output=["step 1"], exit_code=CRASHED_NODE_EXIT_CODE, termination_message="distill: was ended by SIGSEGV"
    )
    missed = replace(crash, termination_message=f"distill: Broken pipe; {MISSED_ANOTHER}")
    kubernetes.script("*-master-0", missed)
    kubernetes.script("*-worker-0", crash)
    message = fails(retries=2)
    # While the launcher reads a log, the job may fail once more.
    text = r"has failed [345] times, and its pool allows 2 retries; the last time worker-0 ended with exit code 200: "
    assert re.search(text, message)
    assert "distill: was ended by SIGSEGV; fix that and run again" in message
    assert jobs(kubernetes) == []


def test_the_next_attempt_resumes(kubernetes, fails, run, monkeypatch):
    """KFP tries a task again in a new pod, which knows nothing of the first one but the run's id."""
    monkeypatch.setenv("TRAINER_CHECKPOINTS", "s3://bucket/checkpoints")
    kubernetes.script("*", Script(output=["starting"], exit_code=PREEMPTED_EXIT_CODE))
    assert "it was asked to end from outside: run again" in fails()
    kubernetes.script("*", QUICK)
    run()
    first, second = (job["spec"]["pytorchReplicaSpecs"]["Master"]["template"]["spec"] for job in jobs(kubernetes))
    assert first == second
    assert {"name": "TRAINER_CHECKPOINTS", "value": "s3://bucket/checkpoints"} in second["containers"][0]["env"]


@pytest.fixture
def soon(monkeypatch):
    monkeypatch.setattr("components.launch.launcher.RETRY_DELAY_S", 0.0)


CRASH = Script(output=["step 1"], exit_code=1)


@pytest.mark.usefixtures("soon")
def test_task_retries_its_job_by_itself_where_that_may_help(kubernetes, run, identity, logged, tmp_path):
    """Argo, as KFP sets it up, does not try a task again that has failed."""
    kubernetes.script("*-master-0", HANGING)
    kubernetes.script("*-worker-0", CRASH)
    kubernetes.script(f"{replace(identity, attempt=3).name}-*", QUICK)
    run(attempts=3, record=str(tmp_path / "record"))
    attempts = [job["metadata"]["labels"]["vit-distillation/attempt"] for job in jobs(kubernetes)]
    assert sorted(attempts) == ["1", "2", "3"]
    assert [line for line in logged() if line.startswith("retrying in")] == [
        "retrying in 0 s: attempt 2 of 3",
        "retrying in 0 s: attempt 3 of 3",
    ]
    kept = {path.relative_to(tmp_path / "record").parent.as_posix() for path in tmp_path.rglob("status.json")}
    assert kept == {".", "attempt-2", "attempt-3"}


@pytest.mark.usefixtures("soon")
def test_attempts_are_limited_across_pods(kubernetes, fails):
    kubernetes.script("*-master-0", HANGING)
    kubernetes.script("*-worker-0", CRASH)
    assert "worker-0 ended with exit code 1" in fails(attempts=2)
    assert len(jobs(kubernetes)) == 2
    fails(attempts=3)  # the task's pod was lost, and its next one continues the count
    assert len(jobs(kubernetes)) == 3


@pytest.mark.usefixtures("minutes_of_half_a_second")
def test_silent_master_that_waits_for_a_worker_does_not_hang(kubernetes, run, logged):
    kubernetes.script("*-master-0", Script(output=["step 1", 2.0, "step 2"]))
    kubernetes.script("*-worker-0", Script(output=[item for number in range(40) for item in (f"step {number}", 0.1)]))
    run(silent_minutes=1)
    assert "worker-0 | step 13" in logged()


@pytest.mark.usefixtures("soon", "minutes_of_half_a_second")
def test_attempts_of_job_that_hangs_are_limited(kubernetes, fails, logged):
    """It is deleted, and what it was cannot be counted on the cluster."""
    kubernetes.script("*", HANGING)
    assert "wrote no line for 0.5 s" in fails(attempts=3, silent_minutes=1)
    assert sum(line.startswith("retrying in") for line in logged()) == 2


def test_ctrl_c_between_two_attempts_ends_the_task(kubernetes, run, meanwhile, monkeypatch):
    monkeypatch.setattr("components.launch.launcher.RETRY_DELAY_S", 30.0)
    kubernetes.script("*", CRASH)
    meanwhile("retrying in 30 s: attempt 2 of 3", interrupt)
    with pytest.raises(KeyboardInterrupt):
        run(attempts=3)
    assert len(jobs(kubernetes)) == 1


def test_a_kind_that_is_removed_says_so(kubernetes, fails, meanwhile):
    kubernetes.script("*", HANGING)

    def remove():
        kubernetes.uninstall("pytorchjobs")
        kubernetes.faults.cut()

    meanwhile("master-0 | step 1", remove)
    assert "as all jobs of its kind: this cluster has no pytorchjobs.kubeflow.org" in fails()


# JobLimits


@pytest.mark.usefixtures("soon", "minutes_of_half_a_second")
def test_waiting_too_long_ends_the_job_for_good(kubernetes, fails, logged):
    kubernetes.script("*-master-0", HANGING)
    kubernetes.script("*-worker-0", Script(pending_s=30))
    message = fails(attempts=3, queued_minutes=1)
    assert not any(line.startswith("retrying in") for line in logged())
    assert "was not running after 0.5 s (waiting for its machines (1 of 2 replicas)); last problem: " in message
    assert "0/1 nodes are available: 1 Insufficient cpu." in message
    assert jobs(kubernetes) == []
    assert logged()[-1].endswith("deleted")


# Canceling


@pytest.mark.parametrize("when", ["created", "running"])
def test_ctrl_c_deletes_job_and_waits_until_it_is_gone(kubernetes, run, logged, meanwhile, when):
    kubernetes.script("*", HANGING if when == "running" else Script(pending_s=30))
    moments = {"created": lambda: bool(jobs(kubernetes)), "running": "master-0 | step 1"}
    meanwhile(moments[when], interrupt)
    with pytest.raises(KeyboardInterrupt):
        run()
    assert jobs(kubernetes) == []
    assert kubernetes.list(PODS) == []
    assert logged()[-1].endswith(": deleted")


def test_launcher_in_a_thread_is_stopped_by_its_event(kubernetes, run, meanwhile):
    kubernetes.script("*", HANGING)
    stop = threading.Event()
    meanwhile("master-0 | step 1", stop.set)
    with ThreadPoolExecutor(1) as pool, pytest.raises(KeyboardInterrupt):
        pool.submit(run, stop=stop).result()
    assert jobs(kubernetes) == []


def test_signal_that_ends_no_wait_is_noticed_soon(kubernetes, run, meanwhile):
    kubernetes.script("*", HANGING)
    began = []
    meanwhile("master-0 | step 1", lambda: (time.sleep(1), began.append(time.monotonic()), _thread.interrupt_main()))
    with pytest.raises(KeyboardInterrupt):
        run()
    assert time.monotonic() - began[0] < 60
    assert jobs(kubernetes) == []


def test_ctrl_c_during_creation_leaves_no_job(kubernetes, run, meanwhile):
    kubernetes.script("*", HANGING)
    kubernetes.faults.slow(0.5)
    meanwhile(lambda: bool(jobs(kubernetes)), interrupt)
    with pytest.raises(KeyboardInterrupt):
        run()
    assert jobs(kubernetes) == []


def test_a_job_that_cannot_be_deleted_is_named(kubernetes, run, meanwhile, logged):
    kubernetes.script("*", HANGING)
    kubernetes.faults.deny("delete", "pytorchjobs")
    meanwhile("master-0 | step 1", interrupt)
    with pytest.raises(KeyboardInterrupt):
        run()
    name = jobs(kubernetes)[0]["metadata"]["name"]
    assert f"job {name} may be left running: no right to delete pytorchjobs.kubeflow.org {name}" in logged()[-1]
    assert f"kubectl delete pytorchjobs.kubeflow.org {name} -n kubeflow" in logged()[-1]


# A cluster with faults


def test_a_short_outage_does_not_end_the_run(kubernetes, run, logged, meanwhile):
    kubernetes.script("*-master-0", Script(output=["step 1", 2.2, "step 2"]))
    kubernetes.script("*-worker-0", Script(output=["step 1", 1.5, "step 2"]))
    meanwhile("master-0 | step 1", lambda: kubernetes.faults.away(1.0))
    run()
    assert sum("does not answer" in line for line in logged()) == 1
    assert sum("answers again" in line for line in logged()) == 1
    assert [line for line in logged() if line.startswith("worker-0 |")] == ["worker-0 | step 1", "worker-0 | step 2"]


def test_long_outage_leaves_job_to_be_adopted(kubernetes, run, fails, logged, meanwhile):
    first, second = (kubernetes.add_pod(name)["metadata"]["uid"] for name in ("task-1", "task-2"))
    kubernetes.script("distill-*", Script(output=["step 1", 2.0, "step 2"]))
    meanwhile("master-0 | step 1", lambda: kubernetes.faults.away(1.0))
    message = fails(ApiUnavailableError, owner=Owner(name="task-1", uid=first), api_timeout_s=0.3)
    name = jobs(kubernetes)[0]["metadata"]["name"]
    assert f"job {name} continues on its own: run the same task again to follow it" in message
    run(owner=Owner(name="task-2", uid=second))
    (job,) = jobs(kubernetes)
    assert [owner["uid"] for owner in job["metadata"]["ownerReferences"]] == [second]
    assert any("exists already; following it" in line for line in logged())


@pytest.mark.parametrize(("verb", "resource"), [("get", "pods/log"), ("list", "events"), ("list", "pods")])
@pytest.mark.usefixtures("minutes_of_half_a_second")
def test_what_may_not_be_read_is_done_without(kubernetes, run, logged, verb, resource):
    kubernetes.script("*", Script(output=["step 1", 0.7, "step 2"]))
    kubernetes.faults.deny(verb, resource)
    run(silent_minutes=1 if resource != "events" else 100)
    assert any(
        f"no right to {verb} {resource.split('/')[0]}" in line and "the job is followed without" in line
        for line in logged()
    )
    assert logged()[-1].endswith("succeeded")


def test_watches_that_break_and_expire_do_no_harm(kubernetes, run, logged):
    steps = [item for number in range(12) for item in (f"step {number}", 0.1)]
    kubernetes.script("*-master-0", Script(output=[*steps, 0.7]))
    kubernetes.script("*-worker-0", Script(output=steps))
    stop = threading.Event()

    def harm():
        while not stop.wait(0.25):
            kubernetes.compact()
            kubernetes.expire_watches()
            kubernetes.faults.cut()

    thread = threading.Thread(target=harm)
    thread.start()
    try:
        run()
    finally:
        stop.set()
        thread.join()
    for replica in ("master-0", "worker-0"):
        seen = [line.partition(" | ")[2] for line in logged() if line.startswith(f"{replica} |")]
        assert seen == [f"step {number}" for number in range(12)]


@pytest.mark.usefixtures("minutes_of_half_a_second")
def test_while_server_is_unavailable_missing_line_is_no_silence(kubernetes, run, logged, meanwhile, monkeypatch):
    monkeypatch.setattr("components.launch.client.SETTLE_S", 1.0)
    steps = [item for number in range(12) for item in (f"step {number}", 0.2)]
    kubernetes.script("*-master-0", Script(output=[*steps, 0.2]))
    kubernetes.script("*-worker-0", Script(output=steps))
    meanwhile("master-0 | step 1", lambda: kubernetes.faults.away(1.2))
    run(silent_minutes=1)
    assert "worker-0 | step 11" in logged()


@pytest.mark.usefixtures("minutes_of_half_a_second")
def test_launcher_that_was_held_up_reads_before_it_judges(kubernetes, run, logged):
    steps = [item for number in range(12) for item in (f"step {number}", 0.2)]
    kubernetes.script("*-master-0", Script(output=[*steps, 0.2]))
    kubernetes.script("*-worker-0", Script(output=steps))

    def hold_up(record):
        if record.getMessage() == "master-0 | step 1":
            (pod,) = kubernetes.list(PODS, "*-worker-0")
            with kubernetes.store.changing(PODS, "kubeflow", pod["metadata"]["name"]) as changed:
                changed["metadata"]["labels"]["else"] = "x"  # so what it reads first afterward is no line
            time.sleep(2.0)
        return True

    launcher.logger.addFilter(hold_up)
    try:
        run(silent_minutes=1)
    finally:
        launcher.logger.removeFilter(hold_up)
    assert "worker-0 | step 11" in logged()


def test_a_login_that_runs_out_is_waited_for(kubernetes, run, logged, meanwhile):
    kubernetes.script("*-master-0", Script(output=["step 1", 1.5, "step 2"]))
    kubernetes.script("*-worker-0", Script(output=["step 1", 0.7, "step 2"]))

    def refuse():
        kubernetes.faults.fail(401, times=8)
        kubernetes.faults.cut()

    meanwhile("master-0 | step 1", refuse)
    run()
    assert any("does not know who you are" in line for line in logged())
    assert "worker-0 | step 2" in logged()


def test_a_log_that_cannot_be_read_for_a_while_ends_nothing(kubernetes, run, logged, meanwhile):
    """As where the kubelet of a node restarts."""
    kubernetes.script("*", Script(output=["step 1", 2.0, "step 2"]))

    def refuse():
        kubernetes.faults.deny("get", "pods/log")
        kubernetes.faults.cut("pods/log")
        time.sleep(0.3)
        kubernetes.faults.allow("get", "pods/log")

    meanwhile("master-0 | step 1", refuse)
    run()
    assert "master-0 | step 2" in logged()
    assert logged()[-1].endswith("succeeded")


def test_credentials_that_were_never_accepted_are_reported_at_once(kubernetes, fails):
    kubernetes.faults.fail(401, times=1000)
    assert fails().endswith("log in again, until `kubectl get pods` works")


def test_an_interruption_survives_a_dead_connection(kubernetes, run, meanwhile):
    kubernetes.script("*", HANGING)

    def interrupt_badly():
        kubernetes.faults.away(0.5)
        interrupt()

    meanwhile("master-0 | step 1", interrupt_badly)
    with pytest.raises(KeyboardInterrupt):
        run()
    assert jobs(kubernetes) == []


# The record


def read(folder):
    return {path.relative_to(folder).as_posix(): path.read_text() for path in folder.rglob("*") if path.is_file()}


def test_a_job_that_succeeds_leaves_its_record(kubernetes, run, tmp_path):
    kubernetes.script("*-master-0", Script(output=["step 1", 0.7]))
    kubernetes.script("*-worker-0", QUICK)
    run(record=str(tmp_path / "record"))
    kept = read(tmp_path / "record")
    job = jobs(kubernetes)[0]
    assert kept.keys() == {"job.json", "status.json", "events.json", "logs/master-0.log", "logs/worker-0.log"}
    assert json.loads(kept["job.json"])["spec"] == job["spec"]
    status = json.loads(kept["status.json"])
    assert status["state"]["phase"] == "succeeded"
    assert status["job"]["metadata"]["uid"] == job["metadata"]["uid"]
    assert status["replicas"]["master-0"]["ended"]["exit_code"] == 0
    assert "SuccessfulCreatePod" in {event["reason"] for event in json.loads(kept["events.json"])}
    assert [line.partition(" ")[2] for line in kept["logs/worker-0.log"].splitlines()] == ["step 1", "step 2"]


def test_job_that_is_cancelled_leaves_its_record_too(kubernetes, run, tmp_path, meanwhile):
    kubernetes.script("*", HANGING)
    meanwhile("master-0 | step 1", interrupt)
    with pytest.raises(KeyboardInterrupt):
        run(record=str(tmp_path / "record"))
    kept = read(tmp_path / "record")
    assert "step 1" in kept["logs/master-0.log"]
    assert json.loads(kept["job.json"])["kind"] == "PyTorchJob"


def test_job_that_is_refused_leaves_what_would_have_been_sent(kubernetes, fails, tmp_path):
    kubernetes.faults.deny("create", "pytorchjobs")
    fails(record=str(tmp_path / "record"))
    assert json.loads((tmp_path / "record" / "job.json").read_text())["kind"] == "PyTorchJob"


def test_a_record_that_cannot_be_written_hides_nothing(kubernetes, fails, tmp_path, logged):
    (tmp_path / "record").write_text("a file")
    kubernetes.script("*-master-0", HANGING)
    kubernetes.script("*-worker-0", Script(output=[], exit_code=3))
    assert "worker-0 ended with exit code 3" in fails(record=str(tmp_path / "record"))
    assert f"the record of the job cannot be kept in {tmp_path}/record" in logged()[-1]


def test_a_record_goes_to_an_object_store(kubernetes, run):
    from trainer.io import storage

    kubernetes.script("*", QUICK)
    run(record="memory://record-of-a-job")
    assert b"step 2" in storage.read_bytes("memory://record-of-a-job/logs/master-0.log")
    storage.remove("memory://record-of-a-job")


def test_last_log_lines_of_a_slow_node_arrive(kubernetes, run, logged, monkeypatch):
    monkeypatch.setattr(launcher, "RUNNING_LOGS_S", 0.1)
    kubernetes.script("*", Script(output=[f"step {number}" for number in range(500)]))
    kubernetes.faults.slow(0.3)
    run()
    assert sum(line.startswith("master-0 |") for line in logged()) == 500
