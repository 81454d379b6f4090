"""What the failed tasks of a run said last, as Kubeflow Pipelines keeps it.

A task writes its message where Kubernetes takes it for the pod's termination message, Argo puts that into the Workflow, and KFP keeps the
Workflow as it was when the run ended. The details of a run in KFP's v2 API have states without messages, so this asks the v1 API, which
KFP 2.17 serves beside it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Mapping
from typing import Any

from pipelines.connection import Api

OF_A_TASK = re.compile(r"\b(?:error|for now): (.*)", re.DOTALL)
"""What a task of ours says last, within what Argo and Kubernetes say around it."""


def of_run(api: Api, run_id: str, tasks: Collection[str]) -> dict[str, str]:
    """Task -> what its last pod that failed said, or what Kubernetes said of that; of tasks with such a pod.

    Args:
        api: the API.
        run_id: the run.
        tasks: their names.

    Raises:
        DeployError: the API does not answer or refuses.
    """
    detail = api.call_api(
        "/apis/v1beta1/runs/{run_id}",
        "GET",
        path_params={"run_id": run_id},
        response_type="object",
        auth_settings=["Bearer"],
        _return_http_data_only=True,
    )
    manifest = (detail.get("pipeline_runtime") or {}).get("workflow_manifest") or "{}"
    return of_workflow(json.loads(manifest), tasks)


def of_workflow(workflow: Mapping[str, Any], tasks: Collection[str]) -> dict[str, str]:
    """As `of_run`, of an Argo Workflow."""
    nodes = (workflow.get("status") or {}).get("nodes") or {}
    failed = [node for node in nodes.values() if node["type"] == "Pod" and node["phase"] in ("Failed", "Error")]
    words = {}
    for node in sorted(failed, key=lambda node: node.get("startedAt") or ""):
        task = _task(node["name"], tasks)
        if task and node.get("message"):
            words[task] = _words(node["message"])
    return words


def _task(node: str, tasks: Collection[str]) -> str | None:
    """Of a pod's node, `distillation-x7k2p.root.exit-handler-1.pretrain.executor(0)` or, of a task's driver, `....pretrain-driver`."""
    steps = (step.partition("(")[0].removesuffix("-driver") for step in reversed(node.split(".")))
    return next((step for step in steps if step in tasks), None)


def _words(message: str) -> str:
    own = OF_A_TASK.search(message)
    return " ".join((own[1] if own else message).split())
