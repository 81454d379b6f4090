"""A stage's run in MLflow, nested in the parent run: metrics, tags and files, sent by a thread of its own."""

from __future__ import annotations

import logging
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import ConfigDict, TypeAdapter, ValidationError

from trainer.graph import STAGES
from trainer.io import storage
from trainer.io.errors import PreemptedError, TrainerError
from trainer.io.host import environment_variables
from trainer.io.retry import Outage, Retry
from trainer.report import tracking
from trainer.report.tracking import ERROR_TAG, PARAM_LENGTH

if TYPE_CHECKING:
    from mlflow.entities import Metric, Run, RunTag
    from mlflow.tracking import MlflowClient

logger = logging.getLogger(__name__)

STAGE_TAG = "trainer.stage"
TRAINING_TAG = "trainer.training"  # identity of the training of a stage's run, by which a later attempt finds the run

UNSENT = "unsent-metrics.json"
"""Name of the file beside a training's checkpoints with the points that the server lacked when the last one was written."""
_POINTS = TypeAdapter(tuple[tuple[str, float, int, int], ...], config=ConfigDict(ser_json_inf_nan="strings"))
"""Content of that file: name, value, time in ms, step."""

_SEND_INTERVAL_S = 1.0
_LONGEST_WAIT_S = 30.0
_EXIT_S = 10.0
_POINTS_KEPT = 100_000
_POINTS_A_BATCH, _TAGS_A_BATCH = 1000, 100  # MLflow's limits


class Tracker:
    """Records a stage's measurements while it works; this base class records nothing."""

    run_id: str | None = None  # MLflow's id of the stage's run; None if nothing is tracked

    def follow(
        self, name: str, first_step: int, total_steps: int, images_per_step: int, speed: Callable[[], float | None]
    ) -> None:
        """Learn of a training that begins; `speed` gives its images a second so far, and may be called by another thread."""

    def metrics(self, step: int, values: Mapping[str, float]) -> None:
        """Record values at a step; takes microseconds, never waits for a server and never raises."""

    def tag(self, name: str, text: str) -> None:
        """Set a tag of the run; takes microseconds, never waits for a server and never raises."""

    def file(self, path: Path) -> None:
        """Record a file; waits for the upload, and only warns if it fails."""

    def nested(self, name: str, settings: Mapping[str, Any], points: Sequence[tuple[int, str, float]]) -> None:
        """Record a run of its own below this one, whole, with (step, metric, value) points; waits, and only warns if it fails."""

    def resume(self, place: str) -> None:
        """Send the points that an earlier attempt of the training kept at the URI `place`, where `keep` writes from now on."""

    def keep(self) -> None:
        """Write the points that the server lacks beside a checkpoint; waits for the store, and only warns if that fails."""


class _RunTracker(Tracker):
    run_id: str

    def __init__(self, mlflow: MlflowClient, run_id: str, last_steps: Mapping[str, int]) -> None:
        """Record to a run; `last_steps` maps each metric that it has already to its last step."""
        self._mlflow = mlflow
        self._sender = _Sender(mlflow, run_id)
        self._sender.start()
        self._last_steps = dict(last_steps)
        self._kept_at = ""
        self.run_id = run_id

    def metrics(self, step: int, values: Mapping[str, float]) -> None:
        # A resumed training repeats its last steps, with the same values.
        self._sender.add(step, {name: value for name, value in values.items() if step > self._last_steps.get(name, -1)})

    def resume(self, place: str) -> None:
        self._kept_at = storage.join(place, UNSENT)
        points: Iterable[tuple[str, float, int, int]] = ()
        try:
            if storage.exists(self._kept_at):
                points = _POINTS.validate_json(storage.read_bytes(self._kept_at))
        except (TrainerError, ValidationError) as error:
            logger.warning(
                "points for MLflow of an earlier attempt are lost: %s cannot be read (%s)", self._kept_at, error
            )
        for name, value, time_ms, step in points:
            if step > self._last_steps.get(name, -1):
                self._sender.add(step, {name: value}, time_ms)
                self._last_steps[name] = step

    def keep(self) -> None:
        points = self._sender.unsent()
        if points and self._kept_at:
            try:
                storage.write_bytes(self._kept_at, _POINTS.dump_json(tuple(points)))
            except TrainerError as error:
                logger.warning("points for MLflow are not kept, so an interruption now may lose some: %s", error)

    def tag(self, name: str, text: str) -> None:
        self._sender.add_tag(name, text)

    def file(self, path: Path) -> None:
        with _warned(f"the file {path} is not recorded in MLflow"):
            self._mlflow.log_artifact(self.run_id, str(path))

    def nested(self, name: str, settings: Mapping[str, Any], points: Sequence[tuple[int, str, float]]) -> None:
        from mlflow.entities import Metric
        from mlflow.utils.mlflow_tags import MLFLOW_PARENT_RUN_ID

        with _warned(f"{name} is not recorded in MLflow"):
            experiment = self._mlflow.get_run(self.run_id).info.experiment_id
            run = self._mlflow.create_run(experiment, run_name=name, tags={MLFLOW_PARENT_RUN_ID: self.run_id})
            tracking.record_params(self._mlflow, run.info.run_id, settings)
            now = int(time.time() * 1000)
            metrics = [Metric(metric, value, now, step) for step, metric, value in points]
            self._mlflow.log_batch(run.info.run_id, metrics=metrics)
            with environment_variables({"MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT": "true"}):  # there may be many
                self._mlflow.set_terminated(run.info.run_id, "FINISHED" if points else "FAILED")

    def finish(self, status: str, error: str = "") -> None:
        """Send the remaining points, for a bounded time, and end the run."""
        self._sender.close()
        with _warned(f"the end of the MLflow run {self.run_id} ({status}) is not recorded"):
            if error:
                self._mlflow.set_tag(self.run_id, ERROR_TAG, error[:PARAM_LENGTH])
            self._mlflow.set_terminated(self.run_id, status)


@contextmanager
def _warned(consequence: str) -> Iterator[None]:
    """Turn any failure of MLflow into a line of the log, since a training must outlive its tracking."""
    try:
        yield
    except Exception as error:  # noqa: BLE001  MLflow's stores let through the errors of whatever lies below them
        logger.warning("%s: %s", consequence, tracking.reason_of(error))


@contextmanager
def stage_run(stage: str, settings: Mapping[str, Any], *, active: bool = True, training: str = "") -> Iterator[Tracker]:
    """Open a stage's run, nested in the parent run; it ends FINISHED, or FAILED by an exception, or KILLED by an interruption.

    A `TrackingError` at the start only, once `tracking.patiently` gives up; later failures are warnings.

    Args:
        settings: recorded as parameters.
        active: False on every process but the first of a group; these get a tracker that does nothing.
        training: identity of the stage's work; an unfinished run with the same identity is continued. Empty: a new run.
    """
    if not active or tracking.uri() is None:
        yield Tracker()
        return
    with tracking.http_limits(tracking.STAGE_LIMITS):
        tracker = tracking.patiently(lambda: _start_stage(stage, settings, training))
        try:
            yield tracker
        except PreemptedError:
            tracker.finish("KILLED")
            raise
        except Exception as error:
            tracker.finish("FAILED", f"{type(error).__name__}: {error}")
            raise
        except BaseException:  # Ctrl-C, SIGTERM
            tracker.finish("KILLED")
            raise
        tracker.finish("FINISHED")


def _start_stage(stage: str, settings: Mapping[str, Any], training: str) -> _RunTracker:
    from mlflow.utils.mlflow_tags import MLFLOW_PARENT_RUN_ID

    with tracking.explained():
        mlflow = tracking.client()
        parent = tracking.find_parent(mlflow)
        tags = {STAGE_TAG: stage} | ({MLFLOW_PARENT_RUN_ID: parent} if parent else {})
        experiment = mlflow.get_run(parent).info.experiment_id if parent else tracking.experiment_id(mlflow)
        found: Sequence[Run] = []
        if training:
            tags |= {TRAINING_TAG: training}
            wanted = " and ".join(f"tags.`{name}` = '{value}'" for name, value in tags.items())
            newest = ["start_time DESC"]
            found = mlflow.search_runs([experiment], filter_string=wanted, order_by=newest, max_results=1)
        if not found or found[0].info.status == "FINISHED":
            run = mlflow.create_run(experiment, run_name=stage, tags=tags)
        else:
            run = found[0]
            mlflow.update_run(run.info.run_id, status="RUNNING")
            if ERROR_TAG in run.data.tags:  # of the attempt before
                mlflow.delete_tag(run.info.run_id, ERROR_TAG)
            logger.info("%s  continues the MLflow run %s", stage, run.info.run_id)
        run_id = str(run.info.run_id)
        tracking.record_params(mlflow, run_id, settings, STAGES[stage].section if stage in STAGES else "")
        last_steps = {metric.key: metric.step for metric in run.data.to_proto().metrics}
        return _RunTracker(mlflow, run_id, last_steps)


class _Sender(threading.Thread):
    """Sends points in batches; retries while the server is away."""

    def __init__(self, mlflow: MlflowClient, run_id: str) -> None:
        super().__init__(name="tracking", daemon=True)  # a hanging request must not keep the process alive
        self._mlflow = mlflow
        self._run_id = run_id
        self._waiting: deque[Metric] = deque(maxlen=_POINTS_KEPT)  # if the server stays away, the oldest points go
        self._batch: list[Metric] = []
        self._tags: deque[RunTag] = deque()
        self._closing = threading.Event()
        self._give_up = float("inf")
        self._outage = Outage(f"MLflow run {run_id}: the server", logger)

    def add(self, step: int, values: Mapping[str, float], time_ms: int | None = None) -> None:
        from mlflow.entities import Metric

        time_ms = int(time.time() * 1000) if time_ms is None else time_ms
        self._waiting.extend(Metric(name, value, time_ms, step) for name, value in values.items())

    def unsent(self) -> list[tuple[str, float, int, int]]:
        """List name, value, time in ms and step of the points that the server may lack."""
        # In this order a point that is moved meanwhile is not missed.
        points = [*list(self._waiting), *list(self._batch)]
        return [
            (point.key, point.value, point.timestamp, point.step)
            for point in sorted(points, key=lambda point: (point.timestamp, point.step))
        ]

    def add_tag(self, name: str, text: str) -> None:
        from mlflow.entities import RunTag

        self._tags.append(RunTag(name, text[:PARAM_LENGTH]))

    def close(self) -> None:
        """Send the remaining points, for at most `_EXIT_S` and one request."""
        self._give_up = time.monotonic() + _EXIT_S
        self._closing.set()
        self.join(timeout=_EXIT_S + float(os.environ[tracking.TIMEOUT_VARIABLE]))
        left = len(self._batch) + len(self._waiting) + len(self._tags)
        if left:
            lost = "MLflow run %s: %d points and tags were not sent, since the server did not take them"
            logger.warning(lost, self._run_id, left)

    def run(self) -> None:
        while not self._closing.is_set():
            self._send()
            self._closing.wait(
                Retry(first_s=_SEND_INTERVAL_S, longest_s=_LONGEST_WAIT_S).wait_s(self._outage.failures + 1)
            )
        while self._send() and time.monotonic() < self._give_up:
            if self._outage.is_away:
                time.sleep(_SEND_INTERVAL_S)

    def _send(self) -> bool:
        """Send one batch of points and tags; returns whether there is more to send."""
        while self._waiting and len(self._batch) < _POINTS_A_BATCH:
            self._batch.append(self._waiting.popleft())
        tags = list(self._tags)[:_TAGS_A_BATCH]
        if not self._batch and not tags:
            return False
        try:
            self._mlflow.log_batch(self._run_id, metrics=self._batch, tags=tags)
        except Exception as error:  # noqa: BLE001  nothing catches what a thread raises, and the training must continue
            self._failed(error, tags)
        else:
            self._outage.ended()
            self._batch = []
            for _ in tags:
                self._tags.popleft()
        return bool(self._batch or self._waiting or self._tags)

    def _failed(self, error: Exception, tags: list[RunTag]) -> None:
        if getattr(error, "error_code", "") == "INVALID_PARAMETER_VALUE":  # would fail again and hold up what follows
            what = f"{len(self._batch)} points" if self._batch else f"{len(tags)} tags"
            logger.warning("MLflow run %s refused %s: %s", self._run_id, what, tracking.reason_of(error))
            if not self._batch:  # tags that came with refused points are tried again without them
                for _ in tags:
                    self._tags.popleft()
            self._batch = []
            return
        reason = tracking.reason_of(error)
        self._outage.failed(f"MLflow run {self._run_id}: metrics wait, the training continues: {reason}")
