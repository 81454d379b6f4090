"""The end of a run on a cluster: what is left is deleted, and MLflow learns how the run ended."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

from components.launch.job_manifest import WORKFLOWS
from trainer.io.errors import LaunchError, SettingsError, TrackingError
from trainer.io.host import environment_variables
from trainer.report import tracking

if TYPE_CHECKING:
    from components.launch.client import Cluster

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
WORKFLOW = "TRAINER_WORKFLOW"  # environment variable of a task on a cluster: the name of its run's Workflow
RUN_LABEL = "pipeline/runid"  # the label by which Workflows and pods of KFP know their run
FAILED = f"{RUN_LABEL},workflows.argoproj.io/phase in (Failed,Error)"
"""Selects Workflows of KFP that did not succeed, by the labels that Argo keeps: each is large, and most did."""
LEFT_AFTER_S, LEFT_FOR_S = 60.0, 900.0
"""Seconds after the end of a Workflow between which its run is ended in MLflow by others: `finish` goes first, and KFP keeps Workflows for
days, which need not be asked for again and again."""


def finish(pool: str, state: str, error: str) -> None:
    """Delete the run's jobs and end its parent run in MLflow; what fails is logged, and the rest is still done.

    `pool` is empty where no job ran; `state` is a key of `ENDS`; `error` is KFP's message of a failure.
    """
    status = ENDS.get(state, "FAILED")
    if status != "FINISHED" and (workflow := os.environ.get(WORKFLOW)) and _was_stopped(workflow):
        status = "KILLED"
    logger.info("the run ended: %s%s", state, f" ({error})" if error else "")
    try:
        tracking.notify_of_end(status, error)
    except SettingsError as failure:
        logger.warning("nobody was notified: %s", failure)
    if pool:
        from components.launch import job_manifest, reaper
        from components.launch.client import Cluster

        try:
            own = job_manifest.Identity.from_environment("finish")
            with Cluster.connect(own.namespace) as cluster:
                for name in reaper.delete_jobs(cluster, own.run):
                    logger.info("deleted the job %s, which was left", name)
        except LaunchError as failure:
            logger.warning("jobs of this run may be left: %s", failure)
    try:
        tracking.finish_parent(status, error)
    except TrackingError as failure:
        logger.warning("the run stays open in MLflow: %s", failure)


def _was_stopped(workflow: str) -> bool:
    from components.launch.client import Cluster

    try:
        with Cluster.connect() as cluster:
            return _is_stopped(cluster.get(WORKFLOWS, workflow))
    except LaunchError as failure:
        logger.warning("whether the run was stopped is not known: %s", failure)
        return False


def _is_stopped(workflow: Mapping[str, Any]) -> bool:
    """Check whether a run was stopped: KFP then leaves its Workflow no time."""
    return bool(workflow["spec"].get("activeDeadlineSeconds") == 0)


def end_left_runs(cluster: Cluster) -> list[str]:
    """End runs in MLflow whose own `finish` has not run to its end: Argo may end it together with a run that is stopped.

    Returns KFP's ids of those that were still open. Raises a `ClusterError` or a `TrackingError` where a server does not answer or refuses.
    """
    ended = []
    for workflow in filter(_is_left, cluster.list(WORKFLOWS, labels=FAILED)["items"]):
        run, status = workflow["metadata"]["labels"][RUN_LABEL], "KILLED" if _is_stopped(workflow) else "FAILED"
        with environment_variables({tracking.RUN: run}):
            if tracking.end_parent_left(status):
                logger.info("ended the run %s in MLflow as %s: its task `finish` has not come to its end", run, status)
                ended.append(run)
    return ended


def _is_left(workflow: Mapping[str, Any]) -> bool:
    """Check whether a Workflow has ended a while ago without its `finish`; MLflow knows nothing of other pipelines' Workflows."""
    status = workflow.get("status") or {}
    if not status.get("finishedAt"):
        return False
    since_s = (datetime.now(UTC) - datetime.fromisoformat(status["finishedAt"])).total_seconds()
    if not LEFT_AFTER_S <= since_s <= LEFT_FOR_S:
        return False
    for node in (status.get("nodes") or {}).values():
        steps = {step.partition("(")[0] for step in node["name"].split(".")}
        # The pod of `finish` that did its work: `....onExit(0).finish(0).executor(0)`.
        if node["type"] == "Pod" and node["phase"] == "Succeeded" and "finish" in steps:
            return False
    return True
