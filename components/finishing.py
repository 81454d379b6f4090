"""The end of a run on a cluster: what is left is deleted, and MLflow learns how the run ended."""

from __future__ import annotations

import logging

from trainer import tracking
from trainer.errors import LaunchError, TrackingError

logger = logging.getLogger(__name__)

MLFLOW_STATUS = {"SUCCEEDED": "FINISHED", "CANCELED": "KILLED", "CANCELLED": "KILLED"}
"""How a pipeline run ended -> the status of its run in MLflow; any other end is FAILED. KFP's API and its SDK spell differently."""


def finish(pool: str, state: str, error: str) -> None:
    """Delete the run's jobs and end its parent run in MLflow; what can not be done is said and hides no other thing.

    Args:
        pool: the node pool that jobs ran on; empty: none.
        state: KFP's final state of the other tasks, such as SUCCEEDED.
        error: KFP's message, if they failed.
    """
    logger.info("the run ended: %s%s", state, f" ({error})" if error else "")
    if pool:
        try:
            _delete_jobs()
        except LaunchError as failure:
            logger.warning("jobs of this run may be left: %s", failure)
    try:
        tracking.finish_parent(MLFLOW_STATUS.get(state, "FAILED"), error)
    except TrackingError as failure:
        logger.warning("the run stays open in MLflow: %s", failure)


def _delete_jobs() -> None:
    from components.launch import identity, reaping
    from components.launch.cluster import Cluster

    own = identity.from_environment("finish")
    with Cluster.connect(own.namespace) as cluster:
        for name in reaping.delete_jobs(cluster, own.run):
            logger.info("deleted the job %s, which was left", name)
