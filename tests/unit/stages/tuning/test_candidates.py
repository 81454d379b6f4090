"""What is worth a trial on which machine."""

from __future__ import annotations

import dataclasses

import pytest

from tests.unit.stages.tuning.landscapes import device_of
from tests.unit.stages.tuning.test_search import JOB, START
from trainer.devices import device
from trainer.stages.tuning.candidates import Proposal, Skipped, held_up, propose
from trainer.stages.tuning.tuning_schema import Trial

GPU = device_of("cuda", has_bf16=True)
GPUS = dataclasses.replace(JOB, device=GPU, world_size=8, nodes=2, most_workers=8)


def trial(shares=None, **settings):
    """A trial of the usual candidate with other settings."""
    candidate = START.model_copy(update=settings)
    return Trial(
        candidate=candidate,
        ended="measured",
        images_per_second=100.0,
        low=99.0,
        high=101.0,
        seconds=5.0,
        startup_s=1.0,
        shares=shares or {},
        workers=candidate.workers,
    )


def had(best, job, **history):
    """Setting and value of each idea -> the gain that is expected."""
    found = [one for one in propose(best, job, **history) if isinstance(one, Proposal)]
    return {(one.field, getattr(one.candidate, one.field)): one.gain for one in found}


def left_out(best, job):
    return {one.field for one in propose(best, job) if isinstance(one, Skipped)}


def test_more_loaders_than_cores_are_taken_away_first():
    found = had(trial(workers=8), JOB)
    assert found["workers", 2] == max(found.values()) == 1.5
    assert {value for name, value in found if name == "workers"} == {0, 2}


def test_who_waits_for_data_gets_loaders_and_no_more_gain_than_the_wait():
    best = trial({"data": 0.5}).model_copy(update={"advised_workers": 3})
    assert had(best, GPUS)["workers", 3] == pytest.approx(2.0)
    assert "more loader processes" in left_out(trial({"data": 0.01}), GPUS)


def test_what_only_gpus_or_several_nodes_have_is_tried_there_alone(monkeypatch):
    here, there = had(trial(), JOB), had(trial(), GPUS)
    assert {("compile", "on"), ("gradient_compression", "bf16")} <= set(there) - set(here)
    assert "gradient_compression" in left_out(trial(), dataclasses.replace(GPUS, nodes=1))
    assert "bf16" in left_out(trial(), dataclasses.replace(GPUS, device=device_of("cuda")))
    assert ("precision", "bf16") in had(trial(), JOB)
    monkeypatch.setattr(device, "has_bf16_instructions", lambda: False)
    assert "bf16" in left_out(trial(), dataclasses.replace(JOB, device=device.HOST))


def test_zero_is_tried_where_memory_was_the_limit():
    failed = [START.model_copy(update={"batch_size": 128})]
    assert ("zero", True) in had(trial(), GPUS, failed=failed)
    assert "zero" in left_out(trial(), GPUS)
    assert ("zero", False) in had(trial(zero=True), GPUS)


def test_the_next_larger_batch_is_expected_to_bring_half_of_what_the_last_one_did():
    assert had(trial(), JOB, batch_gain=1.4)["batch_size", 128] == pytest.approx(1.2)


def test_a_candidate_that_waited_is_worth_another_trial_only_if_it_would_be_faster():
    best, waited = trial(), trial({"data": 0.5}, precision="bf16", workers=1)
    (idea,) = held_up(waited, best, GPUS)
    assert (idea.candidate.precision, idea.candidate.workers) == ("bf16", 2)
    assert list(held_up(trial({"data": 0.01}, precision="bf16"), best, GPUS)) == []
