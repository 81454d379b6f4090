"""What `kubectl apply -k` would send: valid, complete in itself, pinned, limited, without secrets."""

import os
import re
import tomllib
from collections.abc import Iterator
from pathlib import Path

import kubernetes_validate
import pytest
import yaml

from components import kfp_components
from components.launch import pools
from tests.manifests.pod_security import violations
from tests.manifests.workloads import SERVERS, containers, servers, template, workloads

OVERLAYS = ("overlays/kind", "overlays/eks")
PLUGINS = ("components/gpu", "components/neuron", "components/efa")
OWN = (
    *OVERLAYS,
    *PLUGINS,
    "overlays/profile",
    "overlays/shared-mlflow",
    "base",
    "mlflow",
    "operator",
    "components/karpenter",
    "components/kueue",
    "components/network-policy",
    "components/monitoring",
    "components/trainer",
)
OTHERS = (
    "monitoring.coreos.com",
    "trainer.kubeflow.org",
    "kueue.x-k8s.io",
    "karpenter.sh",
    "karpenter.k8s.aws",
)  # kinds without models here
MANIFESTS = Path(__file__).parents[2] / "manifests"
REAPER = "vit-distillation-reaper"
SECRETS = {
    "mlflow-database": {"password"},
    kfp_components.STORE_SECRET: set(kfp_components.STORE_KEYS),
    kfp_components.TRACKING_SECRET: set(kfp_components.TRACKING_KEYS),
}
"""Secrets that are made by whoever installs it; manifests/README.md says how."""


def named(objects, kind):
    return {one["metadata"]["name"]: one for one in objects if one["kind"] == kind}


def test_every_kustomization_is_looked_at():
    found = {str(path.parent.relative_to(MANIFESTS)) for path in MANIFESTS.rglob("kustomization.yaml")}
    serving = {f"serving/{part}" for part in ("base", "kserve", "shared")}  # test_serving.py
    assert found == {*OWN, "components/rds", *serving}


@pytest.mark.parametrize("folder", OWN)
def test_objects_are_valid(render, versions, folder):
    release = re.search(r":v(\d+\.\d+)\.", versions["KIND_NODE_IMAGE"])[1]
    objects = render(folder)
    assert objects
    for one in objects:
        if not one["apiVersion"].startswith(OTHERS):
            kubernetes_validate.validate(one, release, strict=True)
    names = [(one["kind"], one["metadata"]["name"]) for one in objects]
    assert len(names) == len(set(names))


@pytest.mark.parametrize("folder", OVERLAYS)
def test_pods_are_restricted_and_limited(render, folder):
    found = {one["metadata"]["name"]: one for one in workloads(render(folder))}
    assert set(found) == {"mlflow", "mlflow-database", REAPER}
    for name, one in found.items():
        pod = template(one)["spec"]
        assert violations(pod) == []
        assert pod["automountServiceAccountToken"] is (name == REAPER)
        for container in containers(one):
            assert container["securityContext"]["readOnlyRootFilesystem"] is True
            for part in ("requests", "limits"):
                assert {"cpu", "memory"} <= set(container["resources"][part])


@pytest.mark.parametrize("folder", OVERLAYS)
def test_servers_are_probed(render, folder):
    for one in servers(render(folder)):
        for container in template(one)["spec"]["containers"]:
            assert {"startupProbe", "readinessProbe", "livenessProbe"} <= set(container)


def assert_pinned(image):
    """A version with at least two numbers, or a digest."""
    assert re.search(r":v?\d+\.\d+[\w.-]*$|@sha256:[0-9a-f]{64}$", image), f"{image} is not pinned"


@pytest.mark.parametrize(
    "image", ["postgres", "postgres:latest", "postgres:17", "registry:5000/postgres", "a@sha256:12"]
)
def test_an_image_that_is_not_pinned_is_found(image):
    with pytest.raises(AssertionError, match="not pinned"):
        assert_pinned(image)


@pytest.mark.parametrize("folder", OVERLAYS)
def test_images_are_pinned(render, folder):
    images = {container["image"] for one in workloads(render(folder)) for container in containers(one)}
    assert len(images) == 3
    for image in images:
        assert_pinned(image)
    assert [image for image in images if image.startswith("postgres:") and "@sha256:" not in image] == []


@pytest.mark.parametrize("folder", PLUGINS)
def test_device_plugins_are_pinned(render, folder):
    (plugin,) = named(render(folder), "DaemonSet").values()
    for container in containers(plugin):
        assert_pinned(container["image"])


def references(value) -> Iterator[tuple[str, str, str]]:
    """Every (kind, name, key) of a ConfigMap or Secret that a pod reads; key "" for the whole."""
    if isinstance(value, dict):
        for kind, whole in (("ConfigMap", "configMap"), ("Secret", "secret")):
            if f"{whole}KeyRef" in value:
                yield kind, value[f"{whole}KeyRef"]["name"], value[f"{whole}KeyRef"]["key"]
            if f"{whole}Ref" in value:
                yield kind, value[f"{whole}Ref"]["name"], ""
        for part in value.values():
            yield from references(part)
    elif isinstance(value, list):
        for part in value:
            yield from references(part)


@pytest.mark.parametrize("folder", OVERLAYS)
def test_everything_that_is_named_is_there(render, folder):
    objects = render(folder)
    maps, accounts = named(objects, "ConfigMap"), named(objects, "ServiceAccount")
    for one in workloads(objects):
        pod = template(one)["spec"]
        assert pod.get("serviceAccountName", "default") in {"default", *accounts}
        read = list(references(pod))
        assert bool(read) == (one["kind"] in {*SERVERS, "CronJob"})
        for kind, name, key in read:
            keys = SECRETS[name] if kind == "Secret" else set(maps[name]["data"])
            assert not key or key in keys or key == "AWS_ENDPOINT_URL_S3", f"{kind} {name} has no key {key}"


@pytest.mark.parametrize("folder", OVERLAYS)
def test_services_find_their_pods(render, folder):
    objects = render(folder)
    services = named(objects, "Service")
    for service in services.values():
        selector = service["spec"]["selector"].items()
        (found,) = [one for one in workloads(objects) if selector <= template(one)["metadata"]["labels"].items()]
        assert {port["targetPort"] for port in service["spec"]["ports"]} <= ports(found)
    for one in named(objects, "StatefulSet").values():
        assert one["spec"]["serviceName"] in services


@pytest.mark.parametrize("folder", OVERLAYS)
def test_probes_knock_at_open_ports(render, folder):
    for one in servers(render(folder)):
        for container in template(one)["spec"]["containers"]:
            probes = [probe for name, probe in container.items() if name.endswith("Probe")]
            asked = [probe[way]["port"] for probe in probes for way in ("httpGet", "tcpSocket") if way in probe]
            assert asked
            assert set(asked) <= ports(one)


def ports(workload):
    """Names of the ports that its containers open."""
    return {port["name"] for container in containers(workload) for port in container.get("ports", [])}


@pytest.mark.parametrize("folder", OVERLAYS)
def test_all_of_it_is_in_one_namespace(render, folder):
    """Roles and their like stay below the cluster's level."""
    objects = render(folder)
    assert {one["metadata"]["namespace"] for one in objects} == {"kubeflow"}
    (binding,) = named(objects, "RoleBinding").values()
    (subject,) = binding["subjects"]
    assert (subject["kind"], subject["name"], subject["namespace"]) == (
        "ServiceAccount",
        "vit-distillation",
        "kubeflow",
    )


@pytest.mark.parametrize("folder", OWN)
def test_there_are_no_secrets(render, folder):
    """No Secret, and no variable or setting named like one that holds a value."""
    for one in render(folder):
        assert one["kind"] != "Secret"
        for name, value in plain_values(one):
            assert not pools.SECRET.search(name), f"{name}={value}"
            assert not re.search(r"://[^/\s:]+:(?!\$\()[^/\s@]+@", value), f"{name} holds a password"


def plain_values(one) -> Iterator[tuple[str, str]]:
    if one["kind"] == "ConfigMap":
        yield from one["data"].items()
    elif workloads([one]):
        for container in containers(one):
            yield from (
                (variable["name"], variable["value"]) for variable in container.get("env", []) if "value" in variable
            )
            yield from (("", text) for text in [*container.get("command", []), *container.get("args", [])])


@pytest.mark.parametrize("folder", OVERLAYS)
def test_tasks_find_their_environment(render, folder):
    """The pipeline names ConfigMap and keys; what is missing would be passed over, for they are optional there."""
    environment = named(render(folder), "ConfigMap")[kfp_components.CONFIG_MAP]["data"]
    # On AWS no endpoint: a client that has one addresses buckets by paths, and cannot use access points.
    assert set(environment) == set(kfp_components.ENVIRONMENT) - ({"AWS_ENDPOINT_URL_S3"} if "eks" in folder else set())
    assert all(environment.values())
    for name in ("TRAINER_ARTIFACTS", "TRAINER_CHECKPOINTS", "NEURON_COMPILE_CACHE_URL"):
        assert environment[name].startswith("s3://")


@pytest.mark.parametrize("folder", OVERLAYS)
def test_mlflow_is_where_tasks_look_for_it(render, folder):
    objects = render(folder)
    address = named(objects, "ConfigMap")[kfp_components.CONFIG_MAP]["data"]["MLFLOW_TRACKING_URI"]
    service = named(objects, "Service")["mlflow"]
    assert address == f"http://mlflow:{service['spec']['ports'][0]['port']}"
    (container,) = template(named(objects, "Deployment")["mlflow"])["spec"]["containers"]
    allowed = next(text for text in container["command"] if text.startswith("--allowed-hosts="))
    assert address.removeprefix("http://") in allowed.removeprefix("--allowed-hosts=").split(",")


@pytest.mark.parametrize("folder", [*OVERLAYS, "overlays/shared-mlflow"])
def test_mlflow_finds_its_settings(render, folder):
    objects = render(folder)
    maps = named(objects, "ConfigMap")
    variables = [
        one for container in containers(named(objects, "Deployment")["mlflow"]) for one in container.get("env", [])
    ]
    wanted = [one["valueFrom"]["configMapKeyRef"] for one in variables if "configMapKeyRef" in one.get("valueFrom", {})]
    assert len(wanted) == 3
    missing = [one for one in wanted if one["key"] not in maps[one["name"]]["data"]]
    assert all(one.get("optional") for one in missing)
    assert [one["key"] for one in missing] == (["AWS_ENDPOINT_URL_S3"] if "eks" in folder else [])


def test_mlflows_database_is_migrated_once_before_its_workers_start(render):
    """Two of them otherwise make the tables of an empty database at once, and one crashes."""
    pod = template(named(render("mlflow"), "Deployment")["mlflow"])["spec"]
    (migration,), (server,) = pod["initContainers"], pod["containers"]
    assert migration["image"] == server["image"]
    assert migration["command"] == ["mlflow", "db", "upgrade", "$(DATABASE)"]
    assert "--backend-store-uri=$(DATABASE)" in server["command"]
    addresses = [
        one["value"] for container in (migration, server) for one in container["env"] if one["name"] == "DATABASE"
    ]
    assert len(set(addresses)) == 1
    assert addresses[0].startswith("postgresql+psycopg2://"), "SQLAlchemy 2.1 has another driver by default"


def test_mlflows_database_may_be_elsewhere(render, tmp_path):
    overlay = tmp_path / "kustomization.yaml"
    folders = {
        part: os.path.relpath(MANIFESTS / part, tmp_path.resolve()) for part in ("overlays/eks", "components/rds")
    }
    overlay.write_text(f"resources: [{folders['overlays/eks']}]\ncomponents: [{folders['components/rds']}]\n")
    objects = render(os.path.relpath(tmp_path, MANIFESTS))
    before = {(one["kind"], one["metadata"]["name"]) for one in render("overlays/eks")}
    gone = before - {(one["kind"], one["metadata"]["name"]) for one in objects}
    assert gone == {("StatefulSet", "mlflow-database"), ("NetworkPolicy", "mlflow-database")}
    service = named(objects, "Service")["mlflow-database"]
    kubernetes_validate.validate(service, "1.34", strict=True)
    assert service["spec"]["type"] == "ExternalName"
    (server,) = template(named(objects, "Deployment")["mlflow"])["spec"]["containers"]
    (address,) = [one["value"] for one in server["env"] if one["name"] == "DATABASE"]
    assert "@mlflow-database:5432/" in address, "the name that leads there"


def test_mlflows_server_runs_no_jobs(render):
    """They take it from 0.5 to 1.9 GiB, seen on a cluster, of the 2 that it has."""
    from mlflow.environment_variables import MLFLOW_SERVER_ENABLE_JOB_EXECUTION

    (server,) = template(named(render("mlflow"), "Deployment")["mlflow"])["spec"]["containers"]
    assert {"name": MLFLOW_SERVER_ENABLE_JOB_EXECUTION.name, "value": "false"} in server["env"]


@pytest.mark.parametrize("folder", OVERLAYS)
def test_the_pools_are_the_bundled_ones(render, folder):
    (text,) = named(render(folder), "ConfigMap")[kfp_components.POOLS_CONFIG_MAP]["data"].values()
    assert text == pools.BUNDLED.read_text()
    assert tomllib.loads(text)["pools"]


def test_jobs_and_kfp_use_one_bucket_of_one_store(render):
    maps = {one["metadata"]["name"]: one["data"] for one in render("overlays/eks") if one["kind"] == "ConfigMap"}
    launcher, ours = maps["kfp-launcher"], maps["vit-distillation"]
    (mlflow,) = (data for name, data in maps.items() if re.fullmatch(r"mlflow-\w+", name))
    provider = yaml.safe_load(launcher["providers"])["s3"]["default"]
    assert provider["endpoint"] == f"s3.{ours['AWS_DEFAULT_REGION']}.amazonaws.com"
    assert provider["region"] == ours["AWS_DEFAULT_REGION"]
    roots = [
        launcher["defaultPipelineRoot"],
        ours["TRAINER_ARTIFACTS"],
        ours["TRAINER_CHECKPOINTS"],
        ours["NEURON_COMPILE_CACHE_URL"],
        mlflow["ARTIFACTS"],
    ]
    assert len({root.split("/")[2] for root in roots}) == 1
