"""The status of a TrainJob, sent to a real HTTPS server in the form of Kubeflow Trainer's API."""

import http.server
import itertools
import math
import ssl
import subprocess
import threading

import pytest
from kubeflow_trainer_api.models import TrainerV1alpha1UpdateTrainJobStatusRequest as Request

from trainer.report.tracking import train_job
from trainer.report.tracking.exporter import exported
from trainer.report.tracking.stage_runs import Tracker


@pytest.fixture(scope="module")
def certificate(tmp_path_factory):
    folder = tmp_path_factory.mktemp("certificate")
    names = "-subj /CN=localhost -addext subjectAltName=IP:127.0.0.1"
    command = f"openssl req -x509 -newkey rsa:2048 -nodes -keyout key.pem -out ca.crt -days 2 {names}"
    subprocess.run(command.split(), cwd=folder, check=True, capture_output=True)
    return folder


class Server:
    """Answers as Trainer's status server does, and keeps what it is sent."""

    def __init__(self, certificate):
        self.received, self.tokens, self.code = [], [], 200
        outer = self

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_POST(self):
                outer.tokens.append(self.headers["Authorization"])
                content = self.rfile.read(int(self.headers["Content-Length"]))
                if outer.code == 200:
                    outer.received.append(Request.model_validate_json(content, strict=True).trainer_status)
                if not outer.code:
                    self.wfile.write(b"nonsense\r\n\r\n")
                    return
                self.send_response(outer.code)
                self.end_headers()
                self.wfile.write(b"{}")

            def log_message(self, *arguments):
                pass

        self.server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(certificate / "ca.crt", certificate / "key.pem")
        self.server.socket = context.wrap_socket(self.server.socket, server_side=True)
        threading.Thread(target=self.server.serve_forever, daemon=True).start()
        self.url = f"https://127.0.0.1:{self.server.server_port}/apis/trainer.kubeflow.org/v1alpha1/namespaces/a/trainjobs/b/status"


@pytest.fixture
def server(certificate, tmp_path, monkeypatch):
    """A server, and the variables of a TrainJob's pod that lead to it."""
    running = Server(certificate)
    (tmp_path / "token").write_text("first\n")
    monkeypatch.setenv(train_job.URL, running.url)
    monkeypatch.setenv(train_job.CERTIFICATE, str(certificate / "ca.crt"))
    monkeypatch.setenv(train_job.TOKEN, str(tmp_path / "token"))
    monkeypatch.setattr(train_job, "INTERVAL_S", 0.05)
    yield running
    running.server.shutdown()
    running.server.server_close()


def wait_for(condition):
    passed = threading.Event()
    for _ in range(200):
        if condition():
            return
        passed.wait(0.05)
    raise AssertionError("nothing came within 10 s")


def test_progress_and_measures_are_sent_as_they_change(server, tmp_path):
    with exported(Tracker(), "distill") as tracker:
        tracker.follow("distill", 10, 500, 64, lambda: 32.0)
        tracker.metrics(
            39, {"distill/loss": 0.5, "distill/learning_rate": 0.2, "distill/finding/x": 1.0, "system/cpu": 3.0}
        )
        wait_for(lambda: server.received and server.received[-1].progress_percentage == 8)
        (tmp_path / "token").write_text("second\n")  # it is rotated
        tracker.metrics(499, {"distill/loss": math.nan, "distill/learning_rate": 0.1, "distill/val_top1": 0.75})
    before, after = server.received[-2:]
    assert before.estimated_remaining_seconds == (500 - 40) * 64 / 32
    assert {one.name: one.value for one in before.metrics} == {"distill/loss": "0.5", "distill/learning_rate": "0.2"}
    assert (after.progress_percentage, after.estimated_remaining_seconds) == (100, 0)
    assert {one.name: float(one.value) for one in after.metrics} == {
        "distill/learning_rate": 0.1,
        "distill/val_top1": 0.75,
    }
    assert after.last_updated_time > before.last_updated_time
    assert (server.tokens[0], server.tokens[-1]) == ("Bearer first", "Bearer second")
    sent = [one.model_dump(exclude={"last_updated_time"}) for one in server.received]
    assert all(one != other for one, other in itertools.pairwise(sent)), "only what has changed"


@pytest.mark.parametrize("fault", ["403", "no HTTP", "another certificate", "no token", "nobody listens"])
def test_a_training_goes_on_without(server, monkeypatch, caplog, tmp_path, fault):
    if fault == "403":
        server.code = 403
    elif fault == "no HTTP":
        server.code = 0
    elif fault == "another certificate":
        monkeypatch.delenv(train_job.CERTIFICATE)
    elif fault == "no token":
        monkeypatch.setenv(train_job.TOKEN, str(tmp_path / "none"))
    else:
        monkeypatch.setenv(train_job.URL, "https://127.0.0.1:1/status")
    with exported(Tracker(), "distill") as tracker:
        for step in range(5):
            tracker.follow("distill", step, 500, 64, lambda: None)
            threading.Event().wait(0.06)
    assert server.received == []
    (message,) = [record.getMessage() for record in caplog.records]
    assert "the TrainJob's status cannot be updated" in message


def test_what_the_crd_refuses_is_left_out():
    many = {f"distill/measure_{number:03d}": 1.0 for number in range(300)}
    status = train_job.body(train_job.StepsDone(7, 0, None), {"x" * 65: 1.0, "inf": math.inf, **many})
    assert "progressPercentage" not in status
    assert "estimatedRemainingSeconds" not in status
    assert [one["name"] for one in status["metrics"]] == list(many)[:256]
