"""What a tuning remembers of its earlier try."""

from __future__ import annotations

import pytest

from trainer import storage
from trainer.config import DistillSettings
from trainer.devices import choose_device
from trainer.training.process_group import Processes
from trainer.tuning.trials import LOG_FILE, RecordingTime, TrialLog
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
