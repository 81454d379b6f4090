"""Tracking in MLflow, where it is set up.

All configuration is in environment variables, so that where a run is tracked never becomes a parameter of a pipeline task, whose change
would break caching:

    MLFLOW_TRACKING_URI       where to record; not set or empty: nothing is tracked
    MLFLOW_EXPERIMENT_ID      the experiment, or
    MLFLOW_EXPERIMENT_NAME    its name; created where missing
    MLFLOW_RUN_ID             the parent run, created and ended by another program (Kubeflow's MLflow plugin); or
    TRAINER_RUN               the name of the pipeline run; its parent run is found or created by the tag `trainer.run`, or
    TRAINER_RUN_ID            by the tag `trainer.run_id` where runs may share a name, such as runs on one machine in several directories

A pipeline run is one parent run, each stage a run nested in it. MLflow never changes a parameter, so a run that starts again with other
settings gets a new parent, which names the former one in the tag `trainer.former_run`. A server that is down stops a stage at its start
(`TrackingError`); one that goes away later costs points on a curve and never the training: a separate thread sends metrics, retries, and
gives up at exit after a bounded time.

A stage that was interrupted continues in the same run. Points of a curve that the server has are not sent again, and those that it lacked
at the last checkpoint are kept beside the checkpoint, so a curve has neither gaps nor doubled steps.

MLflow is imported where it is first needed: it takes more than a second.
"""

from __future__ import annotations

import json
import logging
import os
import re
import sqlite3
import tempfile
import threading
import time
import urllib.parse
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from pydantic import TypeAdapter, ValidationError

from trainer import storage
from trainer.base_models import holds_secret
from trainer.config import TrackingSettings
from trainer.errors import PreemptedError, TrackingAwayError, TrackingError, TrainerError, refused_to_write
from trainer.host import environment_variables
from trainer.retry import Retry

if TYPE_CHECKING:
    from mlflow.entities import Metric, Run, RunTag
    from mlflow.system_metrics.system_metrics_monitor import SystemMetricsMonitor
    from mlflow.tracking import MlflowClient

logger = logging.getLogger(__name__)

URI = "MLFLOW_TRACKING_URI"
EXPERIMENT_ID = "MLFLOW_EXPERIMENT_ID"
EXPERIMENT_NAME = "MLFLOW_EXPERIMENT_NAME"
RUN_ID = "MLFLOW_RUN_ID"
RUN = "TRAINER_RUN"
IDENTITY = "TRAINER_RUN_ID"

RUN_TAG = "trainer.run"
IDENTITY_TAG = "trainer.run_id"
FORMER_TAG = "trainer.former_run"
"""MLflow's id of the parent run that the same run had before its settings changed."""
STAGE_TAG = "trainer.stage"
TRAINING_TAG = "trainer.training"
"""Identity of the training of a stage's run, by which a later attempt finds the run."""
ERROR_TAG = "trainer.error"
NOTE_TAG = "mlflow.note.content"
"""What MLflow shows as a run's description, in Markdown."""
BILL = "bill.json"
"""Name under which register leaves a run's bill with its parent run."""

# MLflow's defaults, 120 s and 7 retries, would hold a training for minutes; the requests that matter are retried here.
_TIMEOUT, _RETRIES = "MLFLOW_HTTP_REQUEST_TIMEOUT", "MLFLOW_HTTP_REQUEST_MAX_RETRIES"
_CHECK_LIMITS = {_TIMEOUT: "4", _RETRIES: "0"}
_STAGE_LIMITS = {_TIMEOUT: "10", _RETRIES: "0"}
_UPLOAD_LIMITS = {_TIMEOUT: "60", _RETRIES: "3"}

UNSENT = "unsent-metrics.json"
"""Name of the file beside a training's checkpoints with the points that the server lacked when the last one was written."""
_POINTS = TypeAdapter(tuple[tuple[str, float, int, int], ...])
"""Content of that file: name, value, time in ms, step."""

_SEND_INTERVAL_S = 1.0
_LONGEST_WAIT_S = 30.0
_EXIT_S = 10.0
_SYSTEM = "system/"
_SYSTEM_INTERVAL_S = 5.0
_POINTS_KEPT = 100_000
_POINTS_A_BATCH = 1000  # MLflow's limit, as the next three
_PARAMS_A_BATCH = 100
_TAGS_A_BATCH = 100
_PARAM_LENGTH = 6000
_SHOWN = 5
"""Most changed settings that a line of the log names."""


# ---------------------------------------------------------------------------------------------------------------------
# Where


def environment(settings: TrackingSettings, *, directory: Path, run: str, identity: str = "") -> dict[str, str]:
    """Return the variables that make every stage of a run record to the same place.

    Args:
        settings: `tracking.uri` overrides `MLFLOW_TRACKING_URI`, and that a SQLite file in `directory`; an experiment that is not the
            default overrides `MLFLOW_EXPERIMENT_NAME`.
        directory: where `mlflow.db` and `mlartifacts` are if no URI is given.
        run: name of the pipeline run.
        identity: distinguishes it from other runs of that name; empty where its name is unique.
    """
    tracking_uri = settings.uri or os.environ.get(URI) or f"sqlite:///{local_store(directory)}"
    default_experiment = TrackingSettings.model_fields["experiment"].default
    chosen = settings.experiment if settings.experiment != default_experiment else ""
    return {
        URI: tracking_uri if settings.enabled else "",
        EXPERIMENT_NAME: chosen or os.environ.get(EXPERIMENT_NAME) or default_experiment,
        RUN: run,
        IDENTITY: identity,
    }


def local_store(directory: Path) -> Path:
    """Return the SQLite file of the runs in a directory, the default store."""
    return directory.resolve() / "mlflow.db"


def uri() -> str | None:
    """Return where this process tracks, or None."""
    return os.environ.get(URI) or None


def shown(address: str) -> str:
    """Mask the password in a URI, for messages and files."""
    parts = urllib.parse.urlsplit(address)
    credentials, at, host = parts.netloc.rpartition("@")
    user, colon, _ = credentials.partition(":")
    return address.replace(f"{credentials}@", f"{user}:***@", 1) if at and colon and host else address


def client() -> MlflowClient:
    """Make a client for `uri()`.

    Raises:
        TrackingError: nothing is tracked, or MLflow cannot use the URI.
    """
    tracking_uri = uri()
    if tracking_uri is None:
        raise TrackingError(f"{URI} is not set, so nothing is tracked; set it to the URI of an MLflow server or store")
    from mlflow.tracking import MlflowClient

    # MLflow and alembic log every table that they create in a new SQLite file; their warnings and errors still show.
    logging.getLogger("mlflow").setLevel(logging.WARNING)
    logging.getLogger("alembic").setLevel(logging.WARNING)
    if holds_secret(tracking_uri):  # MLflow prints links to its runs, with the password in them
        os.environ["MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT"] = "true"
    with explained():
        if sqlite_file := _sqlite_file(tracking_uri):  # MLflow would retry for 100 s before it fails
            sqlite_file.parent.mkdir(parents=True, exist_ok=True)
            with closing(sqlite3.connect(sqlite_file)) as connection:
                connection.execute("PRAGMA schema_version")
        return MlflowClient(
            tracking_uri=tracking_uri, registry_uri=os.environ.get("MLFLOW_REGISTRY_URI") or tracking_uri
        )


def _sqlite_file(tracking_uri: str) -> Path | None:
    name = tracking_uri.removeprefix("sqlite:///")
    return Path(name.partition("?")[0]) if name != tracking_uri else None


@contextmanager
def explained() -> Iterator[None]:
    """Turn whatever MLflow raises for a store that is unusable, unreachable or refuses into a `TrackingError`.

    Raises:
        TrackingAwayError: it does not answer, or answers with a server error.
        TrackingError: anything else. Both name the URI, the reason and the next move.
    """
    from mlflow.exceptions import MlflowException
    from requests.exceptions import RequestException
    from sqlalchemy.exc import SQLAlchemyError

    try:
        yield
    except (MlflowException, RequestException, SQLAlchemyError, sqlite3.Error, OSError) as error:
        address = shown(uri() or URI)
        advice = (
            f"start the server, correct tracking.uri or {URI}, or continue without tracking (tracking.enabled=false)"
        )
        reason = refused_to_write(error, address) or f"{_reason(error)}; {advice}"
        kind = TrackingAwayError if _away(error) else TrackingError
        raise kind(f"MLflow at {address}: {reason}") from error


_UNREACHABLE = {
    "Connection refused": "connection refused",
    "NameResolutionError": "its host name is not known",
    "timed out": "timed out",
    "Connection reset": "connection reset",
    "Connection aborted": "connection broken",
}


_SERVER_ERRORS = re.compile(r"too many (5\d\d|429) error responses")


def _away(error: Exception) -> str:
    """Describe how the server fails to answer; empty where it answers."""
    text = str(error)
    for sign, meaning in _UNREACHABLE.items():
        if sign in text:
            return f"does not answer ({meaning})"
    found = _SERVER_ERRORS.search(text)
    return f"keeps answering {found[1]}; its own log says why" if found else ""


def _reason(error: Exception) -> str:
    if away := _away(error):
        return away
    status = getattr(error, "get_http_status_code", lambda: None)()
    code = getattr(error, "error_code", "")
    text = str(error).replace(uri() or URI, shown(uri() or URI))
    first_line = next(iter(text.strip().splitlines()), type(error).__name__)[:300]
    if code in ("UNAUTHENTICATED", "CUSTOMER_UNAUTHORIZED") or status == 401:
        advice = "check MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD, or MLFLOW_TRACKING_TOKEN"
        return f"refused the credentials ({first_line}); {advice}"
    if code == "PERMISSION_DENIED" or status == 403:
        return f"does not permit this ({first_line}); ask its owner for write access to the experiment"
    return f"failed ({first_line})"


@contextmanager
def _http_limits(limits: Mapping[str, str]) -> Iterator[None]:
    """Bound MLflow's HTTP requests by its environment variables; values that the user has set there stay."""
    ours = {name: {None, *(group[name] for group in (_CHECK_LIMITS, _STAGE_LIMITS, _UPLOAD_LIMITS))} for name in limits}
    with environment_variables({name: value for name, value in limits.items() if os.environ.get(name) in ours[name]}):
        yield


def uploading() -> AbstractContextManager[None]:
    """Allow longer requests than for metrics, while a stage uploads what must arrive."""
    return _http_limits(_UPLOAD_LIMITS)


def check() -> None:
    """Make sure that MLflow answers and accepts our credentials; takes seconds. Does nothing if nothing is tracked.

    Raises:
        TrackingError: the server is down or refuses, with its URI and the next move.
    """
    if uri() is None:
        return
    with _http_limits(_CHECK_LIMITS), explained():
        parent = os.environ.get(RUN_ID)
        if parent:
            client().get_run(parent)
        else:
            _experiment(client())


def _experiment(mlflow: MlflowClient) -> str:
    """Return the experiment's id; it is created where missing."""
    from mlflow.exceptions import MlflowException

    given = os.environ.get(EXPERIMENT_ID)
    if given:
        return str(mlflow.get_experiment(given).experiment_id)
    name = os.environ.get(EXPERIMENT_NAME) or TrackingSettings.model_fields["experiment"].default
    found = mlflow.get_experiment_by_name(name)
    if found is None:
        try:
            return str(mlflow.create_experiment(name, artifact_location=_artifact_location()))
        except MlflowException as error:
            found = mlflow.get_experiment_by_name(name)  # another run may have created it meanwhile
            if found is None or error.error_code != "RESOURCE_ALREADY_EXISTS":
                raise
    if found.lifecycle_stage != "active":
        raise TrackingError(
            f"MLflow at {shown(uri() or URI)}: the experiment {name!r} was deleted; restore it, or choose another tracking.experiment"
        )
    return str(found.experiment_id)


def _artifact_location() -> str | None:
    """Return a folder beside the SQLite file, since MLflow would use the working directory; a server knows its own location."""
    sqlite_file = _sqlite_file(uri() or "")
    return (sqlite_file.resolve().parent / "mlartifacts").as_uri() if sqlite_file else None


# ---------------------------------------------------------------------------------------------------------------------
# Runs


def start_parent(settings: Mapping[str, Any], tags: Mapping[str, str], *, name: str = "") -> str | None:
    """Find or create the parent run and record the run's settings and tags on it; other settings make a new one.

    Args:
        settings: settings of the run.
        tags: tags to set on it.
        name: display name of a new one; empty: the name in `TRAINER_RUN`.

    Returns:
        Its id; None if nothing is tracked, or this process belongs to no named run (`TRAINER_RUN`).

    Raises:
        TrackingError: MLflow does not answer or refuses.
    """
    if uri() is None:
        return None
    with _http_limits(_STAGE_LIMITS), explained():
        mlflow = client()
        run_id = _parent(mlflow, settings, name)
        if run_id is not None:
            _record_params(mlflow, run_id, settings)
            for tag, value in tags.items():
                mlflow.set_tag(run_id, tag, value)
        return run_id


def parent_run() -> str | None:
    """Return the id of the parent run, which is created where missing; None as in `start_parent`.

    Raises:
        TrackingError: MLflow does not answer or refuses.
    """
    return start_parent({}, {})


def finish_parent(status: str = "FINISHED", error: str = "") -> None:
    """End the parent run as FINISHED, FAILED or KILLED, unless another program has created it.

    One that has ended stays as it is: it is of an earlier attempt, and this one failed before it had begun.

    Args:
        status: how it ended.
        error: why it failed, for a tag.

    Raises:
        TrackingError: MLflow does not answer or refuses.
    """
    if uri() is None or os.environ.get(RUN_ID):
        return
    with _http_limits(_STAGE_LIMITS), explained():
        mlflow = client()
        newest = _newest_parent(mlflow)
        run_id = _parent(mlflow) if newest is None or newest.info.status == "RUNNING" else None
        if run_id is not None:
            if error:
                mlflow.set_tag(run_id, ERROR_TAG, error[:_PARAM_LENGTH])
            mlflow.set_terminated(run_id, status)


def end_parent_left(status: str) -> bool:
    """End the parent run if it exists and is still open; returns whether it was.

    Raises:
        TrackingError: MLflow does not answer or refuses.
    """
    if uri() is None:
        return False
    with _http_limits(_STAGE_LIMITS), explained():
        mlflow = client()
        newest = _newest_parent(mlflow)
        if newest is None or newest.info.status != "RUNNING":
            return False
        mlflow.set_terminated(newest.info.run_id, status)
        return True


def _parent(mlflow: MlflowClient, settings: Mapping[str, Any] | None = None, name: str = "") -> str | None:
    """Return the parent run of these settings, or the run's newest one without settings."""
    injected = os.environ.get(RUN_ID)
    if injected:
        return str(mlflow.get_run(injected).info.run_id)
    if not os.environ.get(RUN):
        return None
    found = _newest_parent(mlflow)
    if found is None:
        return _new_parent(mlflow, name)
    run_id, is_running = str(found.info.run_id), found.info.status == "RUNNING"
    changed = _changed(found.data.params, flatten(settings or {}))
    if not changed:
        if not is_running:  # a run that was interrupted or failed continues
            mlflow.update_run(run_id, status="RUNNING")
        return run_id
    if is_running:  # it was killed, and could not say so
        mlflow.set_terminated(run_id, "KILLED")
    new = _new_parent(mlflow, name, former=run_id)
    logger.info(
        "MLflow: a new run %s, since %s changed; the former one, %s, stays as it is", new, _listed(changed), run_id
    )
    return new


def _newest_parent(mlflow: MlflowClient) -> Run | None:
    name, identity = os.environ.get(RUN), os.environ.get(IDENTITY)
    if not name:
        return None
    tag, value = (IDENTITY_TAG, identity) if identity else (RUN_TAG, name)
    quote = '"' if "'" in value else "'"
    wanted = f"tags.`{tag}` = {quote}{value}{quote}"
    experiments = _where_the_parent_may_be(mlflow)
    found = mlflow.search_runs(experiments, filter_string=wanted, order_by=["start_time DESC"], max_results=1)
    return found[0] if found else None


def _new_parent(mlflow: MlflowClient, name: str, *, former: str = "") -> str:
    run = os.environ[RUN]
    tags = {RUN_TAG: run, IDENTITY_TAG: os.environ.get(IDENTITY), FORMER_TAG: former}
    given = {tag: value for tag, value in tags.items() if value}
    return str(mlflow.create_run(_experiment(mlflow), run_name=name or run, tags=given).info.run_id)


def _where_the_parent_may_be(mlflow: MlflowClient) -> list[str]:
    """Return the run's experiment; on a cluster only the task that makes the parent run knows it, so there all experiments."""
    if os.environ.get(EXPERIMENT_ID) or os.environ.get(EXPERIMENT_NAME):
        return [_experiment(mlflow)]
    return [str(experiment.experiment_id) for experiment in mlflow.search_experiments()]


@dataclass(frozen=True, kw_only=True)
class BilledRun:
    """A finished parent run."""

    name: str
    params: Mapping[str, str]
    metrics: Mapping[str, float]
    bill: Mapping[str, Any]
    """The content of its `bill.json`."""


def billed_runs(experiment: str) -> list[BilledRun]:
    """List the runs of an experiment that have a bill, the oldest first.

    Raises:
        TrackingError: nothing is tracked, there is no such experiment, or MLflow does not answer or refuses.
    """
    quiet = environment_variables({"MLFLOW_ENABLE_ARTIFACTS_PROGRESS_BAR": "false"})
    with explained(), quiet, tempfile.TemporaryDirectory(prefix="trainer-") as folder:
        mlflow = client()
        known = {one.name: str(one.experiment_id) for one in mlflow.search_experiments()}
        if experiment not in known:
            raise TrackingError(
                f"MLflow at {shown(uri() or URI)}: has no experiment {experiment!r}, but {', '.join(known)}; name one of these"
            )
        found = mlflow.search_runs([known[experiment]], "metrics.`bill/seconds` > 0", order_by=["start_time ASC"])
        return [
            BilledRun(
                name=str(run.info.run_name),
                params=run.data.params,
                metrics=run.data.metrics,
                bill=json.loads(Path(mlflow.download_artifacts(run.info.run_id, BILL, folder)).read_bytes()),
            )
            for run in found
        ]


def flatten(settings: Mapping[str, Any], prefix: str = "") -> dict[str, str]:
    """Flatten nested settings, `{"mae": {"epochs": 4}}` to `{"mae.epochs": "4"}`, with values no longer than MLflow allows.

    A group whose members have names that MLflow may refuse, such as names of classes, stays one parameter.
    """
    flat: dict[str, str] = {}
    for name, value in settings.items():
        full = f"{prefix}.{name}" if prefix else str(name)
        if isinstance(value, Mapping) and all(member.isidentifier() for member in value):
            flat |= flatten(value, full)
        else:
            flat[full] = str(value)[:_PARAM_LENGTH]
    return flat


def numbers(figures: Mapping[str, Any], prefix: str = "") -> dict[str, float]:
    """Collect every number of nested figures under its full name, such as `student/test/top1`; true is 1."""
    flat: dict[str, float] = {}
    for name, value in figures.items():
        full = f"{prefix}/{name}" if prefix else name
        if isinstance(value, Mapping):
            flat |= numbers(value, full)
        elif isinstance(value, int | float):
            flat[full] = float(value)
    return flat


def _changed(known: Mapping[str, str], given: Mapping[str, str]) -> list[str]:
    """List the parameters that a run has with another value."""
    return sorted(name for name, value in given.items() if known.get(name, value) != value)


def _listed(names: Sequence[str]) -> str:
    more = len(names) - _SHOWN
    return ", ".join(names[:_SHOWN]) + (f" and {more} more" if more > 0 else "")


def _record_params(mlflow: MlflowClient, run_id: str, settings: Mapping[str, Any]) -> None:
    """Record settings as parameters; MLflow keeps a parameter's first value, so one that differs now is only named in the log."""
    from mlflow.entities import Param

    known = mlflow.get_run(run_id).data.params
    flat = flatten(settings)
    changed = _changed(known, flat)
    if changed:
        logger.warning("MLflow run %s keeps the first values of %s", run_id, _listed(changed))
    params = [Param(name, value) for name, value in flat.items() if name not in known]
    for start in range(0, len(params), _PARAMS_A_BATCH):
        mlflow.log_batch(run_id, params=params[start : start + _PARAMS_A_BATCH])


# ---------------------------------------------------------------------------------------------------------------------
# Metrics of a stage


class Tracker(Protocol):
    """Records what a stage measures while it works."""

    @property
    def run_id(self) -> str | None:
        """MLflow's id of the stage's run; None if nothing is tracked."""

    def metrics(self, step: int, values: Mapping[str, float]) -> None:
        """Record values at a step; takes microseconds, never waits for a server and never raises."""

    def tag(self, name: str, text: str) -> None:
        """Set a tag of the run; takes microseconds, never waits for a server and never raises."""

    def files(self, path: Path) -> None:
        """Record a file or a directory; waits for the upload, and only warns if it fails."""

    def go_on(self, place: str) -> None:
        """Send the points that an earlier attempt of the same training has kept at the URI `place`; `keep` writes there from now on."""

    def keep(self) -> None:
        """Write the points that the server lacks beside a checkpoint; waits for the store, and only warns if that fails."""


class _NoTracker:
    run_id = None

    def go_on(self, place: str) -> None:
        pass

    def keep(self) -> None:
        pass

    def metrics(self, step: int, values: Mapping[str, float]) -> None:
        pass

    def tag(self, name: str, text: str) -> None:
        pass

    def files(self, path: Path) -> None:
        pass


class _RunTracker:
    def __init__(self, mlflow: MlflowClient, run_id: str, last_steps: Mapping[str, int]) -> None:
        """Record to a run; `last_steps` maps each metric that it has already to its last step."""
        self._mlflow = mlflow
        self._sender = _Sender(mlflow, run_id, samples=_samples(last_steps))
        self._last_steps = dict(last_steps)
        self._kept_at = ""
        self.run_id = run_id

    def metrics(self, step: int, values: Mapping[str, float]) -> None:
        # A resumed training repeats its last steps, with the same values.
        self._sender.add(step, {name: value for name, value in values.items() if step > self._last_steps.get(name, -1)})

    def go_on(self, place: str) -> None:
        self._kept_at = storage.join(place, UNSENT)
        for name, value, time_ms, step in _read_points(self._kept_at):
            if step > self._last_steps.get(name, -1):
                self._sender.add(step, {name: value}, time_ms)
                self._last_steps[name] = step

    def keep(self) -> None:
        points = self._sender.unsent()
        if points and self._kept_at:
            try:
                storage.write_bytes(self._kept_at, json.dumps(points).encode())
            except TrainerError as error:
                logger.warning("points for MLflow are not kept, so an interruption now may lose some: %s", error)

    def tag(self, name: str, text: str) -> None:
        self._sender.add_tag(name, text)

    def files(self, path: Path) -> None:
        with _warned(f"the files {path} are not recorded in MLflow"):
            if path.is_dir():
                self._mlflow.log_artifacts(self.run_id, str(path), path.name)
            else:
                self._mlflow.log_artifact(self.run_id, str(path))

    def start(self) -> None:
        self._sender.start()

    def finish(self, status: str, error: str = "") -> None:
        """Send what is left, for a bounded time, and end the run."""
        self._sender.close()
        with _warned(f"the end of the MLflow run {self.run_id} ({status}) is not recorded"):
            if error:
                self._mlflow.set_tag(self.run_id, ERROR_TAG, error[:_PARAM_LENGTH])
            self._mlflow.set_terminated(self.run_id, status)


@contextmanager
def _warned(consequence: str) -> Iterator[None]:
    """Turn any failure of MLflow into a line of the log, since a training must outlive its tracking."""
    try:
        yield
    except Exception as error:  # noqa: BLE001  MLflow's stores let through the errors of whatever lies below them
        logger.warning("%s: %s", consequence, _reason(error))


def _samples(last_steps: Mapping[str, int]) -> int:
    """Count the system samples that a run has already."""
    return 1 + max((step for name, step in last_steps.items() if name.startswith(_SYSTEM)), default=-1)


def _read_points(place: str) -> Iterable[tuple[str, float, int, int]]:
    try:
        return _POINTS.validate_json(storage.read_bytes(place)) if storage.exists(place) else ()
    except (TrainerError, ValidationError) as error:
        logger.warning("points for MLflow of an earlier attempt are lost: %s cannot be read (%s)", place, error)
        return ()


@contextmanager
def stage_run(stage: str, settings: Mapping[str, Any], *, active: bool = True, training: str = "") -> Iterator[Tracker]:
    """Open a stage's run, nested in the parent run; it ends FINISHED, or FAILED by an exception, or KILLED by an interruption.

    Args:
        stage: name of the stage, and of its run.
        settings: its settings, recorded as parameters.
        active: False on every process but the first of a group; these get a tracker that does nothing.
        training: identity of the stage's work; an unfinished run with the same identity is continued. Empty: a new run.

    Raises:
        TrackingError: MLflow does not answer or refuses when the stage starts. Later failures are warnings.
    """
    if not active or uri() is None:
        yield _NoTracker()
        return
    with _http_limits(_STAGE_LIMITS):
        tracker = _start_stage(stage, settings, training)
        tracker.start()
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

    with explained():
        mlflow = client()
        parent = _parent(mlflow)
        tags = {STAGE_TAG: stage} | ({MLFLOW_PARENT_RUN_ID: parent} if parent else {})
        experiment = mlflow.get_run(parent).info.experiment_id if parent else _experiment(mlflow)
        run = _unfinished(mlflow, experiment, tags | {TRAINING_TAG: training}) if training else None
        if run is None:
            tags |= {TRAINING_TAG: training} if training else {}
            run = mlflow.create_run(experiment, run_name=stage, tags=tags)
        else:
            mlflow.update_run(run.info.run_id, status="RUNNING")
            if ERROR_TAG in run.data.tags:  # of the attempt before
                mlflow.delete_tag(run.info.run_id, ERROR_TAG)
            logger.info("%s  continues the MLflow run %s", stage, run.info.run_id)
        run_id = str(run.info.run_id)
        _record_params(mlflow, run_id, settings)
        last_steps = {metric.key: metric.step for metric in run.data.to_proto().metrics}
        return _RunTracker(mlflow, run_id, last_steps)


def _unfinished(mlflow: MlflowClient, experiment: str, tags: Mapping[str, str]) -> Run | None:
    """Find the newest run with these tags, unless it is finished."""
    wanted = " and ".join(f"tags.`{name}` = '{value}'" for name, value in tags.items())
    found = mlflow.search_runs([experiment], filter_string=wanted, order_by=["start_time DESC"], max_results=1)
    return found[0] if found and found[0].info.status != "FINISHED" else None


class _Sender(threading.Thread):
    """Sends points in batches, and system samples every few seconds; retries while the server is away."""

    def __init__(self, mlflow: MlflowClient, run_id: str, *, samples: int) -> None:
        """Begin with nothing to send; `samples` is the number of system samples that the run has already."""
        super().__init__(name="tracking", daemon=True)  # a hanging request must not keep the process alive
        self._mlflow = mlflow
        self._run_id = run_id
        self._waiting: deque[Metric] = deque(maxlen=_POINTS_KEPT)  # if the server stays away, the oldest points go
        self._batch: list[Metric] = []
        self._tags: deque[RunTag] = deque()
        self._closing = threading.Event()
        self._give_up = float("inf")
        self._failures = 0
        self._away_since = 0.0
        self._system: SystemMetricsMonitor | None = None
        self._next_sample = 0.0
        self._samples = samples

    def add(self, step: int, values: Mapping[str, float], time_ms: int | None = None) -> None:
        from mlflow.entities import Metric

        time_ms = int(time.time() * 1000) if time_ms is None else time_ms
        self._waiting.extend(Metric(name, value, time_ms, step) for name, value in values.items())

    def unsent(self) -> list[tuple[str, float, int, int]]:
        """List name, value, time in ms and step of the points that the server may lack, without system samples."""
        points = [
            *list(self._waiting),
            *list(self._batch),
        ]  # in this order a point that is moved meanwhile is not missed
        return [
            (point.key, point.value, point.timestamp, point.step)
            for point in sorted(points, key=lambda point: (point.timestamp, point.step))
            if not point.key.startswith(_SYSTEM)
        ]

    def add_tag(self, name: str, text: str) -> None:
        from mlflow.entities import RunTag

        self._tags.append(RunTag(name, text[:_PARAM_LENGTH]))

    def close(self) -> None:
        """Send what is left, for at most `_EXIT_S` and one request."""
        self._give_up = time.monotonic() + _EXIT_S
        self._closing.set()
        self.join(timeout=_EXIT_S + float(os.environ[_TIMEOUT]))
        left = len(self._batch) + len(self._waiting) + len(self._tags)
        if left:
            logger.warning(
                "MLflow run %s: %d points and tags were not sent, since the server did not take them",
                self._run_id,
                left,
            )

    def run(self) -> None:
        self._start_system_metrics()
        while not self._closing.is_set():
            self._sample_system()
            self._send()
            self._closing.wait(Retry(first_s=_SEND_INTERVAL_S, longest_s=_LONGEST_WAIT_S).wait_s(self._failures + 1))
        while self._send() and time.monotonic() < self._give_up:
            if self._failures:
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
            if self._failures:
                waited_s = time.monotonic() - self._away_since
                logger.warning(
                    "MLflow run %s: the server answers again after %.0f s, and gets what waited", self._run_id, waited_s
                )
            self._batch, self._failures = [], 0
            self._drop(tags)
        return bool(self._batch or self._waiting or self._tags)

    def _drop(self, tags: list[RunTag]) -> None:
        for _ in tags:
            self._tags.popleft()

    def _failed(self, error: Exception, tags: list[RunTag]) -> None:
        if getattr(error, "error_code", "") == "INVALID_PARAMETER_VALUE":  # would fail again and hold up what follows
            what = f"{len(self._batch)} points" if self._batch else f"{len(tags)} tags"
            logger.warning("MLflow run %s refused %s: %s", self._run_id, what, _reason(error))
            if not self._batch:  # tags that came with refused points are tried again without them
                self._drop(tags)
            self._batch = []
            return
        if self._failures == 0:
            self._away_since = time.monotonic()
            logger.warning("MLflow run %s: metrics wait, the training continues: %s", self._run_id, _reason(error))
        self._failures += 1

    def _start_system_metrics(self) -> None:
        """Set up MLflow's own readings, under the names that its pages expect, without its thread, which would wait for the server."""
        with _warned("the system metrics are not recorded in MLflow"):
            from mlflow.system_metrics.system_metrics_monitor import SystemMetricsMonitor

            self._system = SystemMetricsMonitor(self._run_id, tracking_uri=uri())

    def _sample_system(self) -> None:
        if self._system is None or time.monotonic() < self._next_sample:
            return
        system, self._system = self._system, None  # a reading that fails is not repeated
        with _warned("no further system metrics are recorded in MLflow"):
            system.collect_metrics()
            self.add(self._samples, {f"{_SYSTEM}{name}": value for name, value in system.aggregate_metrics().items()})
            for part in system.monitors:
                part.clear_metrics()
            self._system = system
        self._next_sample = time.monotonic() + _SYSTEM_INTERVAL_S
        self._samples += 1
