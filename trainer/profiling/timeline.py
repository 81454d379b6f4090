"""Where the time of each training step goes.

Code names what it does (`with span("forward"): ...`) inside of steps (`with timeline.step(7, images=1024): ...`). A span belongs to the
timeline that records in the current context (`recording_to`); where none does, it does nothing. Every beginning and
end is one mark of a clock, and the time between two neighboring marks belongs to the innermost range open between them. So times are
exclusive, nothing is counted twice, and the ranges of a step with `OTHER` sum to the step exactly.

- A name in `PHASES` is one column wherever it stands. Any other name inside of a range is a column of its own below it:
  `forward/attention`, and `forward` then holds the rest of the forward pass.
- Outside of a step only the outermost range counts (`evaluate`, `checkpoint`), and what no range covers is `BETWEEN`. The steps
  and what lies outside of them sum to the whole recording.
- On a GPU the marks are events on the current stream, read when they have passed: the host never waits for them. A phase's time is then
  what it adds on the device's way, so loading that hides behind computation costs nothing there; the host's own time is recorded
  besides for whole steps and for `data`.
- On XLA the marks are the host's: `forward` and `backward` are the noting of operations, and the device's time shows as waiting in
  `dispatch`, where the host hands a step over while the device still works at the one before.
"""

from __future__ import annotations

import math
import os
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from contextvars import ContextVar
from dataclasses import dataclass, field
from itertools import pairwise
from operator import add
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch.profiler import record_function

from trainer.devices.torch_private import BACKWARD_THREAD
from trainer.profiling.evidence import ANNOTATION, BETWEEN, OTHER, PHASES, SPAN_COLUMNS, STEP_COLUMNS, phase_of
from trainer.profiling.series import ThinnedTable

if TYPE_CHECKING:
    from trainer.profiling.operator_windows import OperatorWindows
    from trainer.profiling.xla_counters import XlaCounters


class HostClock:
    """Marks points in the training's course and measures the intervals between them later; on the host, in nanoseconds."""

    def __init__(self, nanoseconds: Callable[[], int] = time.perf_counter_ns) -> None:
        self._nanoseconds = nanoseconds

    def mark(self) -> Any:
        """Mark this point."""
        return self._nanoseconds()

    def passed(self, mark: Any) -> bool:  # noqa: ARG002  # other clocks look at it
        """Whether the device has reached the mark, without waiting; the host computes in the order of the program."""
        return True

    def wait(self, mark: Any) -> None:
        """Wait until the device has reached the mark."""

    def intervals(self, marks: Sequence[Any]) -> list[float]:
        """Seconds between neighbors of marks that were passed."""
        return [(end - start) * 1e-9 for start, end in pairwise(marks)]

    def release(self, marks: Sequence[Any]) -> None:
        """Take back marks that are no longer needed."""

    @property
    def backward_thread(self) -> str | None:
        """Name of the thread that runs the backward pass; None where that is the training's thread."""
        return None


class CudaClock(HostClock):
    """Marks are events on the current stream of a GPU, used again and again."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._free: list[torch.cuda.Event] = []

    def mark(self) -> torch.cuda.Event:
        event = self._free.pop() if self._free else torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self._device))
        return event

    def passed(self, mark: torch.cuda.Event) -> bool:
        return bool(mark.query())

    def wait(self, mark: torch.cuda.Event) -> None:
        mark.synchronize()

    def intervals(self, marks: Sequence[torch.cuda.Event]) -> list[float]:
        return [float(start.elapsed_time(end)) * 1e-3 for start, end in pairwise(marks)]

    def release(self, marks: Sequence[torch.cuda.Event]) -> None:
        self._free.extend(marks)

    @property
    def backward_thread(self) -> str:
        return BACKWARD_THREAD.format(self._device.index or 0)


INTERRUPTED = "interrupted"  # a step that ended with an exception
PROFILER = "profiler"  # opening and closing a profiler window
RECORDER = "recorder"  # sampling weights, gradients and attention, inside of steps

STEPS_KEPT = 16384  # rows of the step table; a longer training keeps this many to half of it, evenly spread
SPANS_KEPT = 4096  # ranges outside of steps whose place in time is kept; their sums are always exact
MOST_RANGES = 64  # different columns; ranges with further names count for the range around them
MOST_PENDING = 4096  # steps whose events may be on their way through the device; older ones are given up and counted

_OTHER_COLUMN = 0
_DATA_COLUMN = 1 + PHASES.index("data")
_TO_DEVICE_COLUMN = 1 + PHASES.index("to_device")
_BACKWARD_COLUMN = 1 + PHASES.index("backward")
_ON_HOST = frozenset({_DATA_COLUMN, _TO_DEVICE_COLUMN, _BACKWARD_COLUMN})
"""Phases in which the host waits for loader processes, starts many small kernels, or waits for other training processes."""


@dataclass(slots=True)
class _Segment:
    """Neighboring marks; `owners[i]` is the column of the time from `marks[i]` to `marks[i + 1]`."""

    marks: list[Any]
    owners: list[int]
    start_ns: int
    step: int = -1
    images: int = 0
    profiled: bool = False
    thread_ns: dict[int, list[float]] = field(default_factory=dict)
    """Of the step, as `_OTHER_COLUMN`, and of each of `_ON_HOST` on the host: how long, of that on a core, and ready without one."""
    queued: float = math.nan
    transfers: float = math.nan

    @property
    def inside_step(self) -> bool:
        return self.step >= 0


@dataclass(slots=True)
class OutsideTotal:
    """All ranges of one name outside of steps."""

    count: int = 0
    seconds: float = 0.0


_SAME_MOMENT_NS = 50_000
"""Readings of a thread's times that are less apart are one: each takes four microseconds."""


@dataclass(slots=True)
class StepTotals:
    """Totals over all steps, including those that the table has dropped."""

    steps: int = 0
    seconds: float = 0.0
    images: int = 0
    profiled: int = 0  # steps within a profiler window
    profiled_seconds: float = 0.0
    marks: int = 0  # marks of the clock, within steps and between them
    lost: int = 0  # steps given up because the device was too far behind
    ranges: list[float] = field(default_factory=list)  # seconds of each column of `Timeline.ranges`


class _Span:
    """`with span(name)`; it holds no state, so one object serves every use of a name."""

    __slots__ = ("_name", "_timeline")

    def __init__(self, timeline: Timeline, name: str) -> None:
        self._timeline = timeline
        self._name = name

    def __enter__(self) -> None:
        self._timeline._enter(self._name)

    def __exit__(self, *_: object) -> None:
        self._timeline._leave()


class Timeline:
    """Records the steps of one training in one process, for one thread; the module's docstring defines what counts where.

    A step costs some ten microseconds, and memory is bounded by `steps_kept` rows.
    """

    def __init__(
        self,
        clock: HostClock,
        *,
        windows: OperatorWindows | None = None,
        counter: XlaCounters | None = None,
        queued: Callable[[], float] = lambda: math.nan,
        nanoseconds: Callable[[], int] = time.perf_counter_ns,
        steps_kept: int = STEPS_KEPT,
        spans_kept: int = SPANS_KEPT,
    ) -> None:
        """Record with `clock`, and with `nanoseconds` what the host does; `queued` gives the batches that the loader processes have ready.

        What opening and closing `windows` costs counts outside of the steps.
        """
        self.ranges = [OTHER, *PHASES]  # columns of time inside of steps, by their path
        self.steps = ThinnedTable([*STEP_COLUMNS, *self.ranges], steps_kept)
        """One row a step: `STEP_COLUMNS`, then seconds of each of `ranges`."""
        self.spans = ThinnedTable(SPAN_COLUMNS, spans_kept)
        """Ranges outside of steps; `range` is the position in `outside`."""
        self.outside: dict[str, OutsideTotal] = {BETWEEN: OutsideTotal()}
        self.totals = StepTotals(ranges=[0.0] * len(self.ranges))
        self.origin_ns = 0  # when the recording began, by the host's clock
        self.first_step_s: float | None = None  # end of the first step, by the host's clock since the recording began
        self.clock = clock
        self.on_step: Callable[[int, float, Mapping[str, float]], None] | None = None
        """Gets the number, the seconds and the seconds of each range of every step, once its times are known."""
        self._nanoseconds = nanoseconds
        self._windows = windows
        self._counter = counter
        self._queued = queued
        self.steps_completed = 0  # by the host, since the recording began
        self._span_objects: dict[str, _Span] = {}
        self._columns: dict[tuple[int, str], int] = {}
        self._pending: deque[_Segment] = deque()
        self._segment: _Segment | None = None
        self._open: list[int] = []
        self._annotations: list[record_function] = []  # open ranges of a step whose operators are recorded
        self._thread_read: tuple[int, int, float] = (-_SAME_MOMENT_NS, 0, math.nan)
        """When the thread's times were read, and nanoseconds that it has computed, and waited for a core."""
        self._schedstats: list[int] = []
        """Files in which Linux counts how long the threads of the training wait for a core; none where the kernel does not."""

    # ---- what the training calls

    @contextmanager
    def step(self, step: int, *, images: int = 0) -> Iterator[None]:
        """One optimizer step; `images` is how many it takes over all processes and micro-batches (0: unknown)."""
        if self._current().inside_step or self._open:
            raise RuntimeError(f"step {step} begins inside of a step or range; end that first")
        self._at_window(opens=True)
        mark = self.clock.mark()
        self._hand_over(self._current(), mark)
        self._segment = _Segment(marks=[mark], owners=[_OTHER_COLUMN], start_ns=self._nanoseconds(), step=step)
        self._segment.images = images
        self._segment.profiled = self._windows is not None and self._windows.active
        self._count_thread(self._segment, _OTHER_COLUMN, -1)
        if self._counter is not None:
            self._counter.begin(self.steps_completed)
        completed = False
        try:
            yield
            completed = True
        finally:
            segment = self._current()
            if self._counter is not None:
                segment.transfers = self._counter.end(self.steps_completed)
            mark = self.clock.mark()
            self._count_thread(segment, _OTHER_COLUMN, 1)
            segment.queued = self._queued()
            if not completed:
                owners = [self._outside_index(INTERRUPTED)]
                segment = _Segment(marks=segment.marks[:1], owners=owners, start_ns=segment.start_ns)
            self._hand_over(segment, mark)
            self._begin_outside(mark)
            if completed:
                if self.first_step_s is None:
                    self.first_step_s = self.now_s()
                    self._find_backward_thread()
                self._at_window(opens=False)
                self.steps_completed += 1
            self._take_in_passed()

    def count_images(self, images: int) -> None:
        """Add images to those of the step."""
        self._current().images += images

    def span(self, name: str) -> _Span:
        """Return a named range as a context, in or outside of a step; most code calls `span` instead. A `ValueError` for reserved names."""
        if name in self._span_objects:
            return self._span_objects[name]
        if name in (OTHER, BETWEEN, INTERRUPTED) or "/" in name or not name:
            raise ValueError(
                f"range {name!r}: must be a name without a slash and not one of {OTHER}, {BETWEEN}, {INTERRUPTED}"
            )
        created = _Span(self, name)
        if len(self._span_objects) < MOST_RANGES:
            self._span_objects[name] = created
        return created

    @property
    def inside_step(self) -> bool:
        return self._segment is not None and self._segment.inside_step

    def now_s(self) -> float:
        """Seconds since the recording began, by the host's clock."""
        return self._since_origin(self._nanoseconds())

    @property
    def is_beside_steps(self) -> bool:
        """Whether a range outside of steps is open, such as a validation; another thread may ask."""
        segment = self._segment
        return segment is not None and not segment.inside_step and bool(self._open)

    def start(self) -> None:
        self.origin_ns = self._nanoseconds()
        self._schedstats = []
        self._count_waiting_of("/proc/thread-self")
        self._begin_outside(self.clock.mark())

    def catch_up(self) -> None:
        """Wait until the device has passed the end of the last step, and record all steps so far."""
        if self._pending:
            self.clock.wait(self._pending[-1].marks[-1])
        self._take_in_passed()

    def finish(self) -> None:
        """End the recording: wait until the device has passed the last mark, and record all steps."""
        segment = self._current()
        self._hand_over(segment, self.clock.mark())
        self._segment = None
        self.clock.wait(segment.marks[-1])
        self._take_in_passed()

    # ---- beginnings and ends

    def _current(self) -> _Segment:
        if self._segment is None:
            raise RuntimeError("the timeline is not recording; call start() first, or use `with recorder:`")
        return self._segment

    def _begin_outside(self, mark: Any) -> None:
        self._segment = _Segment(marks=[mark], owners=[0], start_ns=self._nanoseconds())

    def _enter(self, name: str) -> None:
        segment = self._segment or self._current()
        if segment.step >= 0:
            parent = self._open[-1] if self._open else _OTHER_COLUMN
            column = self._columns.get((parent, name)) or self._new_column(parent, name)
            segment.marks.append(self.clock.mark())
            segment.owners.append(column)
            if column in _ON_HOST:
                self._count_thread(segment, column, -1)
            if segment.profiled:
                self._annotations.append(record_function(ANNOTATION + name))
                self._annotations[-1].__enter__()
        else:
            column = self._outside_index(name)
            if not self._open:
                segment.marks.append(self.clock.mark())
                segment.owners.append(column)
        self._open.append(column)

    def _leave(self) -> None:
        segment = self._segment or self._current()
        column = self._open.pop()
        if segment.step >= 0:
            if segment.profiled:
                self._annotations.pop().__exit__(None, None, None)
            segment.marks.append(self.clock.mark())
            segment.owners.append(self._open[-1] if self._open else _OTHER_COLUMN)
            if column in _ON_HOST:
                self._count_thread(segment, column, 1)
        elif not self._open:
            mark = self.clock.mark()
            self._hand_over(segment, mark)
            self._begin_outside(mark)
            self._take_in_passed()

    def _count_thread(self, segment: _Segment, column: int, sign: int) -> None:
        """Count the host's time of a step, or of a phase in `_ON_HOST`, at its beginning (-1) and end (1)."""
        counted, now = segment.thread_ns.setdefault(column, [0, 0, 0]), self._nanoseconds()
        counted[0] += sign * now
        if column != _TO_DEVICE_COLUMN:  # of which only the duration is kept: each of these is a system call
            read_ns, computed, waited = self._thread_read
            if (
                not 0 <= now - read_ns < _SAME_MOMENT_NS
            ):  # the end of a step, the next one's beginning and that of its data are one
                computed, waited = time.thread_time_ns(), math.nan
                if self._schedstats:
                    waited = sum(int(os.pread(file, 64, 0).split()[1]) for file in self._schedstats)
                self._thread_read = now, computed, waited
            counted[1] += sign * computed
            counted[2] += sign * waited

    def _count_waiting_of(self, thread: str | Path) -> None:
        """Count from now on how long a thread, given by its folder in /proc, waits for a core too."""
        try:
            file = os.open(f"{thread}/schedstat", os.O_RDONLY | os.O_CLOEXEC)
        except OSError:  # the kernel does not count it
            return
        weakref.finalize(self, os.close, file)
        self._schedstats.append(file)
        self._thread_read = (-_SAME_MOMENT_NS, 0, math.nan)  # of fewer threads

    def _find_backward_thread(self) -> None:
        """Count the thread of the backward pass too, once it exists: the training's thread sleeps meanwhile."""
        name = self.clock.backward_thread
        if name is not None and self._schedstats:
            for thread in Path("/proc/self/task").iterdir():
                with suppress(OSError):  # it has ended meanwhile
                    if (thread / "comm").read_text(encoding="utf-8", errors="replace").strip() == name:
                        return self._count_waiting_of(thread)
        return None

    # ---- names

    def _new_column(self, parent: int, name: str) -> int:
        if name in PHASES:
            column = 1 + PHASES.index(name)
        elif len(self.ranges) >= MOST_RANGES:
            return parent
        else:
            column = len(self.ranges)
            path = name if parent == _OTHER_COLUMN else f"{self.ranges[parent]}/{name}"
            self.ranges.append(path)
            self.totals.ranges.append(0.0)
            self.steps.add_column(path)
        self._columns[(parent, name)] = column
        return column

    def _outside_index(self, name: str) -> int:
        if name not in self.outside and len(self.outside) >= MOST_RANGES:
            name = BETWEEN
        self.outside.setdefault(name, OutsideTotal())
        return list(self.outside).index(name)

    def _at_window(self, *, opens: bool) -> None:
        """Open a window before the first of its steps, and close it after the last."""
        windows, ordinal = self._windows, self.steps_completed
        neighbor = ordinal - 1 if opens else ordinal + 1
        if windows is not None and ordinal in windows.steps and neighbor not in windows.steps:
            with self.span(PROFILER):
                (windows.open if opens else windows.close)(ordinal)

    # ---- from marks to seconds

    def _hand_over(self, segment: _Segment, last: Any) -> None:
        """End a segment with its last mark; it is taken in when the device has passed that."""
        segment.marks.append(last)
        self._pending.append(segment)
        if len(self._pending) > MOST_PENDING:
            given_up = self._pending.popleft()
            self.totals.lost += given_up.inside_step
            self.clock.release(given_up.marks[:-1])  # the last one is the first of the next segment

    def _take_in_passed(self) -> None:
        while self._pending and self.clock.passed(self._pending[0].marks[-1]):
            segment = self._pending.popleft()
            self.totals.marks += len(segment.owners)
            if segment.inside_step:
                self._take_in_step(segment)
            else:
                totals, start_s = list(self.outside.values()), self._since_origin(segment.start_ns)
                for owner, seconds in zip(segment.owners, self.clock.intervals(segment.marks), strict=True):
                    totals[owner].count += 1
                    totals[owner].seconds += seconds
                    if owner:
                        self.spans.append((owner, start_s, seconds))
                    start_s += seconds
            self.clock.release(segment.marks[:-1])

    def _take_in_step(self, segment: _Segment) -> None:
        seconds = [0.0] * len(self.ranges)
        for owner, interval in zip(segment.owners, self.clock.intervals(segment.marks), strict=True):
            seconds[owner] += interval
        total = sum(seconds)
        self.totals.steps += 1
        self.totals.seconds += total
        self.totals.images += segment.images
        self.totals.profiled += segment.profiled
        self.totals.profiled_seconds += total * segment.profiled
        self.totals.ranges[:] = map(add, self.totals.ranges, seconds)
        host, data, to_device, backward = (
            [1e-9 * value for value in segment.thread_ns.get(column, (0, 0, 0))]
            for column in (_OTHER_COLUMN, _DATA_COLUMN, _TO_DEVICE_COLUMN, _BACKWARD_COLUMN)
        )
        self.steps.append(
            (
                segment.step,
                self._since_origin(segment.start_ns),
                total,
                segment.images,
                segment.profiled,
                *(host[0], data[0], *host[1:], *data[1:], *backward[1:], to_device[0]),
                segment.queued,
                segment.transfers,
                *seconds,
            )
        )

        if self.on_step is not None:
            self.on_step(segment.step, total, dict(zip(self.ranges, seconds, strict=True)))

    def _since_origin(self, nanoseconds: int) -> float:
        return (nanoseconds - self.origin_ns) * 1e-9


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


def current_timeline() -> Timeline | None:
    """Return the timeline that records in this context, if there is one."""
    return _recording.get()


@contextmanager
def recording_to(timeline: Timeline) -> Iterator[None]:
    """Let the spans of a block, which this thread runs, count for `timeline`."""
    token = _recording.set(timeline)
    try:
        yield
    finally:
        _recording.reset(token)


_LINE = {"data": "loader", "teacher_forward": "teacher", "forward": "", "backward": "", "optimizer": ""}


def step_line(seconds: float, ranges: Mapping[str, float]) -> str:
    """Format a step for the log: `loader 0.0005 s  forward 0.67 s  backward 24.7 s  optimizer 0.05 s  of 25.5 s`."""
    spent = dict.fromkeys(_LINE, 0.0)
    for path, value in ranges.items():
        if phase_of(path) in spent:
            spent[phase_of(path)] += value
    parts = [
        f"{_LINE[phase] or phase} {value:.3g} s"
        for phase, value in spent.items()
        if value or phase != "teacher_forward"
    ]
    return "  ".join([*parts, f"of {seconds:.3g} s"])


def seconds_of_a_mark(clock: HostClock, counter: XlaCounters | None = None) -> float:
    """Measure the cost of a mark, with its share of a step's overhead, on empty steps of the usual phases."""
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
