"""Requests to end, by SIGTERM or Ctrl-C: followed at once, or when the moment is right."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType, TracebackType
from typing import Any, NoReturn, Self

AGAIN_S = 1.0
"""A signal this many seconds after the first one is a second request; sooner, it may be the same request by another way."""


class Terminated(KeyboardInterrupt):
    """SIGTERM came, by which schedulers and other programs end a process."""


@contextmanager
def ended_by_sigterm() -> Iterator[None]:
    """Let SIGTERM end the block as Ctrl-C does, by `Terminated`.

    After the block the signal does what it did before, so that the interpreter's own end is not interrupted with a traceback.
    """
    before = signal.signal(signal.SIGTERM, _interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _interrupt(number: int, _frame: FrameType | None) -> NoReturn:
    raise Terminated if number == signal.SIGTERM else KeyboardInterrupt


class EndRequest:
    """A request to end that can wait for the right moment. A second one, more than `AGAIN_S` later, never waits.

    with EndRequest() as request:
        prepare()                # ends at once
        request.defer()
        while not request.came:  # only noted from here on
            step()
    """

    def __init__(self) -> None:
        """Begin without a request; signals reach this object while `with` is open."""
        self.came = False
        """Whether this process was asked to end."""
        self._deferred = False
        self._came_s = 0.0
        self._before: dict[signal.Signals, Any] = {}

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():  # Python delivers signals to no other thread
            for number in (signal.SIGTERM, signal.SIGINT):
                self._before[number] = signal.signal(number, self._handle)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Restore the signals' former handlers; a request that the block has not followed ends it now."""
        for number, handler in self._before.items():
            signal.signal(number, handler)
        if error is None and self.came:
            raise Terminated

    def defer(self) -> None:
        """Only note a first request from here on."""
        self._deferred = True

    def _handle(self, number: int, frame: FrameType | None) -> None:
        now = time.monotonic()
        again = self.came and now - self._came_s > AGAIN_S
        if not self.came:
            self.came, self._came_s = True, now
        if again or not self._deferred:
            _interrupt(number, frame)
