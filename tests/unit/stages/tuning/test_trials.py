"""When a trial ends, with steps whose times are made up; and what a tuning remembers of its earlier try."""

from __future__ import annotations

import itertools
import math

import pytest

from trainer.config import DistillSettings
from trainer.data.loader import PREFETCHED
from trainer.devices import choose_device
from trainer.devices.process_group import Processes
from trainer.io import storage
from trainer.stages.tuning.trials import (
    LAP_S,
    LEAST_S,
    LOG_FILE,
    THOROUGHNESS,
    Plan,
    RecordingTime,
    StepTimer,
    TrialLog,
)
from trainer.stages.tuning.tuning_schema import Candidate, Trial

CANDIDATE = Candidate.of(DistillSettings())
TRIAL = Trial(candidate=CANDIDATE, ended="measured", images_per_second=0.1 + 0.2, seconds=1.5, shares={"data": 1 / 3})
SLOW_LOADERS = [
    (0.1, 0.15, 12),
    (0.1, 0.2, 14),
    (0.1, 0.105, 12),
    (0.3, 0.45, 12),
    (0.3, 0.6, 14),
    (0.016, 0.033, 12),
    (0.05, 0.2, 1),
]
"""Seconds of a step, of a loader for a step's images, and its processes."""
TIME = RecordingTime(teacher_s=0.1, recording_s=7.0)


@pytest.fixture
def processes(monkeypatch):
    monkeypatch.setenv("TRAINER_DEVICE", "cpu")
    return Processes(rank=0, world_size=1, local_rank=0, device=choose_device())


@pytest.fixture(params=["here", "in a store"])
def place(request, tmp_path):
    return (
        str(tmp_path / "trials") if request.param == "here" else request.getfixturevalue("object_store").uri("trials")
    )


def test_the_next_try_finds_it_to_the_bit(place, processes):
    trial_log = TrialLog(place, processes)
    assert (trial_log.trial(CANDIDATE), trial_log.recording) == (None, None)
    trial_log.note_recording(TIME)
    trial_log.note(TRIAL)
    other = CANDIDATE.model_copy(update={"batch_size": 7})
    trial_log.note(TRIAL.model_copy(update={"candidate": other, "ended": "out of memory"}))
    found = TrialLog(place, processes)
    assert (found.trial(CANDIDATE), found.recording) == (TRIAL, TIME)
    assert found.trial(other).ended == "out of memory"
    assert found.trial(CANDIDATE.model_copy(update={"batch_size": 8})) is None
    found.remove()
    assert TrialLog(place, processes).trial(CANDIDATE) is None
    assert storage.files(place) == {}


def test_notes_of_another_version_are_begun_anew(place, processes, caplog):
    storage.write_checksummed(storage.join(place, LOG_FILE), '{"trials": [], "tried": []}')
    assert TrialLog(place, processes).trial(CANDIDATE) is None
    assert caplog.messages == []


def drive(timer, step_s, most=10_000):
    """Run laps on a clock that moves by the next of `step_s` each step; gives the seconds."""
    now, times = 0.0, itertools.cycle(step_s)
    timer.open(now)
    for _ in range(most):
        now += next(times)
        if not timer.step():
            continue
        timer.plan = timer.close(now)
        if timer.plan.ended:
            return now
        timer.open(now)
    raise AssertionError("the laps never end")


def test_steps_that_warm_up_are_not_counted_and_short_steps_share_a_lap():
    timer = StepTimer(100, warm_steps=2, total_steps=10_000)
    drive(timer, [5.0, *[0.01] * 9_999])
    assert timer.plan.ended == "measured"
    assert timer.plan.steps == round(LAP_S / 0.01)
    assert timer.rates[0] == pytest.approx(100 / 0.01)


def test_a_candidate_that_is_far_behind_is_stopped_after_two_laps():
    timer = StepTimer(100, 100 / 0.1, warm_steps=0, total_steps=10_000)
    assert drive(timer, [1.0]) == pytest.approx(2.0)
    assert timer.plan.ended == "outrun"
    assert timer.rates == pytest.approx((100, 100, 100))


def test_a_candidate_that_is_a_little_behind_is_stopped_when_that_is_sure():
    timer = StepTimer(100, 100 / 0.1, warm_steps=0, total_steps=10_000)
    drive(timer, [0.11, 0.1101])
    assert timer.plan.ended == "outrun"
    assert timer.rates[2] < 1000


def test_the_longer_the_distillation_the_longer_it_is_measured():
    long, short = (StepTimer(100, warm_steps=0, total_steps=steps) for steps in (10**6, 100))
    noisy = [0.05, 0.15]
    assert drive(long, noisy * 2 + [0.1]) > drive(short, noisy * 2 + [0.1])


def test_steps_that_vary_are_measured_longer_but_not_for_ever():
    steady, varying = (StepTimer(100, warm_steps=0, total_steps=10**6) for _ in range(2))
    assert drive(steady, [0.2]) < drive(varying, [0.1, 0.1, 0.5, 0.2, 0.1, 0.3, 0.4]) <= 12
    assert varying.plan.ended == "measured"


def test_long_steps_are_measured_until_there_is_an_interval():
    timer = StepTimer(100, warm_steps=1, total_steps=1000)
    drive(timer, [30.0])
    assert timer.steps == 4
    mean, low, high = timer.step_s
    assert low <= mean == 30.0 <= high


class Loader:
    """A queue of micro-batches on a made-up clock: each of its processes makes every n-th one, has two to make, and takes `seconds`."""

    def __init__(self, workers, seconds):
        self.workers, self._seconds = workers, seconds
        self._made = [
            seconds * (1 + turn) for turn in range(PREFETCHED) for _ in range(workers)
        ]  # when, and in their order
        self._taken = 0

    def take(self, now):
        """Take the next one, as soon as it is there; gives when that is."""
        when = max(now, self._made[self._taken])
        self._taken += 1
        self._made.append(max(when, self._made[-self.workers]) + self._seconds)
        return when

    def ready(self, now):
        return sum(made <= now for made in self._made[self._taken :])


def tried(loader, *, step_s, compile_s=30.0, accumulation=1, counts=True, **timing):
    """Run a trial whose first step compiles; gives its timer, and the share of its steps that waits for data."""
    timer = StepTimer(1024, warm_steps=2, accumulation=accumulation, **timing)
    now, waits, steps = 0.0, [], 0
    timer.open(now)
    while True:
        waits.append(0.0)
        for _ in range(accumulation):
            ready = loader.ready(now) if counts else math.nan
            came = loader.take(now)
            waits[-1] += came - now
            now = came + step_s / accumulation
        now += compile_s * (not steps)
        steps += 1
        if timer.step():
            plan = timer.follow([timer.close(now, workers=loader.workers, ready=ready)])
            if plan.ended:
                return timer, sum(waits[-timer.steps :]) / (timer.steps * timer.step_s[0]), now - compile_s
            for _ in range(loader.ready(now) if plan.drains else 0):
                loader.take(now)
            timer.open(now)


@pytest.mark.parametrize(("step_s", "batch_s", "workers"), SLOW_LOADERS)
@pytest.mark.parametrize("thoroughness", [1.0, THOROUGHNESS])
def test_batches_that_were_loaded_during_the_compilation_do_not_count(step_s, batch_s, workers, thoroughness):
    timer, waiting, _ = tried(
        Loader(workers, batch_s * workers), step_s=step_s, total_steps=3_600, thoroughness=thoroughness
    )
    truth = max(step_s, batch_s)
    assert timer.rates[0] == pytest.approx(1024 / truth, rel=0.1)
    assert timer.step_s[0] == pytest.approx(truth, rel=0.1)
    assert waiting == pytest.approx(1 - step_s / truth, abs=0.1)


@pytest.mark.parametrize(("accumulation", "counts"), [(2, True), (5, True), (1, False)])  # macOS does not count
def test_nor_do_they_with_several_a_step_or_where_the_queue_is_not_counted(accumulation, counts):
    loader = Loader(12, 0.2 * 12 / accumulation)
    timer, waiting, _ = tried(loader, step_s=0.1, total_steps=3_600, accumulation=accumulation, counts=counts)
    assert timer.rates[0] == pytest.approx(1024 / 0.2, rel=0.1)
    assert waiting == pytest.approx(0.5, abs=0.1)


@pytest.mark.parametrize("workers", [1, 12])
def test_a_loader_that_keeps_up_makes_a_trial_little_longer(workers):
    timer, waiting, seconds = tried(Loader(workers, 0.08 * workers), step_s=0.1, total_steps=36_000)
    alone, _, least = tried(Loader(workers, 0.0), step_s=0.1, total_steps=36_000)
    assert timer.rates[0] == pytest.approx(alone.rates[0])
    assert waiting == 0
    assert seconds - least <= (workers + 2) * 0.1


def test_a_loader_that_starts_late_and_catches_up_is_not_waited_for_again():
    timer, _, seconds = tried(Loader(4, 0.2), step_s=0.1, compile_s=0.0, total_steps=3_600)
    assert timer.rates[0] == pytest.approx(1024 / 0.1)
    assert seconds < 3 * 0.1 + 0.2 + LEAST_S[1]


def test_all_processes_drain_if_one_of_them_would():
    timer = StepTimer(8, warm_steps=0, total_steps=10)
    timer.open(0.0)
    timer.step()
    timer.close(1.0)
    assert timer.follow([Plan("measured", 1), Plan("", 3, drains=True)]) == Plan("", 3, drains=True)
    assert timer.steps == 0
