"""The manifests of the server: as Deployments and under KServe, with one and the same pod."""

import copy
import json
import os
import re
from pathlib import Path

import jsonschema
import kubernetes_validate
import pytest
import yaml

from components.launch import SERVING_IMAGE
from pipelines import deploy_student
from tests.manifests.pod_security import violations
from tests.stand_ins.kubernetes import crds
from trainer.io.errors import SettingsError

FOLDERS = ("serving/base", "serving/kserve")


def only(objects, kind):
    (found,) = [one for one in objects if one["kind"] == kind]
    return found


@pytest.fixture
def deployment(render):
    return only(render("serving/base"), "Deployment")


@pytest.fixture
def predictor(render):
    return only(render("serving/kserve"), "InferenceService")["spec"]["predictor"]


def test_objects_are_those_that_are_expected_and_valid(render, versions):
    release = re.search(r":v(\d+\.\d+)\.", versions["KIND_NODE_IMAGE"])[1]
    shared = {"ServiceAccount", "NetworkPolicy"}
    own = {"Deployment", "Service", "HorizontalPodAutoscaler", "PodDisruptionBudget"}
    for folder, kinds in zip(FOLDERS, (shared | own, shared | {"InferenceService"}), strict=True):
        objects = render(folder)
        assert {one["kind"] for one in objects} == kinds
        assert len(objects) == len(kinds)
        for one in objects:
            if one["kind"] != "InferenceService":
                kubernetes_validate.validate(one, release, strict=True)


def test_an_inference_service_has_the_deployments_pod(predictor, deployment):
    schema = json.loads((Path(__file__).parent / "kserve_predictor.json").read_text())
    own = {key: value for key, value in predictor.items() if key in schema["properties"]}
    jsonschema.validate(own, schema)
    assert own["deploymentStrategy"] == {"type": "RollingUpdate", **deployment["spec"]["strategy"]}
    pod = copy.deepcopy({key: value for key, value in predictor.items() if key not in own})
    assert pod["containers"][0].pop("name") == "kserve-container"  # by which KServe knows it
    expected = copy.deepcopy(deployment["spec"]["template"]["spec"])
    assert expected["containers"][0].pop("name") == "server"
    assert pod == expected


@pytest.mark.skipif(crds.VARIABLE not in os.environ, reason=f"{crds.VARIABLE} names no folder with the real CRDs")
def test_whole_inference_service_is_valid_by_real_crd(render):
    path = Path(os.environ[crds.VARIABLE]) / "serving.kserve.io_inferenceservices.yaml"
    if not path.exists():
        pytest.skip(f"{crds.VARIABLE} holds no {path.name}")
    crd = yaml.load(path.read_text(), Loader=yaml.CSafeLoader)
    (version,) = [one for one in crd["spec"]["versions"] if one["name"] == "v1beta1"]
    schema = crds.strict(version["schema"]["openAPIV3Schema"])
    schema["properties"]["metadata"] = {"type": "object"}
    service = only(render("serving/kserve"), "InferenceService")
    jsonschema.validate(service, schema)
    service = copy.deepcopy(service)
    service["spec"]["predictor"]["minReplica"] = 1
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(service, schema)


def test_serving_pods(deployment):
    pod = deployment["spec"]["template"]["spec"]
    assert violations(pod) == []
    assert pod["automountServiceAccountToken"] is False
    (server,) = pod["containers"]
    assert server["securityContext"]["readOnlyRootFilesystem"] is True
    for part in ("requests", "limits"):
        assert {"cpu", "memory"} <= set(server["resources"][part])
    ports = {port["name"]: port["containerPort"] for port in server["ports"]}
    assert server["image"] == SERVING_IMAGE
    assert f"--port={ports['http']}" in server["args"]
    for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
        assert server[probe]["httpGet"]["port"] in ports
    assert server["readinessProbe"]["httpGet"]["path"] == "/v2/health/ready"

    given = dict(one.split("=", 1) for one in pod["containers"][0]["args"] if "=" in one)
    drain = int(given["--drain"])
    assert drain + int(given["--timeout"]) + 10 <= pod["terminationGracePeriodSeconds"]
    assert drain > pod["containers"][0]["readinessProbe"]["periodSeconds"]
    # No pod ends before another is ready.
    assert deployment["spec"]["strategy"]["rollingUpdate"] == {"maxUnavailable": 0, "maxSurge": 1}


def test_service_policy_budget_and_autoscaler_are_about_these_pods(render, deployment):
    objects = render("serving/base")
    labels = deployment["spec"]["template"]["metadata"]["labels"]
    port = deployment["spec"]["template"]["spec"]["containers"][0]["ports"][0]
    service, policy = only(objects, "Service")["spec"], only(objects, "NetworkPolicy")["spec"]
    budget, autoscaler = only(objects, "PodDisruptionBudget")["spec"], only(objects, "HorizontalPodAutoscaler")["spec"]
    for selector in (service["selector"], policy["podSelector"]["matchLabels"]):
        assert selector == {"app.kubernetes.io/name": "vit-student"}
        assert selector.items() <= labels.items()
    for selector in (budget["selector"]["matchLabels"], deployment["spec"]["selector"]["matchLabels"]):
        assert selector.items() <= labels.items()
        assert selector["vit-distillation/alias"] == "champion"
    assert [one["targetPort"] for one in service["ports"]] == [port["name"]]
    assert policy["ingress"] == [{"ports": [{"port": port["containerPort"]}]}]
    assert autoscaler["scaleTargetRef"] == {
        "apiVersion": deployment["apiVersion"],
        "kind": "Deployment",
        "name": deployment["metadata"]["name"],
    }


@pytest.mark.parametrize("folder", FOLDERS)
@pytest.mark.parametrize("replicas", [0, 3])
def test_the_objects_of_another_student(render, folder, replicas):
    before = copy.deepcopy(render(folder))
    objects = deploy_student.student_objects(
        before,
        name="dishes",
        alias="challenger",
        namespace="food",
        model="models:/dishes/7",
        options=["--force", "--drain", "30"],
        image="registry/server:2.1",
        replicas=replicas,
    )
    assert {one["metadata"]["namespace"] for one in objects} == {"food"}
    own = {"Deployment", "HorizontalPodAutoscaler", "PodDisruptionBudget", "InferenceService"}
    for one in objects:
        assert one["metadata"]["name"] == ("dishes-challenger" if one["kind"] in own else "dishes")
    text = yaml.safe_dump(objects)
    assert "vit-student" not in text
    assert "champion" not in text
    assert ("HorizontalPodAutoscaler" in text) is (folder == "serving/base" and not replicas)
    if folder == "serving/base":
        deployment = only(objects, "Deployment")
        assert deployment["spec"].get("replicas", 0) == replicas
        pod = deployment["spec"]["template"]["spec"]
    else:
        pod = only(objects, "InferenceService")["spec"]["predictor"]
        assert (pod["minReplicas"], pod["maxReplicas"]) == ((3, 3) if replicas else (2, 8))
    (server,) = pod["containers"]
    assert server["image"] == "registry/server:2.1"
    given = ["--host=0.0.0.0", "--port=8080", "--name=dishes", "--drain=10", "--timeout=10"]
    assert server["args"] == ["models:/dishes/7", *given, "--force", "--drain", "30"], (
        "of an option, the last one counts"
    )
    assert pod["terminationGracePeriodSeconds"] == 40 + 20, "the drain is 20 seconds longer"


@pytest.mark.parametrize(
    ("options", "seconds"),
    [
        ([], 40),
        (["--drain=5"], 40),
        (["--drain", "60.5", "--log", "-"], 91),
        (["--timeout", "60"], 90),
        (["--timeout=60", "--drain=5"], 85),
        (["--timeout=5"], 40),
    ],
)
def test_grace_follows_drain_and_timeout(render, options, seconds):
    objects = student_objects(render, options)
    assert only(objects, "Deployment")["spec"]["template"]["spec"]["terminationGracePeriodSeconds"] == seconds


@pytest.mark.parametrize(
    "options", [["--drain"], ["--drain=long"], ["--drain=-1"], ["--timeout"], ["--timeout=0"], ["--timeout=1.5"]]
)
def test_drain_or_timeout_that_is_no_time_is_refused(render, options):
    named = options[0].partition("=")[0]
    with pytest.raises(
        SettingsError, match=rf"^--serve: argument {named}: .*; give the seconds, such as --drain 30 --timeout 20$"
    ):
        student_objects(render, options)


def student_objects(render, options):
    return deploy_student.student_objects(
        copy.deepcopy(render("serving/base")),
        name="dishes",
        alias="champion",
        namespace="food",
        model="models:/dishes/7",
        options=options,
        image="registry/server:2.1",
        replicas=0,
    )
