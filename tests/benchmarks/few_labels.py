"""Write a manifest in which few photos keep their label: `python tests/benchmarks/few_labels.py FOLDER MANIFEST [--labels N|all]`.

FOLDER holds a folder a class, and lies beside MANIFEST or below. Of each class the photos that `--test` lists, or has in a folder a class,
are for testing; of the others `--val` are for validation, `--labels` are labeled, and the rest are without a label. The hashes of their
names decide which, so all who have the same files have the same splits, whatever the files' format.

    python tests/benchmarks/few_labels.py food_mnist/images few.csv --test food_mnist/meta/test.txt
    python tests/benchmarks/few_labels.py imagenette/train few.csv --test imagenette/val
"""

from __future__ import annotations

import argparse
import csv
import hashlib
from collections import Counter
from collections.abc import Iterator
from pathlib import Path


def rows(folder: Path, held_out: set[str], labels: int | None, val: int) -> Iterator[tuple[str, str, str]]:
    """Yield path, label and split of each photo; `held_out` has the test photos as CLASS/NAME without the suffix."""
    for of_class in sorted(path for path in folder.iterdir() if path.is_dir()):
        files = [*of_class.iterdir()]
        names = {f"{of_class.name}/{path.stem}": path for path in files}
        if len(names) < len(files):
            raise SystemExit(f"{of_class}: two photos differ by their suffix alone; remove one of them")
        for name in sorted(names.keys() & held_out):
            yield str(names[name]), of_class.name, "test"
        rest = sorted(names.keys() - held_out, key=lambda name: hashlib.sha256(name.encode()).hexdigest())
        last = len(rest) if labels is None else val + labels
        if len(rest) < max(last, val + 1):
            wanted = "all" if labels is None else labels
            raise SystemExit(f"{of_class}: has {len(rest)} photos for --val {val} and --labels {wanted}; ask for fewer")
        for place, name in enumerate(rest):
            split = "val" if place < val else "train" if place < last else "unlabeled"
            yield str(names[name]), "" if split == "unlabeled" else of_class.name, split


def main() -> None:
    """Write the manifest, and print the size of each split."""
    parser = argparse.ArgumentParser(description="Keep the labels of few photos.")
    parser.add_argument("folder", type=Path, help="with a folder a class")
    parser.add_argument("manifest", type=Path, help="CSV file to write")
    parser.add_argument(
        "--labels",
        type=lambda text: None if text == "all" else int(text),
        default=10,
        help="a class, or `all` (default: %(default)s)",
    )
    parser.add_argument("--val", type=int, default=20, help="photos a class for validation (default: %(default)s)")
    parser.add_argument(
        "--test",
        type=Path,
        metavar="PLACE",
        help="a file that lists the test photos, CLASS/NAME without suffix, one a line; or a folder with a folder a class",
    )
    options = parser.parse_args()
    folder, beside = options.folder.resolve(), options.manifest.resolve().parent
    if missing_places := [place for place in (folder, options.test) if place and not place.exists()]:
        raise SystemExit(
            f"{missing_places[0]}: does not exist; name the photos' folder, and what lists the test photos"
        )
    held_out, apart = set[str](), list[Path]()
    if options.test and options.test.is_dir():
        apart = sorted(options.test.resolve().glob("*/*"))
    elif options.test:
        held_out = set(options.test.read_text(encoding="utf-8").split())
    for place in (folder, *apart[:1]):
        if not place.is_relative_to(beside):
            raise SystemExit(f"{options.manifest}: write it beside {place} or above, so that its paths can be relative")
    found = [
        *rows(folder, held_out, options.labels, options.val),
        *((str(path), path.parent.name, "test") for path in apart),
    ]
    written = [(str(Path(path).relative_to(beside)), label, split) for path, label, split in found]
    if missing := held_out - {f"{Path(path).parent.name}/{Path(path).stem}" for path, *_ in written}:
        raise SystemExit(
            f"{options.test}: {len(missing)} of its photos are not in {options.folder}, first {min(missing)}"
        )
    with options.manifest.open("w", encoding="utf-8", newline="") as file:
        csv.writer(file).writerows([("path", "label", "split"), *written])
    print(", ".join(f"{count:,} {split}" for split, count in Counter(split for *_, split in written).items()))


if __name__ == "__main__":
    main()
