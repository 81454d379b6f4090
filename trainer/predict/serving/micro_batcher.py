"""Requests that come at the same time are answered by one batch.

A batch is as large as what waits when the last one is done. Only where nothing was computed, the first request waits for others that are
on their way, and never longer than a limit: so a quiet server answers at once, and a busy one fills its batches by itself.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import numpy.typing as npt

Square = npt.NDArray[np.uint8]
Row = npt.NDArray[np.float64]  # of the results


class MicroBatcher:
    """Collects rows, computes them in a thread, and hands each its own row of the results."""

    def __init__(
        self,
        compute: Callable[[Square], Row],
        *,
        most: int,
        wait_s: float,
        coming: Callable[[], int],
        observed: Callable[[int], object] = lambda _size: None,
    ) -> None:
        """Take the function `compute`, which maps rows [B, ...] to rows [B, ...] and is called with one batch at a time.

        Args:
            most: rows of a batch, at most.
            wait_s: longest wait of a batch's first row for others.
            coming: number of rows on their way or here; a batch that has as many does not wait.
            observed: gets the size of each batch.
        """
        self._compute, self._most, self._wait_s = compute, most, wait_s
        self._coming, self._observed = coming, observed
        self._queue: asyncio.Queue[tuple[Square, asyncio.Future[Row]]] = asyncio.Queue()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="batch")

    async def submit(self, row: Square) -> Row:
        """Compute one row; raises what `compute` raised on its batch. Whoever stops waiting leaves no work behind."""
        answer: asyncio.Future[Row] = asyncio.get_running_loop().create_future()
        self._queue.put_nowait((row, answer))
        return await answer

    async def run(self) -> None:
        """Answer submitted rows until cancelled."""
        loop = asyncio.get_running_loop()
        while True:
            batch = await self._next()
            batch = [(row, answer) for row, answer in batch if not answer.done()]  # its client is gone, or was too slow
            if not batch:
                continue
            self._observed(len(batch))
            try:
                rows = await loop.run_in_executor(self._thread, self._compute, np.stack([row for row, _ in batch]))
            except Exception as error:  # noqa: BLE001  # whatever it is, it belongs to those who wait
                for _, answer in batch:
                    if not answer.done():
                        answer.set_exception(error)
                continue
            for (_, answer), row in zip(batch, rows, strict=True):
                if not answer.done():
                    answer.set_result(row)

    async def _next(self) -> list[tuple[Square, asyncio.Future[Row]]]:
        loop = asyncio.get_running_loop()
        was_idle = self._queue.empty()
        batch = [await self._queue.get()]
        end = loop.time() + (self._wait_s if was_idle else 0.0)
        while len(batch) < self._most:
            if not self._queue.empty():
                batch.append(self._queue.get_nowait())
                continue
            left = end - loop.time()
            if left <= 0 or self._coming() <= len(batch):
                break
            try:
                batch.append(await asyncio.wait_for(self._queue.get(), left))
            except TimeoutError:
                break
        return batch
