"""A container's log, as the kubelet keeps and serves it."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

_HEARTBEAT_S = 0.1
_NANOSECONDS = 1_000_000_000


@dataclass(frozen=True, kw_only=True)
class LogQuery:
    """Which lines of which container are wanted, and how."""

    container: str = ""
    previous: bool = False
    """Of the start before this one."""
    follow: bool = False
    timestamps: bool = False
    tail_lines: int | None = None
    since_ns: int = 0
    """Lines written before this time since the epoch are not wanted."""


def log_query(query: Mapping[str, str]) -> LogQuery:
    """The query of a request."""
    flags = {name: query.get(name, "").lower() == "true" for name in ("previous", "follow", "timestamps")}
    since = 0
    if "sinceSeconds" in query:
        since = time.time_ns() - int(query["sinceSeconds"]) * _NANOSECONDS
    tail = int(query["tailLines"]) if "tailLines" in query else None
    return LogQuery(container=query.get("container", ""), tail_lines=tail, since_ns=since, **flags)


class Log:
    """Lines with the time at which they were written."""

    def __init__(self) -> None:
        self._lines: list[tuple[int, str]] = []
        self._ended = False
        self._changed = threading.Condition()

    def write(self, line: str) -> None:
        with self._changed:
            self._lines.append((time.time_ns(), line))
            self._changed.notify_all()

    def end(self) -> None:
        """Nothing more will be written; those that follow have reached the end."""
        with self._changed:
            self._ended = True
            self._changed.notify_all()

    def tail(self, lines: int) -> str:
        with self._changed:
            return "\n".join(text for _, text in self._lines[-lines:])

    def read(self, query: LogQuery) -> Iterator[bytes]:
        """The lines that are wanted, each with its line break; without end if they are followed.

        Who follows gets an empty piece now and then.
        """
        place = self._first(query)
        while True:
            with self._changed:
                if query.follow and not self._ended and place == len(self._lines):
                    self._changed.wait(_HEARTBEAT_S)
                lines, ended = self._lines[place:], self._ended or not query.follow
            place += len(lines)
            stamps = [f"{rfc3339(written)} " if query.timestamps else "" for written, _ in lines]
            yield "".join(f"{stamp}{text}\n" for stamp, (_, text) in zip(stamps, lines, strict=True)).encode()
            if ended:
                return

    def _first(self, query: LogQuery) -> int:
        """Index of the first wanted line."""
        with self._changed:
            count = len(self._lines)
            first = next((place for place, (written, _) in enumerate(self._lines) if written >= query.since_ns), count)
            return first if query.tail_lines is None else max(first, count - query.tail_lines)


def rfc3339(nanoseconds: int) -> str:
    """A time since the epoch as the log shows it: `2026-01-31T12:00:00.000000001Z`."""
    seconds, rest = divmod(nanoseconds, _NANOSECONDS)
    return f"{time.strftime('%Y-%m-%dT%H:%M:%S', time.gmtime(seconds))}.{rest:09d}Z"
