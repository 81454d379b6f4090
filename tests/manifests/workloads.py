"""What runs in the cluster, among the objects of a kustomization."""

from __future__ import annotations

SERVERS = {"Deployment", "StatefulSet"}


def workloads(objects):
    return [one for one in objects if one["kind"] in {*SERVERS, "CronJob"}]


def servers(objects):
    """Those that run for ever."""
    return [one for one in objects if one["kind"] in SERVERS]


def template(workload):
    spec = workload["spec"]
    return spec["jobTemplate"]["spec"]["template"] if workload["kind"] == "CronJob" else spec["template"]


def containers(workload):
    pod = template(workload)["spec"]
    return [*pod.get("initContainers", []), *pod["containers"]]
