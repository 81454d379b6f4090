"""Processes that share no locks with this one, and none runs the program again that started it.

A forked copy of a process with threads (CUDA's, Arrow's, fsspec's) hangs where one of these held a lock at that moment. So processes are
spawned, or forked from a server that has no thread: Python's fork server, which has imported what they need, once.

Python runs the main module in each of them once more, so that what is defined there can be sent to them. A script without
`if __name__ == "__main__":` that calls the public API would so begin all its work again in each. What is sent to ours is defined in
modules, so they get an empty main module in its place.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import threading
import types
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing import forkserver
from multiprocessing.context import ForkServerContext, ForkServerProcess, SpawnContext, SpawnProcess


@contextmanager
def _main_module_hidden() -> Iterator[None]:
    main = sys.modules["__main__"]
    sys.modules["__main__"] = types.ModuleType("__main__")
    try:
        yield
    finally:
        sys.modules["__main__"] = main


class SpawnedProcess(SpawnProcess):
    """A process of `SPAWNED`."""

    def start(self) -> None:
        """Start it as Python does, but for the main module."""
        with _main_module_hidden():
            super().start()


class _Spawning(SpawnContext):
    Process = SpawnedProcess


SPAWNED = _Spawning()
"""For `ProcessPoolExecutor`, `DataLoader` and whatever else takes a context of multiprocessing; each process imports what it needs."""


PRELOADED = ["trainer.io.child_processes", "trainer.data.loader"]  # what the fork server imports


class ServedProcess(ForkServerProcess):
    """A process of `SERVED`."""

    def start(self) -> None:
        """Start it as Python does, but for the main module."""
        start_server()
        with _main_module_hidden():
            super().start()


class _Serving(ForkServerContext):
    Process = ServedProcess


SERVED = _Serving()
"""The same, of processes that are forked from the server: each starts within a second, and shares memory with what that has imported."""


def start_server() -> None:
    """Let the fork server begin to import, in the background; one that runs already is left as it is."""
    forkserver.set_forkserver_preload(PRELOADED)
    with _main_module_hidden():
        forkserver.ensure_running()


def end_with_parent() -> None:
    """Let this process end when the one that has asked for it ends, also where that is killed."""
    parent = multiprocessing.parent_process()
    assert parent is not None

    def wait() -> None:
        parent.join()
        os.kill(os.getpid(), signal.SIGKILL)

    threading.Thread(target=wait, name="end-with-parent", daemon=True).start()


if getattr(sys.modules["__main__"], "main", None) is forkserver.main:
    # This is the server. A launcher asks a training's group to end as a whole, and its last step may need a batch more.
    os.setpgid(0, 0)
