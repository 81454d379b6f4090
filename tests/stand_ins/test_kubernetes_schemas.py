"""What the stand-in refuses, and that it takes what is right."""

import copy
import os

import pytest
import yaml

from tests.stand_ins.kubernetes import crds, schemas
from tests.stand_ins.kubernetes.statuses import ApiError
from tests.stand_ins.manifests import pod, pytorch_job, train_job

POD = {"apiVersion": "v1", "kind": "Pod"}
REPLICA = "spec.pytorchReplicaSpecs.Master"


def changed(manifest, path, value):
    """A manifest with one thing set, or taken out if the value is `None`."""
    manifest = copy.deepcopy(manifest)
    target = manifest
    *keys, last = path.split(".")
    for key in keys:
        target = target[int(key) if key.isdecimal() else key]
    if value is None:
        del target[last]
    else:
        target[last] = value
    return manifest


@pytest.fixture(params=["models", "real CRDs too"])
def judged_by(request, monkeypatch):
    if request.param == "models":
        monkeypatch.delenv(crds.VARIABLE, raising=False)
    elif not os.environ.get(crds.VARIABLE):
        pytest.skip(f"{crds.VARIABLE} names no folder with the real CRDs")


def refusal(manifest, check=schemas.check):
    with pytest.raises(ApiError) as caught:
        check(manifest)
    return caught.value.code, caught.value.message


def full_job():
    manifest = pytorch_job(workers=2, labels={"vit-distillation/run": "a-1"}, annotations={"x.y/z": "any text"})
    for replica in manifest["spec"]["pytorchReplicaSpecs"].values():
        spec = replica["template"]["spec"]
        spec |= {
            "securityContext": {"runAsNonRoot": True, "seccompProfile": {"type": "RuntimeDefault"}},
            "tolerations": [{"key": "nvidia.com/gpu", "operator": "Exists", "effect": "NoSchedule"}],
            "nodeSelector": {"node.kubernetes.io/instance-type": "p4d.24xlarge"},
            "volumes": [{"name": "shm", "emptyDir": {"medium": "Memory", "sizeLimit": "8Gi"}}],
        }
        spec["containers"][0] |= {
            "env": [{"name": "KEY", "valueFrom": {"secretKeyRef": {"name": "store", "key": "KEY"}}}],
            "resources": {"limits": {"nvidia.com/gpu": 8, "memory": "1Gi"}, "requests": {"cpu": "500m"}},
            "volumeMounts": [{"name": "shm", "mountPath": "/dev/shm"}],
        }
    manifest["spec"]["runPolicy"] = {"backoffLimit": 2, "ttlSecondsAfterFinished": 60, "suspend": False}
    return manifest


@pytest.mark.usefixtures("judged_by")
@pytest.mark.parametrize("manifest", [full_job(), train_job(), pytorch_job(workers=0)], ids=["full", "train", "small"])
def test_what_is_right_is_taken(manifest):
    schemas.check(manifest)


@pytest.mark.usefixtures("judged_by")
@pytest.mark.parametrize(
    ("path", "value", "code", "message"),
    [
        ("spec.elasticity", {}, 400, 'strict decoding error: unknown field "spec.elasticity"'),
        (f"{REPLICA}.template.spec.gpu", 1, 400, f'unknown field "{REPLICA}.template.spec.gpu"'),
        (f"{REPLICA}.template.spec.containers.0.command_", [], 400, 'containers[0].command_"'),
        ("spec.nprocPerNode", 2, 422, "spec.nprocPerNode in body must be of type string"),
        (f"{REPLICA}.replicas", "1", 422, f"{REPLICA}.replicas in body must be of type integer"),
        ("spec.pytorchReplicaSpecs", [], 422, "spec.pytorchReplicaSpecs in body must be of type object"),
        ("spec.pytorchReplicaSpecs", None, 422, "spec.pytorchReplicaSpecs: Required value"),
        (f"{REPLICA}.template.spec.containers", None, 422, "containers: Required value"),
        ("metadata.name", "Upper", 422, 'metadata.name: Invalid value: "Upper"'),
        ("metadata.labels", {"a": "b c"}, 422, 'metadata.labels: Invalid value: "b c"'),
        ("metadata.labels", {"a": "b" * 64}, 422, "must be no more than 63 characters"),
        ("metadata.labels", {"a/b/c": "d"}, 422, 'metadata.labels: Invalid value: "a/b/c"'),
        ("metadata.name", "1-digit", 403, "denied the request: metadata.name"),
        ("metadata.name", "a" * 64, 403, "must be no more than 63 characters"),
        (f"{REPLICA}.replicas", 2, 403, "spec.pytorchReplicaSpecs[Master].replicas: Forbidden: must be 1"),
        (f"{REPLICA}.replicas", None, 403, "spec.pytorchReplicaSpecs[Master].replicas: Forbidden: must be 1"),
        (f"{REPLICA}.template.spec.containers.0.name", "main", 403, "at least one container with name pytorch"),
        (f"{REPLICA}.template.spec.containers.0.image", "", 403, "image: Required value"),
        ("spec.elasticPolicy", {"nProcPerNode": 2}, 403, "must not be used with spec.nprocPerNode"),
        ("spec.runPolicy", {"managedBy": "me"}, 403, "spec.runPolicy.managedBy: Unsupported value"),
    ],
)
def test_a_wrong_pytorch_job_is_refused(path, value, code, message):
    given, text = refusal(changed(pytorch_job(), path, value))
    assert given == code
    assert message in text


@pytest.mark.usefixtures("judged_by")
@pytest.mark.parametrize(
    ("path", "value", "code", "message"),
    [
        ("spec.runtimeRef", None, 422, "runtimeRef"),
        ("spec.trainer.numNodes", "2", 422, "numNodes"),
        ("spec.trainer.nodes", 2, 400, 'unknown field "spec.trainer.nodes"'),
        ("spec.backoffLimit", 2, 400, 'unknown field "spec.backoffLimit"'),
        ("metadata.name", "1-digit", 422, "metadata.name"),
        ("spec.trainer.env", [{"name": "PET_NNODES", "value": "2"}], 403, "must not have reserved envs"),
        ("spec.runtimePatches", [{"manager": "tests"}], 403, "must be a domain-prefixed path"),
    ],
)
def test_a_wrong_train_job_is_refused(path, value, code, message):
    given, text = refusal(changed(train_job(), path, value))
    assert given == code
    assert message in text


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        ("spec.restartPolicy", "Sometimes", 'spec.restartPolicy: Unsupported value: "Sometimes"'),
        ("spec.containers.0.imagePullPolicy", "always", 'imagePullPolicy: Unsupported value: "always"'),
        ("spec.containers.0.image", "", "spec.containers[0].image: Required value"),
        ("spec.containers.0.name", "Main", 'spec.containers[0].name: Invalid value: "Main"'),
        ("spec.tolerations", [{"key": "a", "operator": "Exist"}], 'operator: Unsupported value: "Exist"'),
        ("spec.tolerations", [{"key": "a", "operator": "Exists", "value": "b"}], "value must be empty"),
        ("spec.nodeSelector", {"pool": "a b"}, 'spec.nodeSelector: Invalid value: "a b"'),
        ("spec.volumes", [{"name": "a"}, {"name": "a"}], 'spec.volumes[1].name: Duplicate value: "a"'),
        ("spec.containers.0.volumeMounts", [{"name": "a", "mountPath": "/a"}], 'volumeMounts[0].name: Not found: "a"'),
        ("spec.containers.0.env", [{"name": "A", "value": "b", "valueFrom": {}}], None),
        ("spec.containers.0.resources", {"requests": {"nvidia.com/gpu": 1}}, "must be equal to nvidia.com/gpu limit"),
    ],
)
def test_a_wrong_pod_is_refused(path, value, message):
    manifest = changed(pod() | POD, path, value)
    if message is None:
        schemas.check(manifest)  # an empty source is none
    else:
        code, text = refusal(manifest)
        assert code == 422
        assert message in text


def test_check_finds_what_pods_would_be_refused_for():
    manifest = changed(pytorch_job(), f"{REPLICA}.template.spec.nodeSelector", {"pool": "a b"})
    schemas.admit(manifest)
    assert refusal(manifest)[0] == 422


def test_the_dialect_of_a_crd(tmp_path, monkeypatch):
    """A small CRD with what the real ones have: closed and open objects, maps, numbers or text, lists."""
    spec = {
        "type": "object",
        "required": ["size"],
        "properties": {
            "size": {"x-kubernetes-int-or-string": True, "anyOf": [{"type": "integer"}, {"type": "string"}]},
            "free": {"type": "object", "x-kubernetes-preserve-unknown-fields": True, "properties": {}},
            "labels": {"type": "object", "additionalProperties": {"type": "string", "maxLength": 3}},
            "steps": {"type": "array", "items": {"type": "object", "properties": {"kind": {"enum": ["a", "b"]}}}},
            "count": {"type": "integer", "minimum": 1},
        },
    }
    versions = [{"name": "v1", "schema": {"openAPIV3Schema": {"type": "object", "properties": {"spec": spec}}}}]
    (tmp_path / "kubeflow.org_pytorchjobs.yaml").write_text(yaml.safe_dump({"spec": {"versions": versions}}))
    monkeypatch.setenv(crds.VARIABLE, str(tmp_path))
    right = {"size": "1Gi", "free": {"any": {"thing": 1}}, "labels": {"a": "b"}, "steps": [{"kind": "a"}], "count": 1}

    def problems(**changes):
        found = crds.Problems()
        crds.check({"spec": right | changes}, schemas.PYTORCHJOBS, found)
        return found.unknown + found.invalid

    assert problems() == problems(size=3) == []
    assert problems(size=[]) == [
        'spec.size: Invalid value: "array": spec.size in body must be of type integer or string'
    ]
    assert problems(other=1) == ["spec.other"]
    assert problems(steps=[{"kind": "a", "more": 1}]) == ["spec.steps[0].more"]
    assert problems(steps=[{"kind": "c"}]) == [
        "spec.steps[0].kind: Invalid value: \"string\": 'c' is not one of ['a', 'b']"
    ]
    assert "is too long" in problems(labels={"a": "long"})[0]
    assert "less than the minimum" in problems(count=0)[0]
