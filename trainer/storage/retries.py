"""Requests to the object store: attempted again where that can help, and explained where it cannot."""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable
from typing import Any, TypeVar

from trainer.errors import ObjectDamagedError, ObjectExistsError, ObjectNotFoundError, StorageAwayError, StorageError
from trainer.retry import Retry

logger = logging.getLogger(__name__)

T = TypeVar("T")

ATTEMPTS_VARIABLE = "AWS_MAX_ATTEMPTS"
ATTEMPTS = 9
"""Attempts of a request unless `AWS_MAX_ATTEMPTS` says otherwise; with the waits below, a store may be away for about 40 s."""
RETRY = Retry(first_s=0.25, longest_s=15.0, jitter=0.5)

_PASSING_STATUS = frozenset({408, 429, 500, 502, 503, 504})
_CONFLICT = "ConditionalRequestConflict"
"""Two requests would create the same object at the same time; the second has to ask again."""
_ENDPOINT_VARIABLES = ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL")


def endpoint() -> str:
    """Return the address of the object store that the environment names; empty for Amazon's own."""
    return next((os.environ[name] for name in _ENDPOINT_VARIABLES if os.environ.get(name)), "")


class Outage:
    """Whether the store is away: logged once when it goes and once when it is back, for all threads together."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.since: float | None = None
        """When a request failed since which the store has not answered; None while it answers."""
        self._failing: set[object] = set()
        """Requests whose last attempt has failed."""

    def failed(self, call: object, uri: str, error: Exception, attempts: int) -> None:
        """Note that an attempt of a request has failed in a way that may pass."""
        with self._lock:
            self._failing.add(call)
            if self.since is None:
                self.since = time.monotonic()
                if attempts > 1:  # else the error says it all
                    logger.warning(
                        "%s: %s; %s is away or busy, so requests are tried again, each up to %d times",
                        uri,
                        _describe(error),
                        _store(),
                        attempts,
                    )

    def ended(self, call: object, *, answered: bool) -> None:
        """Note that a request has ended; where it was answered the store is back, unless others still fail."""
        with self._lock:
            self._failing.discard(call)
            if answered and self.since is not None and not self._failing:
                logger.warning("%s answers again after %.0f s", _store(), time.monotonic() - self.since)
                self.since = None


outage = Outage()


def is_away() -> bool:
    """Return whether the store has not answered this process since a request of it failed."""
    return outage.since is not None


def call(uri: str, request: Callable[[], T]) -> T:
    """Make a request to the store; failures that pass (5xx, no answer, cut off) are waited for, twice as long each time, with jitter.

    Args:
        request: has no effect that a repetition would spoil, and touches no local file.

    Raises:
        ObjectNotFoundError: there is no such object.
        ObjectExistsError: there is one, and it was to be created.
        ObjectDamagedError: it lacks the bytes that were asked for.
        StorageAwayError: the store kept failing.
        StorageError: the store refuses.
    """
    text = os.environ.get(ATTEMPTS_VARIABLE) or str(ATTEMPTS)
    if not text.isdecimal() or int(text) < 1:
        raise StorageError(f"{ATTEMPTS_VARIABLE}={text}: must be a number >= 1; correct it or unset it")
    attempts = int(text)
    start, this, answered = time.monotonic(), object(), False

    def failed(error: Exception, attempt: int) -> None:
        nonlocal answered
        if not _passes(error):
            answered = bool(_status(error)) or isinstance(error, FileNotFoundError)
            raise _refusal(uri, error) from error
        outage.failed(this, uri, error, attempts)
        if attempt == attempts:
            raise StorageAwayError(
                f"{uri}: gave up after {attempts} attempts in {time.monotonic() - start:.0f} s; the last time: {_describe(error)}. See to "
                f"{_store()} and the way there, then start again: what arrived whole is kept (more attempts: {ATTEMPTS_VARIABLE})"
            ) from error

    try:
        result = RETRY(request, failed=failed)
        answered = True
        return result
    finally:
        outage.ended(this, answered=answered)


def _passes(error: Exception) -> bool:
    """Return whether the same request may succeed later."""
    from aiohttp import ClientError
    from botocore import exceptions  # type: ignore[import-untyped]  # the package ships no types

    if _status(error):
        return _status(error) in _PASSING_STATUS or _code(error) == _CONFLICT
    if isinstance(error, (FileNotFoundError, FileExistsError, PermissionError, IsADirectoryError, NotADirectoryError)):
        return False
    client_errors = (exceptions.ConnectionError, exceptions.HTTPClientError, exceptions.IncompleteReadError)
    return isinstance(error, (*client_errors, ClientError, OSError))


def _response(error: BaseException) -> dict[str, Any]:
    """Return the store's answer behind an error; s3fs keeps it in the cause of a builtin exception."""
    for one in (error, error.__cause__):
        response = getattr(one, "response", None)
        if isinstance(response, dict):
            return response
    return {}


def _status(error: Exception) -> int:
    return int(_response(error).get("ResponseMetadata", {}).get("HTTPStatusCode", 0))


def _code(error: Exception) -> str:
    return str(_response(error).get("Error", {}).get("Code", ""))


def _describe(error: Exception) -> str:
    response = _response(error)
    if not response:
        return ": ".join(filter(None, (type(error).__name__, " ".join(str(error).split()))))
    texts = (str(_status(error)), _code(error), str(response.get("Error", {}).get("Message", "")))
    return "the store answered " + " ".join(dict.fromkeys(filter(None, texts)))


def _store() -> str:
    return f"the store at {endpoint()}" if endpoint() else "Amazon S3"


def _refusal(uri: str, error: Exception) -> StorageError:
    from botocore import exceptions

    if isinstance(error, (exceptions.NoCredentialsError, exceptions.PartialCredentialsError)):
        return StorageError(
            f"{uri}: no credentials for {_store()} ({error}); set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or give the pod a role"
        )
    if isinstance(error, PermissionError) or _status(error) in (401, 403):
        return StorageError(
            f"{uri}: {_store()} refuses ({_describe(error)}); check AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, and that they give the "
            "right to read, write and list there"
        )
    if _code(error) == "NoSuchBucket":
        return StorageError(f"{uri}: {_store()} has no such bucket; make it, or correct the URI or AWS_ENDPOINT_URL_S3")
    if _status(error) == 416:
        return ObjectDamagedError(f"the file {uri} is shorter than it was; make it again or copy it whole")
    if isinstance(error, FileExistsError) or _status(error) == 412:
        return ObjectExistsError(f"{uri}: there is such an object already; remove it or give another URI")
    if isinstance(error, FileNotFoundError):
        return ObjectNotFoundError(f"{uri}: there is no such object at {_store()}; check the URI")
    return StorageError(f"{uri}: {_store()} cannot do that ({_describe(error)}); check the URI and AWS_ENDPOINT_URL_S3")
