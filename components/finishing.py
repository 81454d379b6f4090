"""The end of a run on a cluster: what is left is deleted, and MLflow learns how the run ended."""

from __future__ import annotations

import logging
import os

from trainer import tracking
from trainer.errors import LaunchError, TrackingError

logger = logging.getLogger(__name__)

ENDS = {
    "COMPLETE": "FINISHED",
    "CACHED": "FINISHED",
    "SUCCEEDED": "FINISHED",
    "CANCELED": "KILLED",
    "FAILED": "FAILED",
    "UNKNOWN": "FAILED",
    "NEW": "FAILED",
    "RUNNING": "FAILED",
}
"""State of the other tasks, as KFP gives it to an exit task -> the status of the run in MLflow.

KFP's driver hands over the last state that ML Metadata has of their group (`Execution.State`), `kfp.local` SUCCEEDED or FAILED. A group is
left RUNNING where a task's pod never ran or was killed, so that no launcher wrote down its end; a run that is stopped is such a case.
"""
WORKFLOW = "TRAINER_WORKFLOW"
"""Environment variable of a task on a cluster: the name of its run's Workflow."""


def finish(pool: str, state: str, error: str) -> None:
    """Delete the run's jobs and end its parent run in MLflow; what cannot be done is said and hides no other thing.

    Args:
        pool: the node pool that jobs ran on; empty: none.
        state: of the other tasks, a key of `ENDS`.
        error: KFP's message, if they failed.
    """
    status = ENDS.get(state, "FAILED")
    if status != "FINISHED" and _was_stopped():
        status = "KILLED"
    logger.info("the run ended: %s%s", state, f" ({error})" if error else "")
    if pool:
        try:
            _delete_jobs()
        except LaunchError as failure:
            logger.warning("jobs of this run may be left: %s", failure)
    try:
        tracking.finish_parent(status, error)
    except TrackingError as failure:
        logger.warning("the run stays open in MLflow: %s", failure)


def _was_stopped() -> bool:
    """Whether somebody stopped the run: KFP then leaves its Workflow no time."""
    name = os.environ.get(WORKFLOW)
    if not name:
        return False
    from components.launch.cluster import Cluster
    from components.launch.resources import Resource

    try:
        with Cluster.connect() as cluster:
            workflow = cluster.get(Resource("workflows", "argoproj.io", "v1alpha1"), name)
    except LaunchError as failure:
        logger.warning("whether the run was stopped is not known: %s", failure)
        return False
    return bool(workflow["spec"].get("activeDeadlineSeconds") == 0)


def _delete_jobs() -> None:
    from components.launch import identity, reaping
    from components.launch.cluster import Cluster

    own = identity.from_environment("finish")
    with Cluster.connect(own.namespace) as cluster:
        for name in reaping.delete_jobs(cluster, own.run):
            logger.info("deleted the job %s, which was left", name)
