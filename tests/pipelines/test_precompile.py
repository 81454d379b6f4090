"""`make neuron-warm-up`: what it refuses before anything starts, and the job that it sends."""

import base64
import os
import subprocess

import pytest

from pipelines import precompile
from tests.pipelines.local_runs import ROOT
from tests.stand_ins.kubernetes.resources import PYTORCHJOBS, SECRETS
from tests.stand_ins.kubernetes.stand_in import KubernetesStandIn, Node
from tests.stand_ins.object_store import ObjectStore
from trainer.io.errors import EXIT_CODE

POOLS = """
[pools.neuron]
device = "xla"
processes_per_node = 1
resources = { cpu = 1, memory = "2Gi", "aws.amazon.com/neuron" = 1 }
environment = { PJRT_DEVICE = "CPU", NEURON_COMPILE_CACHE_URL = "/cache/neuron" }
secrets.AWS_ACCESS_KEY_ID = { name = "vit-distillation-store", key = "AWS_ACCESS_KEY_ID" }
secrets.AWS_SECRET_ACCESS_KEY = { name = "vit-distillation-store", key = "AWS_SECRET_ACCESS_KEY" }
"""


@pytest.fixture(autouse=True)
def empty_folder(monkeypatch, tmp_path):
    for name in [name for name in os.environ if name.startswith(("MLFLOW_", "TRAINER_"))]:
        monkeypatch.delenv(name)
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def refused(monkeypatch, tmp_path, capsys):
    """Give the command; gives the one line with which it ends."""

    def refused(*arguments, **variables):
        for name, value in variables.items():
            monkeypatch.setenv(name, value)
        assert precompile.main(arguments) == EXIT_CODE
        (line,) = capsys.readouterr().err.splitlines()
        assert line.startswith("error: ")
        assert not (tmp_path / "runs").exists()
        return line

    return refused


@pytest.mark.parametrize(
    ("pool", "variables", "message"),
    [
        ("neuron-trn1", {}, "NEURON_COMPILE_CACHE_URL=/cache/neuron lies in the pods"),
        ("gpu-a100", {}, "what is compiled on it stays in the pods"),
        ("neuron", {}, "unknown pool 'neuron'; did you mean"),
        ("neuron-trn1", {"NEURON_COMPILE_CACHE_URL": "s3://bucket/cache"}, "TRAINER_ARTIFACTS='': a cluster's job can"),
    ],
)
def test_what_cannot_work_is_refused_before_anything_starts(refused, pool, variables, message):
    assert message in refused("--pool", pool, **variables)


def test_a_recipe_for_photos_takes_a_data_set(refused):
    """Without one, the images are missing; with one, the next thing that is wrong is."""
    command = ("--pool", "neuron-trn1", "--recipe", "photos")
    assert "error: data.source is empty" in refused(*command)
    assert "lies in the pods" in refused(*command, "--dataset", "s3://bucket/prepared")


def test_make_hands_everything_on():
    command = "make --dry-run neuron-warm-up RECIPE=grocery SET=run.seed=7 NODES=4 PROCESSES=8 DATASET=s3://b/d"
    shown = subprocess.run(command.split(), cwd=ROOT, capture_output=True, text=True, check=True).stdout
    assert '-m pipelines.precompile --pool "neuron-trn1" --recipe "$RECIPE" --set "$SET"' in shown
    assert '--nodes 4 --processes 8 --dataset "s3://b/d"' in shown


@pytest.mark.slow
def test_the_job_runs_and_its_end_is_reported(tmp_path, monkeypatch, capsys):
    """Here its process has no torch_xla, and says so; tests/xla/test_warm_up.py has it."""
    node = Node(name="one", capacity={"aws.amazon.com/neuron": "1"})
    with ObjectStore() as store, KubernetesStandIn(tmp_path / "cluster", nodes=[node]) as cluster:
        credentials = {name: store.environment[name] for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY")}
        data = {name: base64.b64encode(value.encode()).decode() for name, value in credentials.items()}
        cluster.add(SECRETS, {"metadata": {"name": "vit-distillation-store"}, "data": data})
        (tmp_path / "pools.toml").write_text(POOLS)
        variables = {
            **store.environment,
            "TRAINER_POOLS": str(tmp_path / "pools.toml"),
            "TRAINER_IMAGE": "registry/vit-distillation:mine",
            "KUBECONFIG": str(cluster.kubeconfig),
            "TRAINER_CACHE": str(tmp_path / "cache"),
            "TRAINER_ARTIFACTS": f"s3://{store.bucket}/exchange",
            "TRAINER_NAMESPACE": cluster.namespace,
            "NEURON_COMPILE_CACHE_URL": f"s3://{store.bucket}/neuron-cache",
        }
        for name, value in variables.items():
            monkeypatch.setenv(name, value)
        assert precompile.main(["--pool", "neuron", "--recipe", "digits"]) == EXIT_CODE
        (job,) = cluster.list(PYTORCHJOBS)
    assert "torch_xla" in capsys.readouterr().err.splitlines()[-1]
    assert job["metadata"]["labels"]["vit-distillation/stage"] == "warm_up"
    (container,) = job["spec"]["pytorchReplicaSpecs"]["Master"]["template"]["spec"]["containers"]
    sent = {variable["name"]: variable.get("value") for variable in container["env"]}
    assert sent["TRAINER_DEVICE"] == "xla"
    assert sent["NEURON_COMPILE_CACHE_URL"] == variables["NEURON_COMPILE_CACHE_URL"]
    assert container["image"] == "registry/vit-distillation-neuron:mine"
    (folder,) = (tmp_path / "runs").iterdir()
    assert folder.name.endswith("-digits-warm-up")
