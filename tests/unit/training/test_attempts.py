import json
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from trainer.io import storage
from trainer.io.errors import (
    LostProcessError,
    OutputError,
    PreemptedError,
    StorageError,
    SupersededError,
    TrainingError,
)
from trainer.training import attempts as module
from trainer.training.attempts import ATTEMPTS, AttemptLog


def read(folder):
    return json.loads((folder / ATTEMPTS).read_text())


def interrupt_after(steps, attempts):
    attempts.heartbeat(steps)
    raise KeyboardInterrupt


def test_each_try_finds_those_before_it(tmp_path):
    with pytest.raises(KeyboardInterrupt), AttemptLog(str(tmp_path)) as first:
        interrupt_after(7, first)
    with AttemptLog(str(tmp_path)).resumed_at(5) as second:
        second.heartbeat(2)
        records = second.records()
    assert [(record.first_step, record.steps_seen) for record in records] == [(0, 7), (5, 2)]
    assert records[0].began_unix <= records[0].seen_unix <= records[1].began_unix <= records[1].seen_unix


def test_signs_of_life_are_rare_and_the_last_one_survives_a_kill(tmp_path, monkeypatch):
    with AttemptLog(str(tmp_path)) as attempts:
        attempts.heartbeat(1)
        assert read(tmp_path)[-1]["steps_seen"] == 0, "written a moment ago"
        later = module.time.monotonic() + 6
        with monkeypatch.context() as clock:
            clock.setattr(module.time, "monotonic", lambda: later)
            attempts.heartbeat(2)
            attempts._writer.wait()
            attempts.heartbeat(3)
        assert read(tmp_path)[-1]["steps_seen"] == 2
        assert attempts.records()[-1].steps_seen == 3


def test_a_sign_of_life_begins_with_a_look_whether_a_later_try_has_begun(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "_LOCAL_INTERVAL_S", 0.0)
    later = []

    def look():
        if later:
            raise SupersededError("superseded")

    with AttemptLog(str(tmp_path), check_ours=look) as attempts:
        attempts.heartbeat(1)
        attempts._writer.wait()
        later.append("one")
        (tmp_path / ATTEMPTS).write_text("the later one's")
        attempts.heartbeat(2)
        attempts._writer.wait()
        with pytest.raises(SupersededError):
            attempts.heartbeat(3)
    assert (tmp_path / ATTEMPTS).read_text() == "the later one's"


def test_a_sign_of_life_that_waits_for_the_store_holds_up_no_step_and_says_nothing(object_store, monkeypatch, caplog):
    monkeypatch.setattr(module, "_REMOTE_INTERVAL_S", 0.0)
    monkeypatch.setenv("AWS_MAX_ATTEMPTS", "2")
    with AttemptLog(object_store.uri("c")) as attempts:
        object_store.delay(3600)
        for steps in range(1, 1000):
            attempts.heartbeat(steps)
        object_store.clear()
        object_store.answer(503)
        attempts._writer.wait()
        attempts.heartbeat(1000)  # another one, which fails
        attempts._writer.wait()
        object_store.clear()
        attempts.heartbeat(1001)
    assert json.loads(object_store.get(f"c/{ATTEMPTS}"))[-1]["steps_seen"] == 1001
    assert not [line for line in caplog.messages if "not noted" in line]


def test_the_last_sign_of_life_has_arrived_when_a_try_ends(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "_LOCAL_INTERVAL_S", 0.0)
    looks = []

    def look():
        looks.append("slow")
        time.sleep(0.2)

    with AttemptLog(str(tmp_path), check_ours=look) as attempts:
        attempts.heartbeat(7)
    assert looks
    assert read(tmp_path)[-1]["steps_seen"] == 7, "it could come after the training's notes are removed"


def test_other_processes_neither_read_nor_write(tmp_path):
    with AttemptLog(str(tmp_path), rank=1) as attempts:
        attempts.heartbeat(1)
        assert attempts.records() == ()
    assert not (tmp_path / ATTEMPTS).exists()


def test_a_note_that_cannot_be_read_is_named_and_begun_anew(tmp_path, caplog):
    (tmp_path / ATTEMPTS).write_text("[{")
    with AttemptLog(str(tmp_path)).resumed_at(3) as attempts:
        assert len(attempts.records()) == 1
    assert str(tmp_path / ATTEMPTS) in caplog.text
    assert len(read(tmp_path)) == 1


def test_a_place_that_cannot_be_written_does_not_end_the_training(tmp_path, caplog):
    Path(tmp_path / "file").write_text("in the way", encoding="utf-8")
    with AttemptLog(str(tmp_path / "file")) as attempts:
        attempts.heartbeat(1)
    assert "the attempt is not noted" in caplog.text


def fail(folder, error, *, step=7, rank=0):
    """A try that begins at step 5 and fails."""
    with AttemptLog(str(folder), rank=rank).resumed_at(5) as attempts:
        attempts.heartbeat(step - 5)
        raise error


def test_a_failure_may_be_tried_again_and_the_same_one_at_the_same_step_ends_the_training(tmp_path, caplog):
    with pytest.raises(ZeroDivisionError):
        fail(tmp_path, ZeroDivisionError("at 0x7f00 in process 17"))
    with pytest.raises(TrainingError) as ended:
        fail(tmp_path, ZeroDivisionError("at 0x7a11 in process 9"), rank=1)  # on another rank than before
    expected = "failed twice at step 8 in the same way: ZeroDivisionError: at 0x7a11 in process 9"
    assert str(ended.value) == expected
    assert "Traceback" in caplog.text, "whoever looks for the bug needs it"


@pytest.mark.parametrize(
    "second",
    [(ZeroDivisionError("planted"), 8), (ValueError("planted"), 7), (ZeroDivisionError("another"), 7)],
    ids=["another step", "another kind", "another message"],
)
def test_another_failure_or_another_step_is_a_first_one(tmp_path, second):
    with pytest.raises(ZeroDivisionError):
        fail(tmp_path, ZeroDivisionError("planted"))
    error, step = second
    with pytest.raises(type(error), match=r"^(planted|another)$"):
        fail(tmp_path, error, step=step)


def test_an_error_with_a_message_keeps_its_kind(tmp_path):
    for message in ("disk full", "failed twice at step 8 in the same way: disk full"):
        with pytest.raises(OutputError, match=f"^{message}$"):
            fail(tmp_path, OutputError("disk full"))


@pytest.mark.parametrize("error", [PreemptedError("asked"), LostProcessError("rank 1"), KeyboardInterrupt()])
def test_who_was_asked_to_end_or_misses_another_process_may_always_try_again(tmp_path, error):
    for _ in range(3):
        with pytest.raises(type(error)) as ended:
            fail(tmp_path, error)
        assert ended.value is error


def test_a_try_that_is_superseded_leaves_the_notes_to_the_later_one(tmp_path):
    def be_superseded():
        (tmp_path / ATTEMPTS).write_text("the later one's")
        raise SupersededError("superseded")

    with pytest.raises(SupersededError), AttemptLog(str(tmp_path)):
        be_superseded()
    assert (tmp_path / ATTEMPTS).read_text() == "the later one's"
    assert [path.name for path in tmp_path.iterdir()] == [ATTEMPTS]


def test_a_damaged_note_of_a_failure_is_named_and_passed_over(tmp_path, caplog):
    (tmp_path / "failure-0.json").write_text("{")
    with pytest.raises(ZeroDivisionError):
        fail(tmp_path, ZeroDivisionError("planted"))
    assert "failure-0.json cannot be read" in caplog.text


def test_a_failure_that_cannot_be_noted_is_reported_as_it_is(tmp_path, caplog):
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(ZeroDivisionError):
        fail(tmp_path / "file" / "below", ZeroDivisionError("planted"))
    assert "the failure is not noted" in caplog.text


@pytest.fixture(params=["here", "in a store"])
def root(request, tmp_path):
    if request.param == "here":
        return str(tmp_path / "training")
    return request.getfixturevalue("object_store").uri("training")


def test_a_later_one_fences_off_the_one_before(root):
    first = module.claim(root)
    assert first.state() == "newest"
    second = module.claim(root)
    assert (first.number, second.number) == (1, 2)
    assert (first.state(), second.state()) == ("superseded", "newest")


def test_each_number_is_claimed_once(root):
    with ThreadPoolExecutor(6) as threads:
        numbers = [one.number for one in threads.map(lambda _: module.claim(root), range(12))]
    assert sorted(numbers) == list(range(1, 13))


def test_a_number_that_a_checkpoint_has_is_taken(tmp_path):
    (tmp_path / "step-00000500-g004").mkdir()
    assert module.claim(str(tmp_path)).number == 5
    (tmp_path / ".step-00000600-g007").mkdir()
    (tmp_path / "evidence-of-failed").mkdir()
    assert module.claim(str(tmp_path)).number == 8


def test_a_claim_that_was_taken_over_is_lost(tmp_path):
    claimed = module.claim(str(tmp_path))
    (tmp_path / "generation-001").write_bytes(b"another")
    assert claimed.state() == "superseded"
    assert not claimed.acquire()


def test_a_claim_that_is_gone_says_nothing_of_a_later_one_and_is_made_again(root):
    module.claim(root)
    claimed = module.claim(root)
    storage.remove(root)
    assert claimed.state() == "gone"
    assert claimed.acquire()
    assert claimed.state() == "newest"
    assert module.claim(root).number == 3


def test_who_begins_after_the_claims_were_lost_is_the_later_one_though_its_number_is_lower(root):
    module.claim(root)
    second = module.claim(root)
    storage.remove(root)
    assert module.claim(root).number == 1
    assert second.state() == "superseded"


def test_an_answer_that_is_lost_does_not_cost_the_claim(object_store):
    object_store.lose_answer(method="PUT", path="generation-001")
    claimed = module.claim(object_store.uri("training"))
    assert claimed.number == 1
    assert claimed.state() == "newest"


def test_a_store_that_refuses_is_reported(object_store):
    object_store.answer(403, method="PUT")
    with pytest.raises(StorageError, match="refuses"):
        module.claim(object_store.uri("training"))
