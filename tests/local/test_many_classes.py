"""Ten thousand classes, from photos to an exported student: nothing takes memory or room with the square of the classes."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from tests.forks import Program

pytestmark = pytest.mark.long

CLASSES = 10_000
HELD_OUT = 200
"""Images of the validation split, and of the test split."""
SQUARE_MIB = CLASSES**2 * 8 / 2**20
"""What one matrix of a number for each pair of classes would take."""
VIT = "architecture=vit_tiny_patch16_224", "args={img_size=16,patch_size=8,embed_dim=32,depth=1,num_heads=2}"
SETTINGS = (
    "data.image_size=16",
    "data.workers=0",
    "tracking.enabled=false",
    "pretrain.mae.epochs=0",
    "evaluate.gate.min_accuracy=0",
    "evaluate.gate.max_accuracy_drop=1",
    "evaluate.gate.min_compression=0.1",
    "evaluate.latency_runs=10",
    *(f"{model}.{value}" for model in ("pretrain.teacher", "distill.student") for value in VIT),
    *(
        f"{training}.{value}"
        for training in ("pretrain.finetune", "distill")
        for value in ("epochs=1", "batch_size=2000", "warmup_epochs=0")
    ),
)
STAGE = """
import json, resource, sys
import trainer

name, overrides, directories = sys.argv[1], json.loads(sys.argv[2]), json.loads(sys.argv[3])
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
trainer.run_stage(name, recipe="digits", overrides=overrides, **directories)
print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024)
"""


def write_list(folder: Path) -> Path:
    """Write photos that differ, and their list: three of each class to train on, and one of some classes in the other splits."""
    generator, lines = np.random.default_rng(0), ["path,label,split"]
    for split, count in (("train", 3 * CLASSES), ("val", HELD_OUT), ("test", HELD_OUT)):
        for number in range(count):
            file = f"{split}-{number:05d}.bmp"
            Image.fromarray(generator.integers(0, 256, (8, 8, 3), dtype=np.uint8)).save(folder / file)
            lines.append(f"{file},class {number % CLASSES:05d},{split}")
    (folder / "list.csv").write_text("\n".join(lines), encoding="utf-8")
    return folder / "list.csv"


def test_ten_thousand_classes_take_memory_and_room_with_their_number(tmp_path):
    photos = tmp_path / "photos"
    photos.mkdir()
    settings = [f"data.source=manifest:{write_list(photos)}", *SETTINGS]
    place = {name: str(tmp_path / name) for name in ("dataset", "teacher", "student", "evaluation", "exported")}

    def grown_mib(stage: str, *names: str, **more: str) -> float:
        directories = {name: place[name] for name in names} | more
        out, _ = Program(STAGE, stage, json.dumps(settings), json.dumps(directories), folder=tmp_path).end(1800)
        return float(out.splitlines()[-1])

    taken = {
        "prepare": grown_mib("prepare", "dataset"),
        "pretrain": grown_mib("pretrain", "dataset", "teacher", evidence=str(tmp_path / "pretrain-evidence")),
        "distill": grown_mib("distill", "dataset", "teacher", "student", evidence=str(tmp_path / "distill-evidence")),
        "evaluate": grown_mib("evaluate", "dataset", "teacher", "student", "evaluation"),
        "export": grown_mib("export", "dataset", "student", "evaluation", "exported"),
    }
    assert max(taken.values()) < SQUARE_MIB / 2, taken
    evaluation = Path(place["evaluation"])
    confusions = json.loads((evaluation / "confusion.json").read_text(encoding="utf-8"))
    assert sum(count for _, _, count in confusions["pairs"]) == HELD_OUT
    sizes = {
        file.relative_to(tmp_path).as_posix(): file.stat().st_size for file in tmp_path.glob("*/*") if file.is_file()
    }
    assert sizes["evaluation/report.html"] < 2**20, sizes
    assert sizes["evaluation/metrics.json"] < 8 * 2**20, sizes
    assert sizes["dataset/card.html"] < 2 * 2**20, sizes
