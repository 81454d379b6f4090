"""The search against exhaustive ones on many made-up machines, and what it says when it stops."""

from __future__ import annotations

import dataclasses
import itertools

import numpy as np
import pytest

from tests.unit.stages.tuning.landscapes import TRIAL_S, Landscape, device_of
from trainer.io.errors import SettingsError
from trainer.stages.tuning.candidates import Workload, less_memory
from trainer.stages.tuning.search import LEAST_GAIN, search
from trainer.stages.tuning.tuning_schema import Candidate, Trial

SEEDS = range(100)
ENDLESS = float("inf")


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_nine_tenths_of_the_best_in_a_tenth_of_the_measurements_in_95_of_100_landscapes(device):
    reached, measured = [], []
    for seed in SEEDS:
        landscape = Landscape(seed, device)
        best_s, cells = landscape.best_s()
        found = search(landscape.start, landscape.job, landscape.measure, limit_s=ENDLESS)
        reached.append(best_s / landscape.run_s(found.best.candidate))
        measured.append(len(landscape.measured) / cells)
    assert np.mean(np.array(reached) >= 0.9) >= 0.95
    assert max(measured) <= 0.1


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_no_step_of_a_search_makes_the_distillation_longer(device):
    for seed in SEEDS[:30]:
        landscape = Landscape(seed, device)
        found = search(landscape.start, landscape.job, landscape.measure, limit_s=ENDLESS)
        taken = [tried.run_s for tried in found.tried if tried.taken]
        assert all(after <= before / LEAST_GAIN for before, after in itertools.pairwise(taken))
        assert found.best.candidate == [tried for tried in found.tried if tried.taken][-1].trial.candidate


def test_the_same_measurements_give_the_same_search():
    runs = []
    for _ in range(2):
        landscape = Landscape(7, "cuda")
        search(landscape.start, landscape.job, landscape.measure, limit_s=ENDLESS)
        runs.append(landscape.measured)
    assert runs[0] == runs[1]


def test_the_time_limit_holds_and_what_was_not_tried_is_reported():
    landscape = Landscape(9, "cpu")
    found = search(landscape.start, landscape.job, landscape.measure, limit_s=3 * TRIAL_S)
    assert found.seconds <= 3 * TRIAL_S
    assert found.stopped == "the 0.5 minutes of the search are over (tune.minutes)"
    assert found.stopped in found.untried.values()


def test_a_distillation_that_is_short_is_not_searched_for_longer_than_it_takes():
    landscape = Landscape(9, "cpu")
    short = dataclasses.replace(landscape.job, images=int(TRIAL_S * landscape.rate(landscape.start)), recording_s=0.0)
    found = search(landscape.start, short, landscape.measure, limit_s=ENDLESS)
    assert len(found.tried) == 1
    assert "may save about" in found.stopped
    assert "to try it takes about 10 s" in found.stopped


# ---------------------------------------------------------------------------------------------------------------------
# Small machines, made by hand

JOB = Workload(
    images=10**7,
    largest_batch=256,
    largest_batch_why="more were not asked for",
    device=device_of("cpu"),
    world_size=1,
    nodes=1,
    most_workers=2,
    no_recording="no loss compares with the teacher",
)
START = Candidate(
    workers=0,
    batch_size=64,
    accumulation=1,
    precision="fp32",
    compile="off",
    zero=False,
    gradient_compression="none",
    teacher="online",
)


def test_a_batch_is_not_divided_below_what_batch_normalization_needs():
    whole = START.model_copy(update={"batch_size": 4})
    (two, one) = (dataclasses.replace(JOB, least_part=least) for least in (2, 1))
    halved = less_memory(whole, two)
    assert halved is not None
    assert halved.accumulation == 2
    assert less_memory(halved, two) is None
    assert less_memory(halved, one).accumulation == 4


def machine(rate, fits=lambda candidate: True, **shares):
    """Measures candidates by a function that gives their rate."""

    def measure(candidate, rate_to_beat):
        if not fits(candidate):
            return Trial(candidate=candidate, ended="out of memory", seconds=1.0)
        value = rate(candidate)
        workers = 0 if candidate.workers == "auto" else candidate.workers
        return Trial(
            candidate=candidate,
            ended="outrun" if value < 0.8 * rate_to_beat else "measured",
            images_per_second=value,
            low=0.99 * value,
            high=1.01 * value,
            steps=10,
            seconds=5.0,
            shares=shares,
            workers=workers,
        )

    return measure


def test_given_settings_that_do_not_fit_are_halved_until_they_do():
    found = search(START, JOB, machine(lambda _: 100.0, lambda candidate: candidate.held <= 16), limit_s=ENDLESS)
    assert [tried.trial.candidate.accumulation for tried in found.tried[:3]] == [1, 2, 4]
    assert [tried.verdict for tried in found.tried[:2]] == ["does not fit into memory"] * 2
    assert found.best.candidate.accumulation == 4
    assert found.best.candidate.batch_size == START.batch_size


def uncompiled(rate):
    """Measures candidates on a machine where torch.compile compiles nothing."""
    whole = machine(rate)

    def measure(candidate, rate_to_beat):
        if candidate.compile == "on":
            return Trial(candidate=candidate, ended="not compiled", seconds=1.0)
        return whole(candidate, rate_to_beat)

    return measure


def test_given_settings_of_which_nothing_is_compiled_are_measured_uncompiled():
    start = START.model_copy(update={"compile": "on"})
    found = search(start, JOB, uncompiled(lambda _: 100.0), limit_s=ENDLESS)
    first, second = found.tried[:2]
    assert (first.run_s, first.taken) == (None, False)
    assert first.verdict == "nothing of the model was compiled, so it does not show how fast these settings are"
    assert second.trial.candidate == START
    assert found.best.candidate == START


def test_what_gives_no_numbers_is_not_taken_and_given_settings_that_do_are_refused():
    faster = machine(lambda candidate: 100.0 * candidate.batch_size)

    def measure(candidate, rate_to_beat):
        if candidate.batch_size > START.batch_size:
            return Trial(candidate=candidate, ended="not finite", seconds=1.0)
        return faster(candidate, rate_to_beat)

    found = search(START, JOB, measure, limit_s=ENDLESS)
    verdicts = [tried.verdict for tried in found.tried if tried.trial.candidate.batch_size > START.batch_size]
    assert found.best.candidate.batch_size == START.batch_size
    assert set(verdicts) == {"the student's weights are no numbers after it"}
    with pytest.raises(SettingsError, match=r"distill: with the given settings .* lower distill.base_learning_rate"):
        search(START.model_copy(update={"batch_size": 2 * START.batch_size}), JOB, measure, limit_s=ENDLESS)


def test_a_trial_that_compiled_nothing_is_not_taken_however_fast_it_was():
    gpu = dataclasses.replace(JOB, device=device_of("cuda"))
    found = search(START, gpu, uncompiled(lambda _: 100.0), limit_s=ENDLESS)
    (failed,) = [tried for tried in found.tried if tried.trial.candidate.compile == "on"]
    assert (failed.run_s, failed.gain, failed.taken) == (None, None, False)
    assert failed.verdict.startswith("nothing of the model was compiled")
    assert found.best.candidate.compile == "off"


def test_settings_of_which_no_part_fits_are_refused():
    with pytest.raises(
        SettingsError,
        match=r"distill\.batch_size = 64 does not fit into memory on 1 processes, not even in 64 micro-batches; choose a smaller",
    ):
        search(START, JOB, machine(lambda _: 100.0, lambda _: False), limit_s=ENDLESS)


def test_a_batch_that_does_not_fit_is_tried_in_parts():
    def rate(candidate):
        return 100.0 * candidate.batch_size**0.5

    measure = machine(rate, lambda candidate: candidate.held <= 64, optimizer=0.6)
    found = search(START, JOB, measure, limit_s=ENDLESS)
    assert (found.best.candidate.batch_size, found.best.candidate.accumulation) == (256, 4)
    assert "batch_size=512" in found.untried


def test_what_brings_too_little_is_not_taken():
    found = search(
        START,
        JOB,
        machine(lambda candidate: 102.0 if candidate.precision == "bf16" else 100.0, lambda c: c.batch_size <= 64),
        limit_s=ENDLESS,
    )
    assert found.best.candidate == START
    (bf16,) = [tried for tried in found.tried if tried.trial.candidate.precision == "bf16"]
    assert bf16.verdict == "1.020 times the speed of the best, which is less than the 1.03 that a change must bring"


@pytest.mark.parametrize(("batch_gain", "again"), [(1.1, False), (1.4, True)])
def test_the_way_back_is_tried_only_when_much_has_changed_since(batch_gain, again):
    """bf16 is measured to be 1.2 times as fast; batches grow then."""

    def rate(candidate):
        return (1.2 if candidate.precision == "bf16" else 1.0) * batch_gain ** np.log2(candidate.batch_size / 64)

    job = dataclasses.replace(JOB, largest_batch=128)
    found = search(START, job, machine(rate), limit_s=ENDLESS)
    assert (found.best.candidate.precision, found.best.candidate.batch_size) == ("bf16", 128)
    back = [tried for tried in found.tried[1:] if tried.trial.candidate.precision == "fp32" and not tried.taken]
    assert bool(back) == again


def test_a_gain_that_only_shows_with_more_loaders_is_found():
    """bf16 makes the computing three times faster, but one process then cannot load fast enough."""

    def measure(candidate, rate_to_beat):
        computing, loading = 0.03 if candidate.precision == "bf16" else 0.1, 0.09 / max(1, candidate.workers)
        seconds = max(computing, loading)
        trial = machine(lambda _: 64 / seconds, data=(seconds - computing) / seconds)(candidate, rate_to_beat)
        return trial.model_copy(update={"ended": "measured"})

    start = START.model_copy(update={"workers": 1})
    job = dataclasses.replace(JOB, most_workers=4, largest_batch=64)
    found = search(start, job, measure, limit_s=ENDLESS)
    assert (found.best.candidate.precision, found.best.candidate.workers) == ("bf16", 4)


def test_auto_is_measured_once():
    start = START.model_copy(update={"workers": "auto"})
    found = search(start, JOB, machine(lambda _: 100.0), limit_s=ENDLESS)
    assert [tried.trial.candidate.workers for tried in found.tried].count("auto") == 1


@pytest.mark.parametrize(
    ("recording_s", "share", "chosen"), [(100.0, 0.5, "recorded"), (10**6, 0.5, "online"), (10**4, 0.01, "online")]
)
def test_the_teacher_is_recorded_where_that_pays(recording_s, share, chosen):
    job = dataclasses.replace(JOB, no_recording="", recording_s=recording_s, teacher_s=share / 100)

    def rate(candidate):
        return 100.0 if candidate.teacher == "online" else 100.0 / (1 - share)

    found = search(START, job, machine(rate, teacher_forward=share), limit_s=ENDLESS)
    assert found.best.candidate.teacher == chosen
    start = START.model_copy(update={"teacher": "recorded"})
    found = search(start, job, machine(rate), limit_s=ENDLESS)
    assert found.best.candidate.teacher == chosen


def test_a_micro_batch_that_is_a_part_of_the_loss_is_left_alone():
    job = dataclasses.replace(JOB, why_parts_count="logit_loss=dist compares its images with one another")
    found = search(START, job, machine(lambda _: 100.0), limit_s=ENDLESS)
    assert {tried.trial.candidate.accumulation for tried in found.tried} == {1}
    assert "part of what is learned (logit_loss=dist" in found.untried["accumulation"]
