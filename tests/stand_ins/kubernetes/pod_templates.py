"""The pods of a PyTorchJob as training operator 1.9.4 makes them."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

from tests.stand_ins.kubernetes.store import Object

OPERATOR_NAME = "pytorchjob-controller"
DEFAULT_PORT = 23456
_PREFIX = "training.kubeflow.org"
_PORT_NAME = "pytorchjob-port"
_INIT_IMAGE = "alpine:3.10"


def defaulted(job: Mapping[str, Any]) -> Object:
    """A job with what the operator adds where nothing is said."""
    full = copy.deepcopy(dict(job))
    spec = full["spec"]
    policy = spec.setdefault("runPolicy", {})
    policy.setdefault("cleanPodPolicy", "None")
    for replica in spec["pytorchReplicaSpecs"].values():
        replica.setdefault("replicas", 1)
        replica.setdefault("restartPolicy", "OnFailure")
        for container in replica["template"]["spec"]["containers"]:
            ports = container.setdefault("ports", [])
            if container["name"] == "pytorch" and all(port.get("name") != _PORT_NAME for port in ports):
                ports.append({"name": _PORT_NAME, "containerPort": DEFAULT_PORT})
    elastic = spec.get("elasticPolicy")
    if elastic is not None:
        workers = spec["pytorchReplicaSpecs"]["Worker"]["replicas"]
        least, most = elastic.get("minReplicas"), elastic.get("maxReplicas")
        elastic["minReplicas"] = least or most or workers
        elastic["maxReplicas"] = most or least or workers
    if elastic is None or elastic.get("nProcPerNode") is None:
        spec.setdefault("nprocPerNode", "auto")
    return full


def replica_labels(job: Mapping[str, Any], role: str) -> dict[str, str]:
    return {
        f"{_PREFIX}/operator-name": OPERATOR_NAME,
        f"{_PREFIX}/job-name": job["metadata"]["name"],
        f"{_PREFIX}/replica-type": role.lower(),
    }


def index_of(pod: Mapping[str, Any]) -> int:
    return int(pod["metadata"]["labels"][f"{_PREFIX}/replica-index"])


def render(job: Mapping[str, Any], role: str, index: int) -> Object:
    """The manifest of a pod.

    Args:
        job: with its defaults.
        role: Master or Worker.
        index: among its role.
    """
    replicas = job["spec"]["pytorchReplicaSpecs"]
    template = copy.deepcopy(replicas[role]["template"])
    metadata, spec = template.get("metadata") or {}, template["spec"]
    name = job["metadata"]["name"]
    labels = replica_labels(job, role) | {f"{_PREFIX}/replica-index": str(index)}
    if role == "Master" or ("Master" not in replicas and index == 0):
        labels[f"{_PREFIX}/job-role"] = "master"
    for container in spec["containers"]:
        container["env"] = [*(container.get("env") or []), *_environment(job, role, index)]
    if role == "Worker" and "Master" in replicas:
        spec["initContainers"] = [*(spec.get("initContainers") or []), _init_container(f"{name}-master-0")]
    policy = replicas[role]["restartPolicy"]
    spec["restartPolicy"] = "Never" if policy == "ExitCode" else policy
    return {
        "metadata": {
            **metadata,
            "name": f"{name}-{role.lower()}-{index}",
            "labels": (metadata.get("labels") or {}) | labels,
            "ownerReferences": [owner_reference(job)],
        },
        "spec": spec,
    }


def owner_reference(owner: Mapping[str, Any]) -> dict[str, Any]:
    """What makes an object the dependent of its controller."""
    return {
        "apiVersion": owner["apiVersion"],
        "kind": owner["kind"],
        "name": owner["metadata"]["name"],
        "uid": owner["metadata"]["uid"],
        "controller": True,
        "blockOwnerDeletion": True,
    }


def _environment(job: Mapping[str, Any], role: str, index: int) -> list[dict[str, str]]:
    spec, name = job["spec"], job["metadata"]["name"]
    replicas, processes = spec["pytorchReplicaSpecs"], spec.get("nprocPerNode")
    total = sum(replica["replicas"] for replica in replicas.values())
    values = {"PYTHONUNBUFFERED": "1"}
    if "Master" in replicas:
        port, address = str(_port(replicas["Master"])), f"{name}-master-0"
        values |= {"MASTER_PORT": port, "PET_MASTER_PORT": port, "MASTER_ADDR": address, "PET_MASTER_ADDR": address}
        rank = str(index + 1 if role == "Worker" else index)
        world_size = total * (int(processes) if str(processes).isdecimal() else 1)
        values |= {"WORLD_SIZE": str(world_size), "RANK": rank, "PET_NODE_RANK": rank}
    if processes is not None:
        values["PET_NPROC_PER_NODE"] = processes
    values |= _elastic_environment(job) if spec.get("elasticPolicy") is not None else {"PET_NNODES": str(total)}
    return [{"name": key, "value": value} for key, value in values.items()]


def _elastic_environment(job: Mapping[str, Any]) -> dict[str, str]:
    policy, workers = job["spec"]["elasticPolicy"], job["spec"]["pytorchReplicaSpecs"]["Worker"]
    host = policy.get("rdzvHost") or f"{job['metadata']['name']}-worker-0"
    values = {
        "PET_RDZV_ENDPOINT": f"{host}:{policy.get('rdzvPort') or _port(workers)}",
        "PET_RDZV_BACKEND": policy.get("rdzvBackend") or "c10d",
        "PET_NNODES": f"{policy['minReplicas']}:{policy['maxReplicas']}",
    }
    named = {"PET_MAX_RESTARTS": "maxRestarts", "PET_NPROC_PER_NODE": "nProcPerNode", "PET_RDZV_ID": "rdzvId"}
    values |= {variable: str(policy[key]) for variable, key in named.items() if policy.get(key) is not None}
    if policy.get("rdzvConf"):
        values["PET_RDZV_CONF"] = ",".join(f"{pair['key']}={pair['value']}" for pair in policy["rdzvConf"])
    if policy.get("standalone"):
        values["PET_STANDALONE"] = ""
    return values


def _port(replica: Mapping[str, Any]) -> int:
    """The port of a replica's container `pytorch`."""
    containers = [one for one in replica["template"]["spec"]["containers"] if one["name"] == "pytorch"]
    port: int = next(port["containerPort"] for port in containers[0]["ports"] if port.get("name") == _PORT_NAME)
    return port


def _init_container(master: str) -> dict[str, Any]:
    """It waits until the master's name resolves."""
    loop = (
        f"for i in $(seq 100); do if nslookup {master}; then err=0 && break; fi;echo waiting for master; sleep 2; done"
    )
    return {
        "name": "init-pytorch",
        "image": _INIT_IMAGE,
        "imagePullPolicy": "IfNotPresent",
        "resources": {"limits": {"cpu": "100m", "memory": "20Mi"}, "requests": {"cpu": "50m", "memory": "10Mi"}},
        "command": ["sh", "-c", f"err=1;{loop}; exit $err"],
    }
