"""A training whose object store and MLflow server go away in its middle: its steps go on, and nothing is lost.

The store comes back when some steps have been done without it, so a step that waits for it never ends, but for a clock that brings the
store back in the end and lets the test fail.
"""

import dataclasses
import http.server
import json
import logging
import re
import threading
from collections import Counter

import pytest

from trainer.io import storage
from trainer.report import tracking
from trainer.report.tracking import stage_runs
from trainer.training import attempts
from trainer.training import checkpoints as module
from trainer.training.loop import Trainer

LONG = {"epochs": 2, "checkpoint_every": 2}
"""Some twenty steps."""
LINES = {
    "store away": "is away or busy",
    "store back": "^the store at .* answers again",
    "MLflow away": "metrics wait",
    "MLflow back": "the server answers again",
    "passed over": "no checkpoint after step",
}
"""What is worth a warning."""
GOES, COMES_BACK = 4, 14
"""Steps."""
RUN = {"run": {"info": {"run_id": "1" * 32, "status": "RUNNING", "lifecycle_stage": "active"}, "data": {}}}


class Mlflow(http.server.ThreadingHTTPServer):
    """Takes metrics as MLflow's server does, unless it is away."""

    def __init__(self):
        super().__init__(("127.0.0.1", 0), MlflowHandler)
        self.away, self.points = False, []


class MlflowHandler(http.server.BaseHTTPRequestHandler):
    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if not self.server.away:
            self.server.points += [(point["key"], int(point["step"])) for point in body.get("metrics", ())]
            self.do_GET()

    def do_GET(self):
        if not self.server.away:
            self.send_response(200)
            self.end_headers()
            self.wfile.write(json.dumps(RUN).encode())

    def log_message(self, *arguments):
        pass


@pytest.fixture
def mlflow(monkeypatch):
    """A server that has the training's run already."""
    with Mlflow() as server:
        threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True).start()
        monkeypatch.setenv(tracking.URI, f"http://127.0.0.1:{server.server_port}")
        monkeypatch.setattr(
            stage_runs, "_start_stage", lambda *_: stage_runs._RunTracker(tracking.client(), "1" * 32, {})
        )
        monkeypatch.setattr(stage_runs, "_SEND_INTERVAL_S", 0.01)
        yield server
        server.shutdown()


class Outage:
    """Takes the store and the server away before one step, and brings them back before another."""

    def __init__(self, store, mlflow, kind):
        self._store, self._mlflow, self.kind = store, mlflow, kind
        self._clock = threading.Timer(60, self.end)
        self.steps, self.ended_at = [], None

    def before(self, step):
        self.steps.append(step)
        if step == GOES:
            self.begin()
        if step == COMES_BACK and self.ended_at is None:
            self.end()
            self._clock.cancel()

    def begin(self):
        self._mlflow.away = True
        if self.kind == "refuses":
            self._store.stop()
        else:
            self._store.delay(3600)
        self._clock.start()

    def end(self):
        self.ended_at = self.steps[-1]
        self._mlflow.away = False
        if self.kind == "refuses":
            self._store.start()
        self._store.clear()


@pytest.fixture
def outage(object_store, mlflow, monkeypatch, request):
    """As `request.param` says; requests go on being tried, and signs of life are due all the time."""
    outage, step = Outage(object_store, mlflow, request.param), Trainer.train_step

    def watched(loop, number, *arguments):
        outage.before(number)
        return step(loop, number, *arguments)

    monkeypatch.setattr(Trainer, "train_step", watched)
    monkeypatch.setenv("AWS_MAX_ATTEMPTS", "100000")
    monkeypatch.setattr(storage, "RETRY", dataclasses.replace(storage.RETRY, longest_s=0.05))
    monkeypatch.setattr(attempts, "_REMOTE_INTERVAL_S", 0.0)
    monkeypatch.setattr(module, "PATIENCE_S", 0.5)
    monkeypatch.setenv("TRAINER_CHECKPOINTS", object_store.uri("checkpoints"))
    monkeypatch.setenv("TRAINER_DEVICE", "cpu")
    return outage


@pytest.mark.parametrize("outage", ["refuses", "hangs"], indirect=True)
def test_the_steps_go_on_while_store_and_mlflow_are_away(distillation, outage, object_store, mlflow, caplog):
    caplog.set_level(logging.INFO)
    distillation("disturbed", **LONG).run_here()
    assert outage.ended_at == COMES_BACK, "a step has waited for the store"
    # aiohttp may leave an error of its own with asyncio when the server that it writes to is stopped
    warnings = [r.getMessage() for r in caplog.records if r.name.startswith("trainer") and r.levelno >= logging.WARNING]
    said = Counter(next(what for what, line in LINES.items() if re.search(line, text)) for text in warnings)
    assert said.pop("passed over") >= 1, "after the outage a busy machine may pass over some too"
    hanging = ("MLflow away", "MLflow back")  # requests wait for an answer, and get it in the end
    assert said == dict.fromkeys(hanging if outage.kind == "hangs" else (*hanging, "store away", "store back"), 1)
    assert object_store.keys() == [], "notes of the training are left, though it has ended"
    steps = sorted(step for name, step in mlflow.points if name == "distill/loss")
    assert steps == outage.steps, "a curve has a gap, or a point twice"
