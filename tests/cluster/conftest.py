"""Tests on a real cluster: `make kind-up image kind-load test-kind`. Not run yet: there was none where they were written."""

import contextlib
import json
import os
import re
import subprocess
import sys
import time

import pytest

CONTEXT = os.environ.get("TRAINER_TEST_CLUSTER", "")
"""The kubeconfig's context to test on; it is named, so that no test reaches a cluster that somebody works on."""
NAMESPACE = "kubeflow"
SHORT = "pretrain.mae.epochs=1 pretrain.finetune.epochs=2 distill.epochs=2"
"""Settings with which the recipe `digits` trains for seconds."""


def pytest_collection_modifyitems(items):
    """Collect the tests that need a cluster, and report them as not run where none is named."""
    if CONTEXT:
        return
    for item in items:
        if item.get_closest_marker("cluster"):
            item.add_marker(pytest.mark.skip(reason="needs a cluster: make kind-up image kind-load test-kind"))


@pytest.fixture(scope="session", autouse=True)
def kubeconfig(tmp_path_factory):
    """A kubeconfig with the named context alone, for everything that the tests start. Made only if a test runs."""
    file = tmp_path_factory.mktemp("kubeconfig") / "config"
    command = ["kubectl", "config", "view", "--minify", "--flatten", "--raw", "--context", CONTEXT]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    if result.returncode:
        pytest.exit(
            f"TRAINER_TEST_CLUSTER={CONTEXT} is no context of your kubeconfig: {result.stderr.strip()}", returncode=2
        )
    file.touch(mode=0o600)
    file.write_text(result.stdout)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("KUBECONFIG", str(file))
        yield file


def kubectl(*arguments, check=True, text=None):
    """Standard output of a kubectl command in our namespace; with `check=False` both outputs of one that may fail."""
    command = ["kubectl", "--namespace", NAMESPACE, *arguments]
    result = subprocess.run(command, capture_output=True, text=True, check=False, input=text, timeout=300)
    assert not check or result.returncode == 0, result.stderr
    return result.stdout if check else result.stdout + result.stderr


def objects(kind, selector=""):
    """Objects of a kind, by their labels."""
    return json.loads(kubectl("get", kind, "--selector", selector, "--output", "json"))["items"]


def eventually(condition, *, seconds, what):
    """Wait until a condition gives something true, and give that."""
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

    def jobs(self):
        return objects("pytorchjobs", f"vit-distillation/run={self.id}")

    def logs(self):
        """What the tasks' own pods said, all of them."""
        return kubectl(
            "logs", "--selector", f"pipeline/runid={self.id}", "--container", "main", "--tail=-1", check=False
        )


@pytest.fixture
def run_pipeline():
    """Deploy the pipeline and run it on the pool `cpu`, two nodes with a process each."""

    def run(settings="", *, wait=True):
        command = [sys.executable, "-m", "pipelines.deploy", "--run", "--namespace", NAMESPACE]
        command += ["--pool", "cpu", "--nodes", "2", "--processes", "1", "--set", f"{SHORT} {settings}"]
        command += ["--image", os.environ["TRAINER_IMAGE"]] if "TRAINER_IMAGE" in os.environ else []
        command += ["--wait", "--hours", "1"] if wait else []
        return Run(subprocess.run(command, capture_output=True, text=True, check=False, timeout=4000))

    return run


@contextlib.contextmanager
def forwarded(service, port):
    """A port of this machine that leads to a service."""
    command = ["kubectl", "--namespace", NAMESPACE, "port-forward", f"service/{service}", f":{port}"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            yield re.search(r"127\.0\.0\.1:(\d+)", process.stdout.readline())[1]
        finally:
            process.terminate()
