"""When a trial ends, with steps whose times are made up; and what a tuning remembers of its earlier try."""

from __future__ import annotations

import itertools

import pytest

from trainer import storage
from trainer.config import DistillSettings
from trainer.devices import choose_device
from trainer.training.process_group import Processes
from trainer.tuning.trials import LAP_S, LOG_FILE, RecordingTime, StepTimer, TrialLog
from trainer.tuning.tuning_schema import Candidate, Trial

CANDIDATE = Candidate.of(DistillSettings())
TRIAL = Trial(candidate=CANDIDATE, ended="measured", images_per_second=0.1 + 0.2, seconds=1.5, shares={"data": 1 / 3})
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
