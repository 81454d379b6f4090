"""Pictures of several digits, or of none, with a list of their labels: `python -m tests.multi_label_digits FOLDER [COUNT]`."""

from __future__ import annotations

import csv
import sys
from pathlib import Path

import numpy as np
from PIL import Image
from sklearn.datasets import load_digits


def write_list(folder: Path, *, count: int, classes: int = 10) -> Path:
    """Write pictures of 16 x 16 pixels with up to four of scikit-learn's digits below `classes` each, and give their list, `list.csv`."""
    digits, generator = load_digits(), np.random.default_rng(0)
    known = np.flatnonzero(digits.target < classes)
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "list.csv").open("w", newline="") as file:
        lines = csv.writer(file)
        lines.writerow(("path", "label"))
        for number in range(count):
            canvas, labels = np.zeros((2, 2, 8, 8)), set[str]()
            for cell in np.flatnonzero(generator.random(4) < 0.4):
                one = generator.choice(known)
                labels.add(str(digits.target[one]))
                canvas[divmod(int(cell), 2)] = digits.images[one]
            picture = canvas.transpose(0, 2, 1, 3).reshape(16, 16)
            Image.fromarray((picture * (255 / 16)).round().astype(np.uint8)).save(folder / f"{number}.png")
            lines.writerow((f"{number}.png", " | ".join(sorted(labels)) or "|"))
    return folder / "list.csv"


if __name__ == "__main__":
    print(write_list(Path(sys.argv[1]), count=int(sys.argv[2]) if len(sys.argv) > 2 else 2000))
