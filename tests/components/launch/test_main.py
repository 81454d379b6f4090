import re
import subprocess
import sys

import pytest
import yaml

from components.launch import job_manifest, pools
from components.launch.__main__ import main
from tests.stand_ins.kubernetes import schemas
from trainer import config
from trainer.graph import JobSpec
from trainer.io.errors import EXIT_CODE


def test_the_printed_manifest_is_what_the_launcher_sends(capsys):
    command = "render --pool gpu-a100 --nodes 4 --set distill.logit.temperature=3 --run r --namespace team --dataset s3://data/set"
    assert main(command.split()) == 0
    printed = capsys.readouterr().out
    manifest = yaml.safe_load(printed)
    schemas.check(manifest)
    uri = "s3://bucket/r/{}".format
    spec = JobSpec(
        stage="distill",
        settings=config.resolve("digits", "distill.logit.temperature=3").for_stage("distill"),
        inputs={"dataset": "s3://data/set", "teacher": uri("teacher")},
        outputs={"student": uri("student"), "evidence": uri("evidence")},
        nodes=4,
        processes_per_node=0,
    )
    job = job_manifest.Identity(run="r", task="distill", namespace="team")
    assert manifest == job_manifest.BACKENDS["pytorchjob"].render(spec, pools.get("gpu-a100"), job)
    assert "&id" not in printed


@pytest.mark.parametrize(
    ("command", "places"),
    [
        ("", ["dataset", "teacher", "student", "evidence"]),
        ("--set distill.teacher=recorded", ["dataset", "teacher", "teacher_outputs", "student", "evidence"]),
        ("--stage reinforce --set distill.teacher=recorded", ["dataset", "teacher", "teacher_outputs"]),
    ],
)
def test_recorded_outputs_are_input_where_settings_ask_for_them(command, places, capsys):
    assert main(["render", "--pool", "cpu", *command.split()]) == 0
    master = yaml.safe_load(capsys.readouterr().out)["spec"]["pytorchReplicaSpecs"]["Master"]
    arguments = master["template"]["spec"]["containers"][0]["args"]
    assert [text for text in arguments if text.startswith("s3://")] == [
        f"s3://bucket/example/{name}" for name in places
    ]


def test_the_other_backend_is_a_choice(capsys):
    assert (
        main(["render", "--pool", "neuron-trn1-16", "--stage", "pretrain", "--backend", "trainjob", "--processes", "4"])
        == 0
    )
    manifest = yaml.safe_load(capsys.readouterr().out)
    assert manifest["kind"] == "TrainJob"
    assert manifest["spec"]["trainer"]["numProcPerNode"] == 4


def test_pools_are_table_with_prices_and_their_dates(capsys):
    assert main(["pools"]) == 0
    lines = {line.split()[0]: line for line in capsys.readouterr().out.splitlines()}
    assert set(lines) == {"pool", *pools.load()}
    row = r"gpu-a100 +p4d.24xlarge +8 cuda +8 +21.96 +2026-11 \(\d+ days old(; look it up again)?\), us-east-1"
    assert re.fullmatch(row, lines["gpu-a100"])
    assert lines["neuron-trn1-16-spot"].split()[1:] == ["trn1.32xlarge", "16", "xla", "32", "varies"]
    assert lines["cpu"].split()[1:] == ["any", "2", "cores", "2"]


@pytest.mark.parametrize(
    ("command", "message"),
    [
        ("render --pool gpu-b200", "error: unknown pool 'gpu-b200'"),
        ("render --pool cpu --recipe digit", "error: unknown recipe 'digit'; did you mean digits?"),
        (
            "render --pool cpu --set distill.logit.temperature=-1",
            "error: distill.logit.temperature must be > 0.0, got -1",
        ),
        (
            "render --pool gpu-a10g --processes 2",
            "error: processes_per_node must be 0 (the pool's own number) to 1 on pool",
        ),
        (
            "render --pool gpu-a10",
            "error: unknown pool 'gpu-a10'; did you mean gpu-a10g",
        ),
    ],
)
def test_wrong_input_ends_in_one_message(command, message, capsys):
    assert main(command.split()) == EXIT_CODE
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err.startswith(message)
    assert printed.err.count("\n") == 1


@pytest.mark.parametrize("command", ["", "render", "render --pool cpu --nodes 0", "render --pool cpu --stage export"])
def test_wrong_usage_is_refused(command, capsys):
    with pytest.raises(SystemExit) as ended:
        main(command.split())
    assert ended.value.code == EXIT_CODE
    assert "usage: python -m components.launch" in capsys.readouterr().err


def test_rendering_imports_neither_torch_nor_kubernetes():
    code = (
        "import sys; from components.launch.__main__ import main; main(['render', '--pool', 'cpu']); main(['pools']);"
        "sys.exit(', '.join({'torch', 'timm', 'mlflow', 'kfp', 'kubernetes'} & sys.modules.keys()) or None)"
    )
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stderr
