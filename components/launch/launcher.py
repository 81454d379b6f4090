"""Run a stage as a job on a node pool: submit it, follow it to its end, record it, and retry it where that may help."""

from __future__ import annotations

import logging
import os
import queue
import time
from collections.abc import Callable
from dataclasses import asdict
from typing import Any, Self

from components.launch.client import (
    ApiRetry,
    ApiUnavailableError,
    Cluster,
    ClusterError,
    ForbiddenError,
    KindNotInstalledError,
)
from components.launch.job import JobRecord, TaskJob
from components.launch.job_manifest import BACKENDS, EVENTS, PODS, TRACKING_URI, Identity, tracks_in_reach
from components.launch.job_progress import (
    JobLimits,
    JobOutcome,
    JobProgress,
    explain_failure,
    fails_again,
    read_replica,
)
from components.launch.pools import Pool
from components.launch.readers import Change, Informer, LogLine, LogReader, ReaderThreads, ThreadEnded
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
ENDED_LOGS_S = 10.0  # how long the launcher waits for the last lines of replicas that have ended
RUNNING_LOGS_S = 0.5  # how long it waits for lines of replicas that still run, such as workers after the master's end
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
    ) -> None:
        """Choose where jobs run.

        Args:
            pool: the node pool.
            identity: whose job it is; its attempt is counted here.
            record: URI below which job.json, status.json, events.json and logs/REPLICA.log are written, however the job ends; those
                of further attempts go to attempt-2, attempt-3 below it. Empty: nowhere.
            attempts: how many jobs the task may have in its run.
            api_timeout_s: how long the API server may be unavailable.
        """
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
                job = TaskJob(cluster, BACKENDS[self._pool.backend], spec, self._pool, self._identity)
                try:
                    return self._run_attempt(job, spec, cluster, record)
                except _RetryableJobError as failure:
                    # A job that reached a limit is deleted, so the cluster no longer counts it.
                    attempt = max(attempt + 1, job.attempt)
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
            retries=pool.retries,
        )
        progress = JobProgress(nodes=pool.elastic_min_nodes or spec.nodes, limits=limits, now=start)
        retry = ApiRetry(self._api_timeout_s)
        with JobFollower(cluster, job, progress, retry, record=record, report=report) as follower:
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
    ) -> None:
        """Prepare; `follow` reads. `progress` takes observations, `report` messages; log, status and events go below the URI `record`."""
        self._cluster, self._job, self._progress = cluster, job, progress
        self._record, self._report = JobRecord(record), report
        self._inbox: queue.SimpleQueue[Change | LogLine | ThreadEnded] = queue.SimpleQueue()
        self._retry, self._threads = retry, ReaderThreads(retry, self._inbox.put)
        self._log_readers: dict[str, LogReader] = {}
        self._unread_logs: set[str] = set()  # replicas whose log is not read to its end
        self._finishing = False  # whether the job has ended, and only the rest of the logs is read
        self._forbidden: set[str] = set()  # what the account may not read
        self._last_seen: dict[str, Any] = {}  # the job, as the API server showed it last

    def __enter__(self) -> Self:
        self._threads.__enter__()
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
        watches = {
            "job": (self._job.backend.resource, {"fields": f"metadata.name={self._job.name}"}),
            "pods": (PODS, {"labels": self._job.pod_selector}),
            "events": (EVENTS, {}),
        }
        for name, (resource, selectors) in watches.items():
            informer = Informer(self._cluster, resource, self._threads, **selectors)
            self._threads.start(name, informer.run)
        while not (outcome := self._outcome()):
            self._report_messages()
            self._process_next(self._progress.next_limit_s(time.monotonic()) or UNSETTLED_POLL_S)
        if outcome.kind in {"succeeded", "failed"}:
            self._read_remaining_logs()
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
            self._record.add_line(item)  # first: Ctrl-C may come at once after a line that a user has seen
            logger.info("%s | %s", item.replica, item.text)
            self._progress.add_line(item.replica, item.text, time.monotonic())
        elif isinstance(item, ThreadEnded):
            self._on_thread_end(item)
        elif item.resource == PODS:
            self._on_pod(item)
        elif item.resource == EVENTS:
            self._on_event(item)
        elif item.object["metadata"]["uid"] == self._job.uid:
            self._last_seen = item.object
            if item.deleted:
                self._progress.mark_job_deleted()
                return
            state, deleting = self._job.backend.state(item.object), "deletionTimestamp" in item.object["metadata"]
            self._progress.set_job_state(state, deleting=deleting, now=time.monotonic())

    def _on_pod(self, change: Change) -> None:
        name = self._job.backend.replica(change.object["metadata"]["labels"])
        replica, now = read_replica(change.object, name, self._job.backend.container), time.monotonic()
        if change.deleted:
            self._progress.remove_replica(replica, now)
        else:
            self._progress.update_replica(replica, now)
        replica = self._progress.replicas[name]
        reader = self._log_readers.get(name)
        if reader:
            reader.update(replica)
        elif replica.placed:
            reader = LogReader(replica, self._job.backend.container, self._cluster, self._threads)
            self._log_readers[name] = reader
            self._unread_logs.add(name)
            self._threads.start(name, reader.run)
            if self._finishing:
                reader.finish()

    def _on_event(self, change: Change) -> None:
        """Pass on an event about the job, or about an object made for it, whose name begins with the job's."""
        event, about, job = change.object, change.object["involvedObject"], self._job.name
        if change.deleted:  # Kubernetes removes events after an hour
            return
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
        self._unread_logs.discard(ended.name)
        if ended.error is None:
            return
        if isinstance(ended.error, KindNotInstalledError):
            self._progress.mark_job_deleted()
            return
        if not isinstance(ended.error, ForbiddenError) or ended.name == "job":
            raise ended.error
        what = "logs" if ended.name in self._log_readers else ended.name
        if what not in self._forbidden:
            logger.warning("%s; the job is followed without its %s", ended.error, what)
        self._forbidden.add(what)
        self._progress.pods_readable &= what != "pods"
        self._progress.logs_readable &= what == "events"

    def _read_remaining_logs(self) -> None:
        self._finishing = True
        try:
            # The job's end may have been published before its pods'.
            listing = ApiRetry(ENDED_LOGS_S)(lambda: self._cluster.list(PODS, labels=self._job.pod_selector))
            for pod in listing["items"]:
                self._on_pod(Change(PODS, pod))
        except ForbiddenError:
            pass  # the pods' informer has failed with it, and the warning is logged
        except ClusterError as error:
            logger.warning("the last states of the replicas may be missing: %s", error)
        for reader in self._log_readers.values():
            reader.finish()
        start = time.monotonic()
        while self._unread_logs:
            ended = any(self._log_readers[name].ends_by_itself for name in self._unread_logs)
            left_s = start + (ENDED_LOGS_S if ended else RUNNING_LOGS_S) - time.monotonic()
            if left_s <= 0:
                return
            self._process_next(min(left_s, RUNNING_LOGS_S))
