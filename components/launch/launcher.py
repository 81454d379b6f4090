"""Run a stage as a job on a node pool: submit it, follow it to its end, record it, and retry it where that may help."""

from __future__ import annotations

import logging
import os
import queue
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, replace
from functools import partial
from typing import Any, Self

from components.launch.client import (
    ApiRetry,
    ApiUnavailableError,
    Cluster,
    ClusterError,
    ForbiddenError,
    KindNotInstalledError,
    LogNotReadyError,
    NotFoundError,
)
from components.launch.job import JobRecord, TaskJob
from components.launch.job_manifest import EVENTS, PODS, TRACKING_URI, Identity, backend_of, tracks_in_reach
from components.launch.job_progress import (
    JobLimits,
    JobOutcome,
    JobProgress,
    Replica,
    explain_failure,
    fails_again,
    read_replica,
)
from components.launch.pools import Pool
from components.launch.readers import Change, LogLine, LogState, Published, ReaderThreads, ThreadEnded
from trainer.graph import JobSpec
from trainer.io import storage
from trainer.io.errors import LaunchError
from trainer.io.formatting import duration

logger = logging.getLogger(__name__)

MINUTE_S = 60.0
API_TIMEOUT_S = 900.0  # how long the API server may be unavailable before the launcher gives up; the job then continues
DELETE_TIMEOUT_S, GONE_TIMEOUT_S = 5.0, 15.0
"""How long the launcher retries a deletion, and waits for its end, after Ctrl-C."""
MAX_ATTEMPTS = 3
"""How many jobs a task may have in a run, one after the other, while they fail in a way that need not happen again."""
RETRY_DELAY_S = 10.0  # pause before the next attempt, for the cause to pass
EVENTS_S = 10.0  # how often it lists events while not all replicas run
ENDED_LOGS_S = 10.0  # how long the launcher waits for the last lines of a first replica that has ended
RUNNING_LOGS_S = 0.5  # and of one that still runs when the job has ended
OTHER_LOGS_S = 60.0  # how long it reads the logs of the other replicas at the end
LONGEST_WAIT_S = 2.0  # for news of a job: a signal that comes just before a wait begins does not end it
GONE_POLL_S = 0.5  # how often it checks whether a deleted job is gone
LAST_LOOK_S = 0.5  # for news before a limit counts: where this process was held up, it has yet to read what came
UNSETTLED_POLL_S = 0.5  # how often it checks a limit that was reached while the API server was unavailable


class _RetryableJobError(LaunchError):
    """A job failed in a way that need not happen again."""


class ClusterLauncher:
    """Runs jobs on a node pool."""

    def __init__(
        self,
        pool: Pool,
        identity: Identity,
        *,
        record: str = "",
        attempts: int = MAX_ATTEMPTS,
        api_timeout_s: float = API_TIMEOUT_S,
        stop: threading.Event | None = None,
    ) -> None:
        """Choose where jobs run.

        Args:
            pool: the node pool.
            identity: whose job it is; its attempt is counted here.
            record: URI below which job.json, status.json, events.json and logs/REPLICA.log are written, however the job ends; those
                of further attempts go to attempt-2, attempt-3 below it. Empty: nowhere.
            attempts: how many jobs the task may have in its run.
            api_timeout_s: how long the API server may be unavailable.
            stop: interrupts `run` where it is not in the main thread, as Ctrl-C does there.
        """
        self._stop = stop or threading.Event()
        self._pool, self._identity, self._record = pool, identity, record
        self._attempts, self._api_timeout_s = attempts, api_timeout_s

    def run(self, spec: JobSpec) -> None:
        """Run a job to its end, or follow an unfinished one of the same run, task and specification; lost machines and crashes are retried.

        Raises:
            LaunchError: naming the replica that failed, why, and the next move; or the limit that was reached; or the cluster's refusal.
            ApiUnavailableError: the API server was unavailable for too long, and the job continues.
            KeyboardInterrupt: Ctrl-C; the job was deleted.
        """
        record, attempt = self._record, 0
        with Cluster.connect(self._identity.namespace) as cluster:
            if doubt := self._pool.price.doubt() if self._pool.price else "":
                logger.warning("pool %s: %s", self._pool.name, doubt)
            if (uri := os.environ.get(TRACKING_URI)) and not tracks_in_reach(os.environ):
                logger.warning("the job's metrics are not tracked: its pods cannot reach %s=%s", TRACKING_URI, uri)
            while True:
                job = TaskJob(cluster, backend_of(spec, self._pool), spec, self._pool, self._identity)
                try:
                    return self._run_attempt(job, spec, cluster, record)
                except _RetryableJobError as failure:
                    # A job that reached a limit is deleted, so the cluster no longer counts it.
                    attempt = max(attempt + 1, job.identity.attempt)
                    if attempt >= self._attempts:
                        raise
                    logger.warning("%s", failure)
                    logger.warning("retrying in %g s: attempt %d of %d", RETRY_DELAY_S, attempt + 1, self._attempts)
                    record = self._record and storage.join(self._record, f"attempt-{attempt + 1}")
                    time.sleep(RETRY_DELAY_S)

    def _run_attempt(self, job: TaskJob, spec: JobSpec, cluster: Cluster, record: str) -> None:
        start, pool = time.monotonic(), self._pool

        def report(text: str) -> None:
            logger.info("[%6.1f s] job %s: %s", time.monotonic() - start, job.name, text)

        limits = JobLimits(
            queued_s=MINUTE_S * pool.queued_minutes,
            running_s=MINUTE_S * pool.running_minutes,
            silent_s=MINUTE_S * pool.silent_minutes,
            retries=0 if job.backend.independent else pool.retries,
        )
        nodes = 1 if job.backend.independent else pool.elastic_min_nodes or spec.nodes
        progress = JobProgress(nodes=nodes, limits=limits, now=start)
        retry = ApiRetry(self._api_timeout_s)
        with JobFollower(cluster, job, progress, retry, record=record, report=report, stop=self._stop) as follower:
            try:
                created = job.submit(retry)
                report(
                    f"created for {spec.nodes} nodes of pool {pool.name}" if created else "exists already; following it"
                )
                outcome = follower.follow()
                if outcome.kind == "limit":
                    raise (_RetryableJobError if outcome.retryable else LaunchError)(
                        f"job {job.name} {outcome.message}"
                    )
            except ApiUnavailableError as error:
                left = f"; job {job.name} continues on its own: run the same task again to follow it"
                raise type(error)(f"{error}{left if job.may_exist else ''}") from error
            except BaseException:  # Ctrl-C too: a job that is no longer followed is deleted
                follower.delete_job()
                raise
            _check_outcome(outcome, job, progress)


def _check_outcome(outcome: JobOutcome, job: TaskJob, progress: JobProgress) -> None:
    """Return if the job has succeeded, else raise a `LaunchError` with the cause."""
    if outcome.kind == "failed":
        message = explain_failure(job.name, job.kubectl("describe"), progress)
        if not fails_again(progress):
            raise _RetryableJobError(message)
        try:
            # KFP may start another attempt of the task all the same; it must not pay for the same failure.
            ApiRetry(DELETE_TIMEOUT_S)(lambda: job.annotate_failure(message))
        except ClusterError as error:
            logger.warning(
                "job %s: its failure cannot be recorded on it, so a retry would repeat it: %s", job.name, error
            )
        raise LaunchError(message)
    if outcome.kind == "deleted":
        kind = ""
        try:
            ApiRetry(DELETE_TIMEOUT_S)(job.is_gone)
        except KindNotInstalledError as error:
            kind = f", as all jobs of its kind: {error}"
        raise LaunchError(
            f"job {job.name} was deleted by somebody else while it was {progress.state.phase}{kind}; "
            "run again, which resumes from the last checkpoint"
        )


class JobFollower:
    """Follows one job: threads read it from the API server, and the caller's thread interprets what they publish.

    The first replica's log is followed, the others are read when they fail or the job ends; events are listed while not all replicas run.
    As a context manager it leaves no thread and no connection open.
    """

    def __init__(
        self,
        cluster: Cluster,
        job: TaskJob,
        progress: JobProgress,
        retry: ApiRetry,
        *,
        record: str,
        report: Callable[[str], None],
        stop: threading.Event | None = None,
    ) -> None:
        """Prepare; `follow` reads until `stop` is set. `progress` takes observations, `report` messages, the URI `record` the rest."""
        self._cluster, self._job, self._progress = cluster, job, progress
        self._record, self._report, self._stop = JobRecord(record), report, stop or threading.Event()
        self._inbox: queue.SimpleQueue[Published] = queue.SimpleQueue()
        self._retry, self._threads = retry, ReaderThreads(cluster, retry, self._inbox.put)
        self._followed: set[str] = set()  # uids of the first replica's pods
        self._following = 0  # how many threads read their logs
        self._read: set[tuple[str, int]] = set()  # pod and restart count of the other containers whose logs are read
        self._events_at = time.monotonic() + EVENTS_S  # when events are listed next
        self._forbidden: set[str] = set()  # what the account may not read
        self._last_seen: dict[str, Any] = {}  # the job, as the API server showed it last

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        try:
            self._threads.__exit__(*error)
        finally:  # also where the wait for them is interrupted
            status = {
                "state": asdict(self._progress.state),
                "replicas": {name: asdict(replica) for name, replica in self._progress.replicas.items()},
                "job": self._last_seen,
            }
            self._record.write(job=self._job.manifest, status=status, events=[*self._progress.events.values()])

    def follow(self) -> JobOutcome:
        """Report the job's progress until it has ended and its logs are read, or a limit is reached."""
        job = partial(self._threads.watch, self._job.backend.resource, fields=f"metadata.name={self._job.name}")
        self._threads.start("job", job)
        self._threads.start("pods", partial(self._threads.watch, PODS, labels=self._job.pod_selector))
        while not (outcome := self._outcome()):
            if self._stop.is_set():
                raise KeyboardInterrupt
            self._report_messages()
            self._process_next(self._progress.next_limit_s(time.monotonic()) or UNSETTLED_POLL_S)
            if not self._progress.running and time.monotonic() >= self._events_at:
                self._list_events()
        if outcome.kind != "deleted":
            self._read_remaining_logs()
        if outcome.kind == "succeeded":  # what Kubernetes reported on the way is for the record only
            self._report_messages()
        self._list_events()
        if outcome.kind != "succeeded":
            self._report_messages()
        return outcome

    def _outcome(self) -> JobOutcome | None:
        outcome = self._progress.outcome(time.monotonic())
        if outcome is None or outcome.kind != "limit":
            return outcome
        if not self._retry.settled:  # while the API server is unavailable, nothing shows whether a limit was kept
            return None
        self._process_next(LAST_LOOK_S)
        for _ in range(self._inbox.qsize()):
            self._process_next(0.0)
        self._list_events()
        if outcome.retryable:  # the first replica is silent: it may wait for another one, which works
            for replica in self._others():
                self._read_log(replica, since_s=1 + int(self._progress.limits.silent_s))
                if not self._progress.outcome(time.monotonic()):
                    break
        return self._progress.outcome(time.monotonic())

    def delete_job(self) -> None:
        """Delete the job, if there is one, and continue to read for a while until it no longer exists; a failure is only logged."""
        job = self._job
        try:
            if not ApiRetry(DELETE_TIMEOUT_S)(job.delete):
                return
            self._report("being deleted")
            deadline, retry = time.monotonic() + GONE_TIMEOUT_S, ApiRetry(GONE_TIMEOUT_S)
            while not (gone := retry(job.is_gone)) and time.monotonic() < deadline:
                self._process_next(GONE_POLL_S)
        except ClusterError as error:
            logger.warning(
                "job %s may be left running: %s; delete it with `%s`", job.name, error, job.kubectl("delete")
            )
            return
        self._list_events()
        late = f"still being deleted after {duration(GONE_TIMEOUT_S)}; the cluster will finish that"
        self._report("deleted" if gone else late)

    def _report_messages(self) -> None:
        for message in self._progress.take_messages():
            self._report(message)

    def _process_next(self, timeout_s: float) -> None:
        """Process the threads' next publication, if it comes in time."""
        try:
            item = self._inbox.get(timeout=min(max(0.0, timeout_s), LONGEST_WAIT_S))
        except queue.Empty:
            return
        if isinstance(item, LogLine):
            self._on_line(item)
        elif isinstance(item, LogState):
            self._progress.set_log_state(time.monotonic(), readable=item.readable)
        elif isinstance(item, ThreadEnded):
            self._on_thread_end(item)
        elif item.resource == PODS:
            self._on_pods(item)
        else:
            self._on_job(item)

    def _on_line(self, line: LogLine, *, followed: bool = True) -> None:
        self._record.add_line(line)  # first: Ctrl-C may come at once after a line that a user has seen
        logger.info("%s | %s", line.replica, line.text)
        age_s = time.time() - line.written if line.written else 0.0
        self._progress.add_line(line.replica, line.text, time.monotonic(), age_s=age_s, new=followed)

    def _on_job(self, change: Change) -> None:
        # Another job of its name does not matter.
        job = next((one for one in change.objects if one["metadata"]["uid"] == self._job.uid), None)
        self._last_seen = job or self._last_seen
        if change.kind == ("DELETED" if job else "LISTED"):
            self._progress.mark_job_deleted()
        elif job:
            state, deleting = self._job.backend.state(job), "deletionTimestamp" in job["metadata"]
            self._progress.set_job_state(state, deleting=deleting, now=time.monotonic())

    def _on_pods(self, change: Change) -> None:
        progress, backend, now = self._progress, self._job.backend, time.monotonic()
        if change.kind == "LISTED":
            listed = {pod["metadata"]["uid"] for pod in change.objects}
            for replica in [one for one in progress.replicas.values() if one.uid not in listed]:
                progress.remove_replica(replica, now)
        for pod in change.objects:
            name = backend.replica(pod["metadata"]["labels"])
            replica = read_replica(pod, name, backend.container)
            if change.kind == "DELETED":
                progress.remove_replica(replica, now)
            else:
                progress.update_replica(replica, now)
            if name != backend.first_replica(self._job.manifest):
                # Once: a pod that failed and stays may change again.
                failed = replica.ended and replica.ended.exit_code
                if failed and (replica.uid, replica.restarts) not in self._read:
                    self._read_log(replica)
            elif replica.placed and change.kind != "DELETED" and replica.uid not in self._followed:
                self._followed.add(replica.uid)
                self._following += 1
                current = partial(self._known_of, replica)
                self._threads.start(name, partial(self._threads.follow_log, replica, backend.container, current))

    def _known_of(self, replica: Replica) -> Replica:
        """Return what is known of a pod now: it is over where another one has its place."""
        known = self._progress.replicas[replica.name]
        return known if known.uid == replica.uid else replace(replica, over=True)

    def _list_events(self) -> None:
        """Take the events about the job, or about an object made for it, whose name begins with the job's."""
        self._events_at = time.monotonic() + EVENTS_S
        if "events" in self._forbidden:
            return
        try:
            listing = self._cluster.list(EVENTS)
        except ForbiddenError as error:
            self._continue_without("events", error)
            return
        except ClusterError:  # whether the server is away, the watches find out
            return
        for event in listing["items"]:
            about, job = event["involvedObject"], self._job.name
            name, kind = about.get("name", ""), about.get("kind", "")
            if kind == self._job.backend.kind:
                if about.get("uid") == self._job.uid:  # and not of an earlier job of the same name
                    self._progress.add_event("the job", event)
            elif name == job:
                self._progress.add_event(kind, event)
            elif name.startswith(f"{job}-"):
                self._progress.add_event(name.removeprefix(f"{job}-"), event)

    def _on_thread_end(self, ended: ThreadEnded) -> None:
        """Handle the end of a thread: raise its error, unless the job can be followed without it."""
        is_log = ended.name not in {"job", "pods"}
        self._following -= is_log
        if isinstance(ended.error, KindNotInstalledError):
            self._progress.mark_job_deleted()
        elif isinstance(ended.error, ClusterError if is_log else ForbiddenError) and ended.name != "job":
            self._continue_without("logs" if is_log else "pods", ended.error)
        elif ended.error:
            raise ended.error

    def _continue_without(self, what: str, error: ClusterError) -> None:
        if what not in self._forbidden:
            logger.warning("%s; the job is followed without its %s", error, what)
        self._forbidden.add(what)
        self._progress.pods_readable &= what != "pods"
        self._progress.logs_readable &= what == "events"

    def _read_remaining_logs(self) -> None:
        try:
            # The job's end may have been published before its pods'.
            listing = ApiRetry(ENDED_LOGS_S)(lambda: self._cluster.list(PODS, labels=self._job.pod_selector))
            self._on_pods(Change(PODS, "LISTED", listing["items"]))
        except ForbiddenError:
            pass  # the pods' watch has failed with it, and the warning is logged
        except ClusterError as error:
            logger.warning("the last states of the replicas may be missing: %s", error)
        first, start = self._job.backend.first_replica(self._job.manifest), time.monotonic()
        while self._following:
            replica = self._progress.replicas[first]
            left_s = start + (ENDED_LOGS_S if replica.over else RUNNING_LOGS_S) - time.monotonic()
            if left_s <= 0:
                break
            self._process_next(min(left_s, RUNNING_LOGS_S))
        deadline = time.monotonic() + OTHER_LOGS_S
        for replica in self._others():
            if time.monotonic() < deadline and (replica.uid, replica.restarts) not in self._read:
                self._read_log(replica)

    def _others(self) -> list[Replica]:
        """Return the replicas whose logs are not followed."""
        first = self._job.backend.first_replica(self._job.manifest)
        return [one for name, one in sorted(self._progress.replicas.items()) if one.placed and name != first]

    def _read_log(self, replica: Replica, *, since_s: int | None = None) -> None:
        """Read the log of a replica that is not followed, as far as it is written and if there still is one."""
        if "logs" in self._forbidden:
            return
        if since_s is None:
            self._read.add((replica.uid, replica.restarts))
        try:
            for line in self._cluster.log(
                replica.pod,
                self._threads.opened,
                uid=replica.uid,
                container=self._job.backend.container,
                since_s=since_s,
                previous=replica.running and replica.ended is not None and since_s is None,
                timeout_s=ENDED_LOGS_S,  # its node may be dead
            ):
                self._on_line(LogLine.parse(replica.name, line), followed=False)
        except ForbiddenError as error:
            self._continue_without("logs", error)
        except (LogNotReadyError, NotFoundError):
            pass  # it ended before it began, or was deleted
        except ClusterError as error:
            logger.warning("the log of %s may be missing: %s", replica.name, error)
