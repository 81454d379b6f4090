"""Tests on a real cluster.

`make kind-up image kind-load`, `make image kind-load TARGET=serving`, `make test-kind`; or `make test-kind CONTEXT=name`, if one is there.
"""

import contextlib
import fcntl
import json
import os
import re
import secrets
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from pathlib import Path

import pytest

from components.launch import SERVING_IMAGE

CONTEXT = os.environ.get("TRAINER_TEST_CLUSTER", "")
"""The kubeconfig's context to test on; it is named, so that no test reaches a cluster that somebody works on."""
NAMESPACE = "kubeflow"
SERVING = os.environ.get("TRAINER_SERVING_IMAGE", SERVING_IMAGE)
"""The image of the student's server."""
POOLS = "vit-distillation-pools"
"""The ConfigMap that tasks read their node pools from."""
NODE = "workflows.argoproj.io/node-name"
"""Annotation of Argo's pods: their place in the graph, `distillation-x(0).root(0).exit-handler-1(0).pretrain(0).executor(0)`."""
SHORT = "pretrain.mae.epochs=1 pretrain.finetune.epochs=2 distill.epochs=2"
"""Settings with which the recipe `digits` trains for seconds."""
LONG = (
    f"pretrain.mae.epochs=1 pretrain.finetune.epochs=2 distill.epochs={os.environ.get('TRAINER_TEST_EPOCHS', '1000')}"
)
"""Those with which its distillation takes so long that it can be disturbed: the longest row of faults took four minutes. 1,000 epochs took
four minutes on the two cores of one machine, and twelve on those of another."""


def pytest_collection_modifyitems(items):
    """Collect the tests that need a cluster, and report them as not run where none is named."""
    if CONTEXT:
        return
    for item in items:
        if item.get_closest_marker("cluster"):
            item.add_marker(
                pytest.mark.skip(
                    reason="needs a cluster: make kind-up image kind-load, the same with TARGET=serving, make test-kind"
                )
            )


@contextlib.contextmanager
def context(name):
    """Let everything that is started read a kubeconfig with the named context alone."""
    command = ["kubectl", "config", "view", "--minify", "--flatten", "--raw", "--context", name]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    if result.returncode:
        raise SystemExit(f"{name} is no context of your kubeconfig: {result.stderr.strip()}")
    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        file = Path(folder) / "config"
        file.touch(mode=0o600)
        file.write_text(result.stdout)
        patch.setenv("KUBECONFIG", str(file))
        yield


@pytest.fixture(scope="session", autouse=True)
def kubeconfig():
    """As `context`, for the one that the tests are given. Only if a test runs."""
    with contextlib.ExitStack() as stack:
        try:
            stack.enter_context(context(CONTEXT))
        except SystemExit as error:
            pytest.exit(f"TRAINER_TEST_CLUSTER={error}", returncode=2)
        yield


@pytest.fixture(autouse=True)
def shared_services(request, tmp_path_factory):
    """Let a test that takes a service away from everybody (`alone`) begin when all others have ended, and others when it has.

    The second lock is a turnstile: without it the workers' tests, one after the other, would keep the waiting one out. Time limits of
    tests are `func_only`, since waiting here is not theirs.
    """
    is_alone = request.node.get_closest_marker("alone") is not None
    kind = fcntl.LOCK_EX if is_alone else fcntl.LOCK_SH
    folder = tmp_path_factory.getbasetemp().parent  # of all workers
    with (folder / "turnstile").open("a") as turnstile, (folder / "services").open("a") as services:
        fcntl.flock(turnstile, kind)
        fcntl.flock(services, kind)
        if not is_alone:
            fcntl.flock(turnstile, fcntl.LOCK_UN)
        yield


def kubectl(*arguments, check=True, text=None):
    """Standard output of a kubectl command in our namespace; with `check=False` both outputs of one that may fail."""
    command = ["kubectl", "--namespace", NAMESPACE, *arguments]
    result = subprocess.run(command, capture_output=True, text=True, check=False, input=text, timeout=300)
    assert not check or result.returncode == 0, result.stderr
    return result.stdout if check else result.stdout + result.stderr


def objects(kind, selector="", *, namespace=NAMESPACE):
    found = kubectl("get", kind, "--namespace", namespace, "--selector", selector, "--output", "json")
    return json.loads(found)["items"]


def installed(kind):
    """Whether the cluster knows a kind of object: its plural with its group."""
    if kind.partition(".")[2] in ("batch", "apps"):  # Kubernetes' own
        return True
    return bool(kubectl("get", "crd", kind, "--ignore-not-found", "--output", "name"))


def eventually(condition, *, seconds, what):
    """Wait until a condition gives something true, and give that. One that can no longer come true raises an error itself."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if found := condition():
            return found
        time.sleep(2)
    raise AssertionError(f"not within {seconds} s: {what}")


class Run:
    """A run of the pipeline, as `python -m pipelines.deploy` reported it."""

    def __init__(self, result):
        self.exit_code, self.output = result.returncode, result.stdout + result.stderr
        found = re.search(r"runs/details/([0-9a-f-]{36})", self.output)
        assert found, self.output
        self.id = found[1]

    def jobs(self, stage=""):
        """The run's training jobs; of a stage."""
        task = f",vit-distillation/stage={stage}" if stage else ""
        return objects("pytorchjobs", f"vit-distillation/run={self.id}{task}")

    def pods(self, stage, role):
        """The pods of a stage's job: `master` or `worker`."""
        stage = f"vit-distillation/run={self.id},vit-distillation/stage={stage}"
        return objects("pods", f"{stage},training.kubeflow.org/replica-type={role}")

    def task_pods(self, stage):
        """The pods of the task itself that launches a stage, of each try, in the order of their start."""
        found = [
            pod
            for pod in objects("pods", f"pipeline/runid={self.id}")
            if re.search(rf"\.{stage}(\(\d\))?\.executor\b", pod["metadata"]["annotations"].get(NODE, ""))
        ]
        return sorted(found, key=lambda pod: pod["metadata"]["creationTimestamp"])

    def wait(self, hours=1.0):
        """Follow the run to its end; gives how it ended."""
        command = [sys.executable, "-m", "pipelines.runs", "follow", self.id, "--hours", str(hours)]
        result = subprocess.run(command, capture_output=True, text=True, check=False, timeout=3700 * hours)
        self.exit_code, self.output = result.returncode, self.output + result.stdout + result.stderr
        return self

    def stop(self):
        """Ask for its end, as the button in KFP's UI does."""
        subprocess.run([sys.executable, "-m", "pipelines.runs", "stop", self.id], check=True, timeout=120)

    def phase(self):
        """Argo's word for how the run's Workflow stands."""
        (workflow,) = objects("workflows", f"pipeline/runid={self.id}")
        return workflow.get("status", {}).get("phase", "Pending")

    def logs(self):
        """What the tasks' own pods said, all of them."""
        return kubectl(
            "logs", "--selector", f"pipeline/runid={self.id}", "--container", "main", "--tail=-1", check=False
        )


def deploy(settings, *, wait, pool="cpu", further=()):
    """Deploy the pipeline and run it on two nodes of a pool with a process each."""
    command = [sys.executable, "-m", "pipelines.deploy", "--run", "--namespace", NAMESPACE, *image(), *further]
    command += ["--pool", pool, "--nodes", "2", "--processes", "1", "--set", settings]
    command += ["--wait", "--hours", "1"] if wait else []
    with tempfile.TemporaryDirectory() as folder:
        there = Path(folder) / "pools.toml"
        there.write_text(kubectl("get", "configmap", POOLS, "--output", r"jsonpath={.data.pools\.toml}"))
        environment = os.environ | {"TRAINER_POOLS": str(there)}
        return Run(subprocess.run(command, capture_output=True, text=True, check=False, env=environment, timeout=4000))


@contextlib.contextmanager
def pool(**fields):
    """Add a pool to those that the cluster knows, like `cpu` except for these fields and for one core a pod; gives its name."""
    name = f"test-{secrets.token_hex(4)}"
    # Threads of several pods that wait for one another on few cores cost more than they give.
    own = {**fields, "resources.cpu": 1}
    lines = [f"[pools.{name}]", 'based_on = "cpu"', *(f"{key} = {json.dumps(value)}" for key, value in own.items()), ""]
    table = "\n".join(lines)

    def change(edit):
        """Another test may do the same now: the API server refuses to replace what has changed meanwhile."""

        def replaced():
            found = json.loads(kubectl("get", "configmap", POOLS, "--output", "json"))
            found["data"]["pools.toml"] = edit(found["data"]["pools.toml"])
            return "replaced" in kubectl("replace", "--filename=-", text=json.dumps(found), check=False)

        eventually(replaced, seconds=30, what=f"the ConfigMap {POOLS} is written")

    change(lambda text: f"{text.rstrip()}\n\n{table}")
    try:
        yield name
    finally:
        change(lambda text: text.replace(table, "").rstrip() + "\n")


def image():
    """The arguments that name the image under test."""
    return ["--image", os.environ["TRAINER_IMAGE"]] if "TRAINER_IMAGE" in os.environ else []


@pytest.fixture
def uncached():
    """A setting for which no earlier run, of this session or another, has left a training in KFP's cache."""
    return f"run.seed={secrets.randbelow(2**31)}"


@pytest.fixture
def run_pipeline():
    """Deploy the pipeline and run it on two nodes of a pool with a process each. What a test leaves running is stopped."""
    started = []

    def run(settings="", *, wait=True, length=SHORT, pool="cpu", further=()):
        started.append(deploy(f"{length} {settings}", wait=wait, pool=pool, further=further))
        return started[-1]

    yield run
    for one in started:
        if one.phase() in {"Pending", "Running"}:
            one.stop()


@pytest.fixture
def mlflow():
    """Ask MLflow's REST API: a path, and what to send if anything."""
    return ask_mlflow


def ask_mlflow(path, **body):
    """What MLflow's REST API answers. A connection of its own each time: MLflow may have been away since the last."""
    with forwarded("mlflow", 5000) as port:
        request = urllib.request.Request(
            f"http://localhost:{port}/api/2.0/mlflow/{path}",
            data=json.dumps(body).encode() if body else None,
            headers={"Content-Type": "application/json"},
        )
        with urllib.request.urlopen(request, timeout=60) as answer:
            return json.load(answer)


@contextlib.contextmanager
def forwarded(service, port):
    """A port of this machine that leads to a service. kubectl gives up when a connection breaks, and is started again."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        here = free.getsockname()[1]
    again = f"while :; do kubectl --namespace {NAMESPACE} port-forward service/{service} {here}:{port}; sleep 0.2; done"
    with subprocess.Popen(["bash", "-c", again], stdout=subprocess.PIPE, text=True, start_new_session=True) as process:
        try:
            assert "Forwarding" in process.stdout.readline()
            yield here
        finally:
            os.killpg(process.pid, signal.SIGTERM)
