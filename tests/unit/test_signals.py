import signal

import pytest

from trainer import signals
from trainer.signals import EndRequest, Terminated, ended_by_sigterm


def end_by(number):
    with ended_by_sigterm():
        signal.raise_signal(number)


def test_sigterm_ends_a_block_as_ctrl_c_does_and_can_be_distinguished_from_it():
    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(Terminated):
        end_by(signal.SIGTERM)
    with pytest.raises(KeyboardInterrupt) as ended:
        end_by(signal.SIGINT)
    assert not isinstance(ended.value, Terminated)
    assert signal.getsignal(signal.SIGTERM) == before


def ask(request, *numbers):
    with request:
        for number in numbers:
            signal.raise_signal(number)


def test_a_request_ends_at_once_until_it_is_deferred():
    with pytest.raises(Terminated):
        ask(EndRequest(), signal.SIGTERM)
    with pytest.raises(KeyboardInterrupt) as ended:
        ask(EndRequest(), signal.SIGINT)
    assert not isinstance(ended.value, Terminated)


def later(request):
    with request:
        request.defer()
        signal.raise_signal(signal.SIGTERM)
        assert request.came
        raise ValueError("the block ends for another reason, and may have looked at the request")


def test_a_deferred_request_is_noted_and_the_handlers_are_put_back():
    before = [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)]
    with pytest.raises(ValueError, match="another reason"):
        later(EndRequest())
    assert [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)] == before


def ask_deferred(monkeypatch, seconds):
    now = 100.0
    monkeypatch.setattr(signals.time, "monotonic", lambda: now)
    with EndRequest() as request:
        request.defer()
        signal.raise_signal(signal.SIGTERM)
        now += seconds
        signal.raise_signal(signal.SIGTERM)
        raise ValueError("went on")


def test_the_same_request_by_two_ways_is_one_and_a_second_one_ends_at_once(monkeypatch):
    with pytest.raises(ValueError, match="went on"):
        ask_deferred(monkeypatch, 0.5)
    with pytest.raises(Terminated):
        ask_deferred(monkeypatch, 1.5)


def overlook():
    with EndRequest() as request:
        request.defer()
        signal.raise_signal(signal.SIGTERM)


def test_a_request_that_was_not_followed_is_not_lost():
    with pytest.raises(Terminated):
        overlook()
