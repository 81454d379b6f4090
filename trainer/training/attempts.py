"""The tries that a training has needed: each goes on from the checkpoint that the one before has left."""

from __future__ import annotations

import json
import logging
import time
from types import TracebackType
from typing import Self

from pydantic import TypeAdapter, ValidationError

from trainer import storage
from trainer.errors import TrainerError
from trainer.profiling.schema import AttemptRecord

logger = logging.getLogger(__name__)

ATTEMPTS = "attempts.json"
_LOCAL_INTERVAL_S, _REMOTE_INTERVAL_S = 5.0, 60.0
"""Least time between two signs of life; in a store each takes a request, for which the training waits."""
_RECORDS = TypeAdapter(tuple[AttemptRecord, ...])


class Attempts:
    """Notes this try and its signs of life beside the checkpoints, where the next one finds them; with them they are removed.

    with attempts:
        for step in ...:
            attempts.seen(steps completed)
    """

    def __init__(self, checkpoints: str, first_step: int, *, active: bool) -> None:
        """Of the training with these checkpoints, a URI; where not `active` nothing is read or written."""
        self._uri, self._active = storage.join(checkpoints, ATTEMPTS), active
        self._interval_s = _REMOTE_INTERVAL_S if storage.is_remote(checkpoints) else _LOCAL_INTERVAL_S
        self._first_step, self._steps = first_step, 0
        self._before: tuple[AttemptRecord, ...] = ()
        self._began_unix = self._due = 0.0

    def __enter__(self) -> Self:
        self._began_unix = time.time()
        if self._active:
            self._before = self._read()
            self._write()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is not None and self._active:
            self._write()

    def seen(self, steps: int) -> None:
        """So many steps are completed; written down every now and then."""
        self._steps = steps
        if self._active and time.monotonic() >= self._due:
            self._write()

    def records(self) -> tuple[AttemptRecord, ...]:
        """All tries, the last one is this; none where not active."""
        if not self._active:
            return ()
        this = AttemptRecord(
            began_unix=self._began_unix, seen_unix=time.time(), first_step=self._first_step, steps_seen=self._steps
        )
        return (*self._before, this)

    def _read(self) -> tuple[AttemptRecord, ...]:
        if not storage.exists(self._uri):
            return ()
        try:
            return _RECORDS.validate_json(storage.read_bytes(self._uri))
        except ValidationError as error:
            logger.warning("earlier attempts are not known: %s can not be read (%s)", self._uri, error)
            return ()

    def _write(self) -> None:
        self._due = time.monotonic() + self._interval_s
        content = json.dumps([record.model_dump() for record in self.records()], indent=2)
        try:
            storage.write_bytes(self._uri, content.encode())
        except TrainerError as error:  # the training can do without
            logger.warning("the attempt is not noted: %s", error)
