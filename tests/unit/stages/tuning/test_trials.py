"""When a trial ends, with steps whose times are made up; and what a tuning remembers of its earlier try."""

from __future__ import annotations

import itertools

import pytest

from trainer.config import DistillSettings
from trainer.data.loader import PREFETCHED
from trainer.devices import choose_device
from trainer.devices.process_group import Processes
from trainer.io import storage
from trainer.stages.tuning.trials import LAP_S, LOG_FILE, LONGEST_S, THOROUGHNESS, StepTimer, TrialLog
from trainer.stages.tuning.tuning_schema import Candidate, Trial

CANDIDATE = Candidate.of(DistillSettings())
TRIAL = Trial(candidate=CANDIDATE, ended="measured", images_per_second=0.1 + 0.2, seconds=1.5, loading_s=1 / 3)
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
    assert (trial_log.trial(CANDIDATE, loads=False), trial_log.recording_s) == (None, None)
    trial_log.note_recording(0.7)
    trial_log.note(TRIAL)
    loaded = TRIAL.model_copy(update={"loads": True, "ended": "out of memory"})
    trial_log.note(loaded)
    found = TrialLog(place, processes)
    assert (found.trial(CANDIDATE, loads=False), found.recording_s) == (TRIAL, 0.7)
    assert found.trial(CANDIDATE, loads=True) == loaded
    assert found.trial(CANDIDATE.model_copy(update={"batch_size": 8}), loads=False) is None
    found.remove()
    assert TrialLog(place, processes).trial(CANDIDATE, loads=False) is None
    assert storage.files(place) == {}


def test_notes_of_another_version_are_begun_anew(place, processes, caplog):
    storage.write_checksummed(storage.join(place, LOG_FILE), '{"trials": [], "tried": []}')
    assert TrialLog(place, processes).trial(CANDIDATE, loads=False) is None
    assert caplog.messages == []


def drive(timer, step_s):
    """Run laps on a clock that moves by the next of `step_s` each step; gives the seconds."""
    now, times = 0.0, itertools.cycle(step_s)
    timer.open(now)
    for _ in range(10_000):
        now += next(times)
        if not timer.step():
            continue
        plan = timer.close(now)
        if not plan.steps:
            return now
        timer.plan = plan
        timer.open(now)
    raise AssertionError("the laps never end")


def test_steps_are_measured():
    timer = StepTimer(100, warm_steps=2, total_steps=10_000)
    drive(timer, [5.0, *[0.01] * 9_999])
    assert timer.plan.steps == round(LAP_S / 0.01)
    assert timer.rates[0] == pytest.approx(100 / 0.01)
    # Steps that vary are measured longer but not for ever.
    varying = [0.1, 0.1, 0.5, 0.2, 0.1, 0.3, 0.4]
    steady, varied, short = (StepTimer(100, warm_steps=1, total_steps=steps) for steps in (10**6, 10**6, 100))
    assert drive(steady, [0.2]) < drive(short, varying) < drive(varied, varying) < LONGEST_S + 2
    assert varied.rates[1] < varied.rates[0] < varied.rates[2]
    # Long steps are measured until there is an interval.
    timer = StepTimer(100, warm_steps=1, total_steps=1000)
    drive(timer, [30.0])
    assert timer.steps == 4
    assert timer.step_s == 30.0


class Loader:
    """A queue of micro-batches on a made-up clock: each of its processes makes every n-th one, has two to make, and takes `seconds`."""

    def __init__(self, workers, seconds):
        self.workers, self._seconds = workers, seconds
        # When, and in their order.
        self._made = [seconds * (1 + turn) for turn in range(PREFETCHED) for _ in range(workers)]
        self._taken = 0

    def take(self, now):
        """Take the next one as soon as it is made; gives when that is."""
        when = max(now, self._made[self._taken])
        self._taken += 1
        self._made.append(max(when, self._made[-self.workers]) + self._seconds)
        return when


def tried(loader, *, step_s, compile_s=30.0, accumulation=1, **timing):
    """Run a trial whose first step compiles; gives its timer, and the seconds after that."""
    timer = StepTimer(1024, warm_steps=2, accumulation=accumulation, **timing)
    now, compiled = 0.0, False
    timer.open(now)
    while True:
        for _ in range(accumulation):
            now = loader.take(now) + step_s / accumulation
        now, compiled = now + compile_s * (not compiled), True
        if timer.step():
            plan = timer.close(now, workers=loader.workers)
            if not plan.steps:
                return timer, now - compile_s
            timer.plan = plan
            for _ in range(plan.drop):
                now = loader.take(now)
            timer.open(now)


@pytest.mark.parametrize(("step_s", "batch_s", "workers"), SLOW_LOADERS)
@pytest.mark.parametrize("thoroughness", [1.0, THOROUGHNESS])
@pytest.mark.parametrize("accumulation", [1, 2, 5])
def test_batches_that_were_loaded_during_compilation_do_not_count(step_s, batch_s, workers, thoroughness, accumulation):
    loader = Loader(workers, batch_s * workers / accumulation)
    timer, _ = tried(loader, step_s=step_s, accumulation=accumulation, total_steps=3_600, thoroughness=thoroughness)
    truth = max(step_s, batch_s)
    assert timer.rates[0] == pytest.approx(1024 / truth, rel=0.1)
    assert timer.step_s == pytest.approx(truth, rel=0.1)


@pytest.mark.parametrize("workers", [1, 12])
def test_loader_that_keeps_up_makes_trial_little_longer(workers):
    timer, seconds = tried(Loader(workers, 0.08 * workers), step_s=0.1, total_steps=36_000)
    alone, least = tried(Loader(workers, 0.0), step_s=0.1, total_steps=36_000)
    assert timer.rates[0] == pytest.approx(alone.rates[0])
    assert seconds - least <= 2.1 * workers * 0.1
