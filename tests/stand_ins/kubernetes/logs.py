"""A container's log, as the kubelet keeps and serves it."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Mapping
from datetime import datetime

_HEARTBEAT_S = 0.1
_NANOSECONDS = 1_000_000_000


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

    def read(self, query: Mapping[str, str]) -> Iterator[bytes]:
        """The lines that a request for a log wants, each with its line break; without end if it follows.

        A request that follows gets an empty piece now and then.
        """
        with_time, follow = query.get("timestamps") == "true", query.get("follow") == "true"
        place = self._first(query)
        while True:
            with self._changed:
                lines = self._lines[place:]
                if not lines and follow and not self._ended:
                    self._changed.wait(_HEARTBEAT_S)
                    lines = self._lines[place:]
                ended = not lines and (self._ended or not follow)
            place += len(lines)
            yield "".join(
                f"{rfc3339(written)} {text}\n" if with_time else f"{text}\n" for written, text in lines
            ).encode()
            if ended:
                return

    def _first(self, query: Mapping[str, str]) -> int:
        """Index of the first wanted line. `sinceTime` counts in whole seconds: the real server cuts its fraction off."""
        since = 0
        if "sinceTime" in query:
            since = int(datetime.fromisoformat(query["sinceTime"]).timestamp()) * _NANOSECONDS
        if "sinceSeconds" in query:
            since = time.time_ns() - int(query["sinceSeconds"]) * _NANOSECONDS
        with self._changed:
            first = next(
                (place for place, (written, _) in enumerate(self._lines) if written >= since), len(self._lines)
            )
            tail = int(query["tailLines"]) if "tailLines" in query else len(self._lines)
            return max(first, len(self._lines) - tail)


def rfc3339(nanoseconds: int) -> str:
    """A time since the epoch as the log shows it: `2026-01-31T12:00:00.000000001Z`."""
    seconds, rest = divmod(nanoseconds, _NANOSECONDS)
    return f"{time.strftime('%Y-%m-%dT%H:%M:%S', time.gmtime(seconds))}.{rest:09d}Z"
