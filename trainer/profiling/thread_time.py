"""How long a thread has waited for a core."""

from __future__ import annotations

import math
import os
import weakref


class ThreadTime:
    """How long the thread that opens it has waited for a core, as Linux counts it."""

    def __init__(self) -> None:
        self._file: int | None = None

    def open(self) -> None:
        """Begin; where the kernel does not tell, times are NaN."""
        try:
            self._file = os.open("/proc/thread-self/schedstat", os.O_RDONLY | os.O_CLOEXEC)
            weakref.finalize(self, os.close, self._file)
        except OSError:
            self._file = None

    def delayed_ns(self) -> float:
        """Nanoseconds since the thread began."""
        return math.nan if self._file is None else int(os.pread(self._file, 64, 0).split()[1])
