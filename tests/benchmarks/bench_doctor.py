"""What the doctor finds in public training scripts that are healthy: `python tests/benchmarks/bench_doctor.py FOLDER --photos PHOTOS`.

FOLDER has clones of what the scripts below come from:

    git clone https://github.com/pytorch/examples
    git clone https://github.com/huggingface/pytorch-image-models timm
    git clone https://github.com/huggingface/accelerate
    git clone https://github.com/Lightning-AI/pytorch-lightning lightning        # whose examples need jsonargparse

Each script runs with the doctor's two lines and is otherwise as published, but that MNIST is the digits of scikit-learn, enlarged, that
photos are your own, and that no network starts from weights of the internet (`edits`). What the rules find is printed, for a person to
judge: what is no fault of the script is a false alarm. Beside other work, rules on the use of the machine find that.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits

ROOT = Path(__file__).resolve().parents[2]


@dataclass(frozen=True)
class Script:
    """A public script, what is changed in it, and how it is called."""

    path: str
    edits: Mapping[str, str]
    """Text of the script -> what takes its place; PLACE is the folder of the page."""
    arguments: str = ""


def attached(line: str, model: str = "model", indent: int = 4) -> dict[str, str]:
    """Put the two lines, as one, behind a line."""
    return {f"{line}\n": f"{line}\n{' ' * indent}from trainer import doctor; doctor.attach({model}, PLACE)\n"}


_NO_WEIGHTS = {"pretrained=True": "pretrained=False"}
_OF_LIGHTNING = {
    "from lightning.pytorch.demos.mnist_datamodule import MNIST": "from torchvision.datasets import MNIST",
    "\nimport torch\n": "\nimport torch\nfrom trainer import doctor\n",
}
_FEW_BATCHES = "--trainer.max_epochs=2 --trainer.limit_train_batches=300 --trainer.accelerator=cpu"
_MODEL_IN_A_FUNCTION = attached("    model = Net().to(device)")
SCRIPTS = {
    "examples/mnist": Script("examples/mnist/main.py", _MODEL_IN_A_FUNCTION, "--epochs 2"),
    "examples/mnist_rnn": Script("examples/mnist_rnn/main.py", _MODEL_IN_A_FUNCTION, "--epochs 2"),
    "examples/siamese_network": Script(
        "examples/siamese_network/main.py", attached("    model = SiameseNetwork().to(device)"), "--epochs 1"
    ),
    "examples/vae": Script("examples/vae/main.py", attached("model = VAE().to(device)", indent=0), "--epochs 2"),
    "examples/imagenet": Script(
        "examples/imagenet/main.py",
        attached("        model = models.__dict__[args.arch]()", indent=8),
        "{photos} --arch resnet18 --epochs 2 --batch-size 32 --workers 1",
    ),
    "examples/dcgan": Script(
        "examples/dcgan/main.py",
        attached("print(netD)", "netD", indent=0),
        "--dataset folder --dataroot {photos}/train --niter 5 --batchSize 32 --workers 1",
    ),
    "timm/train.py": Script(
        "timm/train.py",
        attached("    results = []"),
        "--data-dir {photos} --train-split train --val-split val --model vit_tiny_patch16_224 --img-size 64 --model-kwargs img_size=64 "
        "--num-classes {classes} --batch-size 16 --epochs 8 --workers 1 --device cpu --lr 5e-4 --opt adamw --no-prefetcher",
    ),
    "accelerate/cv_example": Script(
        "accelerate/examples/cv_example.py",
        _NO_WEIGHTS | attached("    # Now we train the model"),
        "--data_dir {flat} --cpu",
    ),
    "lightning/autoencoder": Script(
        "lightning/examples/pytorch/basics/autoencoder.py",
        _OF_LIGHTNING | {'"callbacks": ImageSampler()': '"callbacks": [ImageSampler(), doctor.lightning(PLACE)]'},
        _FEW_BATCHES,
    ),
    "lightning/backbone_image_classifier": Script(
        "lightning/examples/pytorch/basics/backbone_image_classifier.py",
        _OF_LIGHTNING | {"run=False": 'run=False, trainer_defaults={"callbacks": doctor.lightning(PLACE)}'},
        _FEW_BATCHES,
    ),
}


def write_mnist(root: Path, count: int) -> None:
    """Write enlarged digits as MNIST's files: 28 x 28 pixels, moved by up to three of them."""
    digits = load_digits()
    draw = np.random.default_rng(0)
    images = F.interpolate(torch.from_numpy(digits.images)[:, None].float(), size=22, mode="bilinear")[:, 0]
    images = (images * (255 / 16)).clamp(0, 255).byte().numpy()
    root.mkdir(parents=True)
    for name, rows in (("train", count), ("t10k", count // 6)):
        chosen = draw.integers(len(images), size=rows)
        out = np.zeros((rows, 28, 28), dtype=np.uint8)
        for row, (index, top, left) in enumerate(zip(chosen, *draw.integers(0, 7, size=(2, rows)), strict=True)):
            out[row, top : top + 22, left : left + 22] = images[index]
        labels = digits.target[chosen].astype(np.uint8)
        for kind, magic, data in (("images-idx3", (2051, rows, 28, 28), out), ("labels-idx1", (2049, rows), labels)):
            (root / f"{name}-{kind}-ubyte").write_bytes(np.array(magic, dtype=">i4").tobytes() + data.tobytes())


def link_photos(photos: Path, folder: Path, per_class: int) -> int:
    """Link photos as ImageFolder wants them, `train/CLASS` and `val/CLASS`, and as `flat/CLASS_1.jpg`; returns the number of classes."""
    classes = sorted(path for path in photos.iterdir() if path.is_dir())
    (folder / "flat").mkdir(parents=True)
    for one in classes:
        for number, photo in enumerate(sorted(one.iterdir())[:per_class]):
            place = folder / "photos" / ("val" if number % 5 == 0 else "train") / one.name
            place.mkdir(parents=True, exist_ok=True)
            (place / photo.name).symlink_to(photo.resolve())
            (folder / "flat" / f"{one.name.replace('_', '-')}_{number}.jpg").symlink_to(photo.resolve())
    return len(classes)


def run(name: str, script: Script, clones: Path, work: Path, classes: int) -> list[str]:
    """Run a script with the two lines; returns what was found."""
    source, place = clones / script.path, work / "profiles" / name.replace("/", "-")
    text = source.read_text()
    for old, new in script.edits.items():
        if old not in text:
            sys.exit(f"{source}: has no {old.strip()!r} any more; change SCRIPTS in {Path(__file__).name}")
        text = text.replace(old, new.replace("PLACE", repr(str(place))), 1)
    folder = work / "scripts" / name / "here" / "it" / "runs"
    (folder / "results").mkdir(parents=True)
    for near in (folder.parent, folder.parent.parent):  # where the scripts look for MNIST
        for data in ("data", "Datasets"):
            (near / data).symlink_to(work / data)
    (folder / "main.py").write_text(text)
    arguments = script.arguments.format(photos=work / "photos", flat=work / "flat", classes=classes).split()
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}
    command = [sys.executable, "main.py", *arguments]
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(f"{name} failed:\n{done.stderr}")
    training = json.loads((place / "report" / "summary.json").read_text())["training"]
    found = [f"{training['steps']} steps of {training['step_ms']['p50']:.1f} ms"]
    for one in json.loads((place / "report" / "findings.json").read_text()):
        if one["outcome"] == "Finding":
            found.append(f"{one['told']['severity']}: {one['title']}. {one['told']['text']}")
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("clones", type=Path, metavar="FOLDER")
    parser.add_argument("--photos", type=Path, required=True, help="a folder a class")
    parser.add_argument("--per-class", type=int, default=60, help="photos of a class (default: %(default)s)")
    parser.add_argument("--only", nargs="+", choices=SCRIPTS, default=list(SCRIPTS), metavar="NAME")
    parser.add_argument("--output", type=Path, help="keep the pages there")
    arguments = parser.parse_args()
    missing = [one for name in arguments.only if not (one := arguments.clones / SCRIPTS[name].path).is_file()]
    if missing:
        parser.error(f"{missing[0]} is not there; clone what the description names, or choose others by --only")
    with tempfile.TemporaryDirectory() as folder:
        work = Path(folder)
        write_mnist(work / "data" / "MNIST" / "raw", 12_000)
        write_mnist(work / "Datasets" / "MNIST" / "raw", 60_000)  # as many as Lightning's examples split
        classes = link_photos(arguments.photos, work, arguments.per_class)
        for name in arguments.only:
            print(name, *run(name, SCRIPTS[name], arguments.clones, work, classes), sep="\n    ", flush=True)
        if arguments.output:
            shutil.copytree(work / "profiles", arguments.output, dirs_exist_ok=True)


if __name__ == "__main__":
    main()
