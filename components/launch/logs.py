"""The log of a replica: every line once, however often the connection breaks, the container restarts or the pod is replaced."""

from __future__ import annotations

import re
import threading
from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime

from components.launch.api_errors import PODS, ApiUnavailableError, LogNotReadyError, NotFoundError
from components.launch.client import Cluster
from components.launch.readers import Readers
from components.launch.replicas import Replica

RECONNECT_S = 1.0
_TIME = re.compile(r"(\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d)(?:\.(\d{1,9}))?(Z|[+-]\d\d:\d\d)(?: (.*))?", re.DOTALL)


@dataclass(frozen=True)
class Line:
    """A line that a replica wrote."""

    replica: str
    time: str
    """RFC 3339; empty for what the node says in the place of a line."""
    text: str


class Position:
    """How far a log was read.

    The server knows `sinceTime` in whole seconds, so lines come again after a reconnection; several lines may have the same time.
    Only what comes again is left out: a clock that is set back loses nothing.
    """

    def __init__(self) -> None:
        self.time = ""
        """Of the last line."""
        self._nanoseconds, self._count = 0, 0
        self._again, self._skipped = False, 0
        self._remark = ""

    def reopen(self) -> None:
        """What comes next begins anew at `time`, or up to a second before it."""
        self._again, self._skipped = bool(self.time), 0

    def take(self, line: str) -> tuple[str, str] | None:
        """Time and text of a line; None if it came before."""
        match = _TIME.fullmatch(line.rstrip("\r"))
        if not match:  # such as "unable to retrieve container logs", at every attempt
            new, self._remark = line != self._remark, line
            return ("", line) if new else None
        time, text = line.split(" ", 1)[0], match[4] or ""
        moment = _nanoseconds(match)
        if self._again and self._came_before(moment):
            return None
        self._count = self._count + 1 if moment == self._nanoseconds and self.time else 1
        self.time, self._nanoseconds = time, moment
        return time, text

    def _came_before(self, moment: int) -> bool:
        if moment == self._nanoseconds and self._skipped < self._count:
            self._skipped += 1
            return True
        self._again = moment < self._nanoseconds
        return self._again


def _nanoseconds(match: re.Match[str]) -> int:
    seconds = datetime.fromisoformat(f"{match[1]}{match[3]}").timestamp()
    return int(seconds) * 10**9 + int((match[2] or "").ljust(9, "0"))


class LogReader:
    """Reads the containers of one replica, one after the other."""

    def __init__(
        self, replica: Replica, container: str, cluster: Cluster, readers: Readers, publish: Callable[[Line], None]
    ) -> None:
        self._replica, self._container, self._cluster = replica, container, cluster
        self._readers, self._publish = readers, publish
        self._position, self._changed = Position(), threading.Condition()
        self._read: tuple[str, int] | None = None
        """Pod and restart of the last container of which something was read."""
        self._complete = False
        """Whether that container had ended before its log was read to the end."""
        self._finishing = False

    def see(self, replica: Replica) -> None:
        """The replica's pod has changed."""
        with self._changed:
            self._replica = replica
            self._changed.notify()

    def finish(self) -> None:
        """Nothing new will start: end when everything is read."""
        with self._changed:
            self._finishing = True
            self._changed.notify()

    @property
    def ends_by_itself(self) -> bool:
        """Whether there is nothing to wait for: the container has ended."""
        return self._replica.over or not self._replica.placed

    def run(self) -> None:
        """Publish lines until everything is read after `finish`, or until stopped.

        Raises:
            ClusterError: the log cannot be read.
        """
        while replica := self._next():
            self._follow(replica)

    def _next(self) -> Replica | None:
        """Wait for a container of which there is something to read; None: all is read."""
        with self._changed:
            while True:
                self._readers.retry.wait(0)
                replica = self._replica
                if replica.placed and not (self._complete and self._read == _container(replica)):
                    return replica
                if self._finishing:
                    return None
                self._changed.wait(RECONNECT_S)

    def _follow(self, replica: Replica) -> None:
        """Read a container's log until the stream ends, after the rest of the one that ran before it in the same pod."""
        if self._read is None or self._read[0] != replica.uid:
            self._position = Position()
        elif self._read[1] < replica.restarts:
            self._stream(replica, previous=True)
        self._read = _container(replica)
        self._complete = self._stream(replica, previous=False) and replica.over
        if not self._complete:
            self._wait_for_change(replica)

    def _stream(self, replica: Replica, *, previous: bool) -> bool:
        """Publish the new lines of one answer; gives whether the server ended it."""
        self._position.reopen()
        try:
            stream = self._cluster.log(
                replica.pod, container=self._container, since=self._position.time, previous=previous
            )
            with self._readers.reading(stream):
                if self._is_of_another_pod(replica):
                    return False
                for line in stream:
                    taken = self._position.take(line)
                    if taken:
                        self._publish(Line(replica.name, *taken))
        except LogNotReadyError:
            return replica.over  # then it ended before it began
        except ApiUnavailableError:
            self._readers.retry.wait(0)  # stopped: the stream did not break, it was ended
            return False
        except NotFoundError:
            return True  # the pod was deleted, and its log with it
        return True

    def _is_of_another_pod(self, replica: Replica) -> bool:
        """Whether a pod's place was taken by a new one of the same name, whose log this would be."""
        try:
            pod = self._cluster.get(PODS, replica.pod)
        except NotFoundError:
            return False
        return bool(pod["metadata"]["uid"] != replica.uid)

    def _wait_for_change(self, replica: Replica) -> None:
        with self._changed:
            if self._replica is replica and not self._finishing:
                self._changed.wait(RECONNECT_S)


def _container(replica: Replica) -> tuple[str, int]:
    return replica.uid, replica.restarts
