import threading
import time
from datetime import timedelta

import pytest
from torch.distributed import HashStore

from trainer.errors import LostProcessError, SettingsError
from trainer.training import collective_watchdog as module
from trainer.training.collective_watchdog import CollectiveWatchdog, wait_limit_s

TIMED_OUT = (
    "[/build/gloo/transport/tcp/unbound_buffer.cc:81] Timed out waiting 5000ms for recv operation to complete. Hint"
)
CLOSED = (
    "[/build/gloo/transport/tcp/pair.cc:534] Connection closed by peer [10.0.0.7]:4711. This is typically caused by"
)


@pytest.fixture
def group(monkeypatch):
    """Three processes with one store."""
    monkeypatch.setattr(module, "_ROLL_CALL_S", 0.3)
    store = HashStore()
    return [CollectiveWatchdog(store, rank=rank, world_size=3, limit_s=5) for rank in range(3)]


def come(watchdog, what, reason=None):
    with watchdog.collective(what):
        if reason is not None:
            raise RuntimeError(reason)


def wait(watchdog, what, reason):
    with watchdog.waiting(what):
        raise RuntimeError(reason)


def messages(calls):
    """What the errors of calls that are made at the same time say."""
    reported = []

    def run(call):
        with pytest.raises(LostProcessError) as ended:
            call()
        reported.append(str(ended.value))

    threads = [threading.Thread(target=run, args=(call,)) for call in calls]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return set(reported)


def test_who_did_not_come_to_a_meeting_is_named_with_what_it_was_for(group):
    for one in group:
        come(one, "the first meeting")
    expected = "rank 1 did not come to the checkpoint of step 7 within 5 s; the log there may say why"
    # Torch breaks the connections to all others where one gives up; to them it looks as if it were lost.
    calls = [
        lambda: come(group[0], "the checkpoint of step 7", TIMED_OUT),
        lambda: come(group[2], "the checkpoint of step 7", CLOSED),
    ]
    assert messages(calls) == {expected}


def test_who_waits_in_a_step_notes_nothing_before_and_finds_who_is_missing_too(group):
    for one in group:
        come(one, "the start")
    for _ in range(3):
        with group[0].waiting("step 1"):
            pass
    assert messages([lambda: wait(group[0], "step 4", TIMED_OUT)]) == {
        "ranks 1, 2 did not come to step 4 within 5 s; the log there may say why"
    }


def test_a_process_that_is_gone_is_named_without_a_limit_that_no_one_waited_for(group):
    expected = "rank 2 went away during step 4 (Connection closed by peer [10.0.0.7]:4711)"
    assert messages([lambda one=one: wait(one, "step 4", CLOSED) for one in group[:2]]) == {expected}


def test_all_may_have_come_and_lost_each_other(group):
    (message,) = messages([lambda one=one: wait(one, "step 4", CLOSED) for one in group])
    assert message.startswith("step 4: all processes came, but lost each other (Connection closed")


def test_an_error_that_is_not_about_the_others_is_left_as_it_is(group):
    with pytest.raises(RuntimeError, match=r"^mat1 and mat2 shapes cannot be multiplied$"):
        wait(group[0], "step 4", "mat1 and mat2 shapes cannot be multiplied")


class Silent(HashStore):
    """A store that takes what is given and answers nothing."""

    def check(self, keys):
        time.sleep(60)


def test_a_meeting_place_that_does_not_answer_holds_none_up(monkeypatch):
    monkeypatch.setattr(module, "_STORE_S", 0.2)
    one = CollectiveWatchdog(Silent(), rank=0, world_size=2, limit_s=5)
    began = time.monotonic()
    with pytest.raises(LostProcessError, match="who is missing is not known"):
        wait(one, "step 4", TIMED_OUT)
    assert time.monotonic() - began < 30


@pytest.mark.parametrize("text", ["0", "-3", "ten", "inf", "nan"])
def test_a_limit_that_is_none_is_refused(monkeypatch, text):
    monkeypatch.setenv("TRAINER_WAIT_S", text)
    with pytest.raises(SettingsError, match=f"TRAINER_WAIT_S must be a number of seconds above 0, got '{text}'"):
        wait_limit_s()


def test_the_limit_is_ten_minutes_unless_the_environment_says_otherwise(monkeypatch):
    monkeypatch.delenv("TRAINER_WAIT_S", raising=False)
    assert timedelta(seconds=wait_limit_s()) == timedelta(minutes=10)
    monkeypatch.setenv("TRAINER_WAIT_S", "7.5")
    assert wait_limit_s() == 7.5
