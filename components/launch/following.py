"""Following a job: threads read what the API server tells of it, and one thread, the caller's, makes sense of it."""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable
from dataclasses import asdict
from typing import Any, Self

from components.launch.api_errors import EVENTS, PODS, ApiRetry, ClusterError, ForbiddenError, KindNotInstalledError
from components.launch.client import Cluster
from components.launch.job_progress import JobOutcome, JobProgress, Replica, read_replica
from components.launch.readers import Change, Informer, LogLine, LogReader, ReaderThreads, ThreadEnded
from components.launch.record import JobRecord
from components.launch.submitting import TaskJob

logger = logging.getLogger(__name__)

ENDED_LOGS_S = 10.0
"""How long the last lines of replicas that have ended are waited for, and"""
RUNNING_LOGS_S = 0.5
"""those of replicas that run on, such as workers after the master's end."""
GONE_POLL_S = UNSETTLED_S = 0.5
"""How often a deleted job, and a limit that is passed while the API server is away, are looked at again."""


class Follower:
    """Follows one job. A context manager: after it no thread runs and no connection is read."""

    def __init__(
        self,
        cluster: Cluster,
        job: TaskJob,
        progress: JobProgress,
        retry: ApiRetry,
        *,
        record: JobRecord,
        tell: Callable[[str], None],
    ) -> None:
        """Prepare; nothing is read before `follow`.

        Args:
            cluster: where the job is.
            job: itself.
            progress: takes what is seen of it.
            retry: repeats requests while the API server is unavailable.
            record: takes log lines, status and events.
            tell: takes lines about the job.
        """
        self._cluster, self._job, self._progress, self._record, self._tell = cluster, job, progress, record, tell
        self._inbox: queue.SimpleQueue[Change | LogLine | ThreadEnded] = queue.SimpleQueue()
        self._retry, self._readers = retry, ReaderThreads(retry, self._inbox.put)
        self._logs: dict[str, LogReader] = {}
        self._unread: set[str] = set()
        """Replicas whose log is being read."""
        self._finishing = False
        """Whether the job has ended, and only what is left of the logs is to be read."""
        self._missing: set[str] = set()
        """What may not be read."""
        self._seen: dict[str, Any] = {}
        """The job, as it was seen last."""

    def __enter__(self) -> Self:
        self._readers.__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        self._readers.__exit__(*error)
        self._record.manifest = self._job.manifest
        self._record.events = [*self._progress.events.values()]
        self._record.status = {
            "state": asdict(self._progress.state),
            "replicas": {name: asdict(replica) for name, replica in self._progress.replicas.items()},
            "job": self._seen,
        }

    def _start(self) -> None:
        watches = {
            "job": (self._job.kind, {"fields": f"metadata.name={self._job.name}"}),
            "pods": (PODS, {"labels": self._job.pod_selector}),
            "events": (EVENTS, {}),
        }
        for name, (resource, selectors) in watches.items():
            watcher = Informer(self._cluster, resource, self._readers, self._inbox.put, **selectors)
            self._readers.start(name, watcher.run)

    def follow(self) -> JobOutcome:
        """Tell how the job goes until it has ended and its logs are read, or a limit is reached.

        Raises:
            ClusterError: the job cannot be followed.
        """
        self._start()
        while not (ending := self._ending()):
            self._tell_news()
            self._listen(self._progress.next_limit_s(time.monotonic()) or UNSETTLED_S)
        if ending.kind in {"succeeded", "failed"}:
            self._read_to_the_end()
        self._tell_news()
        return ending

    def _ending(self) -> JobOutcome | None:
        """The job's end; a limit only counts when it can be seen whether it was kept."""
        ending = self._progress.outcome(time.monotonic())
        return None if ending and ending.kind == "limit" and not self._retry.settled else ending

    def wait_until_gone(self, limit_s: float) -> bool:
        """Go on reading until the deleted job does not exist any more; gives whether that came true in time.

        Raises:
            ClusterError: the API server does not answer or refuses.
        """
        deadline, retry = time.monotonic() + limit_s, ApiRetry(limit_s)
        while not (gone := retry(self._job.is_gone)) and time.monotonic() < deadline:
            self._listen(GONE_POLL_S)
        return gone

    def _tell_news(self) -> None:
        for news in self._progress.take_messages():
            self._tell(news)

    def _listen(self, seconds: float) -> None:
        """Take what comes next, if something comes in time."""
        try:
            item = self._inbox.get(timeout=min(max(0.0, seconds), threading.TIMEOUT_MAX))
        except queue.Empty:
            return
        if isinstance(item, LogLine):
            self._take_line(item)
        elif isinstance(item, ThreadEnded):
            self._take_end(item)
        elif item.resource == PODS:
            self._take_pod(item)
        elif item.resource == EVENTS:
            self._take_event(item)
        else:
            self._take_job(item)

    def _take_line(self, line: LogLine) -> None:
        self._record.line(line)  # first: Ctrl-C may come at once after a line that a user has seen
        logger.info("%s | %s", line.replica, line.text)
        self._progress.add_line(line.replica, line.text, time.monotonic())

    def _take_job(self, change: Change) -> None:
        if change.object["metadata"]["uid"] != self._job.uid:
            return
        self._seen = change.object
        if change.deleted:
            self._progress.job_deleted()
            return
        deleting = "deletionTimestamp" in change.object["metadata"]
        self._progress.update_job(self._job.backend.state(change.object), deleting=deleting, now=time.monotonic())

    def _take_pod(self, change: Change) -> None:
        name = self._job.backend.replica(change.object["metadata"]["labels"])
        replica, now = read_replica(change.object, name, self._job.backend.container), time.monotonic()
        if change.deleted:
            self._progress.replica_deleted(replica, now)
        else:
            self._progress.update_replica(replica, now)
        self._read_log(self._progress.replicas[name])

    def _read_log(self, replica: Replica) -> None:
        reader = self._logs.get(replica.name)
        if reader:
            reader.update(replica)
        elif replica.placed:
            reader = LogReader(replica, self._job.backend.container, self._cluster, self._readers, self._inbox.put)
            self._logs[replica.name] = reader
            self._unread.add(replica.name)
            self._readers.start(replica.name, reader.run)
            if self._finishing:
                reader.finish()

    def _take_event(self, change: Change) -> None:
        """Hand on what is about the job, or about what was made for it, whose names begin with its own."""
        event, about, job = change.object, change.object["involvedObject"], self._job.name
        if change.deleted:  # Kubernetes forgets an event after an hour
            return
        name, kind = about.get("name", ""), about.get("kind", "")
        if kind == self._job.backend.kind:
            if about.get("uid") == self._job.uid:  # and not of an earlier job of the same name
                self._progress.add_event("the job", event)
        elif name == job:
            self._progress.add_event(kind, event)
        elif name.startswith(f"{job}-"):
            self._progress.add_event(name.removeprefix(f"{job}-"), event)

    def _take_end(self, ended: ThreadEnded) -> None:
        """A thread has ended.

        Raises:
            Exception: what it failed with, unless the job can be followed without it.
        """
        self._unread.discard(ended.name)
        if ended.error is None:
            return
        if isinstance(ended.error, KindNotInstalledError):
            self._progress.job_deleted()
            return
        if not isinstance(ended.error, ForbiddenError) or ended.name == "job":
            raise ended.error
        self._do_without("log" if ended.name in self._logs else ended.name, ended.error)

    def _do_without(self, what: str, error: ForbiddenError) -> None:
        if what not in self._missing:
            logger.warning("%s; the job is followed without", error)
        self._missing.add(what)
        if what == "pods":
            self._progress.pods_unreadable()
        if what != "events":
            self._progress.logs_unreadable()

    def _read_to_the_end(self) -> None:
        """Take what is left to read of the logs."""
        self._finishing = True
        self._look_at_pods_again()
        for reader in self._logs.values():
            reader.finish()
        start = time.monotonic()
        while left := self._left_to_read(time.monotonic() - start):
            self._listen(min(left, RUNNING_LOGS_S))

    def _left_to_read(self, waited_s: float) -> float:
        """Seconds that the logs are still worth waiting for; 0: all is read, or the time is over."""
        ended = any(self._logs[name].ends_by_itself for name in self._unread)
        limit_s = ENDED_LOGS_S if ended else RUNNING_LOGS_S
        return max(0.0, limit_s - waited_s) if self._unread else 0.0

    def _look_at_pods_again(self) -> None:
        """The job's end may have been told before its pods'."""
        try:
            listing = ApiRetry(ENDED_LOGS_S)(lambda: self._cluster.list(PODS, labels=self._job.pod_selector))
            for pod in listing.items:
                self._take_pod(Change(PODS, pod))
        except ForbiddenError:
            return  # this was told when they were to be watched
        except ClusterError as error:
            logger.warning("how the replicas ended is known only as far as it was seen: %s", error)
