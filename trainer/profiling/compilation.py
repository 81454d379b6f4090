"""When torch compiles graphs, and how long that takes."""

from __future__ import annotations

import time

from trainer.devices.torch_private import CompileHooks
from trainer.profiling.evidence_schema import CompilationRecord
from trainer.profiling.timeline import Timeline


class Compilations:
    """Counts and times what torch compiles within the steps of a recording, backward passes too."""

    def __init__(self, timeline: Timeline) -> None:
        """While `timeline` records."""
        self._timeline = timeline
        self._graphs: dict[int, int] = {}
        self._seconds: dict[int, float] = {}
        self._began = 0.0
        self._hooks = CompileHooks(self._started, self._ended)

    def start(self) -> None:
        """Begin to count."""
        self._hooks.add()

    def stop(self) -> None:
        """Count no more."""
        self._hooks.remove()

    @property
    def records(self) -> tuple[CompilationRecord, ...]:
        """A record for each step that compiled something."""
        return tuple(
            CompilationRecord(step=step, graphs=graphs, seconds=self._seconds[step])
            for step, graphs in self._graphs.items()
        )

    def _started(self) -> None:
        self._began = time.perf_counter()

    def _ended(self) -> None:
        if self._timeline.inside_step:
            step = self._timeline.steps_completed
            self._graphs[step] = self._graphs.get(step, 0) + 1
            self._seconds[step] = self._seconds.get(step, 0.0) + time.perf_counter() - self._began
