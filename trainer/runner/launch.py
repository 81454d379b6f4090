"""Launching: a stage as a group of training processes.

`run_here` starts torch's elastic agent (what torchrun is made of) on this machine; the launcher for clusters
stands in `components/launch`, and its pods start the agent with `join_node`. Both end in the same command in each process:
`python -m trainer stage NAME --worker ...`.
"""

from __future__ import annotations

import json
import logging
import os
import re
import signal
import socket
import sys
import tempfile
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from contextlib import contextmanager
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trainer.config import DEVICE_VARIABLE
from trainer.graph import JobSpec, Stage
from trainer.io.costs import local_place
from trainer.io.errors import (
    EXIT_CODE,
    MISSED_ANOTHER,
    PREEMPTED_EXIT_CODE,
    CrashError,
    LaunchError,
    PreemptedError,
    TrainerError,
)
from trainer.io.host import (
    LAUNCHED_VARIABLE,
    SHUTDOWN_TIMEOUT_S,
    Terminated,
    environment_variables,
    started_unix,
    usable_cores,
)

if TYPE_CHECKING:
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig

logger = logging.getLogger(__name__)

FAILURES_VARIABLE = "TRAINER_FAILURES"
"""Environment variable that names the folder in which a failing process leaves its message."""
TERMINATION_LOG_VARIABLE = "TRAINER_TERMINATION_LOG"
"""Environment variable that names the file for a failing node's message; without it Kubernetes' own, where there is one."""
TERMINATION_LOG = "/dev/termination-log"
TERMINATION_LOG_BYTES = 4096  # more of it Kubernetes does not keep
AT_ONCE_S = 10
"""Processes that fail later after the first one than this were ended by the agent, which gives them longer."""

Start = Callable[[JobSpec, threading.Event | None], None]
"""Runs a job to its end; the event interrupts it where it does not run in the main thread."""

_LOST_CONNECTION = re.compile(
    r"[Cc]onnection (closed|reset) by peer|Broken pipe|remote process exited|ncclRemoteError|Dist(Backend|Network|Store)Error"
)  # what torch says in a process that misses another one


def job_of(stage: Stage, settings: Mapping[str, Any], directories: Mapping[str, str], processes: int) -> JobSpec:
    """Describe a stage on one machine, whose inputs and outputs are `directories`; 0 processes: one for each GPU, or else one."""
    return JobSpec(
        stage=stage.name,
        settings=settings,
        inputs={keyword: directories[keyword] for keyword in stage.all_inputs if keyword in directories},
        outputs={keyword: directories[keyword] for keyword in stage.outputs},
        processes_per_node=processes or processes_here(os.environ[DEVICE_VARIABLE]),
    )


def run_here(spec: JobSpec, stop: threading.Event | None = None) -> None:  # noqa: ARG001  # as a cluster's launcher takes it
    """Run a job of one node on this machine; all processes end if one fails, which a `LaunchError` names, or at Ctrl-C or SIGTERM.

    Needs the main thread, so `stop`, which interrupts other threads, is not read.
    """
    launched_unix = time.time()
    from torch.distributed.launcher.api import LaunchConfig

    if spec.nodes != 1:
        raise LaunchError(
            f"{spec.stage}: {spec.nodes} nodes were asked for, but this machine is one; use a cluster's launcher"
        )
    place = local_place(spec.processes_per_node).environment()
    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=spec.processes_per_node,
        run_id=uuid.uuid4().hex,
        rdzv_backend="c10d",
        rdzv_endpoint="localhost:0",
        local_addr="localhost",
        max_restarts=0,
        monitor_interval=0.1,
    )
    _run_agent(config, replace(spec, environment={**place, **spec.environment}), launched_unix=launched_unix)


def join_node(spec: JobSpec) -> None:
    """Run this node's part of the job that `PET_*` describe, torchrun's own variables, which a cluster's operator sets.

    The operator also sets the numbers of nodes and processes. Ends as `run_here`, or because the nodes did not find one another.
    """
    from torch.distributed import DistError
    from torch.distributed.elastic.rendezvous import RendezvousError

    # Where the first node is under torchrun's own names, taken from the general ones where only those are set.
    general = {f"PET_{name}": os.environ[name] for name in ("MASTER_ADDR", "MASTER_PORT") if name in os.environ}
    with environment_variables({name: value for name, value in general.items() if name not in os.environ}):
        config = _config_of_node(spec)
        node = ""
        if config.max_nodes > 1:  # in an elastic job a node has no fixed number
            place = f"{_node_rank()} of {config.max_nodes}" if _is_static(config) else socket.gethostname()
            node = f"node {place}"
            logger.info("%s: joining the others at %s", node, config.rdzv_endpoint)
        # The first process makes a new store for each start of an elastic job: the one that torch's agents share keeps earlier keys.
        store = {} if _is_static(config) else {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
        environment = {**store, **spec.environment}
        part = replace(spec, nodes=config.max_nodes, processes_per_node=config.nproc_per_node, environment=environment)
        _wait_for_first_node(config, spec, node)
        try:
            _run_agent(config, part, launched_unix=started_unix(), node=node)
        except (DistError, RendezvousError) as error:
            raise CrashError(
                f"{spec.stage}: {node or 'this node'}: lost or never met the other nodes at {config.rdzv_endpoint}: "
                f"{str(error).splitlines()[0]}; look whether all of them run, and why the first one that ended did"
            ) from error


def _node_rank() -> int:
    return int(os.environ.get("PET_NODE_RANK", "0"))


def _is_static(config: LaunchConfig) -> bool:
    """Check whether all nodes take part from the beginning to the end; else they come and go."""
    return bool(config.rdzv_backend == "static")


def _config_of_node(spec: JobSpec) -> LaunchConfig:
    from torch.distributed.run import config_from_args, parse_args

    if "PET_NNODES" not in os.environ:
        raise LaunchError(
            f"{spec.stage}: --node is for the pods of a cluster's job, but PET_NNODES is not set; leave it out to train on this machine"
        )
    try:
        with quiet_agent():
            config, *_ = config_from_args(parse_args([sys.executable]))
    except (SystemExit, ValueError, RuntimeError, AssertionError) as error:
        given = " ".join(f"{name}={value}" for name, value in sorted(os.environ.items()) if name.startswith("PET_"))
        raise LaunchError(
            f"{spec.stage}: {given}: do not describe a node of a job ({error}); the operator sets them"
        ) from error
    return config


def _wait_for_first_node(config: LaunchConfig, spec: JobSpec, node: str) -> None:
    """Wait until the first node listens. Torch would wait too, but ignore signals and pause for a minute between attempts."""
    limit_s = float(config.rdzv_configs["timeout"])
    deadline = time.monotonic() + limit_s
    while hindrance := _hindrance(config):
        if time.monotonic() >= deadline:
            raise CrashError(
                f"{spec.stage}: {node}: the first node did not answer at {config.rdzv_endpoint} within {limit_s:.0f} s "
                f"({hindrance}); look whether it runs, and into its log"
            )
        time.sleep(0.5)


def _hindrance(config: LaunchConfig) -> str:
    """Return what keeps this node from joining the first one; empty if nothing does, or if torch takes this one for the first.

    Where a node's container was started again, the first node may not have noticed yet and still serve the group that is lost. Who
    joined that one would wait for processes that never come, while the first node, started again too, waits for this one. So each node
    of a static job notes on the first one that it came.
    """
    from torch.distributed import DistError, TCPStore  # type: ignore[attr-defined]  # public, torch documents it

    from trainer.runner.elastic_private import is_this_machine

    host, _, port = config.rdzv_endpoint.rpartition(":")
    try:
        is_first = _node_rank() == 0 if _is_static(config) else is_this_machine(host)
        if is_first:
            return ""
        socket.create_connection((host, int(port)), timeout=5).close()
        if not _is_static(config):
            return ""
        store = TCPStore(host, int(port), timeout=timedelta(seconds=5), wait_for_workers=False)
        came = store.add(f"trainer/node-{_node_rank()}", 1)
    except (OSError, DistError) as error:  # not there yet, or its name is not known yet
        return str(error)
    return "it still runs from before this node was started again" if came > 1 else ""


def _run_agent(config: LaunchConfig, spec: JobSpec, *, launched_unix: float, node: str = "") -> None:
    """Start this machine's processes, wait for them, and end them all if one fails; `node` names this machine, if needed."""
    from torch.distributed.elastic.multiprocessing import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

    from trainer.runner import elastic_private

    config.shutdown_timeout = SHUTDOWN_TIMEOUT_S
    with tempfile.TemporaryDirectory(prefix="trainer-") as failures, quiet_agent():
        # Each process has its share of the cores, unless the user has said otherwise.
        threads = os.environ.get("OMP_NUM_THREADS") or str(max(1, usable_cores() // spec.processes_per_node))
        given = {"OMP_NUM_THREADS": threads, **spec.environment}
        try:
            with environment_variables({**given, FAILURES_VARIABLE: failures, LAUNCHED_VARIABLE: str(launched_unix)}):
                elastic_private.run(config, spec.arguments())
        except SignalException as error:
            raise (Terminated if error.sigval == signal.SIGTERM else KeyboardInterrupt) from error
        except ChildFailedError as error:
            raise _explain(spec, Path(failures), _first_exit_codes(error), node=node) from error


@contextmanager
def quiet_agent() -> Iterator[None]:
    """Let torch's agent log errors only in its own words where we have none."""
    names = ("torch.distributed.elastic", "torch.distributed.launcher", "torch.distributed.run")
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
        start = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))
        content = json.dumps({"message": message, "trace": trace, "start": start})
        (Path(folder) / f"{os.environ.get('LOCAL_RANK', '0')}.json").write_text(content, encoding="utf-8")
    elif trace:
        print(trace, file=sys.stderr)


def write_termination_message(message: str) -> None:
    """Write a failing node's message where Kubernetes looks for it, so that it outlives the pod."""
    named = os.environ.get(TERMINATION_LOG_VARIABLE)
    path = Path(named or TERMINATION_LOG)
    if not named and not path.exists():
        return
    try:
        path.write_bytes(message.encode(errors="backslashreplace")[:TERMINATION_LOG_BYTES])
    except OSError as error:
        logger.warning("the message could not be written to %s: %s", path, error)


def _first_exit_codes(error: ChildFailedError) -> dict[int, int]:
    """Map rank on this node -> exit code of the processes that failed first; those that the agent then ended had no choice."""
    failed = error.failures.values()
    first = min(failure.timestamp for failure in failed)
    return {one.local_rank: one.exitcode for one in failed if one.timestamp - first < AT_ONCE_S}


def _explain(spec: JobSpec, failures: Path, exit_codes: Mapping[int, int], *, node: str = "") -> TrainerError:
    """Make the message for a failed job, after printing the traceback of the process at fault."""
    # The processes that left a message since they were last started, the earliest first.
    paths = sorted(failures.glob("*.json"), key=lambda path: path.stat().st_mtime_ns)
    written: list[tuple[int, dict[str, Any]]] = [
        (int(path.stem), json.loads(path.read_text(encoding="utf-8"))) for path in paths
    ]
    last_start = max((failure["start"] for _, failure in written), default=0)
    reported = [entry for entry in written if entry[1]["start"] == last_start]
    missed = {rank for rank, failure in reported if _LOST_CONNECTION.search(failure["message"])}
    # One was asked to end, and the others were too, or report a lost connection.
    explained = (code == PREEMPTED_EXIT_CODE or rank in missed for rank, code in exit_codes.items())
    if PREEMPTED_EXIT_CODE in exit_codes.values() and all(explained):
        return PreemptedError(
            f"{spec.stage}: was asked to end; what was written is kept, and the same command continues from there"
        )
    rank, message, trace = _root_failure(reported, missed, exit_codes)
    print(trace, end="", file=sys.stderr)
    if node and _LOST_CONNECTION.search(message):
        message += f"; {MISSED_ANOTHER}"
    process = f"process {rank} of {spec.processes_per_node}" if spec.processes_per_node > 1 else ""
    where = ", ".join(filter(None, [node, process]))
    kind = LaunchError if exit_codes.get(rank) == EXIT_CODE else CrashError
    is_named = message.startswith(f"{spec.stage}: ") and not where  # by a training of the same name
    return kind(": ".join(filter(None, ["" if is_named else spec.stage, where, message])))


def _root_failure(
    reported: Sequence[tuple[int, dict[str, Any]]], missed: Set[int], exit_codes: Mapping[int, int]
) -> tuple[int, str, str]:
    """Find the process at fault: its rank on this node, its message, its traceback.

    A process that was killed is at fault first, because the others then fail when they miss it; else the earliest that left a message
    since the processes were last started. NCCL's watchdog aborts a process that misses another one, so a message is the better reason.
    """
    harmless = {signal.SIGTERM, signal.SIGABRT} if len(reported) > len(missed) else {signal.SIGTERM}
    killed = [rank for rank, code in exit_codes.items() if code < 0 and -code not in harmless]
    if killed:
        name = signal.Signals(-exit_codes[killed[0]]).name
        advice = "; the machine may be out of memory: lower batch_size or raise accumulation"
        return killed[0], f"was ended by {name}{advice if name == 'SIGKILL' else ''}", ""
    if reported:
        rank, failure = next((entry for entry in reported if entry[0] not in missed), reported[0])
        return rank, failure["message"], failure["trace"]
    others = [entry for entry in exit_codes.items() if entry[1] != PREEMPTED_EXIT_CODE]  # they were not asked to end
    rank, code = others[0]
    return rank, f"ended with exit code {code}; its last lines of output stand above", ""


def gpus() -> int:
    """Count the GPUs of this machine that torch would use; torch, which takes seconds to load, is asked only where there is a driver."""
    import pynvml

    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return 0
    import torch

    return torch.cuda.device_count()


def processes_here(device: str) -> int:
    """Return the default number of training processes here: one for each GPU, if `run.device` may mean them, or else one."""
    return max(1, gpus() if device in {"auto", "cuda"} else 0)
