"""What the time before a training's first step goes into."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

from trainer.host import seconds_since_launch, started_unix

IMPORTED_UNIX = time.time()
"""When torch and most of the trainer were loaded, by whom this module is loaded last."""


class Startup:
    """Splits the time from the launch of the job, or else the start of the process, to a training's recording into parts."""

    _imports_counted = False

    def __init__(self) -> None:
        """Begin; the first of a process counts its imports too."""
        self._parts: dict[str, float] = {}
        self._began_unix = time.time()
        if not Startup._imports_counted:
            started = started_unix()
            launching = seconds_since_launch() - (time.time() - started)
            # What lies between the imports and here is left out: an interpreter may have waited for a person.
            self._parts = {"launch": max(0.0, launching), "imports": max(0.0, IMPORTED_UNIX - started)}
            Startup._imports_counted = True
        self._counted = 0.0

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        """Count a block for a part of the start-up, such as `fetch` or `join`."""
        began = time.time()
        yield
        seconds = max(0.0, time.time() - began)
        self._parts[name] = self._parts.get(name, 0.0) + seconds
        self._counted += seconds

    def until(self, recording_unix: float) -> dict[str, float]:
        """Seconds of each part before the recording began; what no part covers is `preparation`."""
        return self._parts | {"preparation": max(0.0, recording_unix - self._began_unix - self._counted)}

    def begin_again(self) -> None:
        """A training has ended; what follows prepares the next one."""
        self._parts, self._counted, self._began_unix = {}, 0.0, time.time()
