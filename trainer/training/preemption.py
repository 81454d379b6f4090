"""Ending a training because one of its processes was asked to: all of them agree on the step, and no step waits for that."""

from __future__ import annotations

from types import TracebackType
from typing import Self

import torch
import torch.distributed as dist

from trainer.host import EndRequest
from trainer.training.process_group import Processes


class Preemption:
    """Whether this training is to end before its time.

    Each process says at the end of a step whether it was asked to end, and receives at the end of the next one what the others said: the
    all-reduce runs while that step computes. So all processes know of it at the same step, two steps after the request at most.

    with Preemption(processes) as preemption:
        for step in ...:             # the first one, which compiles, ends at once
            ...
            if preemption.should_stop("step 7"):
                save and end
        if preemption.should_stop("the end", wait=True):
            save and end
    """

    def __init__(self, processes: Processes) -> None:
        """Of the training of these processes."""
        self._processes, self._request = processes, EndRequest()
        self._requested = torch.zeros((), dtype=torch.int32)
        self._pending: dist.Work | None = None
        self._ending = False

    def __enter__(self) -> Self:
        self._request.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._request.__exit__(kind, error, trace)

    def should_stop(self, what: str, *, wait: bool = False) -> bool:
        """Return whether all processes are to stop here; the same on all of them, which ask equally often.

        From the first call on a signal no longer ends the process at once, but is answered by the next call.

        Args:
            what: is at its end, for messages.
            wait: whether to count every request up to now, which waits for the other processes.

        Raises:
            LostProcessError: a process did not come within the limit, or is gone.
        """
        self._request.defer()
        if self._processes.world_size == 1:
            return self._request.came
        self._receive(what)
        if not self._ending:
            self._requested.fill_(self._request.came)
            self._pending = dist.all_reduce(
                self._requested, op=dist.ReduceOp.MAX, group=self._processes.host, async_op=True
            )
            if wait:
                self._receive(what)
        return self._ending

    def _receive(self, what: str) -> None:
        """Take in what the processes have said at the last call."""
        if self._pending is not None:
            with self._processes.waiting(what):
                self._pending.wait()
            self._pending = None
            self._ending = bool(self._requested.item())
