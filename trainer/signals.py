"""Being asked to end."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NoReturn


@contextmanager
def ended_by_sigterm() -> Iterator[None]:
    """Let SIGTERM, by which schedulers and other programs end a process, end the block as Ctrl-C does.

    After the block the signal does what it did before, so that the interpreter's own end is not interrupted with a traceback.

    Raises:
        KeyboardInterrupt: the signal came.
    """
    before = signal.signal(signal.SIGTERM, _interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _interrupt(_number: int, _frame: object) -> NoReturn:
    raise KeyboardInterrupt
