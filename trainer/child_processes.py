"""Processes that this one starts anew: none runs the program again that started it.

Python's `spawn` runs the main module in each of them once more, so that what is defined there can be sent to them. A script without
`if __name__ == "__main__":` that calls the public API would so begin all its work again in each. What is sent to ours is defined in
modules, so they get an empty main module in its place.
"""

from __future__ import annotations

import sys
import types
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.context import SpawnContext, SpawnProcess


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


class _Context(SpawnContext):
    Process = SpawnedProcess


SPAWNED = _Context()
"""For `ProcessPoolExecutor`, `DataLoader` and whatever else takes a context of multiprocessing."""
