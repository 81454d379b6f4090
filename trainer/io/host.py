"""This host and this process: its processor and cores; its start, its environment variables, and requests to end it.

A request by SIGTERM or Ctrl-C is followed at once, or when the moment is right.
"""

from __future__ import annotations

import codecs
import io
import json
import os
import platform
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn, Self

import psutil

from trainer.io.errors import OutputError

LAUNCHED_VARIABLE = "TRAINER_LAUNCHED"
"""Environment variable with the Unix time at which a launcher, or a node's pod, started or restarted the job of this process."""
AHEAD_VARIABLE = "TRAINER_AHEAD"
"""Environment variable with JSON: name of a training -> how many times its work the later trainings of the run are."""
MODULES_VARIABLE = "TRAINER_MODULES"
"""Environment variable with the modules whose functions settings may name."""
SHUTDOWN_TIMEOUT_S = 30  # for processes to write a checkpoint and end, after one has failed or a request to end
AGAIN_S = 1.0  # a later signal is a second request to end; a sooner one may be the same request by another way
_CGROUPS = Path("/sys/fs/cgroup")


def processor_name() -> str:
    """Return the model of this machine's processor, as far as the operating system knows it."""
    information = Path("/proc/cpuinfo")
    lines = information.read_text(encoding="utf-8").splitlines() if information.is_file() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def usable_cores(cgroups: Path = _CGROUPS) -> int:
    """Count the cores that this process may use: those it may run on, or fewer where a container's CPU limit is lower."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    # The microseconds of CPU time that the container has in each period, and the period: control groups of version 2, or of version 1.
    second, first = cgroups / "cpu.max", cgroups / "cpu"
    quota, period = "max", "1"
    if second.exists():
        quota, period = second.read_text(encoding="utf-8").split()
    elif (first / "cpu.cfs_quota_us").exists():
        quota, period = ((first / f"cpu.cfs_{name}_us").read_text(encoding="utf-8") for name in ("quota", "period"))
    is_limited = quota != "max" and int(quota) > 0
    return max(1, min(cores, int(quota) // int(period))) if is_limited else cores


def usable_memory(cgroups: Path = _CGROUPS) -> int:
    """Return the bytes of memory that this process may use: the machine's, or fewer where its container has a limit."""
    memory: int = psutil.virtual_memory().total
    for file in (cgroups / "memory.max", cgroups / "memory/memory.limit_in_bytes"):
        if file.exists() and (text := file.read_text(encoding="utf-8").strip()) != "max":
            memory = min(memory, int(text))
    return memory


def started_unix() -> float:
    """Return when this process was started, to a hundredth of a second; `psutil` would drop the fraction of the boot time on Linux."""
    if sys.platform != "linux":
        return psutil.Process().create_time()
    # Bytes, since the name in brackets may end within a character. The fields stand after it.
    fields = Path("/proc/self/stat").read_bytes().rpartition(b")")[2].split()
    ticks = int(fields[19])  # field 22 of all
    return time.time() - time.clock_gettime(time.CLOCK_BOOTTIME) + ticks / os.sysconf("SC_CLK_TCK")


def seconds_since_launch() -> float:
    """Return the seconds since this process's job began, or was last restarted, on this machine; without a launcher, since it began."""
    launched = os.environ.get(LAUNCHED_VARIABLE)
    began_unix = started_unix() if launched is None else float(launched)
    return max(0.0, time.time() - began_unix)


def ensure_home() -> None:
    """Give this process and those that it starts a home directory, for caches, where a container has none: for a user whom the system
    does not know, or the `/nonexistent` of another. MLflow cannot be imported without one.
    """
    if not Path(os.path.expanduser("~")).is_dir():  # noqa: PTH111  # Path.home raises where there is none
        home = Path(tempfile.gettempdir()) / f"vit-distillation-home-{os.getuid()}"
        home.mkdir(mode=0o700, exist_ok=True)
        if home.stat().st_uid != os.getuid():
            raise OutputError(
                f"HOME is no directory, and {home} is another user's; set HOME to one that may be written"
            )
        os.environ["HOME"] = str(home)


def escape_what_cannot_be_printed() -> None:
    """Let `print` escape the characters that the terminal's encoding lacks, as JSON escapes them, so that no output ends in an error."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors=_JSON_ESCAPES)


def _escaped(error: UnicodeError) -> tuple[str, int]:
    if not isinstance(error, UnicodeEncodeError):
        raise error
    return json.dumps(error.object[error.start : error.end])[1:-1], error.end


_JSON_ESCAPES = "trainer.json_escapes"
codecs.register_error(_JSON_ESCAPES, _escaped)


@contextmanager
def environment_variables(values: Mapping[str, str]) -> Iterator[None]:
    """Set these variables for this process and those started in the block, and restore the previous values after it."""
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


class Terminated(KeyboardInterrupt):
    """SIGTERM came, by which schedulers and other programs end a process."""


@contextmanager
def ended_by_sigterm() -> Iterator[None]:
    """Let SIGTERM end the block as Ctrl-C does, by `Terminated`; after it the signal does what it did before, without a traceback."""
    before = signal.signal(signal.SIGTERM, _interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _interrupt(number: int, _frame: FrameType | None) -> NoReturn:
    raise Terminated if number == signal.SIGTERM else KeyboardInterrupt


class EndRequest:
    """A request to end that can wait for the right moment. A second one, more than `AGAIN_S` later, never waits.

    with EndRequest() as request:
        prepare()                # ends at once
        request.defer()
        while not request.came:  # only noted from here on
            step()
    """

    def __init__(self) -> None:
        """Begin without a request; signals reach this object while `with` is open."""
        self.came = False  # whether this process was asked to end
        self._deferred = False
        self._came_s = 0.0
        self._before: dict[signal.Signals, Any] = {}

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():  # Python delivers signals to no other thread
            for number in (signal.SIGTERM, signal.SIGINT):
                self._before[number] = signal.signal(number, self._handle)
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        """Restore the signals' former handlers; a request that the block has not followed ends it now."""
        for number, handler in self._before.items():
            signal.signal(number, handler)
        if kind is None and self.came:
            raise Terminated

    def defer(self) -> None:
        self._deferred = True

    def _handle(self, number: int, frame: FrameType | None) -> None:
        now = time.monotonic()
        again = self.came and now - self._came_s > AGAIN_S
        if not self.came:
            self.came, self._came_s = True, now
        if again or not self._deferred:
            _interrupt(number, frame)
