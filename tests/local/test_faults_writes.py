"""Killed between any two writes, or in the middle of one, a job goes on to the same result, and nothing half-written is believed.

Each kill takes two short runs, so a part of the places is tried here; `make test-faults` draws others.
"""

import signal

import pytest

from tests.faults.bench import Bench
from tests.faults.inside import Fault
from tests.faults.jobs import Job
from tests.faults.promises import stops_and_goes_on


@pytest.fixture(scope="module")
def bench(digits, teacher, tmp_path_factory):
    return Bench(tmp_path_factory.mktemp("faults"), dataset=digits, teacher=teacher)


def spread(total, count):
    """So many numbers from 1 to `total`, both too."""
    return sorted({1 + round(part * (total - 1) / (count - 1)) for part in range(count)})


def kill(job, whole, number):
    fault = Fault(does="SIGKILL", folder=job.folder, write=number)
    stops_and_goes_on(job, whole.result, fault, code=-signal.SIGKILL, start=Job.fork)


@pytest.mark.slow
def test_a_distillation_that_is_killed_between_two_writes(bench):
    whole = bench.whole_distillation
    assert any("checkpoints/" in write for write in whole.writes), whole.writes
    assert any("student/model.safetensors" in write for write in whole.writes), whole.writes
    for number in spread(len(whole.writes), 8):
        kill(bench.distillation(), whole, number)


@pytest.mark.slow
def test_a_recording_that_is_killed_between_two_writes(bench):
    whole = bench.whole_recording
    assert sum("records/" in name for name in whole.result) == 4
    for number in spread(len(whole.writes), 6):
        kill(bench.recording(), whole, number)


@pytest.mark.slow
def test_a_preparation_that_is_killed_between_two_writes(bench):
    whole = bench.whole_preparation
    for number in spread(len(whole.writes), 6):
        kill(bench.preparation(), whole, number)
