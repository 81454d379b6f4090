"""A watchdog for collectives: every wait for the other processes has a limit, and its error names who is missing from what.

Torch ends a collective that takes too long, but says neither what it was for nor who is missing. So each process notes in the store, which
all of them reach, which collective it has reached; those that waited in vain read who has not.
"""

from __future__ import annotations

import json
import logging
import os
import re
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar

from torch.distributed import DistError, Store  # type: ignore[attr-defined]  # public, torch documents them

from trainer.config import WAIT_VARIABLE
from trainer.errors import LostProcessError, SettingsError

logger = logging.getLogger(__name__)

T = TypeVar("T")

DEFAULT_WAIT_S = 600.0
_ROLL_CALL_S = 3.0
"""How long a process that has waited in vain waits for the others to say the same."""
_STORE_S = 10.0
"""How long the store may take to say who came."""

_GAVE_UP = re.compile(r"[Tt]imed out|[Tt]imeout")
_FROM_TORCH = re.compile(r"gloo|NCCL|c10d|[Ss]tore|Connection (closed|reset)|Broken pipe")
_PLACE = re.compile(r"^\[\S+:\d+\] ")
"""Where in its source torch has failed."""


def wait_limit_s() -> float:
    """Return how long a process waits for the others before it gives up, in seconds.

    Raises:
        SettingsError: `TRAINER_WAIT_S` is not a number above 0.
    """
    text = os.environ.get(WAIT_VARIABLE) or str(DEFAULT_WAIT_S)
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not 0 < seconds < float("inf"):
        raise SettingsError(f"{WAIT_VARIABLE} must be a number of seconds above 0, got {text!r}")
    return seconds


class CollectiveWatchdog:
    """The collectives of one process with all others, in their order."""

    def __init__(self, store: Store, *, rank: int, world_size: int, limit_s: float) -> None:
        self._store, self._rank, self._world_size, self._limit_s = store, rank, world_size, limit_s
        self._number = 0

    @contextmanager
    def collective(self, what: str) -> Iterator[None]:
        """Note that this process has reached a collective, in which the block waits for the others."""
        self._number += 1
        try:
            self._note()
            yield
        except RuntimeError as error:
            self._raise_lost(what, error)
            raise

    @contextmanager
    def waiting(self, what: str) -> Iterator[None]:
        """Guard a wait as `collective` does, in every step: nothing is noted unless it fails."""
        try:
            yield
        except RuntimeError as error:
            self._number += 1
            self._raise_lost(what, error)
            raise

    def _note(self, *, gave_up: bool = False) -> None:
        self._store.set(str(self._rank), json.dumps([self._number, gave_up]))

    def _raise_lost(self, what: str, error: RuntimeError) -> None:
        """Turn torch's error about the other processes into one that names those who are missing; any other error is left.

        Raises:
            LostProcessError: it is one.
        """
        reason = next(iter(str(error).splitlines()), type(error).__name__)
        if not isinstance(error, DistError) and not _FROM_TORCH.search(reason):
            return
        reason = _PLACE.sub("", reason).partition(". ")[0]
        roll = _within(_STORE_S, lambda: self._call_the_roll(gave_up=bool(_GAVE_UP.search(reason))))
        raise LostProcessError(_message(what, reason, roll, self._limit_s)) from error

    def _call_the_roll(self, *, gave_up: bool) -> tuple[list[int], bool]:
        """Return the ranks that have not come as far as this process, and whether somebody has waited for them to the limit.

        The others get some time to say that they have waited in vain too. Where none has, those that are missing are gone.
        """
        self._note(gave_up=gave_up)
        deadline = time.monotonic() + _ROLL_CALL_S
        while True:
            notes = [
                json.loads(self._store.get(str(rank))) if self._store.check([str(rank)]) else (0, False)
                for rank in range(self._world_size)
            ]  # the number of the last collective that each has reached, and whether it gave that up
            missing = [rank for rank, (number, _) in enumerate(notes) if number < self._number]
            if not missing or time.monotonic() > deadline:
                return missing, any(given_up for _, given_up in notes)
            time.sleep(0.1)


def _message(what: str, reason: str, roll: tuple[list[int], bool] | None, limit_s: float) -> str:
    if roll is None:
        return f"{what}: {reason}; who is missing is not known, for the processes' rendezvous does not answer either"
    missing, gave_up = roll
    if not missing:
        return f"{what}: all processes came, but lost each other ({reason}); look at the network between the machines"
    who = f"rank{'s' if len(missing) > 1 else ''} {', '.join(map(str, missing))}"
    if gave_up:
        return f"{who} did not come to {what} within {limit_s:g} s; the log there may say why"
    return f"{who} went away during {what} ({reason})"


def _within(seconds: float, work: Callable[[], T]) -> T | None:
    """Return the result of `work`; None where it fails for want of the store, or takes longer, and is then left to itself."""
    results: list[T] = []

    def run() -> None:
        try:
            results.append(work())
        except RuntimeError as error:
            logger.warning("the processes' rendezvous: %s", error)

    thread = threading.Thread(target=run, name="roll-call", daemon=True)
    thread.start()
    thread.join(seconds)
    return results[0] if results else None
