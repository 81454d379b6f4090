"""Faults inside the processes of a job: what is done, and when.

A fault comes in the environment variable INJECTED_FAULT and is put in place before anything else runs: by `injection/sitecustomize.py`,
which Python imports at its start, or by `install` in a process that is there already. It strikes once, in one process, before

    step S                the training's step S (`Trainer.train_step`), on one rank
    write N, below F      the N-th thing done to the file system below a folder: a file opened for writing, fsync, rename, removal, ...
    load P                the loading of the micro-batch that begins at position P or later, in a loader process

Whatever happens is noted in the folder INJECTED_NOTES: `fired` when the fault strikes, every step that is completed, the number of writes.
Nothing here imports more than the standard library, because most processes are not concerned.
"""

from __future__ import annotations

import builtins
import contextlib
import ctypes
import errno
import functools
import importlib.abc
import importlib.machinery
import importlib.util
import io
import itertools
import json
import os
import resource
import signal
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

FAULT, NOTES = "INJECTED_FAULT", "INJECTED_NOTES"
TORN_BYTES = 64
"""What a torn file is cut to."""
_WRITE_FLAGS = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND
_NAME_AND_FOLDER = {"os.remove": (0, 1), "os.rmdir": (0, 1), "os.mkdir": (0, 2), "os.rename": (0, 2), "os.link": (0, 2)}
"""Audit event -> where its arguments have the path and the descriptor of the folder that a relative path starts at."""


@dataclass(frozen=True, kw_only=True)
class Fault:
    """One fault; of `step`, `write` and `load` one is given."""

    does: str
    """A signal's name, sent to `to`; or a key of `_ACTIONS`."""
    rank: int = 0
    """Which training process it strikes in."""
    step: int | None = None
    write: int | None = None
    load: int | None = None
    folder: str = ""
    """For `write`: below which folder."""
    to: int = 0
    """Who gets the signal: 0 the process itself, -1 its parent, or the number of another one; minus that of a group."""
    seconds: float = 0.0
    """How long it sleeps, or by how much it moves the clock."""

    def environment(self, notes: Path) -> dict[str, str]:
        """The variables of a job that it strikes."""
        root = Path(__file__).parents[2]
        paths = [str(Path(__file__).parent / "injection"), str(root), os.environ.get("PYTHONPATH", "")]
        return {FAULT: json.dumps(asdict(self)), NOTES: str(notes), "PYTHONPATH": os.pathsep.join(filter(None, paths))}


NONE = Fault(does="nothing")
"""Only takes notes."""


class Notes:
    """What the processes of a job note, and whoever started it reads."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def fire(self) -> bool:
        """Note that the fault strikes now; gives whether it is the first time."""
        try:
            descriptor = os.open(self.folder / "fired", os.O_WRONLY | os.O_CREAT | os.O_EXCL)
        except FileExistsError:
            return False
        os.write(descriptor, str(time.monotonic()).encode())
        os.close(descriptor)
        return True

    @property
    def fired(self) -> float | None:
        """When it struck, by the machine's monotonic clock."""
        path = self.folder / "fired"
        return float(path.read_text()) if path.exists() else None

    def step(self, rank: int, step: int) -> None:
        line = f"{rank} {step} {time.monotonic()}\n".encode()
        descriptor = os.open(self.folder / "steps", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.write(descriptor, line)
        os.close(descriptor)

    @property
    def steps(self) -> list[tuple[int, int, float]]:
        """Rank, step and time of every completed step, as they came."""
        path = self.folder / "steps"
        lines = path.read_text().splitlines() if path.exists() else []
        return [(int(rank), int(step), float(at)) for rank, step, at in (line.split() for line in lines)]

    def write(self, number: int, what: str) -> None:
        """Note a write, so that a fault can be put before each of them."""
        descriptor = os.open(self.folder / "writes", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.write(descriptor, f"{number} {what}\n".encode())
        os.close(descriptor)

    @property
    def writes(self) -> list[str]:
        """What was written, in order."""
        path = self.folder / "writes"
        return [line.partition(" ")[2] for line in path.read_text().splitlines()] if path.exists() else []


# ---------------------------------------------------------------------------------------------------------------------
# When


def install_from_environment() -> None:
    """Put the fault of the environment in place, if there is one."""
    if FAULT in os.environ:
        install(Fault(**json.loads(os.environ[FAULT])), Notes(Path(os.environ[NOTES])))


def install(fault: Fault, notes: Notes) -> None:
    """Put a fault in place in this process, if it is the one that is meant."""
    rank = int(os.environ.get("RANK", "0"))
    after_import("trainer.training.loop", lambda loop: _at_steps(loop, fault, notes, rank))
    if rank != fault.rank:
        return
    if fault.load is not None:
        after_import("trainer.data.loader", lambda loader: _at_loads(loader, fault, notes))
    if fault.folder:
        _at_writes(fault, notes)


def _at_steps(loop: Any, fault: Fault, notes: Notes, rank: int) -> None:
    plain = loop.Trainer.train_step

    @functools.wraps(plain)
    def step(self: Any, number: int, *arguments: Any) -> Any:
        if fault.step == number and fault.rank == rank and notes.fire():
            act(fault, self)
        losses = plain(self, number, *arguments)
        notes.step(rank, number)
        return losses

    loop.Trainer.train_step = step


def _at_loads(loader: Any, fault: Fault, notes: Notes) -> None:
    plain = loader.MicroBatches.__getitem__

    def getitem(self: Any, position: int) -> Any:
        if fault.load is not None and position >= fault.load and notes.fire():
            act(fault)
        return plain(self, position)

    loader.MicroBatches.__getitem__ = getitem


def _at_writes(fault: Fault, notes: Notes) -> None:
    """Count what is done below a folder, and strike before the N-th of it."""
    count, lock, inside = itertools.count(1), threading.Lock(), threading.local()
    folder = os.path.realpath(fault.folder)

    def written(what: str, path: str) -> None:
        if getattr(inside, "busy", False) or not os.path.realpath(path).startswith(folder + os.sep):
            return
        inside.busy = True
        try:
            with lock:
                number = next(count)
                notes.write(number, f"{what} {os.path.relpath(path, folder)}")
            if fault.write is not None and number >= fault.write and (notes.fire() or fault.does in _PERSISTENT):
                act(fault, path)
        finally:
            inside.busy = False

    sys.addaudithook(lambda event, arguments: _tell(event, arguments, written))
    plain = os.fsync

    def fsync(descriptor: int) -> None:
        written("fsync", str(_opened(descriptor)))
        plain(descriptor)

    os.fsync = fsync
    if fault.does == "ENOSPC":
        _send_to_full_disk(fault, notes, folder)


def _tell(event: str, arguments: tuple[Any, ...], written: Callable[[str, str], None]) -> None:
    """Pass on what an audit event writes to."""
    if event == "open":
        path, _, flags = arguments
        if isinstance(path, str | bytes | os.PathLike) and flags & _WRITE_FLAGS:
            written("open", os.fsdecode(path))
    elif event == "os.truncate" and not isinstance(arguments[0], int):
        written("truncate", os.fsdecode(arguments[0]))
    elif event in _NAME_AND_FOLDER:
        name, folder = (arguments[index] for index in _NAME_AND_FOLDER[event])
        start = _opened(folder) if isinstance(folder, int) and folder >= 0 else Path()
        written(event.partition(".")[2], str(start / os.fsdecode(name)))


def _opened(descriptor: int) -> Path:
    return Path(f"/proc/self/fd/{descriptor}").readlink()


def _send_to_full_disk(fault: Fault, notes: Notes, folder: str) -> None:
    """From the fault on, let files that are opened for writing be /dev/full: the kernel refuses what is written into them."""
    plain = io.open

    def opened(file: Any, mode: str = "r", *arguments: Any, **keywords: Any) -> Any:
        named = isinstance(file, str | os.PathLike) and os.path.realpath(file).startswith(folder + os.sep)
        if named and not set(mode) <= set("rbtU") and notes.fired is not None:
            return plain("/dev/full", mode.replace("x", "w"), *arguments, **keywords)
        return plain(file, mode, *arguments, **keywords)

    io.open = builtins.open = opened


class _Patching(importlib.abc.MetaPathFinder):
    """Lets functions look at modules when these have been imported."""

    def __init__(self) -> None:
        self.wanted: dict[str, Callable[[Any], None]] = {}

    def find_spec(self, name: str, path: Any, target: Any = None) -> importlib.machinery.ModuleSpec | None:
        change = self.wanted.pop(name, None)
        spec = importlib.util.find_spec(name) if change else None
        if change is None or spec is None or spec.loader is None:
            return None
        plain = spec.loader.exec_module

        def exec_module(module: Any) -> None:
            plain(module)
            change(module)

        spec.loader.exec_module = exec_module
        return spec


_patching = _Patching()


def after_import(name: str, change: Callable[[Any], None]) -> None:
    """Change a module when it has been imported; at once if it is there."""
    if name in sys.modules:
        change(sys.modules[name])
        return
    if _patching not in sys.meta_path:
        sys.meta_path.insert(0, _patching)
    _patching.wanted[name] = change


# ---------------------------------------------------------------------------------------------------------------------
# What


def act(fault: Fault, subject: Any = None) -> None:
    """Do what a fault does; `subject` is the loop, or the path that is about to be written."""
    if fault.does in signal.Signals.__members__:
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        os.kill(_target(fault), signal.Signals[fault.does])
    else:
        _ACTIONS[fault.does](fault, subject)


def _target(fault: Fault) -> int:
    return {0: os.getpid(), -1: os.getppid()}.get(fault.to, fault.to)


def _ask_twice(fault: Fault, _subject: Any) -> None:
    """SIGTERM, and again when it cannot be the same request by another way any more."""
    target = _target(fault)
    os.kill(target, signal.SIGTERM)
    later = threading.Timer(1.2, lambda: _ask_again(target))
    later.daemon = True
    later.start()


def _ask_again(target: int) -> None:
    with contextlib.suppress(ProcessLookupError):  # it has ended meanwhile
        os.kill(target, signal.SIGTERM)


def _tear(_fault: Fault, _path: str) -> None:
    """Let the kernel end this process in the middle of the next write that makes a file longer than `TORN_BYTES`."""
    ctypes.CDLL(None).signal(signal.SIGXFSZ, 0)  # Python ignores the signal, and lets only its main thread change that
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_FSIZE, (TORN_BYTES, TORN_BYTES))


def _refuse(fault: Fault, path: str) -> None:
    number = getattr(errno, fault.does)
    raise OSError(number, os.strerror(number), path)


def _poison(_fault: Fault, trainer: Any) -> None:
    """A weight of this process is no number any more."""
    next(trainer.model.parameters()).data.view(-1)[0] = float("nan")


def _move_clock(fault: Fault, _subject: Any) -> None:
    plain = time.time
    time.time = lambda: plain() + fault.seconds


_ACTIONS: dict[str, Callable[[Fault, Any], None]] = {
    "SIGTERM twice": _ask_twice,
    "tear": _tear,
    "ENOSPC": _refuse,
    "EROFS": _refuse,
    "poison": _poison,
    "clock": _move_clock,
    "sleep": lambda fault, _subject: time.sleep(fault.seconds),
    "abort": lambda _fault, _subject: os.abort(),
    "nothing": lambda _fault, _subject: None,
}
_PERSISTENT = {"ENOSPC", "EROFS"}
"""What stays as it is once it has begun."""
