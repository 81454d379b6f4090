"""Ends a training that hangs, which the training's own thread cannot."""

from __future__ import annotations

import signal
import sys
import threading
import time
from collections.abc import Callable
from types import FrameType, TracebackType
from typing import Any, NoReturn, Self

from trainer.errors import TrainingError

_SIGNAL = signal.SIGUSR1
_OWN = "trainer."


class HangWatchdog:
    """Calls `on_hang` once if it was not reset for too long; a thread of its own waits for that.

    It can end what hangs where Python waits, for a loader process, a file or a lock: a signal interrupts the main thread. Where torch
    waits, for a device or another process, torch's own limits end it.
    """

    def __init__(
        self, seconds: float, *, paused: Callable[[], bool], on_hang: Callable[[float, str], str], ends: bool
    ) -> None:
        """Around what the current thread does.

        Args:
            seconds: how long without a reset is too long.
            paused: whether the time does not count at the moment.
            on_hang: takes the seconds since the last reset and where the thread is; gives the message for its end. Called in the watchdog's
                thread.
            ends: whether to end what hangs; only the main thread can be ended.
        """
        self._seconds, self._paused, self._on_hang = seconds, paused, on_hang
        self._watched = threading.current_thread()
        self._ends = ends and self._watched is threading.main_thread()
        self._seen = time.monotonic()
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._wait, name="hang-watchdog", daemon=True)
        self._message = f"ended by {_SIGNAL.name}"
        self._before: Any = None

    def __enter__(self) -> Self:
        if self._ends:
            self._before = signal.signal(_SIGNAL, self._end)
        self._seen = time.monotonic()
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._closing.set()
        self._thread.join()
        if self._ends:
            signal.signal(_SIGNAL, self._before or signal.SIG_DFL)

    def reset(self) -> None:
        """Begin to count anew: the training is alive."""
        self._seen = time.monotonic()

    def _wait(self) -> None:
        while not self._closing.wait(self._seconds / 10):
            if self._paused():
                self.reset()
                continue
            silent = time.monotonic() - self._seen
            if silent > self._seconds:
                self._message = self._on_hang(silent, _place(self._watched))
                break
        else:
            return
        if self._ends:
            signal.pthread_kill(self._watched.ident or 0, _SIGNAL)

    def _end(self, _number: int, _frame: FrameType | None) -> NoReturn:
        raise TrainingError(self._message)


def _place(thread: threading.Thread) -> str:
    """Where a thread is, in this project's code."""
    frame = sys._current_frames().get(thread.ident or 0)
    while frame is not None and not frame.f_globals.get("__name__", "").startswith(_OWN):
        frame = frame.f_back
    if frame is None:
        return "somewhere"
    return f"{frame.f_globals['__name__']}.{frame.f_code.co_qualname} (line {frame.f_lineno})"
