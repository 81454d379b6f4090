"""Kueue's queues have room for every pool. No models of Kueue's kinds are at hand; its own fields are named here."""

import pytest

from components.launch import pools

GROUP = "kueue.x-k8s.io/v1beta2"


@pytest.fixture(scope="module")
def objects(render):
    return render("components/kueue")


def of(objects, kind):
    return [one for one in objects if one["kind"] == kind]


@pytest.fixture(scope="module")
def quotas(objects):
    (queue,) = of(objects, "ClusterQueue")
    (group,) = queue["spec"]["resourceGroups"]
    found = {}
    for flavor in group["flavors"]:
        assert set(flavor) == {"name", "resources"}
        assert [one["name"] for one in flavor["resources"]] == group["coveredResources"], "Kueue wants the same order"
        found[flavor["name"]] = {one["name"]: str(one["nominalQuota"]) for one in flavor["resources"]}
    return found


def test_objects_belong_together(objects, quotas):
    assert {one["apiVersion"] for one in objects} == {GROUP}
    (cluster,), (local,) = of(objects, "ClusterQueue"), of(objects, "LocalQueue")
    assert local["spec"] == {"clusterQueue": cluster["metadata"]["name"]}
    assert cluster["spec"]["namespaceSelector"] == {
        "matchExpressions": [
            {"key": "kubernetes.io/metadata.name", "operator": "In", "values": [local["metadata"]["namespace"]]}
        ]
    }
    assert set(cluster["spec"]) == {"namespaceSelector", "resourceGroups"}
    assert {one["metadata"]["name"] for one in of(objects, "ResourceFlavor")} == set(quotas)
    assert all("namespace" not in one["metadata"] for one in objects if one["kind"] != "LocalQueue")


def number(quota):
    return 0.0 if quota == "0" else pools.quantity(quota)


@pytest.mark.parametrize("name", list(pools.load()))
def test_a_pool_has_a_flavor_with_room(objects, quotas, name):
    """Kueue passes over a flavor whose labels contradict the selector, or whose taints are not tolerated, and never admits a pod with an
    uncovered resource."""
    pool = pools.get(name)
    flavors = {one["metadata"]["name"]: one.get("spec", {}) for one in of(objects, "ResourceFlavor")}
    labels = {flavor: spec.get("nodeLabels", {}) for flavor, spec in flavors.items()}
    tolerated = {one["key"] for one in pool.pod["spec"].get("tolerations", [])}
    keys = {key for given in labels.values() for key in given}
    wanted = {key: value for key, value in pool.pod["spec"].get("nodeSelector", {}).items() if key in keys}
    fitting = [
        flavor
        for flavor, given in labels.items()
        if given.items() >= wanted.items()
        and {taint["key"] for taint in flavors[flavor].get("nodeTaints", [])} <= tolerated
    ]
    assert len(fitting) == 1, (
        "a job that one flavor has no more room for must not get nodes that its pods do not tolerate"
    )
    assert any(
        all(number(quotas[flavor][resource]) >= pools.quantity(amount) for resource, amount in pool.resources.items())
        for flavor in fitting
    )
