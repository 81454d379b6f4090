"""A running container: a local process, or a script that is played."""

from __future__ import annotations

import os
import signal
import subprocess
import threading
import time
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import psutil

from tests.stand_ins.kubernetes.logs import Log
from tests.stand_ins.kubernetes.store import now

ROOT = Path(__file__).parents[3]
TERMINATION_MESSAGE_BYTES = 4096
_KILL_PAUSE_S = 0.01
_MARK = "STAND_IN_CONTAINER"
"""Environment variable by which the processes of a container know each other, as they would by their namespace."""


@dataclass(frozen=True, kw_only=True)
class Script:
    """How one start of a pod goes, instead of or around its real command."""

    output: Sequence[str | float] | None = None
    """Lines to print, and pauses in seconds between them, instead of running the command; `None` runs it."""
    exit_code: int = 0
    hang: bool = False
    """Keep running after the output until ended from outside."""
    reason: str = ""
    """Of the end, such as OOMKilled; by the exit code if empty."""
    termination_message: str = ""
    pending_s: float = 0.0
    """How long no node is found, with the event FailedScheduling."""
    creating_s: float = 0.0
    """How long the container is being created, as while its image is pulled; before a first start only."""
    pull_error_s: float = 0.0
    """How long the image cannot be pulled, with ErrImagePull and ImagePullBackOff."""


@dataclass(frozen=True, kw_only=True)
class End:
    """How a container ended."""

    exit_code: int
    reason: str
    message: str
    finished_at: str


class Container(Protocol):
    """One start of a pod's container."""

    log: Log
    started_at: str
    id: str

    def end(self) -> End | None: ...

    def signal(self, number: int, reason: str = "") -> None:
        """Send a signal to the first process; SIGKILL ends all of them. `reason` is kept if it ends by that."""
        ...

    def join(self) -> None:
        """Wait until it has ended."""
        ...


class _Base:
    def __init__(self, thread_name: str) -> None:
        self.log = Log()
        self.started_at = now()
        self.id = f"stand-in://{uuid.uuid4().hex}"
        self._end: End | None = None
        self._reason = ""
        self._thread = threading.Thread(target=self._run, name=thread_name)

    def end(self) -> End | None:
        return self._end

    def join(self) -> None:
        self._thread.join()

    def _run(self) -> None:
        raise NotImplementedError

    def _finish(self, exit_code: int, reason: str, message: str) -> None:
        self.log.end()
        reason = self._reason or reason or ("Completed" if exit_code == 0 else "Error")
        self._end = End(exit_code=exit_code, reason=reason, message=message, finished_at=now())


class PlayedContainer(_Base):
    """Prints a script's lines."""

    def __init__(self, script: Script, thread_name: str) -> None:
        super().__init__(thread_name)
        self._script = script
        self._signaled = threading.Event()
        self._number = 0
        self._thread.start()

    def signal(self, number: int, reason: str = "") -> None:
        if self._end is None:
            self._number, self._reason = number, reason
            self._signaled.set()

    def _run(self) -> None:
        for item in self._script.output or ():
            if isinstance(item, str):
                self.log.write(item)
            elif self._signaled.wait(item):
                break
        if self._script.hang:
            self._signaled.wait()
        if self._signaled.is_set():
            self._finish(128 + self._number, "", "")
        else:
            self._finish(self._script.exit_code, self._script.reason, self._script.termination_message)


class ProcessContainer(_Base):
    """Runs a command on this machine, in the root of the repository."""

    def __init__(
        self,
        command: Sequence[str],
        environment: Mapping[str, str],
        message_file: Path,
        *,
        log_is_message: bool,
        name: str,
    ) -> None:
        """Start the command.

        Args:
            command: program and arguments.
            environment: all of its variables.
            message_file: where it leaves its termination message.
            log_is_message: whether the log's end stands in for a missing message after a failure.
            name: of the pod, for the threads.

        Raises:
            OSError: there is no such program.
        """
        super().__init__(f"pod-{name}")
        self._message_file, self._log_is_message = message_file, log_is_message
        self._process = subprocess.Popen(
            command,
            cwd=ROOT,
            env={**environment, _MARK: self.id},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            start_new_session=True,
        )
        self._reader = threading.Thread(target=self._read, name=f"log-{name}")
        self._reader.start()
        self._thread.start()

    def signal(self, number: int, reason: str = "") -> None:
        if self._end is not None:
            return
        self._reason = reason
        if number == signal.SIGKILL:
            self._kill_all()
        else:
            self._process.send_signal(number)

    def _read(self) -> None:
        assert self._process.stdout
        with self._process.stdout as lines:
            for line in lines:
                self.log.write(line.rstrip("\n"))

    def _run(self) -> None:
        code = self._process.wait()
        self._kill_all()  # a container's other processes do not outlive its first one, and hold the log open
        self._reader.join()
        exit_code = code if code >= 0 else 128 - code
        self._finish(exit_code, "", self._message(exit_code))

    def _message(self, exit_code: int) -> str:
        content = self._message_file.read_bytes()[:TERMINATION_MESSAGE_BYTES] if self._message_file.exists() else b""
        if content or not exit_code or not self._log_is_message:
            return content.decode(errors="replace")
        return self.log.tail(80)[-2048:]

    def _kill_all(self) -> None:
        """Kill the container's processes until there are none: one may start another just before its end."""
        while self._kill_those_seen():
            time.sleep(_KILL_PAUSE_S)

    def _kill_those_seen(self) -> bool:
        seen = False
        for process in psutil.process_iter():
            try:
                if process.environ().get(_MARK) == self.id:
                    process.kill()
                    seen = True
            except psutil.Error:
                continue  # it has just ended, or is another user's
        return seen


def inherited() -> dict[str, str]:
    """What a pod's process gets of this one's environment: the machine's, and coverage's."""
    names = ("PATH", "LANG", "LC_ALL", "LD_LIBRARY_PATH", "OMP_NUM_THREADS")
    return {
        name: value
        for name, value in os.environ.items()
        if name in names or name.startswith(("COVERAGE_", "COV_CORE_"))
    }
