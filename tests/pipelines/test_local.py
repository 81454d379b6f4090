"""`python -m pipelines.local`, as a user runs it: in a directory of its own, on the real digits."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
from pathlib import Path

import psutil
import pytest

from components.launching import Placement
from pipelines import local
from pipelines.compile import compiled_text
from tests.pipelines.local_runs import ALL, PLAIN, SMALL, command, environment, happened, start
from trainer import config
from trainer.io import artifacts
from trainer.io.errors import EXIT_CODE, INTERRUPTED_EXIT_CODE, LaunchError
from trainer.report import finished_run
from trainer.runner import launch
from trainer.stages import STAGES

RECORD = "distill.teacher=recorded reinforce.views=2"
MEASURE = "tune.enabled=true tune.search=false"


def read_summary(directory):
    return json.loads((directory / "summary.json").read_text())


def student_of(directory):
    """What a run's student says of itself."""
    (student,) = (directory / "pipeline").glob("*/distill/student")
    return artifacts.manifest(student, "model")


def assert_one_message(ended, pattern):
    assert ended.returncode == EXIT_CODE
    assert re.fullmatch(rf"error: {pattern}\n", ended.stderr), ended.stderr
    assert "Traceback" not in ended.stdout


def assert_last_message(ended, pattern):
    assert ended.returncode == EXIT_CODE
    assert re.search(rf"^error: {pattern}", ended.stderr, flags=re.MULTILINE), ended.stderr


@pytest.mark.parametrize(
    ("arguments", "pattern"),
    [
        (["--recipe", "digts"], r"unknown recipe 'digts'; did you mean digits\?.*"),
        (["--set", "distill.temprature=2"], r"unknown setting .*did you mean distill\.temperature.*"),
        (["--set", "distill.temperature=-1"], r"distill\.temperature must be > 0(\.0)?, got -1"),
        (["--set", "distill.temperature"], r"override 'distill.temperature': is not key=value.*"),
        (["--processes", "-1"], r"processes_per_node must be >= 0 .*, got -1"),
        (["--nodes", "0"], r"nodes must be >= 1, got 0"),
        (["--nodes", "2"], r"nodes = 2, but this machine is one; name a node pool with pool"),
        (["--pool", "gpu-a10"], r".*gpu-a10.*did you mean gpu-a10g.*"),
        (["--pool", "cpu"], r"TRAINER_ARTIFACTS='': a cluster's job cannot read what lies on this machine; .*"),
        (["--output", "file/below"], r"cannot write to .*file.*"),
    ],
)
def test_wrong_input_ends_in_one_message_before_anything_starts(tmp_path, monkeypatch, capsys, arguments, pattern):
    """In this process: to start one for each takes seconds, in which only modules are imported."""
    (tmp_path / "file").touch()
    monkeypatch.chdir(tmp_path)
    for name in [name for name in os.environ if name.startswith(("MLFLOW_", "TRAINER_"))]:
        monkeypatch.delenv(name)
    code, said = local.main(["--processes", "1", *arguments]), capsys.readouterr()
    assert (code, said.out) == (EXIT_CODE, "")
    assert re.fullmatch(rf"error: {pattern}\n", said.err), said.err
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


@pytest.mark.parametrize(
    ("gpus", "device", "asked", "expected"),
    [
        (1, "auto", {}, 1),
        (8, "auto", {}, 8),
        (8, "cuda", {}, 8),
        (0, "auto", {}, 2),
        (8, "cpu", {}, 2),
        (8, "auto", {"processes_per_node": 3}, 3),
        (8, "auto", {"pool": "cpu"}, 0),  # the pool's own number
    ],
)
def test_one_process_for_each_gpu_and_two_without(monkeypatch, gpus, device, asked, expected):
    monkeypatch.setattr(launch, "gpus", lambda: gpus)
    assert local.with_processes(Placement(**asked), device).processes_per_node == expected


def test_a_store_that_is_not_there_is_reported_before_anything_starts(tmp_path):
    store = {"TRAINER_ARTIFACTS": "s3://bucket/x", "AWS_ENDPOINT_URL_S3": "http://127.0.0.1:9", "AWS_MAX_ATTEMPTS": "1"}
    keys = {"AWS_ACCESS_KEY_ID": "id", "AWS_SECRET_ACCESS_KEY": "key"}
    ended = start(tmp_path, "--pool", "cpu", **store, **keys)
    assert_one_message(ended, r"s3://bucket/x: gave up after 1 attempts .* See to the store at http://127.0.0.1:9 .*")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("pool", "named", "expected"),
    [
        ("", "s3://other/checkpoints", str(local.CHECKPOINTS.resolve())),
        ("cpu", "", "s3://bucket/x/checkpoints"),
        ("cpu", "/runs/.checkpoints", "s3://bucket/x/checkpoints"),
        ("cpu", "s3://other/checkpoints", "s3://other/checkpoints"),
    ],
)
def test_the_checkpoints_of_an_interrupted_run_lie_where_the_next_run_looks(monkeypatch, pool, named, expected):
    monkeypatch.setenv("TRAINER_ARTIFACTS", "s3://bucket/x")
    monkeypatch.setenv("TRAINER_CHECKPOINTS", named)
    place = Placement(pool=pool)
    for directory in (Path("runs/1"), Path("runs/2")):
        assert local._environment(config.resolve("digits"), directory, place)["TRAINER_CHECKPOINTS"] == expected


def test_debug_adds_the_traceback(tmp_path):
    ended = start(tmp_path, "--recipe", "digts", "--debug")
    assert ended.returncode == EXIT_CODE
    assert ended.stderr.startswith("Traceback")
    assert "\nerror: unknown recipe" in ended.stderr


def test_missing_images_are_found_by_the_first_task(tmp_path):
    ended = start(tmp_path, "--set", "data.source=imagefolder:/nowhere tracking.enabled=false")
    assert_one_message(ended, "configure: .*/nowhere.*")
    assert happened(ended.stdout, "started") == {"configure"}


def test_an_output_of_an_earlier_run_does_not_lead_to_what_that_made(tmp_path):
    """It would pass for what this run has made."""
    (tmp_path / "again" / "pipeline").mkdir(parents=True)
    (tmp_path / "again" / "exported").symlink_to("pipeline")
    (tmp_path / "again" / "summary.json").write_text("{}")
    start(tmp_path, "--output", "again", "--set", "data.source=imagefolder:/nowhere tracking.enabled=false")
    assert not {"exported", "summary.json"} & {path.name for path in (tmp_path / "again").iterdir()}


def test_a_tracking_server_that_is_down_stops_the_run_before_the_expensive_part(tmp_path):
    ended = start(tmp_path, MLFLOW_TRACKING_URI="http://127.0.0.1:9")
    assert ended.returncode == EXIT_CODE
    assert "error: configure: MLflow at http://127.0.0.1:9: does not answer" in ended.stderr
    assert happened(ended.stdout, "started") == {"configure"}


def test_the_code_is_part_of_what_a_result_depends_on(tmp_path):
    for name in ("stage.py", "recipe.toml", "notes.txt"):
        (tmp_path / name).write_text("1")
    versions = [local.code_version(tmp_path)]
    for name in ("stage.py", "recipe.toml"):
        (tmp_path / name).write_text("2")
        versions.append(local.code_version(tmp_path))
    assert len(set(versions)) == 3
    (tmp_path / "notes.txt").write_text("2")
    assert local.code_version(tmp_path) == versions[-1]


def test_the_output_of_a_run_without_kfp_is_left_alone(tmp_path):
    (tmp_path / "taken" / "student").mkdir(parents=True)
    ended = start(tmp_path, "--output", "taken")
    assert_last_message(
        ended, r"cannot write to taken: it has student/ of `python -m trainer run`; choose another output"
    )


def test_a_skipped_task_is_an_error():
    some = {name: object() for name in ALL - {"evaluate", "register"}}
    with pytest.raises(LaunchError, match="without running evaluate, register;"):
        local._check_all_ran(compiled_text(), some)


@pytest.mark.long
def test_a_run_and_what_the_next_one_takes_from_it(tmp_path):
    """Three runs, of which the second needs every stage; `make test` has two others with a cache in tests/local/test_digits.py."""
    first = start(tmp_path, "--set", SMALL)
    assert first.returncode == 0, first.stdout + first.stderr
    assert happened(first.stdout, "done") == PLAIN
    assert "KFP Executor" not in first.stdout
    before = read_summary(tmp_path / "runs" / "latest")
    assert set(before["stages"]) == set(STAGES) - {"reinforce", "tune", "warm_up"}
    assert not any("cached" in stage for stage in before["stages"].values())
    assert all(Path(path).is_file() for path in before["reports"].values())
    assert finished_run.evaluation_of_student(str(tmp_path / "runs" / "latest")) is not None
    assert 'href="evaluation.html"' in (tmp_path / "runs" / "latest" / "index.html").read_text()
    for name, kind in (("teacher", "model"), ("student", "model"), ("dataset", "dataset"), ("report", "report")):
        artifacts.read(tmp_path / "runs" / "latest" / name, kind)
    assert artifacts.read(tmp_path / "runs" / "latest" / "exported", "export").figures["candidates"]
    assert 'href="export.html"' in (tmp_path / "runs" / "latest" / "index.html").read_text()

    second = start(tmp_path, "--set", f"{SMALL} {RECORD} {MEASURE} warm_up.enabled=true", "--output", "recorded")
    assert second.returncode == 0, second.stdout + second.stderr
    assert happened(second.stdout, "cached") == {"prepare", "pretrain"}
    assert happened(second.stdout, "done") == ALL - {"prepare", "pretrain"}
    recorded = read_summary(tmp_path / "recorded")
    assert (tmp_path / "recorded" / "teacher").resolve() == (tmp_path / "runs" / "latest" / "teacher").resolve()
    for name in ("prepare", "pretrain"):
        assert recorded["stages"][name] == before["stages"][name] | {"cached": True}
    assert list(recorded["stages"]) == list(STAGES)
    assert recorded["bill"]["forecast"]["stages"] == ["reinforce", "distill"]
    assert recorded["teacher_outputs"]["views"] == 2
    assert "<html" in Path(recorded["reports"]["reinforce"]).read_text(encoding="utf-8")
    (outputs,) = (tmp_path / "recorded" / "pipeline").glob("*/reinforce/teacher_outputs")
    fingerprint = artifacts.read(outputs, "teacher_outputs").fingerprint
    assert student_of(tmp_path / "recorded").parents["teacher_outputs"] == fingerprint

    wrong = f"{SMALL} {RECORD} distill.base_learning_rate=1e30"
    third = start(tmp_path, "--set", wrong)
    assert happened(third.stdout, "cached") == {"prepare", "pretrain", "reinforce"}
    assert_last_message(third, r"distill: .*not finite.*")


@pytest.mark.long
def test_an_interruption_ends_all_processes_and_the_next_run_takes_what_was_made(tmp_path):
    arguments = command("--set", f"{SMALL} pretrain.mae.epochs=100000")
    with subprocess.Popen(
        arguments, cwd=tmp_path, env=environment(), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as process:
        seen = []
        while not seen or "mae  step" not in seen[-1]:
            seen.append(process.stdout.readline())
            assert seen[-1], "".join(seen)
        family = psutil.Process(process.pid).children(recursive=True)
        process.send_signal(signal.SIGINT)
        rest, _ = process.communicate(timeout=60)
    assert process.returncode == INTERRUPTED_EXIT_CODE
    assert rest.splitlines()[-1].startswith("interrupted; ")
    assert "Traceback" not in rest
    assert len(family) >= 3
    assert not [member for member in family if member.is_running() and member.status() != psutil.STATUS_ZOMBIE]

    again = start(tmp_path, "--set", SMALL)
    assert again.returncode == 0, again.stdout + again.stderr
    assert happened(again.stdout, "cached") == {"prepare"}
    assert happened(again.stdout, "done") == PLAIN - {"prepare"}
    assert student_of(tmp_path / "runs" / "latest").parents["teacher"]
    assert read_summary(tmp_path / "runs" / "latest")["mlflow"]["model_version"] == "1"
