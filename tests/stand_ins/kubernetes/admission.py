"""Values that neither models nor CRDs check: those of pods, and what the webhooks of operators and Kueue deny and change."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from tests.stand_ins.kubernetes import names
from tests.stand_ins.kubernetes.resources import JOBS, PODS, PYTORCHJOBS, TRAINJOBS, Resource

WEBHOOKS = {
    PYTORCHJOBS: "validator.pytorchjob.training-operator.kubeflow.org",
    TRAINJOBS: "validator.trainjob.trainer.kubeflow.org",
}
QUEUE_LABEL = "kueue.x-k8s.io/queue-name"
_REPLICAS = "spec.pytorchReplicaSpecs"
_RESERVED = {"PET_NNODES", "PET_NPROC_PER_NODE", "PET_NODE_RANK", "PET_MASTER_ADDR", "PET_MASTER_PORT"}
_RESTART_POLICIES = {"Always", "OnFailure", "Never"}
_CONTAINER_VALUES = {
    "imagePullPolicy": {"Always", "IfNotPresent", "Never"},
    "terminationMessagePolicy": {"File", "FallbackToLogsOnError"},
}
_TOLERATION_VALUES = {"operator": {"Exists", "Equal"}, "effect": {"", "NoSchedule", "PreferNoSchedule", "NoExecute"}}


def value_problems(manifest: Mapping[str, Any], resource: Resource) -> list[str]:
    """Causes for a refusal with 422."""
    if resource == PODS:
        return list(_pod_problems(manifest["spec"]))
    if resource == JOBS:
        return list(_job_problems(manifest["spec"]))
    if resource == TRAINJOBS and (problem := names.dns_1035_problem(manifest["metadata"].get("name", ""))):
        return [f"metadata.name: Invalid value: {problem}"]
    return []


def webhook_problems(manifest: Mapping[str, Any], resource: Resource) -> list[str]:
    """Causes for a denial by the webhook of a job's operator."""
    if resource == PYTORCHJOBS:
        return list(_pytorch_job_problems(manifest))
    if resource == TRAINJOBS:
        return list(_train_job_problems(manifest["spec"]))
    return []


def suspended(manifest: Mapping[str, Any], resource: Resource) -> dict[str, Any]:
    """The spec of a job that Kueue holds back; what is no job is left alone."""
    spec: dict[str, Any] = manifest["spec"]
    if resource == PYTORCHJOBS:
        return spec | {"runPolicy": (spec.get("runPolicy") or {}) | {"suspend": True}}
    return spec | {"suspend": True} if resource in {TRAINJOBS, JOBS} else spec


def _job_problems(spec: Mapping[str, Any]) -> Iterator[str]:
    """In the server's words (pkg/apis/batch/validation/validation.go of Kubernetes 1.34)."""
    template, indexed = spec["template"].get("spec", {}), spec.get("completionMode") == "Indexed"
    if template.get("restartPolicy") not in {"Never", "OnFailure"}:
        yield 'spec.template.spec.restartPolicy: Required value: valid values: "OnFailure", "Never"'
    if "podFailurePolicy" in spec and template.get("restartPolicy") != "Never":
        yield 'spec.template.spec.restartPolicy: Invalid value: only "Never" is supported when podFailurePolicy is specified'
    if indexed and spec.get("completions") is None:
        yield "spec.completions: Required value: when completion mode is Indexed"
    for field in ("backoffLimitPerIndex", "successPolicy"):
        if field in spec and not indexed:
            yield f"spec.{field}: Invalid value: requires indexed completion mode"
    containers = [container["name"] for container in template.get("containers", [])]
    for index, rule in enumerate((spec.get("podFailurePolicy") or {}).get("rules", [])):
        path, codes = f"spec.podFailurePolicy.rules[{index}]", rule.get("onExitCodes") or {}
        if ("onExitCodes" in rule) == ("onPodConditions" in rule):
            yield f"{path}: Invalid value: specifying one of OnExitCodes and OnPodConditions is required"
        if codes.get("containerName", containers[0]) not in containers:
            yield f"{path}.onExitCodes.containerName: Invalid value: must be one of the container or initContainer names"
        if codes.get("operator") == "In" and 0 in codes["values"]:
            yield f"{path}.onExitCodes.values: Invalid value: 0: must not be 0 for the In operator"


def _train_job_problems(spec: Mapping[str, Any]) -> Iterator[str]:
    """In Trainer's words, of its plugins torch and jobset (pkg/runtime/framework/plugins)."""
    reserved = sorted({variable["name"] for variable in (spec.get("trainer") or {}).get("env") or []} & _RESERVED)
    if reserved:
        yield f"spec.trainer.env: Invalid value: must not have reserved envs, invalid envs configured: {reserved}"
    for patch in spec.get("runtimePatches") or []:
        if not names.is_domain_prefixed_path(patch["manager"]):
            yield (
                f'spec.runtimePatches.manager: Invalid value: "{patch["manager"]}": '
                'must be a domain-prefixed path (such as "acme.io/foo")'
            )


def _pytorch_job_problems(manifest: Mapping[str, Any]) -> Iterator[str]:
    name, spec = manifest["metadata"].get("name", ""), manifest["spec"]
    if problem := names.dns_1035_problem(name):
        yield f'metadata.name: Invalid value: "{name}": should match: {problem}'
    replicas, elastic = spec["pytorchReplicaSpecs"], spec.get("elasticPolicy")
    if elastic is not None and "Worker" not in replicas:
        yield f"{_REPLICAS}[Worker]: Required value: must be configured if elastic policy is used"
    if (elastic or {}).get("nProcPerNode") is not None and spec.get("nprocPerNode") is not None:
        yield "spec.elasticPolicy.nProcPerNode: Forbidden: must not be used with spec.nprocPerNode"
    managed_by = (spec.get("runPolicy") or {}).get("managedBy")
    if managed_by not in {None, "kubeflow.org/training-operator", "kueue.x-k8s.io/multikueue"}:
        yield f'spec.runPolicy.managedBy: Unsupported value: "{managed_by}"'
    for role, replica in replicas.items():
        yield from _replica_problems(role, replica)


def _replica_problems(role: str, replica: Mapping[str, Any]) -> Iterator[str]:
    path = f"{_REPLICAS}[{role}]"
    if role not in {"Master", "Worker"}:
        yield f'{path}: Unsupported value: "{role}": supported values: "Master", "Worker"'
    containers = replica.get("template", {}).get("spec", {}).get("containers", [])
    for index, container in enumerate(containers):
        if not container.get("image"):
            yield f"{path}.template.spec.containers[{index}].image: Required value: must be required"
    if all(container["name"] != "pytorch" for container in containers):
        yield f"{path}.template.spec.containers: Required value: must have at least one container with name pytorch"
    count = replica.get("replicas")
    if role == "Master" and count != 1:
        yield f"{path}.replicas: Forbidden: must be 1"
    elif count is not None and count < 1:
        yield f"{path}.replicas: Forbidden: must be at least 1"


def _pod_problems(spec: Mapping[str, Any]) -> Iterator[str]:
    yield from _unsupported(spec, {"restartPolicy": _RESTART_POLICIES}, "spec")
    yield from names.label_problems(spec.get("nodeSelector") or {}, "spec.nodeSelector")
    for index, toleration in enumerate(spec.get("tolerations") or []):
        yield from _unsupported(toleration, _TOLERATION_VALUES, f"spec.tolerations[{index}]")
        if toleration.get("operator") == "Exists" and toleration.get("value"):
            yield f"spec.tolerations[{index}].operator: Invalid value: value must be empty when `operator` is 'Exists'"
    volumes = [volume["name"] for volume in spec.get("volumes") or []]
    yield from _name_problems(volumes, "spec.volumes")
    for field in ("initContainers", "containers"):
        containers = spec.get(field) or []
        yield from _name_problems([container["name"] for container in containers], f"spec.{field}")
        for index, container in enumerate(containers):
            yield from _container_problems(container, set(volumes), f"spec.{field}[{index}]")


def _container_problems(container: Mapping[str, Any], volumes: set[str], path: str) -> Iterator[str]:
    if not container.get("image"):
        yield f"{path}.image: Required value"
    yield from _unsupported(container, _CONTAINER_VALUES, path)
    for index, variable in enumerate(container.get("env") or []):
        if variable.get("value") and variable.get("valueFrom"):
            yield f"{path}.env[{index}].valueFrom: Invalid value: may not be specified when `value` is not empty"
    mounted: set[str] = set()
    for index, mount in enumerate(container.get("volumeMounts") or []):
        if mount["name"] not in volumes:
            yield f'{path}.volumeMounts[{index}].name: Not found: "{mount["name"]}"'
        if mount["mountPath"] in mounted:
            yield f'{path}.volumeMounts[{index}].mountPath: Invalid value: "{mount["mountPath"]}": must be unique'
        mounted.add(mount["mountPath"])
    yield from _resource_problems(container.get("resources") or {}, f"{path}.resources")


def _resource_problems(resources: Mapping[str, Any], path: str) -> Iterator[str]:
    """Devices cannot be overcommitted: their limit is needed, and a request must equal it."""
    limits, requests = resources.get("limits") or {}, resources.get("requests") or {}
    for name, amount in requests.items():
        device = "/" in name and not name.startswith("kubernetes.io/")
        if device and str(limits.get(name)) != str(amount):
            yield f'{path}.requests: Invalid value: "{amount}": must be equal to {name} limit of {limits.get(name, 0)}'


def _name_problems(given: list[str], path: str) -> Iterator[str]:
    for index, name in enumerate(given):
        if problem := names.container_name_problem(name):
            yield f'{path}[{index}].name: Invalid value: "{name}": {problem}'
        if name in given[:index]:
            yield f'{path}[{index}].name: Duplicate value: "{name}"'


def _unsupported(values: Mapping[str, Any], allowed: Mapping[str, set[str]], path: str) -> Iterator[str]:
    for key, supported in allowed.items():
        if values.get(key) is not None and values[key] not in supported:
            listed = ", ".join(f'"{one}"' for one in sorted(supported) if one)
            yield f'{path}.{key}: Unsupported value: "{values[key]}": supported values: {listed}'
