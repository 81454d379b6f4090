"""Spans: names for blocks of code, whose time the timeline of the current context records."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from typing import Any

from trainer.profiling.timeline import PHASES, Clock, StepCounter, Timeline

_recording: ContextVar[Timeline | None] = ContextVar("timeline", default=None)
_NO_SPAN: AbstractContextManager[None] = nullcontext()


def span(name: str) -> AbstractContextManager[None]:
    """Name a block of code, whose time the timeline of this context records; without one, do nothing.

    Threads have contexts of their own, so what they do is never mixed into the training's timeline.

    Raises:
        ValueError: the name is reserved or holds a slash.
    """
    timeline = _recording.get()
    return _NO_SPAN if timeline is None else timeline.span(name)


@contextmanager
def recording_to(timeline: Timeline) -> Iterator[None]:
    """Let the spans of a block, which this thread runs, count for `timeline`."""
    token = _recording.set(timeline)
    try:
        yield
    finally:
        _recording.reset(token)


def seconds_of_a_mark(clock: Clock[Any], counter: StepCounter | None = None) -> float:
    """What a mark of a timeline costs, with its share of what a step costs; measured on steps of the usual phases with nothing in them."""
    timeline, steps = Timeline(clock, counter=counter, steps_kept=2, spans_kept=2), 100
    timeline.start()
    with recording_to(timeline):
        began = time.perf_counter()
        for step in range(steps):
            with timeline.step(step):
                for name in PHASES:
                    with span(name):
                        pass
        seconds = time.perf_counter() - began
    timeline.finish()
    return seconds / timeline.totals.marks
