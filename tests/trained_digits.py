"""A small real data set (scikit-learn's digits) with a teacher and a student that were really trained on it, in seconds."""

from __future__ import annotations

import hashlib
import io
import shutil
from dataclasses import dataclass, replace
from pathlib import Path

import datasets
import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image
from sklearn.datasets import load_digits

from trainer.config import ModelSettings
from trainer.data.dataset_schema import DatasetDescription, features
from trainer.io import artifacts
from trainer.models import networks
from trainer.models.served_student.class_tags import ClassTags
from trainer.models.served_student.preprocessing import Square

EDGE = 16
DATA = {"source": "digits", "fit": "crop", "max_pixels": 100_000}
SQUARE = Square(fit="crop", size=EDGE, max_pixels=100_000)
IMAGES = {"train": range(1000), "val": range(1000, 1200), "test": range(1200, 1500), "unlabeled": range(1500, 1520)}


@dataclass(frozen=True, kw_only=True)
class TrainedDigits:
    """Three artifacts and the test split that they came from."""

    dataset: Path
    teacher: Path
    student: Path
    images: torch.Tensor
    """Test images, uint8 [N, 3, 16, 16]."""
    labels: np.ndarray


def pixels(indices: range) -> torch.Tensor:
    """Digits as uint8 [N, 3, 16, 16]."""
    gray = torch.from_numpy(load_digits().images[indices.start : indices.stop]).float()[:, None] * (255 / 16)
    return F.interpolate(gray, size=(EDGE, EDGE), mode="nearest").round().to(torch.uint8).expand(-1, 3, -1, -1)


def png(image: torch.Tensor) -> bytes:
    buffer = io.BytesIO()
    Image.fromarray(image.permute(1, 2, 0).numpy()).save(buffer, "PNG")
    return buffer.getvalue()


def write_dataset(path: Path, labels: np.ndarray | None = None) -> None:
    """Write the digits; `labels`: other ones than their own, of all of scikit-learn's."""
    labels = load_digits().target if labels is None else labels
    with artifacts.create(path, "dataset", settings=DATA) as draft:
        for name, indices in IMAGES.items():
            encoded = [png(image) for image in pixels(indices)]
            columns = {
                "image": [{"bytes": content, "path": None} for content in encoded],
                "label": [int(labels[index]) if name != "unlabeled" else -1 for index in indices],
                "key": [hashlib.sha256(content).hexdigest() for content in encoded],
                "source": [f"digits/{index}" for index in indices],
            }
            datasets.Dataset.from_dict(columns, features=features()).save_to_disk(draft.path / name)
        images = {name: len(indices) for name, indices in IMAGES.items()}
        DatasetDescription(classes=tuple("0123456789"), image_size=EDGE, images=images).write(draft.path)
        (draft.path / "card.html").write_text("<p>the digits</p>")
        (draft.path / "example.png").write_bytes(png(pixels(IMAGES["test"])[0]))
        draft.figures.update({**images, "classes": 10, "quarantined": 0})


def write_model(path: Path, dim: int, depth: int, steps: int, target: np.ndarray | None = None) -> None:
    """Train a small ViT on the labels, or on others."""
    target = load_digits().target if target is None else target
    torch.manual_seed(0)
    args = {"img_size": EDGE, "patch_size": 8, "embed_dim": dim, "depth": depth, "num_heads": 2}
    model = networks.create(ModelSettings(architecture="vit_tiny_patch16_224", args=args), list("0123456789"))
    images, labels = pixels(IMAGES["train"]), torch.from_numpy(target[: len(IMAGES["train"])]).long()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for _ in range(steps):
        batch = torch.randint(len(images), (128,))
        optimizer.zero_grad()
        F.cross_entropy(model(images[batch]), labels[batch]).backward()
        optimizer.step()
    model.card = replace(model.card, square=SQUARE)
    with artifacts.create(path, "model", settings=args) as draft:
        networks.save(model, draft.path)


ROUND = ("0", "6", "8", "9")
TAGS = ClassTags(
    labels=tuple("0123456789"),
    attributes={
        "value": (*map(float, range(9)), None),
        "shape": tuple("round" if digit in ROUND else "open" for digit in "0123456789"),
    },
    parents={digit: "round" if digit in ROUND else "open" for digit in "0123456789"},
)
"""What is known of digits: their value, but for the nine, and whether a line in them is closed."""


def change_labels(labels: np.ndarray, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Give about one in twenty digits another label; returns the labels, and which ones are wrong."""
    generator = np.random.default_rng(seed)
    wrong = generator.random(len(labels)) < 0.05
    return np.where(wrong, (labels + generator.integers(1, 10, len(labels))) % 10, labels), wrong


def make_trained_digits(directory: Path) -> TrainedDigits:
    """Write the data set, and train the two models."""
    write_dataset(directory / "dataset")
    write_model(directory / "teacher", dim=48, depth=2, steps=100)
    write_model(directory / "student", dim=16, depth=1, steps=100)
    test = IMAGES["test"]
    return TrainedDigits(
        dataset=directory / "dataset",
        teacher=directory / "teacher",
        student=directory / "student",
        images=pixels(test),
        labels=load_digits().target[test.start : test.stop],
    )


def write_tagged_dataset(known: Path, path: Path, tags: ClassTags = TAGS) -> None:
    """Write a data set of the digits again, with attributes and a hierarchy."""
    plain = artifacts.read(known, "dataset")
    with artifacts.create(path, "dataset", settings=plain.settings) as draft:
        shutil.copytree(plain.path, draft.path, dirs_exist_ok=True, ignore=shutil.ignore_patterns("manifest.json"))
        tags.write(draft.path)
        draft.figures.update(plain.figures)
