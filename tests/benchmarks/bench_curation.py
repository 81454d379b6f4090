"""What prepare's search for near-duplicates finds and costs, and which wrong labels are found: `python tests/benchmarks/bench_curation.py`.

- near-duplicates: how many copies of photos are found that were changed in one way each, how many pairs of different classes look the same,
  and what describing how an image looks takes of the time of preparing it, in one loop in one process.
- search: seconds and memory for made-up looks, a tenth of them in bursts of five.
- labels: scikit-learn's digits, of which one label in twenty was changed. The pixels are the embedding that a probe is cross-validated on;
  then teachers judge them that were trained on the changed labels.
"""

from __future__ import annotations

import argparse
import csv
import io
import itertools
import tempfile
import time
import tracemalloc
from collections.abc import Callable, Iterable
from pathlib import Path
from unittest import mock

import numpy as np
from PIL import Image
from sklearn.datasets import load_digits

from tests.benchmarks.photos import write_photos
from tests.trained_digits import IMAGES, change_labels, write_dataset, write_model
from trainer.config import EvaluateSettings
from trainer.data import near_duplicates, preparation
from trainer.data.curation import ImageCandidate
from trainer.data.near_duplicates import appearance
from trainer.evaluation.label_issues import contradicted, cross_validated
from trainer.models.served_student import preprocessing
from trainer.models.served_student.preprocessing import Square
from trainer.stages import evaluate

MOST_PIXELS = 100_000_000


def stored(image: Image.Image, size: int) -> Image.Image:
    return preprocessing.to_square(image, Square(fit="crop", size=size, max_pixels=MOST_PIXELS))


def recompressed(image: Image.Image) -> Image.Image:
    buffer = io.BytesIO()
    image.save(buffer, "JPEG", quality=40)
    return Image.open(buffer).convert("RGB")


def cropped(share: float) -> Callable[[Image.Image], Image.Image]:
    def crop(image: Image.Image) -> Image.Image:
        x, y = round(share * image.width), round(share * image.height)
        return image.crop((x, y, image.width - x, image.height - y))

    return crop


CHANGES: dict[str, Callable[[Image.Image], Image.Image]] = {
    "JPEG of quality 40": recompressed,
    "half the size": lambda image: image.resize((image.width // 2, image.height // 2)),
    "10 % brighter": lambda image: image.point(lambda value: min(255, round(1.1 * value))),
    "2 % cut off on the left": lambda image: image.crop((round(0.02 * image.width), 0, *image.size)),
    "2 % cut off on each side": cropped(0.02),
    "5 % cut off on each side": cropped(0.05),
    "mirrored": lambda image: image.transpose(Image.Transpose.FLIP_LEFT_RIGHT),
}


def candidate(number: int, look: str, label: int = 0) -> ImageCandidate:
    return ImageCandidate(
        name=f"{number}", label=label, split="train", key=f"{number}", width=256, height=256, appearance=look
    )


def pairs(looks: Iterable[tuple[str, int]]) -> list[tuple[int, int]]:
    """The labels of all pairs that look the same; a look comes with its label."""
    search = near_duplicates._Search([candidate(number, *look) for number, look in enumerate(looks)])
    members = search.candidates
    return [
        (members[one].label, members[other].label)
        for left, right, _ in search.pairs()
        for one, other in zip(left.tolist(), right.tolist(), strict=True)
    ]


def of_photos(folder: Path, size: int) -> None:
    files = sorted(file for file in folder.rglob("*") if file.suffix.lower() in (".jpg", ".jpeg", ".png"))
    labels = {parent: number for number, parent in enumerate(dict.fromkeys(file.parent.name for file in files))}
    looks, spent = [], dict.fromkeys(("decode", "resize", "encode", "content key", "how it looks"), 0.0)
    found = dict.fromkeys(CHANGES, 0)
    for number, file in enumerate(files):
        marks = [time.perf_counter()]
        image = preprocessing.decode(file.read_bytes(), max_pixels=MOST_PIXELS)
        marks.append(time.perf_counter())
        square = stored(image, size)
        marks.append(time.perf_counter())
        preparation.encode_square(square, "jpeg", 95)
        marks.append(time.perf_counter())
        preparation.content_key(image)
        marks.append(time.perf_counter())
        look = appearance(square, min(image.size))
        marks.append(time.perf_counter())
        for name, (start, end) in zip(spent, itertools.pairwise(marks), strict=True):
            spent[name] += end - start
        looks.append((look, labels[file.parent.name]))
        if number % 5 == 0:
            for name, change in CHANGES.items():
                changed = change(image)
                found[name] += len(pairs([(look, 0), (appearance(stored(changed, size), min(changed.size)), 0)]))
    total = sum(spent.values())
    print(f"\n{len(files):,} photos of {len(labels)} classes, stored at {size} pixels\n")
    for name, seconds in spent.items():
        print(f"{name:28} {1e3 * seconds / len(files):7.3f} ms an image, {seconds / total:6.1%}")
    print()
    for name, count in found.items():
        print(f"{name:28} {count / -(-len(files) // 5):7.1%} found")
    start = time.perf_counter()
    alike = pairs(looks)
    seconds = time.perf_counter() - start
    others = sum(one != other for one, other in alike)
    print(
        f"\n{len(alike)} pairs look the same, {others} of them of different classes; search: {seconds / total:.2%} of the rest"
    )


def of_digits() -> None:
    digits = load_digits()
    gray = (digits.images * (255 / 16)).round().astype(np.uint8)
    squares = (stored(Image.fromarray(image).convert("RGB"), 32) for image in gray)
    with mock.patch.object(near_duplicates, "SMALLEST_EDGE", 8):
        looks = [appearance(square, 8) for square in squares]
    alike = pairs(list(zip(looks, map(int, digits.target), strict=True)))
    others = sum(one != other for one, other in alike)
    print(
        f"\ndigits of 8 pixels, were they compared: {len(alike)} pairs look the same, {others} of them of different classes"
    )


def of_many(count: int) -> None:
    generator = np.random.default_rng(0)
    hashes = generator.integers(0, 2**64, count, dtype=np.uint64)
    burst = hashes[: count // 10].reshape(-1, 5)
    burst[:, 1:] = burst[:, :1] ^ (np.uint64(1) << generator.integers(0, 64, burst[:, 1:].shape, dtype=np.uint64))
    members = [candidate(number, f"{value:016x}" + "80" * 48) for number, value in enumerate(hashes.tolist())]
    tracemalloc.start()
    start = time.perf_counter()
    search = near_duplicates._Search(members)
    found = sum(len(left) for left, *_ in search.pairs())
    seconds, (_, peak) = time.perf_counter() - start, tracemalloc.get_traced_memory()
    tracemalloc.stop()
    print(f"\n{count:,} looks: {found:,} pairs in {seconds:.1f} s, {peak / 1e6:,.0f} MB; complete: {search.complete}")


def of_labels() -> None:
    print("\none label in twenty was changed")
    digits = load_digits()
    labels, wrong = change_labels(digits.target, seed=0)
    pixels = digits.data.astype(np.float32)
    for count in (600, 1200):
        train, val = slice(0, count), slice(count, None)
        logits, _ = cross_validated(pixels[train], labels[train], pixels[val], labels[val], 10)
        found = contradicted(logits, labels[train])
        hits, there = wrong[train][found.rows], wrong[train].sum()
        print(
            f"{count} digits: {len(hits)} listed of {there} wrong ones; precision {hits.mean():.0%} (by chance {there / count:.0%}), "
            f"recall {hits.sum() / there:.0%} (by chance {len(hits) / count:.0%}); of the first twenty {hits[:20].mean():.0%} are wrong"
        )


def of_teachers(folder: Path, all_steps: list[int]) -> None:
    """The labels that small teachers contradict which were trained on wrong ones, for few and for many steps."""
    print("\nthe same, by teachers that were trained on the changed labels of train")
    labels, wrong = change_labels(load_digits().target.astype(np.int64), seed=1)
    write_dataset(folder / "dataset", labels)
    settings = EvaluateSettings(latency_runs=10, latency_batch_sizes=(1,), label_issues="all")
    for steps in all_steps:
        teacher = folder / f"teacher-{steps}"
        write_model(teacher, dim=48, depth=2, steps=steps, target=labels)
        made = evaluate.run(
            settings, dataset=folder / "dataset", teacher=teacher, student=teacher, evaluation=folder / f"{steps}"
        )
        with (made.path / evaluate.LABEL_ISSUES).open(newline="") as file:
            rows = [(row["split"] == "train", int(row["path"].removeprefix("digits/"))) for row in csv.DictReader(file)]
        for name, of_train in (("train", True), ("val and test", False)):
            judged = [index for split in (["train"] if of_train else ["val", "test"]) for index in IMAGES[split]]
            listed, there = {index for train, index in rows if train == of_train}, set(np.flatnonzero(wrong[judged]))
            hits, count = sum(wrong[index] for index in listed), len(there)
            print(
                f"{steps:5} steps, {name:12}: {len(listed)} listed of {count} wrong ones; precision {hits / max(len(listed), 1):.0%} (by "
                f"chance {count / len(judged):.0%}), recall {hits / count:.0%} (by chance {len(listed) / len(judged):.0%})"
            )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--photos", type=Path, help="folder with a folder of photos for each class; otherwise made-up ones"
    )
    parser.add_argument("--size", type=int, default=256)
    parser.add_argument("--per-class", type=int, default=40)
    parser.add_argument("--looks", type=int, default=1_000_000)
    parser.add_argument("--steps", type=int, nargs="+", default=[100, 1000], help="of the teachers that judge labels")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        photos = options.photos or write_photos(Path(folder), classes=4, per_class=options.per_class)
        of_photos(photos, options.size)
        of_digits()
        of_many(options.looks)
        of_labels()
        of_teachers(Path(folder), options.steps)


if __name__ == "__main__":
    main()
