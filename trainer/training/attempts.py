"""The attempts that a training has needed: each resumes from the checkpoint that the one before has left, and fences off those before it.

An attempt claims a number by making an object that must not be there yet. An attempt that was thought dead and comes back, from a network
cut or from being stopped, finds a higher number and ends; what it has written meanwhile stands beside what the later one writes, for the
number is part of each checkpoint's name, and the later one counts.

An attempt that fails notes at which step and with what message. If a later one fails at the same step in the same way, another would not
help, and the training ends for good, whatever else would have started it again.

What asks a store here raises `StorageError` where that does not answer or refuses.
"""

from __future__ import annotations

import json
import logging
import re
import time
import uuid
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Literal, Self

from pydantic import BaseModel, TypeAdapter, ValidationError

from trainer.devices.process_group import wait_limit_s
from trainer.io import storage
from trainer.io.errors import (
    LostProcessError,
    ObjectNotFoundError,
    PreemptedError,
    StorageAwayError,
    StorageError,
    SupersededError,
    TrainerError,
    TrainingError,
)
from trainer.profiling.evidence import AttemptRecord
from trainer.training.background import LAST_WAIT_S, BackgroundWriter

logger = logging.getLogger(__name__)

ATTEMPTS = "attempts.json"
FAILURE = "failure-"
"""Begins the name of the note of a process that failed; its rank follows."""
_LOCAL_INTERVAL_S, _REMOTE_INTERVAL_S = 5.0, 60.0
"""Least time between two heartbeats; in a store each takes some requests."""
_RECORDS = TypeAdapter(tuple[AttemptRecord, ...])
_VARIES = re.compile(r"0x[0-9a-f]+|\d+")
"""What differs between two messages of the same kind: addresses, process ids, sizes."""
_NUMBERED = re.compile(r"(?:generation-|\.?step-\d+-g)(\d+)$")
_CLAIM = "generation-"
_MOST_ATTEMPTS = 100
"""Others that may be faster in claiming a number."""


@dataclass(frozen=True, kw_only=True)
class Lease:
    """The number of an attempt, and the proof that it is this one's."""

    uri: str
    """Of the training's checkpoints."""
    number: int
    token: bytes

    def state(self) -> Literal["newest", "superseded", "gone"]:
        """Ask the store whether this is the newest attempt, or a later one has begun, or there is no claim at all.

        They may be gone because a later attempt has ended and removed them, or because the store has lost its objects; the training's
        output shows which.
        """
        names = storage.children(self.uri)
        if _highest(names) > self.number:
            return "superseded"
        try:
            claimed = storage.read_bytes(self._marker)
        except ObjectNotFoundError:
            # If the store lost our marker, it lost older files too; a claim that still exists is therefore newer than ours.
            return "superseded" if any(name.startswith(_CLAIM) for name in names) else "gone"
        return "newest" if claimed == self.token else "superseded"

    def acquire(self) -> bool:
        """Make the claim where its number is free, and return whether it stands."""
        return storage.create_bytes(self._marker, self.token)

    @property
    def _marker(self) -> str:
        return storage.join(self.uri, f"{_CLAIM}{self.number:03d}")


def _highest(names: Iterable[str]) -> int:
    matches = map(_NUMBERED.match, names)
    return max((int(match[1]) for match in matches if match), default=0)


def claim(uri: str) -> Lease:
    """Begin a new attempt at the training with these checkpoints; raises `OutputError` where the folder cannot be written."""
    for _ in range(_MOST_ATTEMPTS):
        generation = Lease(uri=uri, number=_highest(storage.children(uri)) + 1, token=uuid.uuid4().hex.encode())
        if generation.acquire():
            return generation
    raise StorageError(
        f"{uri}: {_MOST_ATTEMPTS} other attempts at this training began at the same time; end all but one of them"
    )


class Failure(BaseModel):
    """How a process has failed."""

    step: int
    """Of the training, counted from 0: that which failed, or the one before what failed after it."""
    message: str


class AttemptLog:
    """Notes this attempt and its heartbeats beside the checkpoints, where the next one finds them; with them they are removed.

    Each heartbeat first checks whether a later attempt has begun. It is written in the background, where it may wait for a store.
    """

    def __init__(self, checkpoints: str, *, rank: int = 0, check_ours: Callable[[], None] = lambda: None) -> None:
        """Note the attempts at the training with these checkpoints, a URI; all but the first process note only a failure.

        `check_ours` raises `SupersededError` where a later attempt has begun.
        """
        self._uri, self._active = storage.join(checkpoints, ATTEMPTS), rank == 0
        self._checkpoints, self._rank = checkpoints, rank
        self._interval_s = _REMOTE_INTERVAL_S if storage.is_remote(checkpoints) else _LOCAL_INTERVAL_S
        self._first_step = self._steps = 0
        self._before: tuple[AttemptRecord, ...] = ()
        self._began_unix = self._due = 0.0
        self._check_ours, self._writer = check_ours, BackgroundWriter(checkpoints)

    def resumed_at(self, first_step: int) -> Self:
        """Say at which step this attempt begins; call it before the block."""
        self._first_step = first_step
        return self

    def __enter__(self) -> Self:
        self._began_unix = time.time()
        if self._active:
            if storage.exists(self._uri):
                try:
                    self._before = _RECORDS.validate_json(storage.read_bytes(self._uri))
                except ValidationError as error:
                    logger.warning("earlier attempts are not known: %s cannot be read (%s)", self._uri, error)
            self._note(check=False)
            self._writer.wait()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _trace: object) -> None:
        """Note how the attempt has ended, when the last heartbeat has arrived: else it could come after what is written now, or removed.

        An error like an earlier attempt's is raised as one that says so, of the same kind if that has a message for users.
        """
        if isinstance(error, SupersededError):
            return  # the notes are the later attempt's
        is_idle = self._writer.wait(wait_limit_s() if kind is None else LAST_WAIT_S)
        if kind is not None and self._active and is_idle:
            self._note()
            self._writer.wait(LAST_WAIT_S)
        if isinstance(error, Exception) and not isinstance(error, PreemptedError | LostProcessError | StorageAwayError):
            self._note_failure(error)

    def heartbeat(self, steps: int) -> None:
        """Note, every few seconds, that `steps` steps are completed; raises `SupersededError` where a later attempt has begun."""
        self._steps = steps
        if self._writer.failure is not None:
            raise self._writer.failure
        if self._active and time.monotonic() >= self._due and self._writer.wait(0):
            self._note()

    def records(self) -> tuple[AttemptRecord, ...]:
        """Return all attempts, the last one is this; none on another process than the first, or before it has begun."""
        if not self._active or not self._began_unix:
            return ()
        now, first, steps = time.time(), self._first_step, self._steps
        this = AttemptRecord(began_unix=self._began_unix, seen_unix=now, first_step=first, steps_seen=steps)
        return (*self._before, this)

    def _note_failure(self, error: Exception) -> None:
        known = isinstance(error, TrainerError)
        message = str(error) if known else f"{type(error).__name__}: {error}"
        failure = Failure(step=self._first_step + self._steps, message=message)
        before: list[Failure] = []
        try:
            names = storage.children(self._checkpoints)
            for name in (name for name in names if name.startswith(FAILURE) and name.endswith(".json")):
                try:
                    note = storage.read_bytes(storage.join(self._checkpoints, name))
                    before.append(Failure.model_validate_json(note))
                except ValidationError as unreadable:  # such a note does not count
                    logger.warning("an earlier failure is not known: %s cannot be read (%s)", name, unreadable)
            own = storage.join(self._checkpoints, f"{FAILURE}{self._rank}.json")
            storage.write_bytes(own, failure.model_dump_json().encode())
        except TrainerError as hindrance:
            logger.warning("the failure is not noted: %s", hindrance)
            return
        kind = _VARIES.sub("#", message)
        if any(one.step == failure.step and _VARIES.sub("#", one.message) == kind for one in before):
            if not known:
                logger.error("failed again", exc_info=error)
            again = f"failed twice at step {failure.step + 1} in the same way: {message}"
            raise (type(error) if known else TrainingError)(again) from error

    def _note(self, *, check: bool = True) -> None:
        """Begin to write the attempts down, in the background, if they are still this one's; the training can do without."""

        def write() -> None:
            if check:
                self._check_ours()
            content = json.dumps([record.model_dump() for record in self.records()], indent=2)
            storage.write_bytes(self._uri, content.encode())

        self._due = time.monotonic() + self._interval_s
        self._writer.start(write, "the attempt is not noted")
