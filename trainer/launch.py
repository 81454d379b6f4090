"""Launching: a stage as a group of training processes.

`JobSpec` says what is to run; a `Launcher` runs it. The one here starts torch's elastic agent (what torchrun is made of) on this machine;
the one for clusters stands in `components/launch`. Both end in the same command in each process:
`python -m trainer stage NAME --worker ...`.
"""

from __future__ import annotations

import json
import logging
import os
import signal
import sys
import tempfile
import uuid
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from trainer.environment import variables
from trainer.errors import LaunchError

logger = logging.getLogger(__name__)

FAILURES_VARIABLE = "TRAINER_FAILURES"
"""Environment variable that names the folder in which a failing process leaves its message."""
SHUTDOWN_TIMEOUT_S = 15
"""How long the other processes have to end after one has failed."""


@dataclass(frozen=True, kw_only=True)
class JobSpec:
    """A stage to be run by a group of processes."""

    stage: str
    settings: Mapping[str, Any]
    """The stage's section."""
    inputs: Mapping[str, str]
    """Keyword of each input -> its URI."""
    outputs: Mapping[str, str]
    """Keyword of each output -> its URI."""
    processes_per_node: int = 1
    nodes: int = 1
    environment: Mapping[str, str] = field(default_factory=dict)
    """Further environment variables of every process."""

    def arguments(self) -> list[str]:
        """What follows `python` in every process."""
        return self._arguments("--worker")

    def node_arguments(self) -> list[str]:
        """What follows `python` on every node of a cluster's job, where `join_node` starts the processes."""
        return self._arguments("--node")

    def _arguments(self, role: str) -> list[str]:
        directories = [
            text for name, uri in {**self.inputs, **self.outputs}.items() for text in (f"--{flag(name)}", uri)
        ]
        return ["-m", "trainer", "stage", self.stage, role, "--settings", json.dumps(self.settings), *directories]


def flag(name: str) -> str:
    """The command-line flag of an input or output: `pretrain_evidence` -> `pretrain-evidence`."""
    return name.replace("_", "-")


class Launcher(Protocol):
    """Runs jobs somewhere."""

    def run(self, spec: JobSpec) -> None:
        """Run a job to its end.

        Raises:
            LaunchError: naming the process that failed, why, and the next move.
        """
        ...


class LocalLauncher:
    """Runs a job on this machine, one node only."""

    def run(self, spec: JobSpec) -> None:
        """Start the processes, wait for them, and end them all if one fails.

        Raises:
            LaunchError: the job wants several nodes; or naming the process that failed and why.
            KeyboardInterrupt: Ctrl-C or SIGTERM; all processes have ended.
        """
        from torch.distributed.elastic.multiprocessing import SignalException
        from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
        from torch.distributed.launcher.api import LaunchConfig, elastic_launch

        if spec.nodes != 1:
            raise LaunchError(
                f"{spec.stage}: {spec.nodes} nodes were asked for, but this machine is one; use a cluster's launcher"
            )
        count = spec.processes_per_node
        config = LaunchConfig(
            min_nodes=1,
            max_nodes=1,
            nproc_per_node=count,
            run_id=uuid.uuid4().hex,
            rdzv_backend="c10d",
            rdzv_endpoint="localhost:0",
            local_addr="localhost",
            max_restarts=0,
            monitor_interval=0.1,
            shutdown_timeout=SHUTDOWN_TIMEOUT_S,
        )
        threads = os.environ.get("OMP_NUM_THREADS") or str(max(1, len(os.sched_getaffinity(0)) // count))
        with tempfile.TemporaryDirectory(prefix="trainer-") as failures, quiet_agent():
            environment = {"OMP_NUM_THREADS": threads, **spec.environment, FAILURES_VARIABLE: failures}
            try:
                with variables(environment):
                    elastic_launch(config, sys.executable)(*spec.arguments())
            except SignalException as error:
                raise KeyboardInterrupt from error
            except ChildFailedError as error:
                exit_codes = {failure.local_rank: failure.exitcode for failure in error.failures.values()}
                raise _explain(spec, Path(failures), exit_codes) from error


@contextmanager
def quiet_agent() -> Iterator[None]:
    """Let torch's agent log errors only in its own words where we have none."""
    names = ("torch.distributed.elastic", "torch.distributed.launcher")
    levels = {name: logging.getLogger(name).level for name in names}
    for name in names:
        logging.getLogger(name).setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        for name, level in levels.items():
            logging.getLogger(name).setLevel(level)


def record_failure(message: str, trace: str = "") -> None:
    """Leave this process's message and traceback where its launcher finds them; without a launcher print the traceback."""
    folder = os.environ.get(FAILURES_VARIABLE)
    if folder:
        content = json.dumps({"message": message, "trace": trace})
        (Path(folder) / f"{os.environ.get('LOCAL_RANK', '0')}.json").write_text(content)
    elif trace:
        print(trace, file=sys.stderr)


def _explain(spec: JobSpec, failures: Path, exit_codes: Mapping[int, int]) -> LaunchError:
    """The message for a failed job, after the traceback of the process that is to blame.

    A process that was killed is to blame first, because the others then fail when they miss it; else the earliest that left a message.

    Args:
        spec: the job.
        failures: where processes left their messages.
        exit_codes: rank -> exit code, of the failed processes.
    """
    killed = [rank for rank, code in exit_codes.items() if code < 0 and -code != signal.SIGTERM]
    written = sorted(failures.glob("*.json"), key=lambda path: path.stat().st_mtime_ns)
    if killed:
        rank, name = killed[0], signal.Signals(-exit_codes[killed[0]]).name
        advice = (
            "; the machine may be out of memory: lower batch_size or raise accumulation" if name == "SIGKILL" else ""
        )
        message = f"was ended by {name}{advice}"
    elif written:
        rank, failure = int(written[0].stem), json.loads(written[0].read_text())
        message = failure["message"]
        print(failure["trace"], end="", file=sys.stderr)
    else:
        rank, code = next(iter(exit_codes.items()))
        message = f"ended with exit code {code}; its last lines of output stand above"
    if spec.processes_per_node == 1:
        return LaunchError(f"{spec.stage}: {message}")
    return LaunchError(f"{spec.stage}: process {rank} of {spec.processes_per_node}: {message}")


def run_stage(
    stage: str, settings: str, *, inputs: Mapping[str, str], outputs: Mapping[str, str], processes_per_node: int = 1
) -> None:
    """Run a stage as a group of processes on this machine.

    Args:
        stage: its name.
        settings: its section, as JSON text.
        inputs: keyword of each input -> URI.
        outputs: keyword of each output -> URI.
        processes_per_node: how many processes train.

    Raises:
        LaunchError: naming the process that failed, why, and the next move.
    """
    LocalLauncher().run(
        JobSpec(
            stage=stage,
            settings=json.loads(settings),
            inputs=inputs,
            outputs=outputs,
            processes_per_node=processes_per_node,
        )
    )
