"""The threads that read from the API server for one job, and the streams that they read; all end together."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Self

from components.launch.api_errors import ApiRetry, RetryStopped
from components.launch.client import Stream

JOIN_S = 5.0
"""How long threads have to end. A stream is ended at once; only a request that is not answered yet can take longer."""


@dataclass(frozen=True)
class Ended:
    """A thread has ended by itself."""

    name: str
    error: Exception | None = None


class Readers:
    """Threads and their streams. A context manager: after it none of them runs."""

    def __init__(self, retry: ApiRetry, publish: Callable[[Ended], None]) -> None:
        """Begin.

        Args:
            retry: whose stop ends the threads' waiting.
            publish: takes the end of each thread, in that thread.
        """
        self.retry, self._publish = retry, publish
        self._threads: list[threading.Thread] = []
        self._streams: set[Stream] = set()
        self._lock = threading.Lock()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.retry.stop()
        with self._lock:
            for stream in self._streams:
                stream.end()
        deadline = time.monotonic() + JOIN_S
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()))

    def start(self, name: str, target: Callable[[], None]) -> None:
        """Run a function in a thread until it returns, fails or is stopped."""
        thread = threading.Thread(target=self._run, args=(name, target), name=name, daemon=True)
        self._threads.append(thread)
        thread.start()

    def _run(self, name: str, target: Callable[[], None]) -> None:
        try:
            target()
        except RetryStopped:
            return
        except Exception as error:  # noqa: BLE001  # raised again where the job is waited for
            self._publish(Ended(name, error))
        else:
            self._publish(Ended(name))

    @contextmanager
    def reading(self, stream: Stream) -> Iterator[Stream]:
        """Close a stream after the block, and end it when all is to end.

        Raises:
            RetryStopped: all is to end.
        """
        with stream:
            with self._lock:
                self.retry.wait(0)
                self._streams.add(stream)
            try:
                yield stream
            finally:
                with self._lock:
                    self._streams.discard(stream)
