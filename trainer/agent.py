"""Torch's elastic agent, which starts this machine's processes and, in an elastic job, starts them again as nodes come and go."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from torch.distributed.elastic.agent.server.api import RunResult, WorkerGroup
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.launcher import api

from trainer.errors import EXIT_CODE, PREEMPTED_EXIT_CODE
from trainer.launch import LAUNCHED_VARIABLE


class Agent(LocalElasticAgent):
    """Torch's, but processes are started again where that may help, and only failures are counted.

    It only does so in an elastic job: elsewhere `max_restarts` is 0, and who started the job starts it again.
    """

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        result: RunResult = super()._monitor_workers(worker_group)
        codes = {failure.exitcode for failure in result.failures.values()}
        if EXIT_CODE in codes:  # it would come again
            self._remaining_restarts = 0
        elif codes == {PREEMPTED_EXIT_CODE} and worker_group.spec.max_restarts:
            self._remaining_restarts += (
                1  # torch is about to take it off: another node was asked to end, and these have left with it
            )
        return result

    def _restart_workers(self, worker_group: WorkerGroup) -> None:
        # For the processes, which inherit it: what they count begins anew.
        os.environ[LAUNCHED_VARIABLE] = str(time.time())
        super()._restart_workers(worker_group)


def run(config: api.LaunchConfig, arguments: Sequence[str]) -> None:
    """Start processes with this Python and these arguments, and wait for their end.

    Raises:
        ChildFailedError: a process failed; all of them have ended.
        SignalException: this process was asked to end; all of them have ended.
        RendezvousError: the other nodes were not met.
    """
    with _in_place_of_torchs(), _handlers_put_back():
        api.elastic_launch(config, sys.executable)(*arguments)


@contextmanager
def _handlers_put_back() -> Iterator[None]:
    """The agent takes these signals and does not give them back; only the main thread can have taken them."""
    numbers = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)
    # None is a handler that is not Python's, which Python cannot put back.
    before = {number: handler for number in numbers if (handler := signal.getsignal(number)) is not None}
    try:
        yield
    finally:
        if threading.current_thread() is threading.main_thread():
            for number, handler in before.items():
                signal.signal(number, handler)


@contextmanager
def _in_place_of_torchs() -> Iterator[None]:
    """`elastic_launch` has no parameter for the agent."""
    api.LocalElasticAgent = Agent  # type: ignore[attr-defined]  # imported there, not exported
    try:
        yield
    finally:
        api.LocalElasticAgent = LocalElasticAgent  # type: ignore[attr-defined]  # likewise
