"""Processes that start within a moment: forked from a server that has imported what trainings need, which takes seconds."""

from __future__ import annotations

import multiprocessing
import os
import socket
import sys
import uuid
from multiprocessing import forkserver
from multiprocessing.forkserver import ForkServer
from pathlib import Path

from trainer.io.child_processes import PRELOADED
from trainer.stages import STAGES

CONTEXT = multiprocessing.get_context("forkserver")
"""A process of the tests has one such server, and what it has imported is settled when it starts: so all tests fork from this one."""
PRELOADED += ["tests.groups", "trainer.__main__", "mlflow.tracking", *(f"trainer.stages.{name}" for name in STAGES)]
CONTEXT.set_forkserver_preload(PRELOADED)


class Program:
    """What `python -c CODE ARGUMENTS` would do in a folder, in a process that is forked."""

    def __init__(self, code: str, *arguments: str, folder: Path, **variables: str) -> None:
        """Start it; the variables are its own, beside those of this process."""
        name = uuid.uuid4().hex
        self._out, self._err = folder / f".{name}-out", folder / f".{name}-err"
        self._process = CONTEXT.Process(
            target=_execute, args=(code, arguments, folder, os.environ | variables, self._out, self._err)
        )
        self._process.start()

    def is_running(self) -> bool:
        return self._process.is_alive()

    def kill(self) -> None:
        self._process.kill()
        self._process.join()

    def end(self, limit_s: float = 300.0) -> tuple[str, str]:
        """Wait for its end; gives what it wrote to standard output and to standard error.

        Raises:
            AssertionError: it ended with another exit code than 0, or not within the limit.
        """
        self._process.join(limit_s)
        code = self._process.exitcode
        self._process.kill()  # if it has not ended
        said = self._err.read_text()
        assert code == 0, f"exit code {code}: {said}"
        return self._out.read_text(), said


def free_port() -> str:
    with socket.socket() as listener:
        listener.bind(("localhost", 0))
        return str(listener.getsockname()[1])


def on_two_processes(code: str, folder: Path, *arguments: str, **variables: str) -> list[tuple[str, str]]:
    """Run a program on two processes of one group, in a folder; gives what each wrote to standard output and to standard error."""
    group = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": free_port()}
    places = [{"RANK": rank, "LOCAL_RANK": rank} for rank in ("0", "1")]
    programs = [Program(code, *arguments, folder=folder, **group, **place, **variables) for place in places]
    return [program.end() for program in programs]


def _execute(
    code: str, arguments: tuple[str, ...], folder: Path, environment: dict[str, str], out: Path, err: Path
) -> None:
    settle(environment)
    os.chdir(folder)
    for number, file in ((1, out), (2, err)):
        os.dup2(os.open(file, os.O_WRONLY | os.O_CREAT), number)
    sys.argv = ["-c", *arguments]
    exec(compile(code, "<forked>", "exec"), {"__name__": "__main__"})
    sys.stdout.flush()


def settle(environment: dict[str, str]) -> None:
    """Give a forked process what it would have if it had been started plainly in this environment."""
    os.environ.clear()
    os.environ.update(environment)
    import torch

    # Its loader processes come from the server that it comes from itself, in place of one that would first import all again.
    ForkServer.ensure_running = lambda _: None
    forkserver.ensure_running = lambda: None
    torch.set_num_threads(int(environment.get("OMP_NUM_THREADS", "1")))
