from __future__ import annotations

import threading
import time

import pytest

from components.launch.patience import Patience, Stopped, duration
from components.launch.refusals import AwayError, DeniedError


def failing(times, error):
    """An action that fails so often before it succeeds."""
    left = [error] * times

    def action():
        if left:
            raise left.pop()
        return "done"

    return action


def test_a_single_failure_is_made_good_without_a_word(told):
    assert Patience(10)(failing(1, AwayError("away"))) == "done"
    assert told() == []


def test_loss_and_return_are_told_once(told):
    assert Patience(10)(failing(3, AwayError("the server is away"))) == "done"
    assert told()[0] == "the server is away; waiting for it, 10 s at most"
    assert told()[1].startswith("the API server answers again after ")
    assert len(told()) == 2


def test_what_does_not_pass_is_not_tried_again():
    left = failing(2, DeniedError("no right"))
    with pytest.raises(DeniedError):
        Patience(10)(left)
    with pytest.raises(DeniedError):
        left()
    assert left() == "done"


def test_the_limit_counts_from_the_loss():
    patience, start = Patience(0.3), time.monotonic()
    with pytest.raises(AwayError):
        patience(failing(1000, AwayError("away")))
    assert 0.3 <= time.monotonic() - start < 30


def test_a_stop_ends_all_waiting():
    patience, ended = Patience(1000), threading.Event()

    def wait():
        with pytest.raises(Stopped):
            patience(failing(1000, AwayError("away")))
        ended.set()

    thread = threading.Thread(target=wait)
    thread.start()
    time.sleep(0.1)
    patience.stop()
    assert ended.wait(30)
    thread.join()
    with pytest.raises(Stopped):
        patience(failing(0, None))


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.5, "0.5 s"), (59.6, "59.6 s"), (119, "119 s"), (120, "2 min"), (900, "15 min"), (9000, "2.5 h")],
)
def test_times_are_for_people(seconds, text):
    assert duration(seconds) == text
