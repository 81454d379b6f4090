"""Every pool gets a node: of a node group that the cluster autoscaler makes from nothing, or of one of Karpenter's node pools.

What upstreams know by themselves is data here, with its source:
- kubernetes/autoscaler, cluster-autoscaler/cloudprovider/aws (2026-08): of an empty group `buildNodeFromTemplate` knows `TEMPLATE`; taints
  and labels as the group states them, which eksctl copies to its tags (`propagateASGTags`), but not EKS's label of a spot node
  (`getManagedNodegroupInfo` calls it `capacityType`); and what tags `node-template/resources/NAME` and `.../label/NAME` state.
- machines.toml: what a pod can get on each machine.
"""

import itertools
import os
import re
import tomllib
from pathlib import Path

import jsonschema
import pytest
import yaml

from components.launch import pools
from tests.stand_ins.kubernetes import crds

COMPONENTS = Path(__file__).parents[2] / "manifests" / "components"
TEXTS = {part: (COMPONENTS / part / "nodes.yaml").read_text() for part in ("gpu", "neuron", "spot")}
CONFIGS = {part: yaml.safe_load(text) for part, text in TEXTS.items()}
GROUPS = {group["name"]: group for config in CONFIGS.values() for group in config["managedNodeGroups"]}
POOLS = {name: pool for name, pool in pools.load().items() if pool.device != "cpu"}
MACHINES = tomllib.loads((Path(__file__).parent / "machines.toml").read_text())
TEMPLATE = {"cpu", "memory", "pods", "nvidia.com/gpu"}
TAG = "k8s.io/cluster-autoscaler/node-template/"
SPOT = ("eks.amazonaws.com/capacityType", "SPOT")
DEVICE_PLUGINS = {"nvidia.com/gpu": "gpu", "aws.amazon.com/neuron": "neuron", "vpc.amazonaws.com/efa": "efa"}


def machine(group):
    (found,) = group.get("instanceTypes") or [group["instanceType"]]
    return found


def tagged(group, kind):
    return {key.removeprefix(TAG + kind): text for key, text in group["tags"].items() if key.startswith(TAG + kind)}


def tolerated(taint, tolerations):
    return any(
        toleration.get("key", taint["key"]) == taint["key"]
        and toleration.get("effect", taint["effect"]) == taint["effect"]
        and (toleration.get("operator") == "Exists" or toleration.get("value", "") == taint.get("value", ""))
        for toleration in tolerations
    )


def test_every_pool_has_node_group_and_every_group_pool():
    assert set(GROUPS) == set(POOLS)
    assert len({tuple(config["metadata"].items()) for config in CONFIGS.values()}) == 1
    assert {(config["apiVersion"], config["kind"]) for config in CONFIGS.values()} == {
        ("eksctl.io/v1alpha5", "ClusterConfig")
    }


@pytest.mark.parametrize("name", list(POOLS))
def test_an_empty_group_grows_for_its_pool(name):
    """The autoscaler's node of that group would take the pod: selector, taints, resources."""
    pool, group = POOLS[name], GROUPS[name]
    labels = {"node.kubernetes.io/instance-type": machine(group)} | group.get("labels", {}) | tagged(group, "label/")
    assert pool.pod["spec"]["nodeSelector"].items() <= labels.items()
    assert all(tolerated(taint, pool.pod["spec"]["tolerations"]) for taint in group["taints"])
    assert group["propagateASGTags"]
    resources = tagged(group, "resources/")
    assert set(resources) == set(pool.resources) - TEMPLATE
    assert ("vpc.amazonaws.com/efa" in pool.resources) == group.get("efaEnabled", False)
    assert group["minSize"] == group["desiredCapacity"] == 0 < group["maxSize"], "an idle group costs nothing"
    given = MACHINES[machine(group)]["allocatable"] | resources
    assert all(pools.quantity(amount) <= pools.quantity(given[key]) for key, amount in pool.resources.items())


@pytest.mark.parametrize("name", list(POOLS))
def test_a_tag_states_what_the_machine_has(name):
    pool, group = POOLS[name], GROUPS[name]
    resources, real = tagged(group, "resources/"), MACHINES[machine(group)]
    assert resources.pop("ephemeral-storage") == f"{real['nvme_gb']}G"
    assert resources.items() <= real["allocatable"].items()
    # The kubelet keeps a tenth of the disk free, and images are on it too.
    assert pools.quantity(pool.resources["ephemeral-storage"]) < 0.87 * real["nvme_gb"] * 1e9
    assert yaml.safe_load(group["overrideBootstrapCommand"])["spec"] == {
        "instance": {"localStorage": {"strategy": "RAID0"}}
    }
    assert group["amiFamily"] == "AmazonLinux2023"  # which alone has a NodeConfig without an AMI of one's own
    assert tagged(group, "label/") == (dict([SPOT]) if group.get("spot") else {})


@pytest.mark.parametrize("name", list(GROUPS))
def test_nodes_are_kept_for_pods_that_ask_for_them(name):
    pool, group = POOLS[name], GROUPS[name]
    kept = {taint["key"] for taint in group["taints"]}
    assert pools.ACCELERATORS[pool.device] in kept
    assert ("vit-distillation/spot" in kept) == pool.spot == group.get("spot", False)


@pytest.fixture(scope="module")
def karpenter(render):
    objects = render("components/karpenter")
    (node_class,) = [one for one in objects if one["kind"] == "EC2NodeClass"]
    return node_class, [one for one in objects if one["kind"] == "NodePool"]


@pytest.mark.parametrize("name", list(POOLS))
def test_karpenter_has_one_node_pool_for_each_pool(karpenter, name):
    """Karpenter knows a machine's resources by itself, and its disks by the node class."""
    pool, (node_class, node_pools) = POOLS[name], karpenter
    fitting = []
    for one in node_pools:
        template = one["spec"]["template"]
        chosen = {rule["key"]: rule["values"] for rule in template["spec"]["requirements"]}
        labels = template.get("metadata", {}).get("labels", {})
        values = {**{key: [value] for key, value in labels.items()}, **chosen}
        if all(value in values.get(key, []) for key, value in pool.pod["spec"]["nodeSelector"].items()) and all(
            tolerated(taint, pool.pod["spec"]["tolerations"]) for taint in template["spec"]["taints"]
        ):
            fitting.append((one, chosen))
    ((found, chosen),) = fitting
    assert chosen["karpenter.sh/capacity-type"] == (["spot"] if pool.spot else ["on-demand"])
    kept = {taint["key"] for taint in found["spec"]["template"]["spec"]["taints"]}
    assert kept == {pools.ACCELERATORS[pool.device]} | ({"vit-distillation/spot"} if pool.spot else set())
    assert found["spec"]["template"]["spec"]["nodeClassRef"] == {
        "group": node_class["apiVersion"].split("/")[0],
        "kind": node_class["kind"],
        "name": node_class["metadata"]["name"],
    }
    assert node_class["spec"]["instanceStorePolicy"] == "RAID0"
    # Nothing empties a node below a training.
    assert found["spec"]["disruption"]["consolidationPolicy"] == "WhenEmpty"
    assert {"nodes": "0", "reasons": ["Drifted"]} in found["spec"]["disruption"]["budgets"]
    assert found["spec"]["template"]["spec"]["expireAfter"] == "Never"


def test_karpenter_limits_what_runs_at_once(karpenter):
    """To at least one of each machine of the pool."""
    for one in karpenter[1]:
        ((resource, most),) = one["spec"]["limits"].items()
        (types,) = (
            rule["values"]
            for rule in one["spec"]["template"]["spec"]["requirements"]
            if rule["key"] == "node.kubernetes.io/instance-type"
        )
        assert all(int(MACHINES[name]["allocatable"][resource]) <= int(most) for name in types)


@pytest.mark.parametrize(("resource", "part"), DEVICE_PLUGINS.items())
def test_a_device_plugin_runs_on_each_node_that_pods_ask_its_resource_of(render, resource, part):
    (plugin,) = [one for one in render(f"components/{part}") if one["kind"] == "DaemonSet"]
    pod = plugin["spec"]["template"]["spec"]
    asking = [name for name, pool in POOLS.items() if resource in pool.resources]
    assert asking
    for name in asking:
        assert all(tolerated(taint, pod["tolerations"]) for taint in GROUPS[name]["taints"])
        terms = (
            pod.get("affinity", {}).get("nodeAffinity", {}).get("requiredDuringSchedulingIgnoredDuringExecution", {})
        )
        for rule in itertools.chain(*(term["matchExpressions"] for term in terms.get("nodeSelectorTerms", []))):
            assert (rule["key"], rule["operator"]) == ("node.kubernetes.io/instance-type", "In")
            assert machine(GROUPS[name]) in rule["values"]


def real(name):
    path = Path(os.environ.get(crds.VARIABLE, "")) / name
    if not os.environ.get(crds.VARIABLE) or not path.exists():
        pytest.skip(f"{crds.VARIABLE} names no folder with {name}")
    return yaml.load(path.read_text(), Loader=yaml.CSafeLoader)


@pytest.mark.parametrize("uncommented", [False, True])
@pytest.mark.parametrize("part", list(CONFIGS))
def test_node_groups_are_valid_by_eksctls_schema(part, uncommented):
    """`eksctl.json` is pkg/apis/eksctl.io/v1alpha5/assets/schema.json of eksctl-io/eksctl."""
    schema = real("eksctl.json")
    text = re.sub(r"^(    )# (?=\w+: \{)", r"\1", TEXTS[part], flags=re.MULTILINE) if uncommented else TEXTS[part]
    config = yaml.safe_load(text)
    assert ("capacityReservation" in config["managedNodeGroups"][0]) == (uncommented and part == "gpu")
    jsonschema.validate(config, schema)
    config["managedNodeGroups"][0]["volumesize"] = 80
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(config, schema)


def test_karpenters_objects_are_valid_by_its_crds(karpenter):
    node_class, node_pools = karpenter
    for one, name in [
        (node_class, "karpenter.k8s.aws_ec2nodeclasses"),
        *((one, "karpenter.sh_nodepools") for one in node_pools),
    ]:
        (version,) = [each for each in real(f"{name}.yaml")["spec"]["versions"] if each["name"] == "v1"]
        schema = crds.strict(version["schema"]["openAPIV3Schema"])
        schema["properties"]["metadata"] = {"type": "object"}
        jsonschema.validate(one, schema)
        with pytest.raises(jsonschema.ValidationError):
            jsonschema.validate(one | {"spec": one["spec"] | {"taint": []}}, schema)
