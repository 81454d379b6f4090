"""Writes one thing after the other in a thread of its own, while the training runs."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable

from trainer.devices.process_group import wait_limit_s
from trainer.io.errors import OutputError, StorageAwayError, StorageError

logger = logging.getLogger(__name__)

LAST_WAIT_S = 10.0
"""How long a training that fails waits for what is being written."""
MOST_FAILURES = 3
"""Failed writes in a row after which the training ends: it would lose more and more, and no one may be reading the log. Where a store is
away they come one after the other, so there it ends after the time that processes wait for one another."""
TRANSIENT = (OutputError, StorageError, OSError)
"""What may be better the next time: a full disk, a store that is away."""


class BackgroundWriter:
    """Runs one thing in the background; at most one is under way."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._thread: threading.Thread | None = None
        self._failures: list[Exception] = []  # of the last writes in a row
        self._failing_s = 0.0  # when the first of them failed

    def start(self, work: Callable[[], None], failed: str, *, counts: bool = False) -> None:
        """Begin something; what was begun before must have been waited for.

        A write `counts` where it fails in a way that may pass. What does not count is repeated anyway, so the log says nothing of it while
        the store is away.
        """
        # A daemon: a process that has to end at once leaves an unfinished checkpoint, which no reader accepts.
        self._thread = threading.Thread(target=self._run, args=(work, failed, counts), name="checkpoint", daemon=True)
        self._thread.start()

    def wait(self, seconds: float | None = None) -> bool:
        """Wait until nothing is under way, at most so long; gives whether that is so."""
        if self._thread is not None:
            self._thread.join(seconds)
            if self._thread.is_alive():
                return False
            self._thread = None
        return True

    @property
    def failure(self) -> Exception | None:
        """What the last write has failed with; none where it has not."""
        return self._failures[-1] if self._failures else None

    @property
    def gives_up(self) -> bool:
        """Whether the last write has failed in a way that ends the training, or too many in a row have."""
        if self.failure is None or len(self._failures) < MOST_FAILURES:
            return self.failure is not None and not isinstance(self.failure, TRANSIENT)
        lasts_s = time.monotonic() - self._failing_s
        return not isinstance(self.failure, StorageAwayError) or lasts_s > wait_limit_s()

    def _run(self, work: Callable[[], None], failed: str, counts: bool) -> None:
        try:
            work()
        except Exception as error:  # noqa: BLE001  # whatever it is, the thread that trains has to learn of it
            if counts or not isinstance(error, TRANSIENT):
                self._failing_s = self._failing_s if self._failures else time.monotonic()
                self._failures.append(error)
            is_first = counts and len(self._failures) == 1
            if is_first or not isinstance(error, StorageAwayError):  # that the store is away has been said
                logger.warning("%s  %s: %s", self._name, failed, error)
        else:
            if counts:
                self._failures.clear()
