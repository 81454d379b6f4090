import pytest

from components.launch import environment, pools
from components.launch.identity import Identity
from trainer.costs import Machines
from trainer.errors import LaunchError, SettingsError
from trainer.launch import JobSpec

TASK = {
    "AWS_ENDPOINT_URL_S3": "http://store:9000",
    "AWS_DEFAULT_REGION": "eu-central-1",
    "AWS_ACCESS_KEY_ID": "AKIA-leaked",
    "AWS_SECRET_ACCESS_KEY": "leaked",
    "AWS_SESSION_TOKEN": "leaked",
    "AWS_WEB_IDENTITY_TOKEN_FILE": "/var/run/secrets/token",
    "AWS_PROFILE": "me",
    "MLFLOW_TRACKING_URI": "http://mlflow:5000",
    "MLFLOW_EXPERIMENT_ID": "7",
    "MLFLOW_RUN_ID": "r",
    "MLFLOW_TRACKING_USERNAME": "leaked",
    "MLFLOW_TRACKING_PASSWORD": "leaked",
    "MLFLOW_TRACKING_TOKEN": "leaked",
    "TRAINER_RUN": "run",
    "TRAINER_RUN_ID": "0123",
    "TRAINER_CHECKPOINTS": "s3://bucket/checkpoints",
    "TRAINER_ARTIFACTS": "s3://bucket/artifacts",
    "TRAINER_DEVICE": "cuda",
    "HOME": "/home/me",
    "PATH": "/bin",
}


def spec(**changes):
    values = {"stage": "distill", "settings": {}, "inputs": {}, "outputs": {}, "processes_per_node": 0}
    return JobSpec(**values | changes)


def rendered(job=None, pool="cpu", **changes):
    chosen = pools.get(pool).model_copy(update=changes)
    entries = environment.variables(job or spec(), chosen, Identity(run="run", task="distill"))
    names = [entry["name"] for entry in entries]
    assert len(set(names)) == len(names)
    return {entry["name"]: entry.get("value", entry.get("valueFrom")) for entry in entries}


def test_a_task_hands_on_where_things_are_and_no_secret():
    assert environment.handed_on(TASK) == {
        "AWS_ENDPOINT_URL_S3": "http://store:9000",
        "AWS_DEFAULT_REGION": "eu-central-1",
        "MLFLOW_TRACKING_URI": "http://mlflow:5000",
        "MLFLOW_EXPERIMENT_ID": "7",
        "MLFLOW_RUN_ID": "r",
        "TRAINER_RUN": "run",
        "TRAINER_RUN_ID": "0123",
        "TRAINER_CHECKPOINTS": "s3://bucket/checkpoints",
    }


def test_compiled_graphs_are_kept_where_the_task_says_if_the_next_job_reaches_that():
    def cache(value):
        given = environment.handed_on(TASK | {"NEURON_COMPILE_CACHE_URL": value})
        return rendered(spec(environment=given), "neuron-trn1")["NEURON_COMPILE_CACHE_URL"]

    assert cache("s3://bucket/neuron-cache") == "s3://bucket/neuron-cache"
    assert cache("/var/tmp/mine") == cache("") == "/cache/neuron"


@pytest.mark.parametrize(
    ("pool", "cache", "message"),
    [
        ("neuron-trn1", "", r"pool neuron-trn1: NEURON_COMPILE_CACHE_URL=/cache/neuron lies in the pods, so .* lost"),
        ("neuron-trn1-16", "/mnt/shared", r"NEURON_COMPILE_CACHE_URL=/cache/neuron lies in the pods"),
        (
            "gpu-a100",
            "s3://bucket/cache",
            r"pool gpu-a100: what is compiled on it stays in the pods .* warm_up\.enabled",
        ),
    ],
)
def test_a_warm_up_that_would_be_lost_with_its_pods_is_refused(pool, cache, message):
    with pytest.raises(SettingsError, match=message):
        environment.check_compile_cache(pools.get(pool), {"NEURON_COMPILE_CACHE_URL": cache})


def test_a_warm_up_is_not_refused_where_the_next_job_finds_it():
    environment.check_compile_cache(pools.get("neuron-trn1"), {"NEURON_COMPILE_CACHE_URL": "s3://bucket/cache"})
    own = pools.get("neuron-trn1").model_copy(update={"environment": {"NEURON_COMPILE_CACHE_URL": "s3://bucket/own"}})
    environment.check_compile_cache(own, {})


@pytest.mark.parametrize("name", [name for name, pool in pools.load().items() if pool.device == "xla"])
def test_a_neuron_pod_finds_its_runtime_and_takes_one_process_a_core(name):
    """Which core is whose, torch_neuronx reads from torchrun's variables."""
    pool, values = pools.get(name), rendered(pool=name)
    assert (values["TRAINER_DEVICE"], values["PJRT_DEVICE"]) == ("xla", "NEURON")
    assert pool.processes_per_node == 2 * pool.accelerators
    assert ("FI_PROVIDER" in values) == pool.joins_nodes
    assert not [variable for variable in values if variable.startswith(("NEURON_PJRT", "XLA_", "NEURON_RT_NUM"))]


@pytest.mark.parametrize("name", ["MLFLOW_TRACKING_URI", "AWS_ENDPOINT_URL_S3", "TRAINER_CHECKPOINTS"])
@pytest.mark.parametrize("address", ["https://me:leaked@host/x", "https://leaked@host", "https://host/x?token=leaked"])
def test_an_address_with_a_password_does_not_get_into_the_job(name, address):
    given = environment.handed_on(TASK | {name: address})
    with pytest.raises(LaunchError, match=f"{name} holds a password or a token") as caught:
        rendered(spec(environment=given))
    assert "leaked" not in str(caught.value)


def test_places_on_the_tasks_own_machine_are_not_handed_on(caplog):
    local = TASK | {"MLFLOW_TRACKING_URI": "sqlite:////home/me/mlflow.db", "TRAINER_CHECKPOINTS": "/home/me/runs"}
    given = environment.handed_on(local)
    assert not [name for name in given if name.startswith("MLFLOW_") or name == "TRAINER_CHECKPOINTS"]
    assert (
        "the job's metrics are not tracked: its pods cannot reach MLFLOW_TRACKING_URI=sqlite:////home/me" in caplog.text
    )


def test_secrets_come_by_reference():
    values = rendered(spec(environment=environment.handed_on(TASK)))
    assert values["AWS_SECRET_ACCESS_KEY"] == {
        "secretKeyRef": {"name": "vit-distillation-store", "key": "AWS_SECRET_ACCESS_KEY", "optional": True}
    }
    assert "leaked" not in str(values)


@pytest.mark.parametrize(
    ("name", "reason"),
    [("MY_TOKEN", "it looks like a secret; name it under secrets of the pool"), ("RANK", "it is set by the launcher")],
)
def test_a_job_can_not_bring_secrets_or_what_the_launcher_sets(name, reason):
    with pytest.raises(LaunchError, match=f"distill: {name} cannot be part of a job's environment: {reason}"):
        rendered(spec(environment={name: "x"}))


def test_the_pool_decides_the_device_and_the_threads():
    values = rendered(pool="gpu-a100")
    assert (values["TRAINER_DEVICE"], values["OMP_NUM_THREADS"]) == ("cuda", "11")
    assert rendered(spec(processes_per_node=2), pool="gpu-a100")["OMP_NUM_THREADS"] == "45"
    assert rendered(spec(processes_per_node=5))["OMP_NUM_THREADS"] == "1"


def test_pods_know_their_place_and_its_price():
    place = Machines.model_validate_json(rendered(spec(nodes=4), pool="gpu-a100")["TRAINER_PLACE"])
    assert (place.pool, place.instance, place.nodes, place.processes_per_node) == ("gpu-a100", "p4d.24xlarge", 4, 8)
    assert place.price == pools.get("gpu-a100").price
    spot = Machines.model_validate_json(rendered(spec(processes_per_node=2), pool="gpu-a100-spot")["TRAINER_PLACE"])
    assert (spot.processes_per_node, spot.price) == (2, None)
    with pytest.raises(LaunchError, match="TRAINER_PLACE cannot be part of a job's environment: it is set by the"):
        rendered(spec(environment={"TRAINER_PLACE": "{}"}))


def test_the_job_goes_before_the_pool_and_that_before_the_defaults():
    pool = {"environment": {"OMP_NUM_THREADS": "3", "NCCL_DEBUG": "WARN"}}
    values = rendered(spec(environment={"NCCL_DEBUG": "INFO"}), **pool)
    assert (values["OMP_NUM_THREADS"], values["NCCL_DEBUG"]) == ("3", "INFO")


def test_nodes_wait_for_one_another_as_long_as_a_job_may_be_queued():
    assert rendered(queued_minutes=90)["PET_RDZV_CONF"] == "timeout=5400,join_timeout=5400"


def test_the_cache_stays_within_its_volume():
    assert float(rendered(cache="20Gi")["TRAINER_CACHE_GIB"]) == pytest.approx(16)
    with pytest.raises(LaunchError, match="TRAINER_CACHE_GIB cannot be part of a job's environment"):
        rendered(spec(environment={"TRAINER_CACHE_GIB": "100"}))
