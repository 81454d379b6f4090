"""What is kept of a job after its end: the manifest, how it ended, Kubernetes' events, and every replica's log."""

from __future__ import annotations

import json
import logging
import tempfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Self, TextIO

from components.launch.readers import LogLine
from trainer import storage
from trainer.errors import TrainerError

logger = logging.getLogger(__name__)


class JobRecord:
    """Collects on this machine, and writes below a URI when its block ends, in whatever way.

    A record that cannot be written is a warning: it must not hide how the job ended.
    """

    def __init__(self, uri: str | None) -> None:
        """Begin.

        Args:
            uri: where the record goes, a folder of this machine or of an object store; None: nowhere.
        """
        self.manifest: Mapping[str, Any] = {}
        """The job as it was sent."""
        self.status: Mapping[str, Any] = {}
        """How it ended."""
        self.events: Sequence[Mapping[str, Any]] = ()
        """Kubernetes' events about it."""
        self._uri, self._open = uri, ExitStack()
        self._logs: dict[str, TextIO] = {}
        self._folder = Path()

    def __enter__(self) -> Self:
        self._folder = Path(self._open.enter_context(tempfile.TemporaryDirectory(prefix="launch-")))
        return self

    def __exit__(self, *_: object) -> None:
        with self._open:
            self._do(self._write)

    def line(self, line: LogLine) -> None:
        """Keep a line of a replica's log."""
        self._do(lambda: self._log(line.replica).write(f"{line.time} {line.text}\n"))

    def _log(self, replica: str) -> TextIO:
        if replica not in self._logs:
            file = (self._folder / f"{replica}.log").open("w", encoding="utf-8")
            self._logs[replica] = self._open.enter_context(file)
        return self._logs[replica]

    def _write(self) -> None:
        for name, content in (("job", self.manifest), ("status", self.status), ("events", self.events)):
            self._store(json.dumps(content, indent=2, ensure_ascii=False).encode(), f"{name}.json")
        for replica, file in self._logs.items():
            file.flush()
            self._store(Path(file.name).read_bytes(), "logs", f"{replica}.log")
        logger.info("manifest, status, events and logs of the job are kept in %s", self._uri)

    def _store(self, content: bytes, *names: str) -> None:
        storage.write_bytes(storage.join(self._uri or "", *names), content)

    def _do(self, action: Callable[[], object]) -> None:
        if not self._uri:
            return
        try:
            action()
        except (TrainerError, OSError) as error:
            logger.warning("the record of the job cannot be kept in %s: %s", self._uri, error)
            self._uri = None
