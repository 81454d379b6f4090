"""The MLflow server: where it is, a client for it, and errors that name it."""

from __future__ import annotations

import logging
import os
import re
import sqlite3
import urllib.parse
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, closing, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from trainer.base_models import holds_secret
from trainer.config import TrackingSettings
from trainer.errors import TrackingAwayError, TrackingError, refused_to_write
from trainer.host import environment_variables

if TYPE_CHECKING:
    from mlflow.tracking import MlflowClient

URI = "MLFLOW_TRACKING_URI"
EXPERIMENT_ID = "MLFLOW_EXPERIMENT_ID"
EXPERIMENT_NAME = "MLFLOW_EXPERIMENT_NAME"
RUN_ID = "MLFLOW_RUN_ID"
RUN = "TRAINER_RUN"
IDENTITY = "TRAINER_RUN_ID"

# MLflow's defaults, 120 s and 7 retries, would hold a training for minutes; the requests that matter are retried here.
TIMEOUT_VARIABLE, _RETRIES = "MLFLOW_HTTP_REQUEST_TIMEOUT", "MLFLOW_HTTP_REQUEST_MAX_RETRIES"
_CHECK_LIMITS = {TIMEOUT_VARIABLE: "4", _RETRIES: "0"}
STAGE_LIMITS = {TIMEOUT_VARIABLE: "10", _RETRIES: "0"}
UPLOAD_LIMITS = {TIMEOUT_VARIABLE: "60", _RETRIES: "3"}


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
        reason = refused_to_write(error, address) or f"{reason_of(error)}; {advice}"
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


def reason_of(error: Exception) -> str:
    """Say in a line why MLflow failed, with the next move where the user can act."""
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
def http_limits(limits: Mapping[str, str]) -> Iterator[None]:
    """Bound MLflow's HTTP requests by its environment variables; values that the user has set there stay."""
    ours = {name: {None, *(group[name] for group in (_CHECK_LIMITS, STAGE_LIMITS, UPLOAD_LIMITS))} for name in limits}
    with environment_variables({name: value for name, value in limits.items() if os.environ.get(name) in ours[name]}):
        yield


def uploading() -> AbstractContextManager[None]:
    """Allow longer requests than for metrics, while a stage uploads what must arrive."""
    return http_limits(UPLOAD_LIMITS)


def check() -> None:
    """Make sure that MLflow answers and accepts our credentials; takes seconds. Does nothing if nothing is tracked.

    Raises:
        TrackingError: the server is down or refuses, with its URI and the next move.
    """
    if uri() is None:
        return
    with http_limits(_CHECK_LIMITS), explained():
        parent = os.environ.get(RUN_ID)
        if parent:
            client().get_run(parent)
        else:
            experiment_id(client())


def experiment_id(mlflow: MlflowClient) -> str:
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
