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

Functions raise a `TrackingError` if MLflow does not answer or refuses. `parent_runs` reaches the server and keeps the
parent run, `stage_runs` a stage's. MLflow is imported where it is first needed: it takes more than a second.
"""

from __future__ import annotations

from trainer.tracking.parent_runs import (
    BILL,
    ERROR_TAG,
    EXPERIMENT_ID,
    EXPERIMENT_NAME,
    FORMER_TAG,
    IDENTITY,
    NOTE_TAG,
    RUN,
    RUN_ID,
    RUN_TAG,
    URI,
    billed_runs,
    check,
    client,
    end_parent_left,
    environment,
    explained,
    finish_parent,
    flatten,
    local_store,
    numbers,
    shown,
    start_parent,
    uploading,
    uri,
)

__all__ = [
    "BILL",
    "ERROR_TAG",
    "EXPERIMENT_ID",
    "EXPERIMENT_NAME",
    "FORMER_TAG",
    "IDENTITY",
    "NOTE_TAG",
    "RUN",
    "RUN_ID",
    "RUN_TAG",
    "URI",
    "billed_runs",
    "check",
    "client",
    "end_parent_left",
    "environment",
    "explained",
    "finish_parent",
    "flatten",
    "local_store",
    "numbers",
    "shown",
    "start_parent",
    "uploading",
    "uri",
]
