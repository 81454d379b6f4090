"""Notifications of findings and of the end of a run: to a webhook as signed JSON, to Slack, or to Alertmanager.

`TRAINER_NOTIFY` holds addresses, separated by spaces; what stands before `+` is the format:

    https://host/path                    JSON; with `TRAINER_NOTIFY_SECRET` the header `X-Signature-256: sha256=HEX` has its HMAC
    slack+https://hooks.slack.com/...    a message of a Slack app's incoming webhook
    alertmanager+http://host:9093        an alert of Alertmanager's API v2

An address may be a secret, as Slack's is: messages name its host alone. Sending is a thread's work, and costs no run.
"""

from __future__ import annotations

import hashlib
import hmac
import http.client
import json
import logging
import os
import queue
import threading
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from typing import Any, Literal

from trainer.io.errors import SettingsError
from trainer.io.limits import printable
from trainer.io.retry import Retry

logger = logging.getLogger(__name__)

ADDRESSES = "TRAINER_NOTIFY"
SECRET = "TRAINER_NOTIFY_SECRET"
SIGNATURE = "X-Signature-256"
_FORMATS = ("json", "slack", "alertmanager")
_TIMEOUT_S = 5.0
_ATTEMPTS = 3
_CLOSING_S = 10.0
"""Longest wait for what is on its way as a process ends."""


@dataclass(frozen=True, kw_only=True)
class Event:
    """What is worth a notification."""

    event: Literal["finding", "run ended"]
    run: str  # name of the run; empty if it has none
    severity: Literal["note", "warning", "severe"]
    title: str  # of the rule, or how the run ended
    text: str  # what was found, and what to do; of a run its error or its result
    training: str = ""  # of a finding
    rule: str = ""
    step: int | None = None  # counted from 0
    at: str = field(default_factory=lambda: datetime.now(UTC).isoformat(timespec="seconds"))

    @property
    def id(self) -> str:
        """The same for the same finding of a resumed training, so that a receiver can drop the second."""
        parts = "\n".join((self.run, self.training, self.rule, self.event))
        return hashlib.sha256(parts.encode()).hexdigest()[:16]


def body_for(form: str, event: Event) -> Any:
    """Return the content of a notification, as JSON holds it."""
    if form == "json":
        return {"version": 1, "id": event.id, **asdict(event)}
    where = " ".join(part for part in (event.run, event.training) if part)
    if form == "slack":
        escaped = [
            text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
            for text in (event.title, where, event.text)
        ]
        return {"text": f"*{escaped[0]}* ({event.severity}): {escaped[1]}\n{escaped[2]}"}
    labels = {"alertname": event.title, "severity": event.severity, "event": event.event, "run": event.run}
    labels |= {"training": event.training, "rule": event.rule}
    return [
        {
            "labels": {name: value for name, value in labels.items() if value},
            "annotations": {"summary": f"{where}: {event.title}", "description": event.text},
            "startsAt": event.at,
        }
    ]


def addresses(environment: Mapping[str, str]) -> list[tuple[str, str]]:
    """Read the format and the address of each receiver; a `SettingsError` where one is neither http nor https, or of another format."""
    found = []
    for given in environment.get(ADDRESSES, "").split():
        form, plus, address = given.partition("+")
        if not plus or "/" in form:
            form, address = "json", given
        try:
            parts = urllib.parse.urlsplit(address)
            host, _port = parts.hostname, parts.port
        except ValueError:  # half an IPv6 address, or a port that is no number
            host = None
        if form not in _FORMATS or not host or parts.scheme not in ("http", "https"):
            raise SettingsError(
                f"{ADDRESSES}: {printable(form)} at {printable(host or '?')} must be an address such as https://host/path, "
                "slack+https://hooks.slack.com/... or alertmanager+http://host:9093"
            )
        if form == "alertmanager" and parts.path in ("", "/"):
            address = f"{address.rstrip('/')}/api/v2/alerts"
        found.append((form, address))
    return found


class Notifier:
    """Sends events to all receivers, in their order, from a thread of its own; does nothing without receivers."""

    def __init__(self, environment: Mapping[str, str] = os.environ) -> None:
        self._receivers = addresses(environment)
        self._secret = environment.get(SECRET, "").encode()
        self._waiting: queue.Queue[Event | None] = queue.Queue()
        self._thread: threading.Thread | None = None

    def send(self, event: Event) -> None:
        """Send an event; takes microseconds, never waits and never raises."""
        if not self._receivers:
            return
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="notifications", daemon=True)
            self._thread.start()
        self._waiting.put(event)

    def close(self) -> None:
        """Wait for what is on its way, for at most some seconds."""
        if self._thread is not None:
            self._waiting.put(None)
            self._thread.join(timeout=_CLOSING_S)
            self._thread = None

    def _run(self) -> None:
        while (event := self._waiting.get()) is not None:
            for form, address in self._receivers:
                self._post(form, address, event)

    def _post(self, form: str, address: str, event: Event) -> None:
        body = json.dumps(body_for(form, event), ensure_ascii=False).encode()
        headers = {"Content-Type": "application/json"}
        if self._secret and form == "json":
            headers[SIGNATURE] = f"sha256={hmac.new(self._secret, body, hashlib.sha256).hexdigest()}"
        request = urllib.request.Request(address, data=body, headers=headers, method="POST")
        for attempt in range(1, _ATTEMPTS + 1):
            try:
                with urllib.request.urlopen(request, timeout=_TIMEOUT_S):
                    return
            except urllib.error.HTTPError as error:
                reason, is_final = f"HTTP {error.code}", error.code < 500 and error.code != 429
            # URLError among them; an answer that is no HTTP; a name that no host can have
            except (OSError, http.client.HTTPException, ValueError) as error:
                reason, is_final = str(getattr(error, "reason", error)), False
            if is_final or attempt == _ATTEMPTS:
                host = urllib.parse.urlsplit(address).hostname
                logger.warning("the notification “%s” did not reach %s: %s", event.title, host, reason)
                return
            time.sleep(Retry(first_s=0.5, longest_s=2.0).wait_s(attempt))
