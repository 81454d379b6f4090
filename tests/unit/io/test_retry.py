import logging
import time

import pytest

from trainer.io.retry import Outage, Retry


class Flaky:
    """Fails so many times, then answers."""

    def __init__(self, failures):
        self.failures, self.calls = failures, 0

    def __call__(self):
        self.calls += 1
        if self.calls <= self.failures:
            raise ConnectionResetError(f"failure {self.calls}")
        return "answer"


def test_attempts(monkeypatch):
    action, failed, waits = Flaky(6), [], []
    retry = Retry(first_s=0.25, longest_s=3)
    assert (
        retry(action, failed=lambda error, attempt: failed.append((str(error), attempt)), sleep=waits.append)
        == "answer"
    )
    assert failed == [(f"failure {attempt}", attempt) for attempt in range(1, 7)]
    assert waits == [0.25, 0.5, 1, 2, 3, 3]
    # Nothing waits where the first attempt returns.
    monkeypatch.setattr(time, "sleep", None)
    assert Retry(first_s=1, longest_s=2)(Flaky(0), failed=lambda error, attempt: pytest.fail(str(error))) == "answer"

    # What failed raises ends the attempts without a wait.
    def failed(error, attempt):
        if attempt == 2:
            raise ValueError("given up") from error

    action, waits = Flaky(5), []
    with pytest.raises(ValueError, match="given up"):
        Retry(first_s=1, longest_s=10)(action, failed=failed, sleep=waits.append)
    assert (action.calls, waits) == (2, [1])

    # An interruption is no failure.
    def interrupted():
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        Retry(first_s=1, longest_s=10)(
            interrupted, failed=lambda error, attempt: pytest.fail("asked"), sleep=pytest.fail
        )


def test_jitter_shortens_waits():
    retry = Retry(first_s=1, longest_s=15, jitter=0.5)
    waits = {retry.wait_s(1) for _ in range(50)}
    assert len(waits) > 40
    assert all(0.5 <= wait <= 1 for wait in waits)
    assert 7.5 <= retry.wait_s(100_000) <= 15


def test_an_outage_is_logged_from_start_to_end(caplog):
    outage = Outage("the server", logging.getLogger("trainer"), tolerated=1)
    outage.failed("lost")
    outage.ended()
    assert (caplog.messages, outage.back_for_s) == ([], float("inf")), "a single failure is tolerated"
    for request in "aab":
        assert outage.failed(f"lost by {request}", request) < 10
    outage.ended("a")
    assert outage.is_away, "b still fails"
    outage.ended("b", answered=False)
    assert outage.is_away, "nobody was answered since"
    outage.ended("c")
    assert not outage.is_away
    assert outage.back_for_s < 10
    assert caplog.messages == ["lost by a", "the server answers again after 0 s"]


def test_a_server_that_throttles_does_not_fill_the_log(caplog, monkeypatch):
    clock = [1000.0]
    monkeypatch.setattr(time, "monotonic", lambda: clock[0])
    outage = Outage("the server", logging.getLogger("trainer"))
    for _ in range(100):  # a refused request a second
        outage.failed("503")
        outage.ended()
        clock[0] += 1
    back = "the server answers again after 0 s"
    assert caplog.messages == ["503", back, "503 (59 short outages were not logged)", back]
    caplog.clear()
    for _ in range(12):  # one that lasts is logged, soon as it comes
        outage.failed("gone")
        clock[0] += 1
    outage.ended()
    assert caplog.messages == ["gone (39 short outages were not logged)", "the server answers again after 12 s"]
