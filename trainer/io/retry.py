"""Retries with exponential back-off and the log of outages, for every server: object store, MLflow, Kubernetes, Kubeflow Pipelines."""

from __future__ import annotations

import logging
import random
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class Retry:
    """How long to wait between attempts: twice as long after each failure."""

    first_s: float  # longest wait after the first failure, in seconds
    longest_s: float  # no wait is longer, in seconds
    jitter: float = 0.0
    """Share of a wait that is drawn at random, so that many clients do not come back at the same moment."""

    def wait_s(self, failures: int) -> float:
        """Return how long to wait after so many failures in a row, at least one, in seconds."""
        # The exponent is bounded, since a float cannot hold 2^1024.
        longest = min(self.first_s * 2.0 ** min(failures - 1, 100), self.longest_s)
        return longest * random.uniform(1 - self.jitter, 1) if self.jitter else longest

    def __call__(
        self,
        action: Callable[[], T],
        *,
        failed: Callable[[Exception, int], None],
        sleep: Callable[[float], object] | None = None,
    ) -> T:
        """Attempt an action, which must be repeatable, until it returns, and return its result.

        `failed` gets the error and the number, from 1 on, of each failed attempt, and raises where another cannot help.
        """
        attempt = 0
        while True:
            attempt += 1
            try:
                return action()
            except Exception as error:  # noqa: BLE001  # `failed` decides which errors end the attempts
                failed(error, attempt)
            (sleep or time.sleep)(self.wait_s(attempt))


_QUIET_S = 60.0
_LONG_S = 10.0


class Outage:
    """A server that is away: logged once when it goes and once when it is back, for all threads together.

    An outage within a minute after one that was logged is only counted, unless it lasts ten seconds: a server that throttles would fill the
    log.
    """

    def __init__(self, server: str | Callable[[], str], logger: logging.Logger, *, tolerated: int = 0) -> None:
        """Name the server for the log, which takes both messages; so many failures in a row are not yet an outage."""
        self._server, self._logger, self._tolerated = server, logger, tolerated
        self._lock = threading.Lock()
        self._failing: set[object] = set()
        self.failures = 0  # failed attempts since the last answer
        self._since = 0.0
        self._ended: float | None = None
        self._is_logged = False
        self._quiet_until = 0.0
        self._not_logged = 0  # outages since the last one that was

    @property
    def is_away(self) -> bool:
        """Whether more attempts than tolerated have failed since the last answer."""
        return self.failures > self._tolerated

    @property
    def back_for_s(self) -> float:
        """Seconds since the last outage ended; infinite if there was none."""
        return float("inf") if self._ended is None else time.monotonic() - self._ended

    def failed(self, message: str, request: object = None) -> float:
        """Count a failed attempt; log the message, unless empty, once an outage. Returns the seconds since the first failure."""
        now = time.monotonic()
        with self._lock:
            self._failing.add(request)
            self.failures += 1
            if self.failures == 1:
                self._since = now
            lasted = now - self._since
            if self.is_away and message and not self._is_logged and (now >= self._quiet_until or lasted >= _LONG_S):
                others = f" ({self._not_logged} short outages were not logged)" if self._not_logged else ""
                self._logger.warning("%s%s", message, others)
                self._is_logged, self._not_logged = True, 0
            return lasted

    def ended(self, request: object = None, *, answered: bool = True) -> None:
        """Note that a request has ended; if it was answered the server is back, unless other requests still fail."""
        with self._lock:
            self._failing.discard(request)
            if not answered or self._failing:
                return
            if self.is_away:
                self._ended = time.monotonic()
                if self._is_logged:
                    server = self._server if isinstance(self._server, str) else self._server()
                    self._logger.warning("%s answers again after %.0f s", server, self._ended - self._since)
                    self._is_logged, self._quiet_until = False, self._ended + _QUIET_S
                else:
                    self._not_logged += 1
            self.failures = 0
