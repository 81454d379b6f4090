"""Each benchmark at its smallest size: it runs to its end and prints its table, whose numbers say nothing then."""

import contextlib
import csv
import importlib
import itertools
import json
import math
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.benchmarks import bench_accuracy, bench_distillation, bench_gpu
from tests.distillations import TINY
from trainer import cli, stages
from trainer.data import dataset as dataset_module
from trainer.data import loader as loader_module
from trainer.devices.device import Host
from trainer.profiling.recorder import LoaderStats
from trainer.runner import launch

pytestmark = pytest.mark.filterwarnings("ignore")  # of libraries that the benchmarks measure ours against

SMALL = ["--teacher", "test_vit", "--student", "test_vit", "--batch-size", "2", "--precision", "fp32", "--classes", "2"]

VIT = "{" + ", ".join(f"{name} = {value}" for name, value in TINY.items()) + "}"
RECIPE = [
    "data.image_size=16", "pretrain.mae.epochs=0", "pretrain.finetune.epochs=1", "distill.epochs=1", "tune.minutes=0.001",
    "tune.fewest_steps=1", "evaluate.latency_runs=10", f"pretrain.teacher.args={VIT}", f"distill.student.args={VIT}",
]  # fmt: skip
"""The digits by models that take a moment."""


def run(name, *arguments, monkeypatch):
    monkeypatch.setattr(sys, "argv", [f"{name}.py", *arguments])
    importlib.import_module(f"tests.benchmarks.{name}").main()


@pytest.fixture
def bench(monkeypatch, tmp_path, capsys):
    """Runs a benchmark in this process, and gives what it prints; what it changes of the process is put back."""
    monkeypatch.setenv("TRAINER_DEVICE", "cpu")
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(dataset_module, "IN_MEMORY_BYTES", dataset_module.IN_MEMORY_BYTES)
    monkeypatch.setattr(loader_module, "memory_share", loader_module.memory_share)
    monkeypatch.setattr(launch, "run_here", run_without_launcher)
    threads = torch.get_num_threads()

    def print_table(name, *arguments):
        run(name, *arguments, monkeypatch=monkeypatch)
        return capsys.readouterr().out

    yield print_table
    torch.set_num_threads(threads)


def run_without_launcher(spec, stop=None):
    """A launched stage in this process: a launcher takes seconds for each."""
    stages.call(spec.stage, json.dumps(spec.settings), {**spec.inputs, **spec.outputs})


def run_command(command, *, check, env, stdout, stderr):
    """A stage's command in this process, which takes seconds to begin as one of its own."""
    assert command[1:3] == ["-m", "trainer"]
    return subprocess.CompletedProcess(command, cli.main(command[3:]))


@pytest.mark.long
def test_gpu(bench):
    table = bench("bench_gpu", "--smoke")
    lanes = {part.lane for part in bench_gpu.PARTS}
    assert all(f" {lane} " in table for lane in lanes)
    assert "loop, images/s apart: loader " in table
    with pytest.raises(SystemExit, match="torch finds no GPU on this machine; --smoke"):
        bench("bench_gpu")


def test_distillation(bench):
    table = bench("bench_distillation", *SMALL, "--steps", "1", "--rounds", "1", "--no-memory")
    assert all(f"\n{lane} " in table for lane in ("alone", "recorded", "online", "timm", "bare", "reinforce"))


@pytest.mark.parametrize(("ready", "untimed"), [([4] * 9, 3), ([4, 3, 2, 2, 1, 0], 5), ([math.nan] * 99, 40)])
def test_a_distillation_is_timed_with_a_ready_loader(ready, untimed):
    loader = LoaderStats(workers=2)
    stopwatch = bench_distillation.Stopwatch(torch.device("cpu"), 5, loader)
    readings = itertools.chain([4] * bench_distillation.WARM_UP, ready, itertools.repeat(0))
    steps = next(step for step, loader.ready in enumerate(readings) if stopwatch.is_over())
    assert steps == bench_distillation.WARM_UP + untimed + 5


def test_emulated_bf16_is_not_compared(monkeypatch):
    monkeypatch.setattr(Host, "uses_bf16", lambda *_: False)
    with pytest.raises(SystemExit, match="--precision bf16: this processor has no bf16 instructions"):
        run("bench_distillation", "--precision", "bf16", monkeypatch=monkeypatch)


def test_checkpoints(bench):
    table = bench(
        "bench_checkpoints", "--architecture", "test_vit", "--image-size", "32", "--batch-size", "1", "--rounds", "1"
    )
    assert "images; 1 checkpoints" in table


def test_recorder(bench):
    table = bench("bench_recorder", "--rounds", "1", "--seconds", "0.01", "--steps", "5", "--batch-size", "8")
    assert "ViT-Ti, 64 px" in table


@pytest.mark.long
def test_large_set(bench, object_store):
    table = bench("bench_large_set", object_store.uri("large"), "--images", "3000")
    assert [line.split()[0] for line in table.splitlines()[-5:]] == [
        "prepare",
        "pretrain",
        "reinforce",
        "distill",
        "evaluate",
    ]


def test_prepare(capfd, monkeypatch, tmp_path):
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    arguments = ("--rounds", "1", "--rows", "2000", "--parts", "deciding", "scaling", "--photos", "10")
    run("bench_prepare", *arguments, monkeypatch=monkeypatch)
    table = capfd.readouterr().out  # of its processes
    assert "deciding on 2,000: " in table
    assert len(re.findall(r"^prepare +[12] ", table, re.MULTILINE)) == 2


def test_windows(bench):
    table = bench("bench_windows", "--images", "600000", "--nodes", "2", "--epochs", "2")
    assert "each image is read 1 to 1 times in an epoch, by 16 processes together" in table
    first, second = (
        [line.split() for line in table.splitlines() if " all " in line and f" {epoch} " in line] for epoch in (1, 2)
    )
    assert [row[4:6] for row in first] == [["10.48", "GB"]] * 2
    assert [row[4:6] for row in second] == [["0", "MB"]] * 2


def test_data(bench):
    table = bench(
        "bench_data", "--rounds", "1", "--batches", "1", "--per-class", "14", "--image-size", "64", "--view-size", "32"
    )
    assert "| torchvision, original photos |" in table


@pytest.mark.slow
def test_curation(bench):
    table = bench("bench_curation", "--per-class", "5", "--size", "64", "--looks", "1000", "--steps", "1")
    assert "complete: True" in table
    assert "10 % brighter                 100.0% found" in table


@pytest.mark.long
def test_serving(bench, tmp_path, monkeypatch):
    """A run that is registered in a store of its own, served by processes of their own."""
    monkeypatch.chdir(tmp_path)
    given = ["--set", *RECIPE, "evaluate.gate.max_accuracy_drop=1"]
    assert cli.main(["run", "digits", *given, "--output", str(tmp_path / "runs" / "one"), "--processes", "1"]) == 0
    table = bench(
        "bench_serving",
        str(tmp_path / "runs" / "one"),
        "--force",
        "--clients",
        "2",
        "--seconds",
        "0.5",
        "--overload",
        "1",
        "--edge",
        "64",
    )
    assert "MLflow        2" in table
    assert re.search(r"requests a second for 1 s: [\d,]+ of 200", table)
    assert "MiB at the end" in table


@pytest.mark.long
def test_kernels(bench):
    assert "teacher, fp32" in bench(
        "bench_kernels", "--rounds", "1", "--batch-size", "1", "--teacher", "vit_tiny_patch16_224"
    )


@pytest.mark.long
def test_tune(bench):
    table = bench(
        "bench_tune",
        "--edge",
        "16",
        "--per-class",
        "20",
        "--minutes",
        "0.001",
        "--cells",
        "1",
        "--rounds",
        "1",
        "--workers",
        "0",
    )
    assert "tune reached" in table


@pytest.mark.long
def test_forecast(bench):
    assert "forecast/actual" in bench("bench_forecast", "digits", "--set", *RECIPE)


MNIST = """
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader
from torchvision import datasets, transforms

class Net(nn.Sequential):
    def __init__(self):
        super().__init__(nn.Flatten(), nn.Linear(784, 10))

def main():
    device = torch.device("cpu")
    model = Net().to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    loader = DataLoader(datasets.MNIST("../data", download=True, transform=transforms.ToTensor()), batch_size=256)
    for images, labels in loader:
        F.cross_entropy(model(images * 255), labels).backward()
        optimizer.step()
        optimizer.zero_grad()

main()
"""
"""Stands for the published script, with pixels that are not scaled."""


def test_doctor(bench, tmp_path, capsys):
    photo = tmp_path / "photos" / "class" / "0.jpg"
    photo.parent.mkdir(parents=True)
    photo.touch()
    script = tmp_path / "clones" / "examples" / "mnist" / "main.py"
    arguments = (str(tmp_path / "clones"), "--photos", str(tmp_path / "photos"), "--only", "examples/mnist")
    with pytest.raises(SystemExit):
        bench("bench_doctor", *arguments)
    assert f"{script} is not there" in capsys.readouterr().err
    script.parent.mkdir(parents=True)
    script.write_text(MNIST)
    found = bench("bench_doctor", *arguments)
    assert "47 steps of" in found  # 12,000 images
    assert "severe: Update ratio" in found
    script.write_text("nothing that is known")
    with pytest.raises(SystemExit, match="has no 'model = Net"):
        bench("bench_doctor", *arguments)


@pytest.mark.long
def test_accuracy(bench, monkeypatch):
    monkeypatch.setattr(bench_accuracy.subprocess, "run", run_command)
    monkeypatch.setattr(cli, "ended_by_sigterm", contextlib.nullcontext)  # a thread cannot listen to signals
    assert "| 0 |" in bench("bench_accuracy", "labels", "digits", "--seeds", "0", "--set", *RECIPE)


@pytest.mark.long
def test_methods(bench, monkeypatch):
    monkeypatch.setattr(bench_accuracy.subprocess, "run", run_command)
    monkeypatch.setattr(cli, "ended_by_sigterm", contextlib.nullcontext)
    own = "kl at T = 4: distill.logit.temperature=4"
    table = bench(
        "bench_accuracy", "methods", "digits", "--only", "hard", "--variant", own, "--seeds", "0",
        "--set", *RECIPE, "distill.teacher=recorded", "reinforce.views=1",
    )  # fmt: skip
    assert "| hard |" in table
    assert "| kl at T = 4 |" in table


@pytest.mark.long
def test_lightly_train(bench, monkeypatch, tmp_path):
    """This project's half: LightlyTrain wants an interpreter of its own."""
    monkeypatch.setattr(bench_accuracy.subprocess, "run", run_command)
    monkeypatch.setattr(cli, "ended_by_sigterm", contextlib.nullcontext)
    changes = [
        "data.source=digits",
        "data.image_size=16",
        "pretrain.weights=",
        "pretrain.mae.epochs=1",
        "pretrain.teacher.image_size=0",
        "pretrain.teacher.architecture=vit_tiny_patch16_224",
        f"pretrain.teacher.args={VIT}",
        "distill.student.architecture=vit_tiny_patch16_224",
        f"distill.student.args={VIT}",
        "distill.epochs=1",
    ]
    table = bench("bench_lightly_train", "--set", *changes, "--output", str(tmp_path / "out"))
    assert re.search(r"student, by this project +[\d.]+ +[\d.]+\n", table)
    assert "by LightlyTrain" not in table
    assert len(list((tmp_path / "out" / "photos").glob("*.png"))) == 899


def test_few_labels_are_kept_whatever_the_files_format(bench, tmp_path):
    def splits(suffix):
        folder, listed = tmp_path / suffix / "photos", tmp_path / suffix / "test.txt"
        for name in ("a/1", "a/2", "a/3", "a/4", "b/1", "b/2", "b/3", "b/5"):
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / f"{name}.{suffix}").touch()
        listed.write_text("a/1\nb/5\n")
        options = ("--labels", "1", "--val", "1", "--test", str(listed))
        printed = bench("few_labels", str(folder), str(tmp_path / "few.csv"), *options)
        assert printed == "2 test, 2 val, 2 train, 2 unlabeled\n"
        with (tmp_path / "few.csv").open() as file:
            found = [*csv.DictReader(file)]
        assert all((tmp_path / row["path"]).is_file() and not Path(row["path"]).is_absolute() for row in found)
        return {(Path(row["path"]).stem, row["label"], row["split"]) for row in found}

    found = splits("jpg")
    assert found == splits("webp")
    assert {("1", "a", "test"), ("5", "b", "test")} <= found
    assert sum(label == "" for _, label, _ in found) == 2
    with pytest.raises(SystemExit, match=r"a: has 4 photos for --val 20 and --labels 10"):
        bench("few_labels", str(tmp_path / "jpg" / "photos"), str(tmp_path / "few.csv"))
    with pytest.raises(SystemExit, match=r"few\.csv: write it beside .*photos or above"):
        bench("few_labels", str(tmp_path / "jpg" / "photos"), str(tmp_path / "webp" / "few.csv"))
    apart = tmp_path / "jpg" / "apart"
    for name in ("a/7", "b/8"):
        (apart / name).parent.mkdir(parents=True)
        (apart / f"{name}.jpg").touch()
    options = ("--labels", "1", "--val", "1", "--test", str(apart))
    assert bench("few_labels", str(tmp_path / "jpg" / "photos"), str(tmp_path / "few.csv"), *options).startswith(
        "2 val, 2 train, 4 "
    )
    with (tmp_path / "few.csv").open() as file:
        assert [row["path"] for row in csv.DictReader(file) if row["split"] == "test"] == [
            "jpg/apart/a/7.jpg",
            "jpg/apart/b/8.jpg",
        ]
    options = ("--labels", "all", "--val", "1", "--test", str(apart))
    printed = bench("few_labels", str(tmp_path / "jpg" / "photos"), str(tmp_path / "few.csv"), *options)
    assert printed == "2 val, 6 train, 2 test\n"
    (tmp_path / "other.txt").write_text("c/1")
    options = ("--labels", "1", "--val", "1", "--test", str(tmp_path / "other.txt"))
    with pytest.raises(SystemExit, match=r"other\.txt: 1 of its photos are not in .*photos, first c/1"):
        bench("few_labels", str(tmp_path / "jpg" / "photos"), str(tmp_path / "few.csv"), *options)


def test_a_method_that_there_is_not(bench):
    with pytest.raises(SystemExit, match=r"--only soft: no such method"):
        bench("bench_accuracy", "methods", "digits", "--only", "soft")
    with pytest.raises(SystemExit, match="give it a name of its own"):
        bench("bench_accuracy", "methods", "digits", "--variant", "kl: distill.logit.temperature=4")


def test_minutes_of_what_former_call_began_are_not_known(tmp_path):
    given = {"recipe": "digits", "overrides": ["tracking.enabled=false"], "jobs": 1, "methods": {}}
    bench = bench_accuracy.Bench(**given, seeds=[0, 1], output=tmp_path)
    bench.prepare("whole")
    (tmp_path / "begun.log").write_text("of the call that was stopped\n")
    bench.prepare("begun")
    assert bench.minutes("whole") > 0
    assert math.isnan(bench.minutes("begun"))
    for seed, made in enumerate(["whole", "begun"]):
        (tmp_path / f"{made}.seconds").rename(tmp_path / f"{bench_accuracy.student('kl', seed)}.seconds")
    whole = bench.minutes(bench_accuracy.student("kl", 0))
    row = bench_accuracy.table_of_methods(bench, {"kl": [(1.0, 2.0), (2.0, 3.0)]})[-1]
    assert row == f"| kl | 1.5 | 1.0 | 0.5 | 2.5 | {whole:.1f} |"
