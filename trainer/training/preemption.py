"""Ending a training because one of its processes was asked to: all of them agree on the step, and no step waits for that."""

from __future__ import annotations

from types import TracebackType
from typing import Self

import torch
import torch.distributed as dist

from trainer.signals import EndRequest
from trainer.training.process_group import Processes


class Preemption:
    """Whether this training is to end before its time.

    Each process says at the end of a step whether it was asked to end, and hears at the end of the next one what the others said: the
    numbers travel while that step computes. So all processes know of it at the same step, two steps after the request at most.

    with Preemption(processes) as preemption:
        for step in ...:             # the first one, which compiles, ends at once
            ...
            if preemption.agreed("step 7"):
                save and end
        if preemption.settled("the end"):
            save and end
    """

    def __init__(self, processes: Processes) -> None:
        """Of the training of these processes."""
        self._processes, self._request = processes, EndRequest()
        self._told = torch.zeros((), dtype=torch.int32)
        self._under_way: dist.Work | None = None
        self._ending = False

    def __enter__(self) -> Self:
        self._request.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._request.__exit__(kind, error, trace)

    def agreed(self, what: str) -> bool:
        """Whether all processes are to end here. All of them ask equally often, after each step; `what` ends, for messages.

        From the first time on a request to end waits for the next one.

        Raises:
            LostProcessError: a process did not come within the limit, or is gone.
        """
        self._request.defer()
        if self._processes.world_size == 1:
            return self._request.came
        self._hear(what)
        if not self._ending:
            self._say()
        return self._ending

    def settled(self, what: str) -> bool:
        """As `agreed`, of all that was asked so far; waits for the others.

        Raises:
            LostProcessError: a process did not come within the limit, or is gone.
        """
        if not self.agreed(what):
            self._hear(what)
        return self._ending or (self._processes.world_size == 1 and self._request.came)

    def _say(self) -> None:
        self._told.fill_(self._request.came)
        self._under_way = dist.all_reduce(self._told, op=dist.ReduceOp.MAX, group=self._processes.host, async_op=True)

    def _hear(self, what: str) -> None:
        if self._under_way is not None:
            with self._processes.waiting(what):
                self._under_way.wait()
            self._under_way = None
            self._ending = bool(self._told.item())
