"""Jobs that are killed between any two writes, whose disk or store fails, whose files are damaged: the same result, or a message.

Each job is one process here, forked from one that has loaded torch; `make test-faults` has all faults, also those of several processes.
"""

import random
import signal

import pytest

from tests.faults.bench import Bench
from tests.faults.inside import Fault
from tests.faults.jobs import Job
from tests.faults.promises import stops_and_goes_on
from tests.faults.scenarios import SCENARIOS, Surroundings
from tests.faults.stores import WatchedStore

pytestmark = pytest.mark.slow

NOTES = 15
"""So many writes more a slow training may do than a quick one: it notes every five seconds how long its attempt has lasted, in five."""


@pytest.fixture(scope="module")
def bench(digits, teacher, tmp_path_factory):
    return Bench(tmp_path_factory.mktemp("faults"), dataset=digits, teacher=teacher)


@pytest.fixture(scope="module")
def store():
    with WatchedStore() as store:
        yield store


@pytest.fixture
def surroundings(bench, store, monkeypatch, tmp_path):
    for name, value in store.environment.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("TRAINER_CACHE", str(tmp_path / "cache"))
    store.reset()
    return Surroundings(bench, store, tracking=None)


def spread(total, count):
    """So many numbers from 1 to `total`, both too."""
    return sorted({1 + round(part * (total - 1) / (count - 1)) for part in range(count)})


def kill(job, whole, number):
    fault = Fault(does="SIGKILL", folder=job.folder, write=number)
    stops_and_goes_on(job, whole.result, fault, code=-signal.SIGKILL, start=Job.fork)


def test_a_distillation_that_is_killed_between_two_writes(bench):
    whole = bench.whole("distillation")
    assert any("checkpoints/" in write for write in whole.writes), whole.writes
    assert any("student/model.safetensors" in write for write in whole.writes), whole.writes
    for number in spread(len(whole.writes) - NOTES, 5):
        kill(bench.distillation(), whole, number)


def test_a_recording_that_is_killed_between_two_writes(bench):
    whole = bench.whole("recording")
    assert sum("records/" in name for name in whole.result) == 4
    for number in spread(len(whole.writes), 2):
        kill(bench.recording(), whole, number)


def test_a_preparation_that_is_killed_between_two_writes(bench):
    whole = bench.whole("preparation")
    for number in spread(len(whole.writes), 3):
        kill(bench.preparation(), whole, number)


@pytest.mark.parametrize("kind", ["evaluation", "registration"])
def test_a_stage_that_is_killed_before_a_write(surroundings, kind):
    SCENARIOS[f"{kind}: killed before a write"](surroundings, random.Random(kind))


@pytest.mark.parametrize(
    ("kind", "disk"), [("distillation", "disk full"), ("recording", "disk read-only"), ("registration", "disk full")]
)
def test_a_disk_that_refuses(surroundings, kind, disk):
    SCENARIOS[f"{kind}: {disk}"](surroundings, random.Random(kind))


@pytest.mark.parametrize("name", ["store: distillation killed before a request", "store: 403", "store: cut"])
def test_a_job_whose_store_fails(surroundings, name):
    SCENARIOS[name](surroundings, random.Random(1))


@pytest.mark.parametrize("name", ["checkpoint: bit flip", "input: removal"])
def test_a_damaged_file_is_named(surroundings, name):
    SCENARIOS[name](surroundings, random.Random(1))


def test_tracking_that_is_away_ends_stage_at_its_start(surroundings):
    SCENARIOS["MLflow away at the start"](surroundings, random.Random(1))


def test_a_training_that_comes_back_changes_nothing(surroundings):
    SCENARIOS["old try comes back"](surroundings, random.Random(0))
