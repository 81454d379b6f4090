"""Fetches the images of a training from a store some windows before they are read (`split_rows.FetchedRows`).

The training begins when the first window is on this machine. Each process fetches for itself, and begins at another file of a window than
the others of its machine, so that together they fetch each file once: the cache has a lock for each.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Self

from trainer.data.loader import Samples
from trainer.data.sampler import AHEAD, HELD, StatelessSampler
from trainer.data.split_rows import FetchedRows
from trainer.io.errors import TrainerError
from trainer.io.formatting import size
from trainer.io.storage import cache

logger = logging.getLogger(__name__)

_AT_ONCE = 4  # files, each in parts that travel concurrently
_POLL_S = 1.0
LOG_INTERVAL_S = 15.0

_File = tuple[FetchedRows, int]


class FetchAhead:
    """Fetches what a training is about to read, in a thread, while it reads the positions that `noted` gives.

    A set of which no image is fetched as it is read, as most are, needs no thread. Where the cache has no room for windows ahead, the one
    that is read alone is fetched.
    """

    def __init__(self, samples: Samples, order: StatelessSampler, *, rank: int = 0, processes: int = 1) -> None:
        """Fetch for process `rank` of the `processes` of this machine."""
        self._samples, self._order, self._share = samples, order, rank / processes
        self._position = self._fetched = 0
        self._error: TrainerError | None = None
        self._ended, self._begun = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._run, name="fetch-ahead", daemon=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        if self._thread.is_alive():
            self._thread.join()

    def noted(self, positions: Iterable[int]) -> Iterator[int]:
        """Yield the positions, the first one when its window is here; raises what a fetch has met."""
        for position in positions:
            self._position = position
            if self._samples.fetches and not self._thread.ident:
                self._thread.start()
                while not self._begun.wait(LOG_INTERVAL_S):
                    logger.info("the first window: %s are here", size(self._fetched))
            if self._error is not None:
                raise self._error
            yield position

    def _run(self) -> None:
        try:
            known: list[list[int]] = []
            fetched: list[list[int]] = []
            while not self._ended.is_set():
                windows = self._order.windows(self._position, 1 + AHEAD)
                if (now := [shards.tolist() for shards in windows]) != known:
                    files = [self._samples.files(shards) for shards in windows]
                    wanted = now if _have_room(files) else now[:1]
                    for window, of_window in zip(wanted, files, strict=False):
                        if window not in fetched:
                            self._fetch(of_window, says=not self._begun.is_set())
                        self._begun.set()
                    known, fetched = now, wanted
                self._ended.wait(_POLL_S)
        except TrainerError as error:
            self._error = error
        finally:
            self._begun.set()

    def _fetch(self, files: Sequence[_File], *, says: bool) -> None:
        """Fetch files, beginning at this process's own."""
        first = int(self._share * len(files))
        if says:
            whole = sum(rows.size(number) for rows, number in files)
            logger.info("fetching the images of the first window: %d files, %s", len(files), size(whole))
        with ThreadPoolExecutor(_AT_ONCE, thread_name_prefix="fetch-ahead") as pool:
            for _ in pool.map(self._fetch_one, [*files[first:], *files[:first]]):
                pass

    def _fetch_one(self, file: _File) -> None:
        if not self._ended.is_set():
            rows, number = file
            rows.fetch(number)
            self._fetched += rows.size(number)


def _have_room(windows: Sequence[Sequence[_File]]) -> bool:
    """Return whether the cache has room for windows like these beside what is left of the one before."""
    largest = max(sum(rows.size(number) for rows, number in files) for files in windows)
    return HELD * largest <= cache.limit_bytes()
