"""Retries with exponential back-off, for the object store, MLflow and the API server of Kubernetes alike."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class Retry:
    """How long to wait between attempts: twice as long after each failure."""

    first_s: float
    """Longest wait after the first failure, in seconds."""
    longest_s: float
    """No wait is longer, in seconds."""
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
        """Attempt an action until it returns, and return that.

        Args:
            action: has no effect that a repetition would spoil.
            failed: gets the error of each failed attempt and its number, from 1 on; raises where another attempt cannot help.
            sleep: waits for a number of seconds; `time.sleep` where not given.
        """
        attempt = 0
        while True:
            attempt += 1
            try:
                return action()
            except Exception as error:  # noqa: BLE001  # `failed` decides which errors end the attempts
                failed(error, attempt)
            (sleep or time.sleep)(self.wait_s(attempt))
