"""Writes one thing after the other in a thread of its own, while the training goes on."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

from trainer.errors import OutputError, StorageError

logger = logging.getLogger(__name__)

MOST_FAILURES = 3
"""Failed writes in a row after which the training ends: it would lose more and more, and nobody may be looking at the log."""

PASSING = (OutputError, StorageError, OSError)
"""What may be better the next time: a full disk, a store that is away."""


class Writer:
    """Runs one thing in the background; at most one is under way."""

    def __init__(self, name: str) -> None:
        """For the training `name`."""
        self._name = name
        self._thread: threading.Thread | None = None
        self._failures: list[Exception] = []
        """Of the last writes in a row."""

    def start(self, work: Callable[[], None], failed: str, *, counts: bool = False) -> None:
        """Begin something; what was begun before must have been waited for.

        Args:
            work: what is done.
            failed: what the log says where it fails.
            counts: whether it is a write, which counts where it fails in a way that may pass.
        """
        # A daemon: a process that has to end at once leaves an unfinished checkpoint, which nobody believes.
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
        return self.failure is not None and (
            len(self._failures) >= MOST_FAILURES or not isinstance(self.failure, PASSING)
        )

    def _run(self, work: Callable[[], None], failed: str, counts: bool) -> None:
        try:
            work()
        except Exception as error:  # noqa: BLE001  # whatever it is, the thread that trains has to hear of it
            if counts or not isinstance(error, PASSING):
                self._failures.append(error)
            logger.warning("%s  %s: %s", self._name, failed, error)
        else:
            if counts:
                self._failures.clear()
