"""Notifications, sent to a real HTTP server."""

import hashlib
import hmac
import http.server
import json
import socketserver
import threading

import pytest

from trainer.config.settings import RunSettings
from trainer.io import notifications
from trainer.io.errors import SettingsError
from trainer.io.notifications import Event, Notifier
from trainer.report.tracking import notify_of_end

FINDING = Event(
    event="finding",
    run="kitchen",
    severity="severe",
    title="Exploding gradients",
    text="Grew <100> times & more.",
    training="distill",
    rule="exploding_gradients",
    step=20,
    at="2026-01-01T00:00:00+00:00",
)


class Receiver(http.server.ThreadingHTTPServer):
    """Keeps what it is sent, and answers with the next of its statuses."""

    def __init__(self, *statuses):
        super().__init__(("127.0.0.1", 0), _Handler)
        self.statuses, self.received = list(statuses), []
        self.address = f"http://127.0.0.1:{self.server_port}"


class _Handler(http.server.BaseHTTPRequestHandler):
    def do_POST(self):
        body = self.rfile.read(int(self.headers["Content-Length"]))
        self.server.received.append((self.path, dict(self.headers), body))
        self.send_response(self.server.statuses.pop(0) if self.server.statuses else 200)
        self.end_headers()

    def log_message(self, *_):
        pass


@pytest.fixture
def receiver():
    server = Receiver()
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield server
    server.shutdown()
    thread.join()
    server.server_close()


def send(environment, event=FINDING):
    notifier = Notifier(environment)
    notifier.send(event)
    notifier.close()


def test_each_format(receiver):
    places = f"{receiver.address}/hook slack+{receiver.address}/services/x alertmanager+{receiver.address}"
    send({"TRAINER_NOTIFY": places, "TRAINER_NOTIFY_SECRET": "key"})
    (hook, headers, body), (slack, unsigned, message), (alerts, _, alert) = receiver.received
    assert (hook, slack, alerts) == ("/hook", "/services/x", "/api/v2/alerts")
    assert headers["X-Signature-256"] == "sha256=" + hmac.new(b"key", body, hashlib.sha256).hexdigest()
    assert "X-Signature-256" not in unsigned
    sent = json.loads(body)
    assert sent["id"] == FINDING.id != Event(**vars(FINDING) | {"rule": "overfitting"}).id
    assert {name: sent[name] for name in ("event", "run", "training", "rule", "severity", "step")} == {
        "event": "finding",
        "run": "kitchen",
        "training": "distill",
        "rule": "exploding_gradients",
        "severity": "severe",
        "step": 20,
    }
    text = "*Exploding gradients* (severe): kitchen distill\nGrew &lt;100&gt; times &amp; more."
    assert json.loads(message) == {"text": text}
    (one,) = json.loads(alert)
    assert one["labels"] == {
        "alertname": "Exploding gradients",
        "severity": "severe",
        "event": "finding",
        "run": "kitchen",
        "training": "distill",
        "rule": "exploding_gradients",
    }
    assert one["annotations"] == {"summary": "kitchen distill: Exploding gradients", "description": FINDING.text}
    assert one["startsAt"] == FINDING.at


def test_without_a_key_nothing_is_signed_and_without_an_address_nothing_sent(receiver):
    send({"TRAINER_NOTIFY": receiver.address})
    assert "X-Signature-256" not in receiver.received[0][1]
    send({})
    assert len(receiver.received) == 1


def test_a_receiver_that_is_busy_is_asked_again_and_a_refusal_is_final(receiver, monkeypatch, caplog):
    monkeypatch.setattr(notifications.time, "sleep", lambda seconds: None)
    receiver.statuses = [503, 429, 200]
    send({"TRAINER_NOTIFY": receiver.address})
    assert (len(receiver.received), caplog.text) == (3, "")
    receiver.statuses = [404]
    send({"TRAINER_NOTIFY": f"slack+{receiver.address}/services/secret"})
    assert len(receiver.received) == 4
    (record,) = caplog.records
    assert record.getMessage() == "the notification “Exploding gradients” did not reach 127.0.0.1: HTTP 404"
    receiver.statuses = [500] * 3
    send({"TRAINER_NOTIFY": receiver.address})
    assert len(receiver.received) == 7
    assert "HTTP 500" in caplog.text


def test_a_receiver_that_speaks_no_http_holds_up_no_other(receiver, monkeypatch, caplog):
    monkeypatch.setattr(notifications.time, "sleep", lambda seconds: None)

    class Garbage(socketserver.StreamRequestHandler):
        def handle(self):
            self.rfile.readline()
            self.wfile.write(b"garbage\r\n\r\n")

    with socketserver.ThreadingTCPServer(("127.0.0.1", 0), Garbage) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        send({"TRAINER_NOTIFY": f"http://127.0.0.1:{server.server_address[1]} {receiver.address}"})
        server.shutdown()
        thread.join()
    assert len(receiver.received) == 1
    assert "did not reach 127.0.0.1: garbage" in caplog.text


def test_the_end_of_a_run_is_sent(receiver, monkeypatch):
    monkeypatch.setenv("TRAINER_NOTIFY", receiver.address)
    monkeypatch.setenv("TRAINER_RUN", "kitchen")
    for status in ("FINISHED", "KILLED", "FAILED"):
        notify_of_end(status, "Why.")
    ends = [json.loads(body) for _, _, body in receiver.received]
    assert [end["severity"] for end in ends] == ["note", "warning", "severe"]
    assert [end["title"] for end in ends] == ["Run finished", "Run killed", "Run failed"]
    assert {(end["event"], end["run"], end["text"]) for end in ends} == {("run ended", "kitchen", "Why.")}


@pytest.mark.parametrize(
    "given",
    ["ftp://host", "teams+https://host", "host", "https://", "slack+host/x", "https://[x", "https://host:abc/x"],
)
def test_what_is_no_address_is_refused(given):
    with pytest.raises(SettingsError, match=r"TRAINER_NOTIFY: .* must be an address such as https://host/path"):
        Notifier({"TRAINER_NOTIFY": given})
    with pytest.raises(ValueError, match="must be an address such as"):
        RunSettings(notify=given)


def test_the_address_of_slack_is_no_setting():
    with pytest.raises(ValueError, match=r"Slack's address is a secret; set TRAINER_NOTIFY in the environment"):
        RunSettings(notify="slack+https://hooks.slack.com/services/x")
    assert RunSettings(notify="alertmanager+http://host:9093").notify
