"""Trying again while the API server is away."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from typing import TypeVar

from components.launch.refusals import AwayError, LoginError

logger = logging.getLogger(__name__)

FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.2, 10.0
SETTLE_S = 10.0
"""How long after its return it takes until all that was missed is known."""

Result = TypeVar("Result")


class Stopped(Exception):  # noqa: N818  # no error: whoever waits was asked to end
    """Waiting was ended by `Patience.stop`."""


class Patience:
    """Does something, again and again while the API server is away.

    All threads that follow a job share one, so loss and return are told once, and the limit counts from the loss.
    """

    def __init__(self, limit_s: float) -> None:
        self._limit_s, self._stop, self._lock = limit_s, threading.Event(), threading.Lock()
        self._failures, self._lost_at, self._back_at = 0, 0.0, -SETTLE_S
        self._known = False

    def stop(self) -> None:
        """End all waiting."""
        self._stop.set()

    @property
    def stopped(self) -> bool:
        return self._stop.is_set()

    @property
    def settled(self) -> bool:
        """Whether the API server answers, and has for a while: what it has not told did not happen."""
        with self._lock:
            return self._failures < 2 and time.monotonic() - self._back_at >= SETTLE_S

    def pause(self, seconds: float) -> None:
        """Wait.

        Raises:
            Stopped: `stop` was called.
        """
        if self._stop.wait(seconds):
            raise Stopped

    def __call__(self, action: Callable[[], Result]) -> Result:
        """Do it until the API server answers.

        Raises:
            AwayError: it was away for longer than the limit; or it has never known who is asking.
            Stopped: `stop` was called.
        """
        pause_s = FIRST_PAUSE_S
        while True:
            self.pause(0)
            try:
                result = action()
            except AwayError as error:
                self._failed(error)
                self.pause(pause_s)
                pause_s = min(2 * pause_s, LONGEST_PAUSE_S)
            else:
                self._answered()
                return result

    def _failed(self, error: AwayError) -> None:
        with self._lock:
            if isinstance(error, LoginError) and not self._known:
                raise error
            self._failures += 1
            # One failure is often a kept connection that the server has closed; the next request opens another.
            if self._failures == 1:
                self._lost_at = time.monotonic()
            elif self._failures == 2:
                logger.warning("%s; waiting for it, %s at most", error, duration(self._limit_s))
            if time.monotonic() - self._lost_at >= self._limit_s:
                raise error

    def _answered(self) -> None:
        with self._lock:
            if self._failures > 1:
                self._back_at = time.monotonic()
                logger.warning("the API server answers again after %s", duration(self._back_at - self._lost_at))
            self._failures, self._known = 0, True


def duration(seconds: float) -> str:
    """A time for people: `5 s`, `3 min`, `2.5 h`."""
    for unit, size in (("h", 3600), ("min", 60)):
        if seconds >= 2 * size:
            return f"{round(seconds / size, 1):g} {unit}"
    return f"{seconds:.3g} s"
