"""One writer an output: who writes to a directory of this machine holds its lock.

The lock is an flock of the file `.lock` in the directory, which the system drops with the process that held it, so that a killed process
leaves nothing to clean up. The file says who holds it.

Outputs in a store need none: each run of a pipeline has folders of its own there, and of the attempts at a training a later one fences off
the earlier ones (`training.checkpoints`).
"""

from __future__ import annotations

import fcntl
import logging
import os
import platform
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from datetime import datetime
from pathlib import Path

from trainer.io import limits, storage
from trainer.io.errors import OutputError, make_directory, writing_to

logger = logging.getLogger(__name__)

LOCK = ".lock"


@contextmanager
def one_writer(outputs: Iterable[str | Path], *, beside: Iterable[str | Path] = ()) -> Iterator[None]:
    """Hold the locks of outputs while the block runs.

    Args:
        outputs: directories, made where missing; those in a store are left out.
        beside: directories to which nobody else may be writing when the block begins: those below a run's output, or above a stage's.

    Raises:
        OutputError: another process writes there, or the system refuses.
    """
    with ExitStack() as held:
        for output in dict.fromkeys(outputs):  # a wrong command may name one twice
            if not storage.is_remote(output):
                held.enter_context(_lock(storage.local_path(output)))
        # In this order two processes that begin at once cannot miss one another.
        for place in beside:
            if not storage.is_remote(place) and (storage.local_path(place) / LOCK).is_file():
                with _lock(storage.local_path(place)):
                    pass
        yield


@contextmanager
def _lock(directory: Path) -> Iterator[None]:
    is_new = not directory.is_dir()
    make_directory(directory)
    file = directory / LOCK
    with writing_to(directory):
        descriptor = _taken(file)
    try:
        with writing_to(directory):
            os.truncate(descriptor, 0)
            os.write(
                descriptor,
                f"process {os.getpid()} on {platform.node()}, since {datetime.now():%Y-%m-%d %H:%M:%S}".encode(),
            )
        yield
    finally:
        # The lock is free without it as well: a disk that refuses has stopped the work with its own message, which counts.
        with suppress(OSError):
            file.unlink()  # while it is held, or another process would lose the one that it has just taken
        fcntl.flock(descriptor, fcntl.LOCK_UN)  # closing is not enough where a forked process has a copy
        os.close(descriptor)
        if is_new:
            with suppress(OSError):  # it holds something, or is gone
                directory.rmdir()


def _taken(file: Path) -> int:
    """Lock a file, made where missing; returns its descriptor."""
    while True:
        descriptor = os.open(file, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            holder = limits.cut(os.read(descriptor, 1000).decode(errors="replace"), 200) or "another process"
            os.close(descriptor)
            raise OutputError(
                f"cannot write to {file.parent}: {holder}, is writing there; wait until it has ended, or choose another output"
            ) from error
        except OSError as error:  # a file system without locks
            logger.warning("%s: no lock keeps others from writing there (%s)", file.parent, error.strerror)
            return descriptor
        with suppress(FileNotFoundError):
            if file.stat().st_ino == os.fstat(descriptor).st_ino:
                return descriptor
        os.close(descriptor)  # the process that held it has removed it
