"""A registered student behind its Service: seen from another pod, while versions change, break and stand beside one another."""

import base64
import contextlib
import io
import json
import os
import secrets
import subprocess
import sys
import textwrap
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
from PIL import Image

from tests.cluster.conftest import NAMESPACE, SERVING, SHORT, eventually, forwarded, installed, kubectl, objects

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(1800, func_only=True)]
ASK = """
    import base64, collections, json, sys, time, urllib.error, urllib.request
    address, seconds, photo = sys.argv[1], float(sys.argv[2]), base64.b64decode(sys.argv[3])
    request = urllib.request.Request(address + "/predict", data=photo, headers={"Content-Type": "image/png"})
    end, answers = time.monotonic() + seconds, collections.Counter()
    while True:  # each time over a connection of its own, so that the Service chooses a pod
        try:
            with urllib.request.urlopen(request, timeout=20) as answer:
                answers[json.load(answer)["version"]] += 1
        except (OSError, ValueError) as error:
            answers["failed: " + repr(error)[:200]] += 1
        if time.monotonic() > end:
            break
        time.sleep(0.02)
    print(json.dumps(answers))
"""


@pytest.fixture(scope="module")
def registered(tmp_path_factory):
    """Train and register two versions of a student; gives its name in the registry."""
    name, output = f"test-{secrets.token_hex(4)}", tmp_path_factory.mktemp("runs") / "one"
    gate = ["evaluate.gate.max_accuracy_drop=1", "evaluate.gate.min_accuracy=0"]
    settings = [*SHORT.split(), *gate, "export.int8=false", f"register.model_name={name}"]
    command = [sys.executable, "-m", "trainer", "run", "digits", "--output", str(output), "--processes", "1"]
    for epochs in (1, 2):
        for _ in range(3):  # port-forwards break, and the same command goes on
            with forwarded("mlflow", 5000) as port:
                done = subprocess.run(
                    [*command, "--set", *settings, f"distill.epochs={epochs}"],
                    env={**os.environ, "MLFLOW_TRACKING_URI": f"http://localhost:{port}"},
                    capture_output=True,
                    text=True,
                    check=False,
                    timeout=900,
                )
            if done.returncode == 0:
                break
        assert done.returncode == 0, done.stdout + done.stderr
    yield name
    with mlflow() as client:
        client.delete_registered_model(name)


@contextlib.contextmanager
def mlflow():
    """A client of the cluster's MLflow."""
    from mlflow.tracking import MlflowClient

    with forwarded("mlflow", 5000) as port:
        yield MlflowClient(f"http://localhost:{port}")


def point(name, alias, version):
    with mlflow() as client:
        client.set_registered_model_alias(name, alias, str(version))


@pytest.fixture(scope="module")
def client():
    """Ask a service from a pod of the namespace, for so many seconds; gives version -> number of answers."""
    pod = f"test-{secrets.token_hex(4)}"
    run = ["run", pod, f"--image={SERVING}", "--restart=Never", "--command", "--", "sleep", "3600"]
    kubectl(*run)
    kubectl("wait", f"pod/{pod}", "--for=condition=Ready", "--timeout=120s")
    buffer = io.BytesIO()
    Image.new("L", (640, 480), 90).save(buffer, "PNG")
    photo = base64.b64encode(buffer.getvalue()).decode()

    def ask(service, seconds=0.0):
        command = ["exec", pod, "--", "python", "-c", textwrap.dedent(ASK), f"http://{service}", str(seconds), photo]
        return json.loads(kubectl(*command))

    yield ask
    kubectl("delete", "pod", pod, "--wait=false", "--grace-period=1")


@pytest.fixture
def deploy(registered):
    """Run `python -m pipelines.deploy_student` with further arguments; gives exit code and output. At the end all is taken away."""
    service = f"test-{secrets.token_hex(4)}"
    common = ["--name", service, "--namespace", NAMESPACE]

    def run(*arguments):
        with forwarded("mlflow", 5000) as port:
            done = subprocess.run(
                [
                    sys.executable,
                    "-m",
                    "pipelines.deploy_student",
                    *common,
                    "--model",
                    registered,
                    "--image",
                    SERVING,
                    *arguments,
                ],
                env={**os.environ, "MLFLOW_TRACKING_URI": f"http://localhost:{port}"},
                capture_output=True,
                text=True,
                check=False,
                timeout=900,
            )
        return done.returncode, done.stdout + done.stderr

    run.service = service
    yield run
    for alias in ("champion", "challenger"):
        for kind in ([], ["--kserve"] if installed("inferenceservices.serving.kserve.io") else None):
            if kind is not None:
                removing = [*common, "--alias", alias, "--remove", *kind]
                subprocess.run([sys.executable, "-m", "pipelines.deploy_student", *removing], check=True)
    left = f"app.kubernetes.io/name={service}"
    eventually(lambda: not objects("pods", left), seconds=120, what="all pods are gone")
    for kind in ("services", "deployments", "poddisruptionbudgets", "horizontalpodautoscalers", "networkpolicies"):
        assert service not in kubectl("get", kind, "--output", "name")


def test_versions_change_break_and_stand_beside_one_another(deploy, registered, client):
    point(registered, "champion", 1)
    code, output = deploy("--replicas", "2")
    assert code == 0, output
    assert f"models:/{registered}/1 answers at http://{deploy.service}.{NAMESPACE}.svc/predict" in output
    (first,) = client(deploy.service, 1)
    assert "failed" not in first

    # Another version takes over, and no request of those that come meanwhile is lost.
    point(registered, "champion", 2)
    with ThreadPoolExecutor(1) as other:
        asking = other.submit(client, deploy.service, 75)
        time.sleep(3)
        code, output = deploy("--replicas", "2")
        answers = asking.result()
    assert code == 0, output
    assert answers.keys() >= {first}
    assert len(answers) == 2, answers
    (second,) = client(deploy.service, 1)
    assert {first, second} == set(answers)

    # One that cannot be fetched takes no request.
    with mlflow() as known:
        broken = known.create_model_version(registered, "s3://mlpipeline/none")
    point(registered, "champion", broken.version)
    code, output = deploy("--replicas", "2", "--timeout", "40")
    assert code == 2
    assert "is not ready on every pod" in output
    assert "error: " in output.partition("The pods say:")[2]
    assert client(deploy.service, 5).keys() == {second}
    point(registered, "champion", 2)
    code, output = deploy("--replicas", "2")
    assert code == 0, output

    # A canary has its share.
    point(registered, "challenger", 1)
    code, output = deploy("--alias", "challenger", "--replicas", "1")
    assert code == 0, output
    answers = client(deploy.service, 8)
    assert answers.keys() == {first, second}
    assert answers[first] < answers[second]


def test_more_pods_come_with_load(deploy, registered, client):
    if "metrics.k8s.io/" not in kubectl("api-versions"):
        pytest.skip("no metrics of pods are installed")
    point(registered, "champion", 1)
    code, output = deploy()
    assert code == 0, output
    scaler = f"hpa/{deploy.service}-champion"

    def is_active():
        conditions = json.loads(kubectl("get", scaler, "--output", "json"))["status"].get("conditions", [])
        return any(one["type"] == "ScalingActive" and one["status"] == "True" for one in conditions)

    eventually(is_active, seconds=240, what="the autoscaler knows the pods' load")
    assert kubectl("get", scaler, "--output", "jsonpath={.spec.minReplicas} {.status.currentReplicas}") == "2 2"
    # One client does not make work for two cores, so 5 % of one are the limit here.
    target = "/spec/metrics/0/resource/target/averageUtilization"
    kubectl("patch", scaler, "--type=json", "--patch", json.dumps([{"op": "replace", "path": target, "value": 5}]))
    with ThreadPoolExecutor(1) as other:
        asking = other.submit(client, deploy.service, 120)
        deployment = f"deployment/{deploy.service}-champion"
        eventually(
            lambda: int(kubectl("get", deployment, "--output", "jsonpath={.status.readyReplicas}") or 0) > 2,
            seconds=240,
            what="more than two pods answer",
        )
        answers = asking.result()
    (version,) = answers
    assert "failed" not in version


def test_under_kserve(deploy, registered, client):
    if not installed("inferenceservices.serving.kserve.io"):
        pytest.skip("KServe is not installed")
    point(registered, "champion", 1)
    code, output = deploy("--kserve", "--replicas", "1")
    assert code == 0, output
    kubectl("wait", f"inferenceservice/{deploy.service}-champion", "--for=condition=Ready", "--timeout=120s")
    (version,) = client(f"{deploy.service}-champion-predictor", 1)
    assert "failed" not in version
    code, output = deploy("--kserve", "--remove")
    assert code == 0, output
