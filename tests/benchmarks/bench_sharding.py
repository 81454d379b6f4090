"""Memory and time of a distillation whose weights each process keeps, or shares: `python tests/benchmarks/bench_sharding.py`.

Three steps on noise, by vision transformers that were never trained, with an online teacher: `--width` and `--depth` are the student's,
`--teacher-width` and `--teacher-depth` the teacher's. Memory is a process's own at its peak, from its start to the saving of the student,
with some 400 MiB of libraries; the pages of the teacher's file, which the processes share, are not counted. Seconds are those of a step,
the median over the processes and steps but for the first.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import psutil
import torch
from PIL import Image
from safetensors.torch import save_file
from torch import nn

from trainer import config
from trainer.io import artifacts
from trainer.models import networks
from trainer.profiling.evidence_files import read_evidence
from trainer.stages import prepare

WAYS: dict[str, dict[str, object]] = {
    "whole": {"sharding": "none"},
    "zero": {"sharding": "none", "zero": True},
    "fsdp": {"sharding": "fsdp"},
}
CLASSES, IMAGES = 2, 15  # of each class
INTERVAL_S = 0.05
"""Seconds between two looks at the processes."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in (("width", 384), ("depth", 12), ("teacher-width", 192), ("teacher-depth", 2)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=[*WAYS])
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--set", nargs="*", default=[], metavar="NAME=JSON", help="further settings of distill")
    options = parser.parse_args()
    teacher = _model(options.teacher_width, options.teacher_depth)
    student = _model(options.width, options.depth)
    further = {name: json.loads(value) for name, _, value in (text.partition("=") for text in options.set)}
    with tempfile.TemporaryDirectory() as folder:
        dataset, taught_by = _dataset(Path(folder)), _blank(teacher, Path(folder) / "teacher")
        sizes = [f"{_parameters(one) / 1e6:,.0f} M" for one in (student, teacher)]
        print(f"student {sizes[0]}, teacher {sizes[1]} weights, {options.processes} processes")
        print("| way | peak MiB of a process | s a step | loss |\n|---|---|---|---|")
        for way in options.ways:
            settings = {"student": student.model_dump(), **WAYS[way], **further}
            peaks, seconds, loss = _train(Path(folder) / way, dataset, taught_by, settings, options.processes)
            print(f"| {way} | {max(peaks) >> 20:,} | {seconds:.2f} | {loss:.5f} |", flush=True)


def _model(width: int, depth: int) -> config.ModelSettings:
    args = {"img_size": 32, "patch_size": 16, "embed_dim": width, "depth": depth, "num_heads": max(1, width // 64)}
    return config.ModelSettings(architecture="vit_tiny_patch16_224", args=args)


def _parameters(settings: config.ModelSettings) -> int:
    with torch.device("meta"):
        return networks.parameter_count(networks.create(settings, ["a"] * CLASSES))


def _dataset(folder: Path) -> str:
    numbers = np.random.default_rng(0)
    for index in range(CLASSES * IMAGES):
        photo = folder / "photos" / f"class-{index % CLASSES}" / f"{index}.png"
        photo.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(numbers.integers(0, 256, (32, 32, 3), dtype=np.uint8)).save(photo)
    settings = config.DataSettings(source=f"imagefolder:{folder / 'photos'}", image_size=32)
    prepare.run(settings, dataset=folder / "dataset")
    return str(folder / "dataset")


def _blank(settings: config.ModelSettings, folder: Path) -> str:
    torch.manual_seed(0)
    model = networks.create(settings, [f"class-{index}" for index in range(CLASSES)])
    with artifacts.create(folder, "model", settings={}) as draft:
        networks.save(networks.Classifier(nn.Identity(), model.card), draft.path)
        save_file(model.network.state_dict(), draft.path / networks.WEIGHTS)  # without a copy of them all
    return str(folder)


def _train(
    folder: Path, dataset: str, teacher: str, settings: dict[str, object], processes: int
) -> tuple[list[int], float, float]:
    """Distill; gives the peak of each process in bytes, the seconds of a step and the last loss."""
    few = {"epochs": 1, "batch_size": 8, "log_every": 1, "checkpoint_every": 0, "workers": 0, "seed": 0}
    section = config.validate(config.DistillSettings, {**few, "evidence": {"operators_steps": 0}, **settings})
    command = [
        sys.executable, "-m", "trainer", "stage", "distill", "--settings", section.model_dump_json(),
        "--processes", str(processes), "--dataset", dataset, "--teacher", teacher,
        "--student", str(folder / "student"), "--evidence", str(folder / "evidence"),
    ]  # fmt: skip
    environment = os.environ | {"TRAINER_DEVICE": "cpu", "OMP_NUM_THREADS": "1"}
    peaks = _watch(subprocess.Popen(command, env=environment))
    (training,) = read_evidence(folder / "evidence").trainings
    steps = [rank.steps["seconds"][1:].tolist() for rank in training.ranks]
    return peaks, statistics.median([one for rank in steps for one in rank]), float(training.metrics["loss"].values[-1])


def _watch(launcher: subprocess.Popen[bytes]) -> list[int]:
    """Look at the training processes until the launcher ends; gives the most memory that each had of its own, in bytes."""
    seen: dict[int, int] = {}
    while launcher.poll() is None:
        for child in psutil.Process(launcher.pid).children():
            try:
                memory = child.memory_info()
                if "--worker" in child.cmdline():
                    seen[child.pid] = max(seen.get(child.pid, 0), memory.rss - memory.shared)
            except psutil.NoSuchProcess:  # it has just ended
                continue
        time.sleep(INTERVAL_S)
    if launcher.returncode:
        raise SystemExit(f"the training ended with exit code {launcher.returncode}")
    return [*seen.values()]


if __name__ == "__main__":
    main()
