from __future__ import annotations

import hashlib
import os
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from pathlib import Path
from time import thread_time

import numpy as np
import pytest

from trainer.profiling.evidence import BETWEEN, OTHER, PHASES
from trainer.profiling.timeline import (
    INTERRUPTED,
    MOST_PENDING,
    MOST_RANGES,
    PROFILER,
    HostClock,
    Timeline,
    recording_to,
    span,
)

SECOND = 1_000_000_000


class Time:
    """A clock that the test moves."""

    def __init__(self) -> None:
        self.now = 5 * SECOND

    def __call__(self) -> int:
        return self.now

    def pass_(self, seconds: float) -> None:
        self.now += round(seconds * SECOND)


class Device:
    """A device that runs `lag` seconds behind the host until the test lets it catch up; its marks are reused like events."""

    backward_thread = None

    def __init__(self, time: Time) -> None:
        self._time = time
        self.reached = 0
        self.free: list[list[int]] = []
        self.made = 0

    def mark(self) -> list[int]:
        if not self.free:
            self.made += 1
        mark = self.free.pop() if self.free else [0]
        mark[0] = self._time.now
        return mark

    def passed(self, mark: list[int]) -> bool:
        return mark[0] <= self.reached

    def wait(self, mark: list[int]) -> None:
        self.reached = max(self.reached, mark[0])

    def intervals(self, marks: Sequence[list[int]]) -> list[float]:
        assert marks[-1][0] <= self.reached, "read before the device came there"
        return [(end[0] - start[0]) * 1e-9 for start, end in pairwise(marks)]

    def release(self, marks: Sequence[list[int]]) -> None:
        self.free.extend(marks)


@pytest.fixture
def time() -> Time:
    return Time()


@pytest.fixture
def timeline(time: Time) -> Timeline:
    timeline = Timeline(HostClock(time), nanoseconds=time)
    timeline.start()
    return timeline


def spend(timeline: Timeline, time: Time, name: str, seconds: float) -> None:
    with timeline.span(name):
        time.pass_(seconds)


def row(timeline: Timeline, index: int = -1) -> dict[str, float]:
    return dict(zip(timeline.steps.columns, timeline.steps.array()[index].tolist(), strict=True))


def test_phases_and_the_rest_sum_to_the_step(timeline: Timeline, time: Time) -> None:
    time.pass_(2)
    with timeline.step(7, images=32):
        for _ in range(2):
            spend(timeline, time, "data", 0.5)
            spend(timeline, time, "to_device", 0.0625)
            spend(timeline, time, "forward", 1)
            time.pass_(0.25)
            spend(timeline, time, "backward", 2)
        spend(timeline, time, "optimizer", 0.125)
    step = row(timeline)
    assert (step["step"], step["images"], step["profiled"]) == (7, 32, 0)
    assert step["start_s"] == pytest.approx(2)
    assert step["seconds"] == pytest.approx(7.75)
    assert (step["data"], step["forward"], step["backward"], step["optimizer"]) == pytest.approx((1, 2, 4, 0.125))
    assert step[OTHER] == pytest.approx(0.5)
    assert sum(step[name] for name in timeline.ranges) == pytest.approx(step["seconds"])
    assert step["host_seconds"] == pytest.approx(7.75)
    assert (step["host_data_seconds"], step["host_to_device_seconds"]) == pytest.approx((1, 0.125))


def test_ranges_nest(timeline: Timeline, time: Time) -> None:
    with timeline.step(0), timeline.span("forward"):
        time.pass_(1)
        with timeline.span("attention"):
            time.pass_(2)
            spend(timeline, time, "softmax", 4)
        spend(timeline, time, "teacher_forward", 8)
        time.pass_(16)
    step = row(timeline)
    assert step["forward"] == pytest.approx(17)
    assert step["forward/attention"] == pytest.approx(2)
    assert step["forward/attention/softmax"] == pytest.approx(4)
    assert step["teacher_forward"] == pytest.approx(8)
    assert step["seconds"] == pytest.approx(31)
    # A range of the same name nests in itself.
    with timeline.step(0), timeline.span("block"):
        time.pass_(1)
        spend(timeline, time, "block", 2)
    step = row(timeline)
    assert (step["block"], step["block/block"]) == pytest.approx((1, 2))


def test_span_belongs_to_timeline_of_its_context(timeline: Timeline, time: Time) -> None:
    other = Timeline(HostClock(time), nanoseconds=time)
    other.start()
    with recording_to(other):
        with recording_to(timeline), timeline.step(0), span("forward"):
            time.pass_(1)
        with other.step(0), span("forward"):
            time.pass_(2)
    with span("forward"):  # nothing records here, and a span may still stand there
        time.pass_(4)
    assert (row(timeline)["forward"], row(other)["forward"]) == (1, 2)
    assert "forward" not in timeline.outside | other.outside


def test_what_another_thread_does_is_no_part_of_training(timeline: Timeline, time: Time) -> None:
    def work() -> None:
        with span("data"):
            time.pass_(1)

    with recording_to(timeline), timeline.step(0), ThreadPoolExecutor() as threads:
        threads.submit(work).result()
    assert (row(timeline)["data"], row(timeline)[OTHER]) == (0, 1)


def test_time_between_steps_is_not_lost(timeline: Timeline, time: Time) -> None:
    for number in range(3):
        with timeline.step(number):
            time.pass_(1)
        time.pass_(0.5)
        with timeline.span("evaluate"):
            time.pass_(1)
            spend(timeline, time, "forward", 3)
    timeline.finish()
    assert timeline.totals.seconds == pytest.approx(3)
    assert (timeline.outside["evaluate"].count, timeline.outside["evaluate"].seconds) == (3, pytest.approx(12))
    assert timeline.outside[BETWEEN].seconds == pytest.approx(1.5)
    names = list(timeline.outside)
    spans = [(names[int(name)], start, seconds) for name, start, seconds in timeline.spans.array().tolist()]
    assert spans == [("evaluate", pytest.approx(1.5 + 5.5 * number), pytest.approx(4)) for number in range(3)]


def test_the_whole_recording_is_accounted_for(timeline: Timeline, time: Time) -> None:
    random = np.random.default_rng(0)
    start = time.now
    for number in range(50):
        time.pass_(random.random())
        with timeline.step(number):
            for name in random.choice([*PHASES, "mine"], 8):
                spend(timeline, time, str(name), random.random())
                time.pass_(random.random())
        spend(timeline, time, "checkpoint", random.random())
    timeline.finish()
    outside = sum(total.seconds for total in timeline.outside.values())
    assert timeline.totals.seconds + outside == pytest.approx((time.now - start) / SECOND)
    assert sum(timeline.totals.ranges) == pytest.approx(timeline.totals.seconds)


def test_ranges_without_any_step_are_taken_in_as_they_end(timeline: Timeline, time: Time) -> None:
    for _ in range(2 * MOST_PENDING):
        spend(timeline, time, "evaluate", 0.001)
    assert timeline.outside["evaluate"].count == 2 * MOST_PENDING


def test_sums_stay_exact_and_table_bounded_in_long_run(time: Time) -> None:
    timeline = Timeline(HostClock(time), nanoseconds=time, steps_kept=64, spans_kept=16)
    timeline.start()
    for number in range(5000):
        with timeline.step(number, images=2):
            spend(timeline, time, "forward", 0.001)
        spend(timeline, time, "evaluate", 0.002)
    assert len(timeline.steps) <= 64
    assert len(timeline.spans) <= 16
    assert (timeline.totals.steps, timeline.totals.images) == (5000, 10000)
    assert timeline.totals.seconds == pytest.approx(5)
    assert timeline.outside["evaluate"].seconds == pytest.approx(10)


def test_more_names_than_are_kept_count_for_range_around_them(timeline: Timeline, time: Time) -> None:
    with timeline.step(0), timeline.span("forward"):
        for number in range(3 * MOST_RANGES):
            spend(timeline, time, f"layer{number}", 1)
    step = row(timeline)
    assert len(timeline.ranges) == MOST_RANGES
    assert step["seconds"] == pytest.approx(3 * MOST_RANGES)
    assert step["forward"] == pytest.approx(3 * MOST_RANGES - (MOST_RANGES - 1 - len(PHASES)))


def test_marks_of_device_are_read_only_after_it_passed_them(time: Time) -> None:
    device = Device(time)
    timeline = Timeline(device, nanoseconds=time)
    timeline.start()
    for number in range(4):
        with timeline.step(number):
            spend(timeline, time, "forward", 1)
    assert timeline.totals.steps == 0, "the device has come nowhere yet"
    device.reached = time.now - 2 * SECOND
    with timeline.step(4):
        spend(timeline, time, "forward", 1)
    assert timeline.totals.steps == 2
    timeline.finish()
    assert timeline.totals.steps == 5
    assert timeline.steps.column("forward").tolist() == pytest.approx([1] * 5)
    assert timeline.totals.lost == 0


def test_steps_of_a_lost_device_are_counted(time: Time) -> None:
    device = Device(time)
    timeline = Timeline(device, nanoseconds=time)
    timeline.start()
    for number in range(MOST_PENDING):
        with timeline.step(number):
            time.pass_(0.001)
    assert timeline.totals.lost == pytest.approx(MOST_PENDING / 2, abs=2)
    timeline.finish()
    assert timeline.totals.steps + timeline.totals.lost == MOST_PENDING


class RecordingWindow:
    """A window that costs a second to open and to close."""

    def __init__(self, time: Time) -> None:
        self.steps = {2, 3, 5}
        self.active = False
        self._time = time

    def open(self, step: int) -> None:
        self.active = True
        self._time.pass_(1)

    def close(self, step: int) -> None:
        self.active = False
        self._time.pass_(1)


def test_the_windows_cost_is_kept_out(time: Time) -> None:
    timeline = Timeline(HostClock(time), windows=RecordingWindow(time), nanoseconds=time)
    timeline.start()
    for number in range(10, 17):
        with timeline.step(number):
            time.pass_(1)
    assert timeline.steps.column("profiled").tolist() == [0, 0, 1, 1, 0, 1, 0]
    assert timeline.steps.column("seconds").tolist() == pytest.approx([1] * 7)
    assert timeline.outside[PROFILER].seconds == pytest.approx(4)


@pytest.mark.parametrize("name", ["", "a/b", OTHER, BETWEEN, INTERRUPTED])
def test_reserved_names_are_refused(timeline: Timeline, name: str) -> None:
    with pytest.raises(ValueError, match=r"range '.*': must be a name without a slash"):
        timeline.span(name)


def test_a_step_inside_of_a_step_is_refused(timeline: Timeline) -> None:
    inner = timeline.step(1)
    with timeline.step(0), pytest.raises(RuntimeError, match="step 1 begins inside of a step"):
        inner.__enter__()


def test_a_timeline_that_was_not_started_says_so(time: Time) -> None:
    step = Timeline(HostClock(time)).step(0)
    with pytest.raises(RuntimeError, match="not recording"):
        step.__enter__()


def test_a_step_that_fails_is_no_step(timeline: Timeline, time: Time) -> None:
    def explode() -> None:
        time.pass_(3)
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError), timeline.step(0), timeline.span("forward"):
        explode()
    with timeline.step(1):
        spend(timeline, time, "forward", 1)
    timeline.finish()
    assert timeline.totals.steps == 1
    assert row(timeline)["forward"] == pytest.approx(1)
    assert timeline.outside[INTERRUPTED].seconds == pytest.approx(3)


class Counted:
    """Says of each step how often it was asked."""

    def __init__(self) -> None:
        self.asked: list[tuple[str, int]] = []

    def begin(self, ordinal: int) -> None:
        self.asked.append(("begin", ordinal))

    def end(self, ordinal: int) -> float:
        self.asked.append(("end", ordinal))
        return float(len(self.asked))


def test_a_counter_is_asked_around_each_step() -> None:
    counter = Counted()
    timeline = Timeline(HostClock(), counter=counter)
    timeline.start()
    for step in (7, 8):
        with timeline.step(step):
            pass
        with timeline.span("evaluate"):
            pass
    timeline.finish()
    assert counter.asked == [("begin", 0), ("end", 0), ("begin", 1), ("end", 1)]
    assert timeline.steps.column("transfers").tolist() == [2, 4]


class BackwardElsewhere(HostClock):
    backward_thread = "backward-7"


@pytest.mark.skipif(
    not Path("/proc/thread-self/schedstat").exists(), reason="the kernel does not count waiting for cores"
)
def test_another_backward_thread_is_counted() -> None:
    """As on a GPU: the training's thread sleeps meanwhile."""
    core = {min(os.sched_getaffinity(0))}

    def compete(seconds: float) -> None:
        os.sched_setaffinity(threading.get_native_id(), core)
        end = thread_time() + seconds
        while thread_time() < end:
            hashlib.sha256(bytes(2**20))  # without the interpreter's lock

    timeline = Timeline(BackwardElsewhere())
    timeline.start()
    with ThreadPoolExecutor(1) as backward, ThreadPoolExecutor(1) as other, recording_to(timeline):
        backward.submit(Path("/proc/thread-self/comm").write_text, BackwardElsewhere.backward_thread).result()
        with timeline.step(0):
            pass
        with timeline.step(1), span("backward"):
            for running in [backward.submit(compete, 0.05), other.submit(compete, 0.05)]:
                running.result()
    timeline.finish()
    assert timeline.steps.column("host_backward_delayed_seconds")[1] > 0.01
