"""When torch compiles graphs, and how long that takes."""

from __future__ import annotations

import time

from torch._dynamo.callback import CallbackArgs, callback_handler

from trainer.profiling.evidence_schema import CompilationRecord
from trainer.profiling.timeline import Timeline


class Compilations:
    """Hears of all that torch compiles within the steps of a recording, backward passes too."""

    def __init__(self, timeline: Timeline) -> None:
        """While `timeline` records."""
        self._timeline = timeline
        self._graphs: dict[int, int] = {}
        self._seconds: dict[int, float] = {}
        self._began = 0.0

    def start(self) -> None:
        """Begin to hear."""
        callback_handler.register_start_callback(self._started)
        callback_handler.register_end_callback(self._ended)

    def stop(self) -> None:
        """Hear no more."""
        callback_handler.remove_start_callback(self._started)
        callback_handler.remove_end_callback(self._ended)

    @property
    def records(self) -> tuple[CompilationRecord, ...]:
        """A record for each step that compiled something."""
        return tuple(
            CompilationRecord(step=step, graphs=graphs, seconds=self._seconds[step])
            for step, graphs in self._graphs.items()
        )

    def _started(self, _: CallbackArgs) -> None:
        self._began = time.perf_counter()

    def _ended(self, _: CallbackArgs) -> None:
        if self._timeline.inside_step:
            step = self._timeline.steps_completed
            self._graphs[step] = self._graphs.get(step, 0) + 1
            self._seconds[step] = self._seconds.get(step, 0.0) + time.perf_counter() - self._began
