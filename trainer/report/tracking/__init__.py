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
(`TrackingError`), in a run not before some minutes of waiting; one that goes away later costs points on a curve and never the training: a
separate thread sends metrics, retries, and gives up at exit after a bounded time.

A stage that was interrupted continues in the same run. Points of a curve that the server has are not sent again, and those that it lacked
at the last checkpoint are kept beside the checkpoint, so a curve has neither gaps nor doubled steps.

This module reaches the server and keeps the parent run, `stage_runs` a stage's; functions raise a `TrackingError` if MLflow does not answer
or refuses. MLflow is imported where it is first needed: it takes more than a second.
"""

from __future__ import annotations

import logging
import os
import re
import sqlite3
import tempfile
import time
import urllib.parse
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, closing, contextmanager, suppress
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeVar

from trainer.config import TrackingSettings, copied_from, resolve
from trainer.io.base_models import flatten, holds_secret
from trainer.io.errors import TrackingAwayError, TrackingError, refused_to_write
from trainer.io.formatting import listed
from trainer.io.host import environment_variables
from trainer.io.notifications import Event, Notifier
from trainer.io.retry import Outage, Retry

if TYPE_CHECKING:
    from mlflow.entities import Run
    from mlflow.store.entities import PagedList
    from mlflow.tracking import MlflowClient

logger = logging.getLogger(__name__)
T = TypeVar("T")

# MLflow's thread for its telemetry takes a variable out of the environment where it gets no answer, as in a cluster without egress; a
# request that reads the environment at that moment (for proxies) fails with a KeyError, and a stage with it.
os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")

REGISTERED = "models:/"  # how a place in the registry begins: `models:/NAME@ALIAS`, or `models:/NAME/VERSION`
URI = "MLFLOW_TRACKING_URI"
EXPERIMENT_ID = "MLFLOW_EXPERIMENT_ID"
EXPERIMENT_NAME = "MLFLOW_EXPERIMENT_NAME"
RUN_ID = "MLFLOW_RUN_ID"
RUN = "TRAINER_RUN"
IDENTITY = "TRAINER_RUN_ID"

# MLflow's defaults, 120 s and 7 retries, would hold a training for minutes; the requests that matter are retried here.
TIMEOUT_VARIABLE, _RETRIES = "MLFLOW_HTTP_REQUEST_TIMEOUT", "MLFLOW_HTTP_REQUEST_MAX_RETRIES"
# By itself its client exchanges files with the store wherever the server can sign addresses of it (large ones when it uploads), and those
# of a store inside a cluster lead nowhere from outside: it would try them for a quarter of an hour.
_BY_THE_SERVER = {"MLFLOW_ENABLE_PROXY_MULTIPART_DOWNLOAD": "false", "MLFLOW_ENABLE_PROXY_MULTIPART_UPLOAD": "false"}
_CHECK_LIMITS = {TIMEOUT_VARIABLE: "4", _RETRIES: "0", **_BY_THE_SERVER}
STAGE_LIMITS = {TIMEOUT_VARIABLE: "10", _RETRIES: "0", **_BY_THE_SERVER}
UPLOAD_LIMITS = {TIMEOUT_VARIABLE: "60", _RETRIES: "3", **_BY_THE_SERVER}

RUN_TAG = "trainer.run"
IDENTITY_TAG = "trainer.run_id"
FORMER_TAG = "trainer.former_run"  # MLflow's id of the parent run that the same run had before its settings changed
ALIAS_ADVICE = (
    "set register.model_name to a name for these classes, or register.same_classes=false to move the alias all the same"
)
ERROR_TAG = "trainer.error"
NOTE_TAG = "mlflow.note.content"  # what MLflow shows as a run's description, in Markdown
BILL = "bill.json"  # name under which register leaves a run's bill with its parent run

PATIENCE_S = 300.0
"""How long a stage of a run waits for a server that does not answer, in seconds; less than processes wait for each other (600)."""
_AWAY = Retry(first_s=1.0, longest_s=15.0)

PARAM_LENGTH = 6000  # MLflow's limit
_PARAMS_A_BATCH = 100  # likewise
_RUN_NAME_LENGTH = 250  # that of its databases
_SHOWN = 5  # most changed settings that a line of the log names


# ---- The server


def environment(settings: TrackingSettings, *, directory: Path, run: str, identity: str = "") -> dict[str, str]:
    """Return the variables that make every stage of a run record to the same place.

    Args:
        settings: `tracking.uri` overrides `MLFLOW_TRACKING_URI`, and that a SQLite file in `directory`; an experiment that is not the
            default overrides `MLFLOW_EXPERIMENT_NAME`.
        directory: where `mlflow.db` and `mlartifacts` are if no URI is given.
        run: name of the pipeline run.
        identity: distinguishes it from other runs of that name; empty where its name is unique.
    """
    tracking_uri = settings.uri or os.environ.get(URI) or local_uri(directory)
    default_experiment = TrackingSettings().experiment
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


def local_uri(directory: Path) -> str:
    """Return the URI of that file."""
    return f"sqlite:///{local_store(directory)}"


def uri() -> str | None:
    """Return where this process tracks, or None."""
    return os.environ.get(URI) or None


def is_server(address: str) -> bool:
    """Return whether a URI is that of a server, which other machines reach and which has pages of its own."""
    return address.startswith(("http://", "https://", "databricks"))


def shown(address: str) -> str:
    """Mask the password in a URI, for messages and files."""
    parts = urllib.parse.urlsplit(address)
    credentials, at, host = parts.netloc.rpartition("@")
    user, colon, _ = credentials.partition(":")
    return address.replace(f"{credentials}@", f"{user}:***@", 1) if at and colon and host else address


def client() -> MlflowClient:
    """Make a client for `uri()`."""
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
        elif _DATABASE.match(tracking_uri):  # the same
            from sqlalchemy import create_engine

            create_engine(tracking_uri).connect().close()
        return MlflowClient(
            tracking_uri=tracking_uri, registry_uri=os.environ.get("MLFLOW_REGISTRY_URI") or tracking_uri
        )


_DATABASE = re.compile(r"(postgresql|mysql|mssql)(\+\w+)?://")  # how the URIs of MLflow's other databases begin


def _sqlite_file(tracking_uri: str) -> Path | None:
    name = tracking_uri.removeprefix("sqlite:///")
    return Path(name.partition("?")[0]) if name != tracking_uri else None


@contextmanager
def explained() -> Iterator[None]:
    """Turn MLflow's errors of an unusable, unreachable or refusing store into a `TrackingError` with URI, reason and next move.

    It is a `TrackingAwayError` if the server does not answer, or answers with a server error.
    """
    from botocore.exceptions import BotoCoreError, ClientError  # type: ignore[import-untyped]  # the package ships no types
    from mlflow.exceptions import MlflowException

    # OSError: also of requests. botocore's: of a server that lets its clients fetch artifacts from the bucket themselves
    unusable: tuple[type[Exception], ...] = (MlflowException, OSError, sqlite3.Error, BotoCoreError, ClientError)
    # of a missing driver of a database, and of a name that is not UTF-8
    unusable += (ImportError, UnicodeError)
    with suppress(ImportError):  # the server's image has mlflow-skinny, which has no stores of its own
        from sqlalchemy.exc import SQLAlchemyError

        unusable += (SQLAlchemyError,)
    try:
        yield
    except unusable as error:
        address = shown(uri() or URI)
        advice = (
            f"start the server, correct tracking.uri or {URI}, or continue without tracking (tracking.enabled=false)"
        )
        reason = refused_to_write(error, address) or f"{reason_of(error)}; {advice}"
        if isinstance(error, ImportError) and error.name:
            reason = (
                f"needs the Python package {error.name}, the driver of that database; install it, name a driver that is installed, as in "
                f"postgresql+pg8000://, or choose another store by tracking.uri or {URI}"
            )
        kind = TrackingAwayError if _away(error) else TrackingError
        raise kind(f"MLflow at {address}: {reason}") from error


_UNREACHABLE = {
    "Connection refused": "connection refused",
    "NameResolutionError": "its host name is not known",
    "timed out": "timed out",
    "Connection reset": "connection reset",
    "Connection aborted": "connection broken",
}
_SERVER_ERRORS = re.compile(r"(?:with url: ([^\s?]+).*)?too many (5\d\d|429) error responses", re.DOTALL)


def _away(error: BaseException) -> str:
    """Describe how the server fails to answer; empty where it answers."""
    text = str(error)
    for sign, meaning in _UNREACHABLE.items():
        if sign in text:
            return f"does not answer ({meaning})"
    found = _SERVER_ERRORS.search(text)
    if not found:
        return ""
    asked = f" to {found[1]}" if found[1] else ""
    return f"keeps answering {found[2]}{asked}; its own log says why"


def reason_of(error: BaseException) -> str:
    """Explain in a line why MLflow failed, with the next move where the user can act."""
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
    """Bound MLflow's HTTP requests, and send files through its server, by its environment variables; what the user has set there stays."""
    ours = {name: {None, *(group[name] for group in (_CHECK_LIMITS, STAGE_LIMITS, UPLOAD_LIMITS))} for name in limits}
    with environment_variables({name: value for name, value in limits.items() if os.environ.get(name) in ours[name]}):
        yield


def uploading() -> AbstractContextManager[None]:
    """Allow longer requests than for metrics, while a stage uploads what must arrive."""
    return http_limits(UPLOAD_LIMITS)


def patiently(action: Callable[[], T]) -> T:
    """Attempt an action again while MLflow does not answer, for up to `PATIENCE_S`, and return its result.

    This holds within a run, whose first task has reached the server. Outside of a run the first failure is raised: the address may be
    wrong, and somebody is waiting for the message.
    """
    start, outage = time.monotonic(), Outage("MLflow", logger)
    patience_s = PATIENCE_S if os.environ.get(RUN) or os.environ.get(RUN_ID) else 0.0

    def failed(error: Exception, _failures: int) -> None:
        if not isinstance(error, TrackingAwayError) or time.monotonic() - start >= patience_s:
            raise error
        outage.failed(f"waiting for MLflow for up to {patience_s:.0f} s: {error}")

    result = _AWAY(action, failed=failed)
    outage.ended()
    return result


def check() -> None:
    """Make sure that MLflow answers and accepts our credentials; takes seconds. Does nothing if nothing is tracked."""
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
    name = os.environ.get(EXPERIMENT_NAME) or TrackingSettings().experiment
    found = mlflow.get_experiment_by_name(name)
    if found is None:
        # Beside the SQLite file, since MLflow would use the working directory; a server knows its own location.
        sqlite_file = _sqlite_file(uri() or "")
        location = (sqlite_file.resolve().parent / "mlartifacts").as_uri() if sqlite_file else None
        try:
            return str(mlflow.create_experiment(name, artifact_location=location))
        except MlflowException as error:
            found = mlflow.get_experiment_by_name(name)  # another run may have created it meanwhile
            if found is None or error.error_code != "RESOURCE_ALREADY_EXISTS":
                raise
    if found.lifecycle_stage != "active":
        raise TrackingError(
            f"MLflow at {shown(uri() or URI)}: the experiment {name!r} was deleted; restore it, or choose another tracking.experiment"
        )
    return str(found.experiment_id)


def _all_pages(search: Callable[[str | None], PagedList[T]]) -> Iterator[T]:
    """Yield all results of a search, of which MLflow returns at most 1,000 a page."""
    token: str | None = None
    while True:
        page = search(token)
        yield from page
        if not (token := page.token):
            return


def _experiments(mlflow: MlflowClient) -> dict[str, str]:
    found = _all_pages(lambda token: mlflow.search_experiments(page_token=token))
    return {one.name: str(one.experiment_id) for one in found}


# ---- The parent run


def newest_experiment() -> str | None:
    """Return the id of the experiment that changed last; None where there is none but MLflow's own."""
    with explained(), http_limits(STAGE_LIMITS):
        found = client().search_experiments(
            filter_string="name != 'Default'", order_by=["last_update_time DESC"], max_results=1
        )
    return str(found[0].experiment_id) if found else None


def start_parent(settings: Mapping[str, Any], tags: Mapping[str, str], *, name: str = "") -> str | None:
    """Find or create the parent run and record settings and tags on it; other settings make a new one, called `name` or by `TRAINER_RUN`.

    Returns its id; None if nothing is tracked, or this process belongs to no named run (`TRAINER_RUN`).
    """
    if uri() is None:
        return None
    with http_limits(STAGE_LIMITS), explained():
        mlflow = client()
        run_id = find_parent(mlflow, settings, name)
        if run_id is not None:
            record_params(mlflow, run_id, settings)
            for tag, value in tags.items():
                mlflow.set_tag(run_id, tag, value)
        return run_id


def finish_parent(status: str = "FINISHED", error: str = "") -> None:
    """End the parent run as FINISHED, FAILED or KILLED, with the error as a tag, unless another program has created it.

    An ended one stays: it is of an earlier attempt, and this attempt failed before it had begun.
    """
    if uri() is None or os.environ.get(RUN_ID):
        return
    with http_limits(STAGE_LIMITS), explained():
        mlflow = client()
        newest = _newest_parent(mlflow)
        run_id = find_parent(mlflow) if newest is None or newest.info.status == "RUNNING" else None
        if run_id is not None:
            if error:
                mlflow.set_tag(run_id, ERROR_TAG, error[:PARAM_LENGTH])
            mlflow.set_terminated(run_id, status)


def end_parent_left(status: str) -> bool:
    """End the parent run if it exists and is still open; returns whether it was."""
    if uri() is None:
        return False
    with http_limits(STAGE_LIMITS), explained():
        mlflow = client()
        newest = _newest_parent(mlflow)
        if newest is None or newest.info.status != "RUNNING":
            return False
        mlflow.set_terminated(newest.info.run_id, status)
        return True


def find_parent(mlflow: MlflowClient, settings: Mapping[str, Any] | None = None, name: str = "") -> str | None:
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
    known, given = found.data.params, parameters(settings or {})
    changed = [*_changed(known, given), *_come_or_gone(known, given)]
    if not changed:
        if not is_running:  # a run that was interrupted or failed continues
            mlflow.update_run(run_id, status="RUNNING")
        return run_id
    if is_running:  # it was killed, and could not say so
        mlflow.set_terminated(run_id, "KILLED")
    new = _new_parent(mlflow, name, former=run_id)
    logger.info(
        "MLflow: a new run %s, since %s changed; the former one, %s, stays as it is",
        new,
        listed(changed, _SHOWN),
        run_id,
    )
    return new


def _newest_parent(mlflow: MlflowClient) -> Run | None:
    name, identity = os.environ.get(RUN), os.environ.get(IDENTITY)
    if not name:
        return None
    tag, value = (IDENTITY_TAG, identity) if identity else (RUN_TAG, name)
    quote = '"' if "'" in value else "'"
    wanted = f"tags.`{tag}` = {quote}{value}{quote}"
    if os.environ.get(EXPERIMENT_ID) or os.environ.get(EXPERIMENT_NAME):
        experiments = [experiment_id(mlflow)]
    else:  # on a cluster only the task that makes the parent run knows it
        experiments = list(_experiments(mlflow).values())
    found = mlflow.search_runs(experiments, filter_string=wanted, order_by=["start_time DESC"], max_results=1)
    return found[0] if found else None


def _new_parent(mlflow: MlflowClient, name: str, *, former: str = "") -> str:
    run = os.environ[RUN]
    tags = {RUN_TAG: run, IDENTITY_TAG: os.environ.get(IDENTITY), FORMER_TAG: former}
    given = {tag: value for tag, value in tags.items() if value}
    return str(
        mlflow.create_run(experiment_id(mlflow), run_name=(name or run)[:_RUN_NAME_LENGTH], tags=given).info.run_id
    )


# ---- Settings


def parameters(settings: Mapping[str, Any], section: str = "") -> dict[str, str]:
    """Flatten nested settings, of a whole run or of this section, to parameters of a run, cut to MLflow's length.

    MLflow shows parameters in the order in which they are recorded: first what differs from the defaults, last what resolving copies.
    A group with members that MLflow may refuse, such as names of classes, stays one parameter; so does an empty group, to be seen as empty.
    """
    flat, defaults, prefix = _flat(settings), _defaults(), f"{section}." if section else ""

    def rank(name: str) -> int:
        full = prefix + name
        return 2 if copied_from(full) else 0 if defaults.get(full) != flat[name] else 1

    return {name: flat[name] for name in sorted(flat, key=rank)}


def _flat(settings: Mapping[str, Any]) -> dict[str, str]:
    flat = flatten(settings, keep=lambda group: not group or not all(member.isidentifier() for member in group))
    return {name: str(value)[:PARAM_LENGTH] for name, value in flat.items()}


@cache
def _defaults() -> Mapping[str, str]:
    return _flat(resolve().model_dump(mode="json"))


def numbers(figures: Mapping[str, Any]) -> dict[str, float]:
    """Collect every number of nested figures under its full name, such as `student/test/top1`; true is 1."""
    values = flatten(figures, separator="/").items()
    return {name: float(value) for name, value in values if isinstance(value, int | float)}


def _changed(known: Mapping[str, str], given: Mapping[str, str]) -> list[str]:
    """List the parameters that a run has with another value, or as a group of parameters where one is given, or the reverse."""
    groups = _groups(known)
    return sorted(
        name
        for name, value in given.items()
        if known.get(name, value) != value or name in groups or not _groups([name]).isdisjoint(known)
    )


def _come_or_gone(known: Mapping[str, str], given: Mapping[str, str]) -> list[str]:
    """List the parameters that only one side has, in groups that both sides have: `args.depth` beside `args.width`."""
    groups, differing = _groups(known) & _groups(given), known.keys() - given.keys()
    if next(reversed([*given]), "") in known:  # else the start that recorded them was killed before the last ones
        differing |= given.keys() - known.keys()
    return sorted(name for name in differing if name.rpartition(".")[0] in groups)


def _groups(names: Iterable[str]) -> set[str]:
    """Return the groups that parameters are in: `student` and `student.args` of `student.args.depth`."""
    return {name[: dot.start()] for name in names for dot in re.finditer(r"\.", name)}


def record_params(mlflow: MlflowClient, run_id: str, settings: Mapping[str, Any], section: str = "") -> None:
    """Record settings as `parameters`; MLflow keeps a parameter's first value, so one that differs now is only named in the log."""
    from mlflow.entities import Param

    known = mlflow.get_run(run_id).data.params
    flat = parameters(settings, section)
    changed = _changed(known, flat)
    if changed:
        logger.warning("MLflow run %s keeps the first values of %s", run_id, listed(changed, _SHOWN))
    params = [Param(name, value) for name, value in flat.items() if name not in known]
    for start in range(0, len(params), _PARAMS_A_BATCH):
        mlflow.log_batch(run_id, params=params[start : start + _PARAMS_A_BATCH])


# ---- Finished runs


@contextmanager
def _fetching() -> Iterator[None]:
    """Let MLflow's client fetch through its server, in a bounded time and without a bar."""
    with uploading(), environment_variables({"MLFLOW_ENABLE_ARTIFACTS_PROGRESS_BAR": "false"}):
        yield


def registered_model(place: str, folder: Path) -> tuple[str, Path, bool]:
    """Fetch `models:/NAME@ALIAS` or `models:/NAME/VERSION`, into `folder` if the store is not on this machine.

    Returns its version, `models:/NAME/VERSION`; the directory of its files; and whether it passed its gate.
    """
    pinned, passed = registered_version(place)  # an alias may move before the files are fetched
    from mlflow.artifacts import download_artifacts

    with explained(), _fetching():
        files = download_artifacts(
            pinned,
            dst_path=str(folder),
            tracking_uri=uri(),
            registry_uri=os.environ.get("MLFLOW_REGISTRY_URI"),
        )
    return pinned, Path(files), passed


def registered_version(place: str) -> tuple[str, bool]:
    """Look up a version of the registry: `models:/NAME/VERSION`, and whether it passed its gate."""
    name, number, alias = place.removeprefix(REGISTERED), "", ""
    if "@" in name:
        name, _, alias = name.rpartition("@")
    else:
        name, _, number = name.partition("/")
    if not name or not (alias or number):
        raise TrackingError(f"{place}: names no version of a model; write models:/NAME@ALIAS or models:/NAME/VERSION")
    mlflow = client()
    from mlflow.exceptions import MlflowException

    with explained(), http_limits(STAGE_LIMITS):
        try:
            found = mlflow.get_model_version_by_alias(name, alias) if alias else mlflow.get_model_version(name, number)
        except MlflowException as error:
            if error.error_code not in ("RESOURCE_DOES_NOT_EXIST", "INVALID_PARAMETER_VALUE"):
                raise
            raise TrackingError(
                f"{place}: MLflow at {shown(uri() or '')} has no such model ({reason_of(error)}); look for its name and version in MLflow "
                "(`python -m trainer ui`); the alias is on a version that passed its gate"
            ) from error
    return f"{REGISTERED}{name}/{found.version}", found.tags.get("verdict", "passed") == "passed"


def other_classes(name: str, alias: str, classes: Callable[[], Collection[str]]) -> str:
    """Compare classes with those of the version that an alias names; `classes` is called only if there is one.

    Returns the differences, or that they are unknown; empty for equal classes and for an alias without a version.
    """
    from mlflow.exceptions import MlflowException
    from mlflow.models import get_model_info

    with http_limits(STAGE_LIMITS), explained():
        try:
            number = str(client().get_model_version_by_alias(name, alias).version)
        except MlflowException as error:
            if error.error_code not in ("RESOURCE_DOES_NOT_EXIST", "INVALID_PARAMETER_VALUE"):
                raise
            return ""  # no version has it yet
    place = f"{REGISTERED}{name}@{alias} is version {number}"
    try:
        with http_limits(UPLOAD_LIMITS), explained(), _fetching():  # which asks again
            known = (get_model_info(f"{REGISTERED}{name}/{number}").metadata or {}).get("labels")
    except TrackingError as error:
        # Its files were deleted, which must not keep others from being registered. Of a bucket behind it the server then answers 500.
        if isinstance(error, TrackingAwayError) and "too many 500 error responses" not in str(error.__cause__):
            raise
        return f"{place}, whose classes cannot be read ({reason_of(error.__cause__ or error)})"
    if not isinstance(known, list):
        return f"{place}, which does not say its classes"
    there, here = {*map(str, known)}, {*classes()}
    only = {"there": sorted(there - here), "here": sorted(here - there)}
    differences = [f"{len(names):,} only {where} ({listed(names, _SHOWN)})" for where, names in only.items() if names]
    return f"{place}, which knows other classes: {', '.join(differences)}" if differences else ""


def billed_runs(experiment: str) -> list[tuple[str, dict[str, str], dict[str, float], bytes]]:
    """List name, parameters, metrics and `bill.json` of an experiment's billed runs, the oldest first."""
    with explained(), _fetching(), tempfile.TemporaryDirectory(prefix="trainer-") as folder:
        with http_limits(STAGE_LIMITS):
            known = _experiments(client())
        mlflow = client()
        if experiment not in known:
            raise TrackingError(
                f"MLflow at {shown(uri() or URI)}: has no experiment {experiment!r}, but {', '.join(known)}; name one of these"
            )
        query, oldest = "metrics.`bill/seconds` > 0", ["start_time ASC"]
        found = _all_pages(
            lambda token: mlflow.search_runs([known[experiment]], query, order_by=oldest, page_token=token)
        )
        billed = []
        for run in found:
            bill = Path(mlflow.download_artifacts(run.info.run_id, BILL, folder)).read_bytes()
            billed.append((str(run.info.run_name), run.data.params, run.data.metrics, bill))
        return billed


_SEVERITIES: Mapping[str, Literal["note", "warning", "severe"]] = {"FINISHED": "note", "KILLED": "warning"}


def notify_of_end(status: str, text: str) -> None:
    """Send how a run ended, FINISHED, FAILED or KILLED, and wait some seconds for the receivers of `TRAINER_NOTIFY`."""
    severity = _SEVERITIES.get(status, "severe")
    event = Event(
        event="run ended", run=os.environ.get(RUN, ""), severity=severity, title=f"Run {status.lower()}", text=text
    )
    notifier = Notifier()
    notifier.send(event)
    notifier.close()
