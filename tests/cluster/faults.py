"""What goes wrong on a cluster, made to go wrong: processes are killed, pods deleted and evicted, servers away, controllers restarted."""

from __future__ import annotations

import contextlib
import json
import secrets
import subprocess
import threading
import time
from collections.abc import Callable, Iterator

from tests.cluster.conftest import Run, eventually, kubectl, objects
from tests.cluster.progress import Seen, steps

AWAY_S = 120.0
"""How long a server is away."""
KILL = """
import os, pathlib, signal
for process in pathlib.Path("/proc").glob("[0-9]*"):
    if process.name not in {"1", str(os.getpid())}:
        os.kill(int(process.name), signal.SIGKILL)
"""
"""Kills a container's processes but the first, which the kernel protects from those inside: exit code 137, as after an OOM kill."""
FILL = """
import os, time
for _ in range(1024):
    if os.fork() == 0:
        held = bytearray(16 << 20)
        held[::4096] = bytes([1]) * (len(held) // 4096)  # touched, or it takes no memory
        time.sleep(60)
        os._exit(0)
time.sleep(60)
"""
"""Fills a container's memory up to its limit with processes that are each smaller than the task. The kernel kills the largest first."""


def execute(pod, container, script):
    """Run Python code in a pod's container, which it may not survive."""
    where = ["--namespace", pod["metadata"]["namespace"], pod["metadata"]["name"], "--container", container]
    command = ["kubectl", "exec", *where, "--", "python", "-c", script]
    subprocess.run(command, capture_output=True, check=False, timeout=120)


# ---------------------------------------------------------------------------------------------------------------------
# Faults: each strikes a run's stage that is training, and returns when it is over


def kill_the_master(run: Run, stage: str) -> None:
    """All of its processes, as the kernel does when memory runs out."""
    execute(run.pods(stage, "master")[0], "pytorch", KILL)


def kill_a_worker(run: Run, stage: str) -> None:
    """The same for another pod of the job."""
    execute(run.pods(stage, "worker")[0], "pytorch", KILL)


def fill_the_task(run: Run, stage: str) -> None:
    """The pod that follows the job, not one of the job's: the kernel kills it when its memory is full, and another one follows."""
    before = run.task_pods(stage)
    execute(before[-1], "main", FILL)

    def followed():
        *_, pod = run.task_pods(stage)
        if pod["metadata"]["uid"] == before[-1]["metadata"]["uid"]:
            return False
        log = kubectl("logs", pod["metadata"]["name"], "--container=main", check=False)
        if "following it" in log or pod["status"]["phase"] in {"Succeeded", "Failed"}:
            return True
        conditions = [one for job in run.jobs(stage) for one in job["status"].get("conditions", ())]
        ended = any(one["type"] == "Succeeded" and one["status"] == "True" for one in conditions)
        assert not ended, f"{stage} ended before its task was there again; take a longer training (EPOCHS)"
        return False

    eventually(followed, seconds=180, what="the task's next pod follows the job")


def delete_the_master(run: Run, stage: str) -> None:
    """As somebody does with kubectl."""
    kubectl("delete", "pod", run.pods(stage, "master")[0]["metadata"]["name"], "--wait=false")


def delete_a_worker(run: Run, stage: str) -> None:
    """The same for another pod of the job."""
    kubectl("delete", "pod", run.pods(stage, "worker")[0]["metadata"]["name"], "--wait=false")


def evict(run: Run, stage: str) -> None:
    """Taint the master's node so that nothing of this run may stay there; all else on it bears the taint."""
    (master,) = run.pods(stage, "master")
    node, key = master["spec"]["nodeName"], f"vit-distillation/test-{secrets.token_hex(4)}"
    ours = f"vit-distillation/run={run.id}"
    evicted = {pod["metadata"]["uid"] for pod in objects("pods", ours) if pod["spec"].get("nodeName") == node}
    toleration = {"key": key, "operator": "Exists", "effect": "NoExecute"}
    living = "status.phase!=Succeeded,status.phase!=Failed"
    listed = kubectl("get", "pods", "--all-namespaces", "--field-selector", living, "--output", "json")
    for pod in json.loads(listed)["items"]:
        if pod["spec"].get("nodeName") == node and pod["metadata"]["uid"] not in evicted:
            change = {"spec": {"tolerations": [*pod["spec"].get("tolerations", []), toleration]}}
            where = ["--namespace", pod["metadata"]["namespace"], pod["metadata"]["name"]]
            # One that has ended meanwhile needs none.
            kubectl("patch", "pod", *where, "--type=merge", "--patch", json.dumps(change), check=False)
    kubectl("taint", "node", node, f"{key}=gone:NoExecute")
    try:
        eventually(
            lambda: not evicted & {pod["metadata"]["uid"] for pod in objects("pods", ours)},
            seconds=120,
            what=f"the run's pods have left {node}",
        )
    finally:
        kubectl("taint", "node", node, f"{key}-")


def mlflow_away(run: Run, stage: str) -> None:
    """Two minutes without the tracking server."""
    with away("mlflow"):
        time.sleep(AWAY_S)


def store_away(run: Run, stage: str) -> None:
    """Two minutes without the object store."""
    with away("seaweedfs"):
        time.sleep(AWAY_S)


def restart_controllers(run: Run, stage: str) -> None:
    """Argo's, the training operator, and KFP's API server, all at once."""
    for name in ("workflow-controller", "training-operator", "ml-pipeline"):
        kubectl("rollout", "restart", f"deployment/{name}")
    for name in ("workflow-controller", "training-operator", "ml-pipeline"):
        kubectl("rollout", "status", f"deployment/{name}", "--timeout=180s")


FAULTS: dict[str, Callable[[Run, str], None]] = {
    "master killed": kill_the_master,
    "worker killed": kill_a_worker,
    "task out of memory": fill_the_task,
    "master deleted": delete_the_master,
    "worker deleted": delete_a_worker,
    "node tainted": evict,
    "MLflow away": mlflow_away,
    "store away": store_away,
    "controllers restarted": restart_controllers,
}
STOP_TRAINING = {"master killed", "worker killed", "master deleted", "worker deleted", "node tainted"}
"""Those after which a training begins again at a checkpoint; the others let it go on."""


@contextlib.contextmanager
def away(service: str) -> Iterator[None]:
    """Cut a service off: new connections are refused at once, as when its pod is gone."""
    found = json.loads(kubectl("get", "service", service, "--output", "json"))
    if selector := found["spec"].get("selector"):
        kubectl("patch", "service", service, "--patch", json.dumps({"spec": {"selector": {"away": "now"}}}))
        back = {"spec": {"selector": {**selector, "away": None}}}
        try:
            yield
        finally:
            kubectl("patch", "service", service, "--patch", json.dumps(back))
        return
    # It is outside of the cluster, and its addresses are kept by hand.
    subsets = json.loads(kubectl("get", "endpoints", service, "--output", "json"))["subsets"]
    kubectl("patch", "endpoints", service, "--type=merge", "--patch", json.dumps({"subsets": []}))
    try:
        yield
    finally:
        kubectl("patch", "endpoints", service, "--type=merge", "--patch", json.dumps({"subsets": subsets}))


# ---------------------------------------------------------------------------------------------------------------------
# What then is to be seen


class Watch:
    """Reads how far a stage is, as its first pod says it, until the stage has ended. Lines of pods that are gone stay read."""

    EVERY_S = 4.0

    def __init__(self, run: Run, stage: str) -> None:
        self._run, self._stage = run, stage
        self._seen: dict[float, Seen] = {}
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._read, daemon=True)

    def __enter__(self) -> Watch:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()

    @property
    def lines(self) -> list[Seen]:
        """In the order of their time."""
        return [self._seen[at] for at in sorted(self._seen)]

    def _read(self) -> None:
        while not self._over.wait(self.EVERY_S):
            try:
                pods = self._run.pods(self._stage, "master")
            except (AssertionError, subprocess.TimeoutExpired):  # the API server is away; the next look has the lines
                continue
            for pod in pods:
                where = [pod["metadata"]["name"], "--container=pytorch", "--timestamps", "--tail=100"]
                for line in steps(kubectl("logs", *where, check=False)):
                    self._seen[line.at] = line


def registered(mlflow: Callable[..., dict], run: Run) -> list[str]:
    """The fingerprints of the students that a run has registered; one, unless something is wrong.

    Args:
        mlflow: asks MLflow's REST API.
        run: the run.
    """
    experiments = [one["experiment_id"] for one in mlflow("experiments/search", max_results=1000)["experiments"]]
    found = mlflow("runs/search", experiment_ids=experiments, filter=f"tags.`trainer.run` = '{run.id}'").get("runs", [])
    ids = {one["info"]["run_id"] for one in found}
    versions = mlflow("model-versions/search?max_results=200&order_by=creation_timestamp%20DESC")["model_versions"]
    tags = [{tag["key"]: tag["value"] for tag in one["tags"]} for one in versions if one["run_id"] in ids]
    return [one["student_fingerprint"] for one in tags]
