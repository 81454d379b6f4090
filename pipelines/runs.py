"""Runs on Kubeflow Pipelines: start one, follow it to its end, stop it.

  python -m pipelines.runs follow RUN_ID        its tasks' states as they change; the exit code tells how it ended
  python -m pipelines.runs stop RUN_ID          end it, and with it its training jobs

RUN_ID stands in the link to the run.
"""

from __future__ import annotations

import argparse
import datetime
import json
import logging
import re
import sys
import time
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import kfp_server_api

from components import kfp_components
from pipelines import connection
from pipelines.compile import COMPILED, task_names
from pipelines.connection import BAD_REQUEST, NOT_FOUND, Api, RefusedError, UnansweredError, every, named
from trainer.io import commands
from trainer.io.errors import DeployError
from trainer.io.retry import Outage

logger = logging.getLogger(__name__)

ENDED = ("SUCCEEDED", "FAILED", "CANCELED", "SKIPPED")
INTERVALS_S = (0.2, 5.0)  # between two looks at a run: at first, and after a while
AWAY_S = 300.0  # how long the API may be away before we stop to follow a run
DEFAULT_HOURS = 168.0
OF_A_TASK = re.compile(r"\b(?:error|for now): (.*)", re.DOTALL)
"""What a task of ours says last, within what Argo and Kubernetes say around it."""


def experiment(api: Api, name: str) -> str:
    """Return the id of an experiment, which is made where it is missing."""
    listed = every(
        api.experiments.experiment_service_list_experiments, "experiments", filter=named(name), **api.in_namespace
    )
    found = next(listed, None) or api.experiments.experiment_service_create_experiment(
        kfp_server_api.V2beta1Experiment(display_name=name, **api.in_namespace)
    )
    return str(found.experiment_id)


def name_of(recipe: str) -> str:
    """Make a run's name, by which it is found again: `digits 2026-01-31 12:00:00 UTC`."""
    return f"{recipe} {datetime.datetime.now(datetime.UTC):%Y-%m-%d %H:%M:%S} UTC"


def request(
    version: Any, experiment_id: str, service_account: str, parameters: Mapping[str, str | int]
) -> dict[str, Any]:
    """Return KFP's fields that start a run or a schedule of a pipeline's version."""
    return {
        "experiment_id": experiment_id,
        "pipeline_version_reference": kfp_server_api.V2beta1PipelineVersionReference(
            pipeline_id=version.pipeline_id, pipeline_version_id=version.pipeline_version_id
        ),
        "runtime_config": kfp_server_api.V2beta1RuntimeConfig(parameters=dict(parameters)),
        "service_account": service_account,
    }


def start(api: Api, name: str, fields: Mapping[str, Any], description: str = "") -> Any:
    """Start a run and say where it is seen; `fields` are those of `request`.

    A `DeployError` if the API refuses; or if its answer was lost and no run of this name is there.
    """
    wanted = kfp_server_api.V2beta1Run(display_name=name, description=description, **fields)
    try:
        run = api.runs.run_service_create_run(wanted)
    except UnansweredError as error:
        listed = every(
            api.runs.run_service_list_runs, "runs", experiment_id=fields["experiment_id"], filter=named(name)
        )
        try:
            run = next(listed, None)
        except UnansweredError:
            raise DeployError(
                f"{error}; whether run {name!r} was started is not known: look before you start another"
            ) from error
        if run is None:
            raise DeployError(f"{error}; run {name!r} is not there; look once more before you start another") from error
        print(f"note: the answer to the start was lost, but the run is there ({error})")
    print(f"run {name}: {api.link(f'runs/details/{run.run_id}')}", flush=True)
    return run


def follow(api: Api, run_id: str, tasks: Collection[str], *, hours: float = DEFAULT_HOURS) -> None:
    """Wait for a run's end and print the states of these tasks as they change; KFP has others of its own.

    Raises:
        DeployError: the run did not succeed, with KFP's words on each failed task; or the wait became too long.
        KeyboardInterrupt: the wait was broken off, after a hint on how to stop the run.
    """
    try:
        run = _RunFollower(api, run_id, tasks).wait(hours)
    except KeyboardInterrupt:
        print(
            f"\nthe run continues. Stop it: python -m pipelines.runs stop {run_id}    "
            f"follow it again: python -m pipelines.runs follow {run_id}",
            file=sys.stderr,
        )
        raise
    if run.state != "SUCCEEDED":
        raise DeployError(_failure(api, run, tasks))


class _RunFollower:
    def __init__(self, api: Api, run_id: str, tasks: Collection[str]) -> None:
        self._api, self._run_id, self._tasks = api, run_id, tasks
        self._states: dict[str, str] = {}
        self._start, self._outage = time.monotonic(), Outage("Kubeflow Pipelines", logger)

    def wait(self, hours: float) -> Any:
        interval, longest = INTERVALS_S
        while True:
            run = self._look()
            if run is not None:
                for name, state in {**_states(run, self._tasks), "run": run.state}.items():
                    self._tell(name, (state or "PENDING").lower())
                if run.state in ENDED:
                    return run
            if time.monotonic() - self._start > hours * 3600:
                raise self._given_up(f"run {self._run_id} has not ended within {hours:g} hours")
            time.sleep(interval)
            interval = min(1.3 * interval, longest)

    def _look(self) -> Any | None:
        """Return the run, or None while the API is away."""
        try:
            run = self._api.runs.run_service_get_run(self._run_id)
        except UnansweredError as error:
            if self._outage.failed(f"{error}; asking again") > AWAY_S:
                raise self._given_up(f"{error}; so for {AWAY_S:.0f} s") from error
            return None
        except RefusedError as error:
            if error.status == NOT_FOUND:
                raise
            raise self._given_up(str(error)) from error  # such as a token that has expired
        self._outage.ended()
        return run

    def _given_up(self, why: str) -> DeployError:
        return DeployError(f"{why}; the run continues, follow it again: python -m pipelines.runs follow {self._run_id}")

    def _tell(self, name: str, state: str) -> None:
        if self._states.get(name) != state:
            self._states[name] = state
            elapsed = datetime.timedelta(seconds=int(time.monotonic() - self._start))
            print(f"[{elapsed}] {name}: {state}", flush=True)


def _states(run: Any, tasks: Collection[str]) -> dict[str, str | None]:
    """Return the state of each task; of one that a loop runs several times the number of each state, or FAILED where one has failed."""
    listed = (run.run_details and run.run_details.task_details) or []
    found: dict[str, list[str | None]] = {}
    for task in listed:
        if task.display_name in tasks:
            found.setdefault(task.display_name, []).append(task.state)
    return {name: states[0] if len(states) == 1 else _of_several(states) for name, states in found.items()}


def _of_several(states: Sequence[str | None]) -> str:
    counts = Counter(state or "PENDING" for state in states)
    if "FAILED" in counts:
        return "FAILED"
    (most, _), *others = counts.most_common()
    return ", ".join(f"{count} {state}" for state, count in sorted(counts.items())) if others else most


def _failure(api: Api, run: Any, tasks: Collection[str]) -> str:
    """Say how a run ended, and what its failed tasks said last, as Kubeflow Pipelines keeps it.

    A task writes its message where Kubernetes takes it for the pod's termination message, Argo puts that into the Workflow, and KFP keeps
    the Workflow as it was when the run ended. The details of a run in KFP's v2 API have states without messages, so this asks the v1 API,
    which KFP 2.17 serves beside it.
    """
    states = _states(run, tasks)
    words: dict[str, str] = {}
    try:
        detail = api.call_api(
            "/apis/v1beta1/runs/{run_id}",
            "GET",
            path_params={"run_id": run.run_id},
            response_type="object",
            auth_settings=["Bearer"],
            _return_http_data_only=True,
        )
        manifest = (detail.get("pipeline_runtime") or {}).get("workflow_manifest") or "{}"
        said = last_words(json.loads(manifest), tasks)
        words = {name: text for name, text in said.items() if states.get(name) != "SUCCEEDED"}
    except DeployError as error:
        print(f"note: what the tasks said last is not known: {error}", file=sys.stderr)
    failed = [name for name in states if states[name] in ("FAILED", "CANCELED")]
    reasons = [
        f"{name} {(states.get(name) or 'FAILED').lower()}{f': {words[name]}' if name in words else ''}"
        for name in dict.fromkeys([*failed, *words])
    ]
    # KFP puts the message of a run beside its state or into its history, or says nothing.
    errors = [run.error, *(status.error for status in reversed(run.state_history or []))]
    message = " ".join(next((error.message for error in errors if error and error.message), "").split())
    return (
        f"run {run.display_name} ended as {run.state}{f': {message}' if message else ''}"
        + "".join(f"\n  {reason}" for reason in reasons)
        + f"\n  look at {api.link(f'runs/details/{run.run_id}')}"
        + f"\n  or read: kubectl logs --namespace {api.pods_namespace} --selector pipeline/runid={run.run_id} --container main "
        "--prefix --tail 30"
    )


def last_words(workflow: Mapping[str, Any], tasks: Collection[str]) -> dict[str, str]:
    """Return task -> what its last pod that failed said, or what Kubernetes said of that; of tasks with such a pod in Argo's Workflow."""
    nodes = (workflow.get("status") or {}).get("nodes") or {}
    failed = [node for node in nodes.values() if node["type"] == "Pod" and node["phase"] in ("Failed", "Error")]
    words = {}
    for node in sorted(failed, key=lambda node: node.get("startedAt") or ""):
        # `distillation-x7k2p.root.exit-handler-1.pretrain.executor(0)` or, of a task's driver, `....pretrain-driver`
        steps = (step.partition("(")[0].removesuffix("-driver") for step in reversed(node["name"].split(".")))
        task = next((step for step in steps if step in tasks), None)
        if task and node.get("message"):
            own = OF_A_TASK.search(node["message"])
            words[task] = " ".join((own[1] if own else node["message"]).split())
    return words


def stop(api: Api, run_id: str) -> None:
    """Ask for a run's end; one that has ended, or is about to, needs no asking."""
    try:
        api.runs.run_service_terminate_run(run_id)
    except RefusedError as error:
        state = api.runs.run_service_get_run(run_id).state if error.status == BAD_REQUEST else ""
        if state not in (*ENDED, "CANCELING"):
            raise
        print(f"run {run_id} is {state.lower()}; there is nothing to stop")
        return
    print(f"run {run_id} was asked to end; its exit task deletes its jobs, or the reaper does within five minutes")


def main(arguments: Sequence[str] | None = None) -> int:
    """Follow or stop a run; gives the exit code."""
    parser = commands.module_parser("pipelines.runs", __doc__)
    parser.add_argument("action", choices=["follow", "stop"])
    parser.add_argument("run_id", metavar="RUN_ID", help="as in the link to the run")
    add_wait(parser)
    connection.add_arguments(parser)
    options = parser.parse_args(arguments)

    def act() -> None:
        with connection.connect(options) as api:
            try:
                if options.action == "stop":
                    stop(api, options.run_id)
                else:
                    tasks = {*task_names(COMPILED.read_text(encoding="utf-8")), kfp_components.predict_photos.name}
                    follow(api, options.run_id, tasks, hours=options.hours)
            except RefusedError as error:
                if error.status != NOT_FOUND:
                    raise
                raise DeployError(
                    f"there is no run {options.run_id} at {api.place.address}; its id stands in the link to it"
                ) from error

    return commands.exit_code(act)


def add_wait(parser: argparse._ActionsContainer) -> None:
    """Add the option that limits a wait."""
    parser.add_argument(
        "--hours", type=float, default=DEFAULT_HOURS, help="how long to wait for the run's end (default: %(default)g)"
    )


if __name__ == "__main__":
    sys.exit(main())
