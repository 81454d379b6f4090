"""Torch's elastic agent, which starts this machine's processes and, in an elastic job, restarts them as nodes come and go.

A module of its own, since torch.distributed takes seconds to import and only the process that starts others needs it.
"""

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
from trainer.host import LAUNCHED_VARIABLE


class Agent(LocalElasticAgent):
    """Torch's agent, but it restarts processes only where that may help, and counts only failures.

    It restarts in an elastic job only: elsewhere `max_restarts` is 0, and the job's operator starts it again.
    """

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        result: RunResult = super()._monitor_workers(worker_group)
        codes = {failure.exitcode for failure in result.failures.values()}
        if EXIT_CODE in codes:  # the same error would come again
            self._remaining_restarts = 0
        elif codes == {PREEMPTED_EXIT_CODE} and worker_group.spec.max_restarts:
            # Not a failure: another node was asked to end, and these processes left with it. Torch is about to subtract a restart.
            self._remaining_restarts += 1
        return result

    def _restart_workers(self, worker_group: WorkerGroup) -> None:
        # The processes inherit it, and count their start-up from it.
        os.environ[LAUNCHED_VARIABLE] = str(time.time())
        super()._restart_workers(worker_group)


def run(config: api.LaunchConfig, arguments: Sequence[str]) -> None:
    """Start processes with this Python and these arguments, and wait for their end.

    Raises:
        ChildFailedError: a process failed; all of them have ended.
        SignalException: this process was asked to end; all of them have ended.
        RendezvousError: the other nodes did not come.
    """
    with _in_place_of_torchs_agent(), _signal_handlers_restored():
        api.elastic_launch(config, sys.executable)(*arguments)


@contextmanager
def _signal_handlers_restored() -> Iterator[None]:
    """Restore the handlers of signals that torch's agent replaces; only in the main thread can it have replaced them."""
    numbers = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)
    # None is a handler that is not Python's, which Python cannot restore.
    before = {number: handler for number in numbers if (handler := signal.getsignal(number)) is not None}
    try:
        yield
    finally:
        if threading.current_thread() is threading.main_thread():
            for number, handler in before.items():
                signal.signal(number, handler)


@contextmanager
def _in_place_of_torchs_agent() -> Iterator[None]:
    """Let `elastic_launch`, which has no parameter for the agent, use ours."""
    api.LocalElasticAgent = Agent  # type: ignore[attr-defined]  # imported there, not exported
    try:
        yield
    finally:
        api.LocalElasticAgent = LocalElasticAgent  # type: ignore[attr-defined]  # likewise
