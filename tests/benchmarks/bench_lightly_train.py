"""One distillation without labels, by this project and by LightlyTrain: k-NN accuracy of the student's embedding, and images a second.

Both get the same squares, the same frozen teacher, the same first weights of the student, as many images a step and as many epochs, and one
process that loads by itself; each has its own views, losses, optimizer and schedule, as its makers set them. LightlyTrain needs an
interpreter of its own (`pip install lightly-train timm`).

    python tests/benchmarks/bench_lightly_train.py --lightly-python /env/bin/python --set data.source=imagefolder:/photos/grocery
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from safetensors.torch import load_file

from tests.benchmarks.bench_accuracy import Bench
from trainer.config import DEVICE_VARIABLE
from trainer.data.dataset import PreparedDataset, open_dataset
from trainer.devices import choose_device
from trainer.evaluation.embeddings import embed, nearest_neighbors
from trainer.io import artifacts
from trainer.models import networks
from trainer.models.networks import Classifier
from trainer.profiling.evidence_files import read_evidence

BATCH = 64  # of what measures


def write_photos(data: PreparedDataset, folder: Path) -> None:
    """Write the squares that are trained on, without loss."""
    folder.mkdir(parents=True, exist_ok=True)
    for split in data.training_splits(unlabeled=True):
        for index in range(len(split)):
            image = split.read([index])[0].permute(1, 2, 0).numpy()
            Image.fromarray(image).save(folder / f"{split.keys[index]:016x}.png")


def write_untrained(bench: Bench, place: Path) -> Classifier:
    """Make the student with which both begin."""
    if not artifacts.exists(place):
        torch.manual_seed(bench.seeds[0])
        with artifacts.create(place, "model", settings={}) as draft:
            networks.save(networks.create(bench.settings.distill.student, ()), draft.path)
    return networks.load(place)


def knn(model: Classifier, data: PreparedDataset) -> float:
    """Top-1 of the test split by the 20 nearest labeled training images, in percent."""
    device, train, test = choose_device().open(), data.split("train"), data.split("test")
    bank, asked = (embed(model, split, range(len(split)), device, BATCH) for split in (train, test))
    votes = nearest_neighbors(bank, np.asarray(train.labels), asked, len(data.classes))
    return 100 * float((votes.argmax(1) == np.asarray(test.labels)).mean())


def ours(bench: Bench, name: str) -> tuple[Classifier, float]:
    """Distill by this project: the student, and images a second without start and end."""
    places = {"dataset": "data", "teacher": "teacher", "student": name, "evidence": f"{name}-evidence"}
    bench.stage(
        "distill", name, f"distill.weights={bench.output / 'untrained'}", f"distill.seed={bench.seeds[0]}", **places
    )
    (training,) = read_evidence(bench.output / f"{name}-evidence").trainings
    starts = training.ranks[0].steps["start_s"]
    seconds = float(starts[-1] - starts[1]) / (len(starts) - 2)
    return networks.load(bench.output / name), bench.settings.distill.batch_size / seconds


def lightly(bench: Bench, python: str, untrained: Classifier, teacher: Classifier) -> tuple[Classifier, float]:
    """Distill by LightlyTrain: the same."""
    settings, trained = bench.settings.distill, bench.output / "lightly.safetensors"
    job: dict[str, Any] = {
        "photos": str(bench.output / "photos"),
        "output": str(bench.output / "lightly"),
        "trained": str(trained),
        "teacher": {
            "architecture": teacher.card.architecture,
            "weights": str(bench.output / "teacher" / networks.WEIGHTS),
        },
        "student": {
            "architecture": untrained.card.architecture,
            "weights": str(bench.output / "untrained" / networks.WEIGHTS),
        },
        "size": teacher.card.image_size,
        "mean": untrained.card.mean,
        "std": untrained.card.std,
        "epochs": settings.epochs,
        "batch_size": settings.batch_size,
        "seed": bench.seeds[0],
        "threads": torch.get_num_threads(),
    }
    said = bench.output / "lightly.json"
    if not said.exists():
        script = Path(__file__).with_name("distill_by_lightly_train.py")
        with (bench.output / "lightly.log").open("w") as log:
            ended = subprocess.run(
                [python, str(script)], input=json.dumps(job), stdout=subprocess.PIPE, stderr=log, text=True, check=False
            )
        if ended.returncode:
            raise SystemExit(f"LightlyTrain: exit code {ended.returncode}; see {bench.output / 'lightly.log'}")
        said.write_text(ended.stdout.splitlines()[-1])
    model = networks.load(bench.output / "untrained")
    model.network.load_state_dict(load_file(trained))
    return model, json.loads(said.read_text())["images_per_second"]


def main() -> None:
    parser = argparse.ArgumentParser(description="Compare a distillation without labels with LightlyTrain's.")
    parser.add_argument(
        "--lightly-python", help="interpreter that has lightly-train (default: only this project's half)"
    )
    parser.add_argument("--recipe", default="photos-unlabeled", help="default: %(default)s")
    parser.add_argument("--set", dest="overrides", nargs="+", default=[], metavar="KEY=VALUE")
    parser.add_argument("--output", type=Path, help="keeps what is finished (default: a folder that is removed)")
    options = parser.parse_args()
    os.environ.setdefault(DEVICE_VARIABLE, "cpu")
    with tempfile.TemporaryDirectory(prefix="lightly-") as spare:
        output = (options.output or Path(spare)).resolve()
        output.mkdir(parents=True, exist_ok=True)
        given = [
            "tracking.enabled=false",
            "distill.teacher=online",
            "distill.weights=",
            "distill.workers=0",
            *options.overrides,
        ]
        bench = Bench(recipe=options.recipe, overrides=given, seeds=(0,), jobs=1, output=output, methods={})
        bench.prepare()
        bench.pretrain("teacher")
        data, teacher = open_dataset(output / "data"), networks.load(output / "teacher")
        write_photos(data, output / "photos")
        untrained = write_untrained(bench, output / "untrained")
        print(f"{'':28}{'k-NN %':>8}{'images/s':>10}")
        for name, model in (("teacher", teacher), ("student, untrained", untrained)):
            print(f"{name:28}{knn(model, data):8.1f}", flush=True)
        runs = {"student, by this project": lambda: ours(bench, "ours")}
        if options.lightly_python:
            runs["student, by LightlyTrain"] = lambda: lightly(bench, options.lightly_python, untrained, teacher)
        for name, run in runs.items():
            model, rate = run()
            print(f"{name:28}{knn(model, data):8.1f}{rate:10.1f}", flush=True)


if __name__ == "__main__":
    main()
