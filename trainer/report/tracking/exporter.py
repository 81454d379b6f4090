"""The newest measurements of a stage's trainings: for Prometheus by `GET /metrics` at a port, and in the status of their TrainJob."""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, NamedTuple

from trainer.io import host
from trainer.io.errors import SettingsError
from trainer.report import tracking
from trainer.report.tracking import train_job
from trainer.report.tracking.stage_runs import Tracker

logger = logging.getLogger(__name__)

PORT_VARIABLE = "TRAINER_METRICS_PORT"
"""Variable that names the port."""

_HELP = {
    "trainer_step": "Step that the newest losses are of, counted from 1.",
    "trainer_steps": "Steps of the whole training.",
    "trainer_images_per_second": "Images a second within the steps so far.",
    "trainer_goodput_ratio": "Share of the time since this attempt was launched that its steps took.",
    "trainer_measure": "Newest value of a loss, a score or another measure, by its name in MLflow.",
    "trainer_finding": "1 for each rule that has a finding.",
}


class _Progress(NamedTuple):
    first_step: int
    total_steps: int
    images_per_step: int
    images_per_second: Callable[[], float | None]


class ExportingTracker(Tracker):
    """Passes everything on to a tracker, and keeps the newest value of each metric."""

    def __init__(self, inner: Tracker, stage: str) -> None:
        """Keep what `inner` gets."""
        self._inner, self.run_id = inner, inner.run_id
        self._labels = {"run": os.environ.get(tracking.RUN, ""), "stage": stage}
        self._newest: dict[tuple[str, str], float] = {}  # training, measure -> value
        self._steps: dict[str, int] = {}
        self._trainings: dict[str, _Progress] = {}
        self._lock = threading.Lock()

    def follow(
        self, name: str, first_step: int, total_steps: int, images_per_step: int, speed: Callable[[], float | None]
    ) -> None:
        with self._lock:
            self._trainings[name] = _Progress(first_step, total_steps, images_per_step, speed)

    def metrics(self, step: int, values: Mapping[str, float]) -> None:
        with self._lock:
            for name, value in values.items():
                training, _, measure = name.partition("/")
                known = training in self._trainings
                self._newest[(training, measure) if known else ("", name)] = value
                if known and measure == "learning_rate":  # comes with the losses of each interval
                    self._steps[training] = step
        self._inner.metrics(step, values)

    def tag(self, name: str, text: str) -> None:
        self._inner.tag(name, text)

    def file(self, path: Path) -> None:
        self._inner.file(path)

    def nested(self, name: str, settings: Mapping[str, Any], points: Sequence[tuple[int, str, float]]) -> None:
        self._inner.nested(name, settings, points)

    def resume(self, place: str) -> None:
        self._inner.resume(place)

    def keep(self) -> None:
        self._inner.keep()

    def train_job(self) -> Mapping[str, Any]:
        """Return how far the last training is, with the newest value of each measure, as its TrainJob's status has it."""
        with self._lock:
            newest, steps, trainings = dict(self._newest), dict(self._steps), dict(self._trainings)
        progress = None
        if trainings:
            name, last = next(reversed(trainings.items()))
            done, speed = steps.get(name, last.first_step - 1) + 1, last.images_per_second()
            left = (last.total_steps - done) * last.images_per_step / speed if speed else None
            progress = train_job.StepsDone(done, last.total_steps, left)
        values = {
            f"{training}/{measure}": value
            for (training, measure), value in newest.items()
            if training and not measure.startswith("finding/")
        }
        return train_job.body(progress, values)

    def text(self) -> str:
        """Return all measurements in Prometheus' text format."""
        with self._lock:
            newest, steps, trainings = dict(self._newest), dict(self._steps), dict(self._trainings)
        found: dict[str, list[str]] = {name: [] for name in _HELP}

        def add(metric: str, value: float, **labels: str) -> None:
            shown = ",".join(f'{key}="{_escaped(text)}"' for key, text in (self._labels | labels).items())
            found[metric].append(f"{metric}{{{shown}}} {float(value)!r}")

        for name, progress in trainings.items():
            add("trainer_steps", progress.total_steps, training=name)
            if name in steps:
                add("trainer_step", steps[name] + 1, training=name)
            speed = progress.images_per_second()
            if speed and name in steps:
                seconds = (steps[name] + 1 - progress.first_step) * progress.images_per_step / speed
                add("trainer_images_per_second", speed, training=name)
                add("trainer_goodput_ratio", min(1.0, seconds / host.seconds_since_launch()), training=name)
        for (training, measure), value in newest.items():
            kind, _, rule = measure.partition("/")
            if kind == "finding":
                add("trainer_finding", value, training=training, rule=rule)
            else:
                add("trainer_measure", value, training=training, name=measure)
        lines = [
            line
            for name, rows in found.items()
            if rows
            for line in (f"# HELP {name} {_HELP[name]}", f"# TYPE {name} gauge", *rows)
        ]
        return "".join(f"{line}\n" for line in lines)


def _escaped(text: str) -> str:
    return text.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")


@contextmanager
def exported(tracker: Tracker, stage: str) -> Iterator[Tracker]:
    """Publish what a tracker gets while the block runs, where `TRAINER_METRICS_PORT` or a TrainJob's variables are set.

    Raises:
        SettingsError: `TRAINER_METRICS_PORT` is no port.
    """
    port, has_status = os.environ.get(PORT_VARIABLE, ""), bool(os.environ.get(train_job.URL))
    if port and not (port.isdecimal() and 0 < int(port) < 2**16):
        raise SettingsError(f"{PORT_VARIABLE} must be a port from 1 to 65535, got {port!r}")
    if not port and not has_status:
        yield tracker
        return
    exporting = ExportingTracker(tracker, stage)
    with ExitStack() as stack:
        if port:
            stack.enter_context(_served(exporting, int(port)))
        if has_status:
            stack.enter_context(train_job.reported(exporting.train_job))
        yield exporting


@contextmanager
def _served(exporting: ExportingTracker, port: int) -> Iterator[None]:
    class Handler(BaseHTTPRequestHandler):
        timeout = 10  # of a client that sends nothing

        def do_GET(self) -> None:
            body = exporting.text().encode() if self.path == "/metrics" else b""
            self.send_response(200 if body or self.path == "/metrics" else 404)
            self.send_header("Content-Type", "text/plain; version=0.0.4; charset=utf-8")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            """Print no line for each request."""

    try:
        server = ThreadingHTTPServer(("", port), Handler)
    except OSError as error:  # a training must not end for lack of a port
        logger.warning("no metrics for Prometheus: port %s (%s) cannot be opened: %s", port, PORT_VARIABLE, error)
        yield
        return
    server.daemon_threads = True
    threading.Thread(target=server.serve_forever, name="prometheus", daemon=True).start()
    try:
        yield
    finally:
        server.shutdown()
        server.server_close()
