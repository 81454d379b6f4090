"""The threads that read one job from the API server: an informer for each kind of object, a log reader for each replica.

They only publish what they read. Whatever breaks meanwhile, every change of an object and every line of a log is published once.
"""

from __future__ import annotations

import logging
import re
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Self

from components.launch.client import (
    ApiRetry,
    ApiUnavailableError,
    Cluster,
    ExpiredError,
    ForbiddenError,
    LogNotReadyError,
    NotFoundError,
    RetryStopped,
    Stream,
    watch_events,
)
from components.launch.job_manifest import PODS, Resource
from components.launch.job_progress import Replica

logger = logging.getLogger(__name__)

JOIN_TIMEOUT_S = 5.0
"""How long threads have to end. A stream is ended at once; only a request without an answer yet can take longer."""
POLL_S = 5.0
SHORT_WATCH_S = 1.0  # a watch that ends sooner than this, without an event, is of no use
MAX_SHORT_WATCHES = 5  # after so many of them in a row the informer polls
RECONNECT_S = 1.0

_LOG_LINE = re.compile(r"(\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d)(?:\.(\d{1,9}))?(Z|[+-]\d\d:\d\d)(?: (.*))?", re.DOTALL)


@dataclass(frozen=True)
class ThreadEnded:
    """A thread returned or failed."""

    name: str
    error: Exception | None = None


class ReaderThreads:
    """Threads and their streams. A context manager: after it none of them runs."""

    def __init__(self, retry: ApiRetry, publish: Callable[[Change | LogLine | ThreadEnded], None]) -> None:
        """Prepare; `retry` repeats the threads' requests, and stopping it ends their waits; `publish` takes what they read, in each."""
        self.retry, self.publish = retry, publish
        self._threads: list[threading.Thread] = []
        self._streams: set[Stream] = set()
        self._lock = threading.Lock()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.retry.stop()
        with self._lock:
            for stream in self._streams:
                stream.end()
        deadline = time.monotonic() + JOIN_TIMEOUT_S
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()))

    def start(self, name: str, target: Callable[[], None]) -> None:
        """Run a function in a thread until it returns, fails or is stopped."""

        def run() -> None:
            failure: Exception | None = None
            try:
                target()
            except RetryStopped:
                return
            except Exception as error:  # noqa: BLE001  # raised again in the thread that follows the job
                failure = error
            self.publish(ThreadEnded(name, failure))

        # A daemon, since a request without an answer must not keep the process from ending.
        thread = threading.Thread(target=run, name=name, daemon=True)
        self._threads.append(thread)
        thread.start()

    @contextmanager
    def open(self, stream: Stream) -> Iterator[Stream]:
        """Close a stream after the block, and end it when all threads are to end, in which case `RetryStopped` is raised."""
        with stream:
            # Under the lock, so that a stream is either refused here or ended by `__exit__`.
            with self._lock:
                self.retry.wait(0)
                self._streams.add(stream)
            try:
                yield stream
            finally:
                with self._lock:
                    self._streams.discard(stream)


@dataclass(frozen=True)
class Change:
    """An object was created, changed or deleted."""

    resource: Resource
    object: dict[str, Any]
    deleted: bool = False


class Informer:
    """Lists objects, then watches from there; lists again when the watch breaks; polls where a watch is not possible."""

    def __init__(self, cluster: Cluster, resource: Resource, threads: ReaderThreads, **selectors: str) -> None:
        self._cluster, self._resource, self._threads = cluster, resource, threads
        self._selectors = selectors
        self._known: dict[str, dict[str, Any]] = {}  # the objects at the last list or event, by uid
        self._short_watches, self._polling = 0, False

    def run(self) -> None:
        """Publish changes until stopped; a `ClusterError` if the objects cannot be listed, or the API server was away for too long."""
        while True:
            version = self._list()
            while version and not self._polling:
                version = self._watch(version)
            if self._polling:
                self._threads.retry.wait(POLL_S)

    def _list(self) -> str:
        """Publish the changes since the last list or event, and return the resource version to watch from."""
        listing = self._threads.retry(lambda: self._cluster.list(self._resource, **self._selectors))
        listed = {item["metadata"]["uid"]: item for item in listing["items"]}
        for uid, known in self._known.items():
            if uid not in listed:
                self._threads.publish(Change(self._resource, known, deleted=True))
        for uid, item in listed.items():
            if uid not in self._known or _version(item) != _version(self._known[uid]):
                self._threads.publish(Change(self._resource, item))
        self._known = listed
        return _version(listing)

    def _watch(self, version: str) -> str:
        """Publish changes from a version on, and return the version to continue from; empty: list again."""
        start, before = time.monotonic(), version
        try:
            with self._threads.open(self._cluster.watch(self._resource, version, **self._selectors)) as stream:
                for kind, item in watch_events(stream):
                    version = _version(item)
                    if kind != "BOOKMARK":  # which only brings a newer resource version
                        self._take(item, deleted=kind == "DELETED")
        except ForbiddenError:
            self._poll("watching them is not allowed")
        except ExpiredError:
            version = ""
        except ApiUnavailableError:
            self._threads.retry.wait(0)  # if stopped, the stream did not break but was ended
            version = ""
        if time.monotonic() - start >= SHORT_WATCH_S or version not in {"", before}:
            self._short_watches = 0
            return version
        self._short_watches += 1
        self._threads.retry.wait(0.1 * self._short_watches)
        if self._short_watches >= MAX_SHORT_WATCHES:
            self._poll("watches break at once")
        return version

    def _take(self, item: dict[str, Any], *, deleted: bool) -> None:
        self._known[item["metadata"]["uid"]] = item
        if deleted:
            del self._known[item["metadata"]["uid"]]
        self._threads.publish(Change(self._resource, item, deleted=deleted))

    def _poll(self, why: str) -> None:
        self._polling = True
        logger.warning("%s: %s, so they are listed every %g s", self._resource, why, POLL_S)


def _version(item: dict[str, Any]) -> str:
    return str(item["metadata"]["resourceVersion"])


@dataclass(frozen=True)
class LogLine:
    """A line that a replica wrote."""

    replica: str
    time: str  # RFC 3339; empty for a message of the node instead of a line
    text: str


class LogPosition:
    """How far a log was read.

    `sinceTime` has whole seconds, so lines come again after a reconnection; several lines may have the same time.
    Only repeated lines are left out: a clock that is set back loses nothing.
    """

    def __init__(self) -> None:
        self.time = ""  # RFC 3339 time of the last line
        self._nanoseconds, self._count = 0, 0
        self._repeating, self._skipped = False, 0
        self._node_message = ""

    def reopen(self) -> None:
        """Expect lines from `time` on, or from up to a second before it."""
        self._repeating, self._skipped = bool(self.time), 0

    def take(self, line: str) -> tuple[str, str] | None:
        """Return the time and the text of a line; None if it came before."""
        match = _LOG_LINE.fullmatch(line.rstrip("\r"))
        if not match:  # such as "unable to retrieve container logs", at every attempt
            new, self._node_message = line != self._node_message, line
            return ("", line) if new else None
        time, text = line.split(" ", 1)[0], match[4] or ""
        seconds = datetime.fromisoformat(f"{match[1]}{match[3]}").timestamp()
        nanoseconds = int(seconds) * 10**9 + int((match[2] or "").ljust(9, "0"))
        if self._repeating and self._came_before(nanoseconds):
            return None
        self._count = self._count + 1 if nanoseconds == self._nanoseconds and self.time else 1
        self.time, self._nanoseconds = time, nanoseconds
        return time, text

    def _came_before(self, nanoseconds: int) -> bool:
        if nanoseconds == self._nanoseconds and self._skipped < self._count:
            self._skipped += 1
            return True
        self._repeating = nanoseconds < self._nanoseconds
        return self._repeating


class LogReader:
    """Reads the containers of one replica, one after the other."""

    def __init__(self, replica: Replica, container: str, cluster: Cluster, threads: ReaderThreads) -> None:
        self._replica, self._container, self._cluster, self._threads = replica, container, cluster, threads
        self._position, self._changed = LogPosition(), threading.Condition()
        self._last_read: tuple[str, int] | None = None  # pod and restart count of the last container that was read
        self._complete = False  # whether that container had ended before its log was read to the end
        self._finishing = False

    def update(self, replica: Replica) -> None:
        """Continue with a new state of the replica's pod."""
        with self._changed:
            self._replica = replica
            self._changed.notify()

    def finish(self) -> None:
        """End when everything is read: no other container will start."""
        with self._changed:
            self._finishing = True
            self._changed.notify()

    @property
    def ends_by_itself(self) -> bool:
        """Whether no more lines will be written: the container has ended."""
        return self._replica.over or not self._replica.placed

    def run(self) -> None:
        """Publish lines until everything is read after `finish`, or until stopped; a `ClusterError` if the log cannot be read."""
        while replica := self._next():
            self._read(replica)

    def _next(self) -> Replica | None:
        """Wait for a container that has something to read; None: everything is read."""
        with self._changed:
            while True:
                self._threads.retry.wait(0)
                replica = self._replica
                if replica.placed and not (self._complete and self._last_read == (replica.uid, replica.restarts)):
                    return replica
                if self._finishing:
                    return None
                self._changed.wait(RECONNECT_S)

    def _read(self, replica: Replica) -> None:
        """Read a container's log until the stream ends, after the rest of the one that ran before it in the same pod."""
        if self._last_read is None or self._last_read[0] != replica.uid:
            self._position = LogPosition()
        elif self._last_read[1] < replica.restarts:
            self._stream(replica, previous=True)
        self._last_read = (replica.uid, replica.restarts)
        self._complete = self._stream(replica, previous=False) and replica.over
        with self._changed:
            if not self._complete and self._replica is replica and not self._finishing:
                self._changed.wait(RECONNECT_S)

    def _stream(self, replica: Replica, *, previous: bool) -> bool:
        """Publish the new lines of one response, and return whether the server ended it."""
        self._position.reopen()
        since = self._position.time
        try:
            stream = self._cluster.log(replica.pod, container=self._container, since=since, previous=previous)
            with self._threads.open(stream):
                # A log is requested by the pod's name; only now is it certain that the request did not reach a later pod.
                with suppress(NotFoundError):
                    if self._cluster.get(PODS, replica.pod)["metadata"]["uid"] != replica.uid:
                        return False
                for line in stream:
                    if taken := self._position.take(line):
                        self._threads.publish(LogLine(replica.name, *taken))
        except LogNotReadyError:
            return replica.over  # then it ended before it began
        except ApiUnavailableError:
            self._threads.retry.wait(0)  # if stopped, the stream did not break but was ended
            return False
        except NotFoundError:
            return True  # the pod was deleted, and its log with it
        return True
