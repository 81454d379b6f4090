"""A pipeline run in MLflow: the parent run, its settings, and the bills of finished ones."""

from __future__ import annotations

import json
import logging
import os
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trainer.errors import TrackingError
from trainer.host import environment_variables
from trainer.tracking.server import (
    EXPERIMENT_ID,
    EXPERIMENT_NAME,
    IDENTITY,
    RUN,
    RUN_ID,
    STAGE_LIMITS,
    URI,
    client,
    experiment_id,
    explained,
    http_limits,
    shown,
    uri,
)

if TYPE_CHECKING:
    from mlflow.entities import Run
    from mlflow.tracking import MlflowClient

logger = logging.getLogger(__name__)

RUN_TAG = "trainer.run"
IDENTITY_TAG = "trainer.run_id"
FORMER_TAG = "trainer.former_run"
"""MLflow's id of the parent run that the same run had before its settings changed."""
ERROR_TAG = "trainer.error"
NOTE_TAG = "mlflow.note.content"
"""What MLflow shows as a run's description, in Markdown."""
BILL = "bill.json"
"""Name under which register leaves a run's bill with its parent run."""

PARAM_LENGTH = 6000  # MLflow's limit
_PARAMS_A_BATCH = 100  # likewise
_SHOWN = 5
"""Most changed settings that a line of the log names."""


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
    with http_limits(STAGE_LIMITS), explained():
        mlflow = client()
        run_id = find_parent(mlflow, settings, name)
        if run_id is not None:
            record_params(mlflow, run_id, settings)
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
    with http_limits(STAGE_LIMITS), explained():
        mlflow = client()
        newest = _newest_parent(mlflow)
        run_id = find_parent(mlflow) if newest is None or newest.info.status == "RUNNING" else None
        if run_id is not None:
            if error:
                mlflow.set_tag(run_id, ERROR_TAG, error[:PARAM_LENGTH])
            mlflow.set_terminated(run_id, status)


def end_parent_left(status: str) -> bool:
    """End the parent run if it exists and is still open; returns whether it was.

    Raises:
        TrackingError: MLflow does not answer or refuses.
    """
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
    return str(mlflow.create_run(experiment_id(mlflow), run_name=name or run, tags=given).info.run_id)


def _where_the_parent_may_be(mlflow: MlflowClient) -> list[str]:
    """Return the run's experiment; on a cluster only the task that makes the parent run knows it, so there all experiments."""
    if os.environ.get(EXPERIMENT_ID) or os.environ.get(EXPERIMENT_NAME):
        return [experiment_id(mlflow)]
    return [str(experiment.experiment_id) for experiment in mlflow.search_experiments()]


# ---------------------------------------------------------------------------------------------------------------------
# Settings


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
            flat[full] = str(value)[:PARAM_LENGTH]
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


def record_params(mlflow: MlflowClient, run_id: str, settings: Mapping[str, Any]) -> None:
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
# Finished runs


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
