"""All that launching uses of torch's elastic agent beyond its documented interface.

The agent starts this machine's processes and, in an elastic job, restarts them as nodes come and go. Imported where a job is launched,
since torch.distributed takes seconds to import. `tests/unit/runner/test_elastic_private.py` calls all of it with the installed torch.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Sequence

from torch.distributed.elastic.agent.server.api import RunResult, WorkerGroup
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.rendezvous.utils import _matches_machine_hostname
from torch.distributed.launcher import api

from trainer.io.errors import EXIT_CODE, PREEMPTED_EXIT_CODE
from trainer.io.host import LAUNCHED_VARIABLE

EXIT_BARRIER_S = 60.0
"""How long a node whose processes have ended waits for the others, after the last thing that all do together: one that has not ended by
then is lost, or is the first one, which sends its results and needs nobody. In an elastic job it may need the node that serves the
rendezvous, and all wait torch's five minutes."""


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

    def _exit_barrier(self) -> None:
        if not self._worker_group.spec.max_restarts:
            self._exit_barrier_timeout = EXIT_BARRIER_S
        super()._exit_barrier()  # type: ignore[no-untyped-call]  # torch's own has no types


def run(config: api.LaunchConfig, arguments: Sequence[str]) -> None:
    """Start processes with this Python and these arguments, and wait for their end.

    Raises:
        ChildFailedError: a process failed; all of them have ended.
        SignalException: this process was asked to end; all of them have ended.
        RendezvousError: the other nodes did not come.
    """
    # Torch's agent replaces these handlers. None is one that is not Python's, which Python cannot restore.
    numbers = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)
    before = {number: handler for number in numbers if (handler := signal.getsignal(number)) is not None}
    # `elastic_launch` has no parameter for the agent; it imports the name, and does not export it.
    api.LocalElasticAgent = Agent  # type: ignore[attr-defined]  # imported there, not exported
    try:
        api.elastic_launch(config, sys.executable)(*arguments)
    finally:
        api.LocalElasticAgent = LocalElasticAgent  # type: ignore[attr-defined]  # as above
        if threading.current_thread() is threading.main_thread():  # only there can they have been replaced
            for number, handler in before.items():
                signal.signal(number, handler)


def is_this_machine(host: str) -> bool:
    """Return whether torch takes this machine for the one of that name, which serves the others."""
    return bool(_matches_machine_hostname(host))
