"""The threads that read one job from the API server: two watch the job and its pods, one follows the log of the first replica.

They only publish what they read. Whatever breaks meanwhile, the last state of an object and every line are published at least once.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Self

import urllib3

from components.launch.client import (
    ApiRetry,
    ApiUnavailableError,
    Cluster,
    ClusterError,
    ForbiddenError,
    LogNotReadyError,
    NotFoundError,
    Opened,
    RetryStopped,
)
from components.launch.job_manifest import Resource
from components.launch.job_progress import Replica

logger = logging.getLogger(__name__)

JOIN_TIMEOUT_S = 5.0
"""How long threads have to end. A stream is ended at once; only a request without an answer yet can take longer."""
RELIST_S = 2.0  # pause after a watch has ended, before the objects are listed and watched again
RECONNECT_S = 1.0
CLOCK_MARGIN_S = 10  # a log is read again from so long before its last line, since a node's clock may differ from ours


@dataclass(frozen=True)
class Change:
    """What a list or a watch shows of objects."""

    resource: Resource
    kind: str  # LISTED: there are no others; or the type of a watch's event: ADDED, MODIFIED, DELETED
    objects: list[dict[str, Any]]


@dataclass(frozen=True)
class LogLine:
    """A line that a replica wrote."""

    replica: str
    text: str
    time: str = ""  # RFC 3339; empty for a message of the node instead of a line
    written: float | None = None  # the same in seconds since the epoch

    @classmethod
    def parse(cls, replica: str, line: str) -> Self:
        """Split a line of the API server."""
        begin, _, text = line.partition(" ")
        try:
            return cls(replica, text, begin, datetime.fromisoformat(begin).timestamp())
        except ValueError:
            return cls(replica, line)


@dataclass(frozen=True)
class ThreadEnded:
    """A thread returned or failed."""

    name: str
    error: Exception | None = None


@dataclass(frozen=True)
class LogState:
    """Whether the log that is followed can be read: it could not be before, or no longer can."""

    readable: bool


class LogPosition:
    """How far a log was read: after a lost connection it is read again from a while before, and what came before is left out."""

    def __init__(self) -> None:
        self._last: LogLine | None = None
        self._last_at = 0.0  # when it came, in monotonic seconds
        self._remark = ""  # the node's last message
        self._repeating = False

    @property
    def has_begun(self) -> bool:
        """Whether a line was read."""
        return self._last is not None

    def reopen(self) -> int | None:
        """Expect lines again; return how many seconds ago the first of them was written at most; None: all are wanted."""
        self._repeating = self._last is not None
        if self._last is None:
            return None
        return CLOCK_MARGIN_S + int(max(time.monotonic() - self._last_at, time.time() - (self._last.written or 0)))

    def take(self, line: LogLine) -> bool:
        """Return whether a line is new."""
        if line.written is None:  # such as "unable to retrieve container logs", at every attempt
            is_new, self._remark = line.text != self._remark, line.text
            return is_new
        if self._last and self._repeating and (line == self._last or line.written < (self._last.written or 0)):
            self._repeating = line != self._last  # all after the last one are new, whatever the node's clock does
            return False
        self._last, self._last_at, self._repeating = line, time.monotonic(), False
        return True


Published = Change | LogLine | LogState | ThreadEnded


class ReaderThreads:
    """Threads and their streams. A context manager: after it none of them runs."""

    def __init__(
        self,
        cluster: Cluster,
        retry: ApiRetry,
        publish: Callable[[Published], None],
    ) -> None:
        """Prepare; `retry` repeats the threads' requests, and stopping it ends their waits; `publish` takes what they read, in each."""
        self._cluster, self._retry, self._publish = cluster, retry, publish
        self._threads: list[threading.Thread] = []
        self._streams: list[urllib3.BaseHTTPResponse] = []
        self._lock = threading.Lock()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._retry.stop()
        with self._lock:
            for stream in self._streams:
                with suppress(RuntimeError, ValueError, OSError):  # it has ended already
                    stream.shutdown()  # wakes the thread that reads
        deadline = time.monotonic() + JOIN_TIMEOUT_S
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()))
        if not any(thread.is_alive() for thread in self._threads):  # a stream that is read cannot be closed
            for stream in self._streams:
                stream.close()  # where its reader failed, a traceback may hold it

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
            self._publish(ThreadEnded(name, failure))

        # A daemon, since a request without an answer must not keep the process from ending.
        thread = threading.Thread(target=run, name=name, daemon=True)
        self._threads.append(thread)
        thread.start()

    def opened(self, stream: urllib3.BaseHTTPResponse) -> None:
        """End a stream when all threads are to end; `RetryStopped` if they are already."""
        with self._lock:
            # Under the lock, so that a stream is either refused here or ended by `__exit__`.
            try:
                self._retry.wait(0)
            except RetryStopped:
                stream.close()
                raise
            self._streams = [*(one for one in self._streams if not one.closed), stream]

    def watch(self, resource: Resource, **selectors: str) -> None:
        """Publish objects and their changes until stopped.

        A `ClusterError` if they cannot be listed, or the API server was away for too long. Where they cannot be watched, they are listed
        again and again.
        """
        forbidden, version = False, ""

        def objects() -> dict[str, Any]:
            try:
                return self._cluster.list(resource, **selectors)
            except ForbiddenError as error:
                if not version:
                    raise
                # A server that has just started refuses what it allowed before, until it knows its own rules.
                raise ApiUnavailableError(str(error)) from error

        while True:
            listing = self._retry(objects)
            self._publish(Change(resource, "LISTED", listing["items"]))
            version = listing["metadata"]["resourceVersion"]
            try:
                lasted = RELIST_S
                while lasted >= RELIST_S:  # on from there without a gap, in which an object could change and be deleted
                    self._retry.wait(0)
                    began = time.monotonic()
                    for kind, item in self._cluster.watch(resource, version, self.opened, **selectors):
                        self._publish(Change(resource, kind, [item]))
                        version = item["metadata"]["resourceVersion"]
                    lasted = time.monotonic() - began
            except ForbiddenError:
                if not forbidden:
                    logger.warning("%s: watching is not allowed, so they are listed every %g s", resource, RELIST_S)
                forbidden = True
            except ClusterError:
                pass  # an expired version, a broken stream: the next list works, or raises the reason
            self._retry.wait(RELIST_S)

    def follow_log(self, first: Replica, container: str, current: Callable[[], Replica]) -> None:
        """Publish the lines of a replica's container until they are all read, or until stopped.

        A `ForbiddenError` if none may be read. `current` returns the replica's state as it is known now.
        """
        position, restarts, readable = LogPosition(), first.restarts, True

        def opened(stream: urllib3.BaseHTTPResponse) -> None:
            nonlocal readable
            self.opened(stream)
            if not readable:
                self._publish(LogState(readable=True))
            readable = True

        while True:
            replica = current()
            try:
                if replica.restarts > restarts:  # the container that ran before may have written more than was read
                    self._read_log(first, container, position, opened, previous=True)
                restarts = replica.restarts
                self._read_log(first, container, position, opened)
                if replica.over:
                    return
            except LogNotReadyError:
                if replica.over:
                    return
            except NotFoundError:
                return  # the pod was deleted, and its log with it
            except ClusterError as error:
                self._retry.wait(0)  # if stopped, the stream did not break but was ended
                if _is_final(error, replica, position):
                    raise
                if readable:
                    self._publish(LogState(readable=False))
                readable = False
            self._retry.wait(RECONNECT_S)

    def _read_log(
        self, replica: Replica, container: str, position: LogPosition, opened: Opened, *, previous: bool = False
    ) -> None:
        lines = self._cluster.log(
            replica.pod,
            opened,
            uid=replica.uid,
            container=container,
            since_s=position.reopen(),
            follow=not previous,
            previous=previous,
        )
        for line in lines:
            if position.take(parsed := LogLine.parse(replica.name, line)):
                self._publish(parsed)


def _is_final(error: ClusterError, replica: Replica, position: LogPosition) -> bool:
    """Return whether a log cannot be read later either: its node may only just have restarted, and refuse or not know its pods yet."""
    if isinstance(error, ForbiddenError):
        return not position.has_begun
    return replica.over and not isinstance(error, ApiUnavailableError)
