"""A Kubernetes to test against, without a cluster: API server, training operator, scheduler and kubelet in this process.

    with KubernetesStandIn(tmp_path) as cluster:
        monkeypatch.setenv("KUBECONFIG", str(cluster.kubeconfig))      # the real `kubernetes` client talks to it
        cluster.script("*-worker-0", Script(output=["step 1", 0.5, "step 2"], exit_code=1))
        ...

It starts in some milliseconds, listens on a free port, and leaves no thread and no process behind.

What runs: a pod whose name fits no `script` runs its real command as a local process (`python` is this interpreter, the folder is the
root of the repository). Its emptyDir volumes are folders of its own, and mount paths in arguments and variables are
rewritten to them; /dev/shm and /tmp stay (TMPDIR is its own). Every host is 127.0.0.1, and each job has a free master
port. Its termination message is what it writes to `$TRAINER_TERMINATION_LOG`.

What is refused: what the real server refuses, in its words; `schemas.py` says by what it is judged.

What a test can do: `script`, `uninstall` a CRD, `resume` a job as Kueue does, `oom_kill`, `kill`, `preempt` a pod, `compact` the
history, `expire_watches`, and all of `cluster.faults` (faults.py). What it can look at: `get`, `list`, `events`, `log`,
`conditions`, `wait_for`.

Beware, it is as strict as the real one: an object whose owner is not there (by uid) is collected as garbage, so a job that is owned
by the pod of a task needs that pod (`add_pod`). Pods ask for what nodes have: a test of a GPU pool gives `nodes`.

What it is not: there are no services, init containers, second containers, probes or images; no namespaces but two, no Pod Security, no
quota; lists come in one piece; a strategic merge patch merges as a plain one; back-off is a tenth of a second; JobSets, and the
Jobs of a TrainJob, are not objects; TLS is not spoken, and any token is taken.
"""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from fnmatch import fnmatch
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import yaml

from tests.stand_ins.kubernetes.api import Api
from tests.stand_ins.kubernetes.api_server import ApiServer
from tests.stand_ins.kubernetes.containers import Script
from tests.stand_ins.kubernetes.faults import Faults
from tests.stand_ins.kubernetes.job_controller import JobController
from tests.stand_ins.kubernetes.kubelet import Kubelet
from tests.stand_ins.kubernetes.logs import LogQuery
from tests.stand_ins.kubernetes.operator import TrainingOperator
from tests.stand_ins.kubernetes.resources import EVENTS, JOBS, PODS, PYTORCHJOBS, TRAINJOBS, Resource
from tests.stand_ins.kubernetes.scheduling import Node
from tests.stand_ins.kubernetes.store import Object, Store
from tests.stand_ins.kubernetes.trainer_operator import TrainerOperator

__all__ = ["KubernetesStandIn", "Node", "Script"]

_TICK_S = 0.02


class KubernetesStandIn:
    """A cluster; use it in a `with` block."""

    def __init__(
        self,
        folder: Path,
        *,
        namespace: str = "kubeflow",
        nodes: Sequence[Node] = (Node(),),
        operator: bool = True,
        kubelet: bool = True,
        kueue: bool = False,
    ) -> None:
        """Describe the cluster.

        Args:
            folder: for the kubeconfig and the pods' volumes.
            namespace: the kubeconfig's; `default` exists too.
            nodes: machines to schedule on; the default has no devices.
            operator: whether jobs become pods.
            kubelet: whether pods run.
            kueue: whether a job with the label of a queue begins suspended, until it is resumed.
        """
        self.namespace = namespace
        self.faults = Faults()
        self.store = Store([namespace, "default"])
        self.kubelet = Kubelet(self.store, folder / "pods", nodes)
        self.kubeconfig = folder / "kubeconfig"
        self._api = Api(self.store, self.kubelet, self.faults, kueue=kueue)
        self._syncs = [self.store.collect_garbage]
        if operator:
            controllers = (TrainingOperator, TrainerOperator, JobController)
            self._syncs += [controller(self.store).sync for controller in controllers]
        if kubelet:
            self._syncs.append(self.kubelet.sync)
        self._stopping = threading.Event()
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="controllers")
        self._controlling: Future[None] | None = None
        self._server: ApiServer | None = None

    def __enter__(self) -> Self:
        self._server = ApiServer(self._api)
        self.kubeconfig.parent.mkdir(parents=True, exist_ok=True)
        self.kubeconfig.write_text(yaml.safe_dump(_kubeconfig(self._server.url, self.namespace)))
        self._controlling = self._thread.submit(self._control)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stopping.set()
        self._thread.shutdown()
        self.kubelet.close()
        self.server.close()
        if self._controlling and error is None:
            self._controlling.result()  # an error in operator or kubelet fails the test

    @property
    def server(self) -> ApiServer:
        assert self._server, "use the stand-in in a `with` block"
        return self._server

    @property
    def url(self) -> str:
        return self.server.url

    # What a test arranges

    def script(self, pattern: str, *scripts: Script) -> None:
        """Let pods whose name fits (`job-worker-*`) follow scripts: the nth start of a pod the nth, later ones the last."""
        self.kubelet.script(pattern, *scripts)

    def uninstall(self, plural: str) -> None:
        """From now on the API knows no such kind, as if its CRD were missing."""
        self.server.installed.discard(plural)

    def add(self, resource: Resource, manifest: Mapping[str, Any]) -> Object:
        """Add an object without asking the API server."""
        return self.store.create(resource, self.namespace, manifest)

    def add_pod(self, name: str) -> Object:
        """Add a pod that runs until it is deleted, such as that of a pipeline's task."""
        self.script(name, Script(hang=True))
        container = {"name": "main", "image": "task:1"}
        return self.add(PODS, {"metadata": {"name": name}, "spec": {"containers": [container]}})

    def delete(self, resource: Resource, name: str) -> None:
        """Delete an object, as somebody else with kubectl."""
        self.store.delete(resource, self.namespace, name)

    def resume(self, job: str) -> None:
        """Do what Kueue does when it admits a job."""
        self._set_suspend(job, value=False)

    def kill(self, pod: str, number: int = signal.SIGKILL) -> None:
        """Send a signal to a pod's container."""
        self.kubelet.signal(self.get(PODS, pod), number)

    def oom_kill(self, pod: str) -> None:
        """End a pod's container as the kernel does when its memory limit is passed."""
        self.kubelet.signal(self.get(PODS, pod), signal.SIGKILL, "OOMKilled")

    def preempt(self, pod: str) -> None:
        """Delete a pod as the scheduler does in favor of one with a higher priority."""
        message = "Preempted by pod 0b1d3a52-7ac4-4f2a-9c55-d6c1c1b5e0aa on node stand-in"
        condition = {
            "type": "DisruptionTarget",
            "status": "True",
            "reason": "PreemptionByScheduler",
            "message": "default-scheduler: preempting to accommodate a higher priority pod",
        }
        with self.store.changing(PODS, self.namespace, pod) as preempted:
            preempted["status"].setdefault("conditions", []).append(condition)
        self.store.record_event(self.get(PODS, pod), "Normal", "Preempted", message, "default-scheduler")
        self.delete(PODS, pod)

    def compact(self) -> None:
        """Forget the history: a watch from an older version is answered with 410."""
        self.store.compact()

    def expire_watches(self) -> None:
        """End the open watches with an event ERROR that carries 410."""
        self._api.expiries += 1

    # What a test looks at

    def get(self, resource: Resource, name: str) -> Object:
        """An object.

        Raises:
            ApiError: 404.
        """
        return self.store.get(resource, self.namespace, name)

    def list(self, resource: Resource, pattern: str = "*") -> list[Object]:
        """Objects whose name fits."""
        return [
            item for item in self.store.list(resource, self.namespace) if fnmatch(item["metadata"]["name"], pattern)
        ]

    def events(self, pattern: str = "*") -> Sequence[tuple[str, str, str]]:
        """Object, reason and message of the events about objects whose name fits, in the order of their first occurrence."""
        found = sorted(
            self.store.list(EVENTS, self.namespace), key=lambda event: event["metadata"]["creationTimestamp"]
        )
        return [
            (event["involvedObject"]["name"], event["reason"], event["message"])
            for event in found
            if fnmatch(event["involvedObject"]["name"], pattern)
        ]

    def log(self, pod: str) -> Sequence[str]:
        """The lines that a pod has printed so far."""
        return b"".join(self.kubelet.log(self.get(PODS, pod), LogQuery())).decode().splitlines()

    def conditions(self, job: str) -> dict[str, str]:
        """Type -> status of a job's conditions."""
        conditions = self.get(self._kind_of(job), job).get("status", {}).get("conditions", [])
        return {condition["type"]: condition["status"] for condition in conditions}

    def wait_for(self, condition: Callable[[], bool], timeout_s: float = 60.0) -> None:
        """Wait until a condition holds.

        Raises:
            TimeoutError: it did not in time.
        """
        deadline = time.monotonic() + timeout_s
        while not condition():
            if self._controlling and self._controlling.done():
                self._controlling.result()
            if time.monotonic() > deadline:
                raise TimeoutError(f"did not come true in {timeout_s} s; pods: {_phases(self.list(PODS))}")
            self.store.wait(self.store.version, _TICK_S)

    def _kind_of(self, job: str) -> Resource:
        return next(kind for kind in (PYTORCHJOBS, TRAINJOBS, JOBS) if self.list(kind, job))

    def _set_suspend(self, name: str, *, value: bool) -> None:
        kind = self._kind_of(name)
        with self.store.changing(kind, self.namespace, name) as job:
            target = job["spec"].setdefault("runPolicy", {}) if kind == PYTORCHJOBS else job["spec"]
            target["suspend"] = value

    def _control(self) -> None:
        while not self._stopping.is_set():
            version = self.store.version
            for sync in self._syncs:
                sync()
            self.store.wait(version, _TICK_S)


def _kubeconfig(url: str, namespace: str) -> dict[str, Any]:
    context = {"cluster": "stand-in", "user": "tester", "namespace": namespace}
    return {
        "apiVersion": "v1",
        "kind": "Config",
        "current-context": "stand-in",
        "clusters": [{"name": "stand-in", "cluster": {"server": url}}],
        "users": [{"name": "tester", "user": {"token": "stand-in"}}],
        "contexts": [{"name": "stand-in", "context": context}],
    }


def _phases(pods: Sequence[Mapping[str, Any]]) -> dict[str, str]:
    return {pod["metadata"]["name"]: pod["status"]["phase"] for pod in pods}
