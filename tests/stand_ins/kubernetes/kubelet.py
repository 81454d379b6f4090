"""A small kubelet and scheduler: pods get a node, and their first container runs as a local process or plays a script.

Init containers are taken as done, other containers than the first are not run, probes are not made, and images are not pulled.
A container that fails waits `BACKOFF_S` before it is started again, not ten seconds and more.
"""

from __future__ import annotations

import re
import shutil
import signal
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

from tests.stand_ins.kubernetes import pod_status, scheduling
from tests.stand_ins.kubernetes.containers import Container, End, PlayedContainer, ProcessContainer, Script
from tests.stand_ins.kubernetes.logs import LogQuery
from tests.stand_ins.kubernetes.pod_environment import ConfigError, free_port, prepare
from tests.stand_ins.kubernetes.resources import PODS
from tests.stand_ins.kubernetes.scheduling import Node
from tests.stand_ins.kubernetes.statuses import ApiError, bad_request
from tests.stand_ins.kubernetes.store import Object, Store

BACKOFF_S = 0.1
_DRAWN = re.compile(r"(?<=-\d)-[a-z]{5}$")
_JOB_LABELS = ("training.kubeflow.org/job-name", "jobset.sigs.k8s.io/jobset-name")


@dataclass(kw_only=True)
class _Run:
    """What the kubelet knows of a pod."""

    pod: Object
    script: Script
    folder: Path
    since: float
    """When the present wait began, by the monotonic clock."""
    container: Container | None = None
    previous: Container | None = None
    restarts: int = 0
    killed_at: float | None = None


class Kubelet:
    """Brings pods to life. `sync` is called again and again, by one thread."""

    def __init__(self, store: Store, folder: Path, nodes: Sequence[Node]) -> None:
        self.store, self.folder = store, folder
        self.nodes = list(nodes)
        self._scripts: list[tuple[str, tuple[Script, ...]]] = []
        self._starts: Counter[str] = Counter()
        self._runs: dict[str, _Run] = {}
        self._master_ports: dict[tuple[str, str], int] = {}

    def script(self, pattern: str, *scripts: Script) -> None:
        """The nth start of a pod whose name fits the pattern follows the nth script, later ones the last."""
        if not scripts:
            raise ValueError(f"no script was given for {pattern}")
        self._scripts.insert(0, (pattern, scripts))

    def sync(self) -> None:
        """Take every pod one step further."""
        pods = {pod["metadata"]["uid"]: pod for pod in self.store.list(PODS)}
        for uid in self._runs.keys() - pods.keys():
            self._forget(uid)
        for uid, pod in pods.items():
            if uid not in self._runs:
                script = self._script_of(pod["metadata"]["name"])
                self._runs[uid] = _Run(pod=pod, script=script, folder=self.folder / uid, since=time.monotonic())
            run = self._runs[uid]
            run.pod = pod
            try:
                self._step(run)
            except ApiError as refusal:
                if refusal.code != 404:  # it was deleted meanwhile
                    raise

    def signal(self, pod: Mapping[str, Any], number: int, reason: str = "") -> None:
        """Send a signal to a pod's container."""
        run = self._runs.get(pod["metadata"]["uid"])
        if run is None or run.container is None:
            raise ValueError(f"pod {pod['metadata']['name']} does not run")
        run.container.signal(number, reason)

    def close(self) -> None:
        """Kill everything, and wait until it has ended."""
        for uid in list(self._runs):
            self._forget(uid)

    def log(self, pod: Mapping[str, Any], query: LogQuery) -> Iterator[bytes]:
        """A container's log.

        Raises:
            ApiError: 400, in the kubelet's words: there is no such container, or no log yet.
        """
        name, container = pod["metadata"]["name"], _container_name(pod, query.container)
        run = self._runs.get(pod["metadata"]["uid"])
        if not pod["spec"].get("nodeName") or run is None:
            return iter([b""])  # the real server has no kubelet to ask yet and answers with an empty body
        if query.previous:
            if run.previous is None:
                raise bad_request(f'previous terminated container "{container}" in pod "{name}" not found')
            return run.previous.log.read(query)
        source = run.container or run.previous
        if source is None:
            raise bad_request(f'container "{container}" in pod "{name}" is waiting to start: {_wait_in_words(pod)}')
        return source.log.read(query)

    def _script_of(self, name: str) -> Script:
        for pattern, scripts in self._scripts:
            if fnmatch(name, pattern):
                return scripts[min(self._starts[_of_its_place(name)], len(scripts) - 1)]
        return Script()

    def _step(self, run: _Run) -> None:
        if run.pod["status"]["phase"] in {"Succeeded", "Failed"}:
            self._ensure_ended(run)
        elif "deletionTimestamp" in run.pod["metadata"]:
            self._terminate(run)
        elif not run.pod["spec"].get("nodeName"):
            self._schedule(run)
        elif run.container is None:
            self._start(run)
        elif end := run.container.end():
            self._ended(run, run.container, end)

    def _schedule(self, run: _Run) -> None:
        metadata = run.pod["metadata"]
        others = [
            pod
            for pod in self.store.list(PODS)
            if pod["spec"].get("nodeName") and pod["status"]["phase"] in {"Pending", "Running"}
        ]
        node, message = scheduling.place(run.pod, self.nodes, others)
        if time.monotonic() - run.since < run.script.pending_s:
            node, message = "", f"0/{len(self.nodes)} nodes are available: {len(self.nodes)} Insufficient cpu."
        with self.store.changing(PODS, metadata["namespace"], metadata["name"]) as pod:
            pod["status"] = pod_status.scheduled(pod) if node else pod_status.unschedulable(message)
            if node:
                pod["spec"]["nodeName"] = node
        if node:
            target = f"{metadata['namespace']}/{metadata['name']}"
            self._event(run, "Normal", "Scheduled", f"Successfully assigned {target} to {node}", "default-scheduler")
            run.since = time.monotonic()
        elif _condition(run.pod, "PodScheduled") != message:
            self._event(run, "Warning", "FailedScheduling", message, "default-scheduler")

    def _start(self, run: _Run) -> None:
        waited = time.monotonic() - run.since
        if waited < run.script.pull_error_s:
            self._show_pull_error(run)
        elif waited >= (run.script.creating_s if run.previous is None else BACKOFF_S):
            try:
                run.container = self._container(run)
            except ConfigError as error:
                self._wait(run, "CreateContainerConfigError", str(error), "Failed", f"Error: {error}")
                return
            name = run.pod["spec"]["containers"][0]["name"]
            self._starts[_of_its_place(run.pod["metadata"]["name"])] += 1
            self._event(run, "Normal", "Created", f"Container created: {name}")
            self._event(run, "Normal", "Started", f"Container started: {name}")
            self._show(run, pod_status.running(run.container.started_at), "Running")

    def _container(self, run: _Run) -> Container:
        name = run.pod["metadata"]["name"]
        if run.script.output is not None or run.script.hang:
            return PlayedContainer(run.script, f"pod-{name}")
        run.folder.mkdir(parents=True, exist_ok=True)
        process = prepare(run.pod, self.store, run.folder, self._master_port(run.pod))
        policy = run.pod["spec"]["containers"][0].get("terminationMessagePolicy")
        try:
            return ProcessContainer(
                process.command,
                process.environment,
                process.message_file,
                log_is_message=policy == "FallbackToLogsOnError",
                name=name,
            )
        except OSError as error:
            message = f'failed to create containerd task: exec: "{process.command[0]}": {error.strerror}'
            script = Script(output=[], exit_code=128, reason="StartError", termination_message=message)
            return PlayedContainer(script, f"pod-{name}")

    def _master_port(self, pod: Mapping[str, Any]) -> int:
        metadata = pod["metadata"]
        labels = metadata.get("labels") or {}
        job = next((labels[label] for label in _JOB_LABELS if label in labels), metadata["name"])
        return self._master_ports.setdefault((metadata["namespace"], job), free_port())

    def _ended(self, run: _Run, container: Container, end: End) -> None:
        """The container has ended: start it again or end the pod, as its restart policy says."""
        policy = run.pod["spec"].get("restartPolicy", "Always")
        state = pod_status.terminated(container.id, container.started_at, end)
        if policy == "Never" or (policy == "OnFailure" and end.exit_code == 0):
            self._show(run, state, "Failed" if end.exit_code else "Succeeded")
            return
        run.previous, run.container, run.since = container, None, time.monotonic()
        run.restarts += 1
        run.script = self._script_of(run.pod["metadata"]["name"])
        metadata = run.pod["metadata"]
        name = run.pod["spec"]["containers"][0]["name"]
        where = f"{metadata['name']}_{metadata['namespace']}({metadata['uid']})"
        message = f"back-off 10s restarting failed container={name} pod={where}"
        self._show(run, pod_status.waiting("CrashLoopBackOff", message), "Running", last=state)
        shown = f"Back-off restarting failed container {name} in pod {where}"
        self._event(run, "Warning", "BackOff", shown)

    def _terminate(self, run: _Run) -> None:
        """A deleted pod gets SIGTERM, some time, SIGKILL; then it is gone."""
        metadata = run.pod["metadata"]
        if run.container is None or run.container.end():
            self.store.remove(PODS, metadata["namespace"], metadata["name"])
        elif run.killed_at is None:
            run.killed_at = time.monotonic()
            self._event(run, "Normal", "Killing", f"Stopping container {run.pod['spec']['containers'][0]['name']}")
            run.container.signal(signal.SIGTERM)
        elif time.monotonic() - run.killed_at > metadata["deletionGracePeriodSeconds"]:
            run.container.signal(signal.SIGKILL)

    def _ensure_ended(self, run: _Run) -> None:
        """A pod that was evicted has its phase before its process has ended; one that is deleted after its end may go."""
        if run.container and not run.container.end():
            run.container.signal(signal.SIGKILL)

    def _forget(self, uid: str) -> None:
        run = self._runs.pop(uid)
        if run.container:
            run.container.signal(signal.SIGKILL)
            run.container.join()
        shutil.rmtree(run.folder, ignore_errors=True)

    def _show_pull_error(self, run: _Run) -> None:
        image = run.pod["spec"]["containers"][0]["image"]
        cause = (
            f'Failed to pull image "{image}": rpc error: code = NotFound desc = failed to resolve reference: not found'
        )
        self._event(run, "Warning", "Failed", "Error: ErrImagePull")
        self._event(run, "Warning", "Failed", cause)
        self._wait(
            run, "ImagePullBackOff", f'Back-off pulling image "{image}"', "BackOff", f'Back-off pulling image "{image}"'
        )

    def _wait(self, run: _Run, reason: str, message: str, event: str, event_message: str) -> None:
        """Show why the container has not started; the event is recorded once for each reason."""
        if _waiting_reason(run.pod) != reason:
            self._event(run, "Warning", event, event_message)
        self._show(run, pod_status.waiting(reason, message), "Pending")

    def _show(self, run: _Run, state: Object, phase: str, last: Object | None = None) -> None:
        metadata = run.pod["metadata"]
        with self.store.changing(PODS, metadata["namespace"], metadata["name"]) as pod:
            if pod["status"]["phase"] not in {"Succeeded", "Failed"}:
                pod["status"] = pod_status.with_state(pod, state, phase, last=last, restarts=run.restarts)

    def _event(self, run: _Run, type_: str, reason: str, message: str, component: str = "kubelet") -> None:
        self.store.record_event(run.pod, type_, reason, message, component)


def _container_name(pod: Mapping[str, Any], asked: str) -> str:
    names = [container["name"] for container in pod["spec"]["containers"]]
    if not asked and len(names) > 1:
        raise bad_request(
            f"a container name must be specified for pod {pod['metadata']['name']}, choose one of: [{' '.join(names)}]"
        )
    if asked and asked not in names:
        raise bad_request(f"container {asked} is not valid for pod {pod['metadata']['name']}")
    return asked or names[0]


def _waiting_reason(pod: Mapping[str, Any]) -> str:
    statuses = pod["status"].get("containerStatuses") or [{}]
    reason: str = statuses[0].get("state", {}).get("waiting", {}).get("reason", "ContainerCreating")
    return reason


def _wait_in_words(pod: Mapping[str, Any]) -> str:
    reason = _waiting_reason(pod)
    return "trying and failing to pull image" if reason == "ImagePullBackOff" else reason


def _condition(pod: Mapping[str, Any], type_: str) -> str:
    conditions = pod["status"].get("conditions") or []
    return next((one.get("message", "") for one in conditions if one["type"] == type_), "")


def _of_its_place(pod: str) -> str:
    """What pods that follow one another have in common: the name, of a Job's without the letters that are drawn for each."""
    return _DRAWN.sub("", pod)
