import json
from pathlib import Path

import pytest

from trainer.training import attempts as module
from trainer.training.attempts import ATTEMPTS, Attempts


def read(folder):
    return json.loads((folder / ATTEMPTS).read_text())


def interrupt_after(steps, attempts):
    attempts.seen(steps)
    raise KeyboardInterrupt


def test_each_try_finds_those_before_it(tmp_path):
    with pytest.raises(KeyboardInterrupt), Attempts(str(tmp_path), 0, active=True) as first:
        interrupt_after(7, first)
    with Attempts(str(tmp_path), 5, active=True) as second:
        second.seen(2)
        records = second.records()
    assert [(record.first_step, record.steps_seen) for record in records] == [(0, 7), (5, 2)]
    assert records[0].began_unix <= records[0].seen_unix <= records[1].began_unix <= records[1].seen_unix


def test_signs_of_life_are_rare_and_the_last_one_survives_a_kill(tmp_path, monkeypatch):
    with Attempts(str(tmp_path), 0, active=True) as attempts:
        attempts.seen(1)
        assert read(tmp_path)[-1]["steps_seen"] == 0, "written a moment ago"
        later = module.time.monotonic() + 6
        monkeypatch.setattr(module.time, "monotonic", lambda: later)
        attempts.seen(2)
        attempts.seen(3)
        assert read(tmp_path)[-1]["steps_seen"] == 2
        assert attempts.records()[-1].steps_seen == 3


def test_other_processes_neither_read_nor_write(tmp_path):
    with Attempts(str(tmp_path), 0, active=False) as attempts:
        attempts.seen(1)
        assert attempts.records() == ()
    assert not (tmp_path / ATTEMPTS).exists()


def test_a_note_that_can_not_be_read_is_named_and_begun_anew(tmp_path, caplog):
    (tmp_path / ATTEMPTS).write_text("[{")
    with Attempts(str(tmp_path), 3, active=True) as attempts:
        assert len(attempts.records()) == 1
    assert str(tmp_path / ATTEMPTS) in caplog.text
    assert len(read(tmp_path)) == 1


def test_a_place_that_can_not_be_written_does_not_end_the_training(tmp_path, caplog):
    Path(tmp_path / "file").write_text("in the way")
    with Attempts(str(tmp_path / "file"), 0, active=True) as attempts:
        attempts.seen(1)
    assert "the attempt is not noted" in caplog.text
