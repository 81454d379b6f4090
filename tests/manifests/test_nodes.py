"""The node groups of the parts gpu, neuron and spot are those that the pools look for, and the other way round."""

from pathlib import Path

import pytest
import yaml

from components.launch import pools

COMPONENTS = Path(__file__).parents[2] / "manifests" / "components"
CONFIGS = {part: yaml.safe_load((COMPONENTS / part / "nodes.yaml").read_text()) for part in ("gpu", "neuron", "spot")}
GROUPS = {group["name"]: group for config in CONFIGS.values() for group in config["managedNodeGroups"]}
POOLS = {name: pool for name, pool in pools.load().items() if pool.device != "cpu"}


def labels(group):
    """Those that EKS gives to a node of a managed group, and the group's own."""
    spot = group.get("spot", False)
    (machine,) = group.get("instanceTypes") or [group["instanceType"]]
    given = {
        "node.kubernetes.io/instance-type": machine,
        "eks.amazonaws.com/capacityType": "SPOT" if spot else "ON_DEMAND",
    }
    return given | group.get("labels", {})


def tolerated(taint, pool):
    return any(
        toleration.get("key", taint["key"]) == taint["key"]
        and toleration.get("effect", taint["effect"]) == taint["effect"]
        and (toleration.get("operator") == "Exists" or toleration.get("value", "") == taint.get("value", ""))
        for toleration in pool.pod["spec"].get("tolerations", [])
    )


def test_every_pool_has_node_group_and_every_group_pool():
    assert set(GROUPS) == set(POOLS)


def test_the_parts_are_of_one_cluster():
    assert len({tuple(config["metadata"].items()) for config in CONFIGS.values()}) == 1
    assert {(config["apiVersion"], config["kind"]) for config in CONFIGS.values()} == {
        ("eksctl.io/v1alpha5", "ClusterConfig")
    }


@pytest.mark.parametrize("name", list(POOLS))
def test_a_pool_fits_its_nodes(name):
    pool, group = POOLS[name], GROUPS[name]
    assert pool.pod["spec"]["nodeSelector"].items() <= labels(group).items()
    assert all(tolerated(taint, pool) for taint in group["taints"])
    assert ("vpc.amazonaws.com/efa" in pool.resources) == group.get("efaEnabled", False)
    disk = sum(pools.quantity(text) for text in (pool.resources["ephemeral-storage"], pool.cache))
    assert disk < group["volumeSize"] * 2**30
    assert group["minSize"] == group["desiredCapacity"] == 0 < group["maxSize"], "an idle group costs nothing"


@pytest.mark.parametrize("name", list(GROUPS))
def test_nodes_are_kept_for_pods_that_ask_for_them(name):
    pool, group = POOLS[name], GROUPS[name]
    kept = {taint["key"] for taint in group["taints"]}
    assert pools.ACCELERATORS[pool.device] in kept
    assert ("vit-distillation/spot" in kept) == pool.spot == group.get("spot", False)
