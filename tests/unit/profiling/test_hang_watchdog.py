"""Telling of what hangs; every wait here ends by the alarm or by a limit that no machine reaches."""

from __future__ import annotations

import signal
import threading
import time

import pytest

from trainer.errors import TrainingError
from trainer.profiling.hang_watchdog import HangWatchdog

LIMIT_S = 120


class Bell:
    """Keeps what an alarm tells, and answers with a message."""

    def __init__(self, message: str = "") -> None:
        self.rung, self.message = threading.Event(), message
        self.told: list[tuple[float, str]] = []

    def __call__(self, seconds: float, place: str) -> str:
        self.told.append((seconds, place))
        self.rung.set()
        return self.message


def test_it_rings_once_and_says_how_long_and_where() -> None:
    bell = Bell()
    with HangWatchdog(0.05, paused=lambda: False, on_hang=bell, ends=False):
        assert bell.rung.wait(LIMIT_S)
        time.sleep(0.2)
    ((seconds, place),) = bell.told
    assert seconds > 0.05
    assert place == "somewhere", "this test is none of the trainer's code"


def test_a_waiting_main_thread_is_ended_with_the_message() -> None:
    before = signal.getsignal(signal.SIGUSR1)
    began = time.monotonic()
    watchdog = HangWatchdog(0.05, paused=lambda: False, on_hang=Bell("it hangs"), ends=True)
    with pytest.raises(TrainingError, match=r"^it hangs$"), watchdog:
        threading.Event().wait(LIMIT_S)
    assert time.monotonic() - began < LIMIT_S
    assert signal.getsignal(signal.SIGUSR1) == before


def test_what_is_excused_rings_nothing() -> None:
    bell, excuses = Bell(), []
    with HangWatchdog(0.01, paused=lambda: excuses.append(1) is None, on_hang=bell, ends=True):
        while len(excuses) < 20:
            time.sleep(0.01)
    assert not bell.told


def test_signs_of_life_put_it_off() -> None:
    bell = Bell()
    began = time.monotonic()
    with HangWatchdog(5, paused=lambda: False, on_hang=bell, ends=True) as watchdog:
        for _ in range(3):
            time.sleep(0.1)
            watchdog.reset()
    assert not bell.told
    assert time.monotonic() - began < LIMIT_S, "leaving does not wait for the alarm"


def test_in_another_thread_it_tells_but_ends_nothing() -> None:
    bell = Bell("it hangs")

    def hang() -> None:
        with HangWatchdog(0.05, paused=lambda: False, on_hang=bell, ends=True):
            assert bell.rung.wait(LIMIT_S)

    thread = threading.Thread(target=hang)
    thread.start()
    thread.join()
    assert len(bell.told) == 1
