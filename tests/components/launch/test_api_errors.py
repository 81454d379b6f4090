"""What the answers of the API server mean, and retries while it does not answer."""

from __future__ import annotations

import threading
import time

import pytest

from components.launch.api_errors import (
    PODS,
    ApiRetry,
    ApiUnavailableError,
    ForbiddenError,
    RetryStopped,
    ServerRequest,
    format_duration,
    response_error,
)


@pytest.mark.parametrize("message", ["exceeded quota: gpus", 'admission webhook "w" denied the request: you cannot'])
def test_403_is_not_always_a_matter_of_rights(message):
    error = response_error(403, message, ServerRequest("https://c", "kubeflow", "create", PODS))
    assert not isinstance(error, ForbiddenError)
    assert str(error) == f"cannot create pods in namespace kubeflow: the API server https://c answered 403: {message}"


def failing(times, error):
    """An action that fails so often before it succeeds."""
    left = [error] * times

    def action():
        if left:
            raise left.pop()
        return "done"

    return action


def test_a_single_failure_is_retried_silently(logged):
    assert ApiRetry(10)(failing(1, ApiUnavailableError("away"))) == "done"
    assert logged() == []


def test_loss_and_return_are_logged_once(logged):
    assert ApiRetry(10)(failing(3, ApiUnavailableError("the server is away"))) == "done"
    assert logged()[0] == "the server is away; retrying for at most 10 s"
    assert logged()[1].startswith("the API server answers again after ")
    assert len(logged()) == 2


def test_other_errors_are_not_retried():
    left = failing(2, ForbiddenError("no right"))
    with pytest.raises(ForbiddenError):
        ApiRetry(10)(left)
    with pytest.raises(ForbiddenError):
        left()
    assert left() == "done"


def test_the_timeout_counts_from_the_loss():
    retry, start = ApiRetry(0.3), time.monotonic()
    with pytest.raises(ApiUnavailableError):
        retry(failing(1000, ApiUnavailableError("away")))
    assert 0.3 <= time.monotonic() - start < 30


def test_a_stop_ends_all_waiting():
    retry, ended = ApiRetry(1000), threading.Event()

    def wait():
        with pytest.raises(RetryStopped):
            retry(failing(1000, ApiUnavailableError("away")))
        ended.set()

    thread = threading.Thread(target=wait)
    thread.start()
    time.sleep(0.1)
    retry.stop()
    assert ended.wait(30)
    thread.join()
    with pytest.raises(RetryStopped):
        retry(failing(0, None))


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.5, "0.5 s"), (59.6, "59.6 s"), (119, "119 s"), (120, "2 min"), (900, "15 min"), (9000, "2.5 h")],
)
def test_durations_are_easy_to_read(seconds, text):
    assert format_duration(seconds) == text
