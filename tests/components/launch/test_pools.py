import pytest

from components.launch import pools
from trainer.io.errors import SettingsError
from trainer.report import finished_run
from trainer.report.billing import StageBill, make_bill

MACHINES = {
    # vCPUs and GiB of memory as sold, accelerators, EFA interfaces that the image can use, dollars an hour on demand
    "p4d.24xlarge": (96, 1152, 8, 0, 21.957642),
    "p5.48xlarge": (192, 2048, 8, 0, 55.04),
    "g5.xlarge": (4, 16, 1, 0, 1.006),
    "g5.12xlarge": (48, 192, 4, 0, 5.672),
    "g5.48xlarge": (192, 768, 8, 0, 16.288),
    "trn1.2xlarge": (8, 32, 1, 0, 1.34375),
    "trn1.32xlarge": (128, 512, 16, 8, 21.50),
    "trn2.48xlarge": (192, 2048, 16, 16, None),
}
GIB = 2**30
POOL = """
[pools.small]
device = "cuda"
processes_per_node = 2
resources = { cpu = 4, memory = "8Gi", ephemeral-storage = "40Gi", "nvidia.com/gpu" = 2 }
"""


@pytest.fixture
def write(tmp_path, monkeypatch):
    """Make a text the file of pools."""
    path = tmp_path / "pools.toml"
    monkeypatch.setenv(pools.POOLS_VARIABLE, str(path))
    return path.write_text


def refusal():
    with pytest.raises(SettingsError) as caught:
        pools.load()
    return str(caught.value)


@pytest.mark.parametrize("name", [name for name in pools.load() if name != "cpu"])
def test_a_pod_leaves_room_for_the_system(name):
    pool = pools.get(name)
    cores, gibibytes, accelerators, network_cards, dollars = MACHINES[pool.instance]
    assert 0.75 * cores <= pool.cpus < cores - 0.5
    # Linux sees some 3 % less than what is sold, and a large node's kubelet keeps several GiB.
    assert 0.7 * gibibytes * GIB <= pools.quantity(pool.resources["memory"]) <= 0.9 * gibibytes * GIB
    assert pool.accelerators == accelerators
    assert int(pool.resources.get("vpc.amazonaws.com/efa", 0)) == network_cards
    assert pool.pod["spec"]["nodeSelector"]["node.kubernetes.io/instance-type"] == pool.instance
    assert pools.ACCELERATORS[pool.device] in {toleration["key"] for toleration in pool.pod["spec"]["tolerations"]}
    assert pool.processes_per_node == pool.max_processes
    if pool.spot or not dollars:
        assert pool.price is None
    else:
        assert pool.price
        assert pool.price.dollars_an_hour == dollars
        assert pool.price.region == "us-east-1"
        assert pool.price.source


def test_spot_pool_is_its_base_on_nodes_that_may_go():
    base, spot = pools.get("gpu-a100"), pools.get("gpu-a100-spot")
    assert spot.spot
    assert spot.resources == base.resources
    assert spot.environment == base.environment
    selector = base.pod["spec"]["nodeSelector"] | {"eks.amazonaws.com/capacityType": "SPOT"}
    assert spot.pod["spec"]["nodeSelector"] == selector
    assert [one["key"] for one in spot.pod["spec"]["tolerations"]] == ["nvidia.com/gpu", "vit-distillation/spot"]
    assert (base.retries, spot.retries) == (0, 5)


def test_mounts_of_all_pools_and_of_one_are_joined(write):
    """Each layer has one table of the container, whose lists are joined."""
    mounts = [{"name": name, "mountPath": f"/{name}"} for name in ("weights", "photos")]
    lines = [
        f'pod.spec.containers = [{{ volumeMounts = [{{ name = "{one["name"]}", mountPath = "{one["mountPath"]}" }}] }}]'
        for one in mounts
    ]
    write(f"[defaults]\n{lines[0]}\n{POOL}{lines[1]}\n")
    assert pools.get("small").pod["spec"]["containers"] == [{"volumeMounts": mounts}]


def test_every_field_is_explained_in_head_of_file_with_its_default():
    head = pools.BUNDLED.read_text().split("\n[", 1)[0].replace("\n#                       ", " ")
    explained = dict(line[4:].split(maxsplit=1) for line in head.splitlines() if line.startswith("#   "))
    assert set(explained) == {*pools.Pool.model_fields} - {"name"}
    for name, text in explained.items():
        default = pools.Pool.model_fields[name].default
        if isinstance(default, str | int) and default:
            assert f"({default})" in text


def test_named_file_goes_before_mounted_one_and_that_before_bundled_one(write, monkeypatch, tmp_path):
    write(POOL)
    assert list(pools.load()) == ["small"]
    monkeypatch.delenv(pools.POOLS_VARIABLE)
    mounted = tmp_path / "mounted.toml"
    monkeypatch.setattr(pools, "MOUNTED", mounted)
    assert "gpu-a100" in pools.load()
    mounted.write_text(POOL.replace("small", "other"))
    assert list(pools.load()) == ["other"]


def test_unknown_pool_is_answered_with_nearest_and_all(monkeypatch):
    monkeypatch.delenv(pools.POOLS_VARIABLE, raising=False)
    with pytest.raises(
        SettingsError,
        match=r"unknown pool 'gpu-a10'; did you mean gpu-a10g or gpu-a100 or gpu-a10g-8\?; .* has cpu, gpu-a100, ",
    ):
        pools.get("gpu-a10")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("gpus = 2", "unknown field gpus"),
        ("devise = 2", "unknown field devise; did you mean device?"),
        ('retries = "two"', "retries must be a whole number, got 'two'"),
        ("retries = -1", "retries must be >= 0, got -1"),
        ("running_minutes = 0", "running_minutes must be >= 1, got 0"),
        ('backend = "mpijob"', "backend must be 'pytorchjob' or 'trainjob', got 'mpijob'"),
        ('shared_memory = "9Gi"', "shared_memory = 9Gi must be within resources.memory = 8Gi"),
        ('tmp = "25Gi"', "cache = 20Gi and tmp = 25Gi must be within resources.ephemeral-storage = 40Gi"),
        ("processes_per_accelerator = 0", "processes_per_accelerator must be >= 1, got 0"),
        ('shared_memory = "2 GB"', "shared_memory: must be a quantity above 0, such as 8, 500m or 64Gi, got '2 GB'"),
        ("elastic_min_nodes = 1", "elastic_min_nodes needs retries >= 1"),
        ("pod.volumes = []", "pod"),
        ('pod = "gpu"', "pod must be a group, such as {NAME=VALUE}, got 'gpu'"),
        ("pod.spec = 1", "pod.spec must be a group, such as {NAME=VALUE}, got 1"),
        ("pod.spec.containers = [{}, {}]", "pod: spec.containers must have one table"),
        (
            'pod.spec.containers = [{ env = [{ name = "A" }] }]',
            "pod: variables are given under environment and secrets",
        ),
        ('environment = { "A B" = "c" }', "environment.A B"),
        ('environment = { PET_NNODES = "2" }', "PET_NNODES is set by the launcher or the operator; leave it out"),
        ('environment = { NEURON_RT_NUM_CORES = "1" }', "NEURON_RT_NUM_CORES is set by the launcher or the operator"),
        ('environment = { NEURON_PJRT_PROCESS_INDEX = "0" }', "NEURON_PJRT_PROCESS_INDEX is set by the launcher or"),
        (
            'environment = { MY_TOKEN = "x" }',
            "MY_TOKEN looks like a secret; name a Secret and its key under secrets.MY_TOKEN",
        ),
        ('secrets = { MY_TOKEN = "x" }', "secrets.MY_TOKEN is a group of fields and cannot be 'x'"),
        ("price = { dollars_an_hour = -1.0 }", "price.dollars_an_hour must be > 0"),
        ("price = { dollars_an_hour = 1.0 }", "price.date is missing"),
        (
            'price = { dollars_an_hour = 1.0, date = "late 2026", region = "r", source = "s" }',
            "price.date: must be a month or a day, such as 2026-11 or 2026-11-21, got 'late 2026'",
        ),
        (
            'spot = true\nprice = { dollars_an_hour = 1.0, date = 2026-11-21, region = "r", source = "s" }',
            "price: that of a spot node changes from hour to hour",
        ),
        ('based_on = "large"', "based_on must be a pool without based_on of its own (small), got 'large'"),
    ],
)
def test_wrong_field_is_named_with_its_pool_file_and_value(write, change, message):
    write(f"{POOL}\n[pools.wrong]\n{change}\n" if change.startswith("based_on") else f"{POOL}{change}\n")
    text = refusal()
    assert text.startswith("pools ")
    assert "pools.toml: pool " in text
    assert message in text


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ('"nvidia.com/gpu" = 2', '"nvidia.com/gpu" = -2', "resources.nvidia.com/gpu: must be a quantity above 0"),
        (', "nvidia.com/gpu" = 2', "", 'device = "cuda" needs resources."nvidia.com/gpu" = 1 or more'),
        (
            'device = "cuda"',
            'device = "cpu"',
            'device = "cpu" cannot use resources."nvidia.com/gpu"; set device = "cuda"',
        ),
        ('device = "cuda"', 'device = "tpu"', "device must be 'cpu', 'cuda' or 'xla', got 'tpu'"),
        ('device = "cuda"', "", "device is missing; give it here or under [defaults]"),
        ("processes_per_node = 2", "processes_per_node = 3", 'must be 1 to 2, got 3: resources."nvidia.com/gpu" = 2'),
        ("processes_per_node = 2", "processes_per_node = 0", "processes_per_node must be >= 1, got 0"),
        ('memory = "8Gi", ', "", "resources must name memory"),
        ("small", "Small_1", "name: String should match pattern"),
    ],
)
def test_pool_that_does_not_fit_together_is_refused(write, old, new, message):
    assert old in POOL
    write(POOL.replace(old, new))
    assert message in refusal()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[pools", "is not TOML"),
        ("", "must have [pools.NAME] and may have [defaults] and [spot], got nothing"),
        ("[pool.a]\ndevice = 'cpu'", "must have [pools.NAME] and may have [defaults] and [spot], got pool"),
        ("pools = 3", "pools must be a table, got 3"),
        ("[pools]\na = 3", "a must be a table, got 3"),
    ],
)
def test_a_file_that_is_none_is_refused(write, text, message):
    write(text)
    assert message in refusal()


def test_processes_are_pools_own_or_requested_number():
    pool = pools.get("gpu-a10g-4")
    assert (pool.processes(), pool.processes(2)) == (4, 2)
    with pytest.raises(SettingsError, match=r"0 \(the pool's own number\) to 4 on pool gpu-a10g-4, got 5"):
        pool.processes(5)
    assert pools.get("cpu").processes(7) == 7
    # A device of Trn2 has four logical cores.
    assert pools.get("neuron-trn2").processes(64) == 64
    with pytest.raises(
        SettingsError, match=r"0 .* to 64 on pool neuron-trn2, got 65: .* = 16, processes_per_accelerator = 4"
    ):
        pools.get("neuron-trn2").processes(65)


@pytest.mark.parametrize(
    ("text", "number"), [("500m", 0.5), ("2", 2), ("1.5", 1.5), ("2k", 2000), ("3Gi", 3 * GIB), ("1T", 1e12)]
)
def test_quantities_are_those_of_kubernetes(text, number):
    assert pools.quantity(text) == number


def test_neuron_nodes_without_efa_do_not_train_together():
    assert pools.get("neuron-trn1-16").place(4).nodes == 4
    with pytest.raises(SettingsError, match=r"nodes = 2, but the nodes of pool neuron-trn1 have no EFA"):
        pools.get("neuron-trn1").place(2)


def test_trainium_stands_in_the_price_performance_table():
    """What a training there leaves, held against one on GPUs: the table knows of no device."""
    runs = {"gpu-a100": 3600.0, "neuron-trn1-16": 3000.0}
    entries = []
    for name, seconds in runs.items():
        place = pools.get(name).place(nodes=4)
        distill = StageBill(stage="distill", seconds=seconds, place=place, dollars=place.dollars(seconds))
        entries.append(finished_run.priced_run(name, make_bill([distill]), accuracy=0.8, epochs=10))
    heading, gpu, neuron = finished_run.price_rows(entries)
    row = dict(zip(heading, neuron, strict=True))
    assert row["where"] == "4 nodes of neuron-trn1-16 (trn1.32xlarge)"
    assert row["dollars"] == f"${4 * 21.50 * 3000 / 3600:.2f}"
    assert row["epoch speed"] == "1.20x"
    assert row[""] == "cheapest, fastest"
    assert set(map(bool, gpu[:-1])) == {True}
