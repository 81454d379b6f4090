"""An object store whose client dies in the middle of its work."""

from __future__ import annotations

import itertools
from collections.abc import Callable

from tests.stand_ins.object_store import Fault, ObjectStore


class WatchedStore(ObjectStore):
    """Lets somebody act before the N-th request that changes something is done."""

    def __init__(self) -> None:
        super().__init__()
        self.before: Callable[[int], None] = lambda _number: None
        """Called with the number of each such request, counted from 1, before it is done."""
        self._numbers = itertools.count(1)

    def watch(self, before: Callable[[int], None]) -> None:
        """Count anew, and call this."""
        self.before, self._numbers = before, itertools.count(1)

    def fault(self, method: str, target: str) -> Fault | None:
        if method in ("PUT", "POST", "DELETE"):
            self.before(next(self._numbers))
        return super().fault(method, target)
